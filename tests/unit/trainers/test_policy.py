"""The policy of a program that does not train: what is wrong with its tokenizer or weights is one line."""

import re

import pytest

from megarl.trainers.policy import PolicyInputs
from tests.helpers.evaluation import evaluate_argv
from tests.helpers.programs import inputs, program
from tests.helpers.texts.refusals import refusal

REFUSALS = {
    "no checkpoint": ("--load {none}", "--load .*none: no such folder"),
    "no best": ("--load {sft}/checkpoints/best", "--load .*best: no such folder; allowed .* checkpoints/best"),
    "experts": ("--num-experts 4 --moe-router-topk 2", r"--load .*: has no actor.*router.weight, which actor needs"),
    "other shape": ("--hidden-size 64", r"--load .*: .* shape \[32, 32\]; the flags of actor describe \[32, 64\]"),
    "no tokenizer": ("--tokenizer-model {none}", "--tokenizer-model .*none: no such file"),
    "weights from elsewhere": ("--pretrained-checkpoint {sft}", "--pretrained-checkpoint .*: weights come from --load"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_rejected_in_one_line(case, tmp_path):
    flags, message = REFUSALS[case]
    command = evaluate_argv(flags=flags.format(none=tmp_path / "none", sft=inputs() / "sft"))
    line = refusal(PolicyInputs, program("evaluate", command, 1))
    assert re.match(message, line) and "\n" not in line


@pytest.mark.parametrize(
    "flag, named", [("--load", "--load or --hf-model"), ("--tokenizer-model", "--tokenizer-model")]
)
def test_flags_without_default_are_required(flag, named):
    command = evaluate_argv()
    place = command.index(flag)
    config = program("evaluate", command[:place] + command[place + 2 :], 1)
    assert refusal(PolicyInputs, config) == f"{named} is missing: it has no default"


def test_results_name_the_checkpoint():
    policy = PolicyInputs(program("evaluate", evaluate_argv(), 1))
    source = policy.source()
    assert source["program"] == "train_sft" and source["checkpoint"].startswith(str(inputs() / "sft"))
    assert policy.rollout_role().lora is None
