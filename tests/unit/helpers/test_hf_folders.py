"""The small Hugging Face folders: the same on every machine, and what transformers reads, computes and writes."""

import importlib.util
import json
import traceback

import pytest
import torch
from safetensors import safe_open

from megarl.data.conversations import build_encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from tests.helpers.folders.hf_folders import CASES, hash_of, largest_file, reference, uniform, weights, write_folder
from tests.helpers.folders.hf_layouts import RECURRENT
from tests.helpers.worlds import run_world

OLD_STYLE = [case for case in CASES if case.endswith("_old_style")]
MESSAGES = [{"role": "user", "content": "Hello  world\n12"}]


def content(folder):
    """Each tensor of the folder's safetensors files, and their layout."""
    tensors, layout = {}, []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():
                tensors[name] = file.get_tensor(name)
                layout.append((name, file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()))
    return tensors, layout


def parsed(path):
    return json.loads(path.read_text())


def test_uniform_numbers_are_drawn_from_the_name():
    drawn = torch.from_numpy(uniform("model.norm.weight", [4096]))
    assert (drawn[:3] * 2**23).tolist() == [6470939.0, -2076627.0, 5396371.0]
    assert torch.equal(drawn * 2**23, (drawn * 2**23).round()) and drawn.min() >= -1 and drawn.max() < 1
    assert abs(drawn.mean()) < 0.03 and abs(drawn.square().mean() - 1 / 3) < 0.02
    assert torch.equal(torch.from_numpy(uniform("model.norm.weight", [2, 3])), drawn[:6].view(2, 3))
    other = torch.from_numpy(uniform("model.layers.0.norm.weight", [4096]))
    assert abs((drawn * other).mean()) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_files_hold_the_stored_tensors(tmp_path, case):
    stored = reference(case)
    tensors, layout = content(write_folder(case, tmp_path / case))
    assert sorted(layout) == sorted(each[:3] for each in stored.tensors) and len(tensors) == len(layout)
    assert hash_of(tensors) == hash_of(weights(case)) == stored.weights_hash
    assert parsed(tmp_path / case / "config.json") == stored.config
    has_head = any(name.endswith("lm_head.weight") for name in tensors)
    assert has_head == (not stored.config.get("tie_word_embeddings") and stored.scores is None)


@pytest.mark.parametrize("case", CASES)
def test_stored_numbers_are_complete(case):
    """Finite, of the stated lengths, and far enough from uniform for a comparison to mean something."""
    stored = reference(case)
    vocabulary = stored.config.get("text_config", stored.config)["vocab_size"]
    lengths = [97, 23, 2] if case in RECURRENT else [40, 23]
    assert [len(tokens) for tokens in stored.tokens] == lengths
    assert all(4 <= token < vocabulary for tokens in stored.tokens for token in tokens)
    if stored.scores is not None:
        assert stored.scores.shape == (2,) and stored.scores.isfinite().all()
        assert stored.generation_config is stored.logprobs is stored.greedy is None
        return
    assert [len(logprobs) for logprobs in stored.logprobs] == [length - 1 for length in lengths]
    assert stored.last_logprobs.shape == (vocabulary,)
    assert abs(stored.last_logprobs.exp().sum() - 1) < 1e-6
    everything = torch.cat([*stored.logprobs, stored.last_logprobs])
    assert everything.max() < 0 and everything.max() - everything.min() > 3
    assert len(stored.prompt) == 8 and len(stored.greedy) == 64 and stored.margin > 1e-3
    assert len(set(stored.greedy)) > 7 and max(stored.greedy) < vocabulary


def test_old_configurations_share_weights_and_numbers():
    assert len(OLD_STYLE) == 5
    for case in OLD_STYLE:
        old, new = reference(case), reference(case.removesuffix("_old_style"))
        assert "rope_theta" in old.config and "rope_parameters" not in old.config
        assert "rope_theta" not in new.config and "rope_parameters" in new.config
        assert (old.weights_hash, old.tokens, old.greedy) == (new.weights_hash, new.tokens, new.greedy)


def test_tokenizer_fits_into_every_vocabulary(tmp_path):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(write_folder("qwen3", tmp_path / "qwen3")))
    configs = [reference(case).config for case in CASES]
    assert tokenizer.vocab_size == 100 <= min(config.get("text_config", config)["vocab_size"] for config in configs)
    of_text = [config for config in configs if "text_config" not in config]  # the ids are in none of the others
    assert {config["eos_token_id"] for config in of_text} == {tokenizer.eos_id}
    assert {config["pad_token_id"] for config in of_text} == {tokenizer.pad_id, None}  # one has none
    text = "a  b\n{x}~ <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def test_weights_cannot_be_divided_among_any_number_of_files(tmp_path):
    with pytest.raises(ValueError, match="cannot be divided among 1000 files"):
        write_folder("llama2", tmp_path / "llama2", files=1000)


# -- against transformers, in a process of its own: it starts threads, and worlds are forked from this process --------

needs_transformers = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
# transformers does not know this `model_type`; hf_models.py compared its numbers with those of DeepSeek-V3.
KNOWN = [case for case in CASES if case != "kimi_k2"]
# Models that say what they are and have the layers of another one, whose class of transformers writes its own name.
NAMED = ("internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe")
DIVIDED = {"llama3": 2, "qwen3_moe": 3, "mixtral": 5, "glm4_moe_bf16": 4, "gpt_oss": 2, "deepseek_v3": 3}
# From 5.24 on transformers widens the routers of GLM-4 to fp32 when it loads them: the same numbers, other bytes.
WIDENED = {"glm4_moe_bf16": ".mlp.gate.weight"}  # case -> end of the names


def failures(rank, check, cases, folder) -> dict[str, str]:
    """What goes wrong with `check(case, folder)`, by case."""
    found = {}
    for case in cases:
        try:
            check(case, folder / case)
        except Exception:
            found[case] = traceback.format_exc()
    return found


def assert_none_fails(check, cases, folder):
    (found,) = run_world(failures, 1, check, cases, folder)
    assert not found, "\n".join(found.values())


def load(case, folder, dtype):
    import transformers

    from tests.references.hf_models import load

    return load(getattr(transformers, reference(case).config["architectures"][0]), folder, dtype)


def assert_same_weights(case, one, other):
    """The same bytes; where transformers widened what it may widen, the same numbers."""
    (drawn, _), (saved, _) = content(one), content(other)
    assert drawn.keys() == saved.keys() and all(saved[name].equal(drawn[name].to(saved[name])) for name in drawn)
    if changed := [name for name in drawn if saved[name].dtype is not drawn[name].dtype]:
        assert {(name.endswith(WIDENED[case]), saved[name].dtype) for name in changed} == {(True, torch.float32)}
        return
    names = sorted(path.name for path in one.glob("model*"))
    assert names == sorted(path.name for path in other.glob("model*")) != []
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


def assert_same_settings(one, other, name):
    """The same bytes, but for the line with the version of the library that wrote them."""
    drawn, saved = (
        [line for line in (folder / name).read_bytes().splitlines(True) if b'"transformers_version"' not in line]
        for folder in (one, other)
    )
    assert drawn == saved


@torch.no_grad()
def computes_the_stored_numbers(case, folder):
    stored = reference(case)
    model = load(case, write_folder(case, folder), torch.float32)
    outputs = [model(torch.tensor([tokens])).logits[0].double() for tokens in stored.tokens]
    if stored.scores is not None:
        torch.testing.assert_close(torch.cat(outputs), stored.scores, rtol=0, atol=1e-5)
        return
    for logits, tokens, expected in zip(outputs, stored.tokens, stored.logprobs, strict=True):
        found = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs[0].log_softmax(-1)[-1], stored.last_logprobs, rtol=0, atol=1e-5)
    best = model(torch.tensor([stored.prompt + stored.greedy])).logits[0, 7:-1].topk(2)
    assert best.indices[:, 0].tolist() == stored.greedy
    assert abs((best.values[:, 0] - best.values[:, 1]).min() - stored.margin) < 2e-5


@pytest.mark.nightly
@needs_transformers
def test_transformers_computes_the_stored_numbers(tmp_path):
    assert_none_fails(computes_the_stored_numbers, KNOWN, tmp_path)


def writes_the_same_files(case, folder):
    write_folder(case, folder / "drawn")
    load(case, folder / "drawn", "auto").save_pretrained(folder / "saved")
    assert_same_weights(case, folder / "drawn", folder / "saved")
    if case not in OLD_STYLE:
        assert_same_settings(folder / "drawn", folder / "saved", "config.json")
        assert (folder / "drawn" / "generation_config.json").exists() == (reference(case).scores is None)
    if (folder / "drawn" / "generation_config.json").exists():
        assert_same_settings(folder / "drawn", folder / "saved", "generation_config.json")


@pytest.mark.nightly
@needs_transformers
def test_transformers_writes_the_same_files(tmp_path):
    assert_none_fails(writes_the_same_files, [case for case in KNOWN if case not in NAMED], tmp_path)


def divides_the_weights_in_the_same_way(case, folder):
    files = DIVIDED[case]
    write_folder(case, folder / "drawn", files)
    assert len(list((folder / "drawn").glob("model-*-of-*.safetensors"))) == files
    model = load(case, folder / "drawn", "auto")
    model.save_pretrained(folder / "saved", max_shard_size=largest_file(reference(case).tensors, files))
    assert_same_weights(case, folder / "drawn", folder / "saved")


@pytest.mark.nightly
@needs_transformers
def test_transformers_divides_the_weights_in_the_same_way(tmp_path):
    assert_none_fails(divides_the_weights_in_the_same_way, DIVIDED, tmp_path)


def reads_the_tokenizer(case, folder):
    import transformers

    write_folder(case, folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    encoder = build_encoder(build_tokenizer("HuggingFaceTokenizer", str(folder)), "tokenizer")
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert list(ids) == encoder.prompt(Prompt(0, MESSAGES)) and len(set(ids)) > 10


@pytest.mark.nightly
@needs_transformers
def test_transformers_reads_the_tokenizer(tmp_path):
    assert_none_fails(reads_the_tokenizer, ["llama2"], tmp_path)
