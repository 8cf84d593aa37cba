"""Every fenced block of the documentation is what its language says: shell runs, files are read, Python runs.

Of a shell block, bash runs all but the programs, which are recorded (`helpers.pages.pasted`) and then parsed by their
own parsers (`tests.helpers.pages.pasted_calls`). `test_commands.py` has the commands in prose.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import arguments
from megarl.data.mixture import read_mixture
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from megarl.extras import report_samples
from megarl.rewards.base import only_turn
from megarl.rewards.chosen_verifiers import build_verifiers
from megarl.rewards.judge.config import read_config
from megarl.roles.scored import sample_of
from tests.helpers.pages import documents, pasted
from tests.helpers.pages.command_flags import WrongCommand
from tests.helpers.pages.pasted_calls import GAP, check_call
from tests.helpers.programs import ROOT

PAGES = {documents.name_of(page): page for page in [*documents.pages(), ROOT / "SECURITY.md"]}
LANGUAGES = {"bash", "console", "json", "python", "text", "yaml"}  # text: what a program prints
# Pages whose commands name functions of their Python: how many of its blocks are the module, and its name.
MODULES = {"docs/extending.md": (5, "my_plugins"), "docs/rewards.md": (1, "my_rewards")}
# Commands that cannot be parsed here, with the reason.
UNPARSED = {
    "--transformer-impl transformer_engine": "needs a CUDA device and Transformer Engine",
    "--hf-model runs/vision_quickstart/data/model": "the script makes this folder",
}
# Files that a command may name though no checkout has them: the reader's, or of a run.
FILE = re.compile(r"[\w./*-]+\.(?:yaml|json|jsonl|py|sh|jinja|txt|model|parquet)(?:\.gz)?")
READERS = re.compile(
    r"(?:/path|/?models|my|data|runs?|site|dist)/|(?:mine|pairs|heldout|train|tokenizer|texts|table|plan|judge)\."
)


def blocks_of(name: str, *languages: str) -> list[documents.Block]:
    """The blocks of a page in these languages."""
    return [block for block in documents.blocks(documents.text_of(PAGES[name])) if block.language in languages]


def pages_with(*languages: str) -> list[str]:
    """The pages that have blocks in these languages."""
    return [name for name in PAGES if blocks_of(name, *languages)]


# -- languages ---------------------------------------------------------------------------------------------------


def wrong_languages(text: str) -> list[str]:
    """What is wrong with the fences of a page."""
    found = documents.blocks(text)
    fences = re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)
    wrong = [] if len(fences) == 2 * len(found) else ["a fence that begins or ends no block"]
    for block in found:
        is_typed = re.search(r"^\$ ", block.text, re.MULTILINE) is not None
        if block.language not in LANGUAGES:
            wrong.append(f"{block.line}: language {block.language!r}; allowed: {', '.join(sorted(LANGUAGES))}")
        elif is_typed != (block.language == "console"):
            wrong.append(f"{block.line}: {block.language}: lines after a prompt `$` belong into console, all else not")
    return wrong


@pytest.mark.parametrize("name", PAGES)
def test_every_block_says_what_it_is(name):
    assert wrong_languages(documents.text_of(PAGES[name])) == []


def test_wrong_languages_are_found():
    assert wrong_languages("```bash\nls\n```\n```console\n$ ls\n```\n```text\na\n```\n") == []
    for text in (
        "```\nls\n```\n",
        "```text\n$ ls\n```\n",
        "```console\nls\n```\n",
        "~~~bash\nls\n~~~\n",
        "```sh\nls\n",
    ):
        assert wrong_languages(text), text


# -- shell -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return pasted.page_folder(tmp_path_factory.mktemp("page"))


@pytest.fixture
def here(checkout, monkeypatch) -> Path:
    """The checkout of recorders as the current folder, whose modules can be imported."""
    monkeypatch.chdir(checkout)
    monkeypatch.syspath_prepend(str(checkout))
    yield checkout
    for module in ("my_plugins", "my_rewards"):
        sys.modules.pop(module, None)
        (checkout / f"{module}.py").unlink(missing_ok=True)


def typed(block: documents.Block) -> str:
    """What the user types of a block: all of bash, of console what follows a prompt."""
    if block.language == "bash":
        return re.sub(r"^(\.\.\.|…|(?=--)) ?", f"bash launch/run.sh train_rl {GAP} ", block.text, flags=re.MULTILINE)
    lines = re.findall(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)", block.text, re.MULTILINE)
    return "\n".join(lines)


def problems_of(block: documents.Block, folder: Path) -> list[str]:
    """What is wrong with a shell block, but for the error that it shows."""
    calls, output, failure = pasted.run(typed(block), folder)
    wrong = [failure] if failure else []
    if not calls and block.language == "bash":
        wrong.append("starts no program")
    printed = io.StringIO(output)
    printed.seek(0, io.SEEK_END)
    for words in calls:
        line = " ".join(words)
        wrong += [f"{word}: no such file" for word in missing_files(words)]
        if any(text in line for text in UNPARSED):
            continue
        try:
            with contextlib.redirect_stdout(printed):
                check_call(words)
        except (WrongCommand, UsageError) as problem:
            shown = {f"{documents.ERROR}{problem}", f"megarl: {problem}"}
            if not shown & set(block.text.split("\n")):
                wrong.append(f"{problem}\n        of {line}")
    plans = [words for words in calls if "megarl.plan" in words and GAP not in words]
    if block.language == "console" and plans:  # its output depends on the flags alone
        wrong += [f"does not print: {line}" for line in unprinted(block, printed.getvalue())]
    return [f"line {block.line}: {problem}" for problem in wrong]


def unprinted(block: documents.Block, printed: str) -> list[str]:
    """The lines of output that a block shows and that were not printed; a gap stands for lines, or a part of one."""
    lines = [line.rstrip() for line in printed.split("\n")]
    shown = re.sub(r"^\$ (?:[^\n]*\\\n)*[^\n]*", "", block.text, flags=re.MULTILINE).strip("\n").split("\n")
    assert len(shown) > 5
    patterns = {line: re.compile(".*".join(map(re.escape, line.split(GAP)))) for line in shown}
    return [line for line in shown if not any(patterns[line].fullmatch(each) for each in lines)]


def missing_files(words: tuple[str, ...]) -> list[str]:
    """Files that a command names and that neither the checkout nor the reader has."""
    named = [word for word in words[1:] if FILE.fullmatch(word) and not READERS.match(word)]
    return [word for word in named if not Path(word).exists() and not (ROOT / word).exists()]


@pytest.mark.parametrize("name", pages_with("bash", "console"))
def test_what_a_page_types_is_accepted(name, here):
    if name in MODULES:
        number, module = MODULES[name]
        code = [block.text for block in blocks_of(name, "python")[:number]]
        (here / f"{module}.py").write_text("\n\n".join(code))
    wrong = [problem for block in blocks_of(name, "bash", "console") for problem in problems_of(block, here)]
    assert not wrong, "\n".join(wrong)


WRONG = {
    "NPROC=2 bash launch/run.sh train_rl --config my_run.yaml --clip-rang 0.1": "did you mean --clip-range?",
    "bash launch/run.sh train_rl --config my_run.yaml --advantage grpo --gae-lambda 1": "without effect: --gae-lambda",
    "bash launch/run.sh train_rl --config my_run.yaml \n    --lr 1": "status 127",
    "bash launch/run.sh train_sft --config my_run.yaml --lr 'x": "unexpected EOF",
    "NPROC=2 bash launch/run.sh train_rl --config my_run.yaml --tensor-model-parallel-size 3": "2",
    "bash launch/run.sh train_rl --config other.yaml": "other.yaml",
    "DRY_RUN=1 MODEL=qwen3_7b bash launch/rl.sh": "MODEL=qwen3_7b",
    "DRY_RUN=1 MODEL=qwen3_8b NPROC=8 TP=3 bash launch/rl.sh": "3",
    "--reward my_rewards:none": "my_rewards",
    "python tools/curves.py --out x --recipe grpo": "--recipe",
    "python tools/curves.py --out x --seeds one": "one",
    "torchrun --nproc-per-node two -m megarl.train_rl …": "two",
    "python tools/curve.py": "curve",
    "bash launch/setup_env.sh tests": "no extra tests",
    "python tools/inspect_checkpoint.py old.json": "old.json",
    "# nothing": "starts no program",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_wrong_shell_is_found(text, here):
    assert WRONG[text] in "\n".join(problems_of(documents.Block(1, "bash", text), here))


def test_lines_of_megarl_that_a_page_shows_are_in_the_code():
    pieces = [text.split(documents.HOLE) for text in documents.code_texts() if len(text) >= 12]
    longest = {max(each, key=len): each for each in pieces}
    shown, unknown = 0, []
    for name in pages_with("text", "console"):
        for line in re.findall(
            r"^megarl: .*", "\n".join(b.text for b in blocks_of(name, "text", "console")), re.MULTILINE
        ):
            found = [longest[piece] for piece in longest if len(piece) >= 12 and piece in line]
            is_known = any(re.search(".+?".join(map(re.escape, each)), line) for each in found)
            shown, unknown = shown + 1, unknown + [f"{name}: {line}"] * (not is_known)
    assert shown > 25 and unknown == []


# -- files -------------------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> list:
    return [vars(prompt) for prompt in load_prompts(str(path))]


def read_samples(path: Path) -> list:
    """A row of a samples file, as the report shows it; the page has it on several lines."""
    (path.parent / "samples").mkdir()
    (path.parent / "samples" / "step_00000001.jsonl").write_text(" ".join(path.read_text().split()) + "\n")
    return report_samples.samples(path.parent, [{"step": 1}])["steps"][0]["rows"]


def read_data_mixture(path: Path) -> list:
    return [entry.name for entry in read_mixture(str(path), "--prompts", "rl")]


# The reader of each block with a file in it, in the order of the page, and something that it must find.
FILES: dict[str, list[tuple[Callable[[Path], object], object]]] = {
    "docs/data.md": [(read_data_mixture, ["math", "code", "games"])],
    "docs/distillation.md": [
        (lambda path: [row["teacher"] for row in read_prompts(path)], ["math"]),
        (lambda path: [row["teacher_prompt"] for row in read_prompts(path)], ["10*7=70, 2*7=14. 12*7="]),
    ],
    "docs/judges.md": [
        (lambda path: read_config(str(path)).read('It is fine. {"grade": 7}'), [7.0]),
        (lambda path: [row["judgements"][1]["number"] for row in read_samples(path)], [1.0]),
    ],
    "README.md": [(lambda path: [row["answer"] for row in read_prompts(path)], ["51"])],
}


@pytest.mark.parametrize("name", pages_with("json", "yaml"))
def test_the_files_of_a_page_are_read_by_what_reads_them(name, tmp_path):
    for number, (block, (read, expected)) in enumerate(zip(blocks_of(name, "json", "yaml"), FILES[name], strict=True)):
        path = tmp_path / str(number) / f"page.{'jsonl' if block.language == 'json' else 'yaml'}"
        path.parent.mkdir()
        path.write_text(block.text)
        assert read(path) == expected, f"{name}:{block.line}"


# -- Python ------------------------------------------------------------------------------------------------------

# The test that runs each block, in the order of the page; those without :: are of this file.
PYTHON: dict[str, list[str]] = {
    "docs/agents.md": [
        "tests/docs/test_examples.py::test_the_agents_of_the_page_run_unchanged",
        "tests/docs/test_examples.py::test_the_agents_of_the_page_run_unchanged",
        "tests/docs/test_examples.py::test_the_driver_of_the_page_runs_unchanged",
    ],
    "docs/data.md": ["tests/programs/test_data_page.py::test_the_python_of_the_page"],
    "docs/environments.md": ["tests/docs/test_examples.py::test_the_environments_of_the_page_run_unchanged"] * 3,
    "docs/extending.md": ["tests/docs/test_examples.py::test_the_plug_ins_of_extending_run_unchanged"] * 5
    + ["tests/unit/flags/test_loss_options.py::test_the_loss_file_of_the_docs_works_unchanged"],
    "docs/failures.md": ["tests/programs/test_saved_rollouts.py::test_the_python_of_the_page_reads_a_step"],
    "docs/huggingface.md": [
        "tests/docs/test_new_family.py::test_the_family_of_the_page_computes_what_transformers_computes"
    ],
    "docs/rewards.md": ["test_the_rewards_of_other_frameworks_score", "test_trls_own_rewards_score"],
    "docs/serving.md": ["tests/programs/test_serve.py::test_the_requests_of_the_page_are_answered"],
}


@pytest.mark.parametrize("name", pages_with("python"))
def test_a_test_runs_each_python_block(name):
    for block, test in zip(blocks_of(name, "python"), PYTHON[name], strict=True):
        compile(block.text, f"{name}:{block.line}", "exec")
        path, _, function = test.rpartition("::")
        text = (ROOT / path).read_text() if path else Path(__file__).read_text()
        assert f"def {function}(" in text and f'"{Path(name).name}"' in text.replace(name, Path(name).name), test


# A row as verl's tables have it, with TRL's name of the answer.
ROW = {
    "prompt": [{"role": "user", "content": "3+4="}], "solution": "$7$", "answer": "7", "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "7"},
}  # fmt: skip


def rewards_of(number: int, names: str, row: dict, response: str, folder: Path) -> list[float]:
    """What functions of a block of rewards.md give a response, loaded and called as a run does."""
    (folder / "my_rewards.py").write_text(blocks_of("docs/rewards.md", "python")[number].text)
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    expression = "+".join(f"my_rewards:{name}" for name in names.split())
    settings = arguments.parse(["--config", "my_run.yaml", "--reward", expression], 1).settings
    (prompt,) = load_prompts("rows.jsonl")
    sample = sample_of(prompt, only_turn(response), True, 3)
    verifiers = build_verifiers(settings)
    scores = [score.reward for (score,) in verifiers.score([sample]).values()]
    assert not any(verifiers.failures.values()), verifiers.failures
    return scores


def test_the_rewards_of_other_frameworks_score(here):
    row = ROW | {"prompt": "3+4="}
    assert rewards_of(0, "exact of_source of_label", row, "7", here) == [1.0, 1.0, 1.0]
    del sys.modules["my_rewards"]
    assert rewards_of(0, "exact of_source of_label", row, "8", here) == [0.0, 0.0, 0.0]


def test_trls_own_rewards_score(here):
    pytest.importorskip("trl.rewards", reason="TRL is not among the packages of the tests")
    response = "<think>\n3 and 4\n</think>\n\\boxed{7}"
    assert rewards_of(1, "accuracy thinks", ROW, response, here) == [1.0, 1.0]
