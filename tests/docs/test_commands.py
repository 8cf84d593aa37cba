"""Every command in the documentation is one that works, as far as parsers and files can tell."""

import re

import pytest

from megarl.errors import UsageError
from tests.helpers.pages import commands, documents
from tests.helpers.pages.command_flags import WrongCommand, all_flags
from tests.helpers.programs import ROOT

PAGES = {documents.name_of(page): page for page in documents.pages()}
FOREIGN_FLAGS = {
    "--signal": "Slurm",
    "--no-build-isolation": "pip",
    "--squared-weight": "of the example in extending.md",
}
OTHERS_IN_CODE = set("--abbrev --exclude --local-dir --resv-ports --flag --off".split())  # of git, hf, srun; examples


def problem_of(command: documents.Command) -> str:
    """The problem of a command; "" if it is right."""
    try:
        commands.check(command)
    except (WrongCommand, UsageError) as problem:
        return str(problem)
    return ""


def only_command(text: str) -> documents.Command:
    """The one command in a text."""
    (command,) = documents.parse_shell(text, "page")
    return command


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_work(name):
    wrong = []
    for command in documents.commands_in(documents.text_of(PAGES[name]), name):
        problem = problem_of(command)
        if problem != command.error:
            wrong.append(f"{command}\n    {problem or 'does not end with the error that the page shows'}")
    assert not wrong, "\n".join(wrong)


def test_commands_are_found_everywhere():
    found = [c for name, page in PAGES.items() for c in documents.commands_in(documents.text_of(page), name)]
    assert len(found) > 60 and len({command.where.split(":")[0] for command in found}) > 12
    assert {command.words[0] for command in found} >= {"bash", "python", "torchrun", "curl"}
    assert any(command.variables.get("NPROC") == "4" for command in found)


@pytest.mark.parametrize("name", [name for name in PAGES if not name.endswith(documents.GENERATED)])
def test_every_flag_in_prose_exists(name):
    text = documents.text_of(PAGES[name])
    if name == "docs/migrating.md":
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    known, unknown = all_flags() | set(FOREIGN_FLAGS), []
    for line, span in documents.inline_code(text):
        match = re.match(r"(--[a-z][a-z0-9-]*)(.?)", span)
        if match and match[1] not in known and not match[1].endswith("-") and match[2] not in ("…", "."):
            unknown.append(f"{name}:{line} {span}")
    assert not unknown, "\n".join(unknown)


def test_every_flag_in_a_message_exists():
    known, unknown = all_flags() | set(FOREIGN_FLAGS) | OTHERS_IN_CODE, set()
    for text in (*documents.code_texts(), "an invented --clip-rang 0.1"):
        unknown |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w…-])", text)) - known
    assert unknown == {"--clip-rang"}


RIGHT = (
    "NPROC=4 bash launch/run.sh train_rl --config configs/quickstart.yaml configs/recipes/grpo.yaml --prompts x.jsonl",
    "bash launch/run.sh train_sft --config mine.yaml --train-iters N --lr 1e-5 …",
    "torchrun --nproc-per-node 2 -m megarl.evaluate --load RUN --eval-k 1,4",
    "python -m megarl.plan --world-size 8 --vocab-size 100 --num-layers 4 … --bf16",
    "python tools/curves.py --out runs/curves --recipes gspo --seeds 1",
    "SEED=2 bash launch/quickstart.sh --clip-range 0.3",
    "bash launch/setup_env.sh test,serve",
    "pip install .[serve]",
    "curl localhost:8000/v1/completions -d '{}'",
    "... --advantage my_plugins:mine",
)
WRONG = {
    "bash launch/run.sh train_rl --clip-rang 0.1": "--clip-rang: unknown flag",
    "bash launch/run.sh train_rl --clip-range much": "--clip-range",
    "bash launch/run.sh train_rl --kl-estimator k4": "allowed is one of k1",
    "bash launch/run.sh train_sft --clip-range 0.1": "--clip-range",
    "bash launch/run.sh train_dpo --lr 1": "train_dpo: allowed",
    "bash launch/run.sh train_rl --config configs/nothing.yaml": "configs/nothing.yaml: no such file",
    "bash launch/run.sh train_rl --config configs/quickstart.yaml configs/recipes/grpo.yaml --kl-controller adaptive":
        "--kl-controller adaptive: needs --kl-target",
    "bash launch/run.sh train_rl --lion-beta1 0.9": "does not use this Megatron flag",
    "bash launch/run.sh train_rl --critic-num-layer 4": "--critic-num-layer: unknown flag",
    "NPROCS=4 bash launch/run.sh train_rl --lr 1": "does not read the variable NPROCS",
    "bash launch/quick.sh": "there is no script launch/quick.sh",
    "bash launch/quickstart.sh --clip-rang 0.3": "--clip-rang",
    "bash launch/setup_env.sh tests": "no extra tests",
    "pip install .[server]": "no extra server",
    "python tools/curves.py --output runs": "no flag --output",
    "python tools/curve.py": "no file tools/curve.py",
    "python -m megarl.plans --world-size 4": "no module megarl.plans",
    "python -m megarl.plan --world-size 4 --vocab 3": "--vocab: unknown flag",
    "torchrun --nproc 2 -m megarl.train_rl": "torchrun has no flag",
    "curl localhost:8000/v1/complete": "the server has no /v1/complete",
    "bash tests/run.sh tests/unit/comms": "no file tests/unit/comms",
    "NPROX=2 python tools/curves.py --out x": "nothing reads this variable",
    "megarl-run train_rl": "belongs to OTHERS",
}  # fmt: skip


@pytest.mark.parametrize("text", RIGHT)
def test_right_commands_pass(text):
    assert problem_of(only_command(text)) == ""


@pytest.mark.parametrize("text", WRONG)
def test_wrong_commands_are_found(text):
    assert WRONG[text] in problem_of(only_command(text))


def test_shell_is_parsed():
    text = ("export A=1  # a comment\nfor case in a b; do python tools/x.py --case $case; done\n"
            "V=$(bash launch/setup_env.sh test)\nA=2 B=3 bash x.sh --flag \\\n    'two words' >log 2>&1 && echo end\n"
            "cat <<EOF\nrm -rf /\nEOF\nMODEL_ARGS=(\n    --num-layers 4  # few\n    --lr 1\n)\n")  # fmt: skip
    found = documents.parse_shell(text, "page")
    assert [command.words for command in found] == [
        ("export", "A=1"), ("python", "tools/x.py", "--case", "$case"), ("bash", "launch/setup_env.sh", "test"),
        ("bash", "x.sh", "--flag", "two words"), ("echo", "end"), ("cat",),
        ("MODEL_ARGS=", "--num-layers", "4", "--lr", "1"),
    ]  # fmt: skip
    assert found[3].variables == {"A": "2", "B": "3"}
    page = "```console\n$ bash a.sh \\\n    --b\nmegarl: error: no\n```\n"
    page += "`python -m x --y` and `bash`\n\n```bash\npip x\n```\n"
    found = documents.commands_in(page, "page")
    assert [c.words for c in found] == [("bash", "a.sh", "--b"), ("pip", "x"), ("python", "-m", "x", "--y")]
    assert [c.error for c in found] == ["no", "", ""]


FUTURE = ("megarl/environments/",)  # a place that has nothing yet, and says so


def missing_paths(text: str) -> list[str]:
    """Paths of the repository in inline code that do not exist; a name in capitals stands for others."""
    spans = [span for _, span in documents.inline_code(text)]
    found = (re.match(r"((?:megarl|tests|tools|launch|configs|docs)/[\w./-]*\w/?)(::?\w+)?$", span) for span in spans)
    paths = [match[1] for match in found if match and not re.search(r"/[A-Z_]+(\.|$)", match[1])]
    return [path for path in paths if path not in FUTURE and not (ROOT / path).exists()]


@pytest.mark.parametrize("name", PAGES)
def test_examples_name_files_that_exist(name):
    assert missing_paths(documents.text_of(PAGES[name])) == []


def test_missing_paths_are_found():
    text = "`megarl/train_rl.py` `tests/no.py::test` `launch/models/NAME.sh` `docs/` `tools/none` `configs/a.yaml`"
    assert missing_paths(text) == ["tests/no.py", "tools/none", "configs/a.yaml"]
