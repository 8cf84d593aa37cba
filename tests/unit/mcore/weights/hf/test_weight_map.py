"""What config.json says that a folder holds is what transformers wrote into it, name by name, in each family."""

import pytest

from megarl.mcore.weights.hf.weight_map import WeightMap
from tests.helpers.folders.hf_folders import reference, write_folder
from tests.helpers.folders.hf_layouts import FAMILIES, REWARD, role_of
from tests.helpers.tiers import by_default

CHOSEN = ("llama3", "gpt_oss", "deepseek_v3_yarn", "qwen3_next", "nemotron_h_latent", "phi4", "llama_reward")


@pytest.mark.parametrize("case", by_default(FAMILIES, CHOSEN))
def test_the_tensors_are_those_that_config_json_describes(case, tmp_path):
    stored, is_reward = reference(case), case in REWARD
    role = role_of(write_folder(case, tmp_path / case), "", 1, is_reward)
    weight_map = WeightMap(role.hf_model, role.megatron, is_reward)
    expected = weight_map.expected()
    others = {tensor.name for tensor in stored.tensors if tensor.name not in expected}
    assert all(weight_map.model.is_unused(name) for name in others)
    assert {tensor.name: tuple(tensor.shape) for tensor in stored.tensors if tensor.name not in others} == expected
