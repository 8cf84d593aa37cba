"""The program of `environments.py`: asks for as many turns as its task says. Imports nothing that loads slowly."""

import json
import os
import random
import sys
import time
import urllib.request


def main(file: str):
    """Asks until it has its turns, or one is cut."""
    with open(file, encoding="utf-8") as opened:
        task = json.load(opened)
    messages = list(task["messages"])
    for _ in range(task["metadata"]["turns"]):
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"model": "policy", "messages": messages}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)["choices"][0]
        if answer["finish_reason"] == "length":
            return
        time.sleep(task["metadata"]["sleep"] * 2 * random.SystemRandom().random())
        messages += [
            {"role": "assistant", "content": answer["message"]["content"]},
            {"role": "user", "content": task["metadata"]["observation"]},
        ]


if __name__ == "__main__":
    main(sys.argv[1])
