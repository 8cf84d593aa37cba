"""What judges and rewards that compare responses add to the plan: numbers by hand, and the judge's real memory."""

from pathlib import Path

import pytest

from megarl import arguments
from megarl.planning import summary
from megarl.rewards import grouped
from tests.helpers.envs.judges import write
from tests.helpers.models.tiny_models import LENGTHS, SHAPES, VOCAB
from tests.helpers.worlds import run_world

GROUPED = f"--reward {__name__}:ranks"
PAIR = {"mode": "pair", "messages": [{"role": "user", "content": "{first}{second}="}]}
# 64 sequences of 48 tokens: 8 bytes of the token and 1 of its mask; of a sequence its id, length, prompt, prompt's
# length (8 each) and whether it has ended (1).
RESPONSES = 64 * 48 * 9 + 64 * 33
# The mask once more; id, length, a score of 4 bytes and whether it is correct.
SCORES = 64 * 48 + 64 * 21


@grouped
def ranks(samples) -> list[float]:
    """A plug-in: the place in the group."""
    return [float(place) for place, _ in enumerate(samples)]


def planned(flags: str, size: int = 4) -> summary.Plan:
    base = f"{SHAPES['llama']} {LENGTHS} --prompts-per-step 16 --samples-per-prompt 4 --advantage grpo"
    program = arguments.parse(f"{base} --max-tokens-per-microbatch 48 {flags}".split(), size, "rl")
    return summary.make_plan(program, size, VOCAB)


def judge_of(folder: Path, **changes) -> str:
    """Flags of a judge."""
    config = write(folder / "judge.yaml", **changes)
    return f"--reward judge --judge-config {config} --judge-load x --judge-max-length 64 --judge-buffer-gb 0.001"


def moved(flags: str) -> dict[tuple[str, str], int]:
    """Payload between roles, without what a judge reads during the rollout."""
    found = planned(flags).exchanges
    return {(m["source"], m["destination"]): m["payload"] for m in found if m["fields"] != ["tokens while generating"]}


@pytest.mark.parametrize("flags, to_reward, scores", [
    ("--kl-coefficient 0", 0, 0),
    (f"--kl-coefficient 0 {GROUPED}", RESPONSES, SCORES),
    # Mini-batches of four groups for each replica are assigned in whole groups anyway.
    (f"--kl-coefficient 0 {GROUPED} --minibatch-size 32 --role-map actor=0-1;reward=0-1", 0, 0),
    (f"--kl-coefficient 0 {GROUPED} --minibatch-size 16 --role-map actor=0-1;reward=0-1", RESPONSES, SCORES),
    # On ranks of its own the reward gets the responses in any case; one replica has all groups.
    ("--kl-coefficient 0 --role-map actor=0-2;reward=3", RESPONSES, SCORES),
    (f"--kl-coefficient 0 {GROUPED} --role-map actor=0-2;reward=3", RESPONSES, SCORES),
])  # fmt: skip
def test_whole_groups_move_to_a_reward_that_compares(flags, to_reward, scores):
    found = moved(flags)
    assert (found["rollout", "reward"], found["reward", "actor"]) == (to_reward, scores)


def test_a_role_on_the_ranks_of_such_a_reward_gets_its_own_sequences():
    beside = "--role-map actor=0-1;reference=2-3;reward=2-3"
    assert moved(beside)["rollout", "reference"] == 0 < moved(beside)["rollout", "reward"]
    assert moved(f"{beside} {GROUPED}")["rollout", "reference"] == RESPONSES


@pytest.mark.parametrize("flags, expected", [
    ("--role-map actor=0-1;reference=0-1;reward=2-3", [64 * 24 * 3]),  # of 20 tokens: two digits and a comma
    ("--role-map actor=0-1;reference=0-1;reward=2-3 --over-sampling 2", []),
    ("--role-map actor=0-1;reference=0-1;reward=1-2", []),
])  # fmt: skip
def test_a_judge_reads_tokens_during_the_rollout(flags, expected, tmp_path):
    assert VOCAB == 20
    found = planned(f"{judge_of(tmp_path)} {flags}").exchanges
    assert [m["payload"] for m in found if m["fields"] == ["tokens while generating"]] == expected


@pytest.mark.parametrize("changes, judgements", [
    ({}, 4 * 2 * 3),  # four responses, two samples of each, three tries
    ({"samples": 1, "retries": 0}, 4),
    (PAIR, 12 * 2 * 3),
    (PAIR | {"pairs": "anchor", "retries": 0}, 6 * 2),
])  # fmt: skip
def test_a_judge_sends_what_its_judgements_need(changes, judgements, tmp_path):
    """Hidden states of 64 channels, 4 bytes each, between two stages: half of the ranks send each token's."""
    flags = "--role-map actor=0-1;reference=0-1;reward=2-3 --reward-pipeline-model-parallel-size 2"
    found = planned(f"{judge_of(tmp_path, **changes)} {flags}").roles["reward"]
    assert found.kind == "judge" and found.traffic["pipeline"] == 16 * judgements * 64 * 64 * 4 // 2


def memory_of_judge(rank: int, config: str, buffer_gb: float) -> tuple[int, int, int]:
    """Bytes of a judge's weights, of its KV cache, and of a block of it."""
    from datetime import timedelta

    from megarl.comm import role_mesh
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.model import gpt

    base = f"{SHAPES['llama']} {LENGTHS} --advantage grpo --max-tokens-per-microbatch 48 {config}"
    role = arguments.parse(base.split(), 1, "rl").roles["reward"]
    groups = role_mesh.create_mesh({"reward": role}, timedelta(minutes=1))["reward"].pg_collection
    model = gpt.build_frozen_model(role.megatron, VOCAB, groups)
    engine = RolloutEngine(model[0], groups, VOCAB, 64, buffer_gb, 64, prefix_caching=True)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return weights, engine.context.memory_buffer.nbytes, engine.context.block_size_bytes


def test_a_judge_has_the_planned_memory(tmp_path):
    """Of 16 heads' channels: (4 + 2·2)·16·64 + 64·64 attention, 3·64·128 MLP, two norms; embedding and last norm."""
    weights = 4 * (2 * (8 * 16 * 64 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 32 * 64 + 64)
    flags = judge_of(tmp_path)
    (memory,) = planned(f"{flags} --kl-coefficient 0", 1).roles["reward"].stages
    real, cache, block = run_world(memory_of_judge, 1, flags, 0.001)[0]
    assert memory.weights == real == weights
    assert memory.kv_cache == int(0.001 * 2**30) and 0 <= memory.kv_cache - cache < block
