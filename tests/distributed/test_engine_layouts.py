"""Every layout generates the same responses, greedy and sampled, with the log-probs of its own training forward."""

import functools

import pytest

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.rollout.engine_layouts import EXPERTS, generate_in_layout
from tests.helpers.rollout.engines import NEVER, texts
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP4, EP2 = "--tensor-model-parallel-size 4", "--expert-model-parallel-size 2"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0]+[1]*1) --moe-shared-expert-intermediate-size 32"
    " --moe-router-score-function sigmoid"
)
LAYOUTS = {
    "dp2": (2, ""), "dp4": (4, ""), "tp2": (2, TP2), "pp2": (2, PP2), "cp2": (2, "--context-parallel-size 2"),
    "tp2-sp": (2, f"{TP2} --sequence-parallel"), "tp2-pp2": (4, f"{TP2} {PP2}"),
    "pp2-untied": (2, f"{PP2} --untie-embeddings-and-output-weights"), "tp4-two-groups": (4, TP4),
    "tp4-sp-two-groups": (4, f"{TP4} --sequence-parallel"), "tp2-one-group": (2, TP2),
    "tp4-sp-one-group": (4, f"{TP4} --sequence-parallel"), "tp2-pp2-one-group-norm": (4, f"{TP2} {PP2}"),
}  # fmt: skip
MOE_LAYOUTS = {
    "tp2-sp": (2, f"{TP2} --sequence-parallel"),
    "pp2": (2, PP2),
    "ep2": (2, EP2),
    "tp2-ep2-sp": (4, f"{TP2} {EP2} --sequence-parallel"),
    "tp2-ep2-sp-gather": (2, f"{TP2} {EP2} --sequence-parallel --moe-token-dispatcher-type allgather"),
    "ep2-pp2": (4, f"{EP2} {PP2}"),
}
LATENT_LAYOUTS = {"tp2": (2, TP2), "tp2-sp": (2, f"{TP2} --sequence-parallel"), "pp2": (2, PP2)}
LATENT_MOE_LAYOUTS = {
    "tp2-sp": (2, f"{TP2} --sequence-parallel"),
    "ep2": (2, EP2),
    "tp2-ep2-sp": (4, f"{TP2} {EP2} --sequence-parallel"),
}
MOE_KINDS = {
    "softmax": EXPERTS,
    "softmax of all": f"{EXPERTS} --moe-router-pre-softmax --moe-router-topk-scaling-factor 1.5",
    "one expert": "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 32",
    "sigmoid": f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5",
    "square root": f"{EXPERTS} --moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias",
    "groups by their best": f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 3 --moe-router-pre-softmax"
    " --moe-router-group-score max",
    "groups": f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-dtype fp64",
    "shared, gated": f"{EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
}


@functools.cache
def single(flags: str, sampling: tuple, end: tuple[int, ...], model: str = "llama"):
    return run_world(generate_in_layout, 1, flags, dict(sampling), end, 20, model)[0][0]


def check(
    size: int, shape: str, flags: str, sampling: dict, end: tuple[int, ...], allowed: float, model: str = "llama"
):
    expected, found = single(shape, tuple(sampling.items()), end, model), {}
    for completions, gap in run_world(generate_in_layout, size, f"{shape} {flags}", sampling, end, 20, model):
        assert gap <= allowed
        for number, completion in completions.items():
            assert texts([found.setdefault(number, completion)]) == texts([completion])  # ranks of a replica agree
    assert found.keys() == expected.keys()
    for number, completion in expected.items():
        assert found[number].tokens == completion.tokens
        assert found[number].logprobs == pytest.approx(completion.logprobs, abs=5e-5)


@pytest.mark.parametrize(
    "sampling, end", [long(({"greedy": True}, NEVER)), ({"temperature": 1.2}, (3,))], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("tp2-sp", "pp2-untied")))
def test_responses_do_not_depend_on_the_layout(layout, sampling, end):
    size, flags = LAYOUTS[layout]
    shapes = {"untied": "--untie-embeddings-and-output-weights", "one-group": "--num-query-groups 1",
              "norm": "--qk-layernorm --add-qkv-bias"}  # fmt: skip
    shape = " ".join(words for name, words in shapes.items() if name in layout)
    rounding = 1e-5 if "tp4" in layout else 0.0  # gloo orders the sums of four ranks by their place in the buffer
    check(size, shape, flags, sampling, end, max(rounding, largest_gap_allowed()))


OTHERS = {  # kind of model -> shape, model, layouts
    "experts": (MOE, "llama", MOE_LAYOUTS),
    "latent": ("", "latent", LATENT_LAYOUTS),
    "latent, experts": (MOE, "latent", LATENT_MOE_LAYOUTS),
    "recurrent": ("", "recurrent", LATENT_LAYOUTS),
    "mamba": ("", "mamba", LATENT_LAYOUTS),
}
CHOSEN = [("experts", "tp2-ep2-sp-gather"), ("latent", "tp2-sp"), ("recurrent", "tp2"), ("mamba", "tp2-sp")]


@pytest.mark.parametrize(
    "kind, layout", by_default([(kind, layout) for kind in OTHERS for layout in OTHERS[kind][2]], CHOSEN)
)
def test_other_models_generate_the_same_responses_in_every_layout(kind, layout):
    shape, model, layouts = OTHERS[kind]
    size, flags = layouts[layout]
    check(size, shape, flags, {"temperature": 1.2}, (3,), largest_gap_allowed(), model)


def gaps_of_kinds(rank):
    return {kind: generate_in_layout(rank, flags, {"temperature": 1.2}, (3,))[1] for kind, flags in MOE_KINDS.items()}


def test_rollout_and_training_logprobs_agree_for_every_moe_variant():
    (gaps,) = run_world(gaps_of_kinds, 1)
    assert all(gap <= largest_gap_allowed() for gap in gaps.values()), gaps


def test_pipeline_stages_agree_on_few_requests():
    """Fewer requests than the rows that a matrix product is given at least."""
    expected = single("", (("greedy", True),), NEVER)
    for completions, gap in run_world(generate_in_layout, 2, PP2, {"greedy": True}, NEVER, 3):
        assert gap <= largest_gap_allowed()
        assert {n: c.tokens for n, c in completions.items()} == {n: expected[n].tokens for n in range(3)}
