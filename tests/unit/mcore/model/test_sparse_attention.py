"""Layers whose queries choose keys: gradients, recomputation, shared prefixes, frozen indexers, layouts, evictions."""

from pathlib import Path

import pytest
import torch

from tests.helpers.folders.trained_folders import gradients, logprobs, of_transformers, trained
from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.rollout import long_prompts
from tests.helpers.worlds import run_world

pytestmark = needs_kernels
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
RECOMPUTED = (f"{FULL} 1", f"{FULL} 2", "--recompute-granularity selective --recompute-modules core_attn")
# Megatron's names -> those of transformers, in a layer's attention.
NAMES = {"linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj", "linear_kv_down_proj": "kv_a_proj_with_mqa",
         "linear_kv_up_proj": "kv_b_proj", "linear_proj": "o_proj", "q_layernorm": "q_a_layernorm",
         "kv_layernorm": "kv_a_layernorm"}  # fmt: skip
COUNT = 8


def texts() -> list[list[int]]:
    return [row[:150] for row in long_prompts.prompts(120)[:2]] + [[5, 9, 7]]


def measured(rank, folder: Path, recomputed: tuple[str, ...]) -> dict:
    """Gradients against transformers', with recomputation, and with a shared prefix; what is trained; dense layers."""
    from megarl.batch import SharedPrefix
    from megarl.mcore.model.sparse_attention import take_disagreement

    model, vocabulary, groups, _ = trained(folder)
    rows = texts()
    scores, grads, factors = gradients(model, vocabulary, rows)
    theirs, farthest = of_transformers(folder, rows, factors), {}
    for name, grad in grads.items():
        parts = name.split(".")
        if "self_attention" in parts and parts[4] in NAMES:
            other = theirs[f"model.layers.{parts[2]}.self_attn.{NAMES[parts[4]]}.weight"]
            farthest[name] = float((grad - other).abs().max() / other.abs().max())
    again, everyone, layers = {}, groups.pg_collection.intra_dist_opt, len(model[0].decoder.layers)
    missed = take_disagreement(model, layers, everyone)
    assert len(missed) == 1 + layers and all(0.01 < share < 1 for share in missed.values())
    assert take_disagreement(model, layers, everyone) == {}
    for flags in recomputed:
        other, _, *_ = trained(folder, flags)
        others = gradients(other, vocabulary, rows)
        again[flags] = torch.equal(others[0], scores) and all(torch.equal(others[1][n], grads[n]) for n in grads)
        again[flags] &= take_disagreement(other, layers, everyone) == missed
    group = [rows[0][:100] + row[:40] for row in (rows[0], rows[1], rows[1][50:])]
    plain, of_plain, _ = gradients(model, vocabulary, group)
    missed = take_disagreement(model, layers, everyone)
    shared = SharedPrefix(torch.tensor([0, 0, 0]), torch.tensor([0, 99, 99]))
    short, of_short, _ = gradients(model, vocabulary, group, shared)
    assert take_disagreement(model, layers, everyone) == pytest.approx(missed)
    gap = max(float((of_short[n] - of_plain[n]).abs().max() / of_plain[n].abs().max()) for n in of_plain)
    indexers = {n for n, p in model[0].named_parameters() if ".indexer." in n and not p.requires_grad}
    return {"gradients": farthest, "recomputed": again, "shared": (torch.equal(short, plain), gap),
            "frozen": indexers, "trained": set(grads)}  # fmt: skip


@pytest.mark.parametrize("case", ["glm_moe_dsa+8", pytest.param("deepseek_v32+8", marks=pytest.mark.long)])
def test_gradients_are_transformers_and_recomputation_and_shared_prefixes_change_none(case, tmp_path):
    """With layers that share a choice: recomputed backward, they find that of a layer before them."""
    folder = long_prompts.write_folder(case, tmp_path / "folder")
    (found,) = run_world(measured, 1, folder, RECOMPUTED if case.startswith("glm") else RECOMPUTED[:1])
    assert len(found["gradients"]) > 20 and max(found["gradients"].values()) < 1e-4, found["gradients"]
    assert all(found["recomputed"].values()), found["recomputed"]
    assert found["shared"][0] and found["shared"][1] < 1e-5, found["shared"]
    assert len(found["frozen"]) == 15 and not found["frozen"] & found["trained"]


def scored(rank, folders: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    from tests.helpers.folders import hf_layouts

    found = {}
    for name, folder in folders.items():
        role, groups, model, _ = hf_layouts.build(folder, "", False, longest=200)
        found[name] = hf_layouts.logprobs(model, groups, texts(), role.model_vocab_size(0))
    return found


def test_a_choice_of_all_keys_has_the_bits_of_dense_layers_and_one_of_few_has_other_numbers(tmp_path):
    """140 keys are fewer than the longest sequence of the run, so that the layers have indexers, and the texts' last
    tokens choose; the same folder without a choice is dense."""
    counts = {"dense": 4096, "most": 140, "few": COUNT}
    folders = {name: long_prompts.write_folder(f"deepseek_v32+{n}", tmp_path / name) for name, n in counts.items()}
    (found,) = run_world(scored, 1, folders)
    for dense, most, few in zip(found["dense"], found["most"], found["few"], strict=True):
        assert torch.equal(most[:139], dense[:139]) and torch.equal(few[: COUNT - 1], dense[: COUNT - 1])
        assert len(dense) < 140 or (most != dense)[140:].any() and (few - dense).abs().max() > 0.5


def sets_of_both(rank, folder: Path) -> list[tuple[list[list[int]], list[list[int]], torch.Tensor]]:
    """By layer with an indexer, of the queries that choose: keys here, keys of transformers, and how far the last score
    is above the first one that is left out, by the largest one."""
    from transformers import AutoModelForCausalLM

    from megarl.mcore.model import sparse_attention
    from tests.helpers.folders import hf_layouts

    role, groups, model, _ = hf_layouts.build(folder, "", False, longest=400)
    text, made, choose = long_prompts.prompts(120)[3], [], sparse_attention.choose

    def recorded(heads_of, weights, keys, segments, count):
        made.append((heads_of, weights, keys, segments, choose(heads_of, weights, keys, segments, count)))
        return made[-1][4]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_attention, "choose", recorded)
        hf_layouts.logprobs(model, groups, [text], role.model_vocab_size(0))
    theirs, listed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    for name, module in theirs.named_modules():
        if name.endswith(".indexer"):
            module.register_forward_hook(lambda _, __, out: listed.append(out[0]))
    with torch.no_grad():
        theirs(torch.tensor([text]))
    found = []
    for (heads_of, weights, keys, segments, choice), other in zip(made, listed, strict=True):
        tokens = torch.cat([segment.queries for segment in segments])
        assert len(segments) == 1 and len(tokens) == len(text) - COUNT
        products = torch.einsum("qhc,kc->qhk", heads_of(tokens).double(), keys.double()).relu()
        scores = torch.einsum("qh,qhk->qk", weights[tokens].double(), products)
        scores.masked_fill_(torch.arange(len(keys)) > tokens[:, None], -float("inf"))
        best = scores.topk(COUNT + 1).values
        margin = (best[:, COUNT - 1] - best[:, COUNT]) / best.abs().amax(1)
        ours = torch.cat([*choice.lists()]).tolist()
        found.append((ours, other[tokens].sort().values.tolist(), margin))
    return found


@pytest.mark.parametrize("case", ["glm_moe_dsa+8", pytest.param("deepseek_v32+8", marks=pytest.mark.long)])
def test_the_chosen_keys_are_those_of_transformers_unless_scores_are_near(case, tmp_path):
    (layers,) = run_world(sets_of_both, 1, long_prompts.write_folder(case, tmp_path / "folder"))
    assert len(layers) == 3
    for ours, theirs, margin in layers:
        clear = (margin > 1e-5).tolist()
        assert sum(clear) > 0.95 * len(clear) > 300
        assert all(one == other for one, other, is_clear in zip(ours, theirs, clear, strict=True) if is_clear)


LAYOUTS = {
    "--tensor-model-parallel-size 2 --sequence-parallel": 2,
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1": 2,
    "--context-parallel-size 2": 2, "--expert-model-parallel-size 2": 2, "--use-torch-fsdp2": 2,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("flags", LAYOUTS)
def test_layouts_have_the_same_numbers_and_no_gap(flags, tmp_path):
    folders = {x: long_prompts.write_folder(x, tmp_path / x) for x in ("deepseek_v32+8", "glm_moe_dsa+8")}
    (alone,) = run_world(long_prompts.run, 1, folders, "", "compiled", ())
    for ranks in run_world(long_prompts.run, LAYOUTS[flags], folders, flags, "compiled", ("whole", "chunked")):
        for case, found in ranks.items():
            assert set(found.gaps.values()) == {0.0}, (case, found.gaps)
            for one, other in zip(found.scores, alone[case].scores, strict=True):
                assert (one - other).abs().max() <= 1e-5


def index_heads(rank, flags: str) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    """(shape of the rank's weight, that of a checkpoint, heads of five tokens) of an indexer with random weights."""
    from megarl.mcore.attention.rotary_embeddings import Rotation
    from tests.helpers.models.tiny_models import CHOOSING, build

    model, _, place = build(f"{CHOOSING} {flags}", "latent")
    indexer = model.decoder.layers[0].self_attention.core_attention.indexer
    latent = torch.randn(9, 1, model.config.q_lora_rank, generator=torch.Generator().manual_seed(1))
    rotation = Rotation.of(model.rotary_pos_emb(9), torch.float32, 1.0)
    with torch.no_grad():
        heads = indexer._heads(latent, rotation, torch.tensor([8, 1, 2, 5, 3]))
    stored = indexer.sharded_state_dict(metadata={"dp_cp_group": place.pg_collection.dp_cp})
    return tuple(indexer.linear_wq_b.weight.shape), stored["linear_wq_b.weight"].global_shape, heads


def test_tensor_ranks_have_a_part_of_the_heads_and_gather_the_same_bits():
    ((whole, _, wanted),) = run_world(index_heads, 1, "")
    for flags in ("", "--sequence-parallel"):
        for shape, stored, found in run_world(index_heads, 2, f"--tensor-model-parallel-size 2 {flags}"):
            assert shape == (whole[0] // 2, whole[1]) and stored == whole
            assert torch.equal(found, wanted) and wanted.any()


def generated(rank, folder: Path, many: int) -> dict:
    """Sampled responses of short prompts with much and with little memory, drafts, and alone; evictions are counted."""
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.inference.cache_size import token_bytes
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest
    from megarl.mcore.inference.paged_context import PagedContext
    from megarl.mcore.model.pipeline_layout import indexer_pattern
    from tests.helpers.folders import hf_layouts

    role, groups, model, _ = hf_layouts.build(folder, "", False, longest=200)
    vocabulary, evicted, update = role.model_vocab_size(0), [0], PagedContext.update_requests

    def counted(self, *args, **kwargs):
        found = update(self, *args, **kwargs)
        ids = (found or {}).get("evict_request_ids")
        evicted[0] += 0 if ids is None else len(ids)
        return found

    text = long_prompts.prompts(120)[1]
    requests = [GenerationRequest(text[i * 40 : i * 40 + 20], i, 60) for i in range(many)]
    row = token_bytes(model[0].config, indexer_pattern(model[0].config), 1)

    def run(blocks: int, asked, **options):
        evicted[0] = 0
        size = (blocks + 1) * 16 * row / 2**30
        engine = RolloutEngine(model[0], groups.pg_collection, vocabulary, 200, size, many, **options)
        done = engine.generate(asked, (), SamplingSettings())
        texts = [request.prompt + each.tokens for request, each in zip(asked, done, strict=True)]
        rows = hf_layouts.logprobs(model, groups, texts, vocabulary)
        gaps = [(one[-len(each.tokens) :] - torch.tensor(each.logprobs)).abs().max()
                for one, each in zip(rows, done, strict=True)]  # fmt: skip
        return [(each.tokens, each.logprobs) for each in done], float(torch.stack(gaps).max()), evicted[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedContext, "update_requests", counted)
        found = {
            "much": run(400, requests),
            "little": run(30, requests),
            "drafts": run(400, requests, speculative=True),
        }
    return found | {"alone": [run(400, [request]) for request in requests]}


@pytest.mark.long
@pytest.mark.parametrize("case", ["deepseek_v32+8", "glm_moe_dsa+8"])
def test_evictions_drafts_and_other_requests_change_no_bit(case, tmp_path):
    (found,) = run_world(generated, 1, long_prompts.write_folder(case, tmp_path / "folder"), 12)
    wanted, gap, evicted = found["much"]
    assert gap == 0.0 and not evicted
    assert found["little"][0] == wanted and found["little"][1] == 0.0 and found["little"][2] > 0
    assert found["drafts"][0] == wanted and found["drafts"][1] == 0.0
    assert [each[0][0] for each in found["alone"]] == wanted and all(each[1] == 0.0 for each in found["alone"])


def continued(rank, folder: Path) -> tuple[list[int], list[int]]:
    """64 greedy tokens of the engine, and of transformers."""
    from transformers import AutoModelForCausalLM

    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest
    from tests.helpers.folders import hf_layouts

    role, groups, model, _ = hf_layouts.build(folder, "", False, longest=200)
    prompt = texts()[0][:60]
    engine = RolloutEngine(model[0], groups.pg_collection, role.model_vocab_size(0), 124, 0.01, 4)
    (done,) = engine.generate([GenerationRequest(prompt, 0, 64)], (), SamplingSettings(greedy=True))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None)
    return done.tokens, found[0, 60:].tolist()


@pytest.mark.long
@pytest.mark.parametrize("case", ["deepseek_v32+8", "glm_moe_dsa+8"])
def test_greedy_tokens_are_those_of_transformers(case, tmp_path):
    ((ours, theirs),) = run_world(continued, 1, long_prompts.write_folder(case, tmp_path / "folder"))
    assert len(ours) == 64 and ours == theirs


def in_both_types(rank, folder: Path) -> list:
    """(log-probs, gradients by name) in fp32 and in bf16."""
    return [gradients(*trained(folder, flags)[:2], texts())[:2] for flags in ("", "--bf16")]


def test_bf16_is_widened_for_the_kernels(tmp_path):
    """Few queries choose, and few of them others: rounded inputs change scores that are close to each other."""
    ((wide, narrow),) = run_world(in_both_types, 1, long_prompts.write_folder("glm_moe_dsa+140", tmp_path / "folder"))
    difference = (wide[0] - narrow[0].float()).abs()
    assert 1e-4 < difference.max() and difference.mean() < 0.05
    for name, grad in wide[1].items():
        if "self_attention" in name and grad.dim() == 2:
            alike = torch.cosine_similarity(grad.flatten(), narrow[1][name].float().flatten(), 0)
            assert alike > 0.98, (name, alike)


@pytest.mark.long
def test_bf16_leaves_no_gap(tmp_path):
    folders = {x: long_prompts.write_folder(x, tmp_path / x) for x in ("deepseek_v32+8", "glm_moe_dsa+8")}
    for flags, ranks in ("--bf16", 1), ("--bf16 --tensor-model-parallel-size 2 --sequence-parallel", 2):
        for found in run_world(long_prompts.run, ranks, folders, flags, "compiled", (*long_prompts.MODES,)):
            assert all(set(each.gaps.values()) == {0.0} and len(each.gaps) == 4 for each in found.values()), found


@pytest.mark.long
def test_few_heads_whose_scores_are_often_equal_leave_no_gap(tmp_path, monkeypatch):
    """With two of them many scores are 0. The passes of transformers differ from each other then."""
    monkeypatch.setattr(long_prompts, "INDEX_HEADS", 2)
    folders = {"glm_moe_dsa+8": long_prompts.write_folder("glm_moe_dsa+8", tmp_path / "folder")}
    (found,) = run_world(long_prompts.run, 1, folders, "", "compiled", (*long_prompts.MODES,))
    assert set(found["glm_moe_dsa+8"].gaps.values()) == {0.0} and len(found["glm_moe_dsa+8"].gaps) == 4


def of_factors(rank, flags: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """By layer: how far dB of the weight that expands latents is from s·dW·Aᵀ, relative. Log-probs without factors, and
    with drawn ones in scoring and in an update."""
    from megarl.mcore.lora import adapter
    from tests.helpers.models.lora_models import LORA, SCALE, draw_factors
    from tests.helpers.models.tiny_models import CHOOSING, VOCAB, build, parse_roles

    model, args, place = build(f"{CHOOSING} {flags}", "latent")
    rows, farthest = [[token % VOCAB for token in row[:40]] for row in texts()], {}
    plain, grads, _ = gradients([model], VOCAB, rows)
    lora = parse_roles(f"{LORA} --lora-targets kv_b_proj", 1, "latent")["actor"].lora
    adapter.add_factors([model], lora, args, place.pg_collection)
    adapter.keep_base([model])
    gradients([model], VOCAB, rows)
    for each in adapter.adapted_linears([model]):
        ((a, b),), wanted = each.pairs(), grads[f"{each.whole_name}.weight"].float()
        wanted = SCALE * wanted @ a.detach().t().float()
        farthest[each.whole_name] = float((b.grad - wanted).abs().max() / wanted.abs().max())
    draw_factors([model])
    with torch.no_grad():
        scored = logprobs([model], VOCAB, rows)
    return farthest, {"plain": plain, "scored": scored, "trained": gradients([model], VOCAB, rows)[0]}


@pytest.mark.parametrize("flags, limit", [("", 1e-4), ("--bf16", 0.05)])
def test_low_rank_factors_of_absorbed_weights_count_in_each_pass_and_have_their_gradients(flags, limit):
    """The weight multiplies queries and results, not latents, where queries choose keys; in bf16 it lacks factors."""
    ((farthest, found),) = run_world(of_factors, 1, flags)
    assert len(farthest) == 2 and max(farthest.values()) < limit, farthest
    assert torch.equal(found["scored"], found["trained"])
    assert (found["scored"] - found["plain"])[COUNT:].abs().max() > 0.05
