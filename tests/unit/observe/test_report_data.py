"""What a report shows of a run: reduced curves, chosen samples, settings, figures at the top."""

import json
import math
import random

from megarl.observe import report_curves, report_facts, report_samples, report_settings
from megarl.observe.report import embedded_json
from megarl.observe.report_curves import best_index, curves
from megarl.observe.report_samples import choose_steps, samples, step_rows
from megarl.observe.samples import write_samples

# -- curves ------------------------------------------------------------------------------------------------------


def test_short_curves_keep_every_bit():
    rows = [{"step": 0, "eval": 0.1}, {"step": 1, "a": 1 / 3, "b": 2}, {"step": 5, "a": None, "b": 1e-300, "eval": 0.2}]
    found = curves(rows)
    metrics, grids = found["metrics"], found["grids"]
    assert list(metrics) == ["a", "b", "eval"] and [metrics[name]["y"] for name in metrics] == [
        [1 / 3, None], [2, 1e-300], [0.1, 0.2],
    ]  # fmt: skip
    assert metrics["a"]["grid"] == metrics["b"]["grid"] != metrics["eval"]["grid"]  # equal steps are stored once
    assert [grids[metrics[name]["grid"]]["to"] for name in ("a", "eval")] == [[1, 5], [0, 5]]
    assert metrics["a"]["lost"] == 1 and metrics["b"]["lost"] == 0


def test_long_curves_become_envelopes_without_losing_a_spike():
    """10,000 steps of 100 metrics, as a page below 3 MB."""
    draw = random.Random(1)
    rows = [{"step": step} | {f"g/{i}": draw.random() for i in range(100)} for step in range(1, 10_001)]
    rows[7_654]["g/7"], rows[8_000]["g/7"], rows[4_000]["g/8"] = 123.0, -5.0, None
    found = curves(rows)
    spiky, grid = found["metrics"]["g/7"], found["grids"][0]
    assert len(found["grids"]) == 1 and len(spiky["y"]) == len(grid["from"]) == report_curves.BUCKETS
    assert max(spiky["high"]) == spiky["max"] == 123.0 and min(spiky["low"]) == spiky["min"] == -5.0
    at = spiky["high"].index(123.0)
    assert grid["from"][at] <= 7_655 <= grid["to"][at]
    assert all(low <= mean <= high for low, mean, high in zip(spiky["low"], spiky["y"], spiky["high"], strict=True))
    assert grid["from"][0] == 1 and grid["to"][-1] == 10_000
    assert all(end + 1 == start for end, start in zip(grid["to"], grid["from"][1:], strict=False))
    assert found["metrics"]["g/8"]["lost"] == 1 and None not in found["metrics"]["g/8"]["y"]
    assert len(embedded_json(found)) < 3_000_000


def test_summary_of_each_metric():
    rows = [
        {"step": step, "eval/accuracy": accuracy, "critic/loss": loss, "actor/entropy": 1.0, "lost": None}
        for step, accuracy, loss in ((0, 0.25, 3.0), (5, 0.75, 1.0), (9, 0.5, 2.0))
    ]
    found = curves(rows)["metrics"]
    columns = ("first", "last", "best", "min", "max", "lost")
    assert {name: [metric[column] for column in columns] for name, metric in found.items()} == {
        "eval/accuracy": [0.25, 0.5, [5, 0.75], 0.25, 0.75, 0],
        "critic/loss": [3.0, 2.0, [5, 1.0], 1.0, 3.0, 0],
        "actor/entropy": [1.0, 1.0, None, 1.0, 1.0, 0],
        "lost": [None, None, None, None, None, 3],
    }


def test_direction_of_better():
    values = [2.0, 1.0, 3.0]
    assert best_index("rollout/tokens_per_s", values) == 2
    assert best_index("time/actor/update_s", values) == 1
    assert best_index("kl/coefficient", values) is None


# -- samples -----------------------------------------------------------------------------------------------------


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
    found = report_samples._whole(row) | report_samples._token_fields(row, 2)
    assert found["turns"][0] == turns[0] and found["turns"][1]["observation"] == ""
    assert found["observed"] == [False, True] and found["advantage"] == 2.0
    for wrong in ("text", [1], {"text": "1"}, None):
        assert "turns" not in report_samples._whole({"turns": wrong})
    assert "observed" not in report_samples._token_fields({"tokens": ["a"], "observed": [1]}, 9)


def test_judgements_are_shown_with_their_numbers():
    judgements = [{"text": "<b>7</b>", "number": 7.0}, {"text": 3, "number": "7"}]
    found = report_samples._whole({"judgements": judgements})["judgements"]
    assert found == [judgements[0], {"text": "3", "number": None}]
    for wrong in ("text", [1], {"text": "1"}, None):
        assert "judgements" not in report_samples._whole({"judgements": wrong})


def test_values_of_other_types_are_left_out(tmp_path):
    odd = {
        "prompt": ["a"],
        "response": 1,
        "reward": "high",
        "finished": "yes",
        "reward_parts": [1],
        "extracted": {"a": 1},
    }
    by_token = _sample(1) | {"tokens": ["a", "b"], "values": [1], "logprobs": ["x", 2]}
    write_samples(tmp_path, 1, [odd, _sample(1), by_token, _sample(2) | {"tokens": [1]}])
    rows = samples(tmp_path, [{"step": 1}])["steps"][0]["rows"]
    assert rows[0]["tokens"] == ["a", "b"] and not {"values", "logprobs"} & set(rows[0])
    assert {"prompt": '["a"]', "response": "1", "extracted": '{"a": 1}'} in rows
    assert all(type(row.get("reward", 0.0)) is float for row in rows) and not any("tokens" in row for row in rows[1:])


# -- settings and figures ----------------------------------------------------------------------------------------


def _settings(**more) -> dict:
    roles = {
        name: {"ranks": "0-1", "megatron": {"lr": lr, "bf16": False}} for name, lr in (("actor", 1), ("critic", 2))
    }
    return {"megarl": {"seed": 1, "load": None, "tags": ["a"]}, "world_size": 4, "roles": roles} | more


def test_settings_have_a_row_for_each_flag():
    rows = report_settings.table(_settings(), None)
    assert [row[:3] for row in rows] == [
        ["run", "world_size", "4"],
        ["megarl", "load", "null"], ["megarl", "seed", "1"], ["megarl", "tags", '["a"]'],
        ["roles", "actor · ranks", "0-1"], ["roles", "critic · ranks", "0-1"],
        ["megatron", "bf16", "false"], ["megatron", "lr · actor", "1"], ["megatron", "lr · critic", "2"],
    ]  # fmt: skip
    assert not any(row[4] for row in rows)


def test_a_file_has_the_flags_of_the_first_role_and_what_differs_from_them():
    flags = {name: role["megatron"] for name, role in _settings()["roles"].items()}
    short = report_settings.without_repeats(flags)
    assert short == {"actor": flags["actor"], "critic": {"lr": 2}}
    roles = {name: {"ranks": "0-1", "megatron": of_role} for name, of_role in reversed(short.items())}
    assert report_settings.whole(_settings(roles=roles)) == _settings()
    assert report_settings.table(_settings(roles=roles), _settings()) == report_settings.table(_settings(), _settings())
    for damaged in ({}, {"roles": {}}, {"roles": 3}, {"roles": {"actor": 3}}, {"roles": {"actor": {"megatron": []}}}):
        assert report_settings.whole(damaged) == damaged


def test_settings_of_the_user_come_first():
    said = {"megarl": ["tags", "critic_ranks"], "megatron": ["critic_lr", "bf16"]}
    settings = _settings(user_settings=said, command_line=["megarl.train_rl", "--tags", "a b", "--bf16"])
    rows = report_settings.table(settings, None)
    plain = report_settings.table(_settings(), None)
    first = [["megarl", "tags"], ["roles", "critic · ranks"], ["megatron", "bf16"], ["megatron", "lr · critic"]]
    assert [row[:2] for row in rows if row[5]] == [row[:2] for row in rows[:4]] == first
    assert rows[4:] == [row for row in plain if row[:2] not in first] and sorted(rows) != sorted(plain)
    # A flag of one role counts for the row of all roles. Of two runs either may have set it; old files say nothing.
    alike = _settings(user_settings={"megatron": ["actor_bf16"]})
    assert [row[1] for row in report_settings.table(alike, None) if row[5]] == ["bf16"]
    for pair in ((settings, _settings()), (_settings(), settings)):
        compared = report_settings.table(*pair)
        assert [row[:2] for row in compared if row[5]] == first and not any(row[4] for row in compared)
    assert not any(row[5] for row in plain)
    for damaged in (3, ["lr"], {"megarl": 3, "megatron": None}):
        assert report_settings.table(_settings(user_settings=damaged), None) == plain
    assert report_settings.command_line(settings) == "megarl.train_rl --tags 'a b' --bf16"
    assert [report_settings.command_line(_settings(**more)) for more in ({}, {"command_line": 3})] == [None, None]


def test_differences_from_another_run():
    other = _settings(megarl={"seed": 2, "load": None, "new": 0}, world_size=4)
    del other["roles"]["critic"]
    changed = {row[1]: row[2:4] for row in report_settings.table(_settings(), other) if row[4]}
    assert changed == {
        "seed": ["1", "2"], "tags": ['["a"]', None], "new": [None, "0"], "critic · ranks": ["0-1", None],
        "lr · critic": ["2", None],
    }  # fmt: skip
    assert report_settings.table(_settings(), {})[0] == ["run", "world_size", "4", None, True, False]


def test_figures_at_the_top():
    rows = [{"step": 0, "eval/accuracy": 0.25}]
    rows += [{"step": i, "reward/mean": i / 10, "time/step_s": 30.0, "steps_skipped": i - 1} for i in (1, 2, 3)]
    settings = {"megarl": {"train_iters": 5}, "world_size": 2, "roles": {"actor": {}, "reward": {}},
                "environment": {"device": "GPU", "torch": "2.11", "megarl": "1.0", "git_commit": "a" * 40}}  # fmt: skip
    assert report_facts.facts(rows, settings) == [
        ["steps", "3 of 5", "runs, or ended early"],
        ["held-out accuracy", "0.25", ""],
        ["reward", "0.3", "from 0.1"],
        ["seconds per step", "30", "1m30s in 3 steps"],
        ["steps skipped", "2", "a loss or gradient was not finite, or over a limit"],
        ["ranks", "2", "actor, reward"],
        ["device", "GPU", ""],
        ["software", "megarl 1.0", "torch 2.11, commit aaaaaaaaaaaa"],
    ]
    assert report_facts.facts(rows, {})[0] == ["steps", "3", "from step 0"]
    assert json.loads(embedded_json(report_facts.facts([{"step": 4, "reward/mean": math.pi}], {})))[0][1] == "4"
