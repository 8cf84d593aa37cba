"""Sequences longer than any block of a kernel: rollouts have the bits of training, and both are transformers' numbers.

BLAS may divide a sum over keys at places that depend on their number, from 385 keys on with MKL and AVX-512.
"""

import pytest

from tests.helpers.exactness import ROUNDING
from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.rollout import long_prompts
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

# One case of each kind of attention, then further ones of the same kinds.
KINDS = {
    "llama3": "all keys", "mistral_window": "window", "gemma2": "softcap and window", "gpt_oss": "sinks and window",
    "deepseek_v3_yarn": "latents", "deepseek_v32+8": "chosen keys", "glm_moe_dsa+8": "keys that layers share",
    "qwen3_next": "recurrent layers beside attention", "kimi_linear": "recurrent layers beside latents",
    "ling_3": "recurrent layers beside latents",
    "gemma3": "window", "olmo3": "window", "exaone4": "window", "cwm": "window", "qwen3_moe_window": "window",
    "deepseek_v2_lite": "latents", "deepseek_v32": "latents", "glm4_moe_lite": "latents", "youtu": "latents",
    "nemotron_h": "recurrent layers beside attention", "qwen35_moe": "recurrent layers beside attention",
}  # fmt: skip
FIRST = (
    "llama3",
    "mistral_window",
    "gemma2",
    "gpt_oss",
    "deepseek_v3_yarn",
    "qwen3_next",
    "kimi_linear",
    "deepseek_v32+8",
    "glm_moe_dsa+8",
)
LAYOUTS = {
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    "cp2": "--context-parallel-size 2",  # the engine does not run in it
}
TP2_SP, CP2 = "tp2-sp", "cp2"


def folders_of(cases, folder) -> dict:
    return {case: long_prompts.write_folder(case, folder / case) for case in cases}


@needs_kernels
@pytest.mark.parametrize(
    "cases, modes", [(FIRST, ["prefix caching"]), *(long(([x], long_prompts.MODES)) for x in KINDS)]
)
def test_rollouts_have_the_bits_of_training_and_both_are_transformers_numbers(cases, modes, tmp_path):
    """The compiled kernels were used, with a gap of 0 in every mode, and the numbers are those of transformers."""
    (found,) = run_world(long_prompts.run, 1, folders_of(cases, tmp_path), "", "compiled", (*modes,), True)
    for case, each in found.items():
        assert each.backend == "native_attention" and each.gaps and set(each.gaps.values()) == {0.0}, (case, each.gaps)
        assert each.difference <= 1e-5, (case, each.difference)


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gap_stays_zero_in_layouts(layout, tmp_path):
    folders = folders_of(
        ["mistral_window", "gemma2", "gpt_oss", "deepseek_v3_yarn", "deepseek_v32+8", "glm_moe_dsa+8", "kimi_linear"],
        tmp_path,
    )
    (alone,) = run_world(long_prompts.run, 1, folders, "", "compiled", ())
    modes = () if layout == CP2 else ("whole", "prefix caching")
    for ranks in run_world(long_prompts.run, 2, folders, LAYOUTS[layout], "compiled", modes):
        for case, found in ranks.items():
            assert set(found.gaps.values()) == ({0.0} if modes else set()), (case, found.gaps)
            pairs = zip(found.scores, alone[case].scores, strict=True)
            difference = max((one - other).abs().max() for one, other in pairs)
            assert difference <= (0.0 if layout != TP2_SP else 1e-5), case


@pytest.mark.long
@pytest.mark.parametrize("flags, kernels", [("", "blas"), ("", "onednn"), ("--bf16", "blas")])
def test_pytorchs_operators_differ_by_rounding_at_most(flags, kernels, tmp_path):
    """In fp32 beyond 384 keys; numbers in bf16 hide it."""
    cases = [
        case for case in FIRST if "+" not in case and (case not in ("qwen3_next", "kimi_linear") or flags)
    ]  # PyTorch's chunks of a state differ more
    (found,) = run_world(long_prompts.run, 1, folders_of(cases, tmp_path), flags, kernels, ("whole",))
    for case, each in found.items():
        assert each.backend in ("sdpa", "eager"), case
        assert each.gaps["whole"] <= (0.0 if flags else 4 * ROUNDING), (case, each.gaps)


@needs_kernels
def test_a_wrong_window_shows_in_the_numbers(tmp_path):
    """A gap of 0 alone does not prove that the window is right."""
    folders = {str(n): long_prompts.write_folder("mistral_window", tmp_path / str(n), n) for n in (700, 699)}
    (found,) = run_world(long_prompts.run, 1, folders, "", "compiled", ())
    pairs = zip(found["700"].scores, found["699"].scores, strict=True)
    short, longest, *_ = [(one - other).abs() for one, other in pairs]
    assert longest.max() > 1e-4 and not longest[:699].any() and not short.any()
