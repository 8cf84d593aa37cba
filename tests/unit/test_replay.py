"""`megarl.replay`: a saved response is generated again to the bit, and continues from a turn with another answer."""

import dataclasses
import functools
import json
import random
import re
import shutil
from pathlib import Path

import pytest

from megarl.environments.protocol import Task, Turn
from megarl.errors import UsageError
from megarl.replay import ReplayRequest, prepared
from tests.helpers.envs.sum_environments import Sums
from tests.helpers.programs import rl_argv, samples, train
from tests.helpers.rollout.replays import played
from tests.helpers.worlds import RankFailed

SHAPE = (
    "--advantage rloo --kl-coefficient 0 --max-turn-length 4 --max-response-length 18 --max-tokens-per-microbatch 100"
)
TURNS = f"{SHAPE} --environment tests.helpers.envs.sum_environments:Sums --max-turns 3"
RUNS = {  # flags; others are in tests/laws
    "turns": TURNS,
    "one turn and filter": "--advantage rloo --kl-coefficient 0 --dynamic-sampling --group-filter reward"
    " --reward tests.helpers.programs:coarse_reward",
    "agent with rows": f"{SHAPE} --environment tests.helpers.envs.agents:branching --max-turns 8"
    " --max-response-length 80 --max-prompt-length 20 --max-tokens-per-microbatch 400",
}
SAME = "the same tokens and log-probs"


@functools.cache
def saved(folder: Path, name: str) -> Path:
    save = folder / name.replace(" ", "-")
    train("rl", rl_argv(save, f"--train-iters 3 --save-interval 1 {RUNS[name]} --save-rollouts"))
    return save


def turns_of(text: str) -> list[str]:
    """What was written in each turn of a text, without special tokens."""
    return [re.sub("<.*?>", "", found) for found in re.findall(r"^turn \d+: .*\n    (.*)", text, re.MULTILINE)]


def test_a_saved_response_is_generated_again_and_shown(folder):
    run = saved(folder, "turns")
    status, text = played(run, ["--step", "3", "--sample", "3"])
    lines = [line for line in text.splitlines() if line.startswith("turn ")]
    assert status == 0 and lines and all(line.endswith(SAME) for line in lines), text
    row = json.loads(samples(run, 3).splitlines()[3])
    assert turns_of(text) == [turn["text"] for turn in row["turns"]]
    assert [*re.findall(r"^  user\n    (.*)", text, re.MULTILINE)][:2] == [
        turn["observation"] for turn in row["turns"][:2]
    ]


@pytest.mark.long
def test_other_tokens_are_named(folder):
    def change(asked: ReplayRequest) -> ReplayRequest:
        episode = asked.saved.episode
        tokens = list(episode.tokens)
        tokens[episode.turns[0][0]] ^= 1
        changed = dataclasses.replace(episode, tokens=tokens)
        return asked._replace(saved=asked.saved._replace(episode=changed))

    status, text = played(saved(folder, "turns"), ["--step", "2", "--sample", "3"], change=change)
    assert status == 1 and "other tokens from token 1 on" in text


@pytest.mark.long
def test_a_fork_with_the_same_answer_is_the_episode(folder):
    run, words = saved(folder, "turns"), ["--step", "2", "--sample", "3", "--from-turn", "1"]
    row = json.loads(samples(run, 2).splitlines()[3])
    status, text = played(run, [*words, "--answer", row["turns"][0]["observation"]])
    before, after = text.split("\nfork: ")
    assert status == 0 and before.count(SAME) == 3
    assert turns_of(after) == turns_of(before)[1:]
    assert before.splitlines()[-2:] == after.splitlines()[-2:]  # the last answer, and the end with all rewards


def test_a_fork_goes_on_with_the_live_environment(folder):
    """The environment has seen the turns of the record, then those of the fork; the policy reads the other answer."""
    run, words = saved(folder, "turns"), ["--step", "2", "--sample", "1", "--from-turn", "1", "--answer"]
    for answer in ("+8=", "+1="):
        _, text = played(run, [*words, answer])
        before, after = text.split("\nfork: ")
        assert after.splitlines()[1:3] == ["  user", f"    {answer}"]
        written = [turns_of(before)[0], *turns_of(after)]
        if "turn_length" not in after:
            break
    line = json.loads((run / "rollouts/step_00000002/manifest.json").read_text())["rounds"][0]["lines"][0]
    expected = answers_by_hand(run, line, written)
    shown = [*re.findall(r"^  user\n    (.*)", after, re.MULTILINE)][1:]
    assert shown and shown == expected[1 : 1 + len(shown)]


def answers_by_hand(run: Path, line: int, texts: list[str]) -> list[str]:
    """What `Sums` answers to these texts, in an episode of step 2."""
    import torch

    from megarl.algorithms.token_sampling import stream_keys

    seed = int(stream_keys(5, 2, torch.tensor([line]), torch.tensor([1 << 40]))) & ((1 << 63) - 1)
    environment = Sums()
    environment.reset(Task([], seed=seed))
    assert isinstance(environment._random, random.Random)
    return [environment.step(Turn(i, text, text)).messages[0]["content"] for i, text in enumerate(texts)]


REFUSED = [
    ("--step 9 --sample 0", "--step 9: .* there are steps 1-3"),
    ("--step 2 --sample 12", "--sample 12: step 2 has the samples 0-11"),
    ("--step 2 --sample -1", "--sample -1: step 2 has the samples 0-11"),
    ("--step 2 --sample 1 --from-turn 3 --answer x", "--from-turn 3: another turn follows the turns 1, 2"),
    ("--step 2 --sample 1 --from-turn 1 --answer x y", "--answer: 2 texts; the answer to this turn has 1 messages"),
    ("--step 2 --sample 1 --from-turn 1", "--from-turn and --answer: each needs the other"),
    ("--step 2", "required: --sample"),
]


@pytest.mark.parametrize("flags, problem", REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_cannot_be_replayed_is_refused(flags, problem, folder):
    with pytest.raises(UsageError, match=problem):
        prepared([str(saved(folder, "turns")), *flags.split()])


@pytest.mark.long
def test_without_its_weights_a_response_is_shown_and_not_forked(folder, tmp_path):
    run = shutil.copytree(saved(folder, "turns"), tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    words = ["--step", "2", "--sample", "0"]
    status, text = played(run, words)
    assert status == 0 and "the policy after step 1 has written it; there are checkpoints of 2, 3" in text
    fork = [*words, "--from-turn", "1", "--answer", "+1="]
    with pytest.raises(UsageError, match="--from-turn 1: needs weights to go on with: .*; give --load"):
        prepared([str(run), *fork])
    status, text = played(run, [*fork, "--load", str(run / "checkpoints" / "step_00000003")])
    assert status == 0 and "\nfork: " in text


def test_damaged_records_are_refused(folder, tmp_path):
    run = shutil.copytree(saved(folder, "turns"), tmp_path / "run")
    path = run / "rollouts" / "step_00000002" / "replica_00000.log"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"reward": 0', b'"reward": 1', 1))
    with pytest.raises(UsageError, match="--step .*replica_00000.log: is damaged .*: its checksum is wrong"):
        prepared([str(run), "--step", "2", "--sample", "0"])
    path.write_bytes(content[:-1])
    with pytest.raises(UsageError, match="replica_00000.log has .* bytes"):
        prepared([str(run), "--step", "2", "--sample", "0"])
    with pytest.raises(UsageError, match="holds no run of train_rl"):
        prepared([str(tmp_path), "--step", "2", "--sample", "0"])


@pytest.mark.long
def test_without_an_environment_there_is_no_other_answer(folder):
    with pytest.raises(UsageError, match="no environment"):
        prepared([str(saved(folder, "one turn and filter")), *FORK, "x"])


FORK = ["--step", "2", "--sample", "3", "--from-turn", "1", "--answer"]
AGENT = "agent with rows"


@pytest.mark.long
def test_an_agent_runs_again_and_the_policy_reads_another_answer(folder):
    """With its own answer the episode is the same; with another one the turns before it are, and the sub-agents'."""
    run = saved(folder, AGENT)
    _, text = played(run, FORK[:4])
    assert text.count(SAME) == 7
    own = re.search(r"^turn 1:.*\n.*\n  the agent\n    (.*)", text, re.MULTILINE)[1]
    _, same = played(run, [*FORK, own])
    before, after = same.split("\nfork: ")
    assert turns_of(after) == turns_of(before) and before.splitlines()[-1] == after.splitlines()[-1]
    _, text = played(run, [*FORK, "+1="])
    before, after = text.split("\nfork: ")
    assert (
        after.splitlines()[0].endswith("the policy reads") and after.count("    +1=\n") == before.count("    +1=\n") + 2
    )
    assert turns_of(after)[0] == turns_of(before)[0] and own not in after.split("turn 2:")[0]
    with pytest.raises(RankFailed, match="--answer: 2 texts; the agent sends 1 messages"):
        played(run, [*FORK, "+1=", "+2="])
    with pytest.raises(UsageError, match="another turn follows the turns"):
        prepared([str(run), *" ".join(FORK).replace("--from-turn 1", "--from-turn 2").split(), "x"])
