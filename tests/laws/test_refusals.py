"""Wrong input of a feature: a program refuses it in one line that names the flag, before any work, with status 2."""

import pytest

from tests.helpers.forked_programs import refusal
from tests.helpers.programs import rl_argv
from tests.laws.features.data import MIXED, POOLS, SIZES
from tests.laws.features.feature import AHEAD, ALL_AHEAD, EP2, EXPERTS, GRPO, OWN_EXPERTS, ROLLOUT_APART, SUMS
from tests.laws.files import folder, named

ONE = "--prompts {one} --advantage reinforce++"  # a file with one response to a prompt; compares no responses
JUDGED = "{judge} --judge-max-length 160 --reward-max-failures 1"
REFUSED = {  # flags -> a part of the line, in which {NAME} is a file, too
    f"{MIXED} --max-response-length 1": "few: max-response-length 2: allowed is at most --max-response-length 1",
    f"{MIXED} --overlong-buffer 3": "few: max-response-length 2: allowed is at least --overlong-buffer 3",
    f"{MIXED} {SUMS}": "few: max-response-length: not allowed with --environment",
    f"{MIXED} --prompts {{short_prompts}}": "allows 4; --filter-long-prompts drops such lines (the limit of its file",
    f"{MIXED} --eval-interval 1 --eval-prompts {{mixture}}":
        "--eval-prompts {mixture}: many: weight is unknown here; allowed: environm",
    f"{POOLS} {ROLLOUT_APART} {AHEAD}": "--generation-lag 1: --pool-bounds needs the scores of a batch",
    f"{SIZES} --prompts {{one}}": "few: samples-per-prompt 1: --advantage grpo compares the responses to a prompt",
    f"{SIZES} --prompts {{eight}} --minibatch-size 6":
        "--minibatch-size 6: --prompts {eight}: few: samples-per-prompt 8",
    f"{SIZES} {ONE} --group-filter reward": "few: samples-per-prompt 1: --group-filter reward: needs ",
    f"{SIZES} {ONE} --pool-bounds 0.2,0.8": "few: samples-per-prompt 1: --pool-bounds 0.2,0.8: needs",
    f"{SIZES} {ONE} --reward exact-match+0.1*adaptive-length": "few: samples-per-prompt 1: adaptive-length",
    f"{SIZES} {ONE} --policy-loss real": "few: samples-per-prompt 1: --policy-loss real: compares",
    f"{SIZES} {ONE} {JUDGED}": "--prompts {one}: samples-per-prompt 1: --judge-config",
    f"{SIZES} {ONE} --eval-interval 1 --eval-prompts {{one}}": "few: samples-per-prompt is unknown here",
    f"{SIZES} --prompts {{eight}} --kl-coefficient 0.1 --kl-controller adaptive --kl-target 0.1 --kl-horizon 5":
        "few: samples-per-prompt 8: --kl-horizon 5.0: allowed is more than 0.2 × 32 responses of a step",
    f"{GRPO} --reward-pattern 1 --prompts {{rewards}} {SUMS}": "needs the term environment as often as --reward has it",
    f"{GRPO} --reward-pattern 1 --prompts {{rewards}} --advantage gdpo --reward exact-match+length":
        "--advantage gdpo: compares the terms of one --reward",
    "--replica-port 29600 --agent-sessions --advantage rloo": "not allowed with --agent-sessions: replicas that join",
    "--replica-port 29600 --serve-policy": "--replica-port 29600: not allowed with --serve-policy",
    f"{GRPO} {OWN_EXPERTS} --replica-port 29600": "--replica-port 29600: not allowed with --router-replay rollout",
    f"{GRPO} {EXPERTS} {EP2} --role-map actor=0-1;reward=0-1 --replica-port 29600":
        "--replica-port 29600: replicas share experts",
    f"{GRPO} {ALL_AHEAD} --generation-schedule recorded --replica-port 29600":
        "--replica-port 29600: not allowed with --generation-schedule recorded",
    "--replica-port 65536": "--replica-port 65536: allowed is 1 to 65535",
    "--replica-port 29600 --replica-timeout 0": "--replica-timeout 0.0: allowed is a number above 0",
}  # fmt: skip
OF_FILES = {  # a line of a file's entry -> a part of the line
    "reward: no-such": "known: reward no-such: no-such is unknown; allowed: model",
    "reward: none": "known: reward none: allowed are terms of --reward",
    "reward: cosine": "known: reward cosine: cosine needs a term that says which responses are correct",
    "reward: code": "known.jsonl:1: --reward code",
    "reward: [1]": "known: reward: must be a text",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED)
def test_what_a_feature_cannot_have_is_refused(flags, tmp_path):
    argv = rl_argv(tmp_path, named(flags))
    assert named(REFUSED[flags]) in refusal(argv, size=2 if "--role-map" in flags else 1)


@pytest.mark.parametrize("line", OF_FILES)
def test_wrong_entries_of_files_are_refused(line, tmp_path):
    named("{rewards}")  # makes the files
    (tmp_path / "mix.yaml").write_text(f"known:\n  prompts: {folder()}/known.jsonl\n  {line}\n")
    assert OF_FILES[line] in refusal(rl_argv(tmp_path / "run", f"--prompts {tmp_path / 'mix.yaml'}"))
