"""Runs with a judge as users start them: wrong input, --check, other features beside it, an evaluation, learning."""

import json
import random
from pathlib import Path

import pytest

from megarl.checkpoint import resume
from megarl.data.conversations import Encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from megarl.rewards.base import Sample
from megarl.rewards.judge.config import read_config
from megarl.rewards.judge.judge_prompts import JudgePrompts
from tests.helpers.envs.judges import LENGTH, judge_flags, write
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.forked_programs import accepted, check, refusal
from tests.helpers.programs import inputs, metrics, program, rl_argv, rows_of, sft_argv, train, write_lines
from tests.helpers.tiers import by_default

FLAGS = {
    "no file": ("--judge-config no/such.yaml", ["--judge-config no/such.yaml: cannot be read (No such file"]),
    "no weights": ("--judge-load no/such", ["--judge-load no/such: no such folder"]),
    "other shapes": ("--reward-hidden-size 64", ["--judge-load", "[32, 32]", "[32, 64]"]),
    "no room": ("--judge-max-length 30", ["train.jsonl:1: without the response the judge's prompt has",
                                          "--judge-max-length 30 leaves"]),
    "context parallel": ("--context-parallel-size 2",
                         ["--context-parallel-size 2: the judge generates", "--reward-context-parallel-size 1"]),
    "virtual stages": ("--reward-num-layers 4 --reward-pipeline-model-parallel-size 2"
                       " --reward-num-virtual-stages-per-pipeline-rank 2",
                       ["--reward judge: not allowed with virtual pipeline stages"]),
    "prefix": ("--judge-tensor-model-parallel-size 2",
               ["--judge-tensor-model-parallel-size: unknown flag; the judge is the model of the role reward: "
                "--reward-tensor-model-parallel-size"]),
    "weights of a role": ("--reward-pretrained-checkpoint x", ["--reward-pretrained-checkpoint", "--judge-load"]),
    "no tokenizer": ("--reward-tokenizer-model no/such", ["--reward-tokenizer-model no/such: no such file"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_flags(case, tmp_path):
    flags, needles = FLAGS[case]
    config = write(tmp_path / "judge.yaml")
    line = refusal(rl_argv(tmp_path / "run", judge_flags(config, flags)), size=2)
    assert all(needle in line for needle in needles), line
    assert not (tmp_path / "run").exists()


def test_a_place_that_no_field_fills(tmp_path):
    config = write(tmp_path / "judge.yaml", messages=[{"role": "user", "content": "{rubrik} {response}"}])
    line = refusal(rl_argv(tmp_path / "run", judge_flags(config)))
    assert "train.jsonl:1: the line has no metadata field 'rubrik', for the place {rubrik} of --judge-config" in line


def test_flags_of_a_judge_without_one_are_warned_of(tmp_path):
    config = write(tmp_path / "judge.yaml")
    argv = rl_argv(tmp_path / "run", f"--judge-config {config} --judge-max-requests 8")
    _, _, err = check(argv)
    assert "without effect: --judge-config, --judge-max-requests (--reward exact-match has no judge term)" in err


def test_check_names_the_judge(tmp_path):
    config = write(tmp_path / "judge.yaml")
    flags = judge_flags(
        config, "--reward-tensor-model-parallel-size 2 --role-map actor=0;critic=0;reference=0;reward=1-2"
    )
    lines = accepted(rl_argv(tmp_path / "run", flags), size=3)
    (line,) = [line for line in lines if line.split()[0] == "reward"]
    (read,) = [line for line in lines if line.strip().startswith("judge reads")]
    assert "tokens: 0+0=0" in read  # question and answer of the first prompt; the rest is unknown to the tokenizer
    assert "ranks 1-2; TP 2; 2 layers" in line
    assert f"from {inputs()}/sft; judge+0*exact-match; judges each response as it ends" in line


def test_a_resumed_run_says_that_the_file_has_changed(tmp_path):
    def entry(name: str, **changes) -> dict:
        flags = judge_flags(write(tmp_path / name, **changes))
        return resume.settings_entry(program("rl", rl_argv(tmp_path / "run", flags), 1))

    stored = {resume.SETTINGS: entry("one.yaml")}
    assert resume.changed_settings(stored, entry("moved.yaml")) is None
    changed = resume.changed_settings(stored, entry("other.yaml", samples=3))
    assert changed.startswith("--judge-config of sha256 ") and "(before: of sha256 " in changed


# -- beside what else a run may do -------------------------------------------------------------------------------

PAIR = {"mode": "pair", "messages": [{"role": "user", "content": "{first}{second}="}]}
GROUPS = "--advantage grpo --judge-max-length 160 --reward-max-failures 1"
LAG = "--generation-lag 1 --rollout-correction tis --train-iters 3"
BESIDE = {  # ranks, changes of the file, flags
    "a lead, on its own ranks": (3, {}, f"{LAG} --role-map actor=0;critic=0;reference=0;rollout=1;reward=2"),
    "a lead, on the rollout's ranks": (2, {}, f"{LAG} --role-map actor=0;critic=0;reference=0;rollout=1;reward=1"),
    "a lead and a filter": (3, PAIR, f"{LAG} {GROUPS} --group-filter reward"
                            " --role-map actor=0;reference=0;rollout=1;reward=2"),
    "greedy baselines": (2, {}, "--advantage remax --greedy-baseline"),
    "partial rollouts": (2, PAIR, f"{GROUPS} --over-sampling 2 --partial-rollouts --rollout-correction tis"),
    "episodes": (2, {}, "--environment tests.helpers.envs.sum_environments:Sums --max-response-length 48"
                 " --max-turn-length 4 --max-tokens-per-microbatch 100 --judge-max-length 120 --reward-max-failures 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(BESIDE, ("a lead and a filter",)))
def test_a_judge_beside(case, tmp_path):
    size, changes, flags = BESIDE[case]
    config = write(tmp_path / "judge.yaml", **changes)
    train("rl", rl_argv(tmp_path / "run", judge_flags(config, flags, "judge")), size)
    steps = [step for step in metrics(tmp_path / "run") if step]
    assert len(steps) == (3 if LAG in flags else 1)
    for step in steps:
        judged = rows_of(tmp_path / "run", step)
        assert judged and all(row["judgements"] for row in judged if not row.get("failed"))


@pytest.mark.long
def test_replicas_that_share_experts_judge_together(tmp_path):
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    train("sft", sft_argv(tmp_path / "model", f"{experts} --train-iters 10"))
    flags = f"{experts} --advantage grpo --kl-coefficient 0 --reward-max-failures 1"
    config = write(tmp_path / "judge.yaml", samples=1)
    beside = "--reward-expert-model-parallel-size 2 --role-map actor=0;reference=0;reward=1-2"
    for name, size, more in (("run", 2, "--expert-model-parallel-size 2"), ("beside", 3, beside)):
        argv = rl_argv(tmp_path / name, judge_flags(config, f"{flags} {more}"))
        train("rl", [token.replace(f"{inputs()}/sft", f"{tmp_path}/model") for token in argv], size)
    assert {len(row["judgements"]) for row in rows_of(tmp_path / "run")} > {1}  # a replica had to try again
    assert [row["judgements"] for row in rows_of(tmp_path / "run")] == [
        row["judgements"] for row in rows_of(tmp_path / "beside")
    ]


def test_an_evaluation_is_judged(tmp_path):
    config = write(tmp_path / "judge.yaml")
    flags = judge_flags(config).replace("--train-iters 1 ", "")
    for size in (1, 2):
        run_evaluate(evaluate_argv(tmp_path / str(size), flags), size)
    one, two = ((tmp_path / name / "samples.jsonl").read_text() for name in "12")
    assert one == two and all(json.loads(line)["judgements"] for line in one.splitlines())
    found = json.loads((tmp_path / "1" / "evaluation.json").read_text())["metrics"]
    assert found["eval/reward/judge"] == pytest.approx(found["eval/reward"])


TRUTH = "tests.programs.test_judge:is_even"


def is_even(sample) -> float:
    """A plug-in: 1 for a response that is an even number."""
    return float(sample.response.isdigit() and int(sample.response) % 2 == 0)


def lessons(config: Path, count: int) -> list[dict]:
    """Lines that teach a judge: what it reads of a text, and 1 if this is an even number, else 0."""
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model"))
    prompts, draw, rows = JudgePrompts(read_config(str(config)), Encoder(tokenizer), 5, LENGTH, 4), random.Random(0), []
    for _ in range(count):
        text = str(draw.randrange(10 ** draw.randrange(1, 5)))
        if draw.random() < 0.3:  # no number
            text = "".join(draw.choice("+=? 0123456789") for _ in range(draw.randrange(5)))
        (message,) = prompts.messages(Prompt(0), [text])
        rows.append({"prompt": message["content"], "response": str(int(is_even(Sample("", text))))})
    return rows


@pytest.mark.long
def test_a_policy_learns_from_a_judge(tmp_path):
    config = write(
        tmp_path / "judge.yaml", messages=[{"role": "user", "content": "{response}"}], range=[0, 1],
        number={"choice": {"1": 1, "0": 0}}, temperature=0, samples=1, retries=0,
    )  # fmt: skip
    lines = write_lines(tmp_path / "lessons.jsonl", lessons(config, 3000))
    shape = "--{0}hidden-size 64 --{0}ffn-hidden-size 128"
    teach = f"--prompts {lines} --train-iters 500 --global-batch-size 64 --lr 3e-3 --lr-warmup-iters 20"
    lengths = "--max-prompt-length 60 --max-tokens-per-microbatch 4096"
    train("sft", sft_argv(tmp_path / "judge", f"{teach} {lengths} {shape.format('')}"))
    flags = judge_flags(config, reward=f"judge+0*{TRUTH}").replace(f"{inputs()}/sft", f"{tmp_path}/judge")
    more = "--train-iters 40 --minibatch-size 12 --ppo-epochs 1 --lr 2e-3 --advantage grpo --kl-coefficient 0.02"
    more += f" {shape.format('reward-')}"
    train("rl", rl_argv(tmp_path / "run", f"{flags} {more} --prompts-per-step 6 --samples-per-prompt 4"), 2)
    found = metrics(tmp_path / "run")
    for name in ("reward/judge/mean", f"reward/{TRUTH}/mean"):
        first, last = (sum(found[step][name] for step in steps) / 5 for steps in (range(1, 6), range(36, 41)))
        assert last > first + 0.2, (name, first, last)
