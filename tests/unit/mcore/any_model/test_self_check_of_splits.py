"""Modules that are run as each of several ranks in one process: which weights get a part of their gradient."""

import pytest
import torch

from megarl.mcore.any_model import self_check, source, tensor_parallel
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.any_model.tensor_parallel import STYLES, WHOLE, Split, starred
from tests.helpers.folders import any_types

SUMMED = "replicated_with_grad_allreduce"  # of transformers' plans


def found(kind: str, ranks: int = 2, **entries) -> set[str]:
    return {*self_check.partial_weights(source.of_config(any_types.small_config(kind, **entries)), ranks)}


@pytest.mark.parametrize("kind, own", [("qwen3", 0), ("granite", 0), ("phi3", 0), ("longcat_flash", 0), ("apertus", 2)])
def test_whole_weights_of_single_heads_are_found_with_those_that_a_plan_names(kind, own):
    module = source.of_config(any_types.small_config(kind)).module(torch.float32)
    named = {name for name in map(starred, dict(module.named_parameters()))
             if module.tp_plan.get(name.rpartition(".")[0]) == SUMMED}  # fmt: skip
    assert named <= found(kind) and len(found(kind) - named) == own


def test_a_plan_that_lacks_the_norms_of_heads_needs_none():
    config = dict(use_qk_norm=True)  # glm4_moe's plan does not name them
    assert found("glm4_moe", **config) == {f"model.layers.*.self_attn.{x}_norm.weight" for x in "qk"}
    assert found("glm4_moe", use_qk_norm=False) == set()


def test_what_is_needed_whole_is_refused():
    with pytest.raises(
        Unsupported, match=r"^Gemma3nForCausalLM computes something else in parts \(off by 0.*needs whole$"
    ):
        found("gemma3n_text")
    with pytest.raises(Unsupported, match="^CohereForCausalLM cannot run .*size of tensor"):
        found("cohere")  # norms of all heads together
    assert found("cohere", use_qk_norm=False) == set()


@pytest.mark.parametrize("word, style, says", [
    ("moe_identity_expert", WHOLE, "computes something else in parts"),
    ("colwise", (Split(tensor_parallel.ROWS), "", ""), "does not sum the gradient of what its ranks share"),
    ("mla_kv_a_proj", None, "does not sum the gradient"),
])  # fmt: skip
def test_wrong_styles_are_found(word, style, says, monkeypatch):
    if style is not None:
        monkeypatch.setitem(STYLES, word, style)
    else:
        monkeypatch.setattr(tensor_parallel, "_with_shared_key", lambda _, __, out: out)
    with pytest.raises(Unsupported, match=says):
        found("longcat_flash")
