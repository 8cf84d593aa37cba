#!/usr/bin/env python3
"""Checks that a code change changes no number: records five short runs before it and compares them after it.

    python tools/record_runs.py --work /tmp/before --out before.json                    # in the old checkout
    python tools/record_runs.py --work /tmp/after --out after.json --compare before.json

A recording has digests of each run's metrics, samples and checkpoints. Metrics of time and memory are ignored; all
other bytes must be equal: metrics as printed, rows of samples, and every tensor and object of a checkpoint. The runs
cover the quickstart, tensor parallelism on disjoint ranks, experts with router replay, RLHF with a reward model, and
DAPO with partial rollouts. They take about five minutes on two cores. Compare recordings of one machine only, since
processors round differently.

Exit status: 0; 1 after a list of the differences from `--compare`; otherwise that of the command that failed.
"""

import argparse
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools._metric_catalog import reproducible  # noqa: E402

# Entries of a manifest that describe how it was saved, not the state of the run.
OF_THE_SAVE = {"format", "checksum", "files", "versions", "layout", "data", "settings", "frozen"}
DAPO = ("--config configs/quickstart.yaml configs/recipes/dapo.yaml --over-sampling 1.5 --partial-rollouts"
        " --max-staleness 2 --rollout-correction tis --minibatch-size 128 --max-sampling-rounds 3")  # fmt: skip


def shell(command: str, **variables: str):
    """Runs a command in this checkout with output to stderr; exits with its status if that is not 0."""
    print(f"record_runs: {command}", file=sys.stderr, flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, stdout=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)


def program(ranks: int, name: str, flags: str):
    """Runs a program of megarl on several ranks."""
    shell(f"bash launch/run.sh {name} {flags}", NPROC=str(ranks))


def warm_start(work: Path, config: str) -> str:
    """Trains a policy briefly on the sums; returns the flags of a PPO run that starts from it."""
    folder = work / config
    if not folder.exists():
        flags = "--train-iters 60 --eval-interval 30"
        shell(f"bash launch/warm_start.sh {flags}", SAVE=str(folder), CONFIG=config, SEED="1")
    data = folder / "data"
    return (
        f"--prompts {data}/train.jsonl --eval-prompts {data}/heldout.jsonl --tokenizer-model {data}/tokenizer.model "
        f"--pretrained-checkpoint {folder}/sft --eval-samples 64 --eval-interval 2"
    )


def quickstart(work: Path, save: Path, extra: str):
    """The quickstart's role map, three steps."""
    flags = warm_start(work, "quickstart")
    roles = '--role-map "actor=0-1;critic=2-3;reward=2-3;reference=2-3"'
    program(4, "train_rl", f"--config configs/quickstart.yaml {flags} {roles} --train-iters 3 --save {save} {extra}")


def disjoint_tensor_parallel(work: Path, save: Path, extra: str):
    """An actor on two tensor-parallel ranks, critic and reference on others, saved and resumed."""
    flags = warm_start(work, "quickstart")
    roles = '--role-map "actor=0-1;critic=2;reward=3;reference=3" --actor-tensor-model-parallel-size 2'
    common = f"--config configs/quickstart.yaml {flags} {roles} --save {save} {extra}"
    program(4, "train_rl", f"{common} --train-iters 2")
    program(4, "train_rl", f"{common} --train-iters 3 --load {save}")


def experts_with_replay(work: Path, save: Path, extra: str):
    """Expert parallelism on two ranks, training on the rollout's routes (R3), with a probe."""
    flags = warm_start(work, "moe_quickstart")
    roles = '--role-map "actor=0-1;critic=2;reward=3;reference=3" --actor-expert-model-parallel-size 2'
    common = f"--config configs/moe_quickstart.yaml {flags} {roles} --router-probe-interval 2"
    program(4, "train_rl", f"{common} --train-iters 2 --save {save} {extra}")


def reward_model(work: Path, save: Path, extra: str):
    """All stages of RLHF, shortened; the recorded run is PPO with the reward model."""
    data = work / "rlhf" / "data"
    if not (work / "rlhf" / "reward" / "report.html").exists():
        shutil.rmtree(work / "rlhf", ignore_errors=True)
        _rlhf_stages(work / "rlhf", data)
    program(2, "train_rl", (
        f"--config configs/rlhf_ppo.yaml --prompts {data}/train.jsonl --eval-prompts {data}/heldout.jsonl "
        f"--tokenizer-model {data}/tokenizer.model --reward-tokenizer-model {data}/reward-tokenizer "
        f"--reward-model {work}/rlhf/reward --pretrained-checkpoint {work}/rlhf/sft --eval-samples 64 "
        f"--eval-interval 2 --train-iters 3 --save {save} {extra}"))  # fmt: skip


def _rlhf_stages(folder: Path, data: Path):
    python = shlex.quote(sys.executable)
    shell(
        f"{python} tools/make_prompts.py --task spell_backward --train 600 --heldout 100 --seed 1 --out {data} "
        "--prompt-template '{metadata[word]} backward:' --task-option min_word_len=3 --task-option max_word_len=6"
    )
    shell(f"{python} tools/train_tokenizer.py --input {data}/train.jsonl --vocab-size 72 --out {data}/tokenizer")
    shell(f"{python} tools/train_tokenizer.py --input {data}/train.jsonl --vocab-size 328 --kind bpe "
          "--eos-token '<|end|>' --special '<|user|>' '<|assistant|>' --chat-template configs/rlhf_chat.jinja "
          f"--out {data}/reward-tokenizer")  # fmt: skip
    prompts, policy = f"--prompts {data}/train.jsonl", f"--tokenizer-model {data}/tokenizer.model"
    program(2, "train_sft", f"--config configs/rlhf_sft.yaml {prompts} --eval-prompts {data}/heldout.jsonl {policy} "
            f"--train-iters 30 --eval-interval 15 --eval-samples 64 --save {folder}/sft")  # fmt: skip
    for split in ("train", "heldout"):
        program(2, "evaluate", f"--config configs/rlhf_samples.yaml {policy} --eval-prompts {data}/{split}.jsonl "
                f"--load {folder}/sft --eval-samples 600 --save {folder}/samples/{split}")  # fmt: skip
    shell(
        f"{python} tools/make_preferences.py --seed 1 --out {folder}/preferences --min-gap 0.05 --corrupted-pairs 3 "
        f"--prompts {data}/train.jsonl --samples {folder}/samples/train/samples.jsonl "
        f"--heldout-prompts {data}/heldout.jsonl --heldout-samples {folder}/samples/heldout/samples.jsonl"
    )
    fresh = folder / "fresh.yaml"  # the reward model starts from random weights
    fresh.write_text("pretrained-checkpoint: null\n", encoding="utf-8")
    program(2, "train_reward", f"--config configs/rlhf_reward.yaml {fresh} --tokenizer-model {data}/reward-tokenizer "
            f"--prompts {folder}/preferences/train.jsonl --eval-prompts {folder}/preferences/heldout.jsonl "
            f"--train-iters 20 --eval-interval 10 --save {folder}/reward")  # fmt: skip


def partial_rollouts(work: Path, save: Path, extra: str):
    """DAPO with over-sampling and partial rollouts, saved and resumed."""
    flags = warm_start(work, "quickstart")
    program(2, "train_rl", f"{DAPO} {flags} --train-iters 2 --save {save} {extra}")
    program(2, "train_rl", f"{DAPO} {flags} --train-iters 3 --save {save} --load {save} {extra}")


RUNS = {
    "quickstart": quickstart,
    "disjoint-tp2": disjoint_tensor_parallel,
    "moe-r3": experts_with_replay,
    "rlhf-ppo": reward_model,
    "dapo-partial": partial_rollouts,
}


def digest(data: bytes) -> str:
    """The first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def metrics_of(run: Path) -> dict[str, str]:
    """Digest of each step's metrics without those of time and memory."""
    found = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[f"step {row['step']}"] = digest(json.dumps(reproducible(row), sort_keys=True).encode())
    return found


def samples_of(run: Path) -> dict[str, str]:
    """Digest of each samples file."""
    return {path.name: digest(path.read_bytes()) for path in sorted((run / "samples").glob("*.jsonl"))}


def checkpoints_of(run: Path, steps: str = "step_*") -> dict[str, str]:
    """Digest of every checkpoint entry by key. `steps`: which folders."""
    import torch

    found = {}
    for folder in sorted((run / "checkpoints").glob(steps)):
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        frozen = [folder.parent / "frozen" / name for name in manifest.get("frozen", {}).values()]
        for key, value in [item for source in (folder, *frozen) for item in _leaves(_state_of(source))]:
            name = f"{folder.name}/{key}"
            if torch.is_tensor(value):
                found[name] = digest(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
            else:
                found.setdefault(name, _object_digest(value))  # both have Megatron's `common_state`
        found |= {f"{folder.name}/{key}": value for key, value in _waiting_groups(folder).items()}
        kept = {key: value for key, value in manifest.items() if key not in OF_THE_SAVE}
        found[f"{folder.name}/manifest"] = digest((json.dumps(kept, indent=1, sort_keys=True) + "\n").encode())
    return found


def _waiting_groups(folder: Path) -> dict[str, str]:
    """Digests of the responses that wait in a checkpoint, of all replicas: which one has a response depends on time."""

    from megarl.batch import Batch, concatenate
    from megarl.rollout.waiting_groups import GROUPS, UNFINISHED, kept_records

    found, kept = {}, kept_records(folder)
    for name, kind in (("waiting", GROUPS), ("parts", UNFINISHED)):
        records = list(kept.read(kind))
        batches = [Batch(**record.fields) for record in records if record.fields]
        joined = concatenate(batches) if batches else Batch()
        episodes = [episode for record in records for episode in record.facts.pop("episodes", [])]
        ids = [number for batch in batches for number in batch.sequence_ids.tolist()]
        by_id = dict(zip(ids, episodes, strict=False))
        if records:
            fields = {name: getattr(joined, name) for name in joined.present()}
            found[name] = _object_digest([records[0].facts, fields, *([by_id] if by_id else [])])
    return found


def _state_of(folder: Path) -> dict:
    """All entries of a checkpoint's folder, read without running code from it."""
    import torch
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from megarl.mcore.weights.checkpoint_files import SafeReader

    class Planner(_EmptyStateDictLoadPlanner):
        def load_bytes(self, read_item, value):
            data = io.BytesIO()
            torch.save(torch.load(value, weights_only=True), data)  # torch's planner would run code that it names
            data.seek(0)
            super().load_bytes(read_item, data)

    state = {}
    _load_state_dict(state, storage_reader=SafeReader(str(folder)), planner=Planner(), no_dist=True)
    return state


def _leaves(state: dict, prefix: str = ""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _object_digest(value) -> str:
    return digest(_text(value).encode())


def _text(value) -> str:
    """Equal text for equal values: tensors by their bytes, dictionaries sorted by key."""
    import numpy as np
    import torch

    if torch.is_tensor(value):
        data = value.detach().cpu().contiguous()
        return f"tensor {data.dtype} {tuple(data.shape)} {digest(data.flatten().view(torch.uint8).numpy().tobytes())}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {digest(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, io.BytesIO):
        return f"bytes {digest(value.getvalue())}"
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{k!r}: {_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def record(run: Path) -> dict[str, dict[str, str]]:
    """All digests of a run's folder."""
    return {"metrics": metrics_of(run), "samples": samples_of(run), "checkpoints": checkpoints_of(run)}


def differences(before: dict, after: dict) -> list[str]:
    """The differences between two recordings, one line each."""
    lines = []
    for name in sorted({*before, *after}):
        for kind in ("metrics", "samples", "checkpoints"):
            one, other = before.get(name, {}).get(kind, {}), after.get(name, {}).get(kind, {})
            lines += [f"{name}: {kind}: {key}" for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    return lines


def table(recorded: dict) -> str:
    """A line per run: what was compared, and one digest of everything."""
    lines = ["| run | steps | sample files | checkpoint entries | digest |", "|---|---|---|---|---|"]
    for name, found in recorded.items():
        sizes = " | ".join(str(len(found[kind])) for kind in ("metrics", "samples", "checkpoints"))
        lines.append(f"| {name} | {sizes} | {_object_digest(found)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs, records and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; existing runs are reused")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the digests")
    parser.add_argument("--compare", type=Path, help="JSON file of earlier digests to compare with")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="runs to record; default: all")
    parser.add_argument(
        "--extra", nargs="+", default=[], metavar="RUN=FLAGS", help="further flags of a run, as 'quickstart=--seed 2'"
    )
    options = parser.parse_args()
    extra = dict(item.split("=", 1) for item in options.extra)
    work, recorded = options.work.resolve(), {}
    work.mkdir(parents=True, exist_ok=True)
    for name in options.runs:
        save = work / f"run-{name}"
        if not (save / "report.html").exists():
            RUNS[name](work, save, extra.get(name, ""))
        recorded[name] = record(save)
    options.out.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(table(recorded))
    if options.compare:
        before = json.loads(options.compare.read_text(encoding="utf-8"))
        found = differences({name: before.get(name, {}) for name in recorded}, recorded)
        print("\n".join([f"differs: {line}" for line in found] or ["record_runs: all digests are equal"]))
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
