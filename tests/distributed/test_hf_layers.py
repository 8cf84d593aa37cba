"""Layers of Hugging Face families: log-probs and greedy tokens that transformers computed, in every kind of layout."""

import pytest

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.hf_layers import check_case

CASES = [
    "mistral_window", "qwen2_window", "gemma2", "gemma3", "olmo2", "olmo3", "gpt_oss", "llama_linear_rope",
    "llama_yarn", "qwen3_yarn",
]  # fmt: skip
LAYOUTS = {
    "one": (1, ""),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"),
    "cp2": (2, "--context-parallel-size 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_transformers(case, layout):
    check_case(case, *LAYOUTS[layout], largest_gap_allowed())


def test_experts_over_ranks():
    check_case("gpt_oss", 2, "--expert-model-parallel-size 2", largest_gap_allowed())
