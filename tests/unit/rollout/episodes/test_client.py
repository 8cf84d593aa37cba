"""The client between rounds: environments that continue, and those that are made again because they have seen more."""

import contextlib
import itertools
import json

from megarl.data.prompt import Prompt
from megarl.environments.pool import PoolOptions
from megarl.environments.protocol import Task
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout.episodes.client import EnvironmentClient, PlayedTurns
from megarl.rollout.episodes.episode import EpisodeLimits
from tests.helpers.envs.odd_environments import HERE
from tests.helpers.waiting import SAFETY_SECONDS

PROMPT, TASK = Prompt(0, "a"), Task([])


class Letters:
    """Stands where `TurnTokens` does: a token is a letter."""

    def text(self, tokens) -> str:
        return "".join(map(chr, tokens))

    def marked_text(self, tokens, marks) -> str | None:
        """Letters in capitals are marks that are special tokens: the first of the marks."""
        found = "".join(next(iter(marks)) if chr(token) == "A" else chr(token) for token in tokens)
        return found if ord("A") in tokens else None

    def first_prompt(self, messages, tools) -> list[int]:
        return [len(tools)]

    def bridge(self, messages) -> list[int]:
        return list(map(ord, messages[0]["content"]))


@contextlib.contextmanager
def clients(count: int, environment: str = "Echo", parser: str = "hermes"):
    options = PoolOptions(1, SAFETY_SECONDS, 0, parser, f"{HERE}:{environment}")
    made = [EnvironmentClient(options, Letters(), EpisodeLimits(9, 9, 99), 9, None, 0, 1) for _ in range(count)]
    try:
        made[0].begin(0, PROMPT, GenerationRequest([1], 0, 0), TASK, "k")
        yield made
    finally:
        for client in made:
            client.close()


def answered(client: EnvironmentClient, number: int, text: str) -> str:
    """What the environment of an episode says to a turn; no other result comes."""
    client.step(number, list(map(ord, text)))
    return Letters().text(only_result(client, number).tokens)


def only_result(client: EnvironmentClient, number: int):
    for _ in itertools.count():
        client.wait(1.0)
        if results := client.results():
            (result,) = results
            assert result.number == number and not result.failed
            return result


def turns(*texts: str) -> list[list[int]]:
    return [list(map(ord, text)) for text in texts]


def test_an_environment_goes_on_or_is_brought_to_where_the_episode_was_cut():
    with clients(1) as (client,):
        only_result(client, 0)
        assert [answered(client, 0, text) for text in ("a", "b")] == ["0: a", "1: b"]
        slot = client._round[0].slot
        client.keep(0, "k", turns=2)
        client.go_on(5, PROMPT, TASK, "k", turns("a", "b"))
        assert answered(client, 5, "c") == "2: c" and client._round[5].slot == slot, "the same environment"
        client.step(5, [ord("d")])  # its answer is not read any more
        client.keep(5, "k", turns=3)
        assert [seen.messages[0]["content"] for seen in client.kept["k"].observations] == ["0: a", "1: b", "2: c"]
        client.go_on(5, PROMPT, TASK, "k", turns("a", "b", "c"))
        assert answered(client, 5, "e") == "3: e" and client._round[5].slot != slot
        client.keep(5, "k", turns=1)  # also answers that were read are undone
        client.go_on(5, PROMPT, TASK, "k", turns("a"))
        assert answered(client, 5, "f") == "1: f"
        assert [turn.text for turn in client.take_played(5).turns] == ["a", "f"]


def test_a_checkpoint_brings_answers_and_what_was_kept_can_be_forgotten():
    with clients(2) as (client, other):
        only_result(client, 0)
        answered(client, 0, "a")
        client.keep(0, "k", turns=1)
        other.kept["k"] = PlayedTurns(observations=client.kept["k"].observations, sent=1)
        client.forget("k")
        assert "k" not in client.kept and not client.pool._episodes
        other.go_on(3, PROMPT, TASK, "k", turns("a"))
        assert answered(other, 3, "b") == "1: b"
        played = other.take_played(3)
        assert len(played.turns) == len(played.observations) == 2 and not other.pool._episodes


def test_turns_are_read_with_the_tools_of_the_reset_also_after_a_checkpoint():
    text = "A<function=f><parameter=s>5</parameter><parameter=x>5</parameter>"  # <tool_call> is a special token
    wanted = json.dumps([text, ["call_%d_0", "f", {"s": "5", "x": 5}]])
    with clients(2, "Typed", "qwen3-coder") as (client, other):
        assert only_result(client, 0).tokens == [1]
        assert answered(client, 0, text) == wanted % 0
        client.keep(0, "k", turns=1)
        kept = client.kept["k"]
        other.kept["k"] = PlayedTurns(observations=kept.observations, tools=kept.tools, sent=1)
        client.forget("k")
        assert "k" not in client.kept
        other.go_on(3, PROMPT, TASK, "k", turns(text))
        assert answered(other, 3, text) == wanted % 1  # the environment has checked its first answer, too
        assert [turn.calls[0].arguments for turn in other.take_played(3).turns] == [{"s": "5", "x": 5}] * 2
