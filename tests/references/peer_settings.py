"""Settings of other libraries and their defaults, read from their sources; `peer_settings.json` has what was read.

    python -m tests.references.peer_settings --trl FOLDER --openrlhf FOLDER --slime FOLDER

Each folder has the library's package: what `pip install --no-deps --target FOLDER trl==1.16.0` makes, or a checkout.
verl comes from the environment's references. Nothing of theirs is imported: dataclasses, calls of `add_argument` and
YAML files are parsed.
"""

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.references.installed import folder_of

STORED = Path(__file__).with_suffix(".json")
VERSIONS = {"verl": "0.9.1", "trl": "1.16.0", "openrlhf": "0.11.0"}
# The configurations of TRL: class -> file in trl/.
TRL = {
    "GRPOConfig": "trainer/grpo_config.py",
    "SFTConfig": "trainer/sft_config.py",
    "DPOConfig": "trainer/dpo_config.py",
    "RewardConfig": "trainer/reward_config.py",
    "ModelConfig": "trainer/model_config.py",
    "ScriptArguments": "scripts/utils.py",
    "_BaseConfig": "trainer/base_config.py",
}
# What TRL's configurations inherit from transformers' TrainingArguments and scripts set.
INHERITED = (
    "adam_beta1 adam_beta2 adam_epsilon bf16 data_seed dataloader_drop_last dataloader_num_workers ddp_timeout "
    "deepspeed eval_on_start eval_steps eval_strategy fp16 fsdp full_determinism gradient_accumulation_steps "
    "gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_model_id learning_rate "
    "load_best_model_at_end logging_first_step logging_steps logging_strategy lr_scheduler_kwargs "
    "lr_scheduler_type max_grad_norm max_steps metric_for_best_model neftune_noise_alpha num_train_epochs optim "
    "output_dir per_device_eval_batch_size per_device_train_batch_size project push_to_hub remove_unused_columns "
    "report_to resume_from_checkpoint run_name save_only_model save_steps save_strategy save_total_limit seed "
    "torch_compile use_cpu use_liger_kernel warmup_steps weight_decay"
).split()
SLIME_SCRIPTS = ("scripts/run-qwen3-4B.sh", "scripts/run-qwen3-30B-A3B.sh")


def dataclass_fields(path: Path, name: str) -> dict[str, str]:
    """Field -> source of its default, of one class. KeyError without the class."""
    classes = {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}
    return {
        node.target.id: _default(node.value)
        for node in classes[name].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _default(value: ast.expr | None) -> str:
    """The source of a default, also of one inside `field(default=…)`."""
    if isinstance(value, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        value = keywords.get("default", keywords.get("default_factory"))
    return "" if value is None else ast.unparse(value)


def arguments(path: Path) -> dict[str, str]:
    """Flag -> source of its default, of the calls of `add_argument` and slime's `reset_arg`; a switch has False."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and (_called(node) in ("add_argument", "reset_arg")):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            default = (
                ast.unparse(keywords["default"])
                if "default" in keywords
                else "False"
                if "action" in keywords
                else "None"
            )
            for text in (arg.value for arg in node.args if isinstance(arg, ast.Constant)):
                if text.startswith("--"):
                    found[text] = default
    return found


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def yaml_leaves(content: object, name: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of a YAML tree; an empty mapping is a value."""
    if isinstance(content, dict) and content:
        for key, value in content.items():
            if key != "_target_":
                yield from yaml_leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, content


def verl() -> dict[str, object]:
    """Every key of the Megatron trainer's configuration."""
    path = folder_of("verl", VERSIONS["verl"]) / "trainer" / "config" / "_generated_ppo_megatron_trainer.yaml"
    return dict(yaml_leaves(yaml.safe_load(path.read_text())))


def trl(folder: Path) -> dict[str, dict[str, str]]:
    """Field -> default of each configuration, and of the chosen ones of transformers."""
    import transformers

    found = {name: dataclass_fields(folder / "trl" / path, name) for name, path in TRL.items()}
    inherited = dataclass_fields(Path(transformers.__file__).with_name("training_args.py"), "TrainingArguments")
    found["TrainingArguments"] = {name: inherited[name] for name in INHERITED}
    return found


def slime(folder: Path) -> dict[str, dict[str, str]]:
    """Flag -> default of slime's own flags that its scripts set."""
    text = "\n".join((folder / script).read_text() for script in SLIME_SCRIPTS)
    own = arguments(folder / "slime" / "utils" / "arguments.py")
    return {name: default for name, default in own.items() if name in text.split()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("trl", "openrlhf", "slime"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    chosen = parser.parse_args(argv)
    (cli,) = chosen.openrlhf.rglob("openrlhf/cli/train_ppo_ray.py")
    content = {"trl": trl(chosen.trl), "openrlhf": arguments(cli), "slime": slime(chosen.slime)}
    STORED.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
