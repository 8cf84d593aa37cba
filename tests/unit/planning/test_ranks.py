"""How many ranks a run on CPUs has by default."""

import pytest

from megarl.planning import ranks

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu"
LENGTHS = "--max-prompt-length 8 --max-response-length 8"


@pytest.mark.parametrize(("flags", "program", "wanted"), [
    (LENGTHS, "rl", 2), ("", "sft", 2), ("", "reward", 2),
    (f"{LENGTHS} --role-map actor=0", "rl", 1), (f"{LENGTHS} --tensor-model-parallel-size 3", "rl", 1),
    ("--no-such-flag 1", "rl", 1), (f"{LENGTHS} --num-layers 4000 --hidden-size 8192 --ffn-hidden-size 28672", "rl", 1),
])  # fmt: skip
def test_one_rank_for_each_core_unless_flags_or_memory_forbid(flags, program, wanted):
    assert ranks.ranks_for([*MODEL.split(), *flags.split()], program, 2) == wanted


def test_every_copy_counts(monkeypatch):
    monkeypatch.setattr(ranks.os, "sysconf", lambda name: 2**12 if name == "SC_PAGE_SIZE" else 2**15)  # 128 MiB
    assert [ranks.ranks_for([*MODEL.split(), *LENGTHS.split()], "rl", cores) for cores in (4, 16)] == [4, 1]
