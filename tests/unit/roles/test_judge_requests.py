"""A judge on ranks beside the rollout's reads responses while others are generated; the bytes stay the same."""

from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.comm.announcements import ResponseSender
from megarl.data.prompt import Prompt
from megarl.errors import UsageError
from megarl.groups import PromptGroups
from megarl.mcore.inference.generation import Completion
from megarl.observe.timers import Timers
from megarl.rewards.judge.config import read_config
from megarl.roles.judge_requests import ArrivingResponses, JudgedText, Judgement, JudgeRequests
from megarl.roles.reward import Reward
from megarl.rollout.rollout import Rollout
from tests.helpers.envs.judges import judge_flags, write
from tests.helpers.programs import metrics, rl_argv, rows_of, samples, timeless, train
from tools import record_runs

BESIDE = "--role-map actor=0;critic=0;reference=0;reward=1"
COMPARED = "--samples-per-prompt 3 --minibatch-size 6 --judge-max-length 160 --reward-max-failures 1"
PAIR = {"mode": "pair", "messages": [{"role": "user", "content": "{first}{second}="}]}
GROUP = {"mode": "group", "messages": [{"role": "user", "content": "{responses}="}], "number": {"regex": "[0-9]"}}
LAG = "--generation-lag 1 --rollout-correction tis --train-iters 3"
SUMS = ("--environment tests.helpers.envs.sum_environments:Sums --max-response-length 48 --max-turn-length 4"
        " --max-tokens-per-microbatch 100 --judge-max-length 120 --reward-max-failures 1")  # fmt: skip
ROUNDS = "--advantage grpo --group-filter reward --dynamic-sampling --max-sampling-rounds 3"
RUNS = {  # ranks, changes of the judge's file, flags
    "each response": (2, {}, BESIDE),
    "pairs, two replicas of the judge": (3, PAIR, f"{COMPARED} {BESIDE}-2"),
    "groups, tensor parallelism": (3, GROUP, f"{COMPARED} {BESIDE}-2 --reward-tensor-model-parallel-size 2"),
    "rounds and a filter": (2, {}, f"{ROUNDS} --role-map actor=0;reference=0;reward=1"),
    "greedy baselines": (2, {}, "--advantage remax --greedy-baseline --role-map actor=0;reference=0;reward=1"),
    "ahead, beside the rollout": (3, {}, f"{LAG} --role-map actor=0;critic=0;reference=0;rollout=1;reward=2"),
    "ahead, on the actor's ranks": (3, PAIR, f"{COMPARED} {LAG} --role-map actor=0;critic=0;reference=0;reward=0;"
                                    "rollout=1-2"),
    "episodes": (2, PAIR, f"{SUMS} {COMPARED} --judge-max-length 300 {BESIDE}"),
    "two replicas of the rollout": (3, {}, "--role-map actor=0-1;critic=0-1;reference=2;reward=2 --reward-offload"
                                    " --rollout-prefix-caching"),
}  # fmt: skip


def recorded(folder: Path, name: str, tmp_path: Path, replay: str = "") -> dict:
    """Digests of a run in which a judge reads the responses early, or as `megarl` is patched."""
    size, changes, flags = RUNS[name]
    config = write(tmp_path / "judge.yaml", **changes)
    train("rl", rl_argv(folder, judge_flags(config, f"{flags} --save-interval 1 {replay}", "judge")), size)
    assert all(row["judgements"] for row in rows_of(folder) if not row.get("failed"))
    return {name: record_runs.record(folder)}


def afterwards(monkeypatch):
    """Has judges wait for the end of the rollout, as on the rollout's own ranks."""
    monkeypatch.setattr(Reward, "judge_early", lambda *args: None)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_the_bytes_are_those_of_judging_after_the_rollout(name, tmp_path, monkeypatch):
    early = recorded(tmp_path / "early", name, tmp_path)
    afterwards(monkeypatch)
    assert not record_runs.differences(early, recorded(tmp_path / "after", name, tmp_path))


@pytest.mark.long
def test_a_recorded_schedule_is_judged_early(tmp_path, monkeypatch):
    flags = f"{LAG} --generation-schedule recorded --kl-coefficient 0 --advantage grpo --lr 1e-4"
    monkeypatch.setitem(RUNS, "schedule", (3, {}, f"{flags} --role-map actor=0;rollout=1;reward=2"))
    recorded(tmp_path / "clock", "schedule", tmp_path)
    monkeypatch.setitem(RUNS, "schedule", (3, {}, RUNS["schedule"][2].replace("--generation-schedule recorded", "")))
    replay = f"--replay-schedule {tmp_path}/clock"
    early = recorded(tmp_path / "early", "schedule", tmp_path, replay)
    afterwards(monkeypatch)
    assert not record_runs.differences(early, recorded(tmp_path / "after", "schedule", tmp_path, replay))


def test_the_judge_has_begun_before_the_rollout_ends(tmp_path, monkeypatch):
    """The last response is held back until the judge has ended a judgement; the events then have that order."""
    send, ended, generate, events = ResponseSender.send, JudgeRequests.ended, Rollout.generate, tmp_path / "events"

    def note(event: str):
        with open(events, "a") as file:
            file.write(f"{event}\n")

    def held(sender, sequence, tokens):
        if len(sender._sent) == 11 and sequence not in sender._sent:
            dist.distributed_c10d._get_default_store().wait(["judged"])
        send(sender, sequence, tokens)

    def judged(requests, *args):
        ended(requests, *args)
        note("judged")
        dist.distributed_c10d._get_default_store().set("judged", "1")

    def generated(rollout, *args, **kwargs):
        batch = generate(rollout, *args, **kwargs)
        if batch is not None:
            note("generated")
        return batch

    for owner, name, function in ((ResponseSender, "send", held), (JudgeRequests, "ended", judged),
                                  (Rollout, "generate", generated)):  # fmt: skip
        monkeypatch.setattr(owner, name, function)
    argv = rl_argv(tmp_path / "run", judge_flags(write(tmp_path / "judge.yaml"), BESIDE, "judge"))
    train("rl", argv, 2)
    order = events.read_text().split()
    assert order.index("judged") < order.index("generated")
    assert order.count("judged") == sum(len(row["judgements"]) for row in rows_of(tmp_path / "run"))  # each once
    events.unlink()
    afterwards(monkeypatch)
    monkeypatch.setattr(ResponseSender, "send", send)
    train("rl", [str(tmp_path / "other") if token == str(tmp_path / "run") else token for token in argv], 2)
    assert events.read_text().split()[0] == "generated"
    runs = [tmp_path / name for name in ("run", "other")]
    assert len({samples(run, 1) for run in runs}) == 1
    assert timeless(metrics(runs[0])[1]) == timeless(metrics(runs[1])[1])


class Queue:
    """Messages that come in batches: between two of them `has_next` says once that there is none."""

    def __init__(self, *batches):
        self.batches, self.is_closed = [list(batch) for batch in batches], False

    def has_next(self):
        return bool(self.batches[0]) or self.batches.pop(0) is None

    def take(self):
        sequence, tokens = self.batches[0].pop(0)
        return {"sequence": sequence, "tokens": tokens}

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("together, expected", [
    (False, [[[0]], [[5], [3]], [[2]], [], []]),
    (True, [[], [], [[0, 2]], [[3, 5]], []]),
])  # fmt: skip
def test_what_arrives_without_episodes_that_failed(together, expected):
    """Of the first two groups of three the second response failed, of the third group two; the fourth has no judge."""
    queue = Queue(
        [(0, [1])], [(5, [1]), (3, [1]), (6, None)], [(1, None), (2, [9]), (9, [2])], [(4, None), (7, None)],
        [(10, [1]), (11, None)],
    )  # fmt: skip
    arriving = ArrivingResponses(
        queue, 11, [Prompt(10), Prompt(11), Prompt(12), None], PromptGroups.equal(4, 3), repr, together
    )
    found = []
    while not arriving.is_done:
        assert not queue.is_closed
        found.append(arriving.receive())
    assert queue.is_closed and not queue.batches[0]
    assert [[[text.sequence for text in texts] for texts in call] for call in found] == expected
    texts = {text.sequence: (text.prompt.index, text.text) for call in found for texts in call for text in texts}
    assert texts == {0: (10, "[1]"), 2: (10, "[9]"), 3: (11, "[1]"), 5: (11, "[1]")}


class Alone:
    """The only rank of a replica."""

    is_leader, replica = True, (0,)

    def broadcast_object(self, item):
        return item

    broadcast_number = broadcast_object


class Words:
    """Prompts of a judge: a token for each character; a judgement is the text of its tokens."""

    def tokens(self, prompt, texts) -> list[int]:
        if "" in texts:
            raise UsageError("nothing to read")
        return [*map(ord, prompt.answer + "|".join(texts))]

    def text(self, tokens) -> str:
        return "".join(map(chr, tokens))


def requests_of(folder: Path, mode: str) -> JudgeRequests:
    changes = {"single": {}, "pair": PAIR}[mode]
    config = read_config(str(write(folder / "judge.yaml", **{"samples": 1, "retries": 1, **changes})))

    def read(text: str, count: int) -> Judgement:
        return text, config.numbers(text, count)

    return JudgeRequests(config, Words(), Alone(), read, seed=1, step=2, timers=Timers())


def texts_of(*texts: str) -> list[JudgedText]:
    return [JudgedText(4 + i, Prompt(7, answer="a"), text) for i, text in enumerate(texts)]


def written(text: str) -> Completion:
    return Completion([*map(ord, text)], [0.0] * len(text), True)


def test_a_judgement_without_a_number_is_asked_for_again_as_soon_as_there_is_room(tmp_path):
    requests = requests_of(tmp_path, "single")
    requests.ask(texts_of("x", "y", ""), [], {})
    assert requests.has_ready
    ((first, one),) = requests.take(1)
    ((second, two),) = requests.take(1)
    assert not requests.take(1) and not requests.is_empty()
    assert (one.prompt, two.prompt) == ([*b"ax"], [*b"ay"]) and one.key != two.key
    requests.ended(second, written("5"))
    requests.ended(first, written("none"))
    ((third, again),) = requests.take(8)
    assert again.prompt == one.prompt and again.key != one.key and not requests.is_empty()
    requests.ended(third, written("still none"))
    assert not requests.take(8) and requests.is_empty()
    found = list(requests.answers.values())
    assert [[numbers for _, numbers in answer.judgements] for answer in found] == [[None, None], [[5.0]], []]
    assert [answer.problem for answer in found] == [None, None, "nothing to read"] and requests.tokens == 1 + 4 + 10


def test_what_was_judged_of_the_same_responses_is_not_asked_again(tmp_path):
    early = requests_of(tmp_path, "pair")
    early.ask(texts_of("x", "y"), [[0, 1]], {})
    for number, _ in early.take(8):
        early.ended(number, written("99"))
    later = requests_of(tmp_path, "pair")
    later.ask(texts_of("x", "y"), [[0, 1]], early.answers)
    assert not later.has_ready and [len(answer.judgements) for answer in later.answers.values()] == [1, 1]
    other = requests_of(tmp_path, "pair")
    other.ask(texts_of("x", "z"), [[0, 1]], early.answers)  # of another text of the same number
    assert other.has_ready and not any(answer.judgements for answer in other.answers.values())
