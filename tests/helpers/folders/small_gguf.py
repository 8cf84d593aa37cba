"""A tiny Llama as a GGUF file, and its log-probs computed as llama.cpp defines the format."""

import gguf
import numpy

LAYERS, HIDDEN, FFN, HEADS, GROUPS, CHANNELS, THETA, EPSILON = 2, 64, 96, 4, 2, 16, 10000.0, 1e-5
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ hello"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokens() -> list[str]:
    """Special tokens, one for each byte, and one for each merge: 265."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def shapes() -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by its name in the file."""
    layer = {
        "attn_norm": (HIDDEN,), "attn_q": (HEADS * CHANNELS, HIDDEN), "attn_k": (GROUPS * CHANNELS, HIDDEN),
        "attn_v": (GROUPS * CHANNELS, HIDDEN), "attn_output": (HIDDEN, HEADS * CHANNELS), "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    outer = {"token_embd.weight": (len(tokens()), HIDDEN), "output_norm.weight": (HIDDEN,)}
    return outer | {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}


def quantized() -> dict[str, tuple[numpy.ndarray, gguf.GGMLQuantizationType]]:
    """(stored bytes, type) of random tensors by name: norms F32, embedding Q8_0, all others Q4_1."""
    random, found = numpy.random.default_rng(0), {}
    for name, shape in shapes().items():
        weight = random.standard_normal(shape, dtype=numpy.float32) * 0.2
        kind = gguf.GGMLQuantizationType.Q8_0 if name.startswith("token") else gguf.GGMLQuantizationType.Q4_1
        if len(shape) == 1:
            weight, kind = weight + 1, gguf.GGMLQuantizationType.F32
        found[name] = gguf.quantize(weight, kind), kind
    return found


def write(path, tensors=None, pre="smollm", layers=LAYERS, scaling=None, architecture="llama"):
    """Writes the file; `tensors` replaces those of `quantized`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(CHANNELS)
    writer.add_layer_norm_rms_eps(EPSILON)
    if scaling:
        writer.add_rope_scaling_factor(scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    names = tokens()
    writer.add_token_list(names)
    writer.add_token_types([3 if name in SPECIAL else 1 for name in names])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, (data, kind) in (tensors or quantized()).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logprobs(weights: dict[str, numpy.ndarray], ids: list[int], layers: int = LAYERS, heads: int = HEADS,
             groups: int = GROUPS, theta: float = THETA) -> numpy.ndarray:  # fmt: skip
    """[len(ids), vocabulary] log-probs after each token, float64, from dequantised weights in the file's own order.

    Rotary positions turn neighbouring channels (2i, 2i + 1) of a head: llama.cpp's "normal" type.
    """
    weights = {name: weight.astype(numpy.float64) for name, weight in weights.items()}
    x, length = weights["token_embd.weight"][ids], len(ids)
    channels = weights["blk.0.attn_q.weight"].shape[0] // heads
    angles = numpy.outer(numpy.arange(length), theta ** (-numpy.arange(0, channels, 2) / channels))[:, None]
    turn = numpy.exp(1j * angles)

    def norm(x, name):
        return x / numpy.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weights[name]

    def rotated(x):
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return numpy.stack([turned.real, turned.imag], -1).reshape(x.shape)

    for i in range(layers):
        w = {name: weights[f"blk.{i}.{name}.weight"] for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        h = norm(x, f"blk.{i}.attn_norm.weight")
        q = rotated((h @ w["attn_q"].T).reshape(length, heads, channels))
        k, v = ((h @ w[name].T).reshape(length, groups, channels) for name in ("attn_k", "attn_v"))
        k, v = (numpy.repeat(each, heads // groups, 1) for each in (rotated(k), v))
        scores = numpy.einsum("qhc,khc->hqk", q, k) / channels**0.5
        scores[:, numpy.triu(numpy.ones((length, length), bool), 1)] = -numpy.inf
        probabilities = numpy.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        x = x + numpy.einsum("hqk,khc->qhc", probabilities, v).reshape(length, -1) @ w["attn_output"].T
        h = norm(x, f"blk.{i}.ffn_norm.weight")
        gate, up = (h @ weights[f"blk.{i}.ffn_{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + numpy.exp(-gate)) * up) @ weights[f"blk.{i}.ffn_down.weight"].T
    logits = norm(x, "output_norm.weight") @ weights["token_embd.weight"].T
    logits -= logits.max(-1, keepdims=True)
    return logits - numpy.log(numpy.exp(logits).sum(-1, keepdims=True))
