"""Hostile files behind every flag that names one: a line that names flag or file, in bounded memory, never a hang."""

import ast
import gzip
import json
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from megarl.flags import parser
from tests.helpers.envs import judges
from tests.helpers.evaluation import MODEL
from tests.helpers.folders import hf_folders
from tests.helpers.folders.hostile_files import KINDS, NO_TEXT, PLACES, damage, outcome
from tests.helpers.forked_programs import check
from tests.helpers.programs import ROOT, inputs, rl_argv, train
from tests.helpers.tiers import by_default

STEP = "checkpoints/step_00000002"
GRPO = "--advantage grpo --kl-coefficient 0"
HF = (
    "--max-prompt-length 48 --max-response-length 16 --max-tokens-per-microbatch 128 --global-batch-size 1"
    " --prompts {b}/train.jsonl --save {b}/new"
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """Good files of every kind, and a run with all that a run can leave."""
    folder = tmp_path_factory.mktemp("originals")
    shutil.copy(inputs() / "train.jsonl", folder)
    shutil.copy(inputs() / "tokenizer.model", folder)
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "context.txt").write_text("{response}={question}\n")
    (folder / "flags.yaml").write_text("seed: 5\n")
    (folder / "keys").write_text("0123456789abcdef0\n")
    judges.write(folder / "judge.yaml")
    hf_folders.write_folder("llama3", folder / "hf")
    write_adapter(folder / "adapter", json.loads((folder / "hf" / "config.json").read_text()))
    write_tables(folder)
    train("rl", rl_argv(folder / "run", f"{GRPO} --train-iters 2 --save-rollouts --save-interval 2"))
    for name in ("sft", "reward", "ppo"):
        (folder / "pipeline" / name).mkdir(parents=True)
        shutil.copy(folder / "run" / "metrics.jsonl", folder / "pipeline" / name)
    return folder


def write_tables(folder: Path):
    """The prompts in each format of a table."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "train.parquet")
    with pyarrow.ipc.new_file(str(folder / "train.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "train.json").write_text(json.dumps(rows))
    (folder / "train.jsonl.gz").write_bytes(gzip.compress((folder / "train.jsonl").read_bytes()))
    (folder / "mixture.yaml").write_text(f"a: {{prompts: {folder / 'train.jsonl'}, weight: 1}}\n")
    (folder / "data").mkdir()
    (folder / "data" / "data.jsonl").write_bytes((folder / "train.jsonl").read_bytes())


def write_adapter(folder: Path, config: dict):
    folder.mkdir()
    entries = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    width = config["hidden_size"]
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{name}.weight": torch.ones(shape)
            for layer in range(config["num_hidden_layers"])
            for name, shape in (("A", (2, width)), ("B", (width, 2)))
        },
        folder / "adapter_model.safetensors",
    )


class Target(NamedTuple):
    """A file that a flag names, or that lies in the folder that it names.

    `harmless`: kinds that may be accepted: they are good content, or stand for a file that need not be there.
    """

    program: str
    flags: str
    file: str
    harmless: tuple[str, ...] = ()


TEXTS = tuple(kind for kind in KINDS if kind not in NO_TEXT)
UNREAD = ("a number of 400 digits", "a float without end", "a key twice")  # entries that the program does not read


def rl(flags: str, file: str, harmless: tuple[str, ...] = ()) -> Target:
    return Target("rl", flags, file, harmless)


def hf(file: str, harmless: tuple[str, ...] = (), flags: str = "") -> Target:
    return Target("sft", f"--hf-model {{b}}/hf {flags}", file, harmless)


# Flag (for several files of it with a word after it) -> target.
TARGETS = {
    "config": rl("--config {b}/flags.yaml", "flags.yaml", ("a byte order mark",)),
    "prompts": rl("--prompts {b}/train.jsonl", "train.jsonl"),
    "prompts list": rl("--prompts {b}/train.json", "train.json"),
    "prompts parquet": rl("--prompts {b}/train.parquet", "train.parquet"),
    "prompts arrow": rl("--prompts {b}/train.arrow", "train.arrow"),
    "prompts gzip": rl("--prompts {b}/train.jsonl.gz", "train.jsonl.gz"),
    "prompts mixture": rl("--prompts {b}/mixture.yaml", "mixture.yaml"),
    "prompts saved": rl("--prompts {b}/data", "data/dataset_dict.json"),
    "prompts split": rl("--prompts {b}/data", "data/state.json"),
    "eval-prompts": rl("--eval-prompts {b}/train.jsonl", "train.jsonl"),
    "evals": rl("--evals a={b}/train.jsonl", "train.jsonl"),
    "chat-template": rl("--chat-template {b}/template.jinja", "template.jinja", TEXTS),
    "judge-config": rl("JUDGE", "judge.yaml"),
    "judge-load": rl("JUDGE --judge-load {b}/run", f"run/{STEP}/manifest.json"),
    "teacher-context-template": rl(
        f"{GRPO} --distill loss --reward exact-match --teacher self --teacher-context sibling"
        " --teacher-max-prompt-length 12 --teacher-context-template {b}/context.txt", "context.txt"),
    "tokenizer-model": rl("--tokenizer-model {b}/tokenizer.model", "tokenizer.model"),
    "hf-model": hf("hf/config.json"),
    "hf-model generation": hf("hf/generation_config.json", UNREAD),
    "hf-model weights": hf("hf/model.safetensors"),
    "hf-model index": hf("hf/model.safetensors.index.json"),
    "hf-model tokenizer": hf("hf/tokenizer.json"),
    "hf-model tokenizer_config": hf("hf/tokenizer_config.json", UNREAD),
    "hf-model template": hf("hf/chat_template.jinja", TEXTS),
    "hf-model special": hf("hf/special_tokens_map.json", UNREAD),
    "hf-model added": hf("hf/added_tokens.json", UNREAD),
    "lora-adapter": hf("adapter/adapter_config.json", (), "--lora-adapter {b}/adapter"),
    "lora-adapter weights": hf("adapter/adapter_model.safetensors", (), "--lora-adapter {b}/adapter"),
    "load": rl(f"{GRPO} --load {{b}}/run --train-iters 4", f"run/{STEP}/manifest.json"),
    "load metadata": rl(f"{GRPO} --load {{b}}/run --train-iters 4", f"run/{STEP}/.metadata"),
    "load latest": rl(f"{GRPO} --load {{b}}/run/checkpoints/latest --train-iters 4", "run/checkpoints/latest"),
    "load-rollouts": rl(f"{GRPO} --debug-train-only --load-rollouts {{b}}/run --train-iters 2",
                        "run/rollouts/step_00000001/manifest.json"),
    "teachers": rl("--advantage none --kl-coefficient 0 --distill loss --teachers default={b}/run",
                   "run/settings.yaml", ("half a file",)),
    "api-key-file": Target("serve", "--load {b}/run --api-key-file {b}/keys", "keys", TEXTS),
    "admin-key-file": Target("serve", "--load {b}/run --admin-key-file {b}/keys", "keys", TEXTS),
    "rollout-server-key-file": Target(
        "evaluate", "--eval-prompts {b}/train.jsonl --rollout-server http://127.0.0.1:9 --rollout-server-key-file "
        "{b}/keys", "keys", TEXTS),
}  # fmt: skip
READ_AS = {  # flags whose files another flag's reader reads
    "reward-model": "load", "reward-hf-model": "hf-model", "judge-hf-model": "hf-model", "weights-folder": "load",
}  # fmt: skip
ELSEWHERE = {
    "replay-schedule": "tests/unit/rollout/test_schedule.py",
    "images-folder": "tests/unit/data/images/test_forms.py",
    **dict.fromkeys(
        ("reward", "advantage", "policy-loss", "environment", "tool-call-parser"), "tests/unit/test_plugins.py"
    ),
}
NOT_READ = {"save", "tracker-folder", "hf-mtp", "host", "served-model-name", "tracker-run"}
NAMES_A_FILE = re.compile(r"\b(?:files?|folders?|adapter)\b", re.IGNORECASE)


def test_every_flag_that_names_a_file_is_in_the_table():
    flags = [flag for program in parser.MODULES for flag in parser.own_flags(program).values()]
    named = {flag.common for flag in flags if flag.kind is str and NAMES_A_FILE.search(flag.text)}
    table = {name.split()[0] for name in TARGETS} - {"config"}  # argparse's own of each program
    assert table | READ_AS.keys() | ELSEWHERE.keys() | NOT_READ == named
    assert {*READ_AS.values()} <= table and all((ROOT / file).is_file() for file in ELSEWHERE.values())


def words_of(target: Target, folder: Path) -> list[str]:
    """The program's command line."""
    flags = target.flags
    if target.program == "sft":
        flags = f"{HF} {flags}"
    elif target.program != "rl":
        flags = f"{MODEL} --tokenizer-model {inputs()}/tokenizer.model {flags}"
    if flags.startswith("JUDGE"):
        flags = judges.judge_flags(folder / "judge.yaml", flags.removeprefix("JUDGE"))
    flags = flags.replace("{b}", str(folder))
    return rl_argv(folder / "new", flags) if target.program == "rl" else flags.split()


def copied(originals: Path, folder: Path, file: str) -> Path:
    """The file in a copy of what lies beside it; other files are links."""
    top = Path(file).parts[0]
    for entry in originals.iterdir():
        if entry.name != top or entry.is_file():
            (folder / entry.name).symlink_to(entry)
        else:
            shutil.copytree(entry, folder / entry.name)
    path = folder / file
    if path.is_symlink():
        path.unlink()
        shutil.copy(originals / file, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def rows_of(table: dict) -> list[tuple[str, str]]:
    return [(name, kind) for name in table for kind in KINDS]


def chosen(table: dict) -> list[tuple[str, str]]:
    """By default each file as a pipe, as a device, or as a link in a circle, and each kind of content somewhere."""
    names, contents = list(table), [kind for kind in KINDS if kind not in PLACES]
    places = ("a pipe", "a device", "a link to itself")
    found = {(name, places[i % len(places)]) for i, name in enumerate(names)}
    return sorted(found | {(names[i % len(names)], kind) for i, kind in enumerate(contents)})


@pytest.mark.parametrize("name, kind", by_default(rows_of(TARGETS), chosen(TARGETS)))
def test_a_program_refuses_a_hostile_file(name, kind, originals, tmp_path):
    target = TARGETS[name]
    path = copied(originals, tmp_path, target.file)
    damage(path, kind)
    status, out, err = check(words_of(target, tmp_path), target.program)
    if kind in target.harmless and "the work begins" in err:
        return
    lines = [line for line in err.splitlines() if not line.startswith("megarl: warning: ")]
    assert status == 2 and out == "" and len(lines) == 1, err
    assert lines[0].startswith("megarl: error: ") and lines[0].isprintable() and len(lines[0]) < 4000
    assert f"--{name.split()[0]}" in lines[0] or path.name in lines[0] or target.harmless == TEXTS, lines[0]


# -- tools ---------------------------------------------------------------------------------------------------------

RUN_FILES = ("metrics.jsonl", "settings.yaml", "samples/step_00000001.jsonl")
TOOLS = {  # `tool argument` and a file -> command line, file
    **{f"compare runs {file}": ("{b}/run {r}", f"run/{file}") for file in RUN_FILES},
    **{f"report run {file}": ("{b}/run --out {b}/page.html", f"run/{file}")
       for file in (*RUN_FILES, "tokens/step_00000001.jsonl")},
    "report --against metrics.jsonl": ("{r} --against {b}/run --out {b}/page.html", "run/metrics.jsonl"),
    **{f"watch runs {file}": ("{b}/run --once", f"run/{file}") for file in (*RUN_FILES[:2], "status.json")},
    **{f"inspect_checkpoint folder {file}": (f"{{b}}/{file.split('/')[0]}", file)
       for file in (f"run/{STEP}/manifest.json", f"run/{STEP}/.metadata", "run/checkpoints/latest", "hf/config.json",
                    "hf/model.safetensors", "adapter/adapter_model.safetensors")},
    "inspect_checkpoint --diff hf": ("{r}/../hf --diff {b}/hf", "hf/model.safetensors"),
    "make_preferences --prompts": ("PREFERENCES", "train.jsonl"),
    "make_preferences --samples": ("PREFERENCES", "run/samples/step_00000001.jsonl"),
    "rlhf_report folder": ("{b}/pipeline --min-accuracy 0.5 --max-kl 9", "pipeline/ppo/metrics.jsonl"),
    "train_tokenizer --input": ("--input {b}/train.jsonl --vocab-size 16 --out {b}/t", "train.jsonl"),
    "train_tokenizer --chat-template": (
        "--input {b}/train.jsonl --kind bpe --vocab-size 300 --out {b}/t --chat-template {b}/template.jinja",
        "template.jinja"),
}  # fmt: skip
PREFERENCES = (
    "--prompts {b}/train.jsonl --samples {b}/run/samples/step_00000001.jsonl --heldout-prompts {b}/train.jsonl"
    " --heldout-samples {b}/run/samples/step_00000001.jsonl --out {b}/pairs"
)
# Arguments of tools that name what is written, other programs' flags or what has a test of its own.
NO_FILE_OF_A_TOOL = {
    "chaos --out", "chaos --steps", "chaos --judge", "chaos flags", "curves --out", "curves --recipes",
    "curves --steps", "curves --variants", "curves --ranks", "curves --metrics", "curves --jobs", "curves --min-gain",
    "curves --config", "tests_of file",
    "curves --warm-start", "curves --runs", "gpu_check --out", "make_agent_prompts --out", "make_preferences --out",
    "make_number_pictures --out",
    "make_products --out", "make_prompts --out", "record_runs --work", "record_runs --out", "record_runs --compare",
    "record_runs --runs", "record_runs --extra", "planted_faults --rooms-only", "report --out", "smollm2_folder output",
    "smollm2_folder --gguf", "train_tokenizer --out", "compare_answers --models", "compare_answers --prompts",
    "plan --world-size", "plan --vocab-size", "plan --gpu-memory", "plan --least-recompute", "plan --json",
    "replay run", "replay --step",
}  # fmt: skip
NAMES_A_FILE_OR_RUN = re.compile(r"\b(?:FILE|DIR|RUN|OTHER|files?|folders?|runs?|Path)\b")


def arguments_of(path: Path) -> set[str]:
    """The arguments of a tool whose declaration speaks of a file, a folder or a run."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            name = re.sub(r"^f?'|'$|\{.*\}", "", ast.unparse(node.args[0]))
            if NAMES_A_FILE_OR_RUN.search(ast.unparse(node)):
                found.add(f"{path.stem} {name}")
    return found


def test_every_argument_of_a_tool_that_names_a_file_is_in_the_table():
    paths = [*(ROOT / "tools").glob("*.py"), ROOT / "megarl" / "plan.py", ROOT / "megarl" / "replay.py"]
    named = {argument for path in paths for argument in arguments_of(path)}
    assert {" ".join(name.split()[:2]) for name in TOOLS} | NO_FILE_OF_A_TOOL == named


def main_of(tool: str) -> Callable[[list[str]], int]:
    return import_module(f"tools.{tool}").main


@pytest.mark.parametrize("name, kind", by_default(rows_of(TOOLS), chosen(TOOLS)))
def test_a_tool_survives_a_hostile_file(name, kind, originals, tmp_path):
    """It may ignore the file, as the tool that watches runs does. Else there is one line."""
    words, file = TOOLS[name]
    if kind in PLACES and (originals / file).is_dir():
        pytest.skip("a folder")
    folder = tmp_path / "files"
    folder.mkdir()
    path = copied(originals, folder, file)
    damage(path, kind)
    words = words.replace("PREFERENCES", PREFERENCES).replace("{r}", str(originals / "run"))
    status, _, err = outcome(tmp_path, main_of(name.split()[0]), words.replace("{b}", str(folder)).split())
    lines = [line for line in err.splitlines() if not line.startswith(("note: ", "megarl: warning: "))]
    assert (status in (0, 1) and not lines) or (status == 2 and len(lines) == 1), (status, err)
    assert all(line.isprintable() and len(line) < 4000 for line in lines)
