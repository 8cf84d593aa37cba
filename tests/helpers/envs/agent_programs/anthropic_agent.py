"""Two requests with Anthropic's SDK, the second one streamed."""

import sys

import anthropic

client = anthropic.Anthropic()
messages = [{"role": "user", "content": sys.argv[1]}]
schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
tools = [{"name": "add", "description": "Adds.", "input_schema": schema}]
answer = client.messages.create(model="policy", max_tokens=8, messages=messages, tools=tools)
calls = [block for block in answer.content if block.type == "tool_use"]
results = [{"type": "tool_result", "tool_use_id": call.id, "content": "43"} for call in calls]
messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results or "more"}]
with client.messages.stream(model="policy", max_tokens=8, messages=messages, tools=tools) as stream:
    text = "".join(stream.text_stream)
print("asked", len(calls), text, stream.get_final_message().usage.output_tokens)
