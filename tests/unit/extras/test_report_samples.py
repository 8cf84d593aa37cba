"""The samples of a report: chosen steps, joined with their tokens, of bounded size."""

import base64

from megarl.extras import report_samples
from megarl.extras.report_samples import choose_steps, samples, step_rows
from megarl.observe.samples import write_samples


def test_chosen_steps_are_first_last_best_worst_and_some_between():
    steps = list(range(1, 1001))
    rewards = dict.fromkeys(steps, 0.5) | {321: 0.9, 654: 0.1, 7: None}
    chosen = choose_steps(steps, rewards)
    assert len(chosen) == report_samples.STEPS and list(chosen) == sorted(chosen)
    notes = {step: words for step, words in chosen.items() if words}
    assert notes == {1: ["first"], 321: ["highest reward"], 654: ["lowest reward"], 1000: ["last"]}
    assert max(b - a for a, b in zip(list(chosen), list(chosen)[1:], strict=False)) < 200
    assert choose_steps([4], {4: 1.0}) == {4: ["first", "last", "highest reward", "lowest reward"]}
    assert list(choose_steps([1, 2, 3], {})) == [1, 2, 3] and choose_steps([], {}) == {}


def test_tokens_join_the_sample_with_the_same_texts():
    """Numbers do not: with a group filter those of both files differ."""
    rows = [{"sequence": i, "prompt": "p", "response": r, "reward_parts": {"a": i}} for i, r in enumerate("xyxz")]
    tokens = [{"sequence": i, "prompt": "p", "response": r, "tokens": [r]} for i, r in enumerate("zxxw")]
    found = step_rows(rows, tokens)
    assert [(row["response"], row.get("sequence"), "tokens" in row, row.get("reward_parts")) for row in found] == [
        ("z", 3, True, {"a": 3}), ("x", 0, True, {"a": 0}), ("x", 2, True, {"a": 2}), ("w", 3, True, None),
        ("y", 1, False, {"a": 1}),
    ]  # fmt: skip


def _sample(i: int, **more) -> dict:
    return {"sequence": i, "prompt": f"p{i}", "response": f"r{i}", "reward": float(i), "length": 3} | more


def test_responses_and_tokens_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(report_samples, "TOKENS", 60)
    many = {"tokens": ["t"] * 100, "token_ids": [1] * 100, "values": [1 / 3] * 99 + [None], "advantages": [0.5] * 100}
    rows = [_sample(i, response="long " * 10_000 if i == 0 else f"r{i}") for i in range(40)]
    for step in (1, 2):
        write_samples(tmp_path, step, [*rows, *(row | many for row in rows[1:4])])
    found = samples(tmp_path, [{"step": 1}, {"step": 2}])
    first = found["steps"][0]
    assert found["recorded"] == 2 and first["total"] == 40 and len(first["rows"]) == report_samples.RESPONSES
    assert [len(row["tokens"]) for row in first["rows"][:3]] == [10, 10, 10]  # 60 tokens, two steps, three responses
    assert first["rows"][0]["values"] == [0.3333333] * 10 and first["rows"][0]["advantage"] == 0.5
    rewards = [row["reward"] for row in first["rows"][3:]]
    assert rewards == [39, 38, 37, 36, 35, 34, 33, 8, 7, 6, 5, 4, 0]  # the best and the worst of the others
    assert len(first["rows"][-1]["response"]) < report_samples.RESPONSE_CHARACTERS + 50
    assert first["rows"][-1]["response"].endswith("… (34,000 more characters)")


def test_turns_are_shown_and_observations_have_no_advantage():
    turns = [{"text": "<b>1</b>", "observation": "higher", "reward": 0.5}, {"text": "2", "reward": float("nan")}]
    row = {"turns": turns, "tokens": ["1", "h", "2"], "advantages": [1.0, 0.0, 3.0], "observed": [False, True, False]}
    found = report_samples.whole_row(row) | report_samples.token_fields(row, 2)
    assert found["turns"][0] == turns[0] and found["turns"][1]["observation"] == ""
    assert found["observed"] == [False, True] and found["advantage"] == 2.0
    for wrong in ("text", [1], {"text": "1"}, None):
        assert "turns" not in report_samples.whole_row({"turns": wrong})
    assert "observed" not in report_samples.token_fields({"tokens": ["a"], "observed": [1]}, 9)


def test_judgements_are_shown_with_their_numbers():
    judgements = [{"text": "<b>7</b>", "number": 7.0}, {"text": 3, "number": "7"}]
    found = report_samples.whole_row({"judgements": judgements})["judgements"]
    assert found == [judgements[0], {"text": "3", "number": None}]
    for wrong in ("text", [1], {"text": "1"}, None):
        assert "judgements" not in report_samples.whole_row({"judgements": wrong})


def test_values_of_other_types_are_left_out(tmp_path):
    odd = dict(prompt=["a"], response=1, reward="high", finished="yes", reward_parts=[1], extracted={"a": 1})
    by_token = _sample(1) | {"tokens": ["a", "b"], "values": [1], "logprobs": ["x", 2]}
    write_samples(tmp_path, 1, [odd, _sample(1), by_token, _sample(2) | {"tokens": [1]}])
    rows = samples(tmp_path, [{"step": 1}])["steps"][0]["rows"]
    assert rows[0]["tokens"] == ["a", "b"] and not {"values", "logprobs"} & set(rows[0])
    assert {"prompt": '["a"]', "response": "1", "extracted": '{"a": 1}'} in rows
    assert all(type(row.get("reward", 0.0)) is float for row in rows) and not any("tokens" in row for row in rows[1:])


def test_small_images_of_prompts_are_part_of_the_page(tmp_path):
    turns = [{"text": "b", "observation": "[image 8×8 sha:4567abcd]"}]
    row = {"sequence": 0, "prompt": "[image 32×16 sha:0123abcd]a[image 8×8 sha:ffffffff]", "turns": turns}
    write_samples(tmp_path, 1, [row])
    assert "images" not in samples(tmp_path, [{"step": 1}])
    (tmp_path / "thumbnails").mkdir()
    for name in ("0123abcd", "4567abcd"):
        (tmp_path / "thumbnails" / f"{name}.png").write_bytes(b"\x89PNG rest")
    (tmp_path / "thumbnails" / "ffffffff.png").write_bytes(b"<svg onload='alert(1)'/>")
    found = samples(tmp_path, [{"step": 1}])["images"]
    expected = "data:image/png;base64," + base64.b64encode(b"\x89PNG rest").decode()
    assert found == {"0123abcd": expected, "4567abcd": expected}
