"""Shared by the benchmarks against other libraries: models, export to Hugging Face, rounds and tables.

Both sides of a benchmark have the same weights: megarl's are exported to a Hugging Face Llama of the same shape. Timing
starts only after both models agree on the log-probs of random sequences.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from megarl import arguments
from megarl.comm import role_mesh
from megarl.mcore import device
from megarl.mcore.model import forward_pass, gpt

TOLERANCE = 1e-3  # of a log-prob; rounding causes about a hundredth of it
OURS = "megarl"


class Unusable(SystemExit):
    """The benchmark cannot run: prints the message to stderr and exits with status 1."""


@dataclass(frozen=True)
class Shape:
    """A Llama: RMSNorm, SwiGLU, rotary positions, grouped queries, no biases, untied output layer."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int = 8
    groups: int = 4

    def flags(self) -> list[str]:
        """The model as Megatron's flags."""
        grouped = f" --group-query-attention --num-query-groups {self.groups}" if self.groups < self.heads else ""
        text = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}"
            f"{grouped} --ffn-hidden-size {self.ffn} --swiglu --normalization RMSNorm --disable-bias-linear"
            " --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 32"
        )
        return text.split()

    def entries(self, longest: int) -> dict:
        """The same as entries of a config that types of transformers share; `longest`: tokens of a sequence."""
        return {
            "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.groups,
            "max_position_embeddings": longest, "tie_word_embeddings": False, "bos_token_id": None,
            "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.06,
        }  # fmt: skip


def build(shape: Shape, lengths: tuple[int, int], more: str = "", program: str = "sft"):
    """(model on one rank, its process groups, Megatron's namespace) with random weights; joins a world of one rank.

    `lengths`: maximum prompt and response length; `more`: further flags, of the `program`.
    """
    prompt, response = lengths
    flags = f"--max-prompt-length {prompt} --max-response-length {response} --lr 1e-5 {more}"
    roles = arguments.parse([*shape.flags(), *flags.split()], 1, program).roles
    pg_collection = role_mesh.create_mesh(roles, timedelta(minutes=10))["actor"].pg_collection
    args = roles["actor"].megatron
    (chunk,) = gpt.build_model(args, shape.vocab, pg_collection)
    return chunk, pg_collection, args


def multiplied_parameters(model, shape: Shape) -> int:
    """Number of a model's parameters without the table of embeddings, of which a token reads one row."""
    return sum(parameter.numel() for parameter in model.parameters()) - shape.vocab * shape.hidden


def log_normal_lengths(count: int, longest: int, deviation: float) -> Tensor:
    """[count] int64 log-normal lengths, 2 … longest, with median longest / 8; the first is the longest."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.exp(torch.randn(count, generator=generator) * deviation) * longest / 8
    lengths = drawn.round().long().clamp(2, longest)
    lengths[0] = longest
    return lengths


def random_prompts(lengths: list[int], vocab: int) -> list[list[int]]:
    """A prompt of random tokens per length, without the first three ids, which are special tokens."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def llama_weights(chunk, shape: Shape) -> dict[str, Tensor]:
    """The weights of a model on one rank, with the names and the layout of Hugging Face's Llama.

    Megatron stacks a layer's queries, keys and values by key/value group: [groups, (queries of the group, key, value),
    channels, H]; and the MLP's gate above its up projection. Both rotate the halves of a head.
    """
    own = {name: value.detach() for name, value in chunk.named_parameters()}
    found = {
        "model.embed_tokens.weight": own["embedding.word_embeddings.weight"][: shape.vocab],
        "model.norm.weight": own["decoder.final_layernorm.weight"],
        "lm_head.weight": own["output_layer.weight"][: shape.vocab],
    }
    queries, channels = shape.heads // shape.groups, shape.hidden // shape.heads
    for i in range(shape.layers):
        mine, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        stacked = own[mine + "self_attention.linear_qkv.weight"].view(shape.groups, queries + 2, channels, -1)
        for name, weight in zip("qkv", stacked.split([queries, 1, 1], dim=1), strict=True):
            found[f"{theirs}self_attn.{name}_proj.weight"] = weight.flatten(0, 2)
        gate, up = own[mine + "mlp.linear_fc1.weight"].chunk(2)
        found |= {
            f"{theirs}self_attn.o_proj.weight": own[mine + "self_attention.linear_proj.weight"],
            f"{theirs}mlp.gate_proj.weight": gate,
            f"{theirs}mlp.up_proj.weight": up,
            f"{theirs}mlp.down_proj.weight": own[mine + "mlp.linear_fc2.weight"],
            f"{theirs}input_layernorm.weight": own[mine + "input_layernorm.weight"],
            f"{theirs}post_attention_layernorm.weight": own[mine + "pre_mlp_layernorm.weight"],
        }
    return {name: value.clone() for name, value in found.items()}


def export(chunk, shape: Shape, args, longest: int):
    """A Hugging Face LlamaForCausalLM in fp32 with megarl's weights and without an end token.

    Raises:
        Unusable: a log-prob of a token differs by more than `TOLERANCE`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.groups, max_position_embeddings=longest,
        rms_norm_eps=chunk.config.layernorm_epsilon, tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": float(args.rotary_base)}, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    peer = LlamaForCausalLM(config).to(device.device()).float()
    peer.load_state_dict(llama_weights(chunk, shape))
    refuse_different(difference(chunk, peer, shape))
    return peer


def difference(chunk, peer, shape: Shape) -> float:
    """Largest difference of the models' log-probs on a few random sequences."""
    lengths = [33, 7, 64]
    rows = [torch.tensor(row, device=device.device()) for row in random_prompts(lengths, shape.vocab)]
    with torch.no_grad():
        scores = forward_pass.token_scores(chunk, torch.cat(rows), torch.tensor(lengths), 1.0, shape.vocab)
        logits = [peer(row[None]).logits[0, :-1].log_softmax(-1) for row in rows]
    theirs = [logp.gather(-1, row[1:, None])[:, 0] for logp, row in zip(logits, rows, strict=True)]
    ours = [logprobs[1:] for logprobs in scores.logprobs.split(lengths)]
    return float((torch.cat(ours) - torch.cat(theirs)).abs().max())


def refuse_different(found: float):
    """Raises Unusable if log-probs differ by more than `TOLERANCE` or by NaN, since times are then incomparable."""
    if not found <= TOLERANCE:
        raise Unusable(f"the models differ: a log-prob by {found:.2e}, allowed is {TOLERANCE:.0e}")


def installed(peers: dict[str, str]) -> list[str]:
    """Names of the installed peers; prints a line for each other one.

    `peers`: name -> module. Raises Unusable if none is installed.
    """
    found = [name for name, module in peers.items() if importlib.util.find_spec(module)]
    for name in peers.keys() - set(found):
        print(f"{name} is not installed: skipped", flush=True)
    if not found:
        raise Unusable("nothing to compare with: pip install megarl[bench]")
    return found


def trainer_clock():
    """A callback of a transformers trainer: `seconds()` of each step, and its `losses`, if it logs them."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Records the time when training begins and when each step ends, and its loss."""

        def __init__(self):
            self.ends, self.losses = [], []

        def on_train_begin(self, *_, **__):
            self.ends.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            self.ends.append(time.perf_counter())

        def on_log(self, *_, logs, **__):
            self.losses.extend([logs["loss"]] if "loss" in logs else [])

        def seconds(self) -> list[float]:
            """From the end of the step before to that of each."""
            return [end - start for start, end in itertools.pairwise(self.ends)]

    return Clock()


def use_processor_time():
    """Makes what times steps, on either side, count the seconds of this process's processor."""
    time.perf_counter, time.perf_counter_ns = time.process_time, time.process_time_ns


def alternate(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round. Every round calls all sides, in alternating order."""
    seconds, names = {name: [] for name in sides}, list(sides)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(sides[name]())
            print(f"  round {number + 1} {name}: {seconds[name][-1]:.3f} s", flush=True)
    return seconds


def report(
    case: str, seconds: dict[str, list[float]], work: dict[str, float], ours: str = OURS, **extra
) -> dict:  # fmt: skip
    """The numbers of a benchmark: medians, work per second, and the speed-up of `ours` over each other side.

    `work`: amount of work per round by unit (tokens, …); `extra`: further entries.
    """
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    sides = {
        name: {"median_s": median, "seconds": seconds[name]}
        | {f"{unit}_per_s": amount / median for unit, amount in work.items()}
        for name, median in medians.items()
    }
    return {
        "case": case, "device": str(device.device()), "threads": torch.get_num_threads(), "work": work, "sides": sides,
        "ratio": {name: median / medians[ours] for name, median in medians.items() if name != ours},
    } | extra  # fmt: skip


def table(found: dict, markdown: bool) -> str:
    """The report as aligned lines or rows of a Markdown table: case, side, seconds, work per second, ratio, peak."""
    lines = []
    for name, side in found["sides"].items():
        speeds = [f"{side[f'{unit}_per_s']:,.0f} {unit}/s" for unit in found["work"]]
        ratio = f"{found['ratio'][name]:.2f}" if name in found["ratio"] else ""
        cells = [found["case"], name, f"{side['median_s']:.2f} s", *speeds, ratio]
        if "peak_bytes" in found:
            cells.append(f"{found['peak_bytes'][name] / 2**20:,.0f} MiB")
        if markdown:
            lines.append("| " + " | ".join(cells) + " |")
        else:
            lines.append((f"{cells[0]:10}{cells[1]:12}" + "".join(f"{cell:>20}" for cell in cells[2:])).rstrip())
    return "\n".join(lines)


def parser(text: str, cases: dict, rounds: int) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark; `text`: the module's docstring; `cases`: empty for a single one."""
    made = argparse.ArgumentParser(description=text.splitlines()[0], allow_abbrev=False)
    if cases:
        made.add_argument("--case", choices=list(cases), default=next(iter(cases)), help="case; default: %(default)s")
    made.add_argument("--rounds", type=int, default=rounds, help="rounds of each side; default: %(default)s")
    made.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return made


def parsed(made: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the flags; a wrong value prints a line and exits with status 2."""
    args = made.parse_args(argv)
    if args.rounds < 1:
        made.error(f"--rounds {args.rounds}: must be at least 1")
    return args


def publish(found: dict, args: argparse.Namespace, shape: Shape):
    """Prints the table and writes the JSON file."""
    print(table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found | {"model": asdict(shape)}, indent=2) + "\n")
