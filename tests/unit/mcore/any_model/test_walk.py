"""What modules of transformers do on a GPU besides megarl's products, experts and attention."""

import pytest
import torch

from megarl.mcore.any_model import source, walk
from tests.helpers.folders import any_types
from tests.helpers.tiers import by_default

# Type -> whether the host waits within a pass; what keeps it from an exact rollout.
KINDS = {
    "granite": (False, None),
    "ernie4_5_moe": (False, None),
    "longcat_flash": (True, "LongcatFlashForCausalLM asks for numbers"),
    "llama4_text": (False, "Llama4TextExperts computes bmm of 96 terms itself"),
    "cohere2": (False, "Cohere2LayerNorm computes mean of 64 terms itself"),
    "gpt2": (False, None),
    "modernbert-decoder": (False, "LayerNorm computes native_layer_norm of 64 terms itself"),
}


@pytest.mark.parametrize("kind", by_default(KINDS, ("ernie4_5_moe", "longcat_flash", "cohere2")))
def test_waits_and_sums_of_a_type_are_found(kind):
    waits, inexact = KINDS[kind]
    config = any_types.small_config(kind)
    found = source.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = source.Source(config, found[0] if isinstance(found, tuple) else found)
    alone = walk.walk(model.module(torch.bfloat16))
    assert (alone.waits is not None) == waits and (waits or alone.sums)  # of norms, until they have kernels
    problem = walk.inexact_part(model)
    assert problem is None if inexact is None else problem.startswith(inexact)


class Copies(torch.nn.Module):
    """Makes a tensor of a number within a pass."""

    def forward(self, input_ids, position_ids, use_cache):
        return input_ids * torch.tensor([2])


def test_a_number_of_the_host_that_a_pass_copies_is_found():
    assert walk.walk(Copies()).waits == "Copies copies numbers of the host to it"
