"""Mixtures of prompt files: what a file may say, exact shares of the draws, resume."""

import json
from collections import Counter
from fractions import Fraction

import pytest

from megarl.data.columns import RL, SFT, Columns
from megarl.data.mixture import MixtureEntry, read_mixture, whole_weights
from megarl.data.order import DifficultyPools, MixtureOrder
from megarl.data.prompts import PromptSet, load_prompts
from megarl.errors import UsageError

SIZES, WEIGHTS = [7, 3, 40], [5, 3, 2]


def read(folder, text: str, purpose: str = RL, flag: str = "--prompts") -> tuple[MixtureEntry, ...]:
    (folder / "mix.yaml").write_text(text)
    return read_mixture(str(folder / "mix.yaml"), flag, purpose)


def mixture(folder, text: str, purpose: str = RL) -> PromptSet:
    """A mixture of `a.jsonl` (three lines) and `b.jsonl` (two)."""
    for name, lines in (("a", range(3)), ("b", range(2))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name}{n}"}) + "\n" for n in lines))
    (folder / "none.jsonl").touch()
    (folder / "none.json").write_text("[]")
    (folder / "mix.yaml").write_text(text.replace("DIR", str(folder)))
    return load_prompts(str(folder / "mix.yaml"), "--prompts", Columns(purpose=purpose))


BOTH = "first:\n  prompts: DIR/a.jsonl\n  weight: 0.75\nsecond:\n  prompts: DIR/b.jsonl\n  weight: 0.25\n"


def test_keys_of_an_entry(tmp_path):
    first, second = read(tmp_path, """
a-1:
  prompts: a.jsonl,b.jsonl
  weight: 0.1
  environment: x.y:z
  max-prompt-length: 5
  max-response-length: 7
b: {prompts: c}
""")  # fmt: skip
    assert first == MixtureEntry("a-1", "a.jsonl,b.jsonl", Fraction(1, 10), "x.y:z", 5, 7)
    assert second == MixtureEntry("b", "c", Fraction(1))
    assert whole_weights((first, second)) == [1, 10]


@pytest.mark.parametrize("text, message", [
    ("", "allowed is a mapping of names"), ("[1]", "allowed is a mapping of names"),
    ("{}", "the mixture names no files"),
    ("a: x.jsonl", "a: allowed is a mapping of prompts, weight"), ("a: {weight: 1}", "a: prompts is missing"),
    ("a: {prompts: x}\na: {prompts: y}", "a: appears twice"),
    ("a: {prompts: x, prompts: y}", "a: prompts: appears twice"),
    ("a b: {prompts: x}", "a b: a name has letters"), ("1: {prompts: x}", "1: a name has letters"),
    ("a: {prompts: x, weight: 0}", "a: weight: 0: allowed is a number above 0"),
    ("a: {prompts: x, weight: -1}", "a: weight: -1: allowed is a number above 0"),
    ("a: {prompts: x, weight: .nan}", "a: weight: nan: allowed is a number"),
    ("a: {prompts: x, weight: true}", "a: weight: True: allowed is a number"),
    ("a: {prompts: x, weight: 1e-300}", "a: weight: 1e-300: allowed is a number"),
    ("a: {prompts: x, weight: heavy}", "a: weight: heavy: allowed is a number"),
    ("a: {prompts: x, samples-per-prompt: 0}", "a: samples-per-prompt: 0: allowed is a whole number above 0"),
    ("a: {prompts: x, samples-per-prompt: -2}", "a: samples-per-prompt: -2: allowed is a whole number above 0"),
    ("a: {prompts: x, samples-per-prompt: two}", "a: samples-per-prompt: two: allowed is a whole number above 0"),
    ("a: {prompts: x, samples-per-prompt: 2.0}", "a: samples-per-prompt: 2.0: allowed is a whole number above 0"),
    ("a: {prompts: x, samples-per-prompt: true}", "a: samples-per-prompt: True: allowed is a whole number above 0"),
    ("a: {prompts: x, samples-per-prompt: [2]}", "a: samples-per-prompt: [2]: allowed is a whole number above 0"),
    ("a: {prompts: x, lr: 8}", "a: lr is unknown here; allowed: environment, max-prompt-length"),
    ("a: {prompts: x, max-prompt-length: 1.5}", "a: max-prompt-length: 1.5: allowed is a whole number above 0"),
    ("a: {prompts: [x]}", "a: prompts: must be a text"),
    ("a: {prompts: other.yaml}", "a: prompts: other.yaml is a mixture"),
    ("a: [", "not YAML"),
])  # fmt: skip
def test_wrong_mixtures(text, message, tmp_path):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"--prompts {tmp_path / 'mix.yaml'}: {message}") and "\n" not in str(
        caught.value
    )


def test_supervised_programs_have_files_and_weights_only(tmp_path):
    assert len(mixture(tmp_path, BOTH, SFT).entries) == 2
    with pytest.raises(UsageError, match="first: max-response-length is unknown here; allowed: prompts, weight"):
        mixture(tmp_path, BOTH.replace("weight: 0.75", "max-response-length: 3"), SFT)


def test_a_mixture_is_one_set_of_all_lines(tmp_path):
    found = mixture(tmp_path, BOTH.replace("0.25", "0.25\n  environment: e:f"))
    assert [prompt.prompt for prompt in found] == ["a0", "a1", "a2", "b0", "b1"]
    assert [found.entry_of(i).name for i in range(5)] == ["first"] * 3 + ["second"] * 2
    assert [prompt.environment for prompt in found] == [None] * 3 + ["e:f"] * 2
    assert found.sizes() == [3, 2] and found.where(3) == f"--prompts {tmp_path / 'b.jsonl'}:1"
    assert [note.partition("mix.yaml: ")[2] for note in found.notes] == [
        "first: 3 prompts, 75.0% of the draws", "second: 2 prompts, 25.0% of the draws",
    ]  # fmt: skip


def test_another_mixture_of_the_same_lines_is_other_data(tmp_path):
    hashes = {
        mixture(tmp_path, text).sha256() for text in (
            BOTH, BOTH.replace("0.25", "0.5"), BOTH.replace("second", "third"),
            *(BOTH.replace("weight: 0.25", f"{key}: 3") for key in ("max-response-length", "samples-per-prompt")),
        )
    }  # fmt: skip
    assert len(hashes) == 5 and mixture(tmp_path, BOTH).sha256() in hashes


def test_groups_have_the_sizes_of_their_files(tmp_path):
    found = mixture(tmp_path, BOTH.replace("weight: 0.25", "samples-per-prompt: 3"))
    assert [found.group_size(line) for line in range(5)] == [None] * 3 + [3] * 2
    assert found.group_sizes([4, 0, 3, 3, 2], 8) == [3, 8, 3, 3, 8]
    assert found.of_entries({1}).group_sizes([1], 8) == [3]


@pytest.mark.parametrize("text, message", [
    (BOTH.replace("b.jsonl", "none.jsonl"), "none.jsonl: the file holds no prompt"),
    (BOTH.replace("b.jsonl", "none.json"), "none.json.*no prompt"),
    (BOTH.replace("b.jsonl", "missing.jsonl"), "missing.jsonl: no such file"),
])  # fmt: skip
def test_every_entry_has_prompts(text, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        mixture(tmp_path, text)


# -- order -------------------------------------------------------------------------------------------------------


def source_of(line: int) -> int:
    return sum(line >= bound for bound in (7, 10))


def test_counts_are_exact_over_a_thousand_steps_of_any_size():
    for size in (1, 3, 10, 16):
        order, counts = MixtureOrder(SIZES, WEIGHTS, seed=3), Counter()
        for _ in range(1000):
            counts.update(map(source_of, order.take(size)))
            drawn = sum(counts.values())
            assert all(counts[i] - weight * drawn / 10 < 1 for i, weight in enumerate(WEIGHTS))
            if drawn % 10 == 0:
                assert [counts[i] for i in range(3)] == [weight * drawn // 10 for weight in WEIGHTS]


def test_each_source_is_drawn_in_whole_epochs():
    order = MixtureOrder(SIZES, WEIGHTS, seed=3)
    taken = order.take(400)
    for source, size in enumerate(SIZES):
        own = [line for line in taken if source_of(line) == source]
        epochs = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert epochs and all(len(set(epoch)) == size for epoch in epochs)


def test_sources_of_one_size_have_orders_of_their_own():
    taken = MixtureOrder([50, 50], [1, 1], seed=3).take(100)
    assert [line for line in taken if line < 50] != [line - 50 for line in taken if line >= 50]


def test_a_resumed_mixture_goes_on():
    order, resumed = (MixtureOrder(SIZES, WEIGHTS, seed=3) for _ in range(2))
    order.take(17)
    state = json.loads(json.dumps(order.state_dict()))
    assert state["position"] == 17 and sum(state["counts"]) == 17
    resumed.load_state_dict(state)
    assert resumed.take(200) == order.take(200)


def test_files_keep_their_proportions_beside_one_that_pools_leave_out():
    pools = DifficultyPools(30, (0.2, 0.8), (1, 1, 0))
    orders = [MixtureOrder([10, 10, 10], [3, 1, 4], 3, pools) for _ in range(2)]
    solved = range(20, 30)
    for share, expected in ((1.0, [60, 20, 0]), (0.5, [30, 10, 40])):  # and the third does not catch up later
        for line in solved:
            pools.add(line, share)
        pools.end_step()
        before = [*orders[0].counts]
        taken = orders[0].take(80)
        orders[1].load_state_dict(json.loads(json.dumps(orders[1].state_dict())))
        assert [line for _ in range(16) for line in orders[1].take(5)] == taken
        assert [after - count for after, count in zip(orders[0].counts, before, strict=True)] == expected


@pytest.mark.parametrize("state", [
    {"position": 3, "size": 50}, {"position": 3, "size": 50, "counts": [3]},
    {"position": 3, "size": 50, "counts": [4, -1, 0]}, {"position": 3, "size": 50, "counts": [1, 1, "1"]},
    {"position": 3, "size": 50, "counts": [1, 1, 2]}, {"position": 3, "size": 50, "counts": [1, 1, 1], "turns": [1]},
])  # fmt: skip
def test_a_state_of_another_mixture_is_refused(state):
    with pytest.raises(UsageError, match="^--load: the checkpoint was written with another mixture"):
        MixtureOrder(SIZES, WEIGHTS, seed=3).load_state_dict(state)
