"""The programs of the stages `programs` and `ranks`: command lines by name.

Three kinds: folders of published model families, made with their own layouts and random weights; the other programs;
train_rl with each flag of algorithms, models, optimizers and memory that runs on one rank.
"""

import functools
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

from megarl.mcore import device
from tests.helpers import programs as small
from tests.helpers.folders import any_types, hf_folders
from tests.helpers.pages import combinations

Row = tuple[str, Callable[[Path], list[str]], int]  # program, save folder -> command line, ranks
ROUTED = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --router-replay rollout"
CHOOSING = f"{combinations.LATENT} --dsa-indexer-topk 3 --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 16"
MORE = [combinations.LATENT, CHOOSING, *combinations.CHANNELS, f"{ROUTED} --lora-rank 2", "--use-torch-fsdp2",
        "--decode-graphs off", "--window-size 3,0 --softmax-type learnable --use-distributed-optimizer"]  # fmt: skip
GROUPED = [f"{ROUTED} --moe-grouped-gemm{more}" for more in ("", " --offload", " --use-distributed-optimizer")]
EXACT = [f"{flags} --exact-rollout".strip() for flags in ("", ROUTED, combinations.LATENT, CHOOSING)]
MUON = ["--optimizer muon", "--optimizer muon --use-distributed-optimizer"]
# Without reward models, and a folder whose biases megarl refuses.
FAMILIES = [case for case in hf_folders.CASES if not case.endswith("_reward") and case != "llama_bias"]
OF_TRANSFORMERS = ("granite", "ernie4_5_moe")  # types that transformers' own modules compute
BOTH = f"--train-iters 2 --use-cpu-initialization {small.GRADED}"
FAMILY = (
    f"{BOTH} --max-prompt-length 48 --max-response-length 8 --max-tokens-per-microbatch 256 --prompts-per-step 4"
    " --samples-per-prompt 2 --minibatch-size 4 --lr 1e-3 --advantage grpo --kl-coefficient 0"
    " --rollout-buffer-gb 0.02 --rollout-max-requests 8"
)
SUPERVISED = "--use-cpu-initialization --train-iters 3"
OTHERS = {  # name -> (program, its command line, flags)
    "sft": ("sft", small.sft_argv, ""),
    "sft LoRA": ("sft", small.sft_argv, "--lora-rank 2"),
    "reward": ("reward", small.reward_argv, ""),
    "preference dpo": ("preference", small.preference_argv, "--preference-loss dpo"),
    "preference kto": ("preference", small.preference_argv, "--preference-loss kto"),
    "preference orpo": ("preference", small.preference_argv, "--preference-loss orpo"),
}


TP2, PP2 = f"{combinations.TP2} --sequence-parallel", combinations.PP2
SHARDED, EP2 = "--use-distributed-optimizer --overlap-grad-reduce", f"{ROUTED} --expert-model-parallel-size 2"
WORLDS = {  # flags -> ranks that share one device
    TP2: 2, PP2: 2, EP2: 2, "--context-parallel-size 2": 2, SHARDED: 2,
    "--role-map actor=0;critic=0;reference=0;reward=0;rollout=1 --verify-weights": 2, f"{EP2} {PP2}": 4,
    f"{TP2} {PP2} {SHARDED}": 8,
}  # fmt: skip


def flags_of_all() -> tuple[list[str], list[str]]:
    """The flags of each program on one rank: of the algorithm; of the model, its kernels and memory."""
    agents = "--environment tests.helpers.envs.agents"  # which need a package
    needs_more = "--old-logprobs interpolate"
    apart = (needs_more, "--kernels blas", "--exact-rollout", "--verify-weights", "--generation-lag", agents)
    of_model = ("experts", "attention", "model", "optimizer", "recompute", "factors", "memory", "sampling")
    found: tuple[list[str], list[str]] = [], [*combinations.NEUTRAL, *MORE]
    for axis, values in combinations.AXES.items():
        if axis not in ("layout", "precision"):
            found[axis in of_model].extend(values)
    has_muon = importlib.util.find_spec("emerging_optimizers") is not None
    algorithm, model = ([value for value in row if not value.startswith(apart)] for row in found)
    return [value for value in algorithm if "--role-map" not in value], ["", *model, *MUON * has_muon]


def argv_of(flags: str, save: Path) -> list[str]:
    """The command line of train_rl with these flags."""
    return combinations.with_groups_that_fit(combinations.argv_of([BOTH, flags], save))


def family_argv(case: str, flags: str, save: Path) -> list[str]:
    """The command line of train_rl with a family's folder, which `make_data` has made."""
    folder = small.inputs() / "hf" / case
    tensors = hf_folders.stored(case)["tensors"]
    replay = ["--router-replay", "rollout"] * any("experts" in tensor[0] for tensor in tensors)
    files = ["--hf-model", str(folder), "--prompts", str(small.inputs() / "train.jsonl"), "--save", str(save)]
    return [*FAMILY.split(), *files, *replay, *flags.split()]


def transformers_argv(kind: str, flags: str, save: Path) -> list[str]:
    """The command line of train_rl with a model of transformers of a type, which `make_data` has made."""
    files = ["--hf-model", str(small.inputs() / "hf" / kind), "--prompts", str(small.inputs() / "train.jsonl")]
    return [*FAMILY.split(), *files, "--save", str(save), "--model-source", "transformers", *flags.split()]


def other_argv(name: str, flags: str, save: Path) -> list[str]:
    """The command line of a supervised run."""
    _, command, own = OTHERS[name]
    return command(save, f"{SUPERVISED} {own} {flags}")


def make_data(folder: Path, kind: str):
    """Writes what the programs of a kind read and is not there: prompts, tokenizer, a warm start; folders of model
    families, which `worlds` do not read."""
    if not folder.exists():
        shutil.copytree(small.preferences(), folder)
    if kind == "programs":
        for case in FAMILIES:
            hf_folders.write_folder(case, folder / "hf" / case)
        for model_type in OF_TRANSFORMERS:
            any_types.save(model_type, folder / "hf" / model_type)


def rows(is_cpu: bool) -> dict[str, Row]:
    """name -> program of a device, those first that a check must not miss."""
    algorithm, model = flags_of_all()
    partial = functools.partial
    found: dict[str, tuple] = {}
    for precision, flag in [("fp32", ""), ("bf16", "--bf16")][: 1 if is_cpu else 2]:
        found |= {f"{precision} {case}": ("rl", partial(family_argv, case, flag)) for case in FAMILIES}
        for kind in OF_TRANSFORMERS:
            found[f"{precision} transformers {kind}"] = "rl", partial(transformers_argv, kind, flag)
        found |= {f"{precision} {name}": (OTHERS[name][0], partial(other_argv, name, flag)) for name in OTHERS}
    if not is_cpu:
        of_16_bits = {f"bf16 {flags}": f"--bf16 {flags}" for flags in [*EXACT, *GROUPED, *model]}
        for kind in OF_TRANSFORMERS:
            flags = "--bf16 --exact-rollout"
            found[f"bf16 transformers {kind} --exact-rollout"] = "rl", partial(transformers_argv, kind, flags)
        of_16_bits["fp16"] = "--fp16 --initial-loss-scale 1024"
        found |= {name: ("rl", partial(argv_of, flags)) for name, flags in of_16_bits.items()}
    found |= {f"fp32 {flags}": ("rl", partial(argv_of, flags)) for flags in [*model, *algorithm]}
    return {name: (*row, 1) for name, row in found.items()}


def worlds(is_cpu: bool) -> dict[str, Row]:
    """name -> program of several ranks; in bf16 with graphs, which staged gloo cannot have."""
    found: dict[str, Row] = {}
    for flags, ranks in WORLDS.items():
        found[f"fp32 {flags}"] = "rl", functools.partial(argv_of, flags), ranks
        if not is_cpu:
            graphs = " --decode-graphs off" * (device.backend() == "staged")
            of_16_bits = f"--bf16{' --moe-grouped-gemm' * (ROUTED in flags)}{graphs} {flags}"
            found[f"bf16 {flags}"] = "rl", functools.partial(argv_of, of_16_bits), ranks
    return found
