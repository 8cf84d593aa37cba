"""Which folders are refused under `--model-source transformers`, and by which line; modules without memory."""

import json
import re

import pytest
import torch

from megarl.errors import UsageError
from megarl.mcore.any_model import module_map, source
from megarl.mcore.any_model.attention import Slot
from tests.helpers.folders import any_types
from tests.helpers.tiers import by_default

STATES = (
    "than with two sequences packed together: it has states, masks or positions beside transformers' attention "
    "interface, which --model-source transformers does not compute"
)
NOT_COMPUTED = ", which --model-source transformers does not compute"
SMALL = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "intermediate_size": 64, "pad_token_id": 0}  # fmt: skip
# What config.json has, and the line. A name stands for a small configuration of that type.
REFUSED = {
    "unknown type": (
        {"model_type": "mine"},
        "config.json: model_type 'mine': the installed transformers has no such type",
    ),
    "no type": ({}, "config.json: model_type None: the installed transformers has no such type"),
    "code": (
        {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
        "config.json: auto_map: code in a folder is not run, and transformers has no type 'mine'",
    ),
    "no language model": (
        {"model_type": "vit"},
        "config.json: model_type 'vit': transformers has no language model (ForCausalLM) of it, and none that reads "
        "images",
    ),
    "wrong entry": (
        {"model_type": "granite", "hidden_size": "wide"},
        "config.json: transformers refuses it (Validation error for field 'hidden_size': TypeError: Field "
        "'hidden_size' expected int, got str (value: 'wide'))",
    ),
    "too small for its entries": (
        {"model_type": "granite", "vocab_size": 8, "hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 9},
        "GraniteForCausalLM cannot be built (AssertionError: Padding_idx must be within num_embeddings)" + NOT_COMPUTED,
    ),
    "states of channels": ("jamba", "JambaForCausalLM computes other logits (off by …) " + STATES),
    "decays of channels": ("kimi_linear", "KimiLinearForCausalLM computes other logits (off by …) " + STATES),
    "indexer": (
        "deepseek_v32",
        "DeepseekV32ForCausalLM cannot run without its sparse indexer, index_topk (TypeError: 'NoneType' object is not "
        "subscriptable)" + NOT_COMPUTED,
    ),
    "blocks of keys": ("deepseek_v4", "DeepseekV4Attention attends to 5 keys of 4 tokens" + NOT_COMPUTED),
    "own mask": ("doge", "DogeAttention makes an attention mask of its own" + NOT_COMPUTED),
    "own attention": ("bloom", "BloomForCausalLM does not call transformers' attention interface" + NOT_COMPUTED),
    "own table": ("falcon", "FalconForCausalLM does not call transformers' attention interface" + NOT_COMPUTED),
    "later tokens": ("bigbird_pegasus", "BigBirdPegasusDecoderAttention attends to later tokens, too" + NOT_COMPUTED),
    "chunks": (
        "llama4_text",
        "config.json: attention_chunk_size 128: prompt and response together have up to 129 tokens",
    ),
    "long rotary factors": (
        SMALL | {"model_type": "phi3", "max_position_embeddings": 256, "original_max_position_embeddings": 128,
                 "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
        "config.json: rope_type longrope, original_max_position_embeddings 128: prompt and response together have up "
        "to 129 tokens",
    ),
    "a table of positions": (
        SMALL | {"model_type": "gpt2", "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
        "GPT2LMHeadModel cannot read 129 tokens (IndexError: index out of range in self)" + NOT_COMPUTED,
    ),
    "dynamic rotary angles": (
        SMALL | {"model_type": "granite", "max_position_embeddings": 128,
                 "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "config.json: rope_type dynamic, max_position_embeddings 128: prompt and response together have up to 129 "
        "tokens",
    ),
}  # fmt: skip
LONGEST = 129
LIMITED = "chunks", "long rotary factors", "dynamic rotary angles", "a table of positions"
CHEAP = (
    "long rotary factors", "a table of positions", "unknown type", "code", "no language model", "wrong entry",
    "indexer", "own mask",
)  # fmt: skip


@pytest.mark.parametrize("name", by_default(REFUSED, CHEAP))
def test_a_folder_is_refused_with_one_line(name, tmp_path):
    config, line = REFUSED[name]
    config = any_types.small_config(config).to_dict() if isinstance(config, str) else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as error:
        module_map.read_model(str(tmp_path), "--hf-model", LONGEST)
    found = re.sub(r"off by \S+, the largest is \S+\)", "off by …)", str(error.value))
    assert found == f"--hf-model {tmp_path}: {line}"


@pytest.mark.parametrize("name", by_default(LIMITED, LIMITED[1:2]))
def test_a_folder_with_a_limit_is_read_up_to_it(name, tmp_path):
    config = REFUSED[name][0]
    config = any_types.small_config(config).to_dict() if isinstance(config, str) else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert module_map.read_model(str(tmp_path), "--hf-model", LONGEST - 1).vocab_size == config["vocab_size"]


def test_windows_of_several_sizes_are_refused():
    slots = [Slot(0, 4, 2, 16, 16, window, False) for window in (8, None, 16)]
    found = source.of_config(any_types.small_config("granite"))
    with pytest.raises(UsageError, match=r"^has attention windows of 2 sizes \(8, 16\), not of one$"):
        source.flags_of(found, slots, UsageError)
    assert source.flags_of(found, slots[:2], UsageError)["window-size"] == "7,0"


def test_a_composite_type_is_the_class_that_transformers_takes_with_its_part_of_the_config():
    config = any_types.small_config("llama4")
    found = source.of_config(config)
    assert found.kind.__name__ == "Llama4ForCausalLM" and found.config is config.text_config
    whole = source.of_config(any_types.small_config("gemma3"))
    assert whole.config.model_type == "gemma3" and whole.text.model_type == "gemma3_text"


# A table of angles; parameters of functions that take no device; buffers that a part sets on others.
BUFFERS = "cohere2", "gptj", "diffllama", "falcon_h1"


@pytest.mark.parametrize("kind", by_default(BUFFERS, BUFFERS[2:]))
def test_a_module_has_parameters_without_memory_and_its_buffers(kind):
    found = source.of_config(any_types.small_config(kind))
    module, own = found.module(torch.float32), found.kind(found.config)
    assert {each.device.type for each in module.parameters()} == {"meta"} and not module.training
    buffers = dict(own.named_buffers())
    assert buffers and dict(module.named_buffers()).keys() == buffers.keys()
    assert all(each.is_cpu and torch.equal(each, buffers[name]) for name, each in module.named_buffers())
    ties = [(name, of) for name, of in own.all_tied_weights_keys.items()]
    assert all(module.get_parameter(name) is module.get_parameter(of) for name, of in ties)


def test_slots_are_found_without_memory_and_set_on_their_modules():
    found = source.of_config(any_types.small_config("gemma4_text"))
    module = found.module(torch.float32)
    slots = source.find_slots(module)
    assert {each.device.type for each in module.parameters()} == {"meta"}
    assert [slot.number for slot in slots] == [0, 1, 2, 3, 4, 5]
    assert [slot.window for slot in slots] == [8, None] * 3
    assert [(slot.groups, slot.channels) for slot in slots[:2]] == [(2, 16), (1, 32)]
    assert [layer.self_attn.attention_slots[0] for layer in module.model.layers] == list(slots)
