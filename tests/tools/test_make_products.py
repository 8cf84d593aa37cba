"""tools/make_products.py: right answers, no pair of factors in both files, the same bytes for the same seed."""

import json
import re

from megarl.data.prompts import load_prompts
from megarl.rewards.base import Sample
from megarl.rewards.text import regex
from tools import make_products


def made(folder, *options):
    assert make_products.main(["--out", str(folder), *options]) == 0
    return [[json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("train", "heldout")]  # fmt: skip


def factors(lines):
    return [tuple(map(int, re.findall(r"\d+", line["prompt"]))) for line in lines]


def test_every_product_is_asked_once_in_every_wording(tmp_path):
    train, heldout = made(tmp_path)
    lines = train + heldout
    assert all(a * b == int(line["answer"]) for line, (a, b) in zip(lines, factors(lines), strict=True))
    assert {line["prompt"] for line in lines} == {
        wording.format(a, b) for a in range(2, 13) for b in range(2, 13) for wording in make_products.WORDINGS
    }
    assert (
        len(lines)
        == 121 * len(make_products.WORDINGS)
        == len(load_prompts(str(tmp_path / "train.jsonl"))) + len(load_prompts(str(tmp_path / "heldout.jsonl")))
    )


def test_no_pair_of_factors_is_in_both_files_in_any_order(tmp_path):
    train, heldout = ({tuple(sorted(pair)) for pair in factors(lines)} for lines in made(tmp_path))
    assert not train & heldout and (len(train), len(heldout)) == (44, 22)


def test_the_seed_chooses_the_split(tmp_path):
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    assert first == second != made(tmp_path / "c", "--seed", "2")
    assert (tmp_path / "a" / "prompts.json").read_bytes() == (tmp_path / "b" / "prompts.json").read_bytes()


def test_the_reward_that_is_named_reads_the_last_number():
    pattern = re.search(r"--reward-pattern '(.*)'", make_products.__doc__)[1]
    verify = regex(pattern)
    for response, reward in [("6 * 7 = 42", 1), ("42.", 1), ("42, as 6 * 7", 0), ("142", 0), ("4 2", 0), ("none", 0)]:
        assert verify(Sample("What is 6 * 7?", response, "42")).reward == reward, response


def test_wrong_use_is_one_line(tmp_path, refusal):
    (tmp_path / "file").write_text("")
    for arguments, message in [
        (["--out", str(tmp_path / "x"), "--seed", "-1"], "--seed -1: must not be negative"),
        (["--out", str(tmp_path / "file")], f"--out {tmp_path}/file: cannot be written"),
        ([], "required: --out"),
    ]:
        assert message in refusal(make_products.main, arguments)
    assert not (tmp_path / "x").exists()
