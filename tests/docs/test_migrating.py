"""docs/migrating.md against the configuration files of the libraries that it names."""

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow
import pytest
from pyarrow import parquet

from megarl.flags import parser
from tests.helpers.folders import hf_folders
from tests.helpers.forked_programs import accepted
from tests.helpers.pages import documents
from tests.helpers.programs import ROOT
from tests.references import peer_settings

TEXT = documents.text_of(ROOT / "docs" / "migrating.md")
STORED = json.loads(peer_settings.STORED.read_text())
# Keys that verl's published Megatron scripts add to its configuration (run_qwen3_30b_a3b_megatron.sh of 2026,
# run_qwen3moe-30b_megatron_96gb.sh and run_qwen2-7b_math_megatron.sh of 2025).
ADDED = [
    "actor_rollout_ref.actor.megatron.grad_offload",
    "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload",
    "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
    "actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
    "actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer",
    "actor_rollout_ref.model.override_config.model_config.max_position_embeddings",
    "actor_rollout_ref.rollout.moe_tensor_parallel_size",
    "model_engine",
    *(f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}" for name in ("enable", "len", "log", "penalty_factor")),
    "reward_model.reward_kwargs.max_resp_len",
    *(
        f"actor_rollout_ref.actor.megatron.override_transformer_config.{name}"
        for name in (
            "apply_rope_fusion bias_activation_fusion bias_dropout_fusion deallocate_pipeline_outputs "
            "gradient_accumulation_fusion masked_softmax_fusion moe_enable_deepep moe_grouped_gemm moe_permute_fusion "
            "moe_router_dtype moe_token_dispatcher_type persist_layer_norm"
        ).split()
    ),
]


class Row(NamedTuple):
    """A line of a table: the other library's keys, with their full names, and the flags beside them."""

    keys: tuple[str, ...]
    flags: tuple[str, ...]


def sections(title: str) -> str:
    """The text of each section whose title begins so."""
    parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    found = [part for part in parts if part.startswith(title)]
    assert found, title
    return "\n".join(found)


def table_lines(text: str) -> Iterator[list[str]]:
    """The cells of each line of a table, without heads."""
    for line in text.split("\n"):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) >= 3 and not set(cells[0]) <= set("-"):
            yield cells


def full_names(spans: Iterable[str]) -> Iterator[str]:
    """Each name, and every one that it may be short for: with a beginning of the full name before it."""
    parts: list[str] = []
    for span in spans:
        yield span
        name = span.removeprefix(".")
        if "." in name and not span.startswith("."):
            parts = name.split(".")[:-1]
        for count in range(1, len(parts) + 1):
            yield ".".join([*parts[:count], name])


def rows(title: str) -> list[Row]:
    found = []
    for cells in table_lines(sections(title)):
        spans = [span.split(" ")[0] for span in re.findall(r"`([^`]+)`", cells[0])]
        flags = tuple(re.findall(r"`(--[a-z][a-z0-9-]*)[^`]*`", cells[1]))
        found.append(Row(tuple(full_names(spans)), flags))
    return found


def without_row(title: str, keys: Iterable[str]) -> list[str]:
    """The keys that no row of a section names."""
    names = {name for row in rows(title) for name in row.keys}
    patterns = [name for name in names if "*" in name]
    return [k for k in keys if k not in names and not any(fnmatch.fnmatchcase(k, pattern) for pattern in patterns)]


def test_every_key_of_verls_configuration_has_a_row():
    keys = [*peer_settings.verl(), *ADDED]
    assert len(keys) > 800 and "critic.optim.lr" in keys
    assert without_row("verl", keys) == []


@pytest.mark.parametrize("name", [name for name in STORED["trl"] if name != "TrainingArguments"])
def test_every_field_of_a_configuration_of_trl_has_a_row(name):
    title = "TRL 1.16: " + ("`DPOConfig`" if name == "DPOConfig" else f"`{name}`" if name[0] in "GSR" else "all")
    if name == "ScriptArguments":
        title = "TRL 1.16: all"
    assert without_row(title, set(STORED["trl"][name]) - everywhere()) == []


def everywhere() -> set[str]:
    """The fields that TRL's section of all trainers names."""
    return {name for row in rows("TRL 1.16: all") for name in row.keys}


def test_what_trl_inherits_has_a_row():
    assert set(STORED["trl"]["TrainingArguments"]) - everywhere() == set()


@pytest.mark.parametrize("library, title", [("openrlhf", "OpenRLHF"), ("slime", "slime")])
def test_every_flag_of_a_library_has_a_row(library, title):
    assert without_row(title, STORED[library]) == []


def test_missing_keys_are_found():
    assert without_row("verl", ["trainer.save_freqs", "actor_rollout_ref.actor.optim.min_lr", "critic.optim.lr"]) == [
        "trainer.save_freqs"
    ]
    assert without_row("slime", ["--save", "--saves"]) == ["--saves"]


# ---- defaults ----

SAME = {  # two spellings of one value: (theirs, megarl's)
    ("-1", "0"), ("None", "0"), ("low_var_kl", "k3"),
}  # fmt: skip
LIBRARIES = {"verl": "verl", "OpenRLHF": "openrlhf", "slime": "slime", "TRL": "trl"}


def their_defaults(library: str, heading: str) -> dict[str, object]:
    """Key -> default of a library. `heading`: that of the section, which says TRL's class."""
    if library == "verl":
        return peer_settings.verl()
    if library != "trl":
        return STORED[library]
    own = next((name for name in STORED["trl"] if f"`{name}`" in heading), "ModelConfig")
    base = STORED["trl"]["TrainingArguments"] | STORED["trl"]["_BaseConfig"]
    return base | STORED["trl"][own]


def own_defaults(heading: str) -> dict[str, object]:
    """Flag -> default of the program that a section is about, megarl's own flags and Megatron's."""
    from megarl.mcore.config import megatron_flags

    programs = {"SFTConfig": "sft", "DPOConfig": "preference", "RewardConfig": "reward"}
    program = next((program for name, program in programs.items() if name in heading), "rl")
    defaults = vars(megatron_flags.parse_tokens("actor", []))
    found = {option: defaults.get(dest) for option, dest in megatron_flags.destinations().items()}
    return found | {f"--{name}": flag.default for name, flag in parser.own_flags(program).items()}


def as_number(value: object) -> float | str:
    """A default as a number if it is one; a source of Python without its quotes."""
    text = str(value).strip("'\"")
    text = {"True": "1", "False": "0", "None": "none"}.get(text, text)
    try:
        return float(text)
    except ValueError:
        return text


def known_name(spans: list[str], known: Iterable[str]) -> str:
    """The full name of the last of some spans, "" if it has none."""
    return next((name for name in full_names(spans) if name in known and name.endswith(spans[-1])), "")


def differing(title: str) -> Iterator[tuple[str, str, object, object]]:
    """(key, flag, its default there, megarl's) of rows with as many full keys as flags, where the two differ."""
    for part in re.split(r"^## ", sections(title), flags=re.MULTILINE):
        theirs, ours = their_defaults(LIBRARIES[title], part.split("\n")[0]), own_defaults(part.split("\n")[0])
        for cells in table_lines(part):
            spans = [span.split(" ")[0] for span in re.findall(r"`([^`]+)`", cells[0])]
            flags = re.findall(r"`(--[a-z][a-z0-9-]*)`", cells[1])
            keys = [known_name(spans[: i + 1], theirs) for i in range(len(spans))]
            if len(keys) != len(flags):
                continue
            for key, flag in zip(keys, flags, strict=True):
                if key and flag in ours and not str(theirs[key]).startswith("$"):
                    one, other = as_number(theirs[key]), as_number(ours[flag])
                    if one != other and (str(theirs[key]), str(ours[flag])) not in SAME:
                        yield key, flag, theirs[key], ours[flag]


def stated() -> list[list[str]]:
    """The lines of the page's table: keys, library, their default, flag, megarl's."""
    found = [cells for cells in table_lines(sections("Defaults that differ")) if cells[0] != "key"]
    assert len(found) > 40
    return found


def default_of(library: str, key: str) -> object:
    if library != "TRL":
        return their_defaults(LIBRARIES[library], "")[key]
    name, field = key.split(".")
    return STORED["trl"][name][field]


@pytest.mark.parametrize("cells", stated(), ids=lambda cells: f"{cells[0]} {cells[3]}")
def test_a_stated_default_is_the_right_one(cells):
    keys, library, theirs, flag, ours = cells
    for key in re.findall("`([^`]+)`", keys):
        assert as_number(value_of(theirs)) == as_number(default_of(library, key))
    assert as_number(value_of(ours)) == as_number(own_defaults(keys)[flag.strip("`")])


def value_of(cell: str) -> str:
    """The value in a cell, without what is said about it in parentheses."""
    value = cell.split(" (", maxsplit=1)[0]
    return {"none": "None", "true": "True", "false": "False"}.get(value, value)


@pytest.mark.parametrize("title", LIBRARIES)
def test_every_default_that_differs_is_stated(title):
    """Those that are numbers or switches in both."""
    known = {(key, cells[3].strip("`")) for cells in stated() for key in re.findall("`([^`]+)`", cells[0])}
    known |= {(key.split(".")[-1], flag) for key, flag in known}
    found = [d for d in differing(title) if isinstance(as_number(d[2]), float) and isinstance(as_number(d[3]), float)]
    assert found or title == "TRL"
    assert [d for d in found if (d[0], d[1]) not in known and d[:2] not in UNLIKE] == []


# Rows whose keys and flags are as many, but do not correspond one to one.
UNLIKE = {
    ("actor_rollout_ref.rollout.temperature", "--eval-temperature"),
    ("actor_rollout_ref.actor.optim.total_training_steps", "--train-iters"),
    ("--data.max_len", "--max-prompt-length"),
    ("--train.ema_beta", "--evaluate-ema"),
}


# ---- scripts that the page translates ----

VERL_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "MATH",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": "0"},
}
TRL_ROW = {
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "1 + 1?"}],
    "solution": "The sum of the two is $\\boxed{2}$.",
}


def eight_layers() -> dict:
    """A small Qwen3-MoE that the verl script's layout divides: eight layers, four heads of keys and values."""
    content = hf_folders.stored("qwen3_moe")
    heads = content["config"]["num_attention_heads"] * content["config"]["head_dim"]
    changed = {"num_hidden_layers": 8, "num_key_value_heads": content["config"]["num_attention_heads"]}
    tensors = [each for each in content["tensors"] if ".layers." not in each[0]]
    for layer in range(8):
        for name, dtype, shape, block in content["tensors"]:
            if ".layers.0." in name:
                shape = [heads, shape[1]] if re.search(r"\.[kv]_proj", name) else shape
                tensors.append([name.replace(".0.", f".{layer}.", 1), dtype, shape, 1000 * layer + block])
    return content | {"config": content["config"] | changed, "tensors": tensors}


MODELS = {"Qwen3-30B-A3B-Base": eight_layers, "Qwen3-0.6B": lambda: hf_folders.stored("qwen3")}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the models and files that the two command lines name."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "models").mkdir()
    (folder / "data").mkdir()
    for name, content in MODELS.items():
        model = content()
        longer = model["config"] | {"max_position_embeddings": 40960}
        hf_folders.write(model | {"config": longer}, folder / "models" / name)
    for name, row in {"dapo-math-17k": VERL_ROW, "aime-2024": VERL_ROW, "numina": TRL_ROW}.items():
        parquet.write_table(pyarrow.Table.from_pylist([row] * 8), folder / "data" / f"{name}.parquet")
    return folder


def translated() -> list[documents.Command]:
    found = documents.commands_in(sections("Two scripts, translated"), "docs/migrating.md")
    assert len(found) == 2
    return found


@pytest.mark.parametrize("command", translated(), ids=["verl", "trl"])
def test_a_translated_script_passes_the_check(command, files, monkeypatch):
    monkeypatch.chdir(files)
    assert command.words[:3] == ("bash", "launch/run.sh", "train_rl") and command.variables == {"NPROC": "8"}
    words = list(command.words[3:])
    if "--trackers" in words:  # the last flags; wandb is not installed
        words = words[: words.index("--trackers")]
    said = "\n".join(accepted(words, "rl", 8))
    assert "8 from data/" in said and " 512 " in said and "mini-batches of 128" in said
