"""When the reference is the model under the actor's low-rank factors."""

import pytest

from megarl.roles.reference import shares_base
from tests.helpers.programs import program, rl_argv

LORA = "--lora-rank 2"
DISJOINT = "--role-map actor=0;critic=0;reward=1;reference=1"
FULL = "--actor-recompute-granularity full --actor-recompute-method uniform --actor-recompute-num-layers 1"
SHARED = [LORA, f"{LORA} --exact-rollout --bf16", f"{LORA} {FULL}", f"{LORA} --actor-lr 1e-3 --bf16"]
APART = ["", f"{LORA} --reference-attention-backend eager", f"{LORA} --reference-bf16", f"{LORA} {DISJOINT}"]


@pytest.mark.parametrize(
    "flags, is_shared", [*((flags, True) for flags in SHARED), *((flags, False) for flags in APART)]
)
def test_the_reference_shares_the_base_if_it_has_the_same_model(flags, is_shared, tmp_path):
    """Whatever flags say about training and kernels: those of the actor hold for both."""
    roles = program("rl", rl_argv(tmp_path, flags), 2).roles
    assert shares_base(roles["actor"], roles["reference"]) == is_shared
