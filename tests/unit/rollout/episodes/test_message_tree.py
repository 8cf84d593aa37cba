"""Which turn an agent's request continues, the tokens of its prompt, and budgets, with published kinds of templates."""

import pytest

from megarl.data.prompt import Prompt
from megarl.data.turns import TurnTokens
from megarl.environments.calls import CONTEXT_LENGTH, Ask, Reply
from megarl.environments.protocol import HERMES
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout.episodes.episode import EpisodeLimits, TurnRequest, turn_key
from megarl.rollout.episodes.message_tree import MessageTree
from tests.helpers.texts.chat_encoders import template_encoders

USER = {"role": "user", "content": "Hello world"}
TOOL = {"type": "function", "function": {
    "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}}  # fmt: skip
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 42}}\n</tool_call>'


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return template_encoders(tmp_path_factory.mktemp("templates"))


class Played:
    """A tree, and an agent whose requests are answered with given texts."""

    def __init__(self, encoder, turns=9, response=400, prompt=60):
        self.encoder = encoder
        turn_tokens = TurnTokens(encoder, 50)
        limits = EpisodeLimits(turns, 60, response, encoder.tokenizer.end_ids)
        line = Prompt(0, "Hello world")
        self.tree = MessageTree(
            3, GenerationRequest(encoder.prompt(line), 17, 0), line, turn_tokens, HERMES, limits, prompt
        )
        self.requests, self.ticket = 0, 1

    def ask(self, messages, tools=None, **fields):
        self.requests += 1
        return self.tree.request((self.ticket, self.requests), Ask(messages, tools, **fields))

    def turn(self, messages, text, tools=None, **fields) -> tuple[TurnRequest, dict]:
        """(the request for a turn, the assistant's message), after the policy has written `text` and ended it."""
        asked = self.ask(messages, tools, **fields)
        assert isinstance(asked, TurnRequest)
        ((_, reply),) = self.write(asked, text)
        return asked, reply.message

    def write(self, asked, text, finished=True):
        tokens = [*self.encoder.tokenizer.encode(text), *([self.encoder.tokenizer.eos_id] if finished else [])]
        return self.tree.write(asked.turn, tokens, [-0.5] * len(tokens), finished)

    def prompt(self, number) -> list[int]:
        return self.tree._turns[number].prompt


def test_a_conversation_is_one_row_whose_tokens_are_those_that_were_written(encoders):
    played = Played(encoders["hermes"])
    first, message = played.turn([USER], f"12 {CALL}", [TOOL])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "name": "add", "content": "42"}
    sent = {**message, "content": message["content"] + " ", "refusal": None, "id": "as clients send it back"}
    second, _ = played.turn([USER, {key: sent[key] for key in ("role", "content", "tool_calls")}, result], "42", [TOOL])
    assert (first.parent, second.parent) == (None, 0) and played.tree.rewritten == 0
    whole = played.tree._turns[0]
    assert played.prompt(1) == [*whole.row, *second.tokens]
    bridge = TurnTokens(encoders["hermes"], 50).bridge([result])
    assert second.tokens == bridge
    assert first.key == turn_key(17, whole.prompt) and second.key == turn_key(17, played.prompt(1))


def test_the_first_request_for_the_lines_messages_has_the_lines_tokens(encoders):
    played = Played(encoders["hermes"])
    asked, _ = played.turn([USER], "12")
    assert asked.tokens == encoders["hermes"].prompt(Prompt(0, "Hello world"))


def test_concurrent_requests_do_not_depend_on_their_order(encoders):
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        played = Played(encoders["hermes"])
        _, message = played.turn([USER], "12")
        asks = [[USER, message, {"role": "user", "content": text}] for text in ("42", "12", "42")]
        keys = sorted((asks[number][-1]["content"], played.ask(asks[number]).key) for number in order)
        found.append(keys)
    assert found[0] == found[1]
    assert len({key for _, key in found[0]}) == 3, "equal requests have streams of their own"


@pytest.mark.parametrize("change", ["summary", "edited turn", "edited user"])
def test_a_changed_history_begins_a_row(change, encoders):
    played = Played(encoders["hermes"])
    _, message = played.turn([USER], "the world")
    changed = {
        "summary": [{"role": "user", "content": "the world, in short"}],
        "edited turn": [USER, {**message, "content": "the user"}, {"role": "user", "content": "12"}],
        "edited user": [{**USER, "content": "Hello"}, message, {"role": "user", "content": "12"}],
    }[change]
    asked, _ = played.turn(changed, "42")
    assert asked.parent is None
    assert asked.tokens == encoders["hermes"].chat_prompt(changed)
    assert played.tree.rewritten == (change == "edited user"), "only this one has a turn of the policy"


def test_a_template_that_drops_thoughts_begins_a_row_after_a_user_and_none_after_a_tool(encoders):
    encoder = encoders["qwen3"]
    played = Played(encoder, response=2000)
    _, message = played.turn([USER], f"<think>\nthe\n</think>\n\n{CALL}", [TOOL])
    assert message["reasoning_content"] == "the"
    sent = {key: message[key] for key in ("role", "content", "tool_calls")}  # clients drop thoughts
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    second, answer = played.turn([USER, sent, result], "<think>\n12\n</think>\n\n42", [TOOL])
    assert second.parent == 0
    history = [USER, sent, result, {"role": "assistant", "content": answer["content"]}, USER]
    third, _ = played.turn(history, "12", [TOOL])
    assert third.parent is None and played.tree.rewritten == 1
    assert third.tokens == encoder.chat_prompt(history, [TOOL])


def test_budgets_are_errors_that_clients_know(encoders):
    played = Played(encoders["hermes"], turns=2)
    history = [USER]
    for text in ("12", "42"):
        _, message = played.turn(history, text)
        history = [*history, message, USER]
    refused = played.ask(history)
    assert isinstance(refused, Reply) and refused.code == CONTEXT_LENGTH and "2 turns" in refused.error
    assert played.tree.is_truncated and len(played.tree.written) == 2
    short = Played(encoders["hermes"], response=4)
    first, message = short.turn([USER], "12", max_tokens=2)
    assert first.limit == 2
    assert short.ask([USER, message, USER]).is_budget, "the row has no room"
    assert short.ask([{"role": "user", "content": "Hello " * 80}]).is_budget


def test_all_rows_together_have_the_room_of_one_sequence(encoders):
    """A sequence of the batch is never longer than prompt and response may be."""
    played, total = Played(encoders["hermes"], response=60, prompt=30), 0
    for number in range(9):
        asked = played.ask([{"role": "user", "content": f"{number} Hello"}])
        if isinstance(asked, Reply):
            break
        total += len(asked.tokens) + asked.limit
        assert total <= 90
        played.write(asked, "12")
        total += len(played.tree._turns[-1].reply.tokens) - asked.limit
    assert number > 1 and asked.code == CONTEXT_LENGTH


def test_an_agent_that_runs_again_gets_what_it_has_asked_before(encoders):
    played = Played(encoders["hermes"])
    _, message = played.turn([USER], "12")
    waiting = played.ask([USER, message, USER])
    played.ask([{"role": "user", "content": "only once"}])
    played.ticket = 2
    assert played.ask([USER]).message == message, "at once"
    assert played.ask([USER, message, USER]) is None, "it is being written"
    ((place, _),) = played.write(waiting, "42")
    assert place[0] == 2, "nobody else waits for it"
    assert [turn.number for turn in played.tree.written] == [0, 1]


def test_a_cut_turn_is_closed_before_what_follows(encoders):
    encoder = encoders["hermes"]
    played = Played(encoder)
    asked = played.ask([USER], max_tokens=3)
    ((_, reply),) = played.write(asked, "12 42", finished=False)
    assert reply.finish == "length" and not reply.is_budget
    second = played.ask([USER, reply.message, USER])
    assert second.parent == 0 and second.tokens[0] in encoder.tokenizer.end_ids


def test_messages_that_the_template_refuses_are_an_error(encoders):
    played = Played(encoders["hermes"])
    refused = played.ask([USER, {"role": "tool", "tool_call_id": "of no call", "content": "42"}])
    assert isinstance(refused, Reply) and refused.turn is None and "template" in refused.error
