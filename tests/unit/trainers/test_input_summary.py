"""What `--check` prints of a command line that is valid."""

import re

import pytest

from megarl.trainers import input_summary
from megarl.trainers.events import RunEvents
from tests.helpers.folders import any_types, hf_folders
from tests.helpers.folders.hf_damage import argv as folder_argv
from tests.helpers.forked_programs import accepted
from tests.helpers.programs import inputs, metrics, reward_argv, rl_argv, sft_argv, train
from tests.helpers.tiers import by_default

CONSTANT = "--lr-decay-style constant --lr-warmup-iters 0"

# Program, command line, lines that it must have, without the columns' spaces.
CASES = {
    "rl": (rl_argv, "--role-map actor=0;critic=1;reward=1;reference=1 --lr-warmup-iters 0 --train-iters 7"
           " --ema-decay 0.9 --reference-update-interval 2", [
        "actor rank 0; one replica; 2 layers, hidden size 32, .* parameters from .*; trained; moving average with decay"
        " 0.9", "reference rank 1; .*; gets the actor's weights every 2 steps",
        "critic rank 1; one replica; .*; trained", "reward rank 1; exact-match", "rollout rank 0; the actor's model",
        r"tokenizer \d+ tokens from .*tokenizer.model, end '</s>'; no chat template",
        "prompts .* from .*jsonl", r"first \d+ tokens: .*=",
        "algorithm --advantage gae, --policy-loss ppo-clip, --loss-aggregation token-mean",
        r"step \d+ prompts, \d+ responses of at most \d+ tokens, mini-batches of \d+", "run 7 steps, .*"]),
    "sft": (sft_argv, "", ["actor ranks 0-1; DP 2; .*; trained", r"first \d+ tokens: .*=⟦.*</s>⟧",
                           "step --global-batch-size 12"]),
    "reward": (reward_argv, "", ["reward ranks 0-1; DP 2; .*; trained", "chosen .*⟦</s>⟧", "rejected .*⟦</s>⟧"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_check_says_what_it_understood(name, tmp_path):
    argv, flags, wanted = CASES[name]
    found = [" ".join(row.split()) for row in accepted(argv(tmp_path / "run", flags), name, 2)]
    for line in wanted:
        assert any(re.fullmatch(line, row) for row in found), (line, found)
    assert not (tmp_path / "run").exists()


def test_a_check_says_which_chat_template_is_used(tmp_path):
    folder, file = hf_folders.write_folder("qwen2", tmp_path / "model"), tmp_path / "my.jinja"
    (folder / "chat_template.jinja").rename(file)

    def said(flags: str = "") -> str:
        (row,) = (row for row in accepted(folder_argv(tmp_path, folder, flags=flags), "sft") if "tokenizer  " in row)
        return row.split("; ")[-1]

    assert (said(), said(f"--chat-template {file}")) == ("no chat template", f"chat template {file}")
    file.rename(folder / "chat_template.jinja")
    assert (said(), said("--chat-template none")) == ("its chat template", "no chat template")


def test_a_check_says_that_transformers_computes_a_model(tmp_path):
    any_types.save("granite", tmp_path / "model")
    rows = accepted(folder_argv(tmp_path, tmp_path / "model", flags="--model-source transformers"), "sft")
    assert any("; transformers' granite, self-check passed; 6 layers, hidden size 64, " in row for row in rows)


# Program, flags, whether it resumes from step 2 of a run of 2 steps.
RUNS = {
    "rl": ("rl", "--train-iters 3 --save-interval 2 --eval-prompts {held_out} --eval-interval 2 --no-best", False),
    "at the end": ("rl", "--train-iters 2 --eval-prompts {held_out}", False),
    "without evaluation": ("sft", f"--train-iters 3 --save-interval 1 {CONSTANT}", False),
    "best": ("sft", f"--train-iters 3 --eval-prompts {{held_out}} --eval-interval 1 {CONSTANT}", False),
    "resumed": ("rl", f"--train-iters 4 --eval-prompts {{held_out}} --save-interval 4 {CONSTANT}", True),
    "generation alone": (
        "rl",
        "--train-iters 2 --debug-rollout-only --advantage grpo --kl-coefficient 0 --entropy-coefficient 0",
        False,
    ),
}


def listed(rows: list[str], name: str) -> list[int]:
    """The steps that a row names; 0: before the first."""
    (row,) = (row for row in rows if row.split()[0] == name)
    return [0] * ("before the first step" in row) + sorted(map(int, re.findall(r"\b\d+\b", row.split("after", 1)[-1])))


@pytest.mark.parametrize("name", by_default(RUNS, ("without evaluation", "best", "resumed", "generation alone")))
def test_a_run_does_what_its_check_said(name, tmp_path):
    kind, flags, resumes = RUNS[name]
    argv, save = {"rl": rl_argv, "sft": sft_argv}[kind], tmp_path / "run"
    flags = flags.format(held_out=inputs() / "heldout.jsonl").replace("--no-best", "--keep-best false")
    if resumes:
        train(kind, argv(save, f"--train-iters 2 {CONSTANT}"))
        flags += f" --load {save}"
    rows = [" ".join(row.split()) for row in accepted(argv(save, flags), kind)]
    before = set(metrics(save)) if resumes else set()
    train(kind, argv(save, flags))
    done = {step: row for step, row in metrics(save).items() if step not in before}
    (run,) = (row for row in rows if row.startswith("run "))
    assert run.startswith(f"run {len(done.keys() - {0})} steps") and run.endswith(f", in {save}")
    evaluated = [step for step, row in done.items() if any(key.startswith("eval/") for key in row)]
    assert (listed(rows, "evaluation") if evaluated else []) == evaluated
    assert ("evaluation none (--eval-prompts)" in rows) == (not evaluated)
    found = sorted(int(path.name[5:]) for path in (save / "checkpoints").glob("step_*")) if not resumes else [4]
    promised = listed(rows, "checkpoints") if any(row.startswith("checkpoints") for row in rows) else []
    is_best = any("and after the best evaluation so far" in row for row in rows)
    assert set(promised) <= set(found) and (is_best or promised == found) and bool(promised) == bool(found)


@pytest.mark.parametrize("first, last, interval", [(1, 100, 20), (1, 7, 0), (3, 50, 7)])
def test_long_lists_are_told_by_their_rule(first, last, interval):
    events = RunEvents(first, last, True, False, interval, True, 1, False, ())
    text, steps = input_summary._steps(events.evaluations(), interval), events.evaluations()
    assert steps[-1] == last and all(step % interval == 0 for step in steps[:-1] if interval)
    assert (f"{len(steps)} times" in text) == (len(steps) > 8) and (len(steps) > 8 or str(last) in text)


def test_an_export_is_announced_with_the_name_of_the_last(tmp_path):
    folder = hf_folders.write_folder("qwen2", tmp_path / "model")
    rows = accepted(folder_argv(tmp_path, folder, flags="--export-hf --train-iters 3"), "sft")
    assert any("hf/step_00000003 the last" in row for row in rows), rows
