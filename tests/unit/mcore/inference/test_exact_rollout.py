"""Rollout and training by the kernels of `--exact-rollout`, run by Triton's interpreter: equal log-probs."""

import pytest

from megarl.mcore.config import kernel_rules
from tests.helpers.folders import any_types, hf_layouts
from tests.helpers.models import interpreted_kernels
from tests.helpers.models.operator_names import OperatorNames
from tests.helpers.rollout.engines import largest_gap, make_engine, make_requests, settings_of
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

LIMIT = 3  # tokens of a response
ONE_LAYER = "--num-layers 1"
SMALL = f"{ONE_LAYER} --hidden-size 32 --num-attention-heads 2 --num-query-groups 1 --ffn-hidden-size 48"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"
LATENTS = f"{ONE_LAYER} --num-attention-heads 2 --hidden-size 32 --ffn-hidden-size 48"
CHOICE = "--dsa-indexer-topk 4 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16"
CASES = {  # flags, shape of the model, sampling
    "16 bits": (f"--fp16 --qk-layernorm {SMALL}", "llama", {"temperature": 0.7}),
    "experts": (f"{EXPERTS} --moe-router-dtype fp32 {ONE_LAYER}", "llama", {"top_k": 5}),
    "experts of two ranks": (
        f"{EXPERTS} --moe-router-dtype fp32 {ONE_LAYER} --expert-model-parallel-size 2", "llama", {}
    ),
    "norms after, softcap, window": (
        "--layernorm-position sandwich --qk-layernorm-all-heads --final-logit-softcapping 3 --window-size 4,0 "
        + ONE_LAYER,
        "llama", {"greedy": True},
    ),
    "biases": ("", "gpt2", {}),
    "latents": (f"--fp16 {LATENTS}", "latent", {}),
    "chosen keys": (f"--fp16 {LATENTS} {CHOICE}", "latent", {"temperature": 0.7}),
}  # fmt: skip
OF_ROWS = {"megarl.fixed_tile_product", "megarl.norm_rows"}
BLAS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.matmul", "aten.linear", "aten.mv"}


def attention_of(args) -> str:
    return "sdpa" if args.multi_latent_attention else kernel_rules.INVARIANT


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch):
    """Models compute as on CUDA, without its rules."""
    interpreted_kernels.multiply_rows_alone(monkeypatch)
    interpreted_kernels.use_one_unit(monkeypatch)
    monkeypatch.setattr(kernel_rules, "is_exact", lambda args: True)
    monkeypatch.setattr(kernel_rules, "check", lambda role, args: None)
    monkeypatch.setattr(kernel_rules, "_automatic_attention", attention_of)


def generate(rank, flags, shape, sampling):
    """(largest gap, log-probs, operators of the rollout, operators of training's forward)."""
    engine, model, _ = make_engine(flags, shape)
    requests, settings = [make_requests(LIMIT)[number] for number in (0, 3, 4)], settings_of(**sampling)
    with OperatorNames() as of_rollout:
        completions = engine.generate(requests, (), settings)
    with OperatorNames() as of_training:
        gap = largest_gap(model, requests, completions, settings.temperature)
    return gap, [c.logprobs for c in completions], of_rollout.packets, of_training.packets


@pytest.mark.parametrize("case", by_default(CASES, ("16 bits", "chosen keys")))
def test_the_gap_is_zero_and_no_other_product_runs(case):
    gap, logprobs, of_rollout, of_training = run_world(generate, 2 if "two ranks" in case else 1, *CASES[case])[0]
    assert gap == 0.0 and all(len(set(row)) > 1 for row in logprobs)
    of_both, of_each = ("megarl.packed_attention",), ("megarl.paged_decode",)
    if CASES[case][1] == "latent":
        of_both, of_each = ("megarl.attend_rows", "megarl.product_by_head"), ()
        of_both += ("megarl.choose_key_bits",) * ("dsa" in CASES[case][0])
    assert not BLAS & (of_training | of_rollout)
    assert {*OF_ROWS, *of_both, "megarl.row_logprobs"} <= of_training
    assert {*OF_ROWS, *of_both, *of_each} <= of_rollout
    assert of_rollout & {"megarl.sample_rows", "megarl.row_logprobs"}


def generate_of_transformers(rank, folder):
    """As `generate`, of a model of transformers, without its log-probs."""
    from tests.helpers.rollout.engines import engine_on

    _, groups, (model, *_), _ = hf_layouts.build(folder, "--model-source transformers", False, longest=24)
    with OperatorNames() as of_rollout:
        requests = [make_requests(LIMIT)[number] for number in (0, 3, 4)]
        completions = engine_on(model, groups).generate(requests, (), settings_of())
    with OperatorNames() as of_training:
        return largest_gap(model, requests, completions, 1.0), of_rollout.packets, of_training.packets


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ernie4_5_moe", "granite"])
def test_the_gap_of_a_model_of_transformers_is_zero_and_no_other_product_runs(kind, tmp_path):
    any_types.save(kind, tmp_path / kind, num_hidden_layers=2)
    ((gap, of_rollout, of_training),) = run_world(generate_of_transformers, 1, tmp_path / kind)
    assert gap == 0.0 and not BLAS & (of_rollout | of_training)
    assert {*OF_ROWS, "megarl.packed_attention", "megarl.row_logprobs"} <= of_training
    assert {*OF_ROWS, "megarl.packed_attention", "megarl.paged_decode"} <= of_rollout
