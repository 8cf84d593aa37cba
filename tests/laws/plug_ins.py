"""Rewards of the features, and what holds for every run with them, whatever its layout."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.rewards import Score, grouped
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import metrics, samples


def steps_of(save: Path) -> Iterator[tuple[dict, list[dict]]]:
    """(metrics, samples) of each step of a run."""
    for step, row in metrics(save).items():
        yield row, [json.loads(line) for line in samples(save, step).splitlines()]


def picky(sample) -> float:
    """Cannot score what begins with one of two digits."""
    if sample.response[:1] in set("26"):
        raise ValueError("a bad digit")
    return len(sample.response) / 10


def is_even(sample) -> float:
    """1 if the first digit of the response is even: early end tokens, which come now and then, decide too."""
    return float(sample.response[:1] in ("0", "2", "4", "6", "8"))


# -- a mixture of files: shares and limits --------------------------------------------------------------------------

FEW = {f"35+{n}=" for n in range(5)}
SHORT = 2  # tokens of a response to one of these


def check_shares(save: Path):
    """One draw in four is of the short file, whose responses end at its limit, with a penalty if it cuts them."""
    drawn: Counter = Counter()
    for row, rows in steps_of(save):
        share = row["mixture/few/prompts"], row["mixture/many/prompts"]
        assert share[1] == 3 * share[0] and share[0] > 0
        drawn.update("few" if each["prompt"] in FEW else "many" for each in rows)
        few = [each for each in rows if each["prompt"] in FEW]
        cut = [each for each in few if each["length"] == SHORT and not each["finished"]]
        assert cut and all(each["length"] <= SHORT for each in few)
        assert all(each["reward_parts"]["overlong"] == -1.0 for each in cut)
        assert any(each["length"] > SHORT for each in rows if each["prompt"] not in FEW)
    assert drawn["few"] / sum(drawn.values()) == 0.25


# -- files with groups of their own sizes ---------------------------------------------------------------------------


@grouped
def places(samples) -> list[float]:
    """The place of each response in its group, which is whole."""
    assert len(samples) == (2 if samples[0].prompt.startswith("35+") else 4)
    return [place / len(samples) for place in range(len(samples))]


def check_sizes(save: Path):
    """Groups of `few` have two responses, others four; all prompts of a step differ."""
    seen = set()
    for _, rows in steps_of(save):
        for prompt, group in itertools.groupby(rows, lambda row: row["prompt"]):
            is_few = prompt.startswith("35+") and len(prompt) == 5
            assert len(list(group)) == (2 if is_few else 4)
            seen.add(is_few)
    assert seen


# -- rewards of groups -----------------------------------------------------------------------------------------------


@grouped
def novelty(samples) -> list:
    """Which responses the group has not had before, and how many came before: it depends on order and completeness."""
    assert len({sample.prompt for sample in samples}) == 1, "of several prompts"
    texts = [sample.response for sample in samples]
    assert not any(text.startswith("0") for text in texts), "a response that no group may have"
    scores = _novelties(texts)
    return scores if len(samples) % 2 else [Score(score, score >= 1.0) for score in scores]


def _novelties(texts: list[str]) -> list[float]:
    return [(text not in texts[:i]) + i / 10 + len(texts) / 100 for i, text in enumerate(texts)]


def check_groups(save: Path, size: int = 4):
    """Every group was scored as a whole, or failed as a whole."""
    for row, rows in steps_of(save):
        failed = check_scored(rows, size)
        counted = row["reward/tests.laws.plug_ins:novelty/failures"]
        assert row["actor/grad_norm"] > 0 and (counted == failed * size or "sampling/groups" in row or counted > failed)


def check_scored(rows: list[dict], size: int) -> int:
    """As `check_groups` for the rows of a step or of an evaluation; how many groups failed, which are not all."""
    failed = 0
    assert [row["sequence"] for row in rows] == list(range(len(rows))) and rows and len(rows) % size == 0
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        texts = [row["turns"][-1]["text"] if "turns" in row else row["response"] for row in group]
        if any(text.startswith("0") for text in texts):
            assert all("a response that no group may have" in row["failure"] for row in group)
            failed += 1
        else:
            assert [row["reward_values"]["tests.laws.plug_ins:novelty"] for row in group] == _novelties(texts)
            assert "failure" not in group[0]
    assert failed < len(rows) // size
    return failed


# -- a rollout in another layout than training ----------------------------------------------------------------------


def check_rollout(save: Path, limit: float = 1e-5):
    """Its log-probs are those of training, but for sums in another order, if there are any."""
    for row in metrics(save).values():
        assert row["rollout/logprob_gap_max"] <= max(limit, largest_gap_allowed()) and row["actor/ppo_kl_first"] == 0


# -- references that follow the policy -------------------------------------------------------------------------------


def check_refresh(save: Path):
    """After a refresh, in every second step, the reference is the policy to the bit; before the next one it is not."""
    for step, row in metrics(save).items():
        assert row["reference/step"] == (step - 1) // 2 * 2 and ("weights/reference_bytes" in row) == (step % 2 == 0)
        assert abs(row["kl/reference"]) > 1e-5 if step % 2 == 0 else step == 1 or row["kl/reference"] == 0


# -- judges ----------------------------------------------------------------------------------------------------------


def check_judged(save: Path):
    """Every response has judgements, in samples whose bytes no layout changes."""
    for _, rows in steps_of(save):
        assert rows and all(row["judgements"] for row in rows)


# -- rewards by file -------------------------------------------------------------------------------------------------

OF_ONE_FILE = "tests.laws.plug_ins:of_one_file"
REWARDS = {"known": "exact-match", "free": f"0.5*{OF_ONE_FILE}+length", "shaped": "0*regex+cosine+0.5*adaptive-length"}


def of_one_file(sample) -> float:
    """Fails on a prompt that is not of its file, as verifiers do that read metadata."""
    assert sample.metadata["file"] == "free"
    return len(sample.response) / 10


def file_of(row: dict) -> str:
    """The file of a row's prompt."""
    first = int(row["prompt"].split("+")[0])
    return "known" if first < 30 else "free" if first < 40 else "shaped"


def check_terms(rows: list[dict]):
    """The terms of each row are those of its file, and what they add up to."""
    for row in rows:
        values, name = row["reward_values"], file_of(row)
        if name == "known":
            assert values == {"exact-match": float(row["correct"])} and row["reward"] == values["exact-match"]
        elif name == "free":
            assert values.keys() == {OF_ONE_FILE, "length"} and values[OF_ONE_FILE] == len(row["response"]) / 10
            assert row["reward"] == pytest.approx(0.5 * values[OF_ONE_FILE] + values["length"])
        else:
            assert values.keys() == {"regex", "cosine", "adaptive-length"}
            assert row["reward"] == pytest.approx(values["cosine"] + 0.5 * values["adaptive-length"])
            assert row["correct"] == (values["regex"] == 1.0) == (row["finished"] and "1" in row["response"])
        assert "failure" not in row
    assert {file_of(row) for row in rows} == set(REWARDS)


def check_rewards(save: Path):
    """Each response is scored by the reward of its file alone."""
    for row, rows in steps_of(save):
        check_terms(rows)
        for name in ("exact-match", OF_ONE_FILE, "cosine"):
            own = [each["reward_values"][name] for each in rows if name in each["reward_values"]]
            assert len(own) == 8 and row[f"reward/{name}/mean"] == pytest.approx(sum(own) / len(own))
        assert row[f"reward/{OF_ONE_FILE}/failures"] == 0 and row["actor/grad_norm"] > 0


# -- queries that choose keys ---------------------------------------------------------------------------------------

KEYS, PROMPT = 3, 4  # a query chooses so many; tokens that each prompt has at least


def check_choice(save: Path, has_stale_tokens: bool = False):
    """Queries attend to fewer keys than they see, and each token has the log-prob of training. `has_stale_tokens`:
    those of earlier weights have not."""
    for row, rows in steps_of(save):
        seen = [number for each in rows for number in range(1, PROMPT + each["length"])]
        assert sum(min(number, KEYS) for number in seen) < 0.9 * sum(seen)
        assert row["actor/grad_norm"] > 0 and (has_stale_tokens or row["rollout/logprob_gap_max"] == 0.0)
        assert 0 < row["indexer/disagreement"] < 1
        assert has_stale_tokens or row.get("actor/ppo_kl_first", 0.0) == 0.0


def check_pictures(save):
    """Images were read, and samples name them."""
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert all(row["images/tokens"] >= 4 * row["images/count"] for row in rows)
    assert any(row["images/count"] for row in rows)
    if (save / "samples").exists():
        for path in (save / "samples").iterdir():
            assert all("[image " in json.loads(line)["prompt"] for line in path.read_text().splitlines())


def check_shown(save: Path):
    """As `check_pictures`; some answers of environments had pictures, which the run keeps."""
    check_pictures(save)
    turns = [turn for _, rows in steps_of(save) for row in rows for turn in row["turns"]]
    assert any("[image " in turn["observation"] for turn in turns)
    first = metrics(save).get(1)  # later steps may train on what an earlier policy has written
    assert first is None or first["rollout/logprob_gap_max"] <= 1e-5
    assert len([*(save / "images").iterdir()]) > 1
