"""The verdict of the plan: a GPU that is just large enough, the largest component, and changes that help."""

from megarl.planning import changes, hardware, verdict
from megarl.planning.memory import GIB
from megarl.planning.question import Question
from tests.helpers.models.tiny_models import LENGTHS, SHAPES

GRPO = f"{SHAPES['llama']} {LENGTHS} --advantage grpo --kl-coefficient 0 --bf16 --max-tokens-per-microbatch 8192"


def ask(flags: str, gib: float | None = None, spare: int = 0):
    """(question, verdict) of one rank with `gib` of memory; default: with so many bytes more than it needs."""
    question = Question(f"{GRPO} {flags}".split(), 1, None, vocab_size=20)
    price = question.price()
    if gib is None:
        gib = (price.fullest.bytes + spare) / GIB / (1 - hardware.RESERVE)
    return question, verdict.verdict(question, price, gib)


def test_a_run_fits_if_its_fullest_rank_does():
    _, enough = ask("", spare=2**10)
    assert enough.fits and 0 <= enough.left <= 2**10 and enough.changes == []
    _, less = ask("", spare=-(2**10))
    assert not less.fits and -(2**11) < less.left < 0 and less.changes
    assert less.bytes == enough.bytes and less.roles == ("actor", "reward", "rollout")


def test_the_largest_component_and_the_cheapest_change_that_fits():
    """A cache of 1 GiB beside 76,096 gradients of four bytes, in whose memory a part of it is."""
    question, found = ask("--rollout-buffer-gb 1", gib=0.75)
    assert not found.fits and found.largest == ("rollout", "kv_cache", 2**30 - 4 * 76_096)
    half = found.changes[0]
    assert half.flags == ("--rollout-buffer-gb", "0.5") and found.bytes - half.bytes == 2**29
    assert [change.bytes <= found.available for change in found.changes] == [True] + [False] * (len(found.changes) - 1)
    text = verdict.text(found, searches=True)
    assert "does not fit" in text and "--rollout-buffer-gb 0.5" in text and text.endswith("--best-layouts")


def test_changes_that_the_run_refuses_or_that_save_nothing_are_not_shown():
    question, found = ask("--rollout-buffer-gb 0.001", gib=1e-3)
    flags = [change.flags for change in found.changes]
    assert found.together is None and "No combination of " in verdict.text(found, searches=False)
    assert len(flags) == changes.SHOWN and ("--rollout-buffer-gb", "0.0005") not in flags
    assert not any("parallel" in each[0] for each in flags)  # one rank
    assert all(found.bytes - change.bytes >= changes.MIN_SAVING * found.bytes for change in found.changes)
    assert [change.bytes for change in found.changes] == [question.price(each).fullest.bytes for each in flags]
