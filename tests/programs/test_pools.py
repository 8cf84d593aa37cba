"""Difficulty pools in runs: which prompts are drawn, groups outside a range; layouts and resumes are in tests/laws."""

from pathlib import Path

import pytest

from tests.helpers.programs import addition, metrics, rl_argv, rows_of, train, write_lines

# The pool of a prompt depends on whether the end token comes early, which the warm start does now and then.
FLAGS = (
    "--advantage grpo --kl-coefficient 0 --lr 1e-4 --prompts-per-step 4 --minibatch-size 8 --ppo-epochs 1"
    " --pool-bounds 0.3,0.7 --pool-weights 0.5,1,0 --pool-retire-after 3 --max-response-length 3"
    " --reward tests.laws.plug_ins:is_even"
)
STEPS = 8


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Few prompts, so that a run has several epochs."""
    return write_lines(tmp_path_factory.mktemp("pools") / "few.jsonl", [addition(n, 3) for n in range(4, 15)])


def argv(save: Path, prompts: Path, flags: str = "") -> list[str]:
    return rl_argv(save, f"{FLAGS} --prompts {prompts} --train-iters {STEPS} {flags}")


@pytest.fixture(scope="module")
def whole(prompts, tmp_path_factory) -> Path:
    """The run of one rank, with a checkpoint in the middle."""
    save = tmp_path_factory.mktemp("whole") / "run"
    train("rl", argv(save, prompts, "--save-interval 5"))
    return save


def test_prompts_are_drawn_by_their_latest_groups(whole):
    latest, in_a_row, drawn = {}, {}, []
    for step in range(1, STEPS + 1):
        rows, row = rows_of(whole, step), metrics(whole)[step]
        groups = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        for prompt in {group[0]["prompt"] for group in groups}:
            assert latest.get(prompt, 0.5) < 0.7 and in_a_row.get(prompt, 0) < 3  # neither easy nor retired
            drawn.append(prompt)
        for group in groups:
            share = sum(each["correct"] for each in group) / 2
            latest[group[0]["prompt"]] = share
            in_a_row[group[0]["prompt"]] = in_a_row.get(group[0]["prompt"], 0) + 1 if share <= 0.3 else 0
        retired = [prompt for prompt in latest if in_a_row[prompt] >= 3]
        counts = {
            "easy": sum(share >= 0.7 for share in latest.values()),
            "retired": len(retired),
            "hard": sum(share <= 0.3 for prompt, share in latest.items() if prompt not in retired),
            "unseen": 11 - len(latest),
        }
        assert {name: row[f"pools/{name}_fraction"] for name in counts} == {n: c / 11 for n, c in counts.items()}
    assert counts["easy"] and counts["hard"] + counts["retired"] and max(map(drawn.count, drawn)) > 2


@pytest.mark.long
def test_only_groups_within_the_range_are_trained_on(prompts, tmp_path):
    flags = "--group-filter range --group-filter-range 0.4,0.6"
    train("rl", argv(tmp_path, prompts, flags))
    rows = [row for step in range(1, STEPS + 1) for row in rows_of(tmp_path, step)]
    groups = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    assert {group[0]["kept"] for group in groups} == {True, False}
    assert all(group[0]["kept"] == (sum(row["reward"] for row in group) == 1.0) for group in groups)


@pytest.mark.long
def test_a_run_ends_when_every_prompt_is_solved(prompts, tmp_path):
    from tests.helpers.worlds import RankFailed

    flags = f"{FLAGS} --prompts {prompts} --train-iters {STEPS} --reward length --pool-bounds 0,0.5"
    with pytest.raises(RankFailed, match="no prompt is left to draw"):
        train("rl", rl_argv(tmp_path, flags))
