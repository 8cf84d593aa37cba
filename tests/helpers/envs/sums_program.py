"""The sums of `agents.py` as a program: knows nothing of megarl, and finds the policy by OpenAI's variables."""

import json
import random
import sys

from openai import OpenAI

task = json.load(open(sys.argv[1]))
client, draws, messages = OpenAI(), random.Random(task["seed"]), task["messages"]
for _ in range(3):
    choice = client.chat.completions.create(model="policy", messages=messages).choices[0]
    if choice.finish_reason == "length":
        break
    number = (draws.randrange(30) + len(choice.message.content)) % 30
    messages += [choice.message, {"role": "user", "content": f"+{number}="}]
