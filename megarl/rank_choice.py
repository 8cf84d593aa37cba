"""How many ranks a run on one node's CPUs should have: one with all threads, or one for each core.

Both ways of using the cores are measured on the products with weights of the actor's model, for the decode steps and
the tokens of a step. Gradients that ranks exchange and small operators are not measured.
"""

import json
import os
from collections.abc import Callable

import torch

from megarl import arguments
from megarl.errors import UsageError
from megarl.mcore import device, tuning

CLEARLY = 1.05  # times as fast as one rank must several be
BYTES_PER_WEIGHT = 24  # of a trained model in fp32: weights, gradients, moments, and activations of the same order
LARGEST_SHARE = 0.4  # of the node's memory that all copies of a model may take
TOKENS = 512  # of a measured update


def ranks_for(flags: list[str], program: str, cores: int) -> int:
    """Returns 1, or `cores` if so many data-parallel ranks with one thread each are faster.

    1 also for flags that place roles or split a model, for flags that are wrong, and for models whose copies would not
    fit into memory.
    """
    try:
        config = arguments.parse(flags, cores, program)
    except UsageError:
        return 1
    role = config.roles.get("actor") or config.roles["reward"]
    if device.has_cuda() or config.settings.role_map or not _fits(role.megatron, cores, len(config.with_models())):
        return 1
    sizes, s = tuple(sorted(tuning.product_sizes(role.megatron))), config.settings
    responses = s.sequences_per_step if program == "rl" else role.megatron.global_batch_size or 1
    steps = s.max_response_length if program == "rl" else 0
    updates = responses * role.megatron.seq_length * s.ppo_epochs / TOKENS

    def seconds(ranks: int) -> float:
        torch.set_num_threads(max(1, cores // ranks))
        decode, update = tuning.seconds_of_work(sizes, -(-responses // ranks), TOKENS // ranks)
        return steps * decode + updates * update

    one, several = (max(_in_children(seconds, ranks)) for ranks in (1, cores))
    return cores if several * CLEARLY < one else 1


def _fits(args, ranks: int, models: int) -> bool:
    weights = args.num_layers * sum(columns * inner for columns, inner in tuning.product_sizes(args))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return weights * (args.num_experts or 1) * BYTES_PER_WEIGHT * ranks * models <= LARGEST_SHARE * memory


def _in_children(function: Callable[[int], float], ranks: int) -> list[float]:
    """The function's results in so many forked processes at once: threads that they start end with them."""
    readers = []
    for _ in range(ranks):
        read, write = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                os.write(write, json.dumps(function(ranks)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        readers.append(read)
    results = []
    for read in readers:
        with os.fdopen(read) as file:
            text = file.read()
        os.wait()
        results.append(json.loads(text) if text else float("inf"))
    return results
