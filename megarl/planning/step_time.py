"""GPUs by their data sheets, and the estimated time of a step on a cluster of them.

Training by FLOPs, generation by bytes over memory bandwidth, traffic over links. Every response has its full length,
nothing overlaps within a role; launches of kernels, copies of `--offload`, updates of `--optimizer-cpu-offload` and
checkpoints are not counted. Nothing of it was measured. Symbols as in `parameters`; P parameters of a token's forward,
T tokens, sequences of s tokens.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.model.pipeline_layout import attention_layer_pattern, indexer_pattern, moe_layer_pattern
from megarl.mcore.model.weight_table import Weight, padded_vocab_size
from megarl.planning import additions, summary, traffic
from megarl.planning.parameters import SCALAR_HEAD, of_stages, stage_weights, used_experts
from megarl.planning.summary import Price

BANDWIDTH_SHARE = 0.8  # of a data sheet's bandwidth that transfers are assumed to reach
MFU, NETWORK = 0.4, 50.0  # assumed: share of the peak FLOPs; GB/s of a GPU between nodes (400 Gbit/s)
LATENCY = 20e-6  # assumed seconds of a collective of a decode step, whose few bytes take no time
RANKS_PER_NODE = 8


class GPU(NamedTuple):
    """A data sheet: memory in GiB, dense 16-bit FLOPs per second, bytes per second of memory and of links one way."""

    memory: float
    flops: float
    bandwidth: float
    link: float


# NVIDIA's data sheets of the SXM and HGX modules; FLOPs without sparsity, links at half of NVLink's total.
GPUS = {
    "a100": GPU(80, 312e12, 2.039e12, 300e9),
    "h100": GPU(80, 989e12, 3.35e12, 450e9),
    "h200": GPU(141, 989e12, 4.8e12, 450e9),
    "b200": GPU(180, 2250e12, 8.0e12, 900e9),
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. `mfu`: assumed share of the peak FLOPs; `network`: bytes/s of a GPU between nodes."""

    name: str
    gpu: GPU
    mfu: float
    network: float
    ranks_per_node: int

    def speed(self, ranks: int) -> float:
        """Bytes per second that a rank sends in a group of so many consecutive ranks, or one that spans them."""
        in_node = ranks <= self.ranks_per_node
        return BANDWIDTH_SHARE * (self.gpu.link if in_node else self.network)

    @property
    def flops(self) -> float:
        """FLOPs per second that a rank is assumed to reach."""
        return self.mfu * self.gpu.flops

    @property
    def assumptions(self) -> str:
        """What an estimate assumes, in one line."""
        gpu = self.gpu
        return (
            f"{self.name}: {self.mfu:.0%} of {gpu.flops / 1e12:.0f} TFLOPS; {BANDWIDTH_SHARE:.0%} of "
            f"{gpu.bandwidth / 1e12:.2f} TB/s memory, {gpu.link / 1e9:.0f} GB/s in nodes of {self.ranks_per_node}, "
            f"{self.network / 1e9:.0f} GB/s between"
        )


def expert_nodes(args, ranks_per_node: int) -> int:
    """Nodes over which the all-to-all of a role's experts goes, whose groups are consecutive ranks; 1 without one."""
    sizes = parallel_sizes(args)
    return -(-sizes.expert * sizes.expert_tensor // ranks_per_node) if sizes.expert > 1 else 1


def estimate(price: Price, cluster: Cluster) -> dict | None:
    """The time of a step as plain data, in seconds; None for models of 32 bits, whose products are not those of the
    data sheets.

    `generation`, `scoring`, `updates`, `weights` to the rollout, and their `total`; `ahead`: the next batch is
    generated while this one is trained on; `assumptions` in one line.
    """
    program, step = price.program, traffic.step_sizes(price.program.settings)
    if any(role.megatron.params_dtype == torch.float32 for role in program.roles.values() if role.has_model):
        return None
    phases: dict[str, dict[str, float]] = {"generation": {}, "scoring": {}, "updates": {}}
    for name, plan in price.roles.items():
        if plan.cache is not None:
            phases["generation"][name] = _generation(program, plan, step, cluster)
        elif plan.parameters is not None and name != "rollout":
            phases["scoring"][name], phases["updates"][name] = _passes(program, plan, step, cluster)
    generation, scoring, updates = (
        max(sum(of_role.get(role, 0.0) for role in each.roles) for each in price.rank_sets)
        for of_role in phases.values()
    )
    rollout = price.roles["rollout"]
    sent = traffic.weights_to_rollout(program.roles, rollout.vocab_size) / len(rollout.ranks)
    weights, ahead = sent / cluster.speed(len(rollout.ranks)), program.settings.generation_lag > 0
    training = scoring + updates
    total = (max(generation, training) if ahead else generation + training) + weights
    seconds = {"generation": generation, "scoring": scoring, "updates": updates, "weights": weights}
    return seconds | {"ahead": ahead, "total": total, "assumptions": cluster.assumptions}


def text(found: dict | None) -> str:
    """The estimate as text, with what it assumes."""
    if found is None:
        return "No estimate of a step's time: a model of 32 bits does not run at the speed of the data sheets"
    phases = ", ".join(f"{phase} {found[phase]:,.1f}" for phase in ("generation", "scoring", "updates"))
    return (
        "Estimate of a step's time, never measured, all responses at full length\n"
        f"({found['assumptions']})\n"
        f"{found['total']:,.1f} s: {phases}, weights to the rollout {found['weights']:,.1f}"
        + (" (generation of the next batch meanwhile)" if found["ahead"] else "")
    )


def forward_flops(args, plan: summary.RolePlan, tokens: float, length: float) -> float:
    """2·P·T + L·A·(D_keys + D_values)·s·T of L layers with attention: a causal token attends to half of its sequence on
    average. What recurrent states take is not counted. A token that chooses keys attends to these.

    P without embeddings that are only looked up.
    """
    assert plan.parameters is not None
    of_latents = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
    channels = of_latents if args.multi_latent_attention else 2 * args.kv_channels
    lookups, layers = 0, sum(attention_layer_pattern(args))
    if args.dsa_indexer_topk is not None:  # absorbed heads, of chosen keys alone; and products of index keys with all
        absorbed = 2 * args.kv_lora_rank + args.qk_pos_emb_head_dim
        channels = min(channels, absorbed * 2 * args.dsa_indexer_topk / length)
        products = sum(indexer_pattern(args)) * args.dsa_indexer_n_heads * args.dsa_indexer_head_dim
        channels += products / (layers * args.num_attention_heads)
    if args.untie_embeddings_and_output_weights or plan.kind in SCALAR_HEAD:
        lookups = padded_vocab_size(args, plan.vocab_size) * args.hidden_size
    return tokens * (2 * (plan.parameters.active - lookups) + layers * args.num_attention_heads * channels * length)


def _passes(program, plan: summary.RolePlan, step: traffic.StepSizes, cluster: Cluster) -> tuple[float, float]:
    """(seconds of the forwards that score, seconds of the updates) of a role other than the rollout.

    f forwards and w backwards of 2 forwards each, times 1 + (p − 1)/(v·m), the idle share of a pipeline; selective
    recomputation, which repeats attention alone, is not counted.
    """
    role, sizes = program.roles[plan.name], parallel_sizes(program.roles[plan.name].megatron)
    args, models = role.megatron, summary.models_of(role, program.settings)
    length = args.seq_length
    if role.is_judge:  # reads its prompts and judgements once; its decode steps are not counted
        step = additions.judge_sizes(program.settings)
    forwards, backwards = traffic.passes(plan.name, args, step)
    scoring = forwards - backwards * (2 if args.recompute_granularity == "full" else 1)
    count = step.microbatches(sizes.data(len(plan.ranks)), role.max_tokens_per_microbatch)
    virtual = args.virtual_pipeline_model_parallel_size or 1
    bubble = 1 + (sizes.pipeline - 1) / (virtual * count)
    one = models * forward_flops(args, plan, step.sequences * length, length) / len(plan.ranks) / cluster.flops * bubble
    sent, node = plan.traffic, sizes.tensor * sizes.context
    links = sent["tensor"] / cluster.speed(sizes.tensor) + sent["context"] / cluster.speed(node)
    links += sent["expert"] / cluster.speed(sizes.expert * sizes.expert_tensor)
    links += sent["pipeline"] / cluster.speed(len(plan.ranks))
    share = scoring / (forwards + backwards)
    reduced = sent["gradients"] / cluster.speed(len(plan.ranks) // sizes.pipeline)
    return scoring * one + share * links, (forwards - scoring + 2 * backwards) * one + (1 - share) * links + reduced


def _generation(program, plan: summary.RolePlan, step: traffic.StepSizes, cluster: Cluster) -> float:
    """Seconds of a replica's rounds and of one prefill of each prompt."""
    role, cache, sent = program.roles[plan.name], plan.cache, plan.traffic
    args, sizes = role.megatron, parallel_sizes(role.megatron)
    assert cache is not None
    prompts = ceil(program.settings.prompts_per_step / sizes.data(len(plan.ranks)))
    prefill = forward_flops(args, plan, prompts * step.prompt, step.prompt) / sizes.tensor / cluster.flops
    links = sent["tensor"] / cluster.speed(sizes.tensor) + sent["pipeline"] / cluster.speed(len(plan.ranks))
    links += sent["expert"] / cluster.speed(sizes.expert * sizes.expert_tensor)
    return cache.rounds * step.response * decode_seconds(args, plan, step, cluster) + prefill + links


def decode_seconds(args, plan: summary.RolePlan, step: traffic.StepSizes, cluster: Cluster) -> float:
    """Seconds of a decode step without what it sends.

    It reads the weights, and the cache of a round's requests at half of their response, reads and writes recurrent
    states, or computes, whichever takes longer; the stages of a pipeline take turns; every collective takes `LATENCY`.
    Of E experts, n tokens read 1 − (1 − k/E)ⁿ.
    """
    sizes, cache, mean = parallel_sizes(args), plan.cache, step.prompt + step.response / 2
    assert cache is not None
    requests = cache.responses / cache.rounds
    touched = 1 - (1 - used_experts(args)) ** (requests * max(1, sizes.expert * sizes.expert_tensor // sizes.tensor))
    stages = stage_weights(args, plan.vocab_size, value_head=False)
    has_head = any(w.name.startswith("output_layer.") for w in stages[-1][-1])  # the embedding is only looked up
    read = sum(of_stages(stages, lambda chunks, _: _read_of_stage(chunks, has_head, touched)))
    of_token = cache.token_bytes * _read_share(args, mean)
    read += requests * (mean * of_token + 2 * cache.state_bytes) * sizes.pipeline
    computed = forward_flops(args, plan, requests, 2 * mean) / sizes.tensor / cluster.flops
    collectives = 2 * args.num_layers * (sizes.tensor > 1) + sizes.pipeline - 1
    collectives += 2 * sum(moe_layer_pattern(args)) * (sizes.expert * sizes.expert_tensor > 1)
    return max(read / (BANDWIDTH_SHARE * cluster.gpu.bandwidth), computed) + collectives * LATENCY


def _read_of_stage(chunks: list[list[Weight]], has_head: bool, touched: float) -> float:
    """Bytes of a stage's weights that a decode step reads: of routed experts a share; embeddings only as a head."""
    weights = [w for chunk in chunks for w in chunk if not (has_head and w.name.startswith("embedding."))]
    return sum(w.elements * w.itemsize * (touched if w.is_routed else 1.0) for w in weights)


def _read_share(args, tokens: float) -> float:
    """Share of the cache of so many tokens that a decode step reads: of latents those that it chooses."""
    if args.dsa_indexer_topk is None:
        return 1.0
    latent, indexers = args.kv_lora_rank + args.qk_pos_emb_head_dim, sum(indexer_pattern(args)) / args.num_layers
    index_key = args.dsa_indexer_head_dim * indexers  # of a layer in the mean
    return (latent * min(1.0, args.dsa_indexer_topk / tokens) + index_key) / (latent + index_key)
