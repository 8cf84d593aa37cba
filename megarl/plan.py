"""Plans a run of any world size without a GPU: checks role map and models, prints layout, memory and traffic.

It takes the flags of train_rl. One process creates the real process groups on a fake backend.

    python -m megarl.plan --world-size 4096 --vocab-size 129280 --config my_run.yaml

With `--gpu` it says whether the run fits into the GPUs, and estimates a step's time; `--best-layouts` searches layouts,
`--least-recompute` the recomputation of activations that the run needs.
Exit status: 0; 1 if the run does not fit; 2 for wrong input.
"""

import argparse
import json
import sys
from pathlib import Path

from megarl import arguments
from megarl.errors import ArgumentParser, UsageError, flag_of, warn

POSITIVE = ("world_size", "ranks_per_node", "vocab_size", "gpu_memory", "mfu", "network", "image_tokens")
NEED_GPU = ("mfu", "network", "best_layouts")
DOES_NOT_FIT = 1  # exit status


def build_parser() -> argparse.ArgumentParser:
    """The program's own flags; all others are those of train_rl."""
    parser = ArgumentParser(prog="megarl.plan", allow_abbrev=False, epilog="Every other flag is one of train_rl.")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the run")
    parser.add_argument(
        "--ranks-per-node", type=int, help="for a role map of nodes; default: all ranks on one node. Estimates take 8"
    )
    parser.add_argument(
        "--vocab-size", type=int, help="size of the vocabulary; default: that of the folder or tokenizer"
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        help="memory of a GPU, GiB: ends with a verdict, and exit status 1 if the run does not fit;"
        " default: that of --gpu",
    )
    parser.add_argument(
        "--gpu", type=str.lower, help="a100, h100, h200 or b200: a verdict, and an estimate of a step's time"
    )
    parser.add_argument("--mfu", type=float, help="of the estimate: share of the GPU's FLOPs that is reached, 0.4")
    parser.add_argument("--network", type=float, help="of the estimate: GB/s of a GPU between nodes, default 50")
    parser.add_argument("--image-tokens", type=int, help="tokens of the images of a prompt, whose rows the plan counts")
    searches = parser.add_mutually_exclusive_group()
    searches.add_argument(
        "--best-layouts", action="store_true", help="search the parallel sizes that are not given; print the three best"
    )
    searches.add_argument(
        "--least-recompute",
        action="store_true",
        help="print only the flags of the least recomputation of activations with which the run fits;"
        " full recomputation, and exit status 1, if it never does",
    )
    parser.add_argument("--json", help="also write the plan to this file as JSON")
    return parser


def vocabulary(chosen, role: arguments.RoleSettings) -> int:
    """Size of a role's vocabulary: `--vocab-size`, or that of its Hugging Face folder or its tokenizer."""
    if chosen.vocab_size is not None:
        return chosen.vocab_size
    if role.hf_model is not None:
        return role.hf_model.vocab_size
    if not role.tokenizer_model:
        raise UsageError("--vocab-size is missing: it has no default without --hf-model or --tokenizer-model")
    from megarl.data.tokenizers import build_tokenizer

    return build_tokenizer(role.tokenizer_type, role.tokenizer_model).vocab_size


def check(chosen):
    """UsageError for wrong values of the program's own flags."""
    for name in POSITIVE:
        value, flag = getattr(chosen, name), flag_of(name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{flag} {value}: allowed is a number above 0")
        if value is not None and name in NEED_GPU and chosen.gpu is None:
            raise UsageError(f"{flag} {value}: needs --gpu, whose speed it is about")
    if chosen.mfu is not None and chosen.mfu > 1:
        raise UsageError(f"--mfu {chosen.mfu}: allowed is a share, at most 1")
    if chosen.best_layouts and chosen.gpu is None:
        raise UsageError("--best-layouts: needs --gpu, for which it estimates the time of a step")
    if chosen.image_tokens is not None and (chosen.best_layouts or chosen.least_recompute):
        raise UsageError("--image-tokens: a search does not read it; images take memory of the host alone")
    if chosen.least_recompute and chosen.gpu is None and chosen.gpu_memory is None:
        raise UsageError("--least-recompute: needs --gpu or --gpu-memory, into which the run is to fit")


def cluster_of(chosen):
    """The cluster that `--gpu` and its flags describe; None without it."""
    from megarl.planning import step_time

    if chosen.gpu is None:
        return None
    if chosen.gpu not in step_time.GPUS:
        raise UsageError(f"--gpu {chosen.gpu}: allowed are {', '.join(step_time.GPUS)}; others need --gpu-memory")
    mfu, network = chosen.mfu or step_time.MFU, (chosen.network or step_time.NETWORK) * 1e9
    per_node = chosen.ranks_per_node or step_time.RANKS_PER_NODE
    return step_time.Cluster(chosen.gpu, step_time.GPUS[chosen.gpu], mfu, network, per_node)


def question_of(chosen, flags: list[str]):
    """The question of a command line, and its program."""
    from megarl.planning.summary import Question

    program = Question(flags, chosen.world_size, chosen.ranks_per_node).program()
    warn(program.warnings)
    vocab_size, reward = vocabulary(chosen, program.roles["actor"]), program.roles["reward"]
    of_reward = vocabulary(chosen, reward) if reward.has_model else None
    return Question(
        flags, chosen.world_size, chosen.ranks_per_node, vocab_size, of_reward, chosen.image_tokens
    ), program


def main(argv: list[str]) -> int:
    """Prints the plan and returns the exit status, 0 or 1; UsageError for wrong input."""
    chosen, rest = build_parser().parse_known_args(argv)
    check(chosen)
    # What follows imports Megatron, so it comes after the check of the program's own flags.
    cluster = cluster_of(chosen)
    memory = chosen.gpu_memory or (cluster and cluster.gpu.memory)
    question, program = question_of(chosen, rest)
    answer = search if chosen.best_layouts else recompute if chosen.least_recompute else describe
    text, data, fits = answer(question, program, cluster, memory)
    print(text)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(data, indent=2), encoding="utf-8")
    return 0 if fits else DOES_NOT_FIT


def search(question, _program, cluster, memory: float) -> tuple[str, dict, bool]:
    """(text, data, whether there is one) of the best layouts."""
    from megarl.planning import layouts

    found = layouts.best_layouts(question, cluster, memory)
    return layouts.text(found, cluster), found, bool(found["best"])


def recompute(question, program, _cluster, memory: float) -> tuple[str, dict, bool]:
    """(text, data, whether the run fits) of the least recomputation with which it does."""
    from megarl.planning import layouts, verdict

    available, given = verdict.available(memory), program.roles["actor"].megatron.recompute_granularity
    flags, price = layouts.least_recompute(question, (), available, given)
    needed = price.fullest.bytes
    return " ".join(["recompute:", *flags]), {"flags": list(flags), "bytes": needed}, needed <= available


def of_memory(question, program) -> int:
    """Bytes that `--save-memory` takes on the fullest node, at most; by default all ranks are on one node."""
    from megarl.checkpoint import host_memory

    size, per_node = question.world_size, question.ranks_per_node or question.world_size
    nodes = range(-(-size // per_node))
    return max(host_memory.needed(program, question.vocab_size, node, per_node, size) for node in nodes)


def describe(question, program, cluster, memory: float | None) -> tuple[str, dict, bool]:
    """(text, data, whether it fits) of the plan of the given flags; it fits if no memory is given."""
    from megarl.planning import plan_table, step_time, summary, verdict
    from megarl.planning.memory import GIB
    from megarl.planning.summary import Price

    plan = summary.make_plan(
        program, question.world_size, question.vocab_size, question.reward_vocab_size, question.image_tokens
    )
    price, texts, data = Price(program, plan.roles, plan.rank_sets), [plan_table.text(plan)], plan_table.data(plan)
    per_node = question.ranks_per_node or step_time.RANKS_PER_NODE
    for name, role in program.roles.items():
        if role.has_model and (nodes := step_time.expert_nodes(role.megatron, per_node)) > 1:
            where = f"goes over {nodes} nodes of {per_node} ranks in each layer"
            texts.append(f"The all-to-all of the {name}'s experts {where}; up to EP {per_node} it stays in a node")
    if program.settings.save_memory:
        size = of_memory(question, program)
        data["save_memory_bytes"] = size
        texts.append(f"Host memory of a node for --save-memory, at most: {size / GIB:.2f} GiB of its tmpfs")
    if cluster is not None:
        seconds = step_time.estimate(price, cluster)
        texts.append(step_time.text(seconds))
        data["estimate"] = seconds
    if memory is None:
        return "\n\n".join(texts), data, True
    found = verdict.verdict(question, price, memory)
    texts.append(verdict.text(found, searches=cluster is not None))
    return "\n\n".join(texts), data | {"verdict": found}, found["fits"]


def launch(argv: list[str]):
    """Runs the program; wrong input prints one line and exits with status 2."""
    try:
        status = main(argv)
    except UsageError as error:
        print(f"megarl: error: {arguments.with_sources(error, argv, 'rl')}", file=sys.stderr)
        sys.exit(2)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    launch(sys.argv[1:])
