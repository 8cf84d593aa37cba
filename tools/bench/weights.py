"""Weight sync between two layouts against a broadcast of the same bytes over the same ranks.

    PYTHONPATH=. python tools/bench/weights.py [--cases move,tp2-tp1,dp2-rollout] [--rounds 7] [--json FILE]

move: rank 0 -> rank 1. tp2-tp1: tensor parallelism on ranks 0 and 1 -> rank 2. dp2-rollout: two replicas on ranks 0 and
1 -> two on ranks 2 and 3. The model has 58 M parameters in fp32. transfer is `WeightTransfer.run` between the models'
own tensors; broadcast is one `dist.broadcast` of one contiguous tensor of the model's size. They alternate after a
warm-up round; a side's time is that of the slowest rank. At the end every weight is compared (`verify`). Ranks are
forked on this machine with one thread each, over gloo, so it does not run on a machine with a GPU.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import arguments
from megarl.comm import role_mesh
from megarl.launcher import run_ranks
from megarl.mcore.model import gpt
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import model_weights
from tools.bench.tables import add_output_flags, whole_table

VOCAB = 32_000
MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4"
    " --ffn-hidden-size 1536 --swiglu --normalization RMSNorm --disable-bias-linear --make-vocab-size-divisible-by 32"
    " --untie-embeddings-and-output-weights --max-prompt-length 16 --max-response-length 16 --lr 1e-5"
    " --advantage grpo --samples-per-prompt 2 --kl-coefficient 0"
)
TENSOR2 = " --actor-tensor-model-parallel-size 2 --rollout-tensor-model-parallel-size 1"
CASES = {  # name -> (ranks, role map)
    "move": (2, "--role-map actor=0;reward=0;rollout=1"),
    "tp2-tp1": (3, "--role-map actor=0-1;reward=0;rollout=2" + TENSOR2),
    "dp2-rollout": (4, "--role-map actor=0-1;reward=0;rollout=2-3"),
}


def slowest(work, group) -> float:
    """Seconds of work() on the slowest rank."""
    dist.barrier(group=group)
    began = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return float(seconds)


def measure(case: str, rounds: int) -> dict:
    """Runs a case on this rank; returns the same numbers on every rank."""
    ranks, flags = CASES[case]
    roles = arguments.parse([*MODEL.split(), *flags.split()], ranks).roles
    mesh = role_mesh.create_mesh(roles, timedelta(minutes=5))
    models = {"actor": None, "rollout": None}
    for name in models:
        if mesh[name].is_member:
            models[name] = gpt.build_frozen_model(roles[name].megatron, VOCAB, mesh[name].pg_collection)
    group = mesh.channel("weights")
    began = time.perf_counter()
    weights = {name: model_weights(model, mesh[name].pg_collection) for name, model in models.items()}
    transfer = WeightTransfer(weights["actor"], weights["rollout"], group)
    planning = time.perf_counter() - began
    size = torch.tensor(sum(p.nbytes for p in models["rollout"].parameters()) if models["rollout"] else 0)
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    whole = torch.ones(int(size), dtype=torch.uint8)
    sides = {"transfer": transfer.run, "broadcast": lambda: dist.broadcast(whole, src=0, group=group)}
    seconds = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sides if number % 2 == 0 else reversed(sides):
            seconds[name].append(slowest(sides[name], group))
    transfer.verify()
    sent = torch.tensor(transfer.bytes_sent)
    dist.all_reduce(sent, group=group)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        "case": case, "ranks": ranks, "model_bytes": int(size), "sent_bytes": int(sent), "planning_s": planning,
        "median_s": medians, "ratio": medians["broadcast"] / medians["transfer"], "seconds": seconds,
    }  # fmt: skip


def run_case(case: str, rounds: int) -> dict:
    """Runs a case on forked ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"

        def run() -> int:
            torch.set_num_threads(1)
            found = measure(case, rounds)
            if dist.get_rank() == 0:
                out.write_text(json.dumps(found))
            dist.destroy_process_group()
            return 0

        if status := run_ranks(run, CASES[case][0]):
            raise SystemExit(status)
        return json.loads(out.read_text())


def table(rows: list[dict], markdown: bool) -> str:
    """Case, ranks, model size, seconds of both sides, and their ratio (broadcast over transfer)."""
    lines = [["case", "ranks", "model", "transfer", "broadcast", "ratio"]]
    for row in rows:
        seconds = [f"{row['median_s'][side]:.3f} s" for side in ("transfer", "broadcast")]
        size = f"{row['model_bytes'] / 1e6:.0f} MB"
        lines.append([row["case"], str(row["ranks"]), size, *seconds, f"{row['ratio']:.2f}"])
    return whole_table(lines, markdown, 13)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", default=",".join(CASES), help="which of them")
    parser.add_argument("--rounds", type=int, default=7, help="transfers and broadcasts that count")
    add_output_flags(parser)
    args = parser.parse_args(argv)
    names = args.cases.split(",")
    if args.rounds < 1 or not set(names) <= set(CASES):
        parser.error(f"--cases {args.cases} --rounds {args.rounds}: allowed are {', '.join(CASES)}, and 1 or more")
    rows = [run_case(name, args.rounds) for name in names]
    print(table(rows, args.markdown))
    if args.json:
        args.json.write_text(json.dumps({"cases": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
