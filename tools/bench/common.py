"""What the benchmarks against other libraries share: a case's model, its weights for Hugging Face, rounds and tables.

Both sides of a benchmark compute with the same numbers. Megarl's weights are exported into a Hugging Face Llama of the
same shape, and nothing is timed before the two models agree on the log-probs of random sequences.
"""

import argparse
import importlib.util
import json
import statistics
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

TOLERANCE = 1e-3  # of a log-prob; what rounding leaves is a hundredth of it
OURS = "megarl"


class Unusable(SystemExit):
    """A benchmark that cannot run: the message goes to stderr, the exit status is 1."""


@dataclass(frozen=True)
class Shape:
    """A Llama: RMSNorm, SwiGLU, rotary positions, grouped queries, no biases, an output layer of its own."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int = 8
    groups: int = 4

    def flags(self) -> list[str]:
        """The model as Megatron's flags."""
        text = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads}"
            f" --group-query-attention --num-query-groups {self.groups} --ffn-hidden-size {self.ffn} --swiglu"
            " --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
            " --make-vocab-size-divisible-by 32"
        )
        return text.split()


def build(shape: Shape, lengths: tuple[int, int], more: str = ""):
    """(model on one rank, its process groups, Megatron's namespace) with random weights; joins a world of one.

    `lengths`: longest prompt and response; `more`: further flags.
    """
    prompt, response = lengths
    flags = f"--max-prompt-length {prompt} --max-response-length {response} --lr 1e-5 {more}"
    roles = arguments.parse([*shape.flags(), *flags.split()], 1, "sft").roles
    pg_collection = role_mesh.create_mesh(roles, timedelta(minutes=10))["actor"].pg_collection
    args = roles["actor"].megatron
    (chunk,) = gpt.build_model(args, shape.vocab, pg_collection)
    return chunk, pg_collection, args


def log_normal_lengths(count: int, longest: int, deviation: float) -> Tensor:
    """[count] int64 lengths, 2 … longest, of a log-normal distribution with median longest / 8; one is the longest."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.exp(torch.randn(count, generator=generator) * deviation) * longest / 8
    lengths = drawn.round().long().clamp(2, longest)
    lengths[0] = longest
    return lengths


def random_prompts(lengths: list[int], vocab: int) -> list[list[int]]:
    """A prompt of random tokens of each length; the first three ids of a vocabulary are left to special tokens."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def llama_weights(chunk, shape: Shape) -> dict[str, Tensor]:
    """Megarl's weights, gathered nowhere (one rank), under the names and in the order of Hugging Face's Llama.

    Megatron stacks a layer's queries, keys and values by key/value group: [groups, (queries of the group, key, value),
    channels, H]; and the gate of the MLP above what it gates. Rotary positions turn the halves of a head in both.
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
        for name, part in zip("qkv", stacked.split([queries, 1, 1], dim=1), strict=True):
            found[f"{theirs}self_attn.{name}_proj.weight"] = part.flatten(0, 2)
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
    """A Hugging Face LlamaForCausalLM in fp32 with megarl's weights, without an end token; refuses if the two differ.

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
    """Largest difference of the two models' log-probs of a few random sequences."""
    lengths = [33, 7, 64]
    rows = [torch.tensor(row, device=device.device()) for row in random_prompts(lengths, shape.vocab)]
    with torch.no_grad():
        scores = forward_pass.token_scores(chunk, torch.cat(rows), torch.tensor(lengths), 1.0, shape.vocab)
        logits = [peer(row[None]).logits[0, :-1].log_softmax(-1) for row in rows]
    theirs = [each.gather(-1, row[1:, None])[:, 0] for each, row in zip(logits, rows, strict=True)]
    ours = [each[1:] for each in scores.logprobs.split(lengths)]
    return float((torch.cat(ours) - torch.cat(theirs)).abs().max())


def refuse_different(found: float):
    """Raises Unusable for a difference of log-probs that makes times incomparable (NaN, too)."""
    if not found <= TOLERANCE:
        raise Unusable(f"the models differ: a log-prob by {found:.2e}, allowed is {TOLERANCE:.0e}; nothing is timed")


def installed(peers: dict[str, str]) -> list[str]:
    """Names of the peers whose module this interpreter has; says in a line each which are left out.

    `peers`: name -> module. Raises Unusable where there is none.
    """
    found = [name for name, module in peers.items() if importlib.util.find_spec(module)]
    for name in peers.keys() - set(found):
        print(f"{name} is not installed: left out", flush=True)
    if not found:
        raise Unusable("nothing to compare with: pip install megarl[bench]")
    return found


def alternate(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round: every round calls all sides, the first of one is the last of the next."""
    seconds, names = {name: [] for name in sides}, list(sides)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(sides[name]())
            print(f"  round {number + 1} {name}: {seconds[name][-1]:.3f} s", flush=True)
    return seconds


def report(
    case: str, seconds: dict[str, list[float]], work: dict[str, float], ours: str = OURS, **manifest_entries
) -> dict:  # fmt: skip
    """What is written and printed: medians, work a second, and how many times faster `ours` is than each other side.

    `work`: what a round does, by unit (tokens, …); `manifest_entries` go into the file as they are.
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
    } | manifest_entries  # fmt: skip


def table(found: dict, markdown: bool) -> str:
    """The report in aligned lines, or as rows of a Markdown table: case, side, seconds, work a second, ratio, peak."""
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
    """The flags that every benchmark has."""
    made = argparse.ArgumentParser(description=text.splitlines()[0], allow_abbrev=False)
    made.add_argument("--case", choices=list(cases), default=next(iter(cases)), help="the work")
    made.add_argument("--rounds", type=int, default=rounds, help="times that each side does the work")
    made.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    made.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers")
    return made


def parsed(made: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """The flags' values; exit status 2 and a line for what is not allowed."""
    args = made.parse_args(argv)
    if args.rounds < 1:
        made.error(f"--rounds {args.rounds}: must be at least 1")
    return args


def publish(found: dict, args: argparse.Namespace, shape: Shape):
    """Prints the table and writes the file."""
    print(table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found | {"model": asdict(shape)}, indent=2) + "\n")
