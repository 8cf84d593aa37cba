"""Conversations for chat templates, and what supervised examples of them must be."""

import itertools

from megarl.data.messages import template_message, tool_call

USER, MORE = {"role": "user", "content": "what"}, {"role": "user", "content": "and"}
ANSWER, LAST = {"role": "assistant", "content": "so"}, {"role": "assistant", "content": "well"}
THINKING = {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nso"}
REASONING = {"role": "assistant", "content": "so", "reasoning_content": "hmm"}
TOOLS = [{"type": "function", "function": {
    "name": "look", "description": "Looks.",
    "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "it"}}, "required": ["x"]},
}}]  # fmt: skip


def calls(count: int) -> dict:
    """A turn that calls so many tools."""
    made = [tool_call(f"look{number:05}", "look", {"x": str(number)}) for number in range(count)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(number: int) -> dict:
    return {"role": "tool", "content": f"r{number}", "tool_call_id": f"look{number:05}", "name": "look"}


CONVERSATIONS = {
    "one turn": [USER, ANSWER],
    "two turns": [USER, ANSWER, MORE, LAST],
    "without a last answer": [USER, ANSWER, MORE],
    "thoughts in contents": [USER, THINKING, MORE, THINKING],
    "thoughts apart": [USER, REASONING, MORE, REASONING],
    "a call": [USER, calls(1), result(0), ANSWER],
    "two calls": [USER, calls(2), result(0), result(1), ANSWER, MORE, LAST],
}


def trained_turns(sequences) -> list[tuple[list[int], list[int]]]:
    """(tokens before it, its tokens) of each masked run of the sequences."""
    found = []
    for ids, mask in sequences:
        start = 0
        for is_turn, run in itertools.groupby(mask):
            end = start + len(list(run))
            if is_turn:
                found.append((ids[:start], ids[start:end]))
            start = end
    return found


def check_conversation(encoder, messages: list[dict], tools: list | None) -> list[str]:
    """Every turn follows what the policy would read, once, and ends with an end token alone. Their texts."""
    sequences = encoder.conversation(messages, tools)
    found, tokenizer = trained_turns(sequences), encoder.tokenizer
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(found) == len(numbers) and all(True in mask for _, mask in sequences)
    texts = []
    for number, (before, turn) in zip(numbers, found, strict=True):
        assert before == encoder.chat_prompt(messages[:number], tools)
        assert turn[-1] in tokenizer.end_ids and not set(turn[:-1]) & {*tokenizer.end_ids}
        texts.append(tokenizer.decode(turn))
        said = template_message(messages[number])["content"].split("</think>")[-1].strip()
        assert said in texts[-1] and all(call["function"]["name"] in texts[-1]
                                         for call in messages[number].get("tool_calls", ()))  # fmt: skip
    return texts
