"""Images in language models of Megatron's layers: as transformers' own forward and `generate`, and one result in every
engine option and layout.

A rollout whose log-probs are the training's proves nothing of either: without deepstack, or with plain positions, the
gap stays 0. So every family is compared with transformers.
"""

import functools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.batch import SharedPrefix
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.folders import vision_folders
from tests.helpers.folders.vision_folders import KINDS, MODULES, VisionFolder
from tests.helpers.models.layouts import CP2, EP2, PP2, SP, TP2
from tests.helpers.rollout.engines import on_device
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

RECURRENT = ("qwen3_5", "qwen3_5_moe")
CLOSE = 2e-5  # log-probs, from transformers'


def engine_of(model, groups, vocab: int, slots: int = 16, gb: float = 0.02, **options):
    from megarl.mcore.inference.engine import RolloutEngine

    return RolloutEngine(model[0], groups.pg_collection, vocab, 128, gb, slots, **options)


def requests_of(folder: VisionFolder, count: int, samples: int = 1) -> list:
    from megarl.mcore.inference.generation import GenerationRequest

    return [GenerationRequest(p, 7 * i + s, count) for i, p in enumerate(folder.prompts) for s in range(samples)]


def generated(engine, requests, greedy: bool = False) -> list:
    from megarl.algorithms.token_sampling import SamplingSettings

    return engine.generate(requests, (), SamplingSettings(greedy=greedy))


def texts(done) -> list:
    return [(each.tokens, each.logprobs) for each in done]


def gap(model, groups, vocab: int, requests, done) -> float:
    from tests.helpers.folders.hf_layouts import logprobs

    found = logprobs(model, groups, [r.prompt + d.tokens for r, d in zip(requests, done, strict=True)], vocab)
    return max(
        float((each[-len(d.tokens) :] - torch.tensor(d.logprobs)).abs().max())
        for each, d in zip(found, done, strict=True)
    )


def measure(rank: int, folder: VisionFolder, flags: str, count: int):
    """(largest difference of log-probs from transformers', greedy tokens, largest gap, sampled responses)."""
    from tests.helpers.folders.hf_layouts import logprobs

    role, groups, model, _ = vision_folders.model_of(folder, flags)
    vocab = role.model_vocab_size(0)
    rows = [prompt + more for prompt, more in zip(folder.prompts, folder.greedy, strict=True)]
    found = logprobs(model, groups, rows, vocab)
    apart = max(float((a[-count:] - b).abs().max()) for a, b in zip(found, folder.logprobs, strict=True))
    engine, requests = engine_of(model, groups, vocab), requests_of(folder, count)
    greedy, sampled = generated(engine, requests, greedy=True), generated(engine, requests)
    gaps = [gap(model, groups, vocab, requests, done) for done in (greedy, sampled)]
    return apart, [each.tokens for each in greedy], max(gaps), texts(sampled)


@functools.cache
def alone(kind: str, count: int):
    return run_world(measure, 1, vision_folders.folder_of(kind, count), "", count)[0]


FORWARD = [(kind, count) for kind in KINDS for count in (16, 48)]


@pytest.mark.parametrize("kind, count", by_default(FORWARD, [(kind, 16) for kind in ("qwen3_vl", "mistral3", "llava")]))
def test_forward_and_greedy_are_those_of_transformers(kind, count):
    apart, greedy, largest_gap, _ = alone(kind, count)
    assert apart < CLOSE
    assert greedy == vision_folders.folder_of(kind, count).greedy
    assert largest_gap <= largest_gap_allowed()


MODULE = vision_folders.source_of("llava")
LAYOUTS = {"tp2-sp": f"{TP2} {SP}", "pp2": PP2, "cp2": CP2, "ep2": EP2, "tp2": TP2, "module-tp2": f"{MODULE} {TP2}"}
ROWS = [(kind, layout) for kind in KINDS if kind not in MODULES for layout in list(LAYOUTS)[:4]]
MOE, NO_CP = ("qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe"), RECURRENT
ROWS = [(k, name) for k, name in ROWS if (name != "ep2" or k in MOE) and (name != "cp2" or k not in NO_CP)]
ROWS += [("mistral3", "module-tp2"), *((kind, layout) for kind in MODULES for layout in ("tp2", "cp2"))]


@pytest.mark.parametrize("kind, layout", by_default(ROWS, [("qwen3_vl", "tp2-sp"), ("qwen3_vl", "pp2")]))
def test_layouts_have_the_same_responses(kind, layout):
    _, greedy, _, sampled = alone(kind, 16)
    for found in run_world(measure, 2, vision_folders.folder_of(kind), LAYOUTS[layout], 16):
        assert found[0] < CLOSE and found[1] == greedy and found[2] <= largest_gap_allowed()
        for (tokens, logprobs), (others, expected) in zip(found[3], sampled, strict=True):
            assert tokens == others and logprobs == pytest.approx(expected, abs=1e-5)


def measured(rank: int, flags: str, folder: VisionFolder, count: int):
    return measure(rank, folder, flags, count)


@pytest.mark.parametrize("kind", by_default([kind for kind in KINDS if kind not in MODULES], ["qwen3_vl"]))
def test_steps_that_the_device_plans_rotate_by_the_positions_of_images(kind):
    """On a CPU, with interpreted kernels."""
    folder = vision_folders.folder_of(kind)
    ((apart, greedy, largest_gap, sampled, on_device_steps, on_host_steps),) = run_world(
        on_device, 1, measured, "", folder, 16
    )
    assert on_device_steps > 20 and on_host_steps == 0
    assert apart < CLOSE and greedy == folder.greedy and largest_gap < 1e-5
    assert [tokens for tokens, _ in sampled] == [tokens for tokens, _ in alone(kind, 16)[3]]


def drafted(rank: int, flags: str, folder: VisionFolder):
    """(sampled responses without drafts, with them, drafted tokens)."""
    role, groups, model, _ = vision_folders.model_of(folder, flags)
    vocab, requests = role.model_vocab_size(0), requests_of(folder, 16, samples=2)
    plain = texts(generated(engine_of(model, groups, vocab), requests))
    engine = engine_of(model, groups, vocab, speculative=True)
    make_drafts_cheap(engine, requests)
    engine.take_counts()
    return plain, texts(generated(engine, requests)), engine.take_counts().drafted


@pytest.mark.parametrize("kind", [long("qwen3_vl")])
def test_drafts_that_the_device_plans_rotate_by_the_positions_of_images(kind):
    ((plain, found, count, on_device_steps, on_host_steps),) = run_world(
        on_device, 1, drafted, "", vision_folders.folder_of(kind)
    )
    assert count > 20 and on_device_steps > 20 and on_host_steps == 0
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]


def difference(rank: int, folder: VisionFolder, flags: str) -> float:
    """The largest of log-probs from transformers'."""
    from tests.helpers.folders.hf_layouts import logprobs

    role, groups, model, _ = vision_folders.model_of(folder, flags)
    rows = [prompt + more for prompt, more in zip(folder.prompts, folder.greedy, strict=True)]
    found = logprobs(model, groups, rows, role.model_vocab_size(0))
    return max(float((a[-len(b) :] - b).abs().max()) for a, b in zip(found, folder.logprobs, strict=True))


@pytest.mark.parametrize("kind", [long(kind) for kind in ("qwen3_vl", "glm4v_moe")])
def test_sharded_weights_have_the_log_probs_of_transformers(kind):
    found = run_world(difference, 2, vision_folders.folder_of(kind), "--use-torch-fsdp2")
    assert max(found) < CLOSE


def blocks_gb(model, count: int) -> float:
    """GiB of so many blocks of the cache."""
    from megarl.mcore.inference.cache_size import BLOCK_TOKENS

    c = model[0].config
    return count * BLOCK_TOKENS * 4 * c.num_layers * 2 * c.num_query_groups * c.kv_channels / 2**30


def make_drafts_cheap(engine, requests: list):
    """Has an engine know what follows, and find drafts cheap."""
    engine.drafter.costs = engine.drafter.costs._replace(step=1e6, looking=0.0, drafting=0.0)
    generated(engine, requests)


def with_options(rank: int, folder: VisionFolder, is_recurrent: bool) -> dict:
    """Sampled responses by what the engine does beside; of one request alone; the tokens that each run read."""
    role, groups, model, _ = vision_folders.model_of(folder)
    requests, vocab = requests_of(folder, 16, samples=2), role.model_vocab_size(0)
    options = {
        "prefix caching": {"slots": 4, "prefix_caching": True},
        "chunks that cut images": {"slots": 4, "chunked_prefill": True, "step_tokens": 8},
        "both, with drafts": {"slots": 4, "prefix_caching": True, "chunked_prefill": True, "speculative": True},
        "drafts": {"speculative": True},
    }
    if not is_recurrent:
        options["evictions"] = {"gb": blocks_gb(model, 26)}
    found = {}
    for name, chosen in ({"plain": {}} | options).items():
        engine = engine_of(model, groups, vocab, **chosen)
        if engine.drafter is not None:
            make_drafts_cheap(engine, requests)
        engine.take_counts()
        done, counts = generated(engine, requests), engine.take_counts()
        found[name] = texts(done), counts
    single = [generated(engine_of(model, groups, vocab, 4), [each])[0] for each in requests[:10]]
    return found | {"alone": texts(single)}


@pytest.mark.parametrize("kind", by_default(KINDS, ["qwen3_vl"]))
def test_a_response_does_not_depend_on_what_the_engine_does(kind):
    (found,) = run_world(with_options, 1, vision_folders.folder_of(kind), kind in RECURRENT)
    expected, plain = found.pop("plain")
    assert found.pop("alone") == expected[:10]
    assert found["prefix caching"][1].reused > 0
    assert "evictions" not in found or found["evictions"][1].read > plain.read
    if kind == "qwen3_vl":
        assert found["drafts"][1].drafted > 0
    for name, (texts_found, *_) in found.items():
        assert texts_found == expected, name


def trained(rank: int, folder: VisionFolder, flags: str):
    """(gradients, the same of recomputed layers, whether a shared prefix changes nothing)."""
    from megarl.checkpoint.pretrained import find_pretrained
    from megarl.mcore.model import gpt
    from megarl.mcore.model.forward_pass import inference_mode, token_scores
    from megarl.mcore.vision.store import attach
    from tests.helpers.folders import hf_layouts

    role, groups, frozen, _ = hf_layouts.build(folder.path, flags, False)
    vocab = role.model_vocab_size(0)
    model = gpt.build_model(role.megatron, vocab, groups.pg_collection)
    find_pretrained(role, vocab).load(model, groups.pg_collection)
    store = vision_folders.store_of(folder)
    attach(model[0], store)
    rows = [prompt + more for prompt, more in zip(folder.prompts, folder.greedy, strict=True)]

    def scores(chosen, shared=None):
        lengths = torch.tensor([len(row) for row in chosen])
        found = token_scores(model[0], torch.tensor(sum(chosen, [])), lengths, 1.0, vocab, shared=shared)
        return torch.cat([each[-16:] for each in found.logprobs.split(lengths.tolist())])

    def gradients():
        model.train()
        model.zero_grad(set_to_none=True)
        scores(rows).sum().backward()
        return {name: p.grad.clone() for name, p in model[0].named_parameters() if p.grad is not None}

    own, c = gradients(), model[0].decoder.config
    c.recompute_granularity, c.recompute_method, c.recompute_num_layers = "full", "uniform", 1
    again = gradients()
    with inference_mode(model):
        some = [rows[0], rows[2], rows[3], rows[4]]
        start = next(i for i, (a, b) in enumerate(zip(rows[3], rows[4], strict=False)) if a != b)
        shared = SharedPrefix(torch.tensor([0, 0, 2, 2]), torch.tensor([0, len(folder.prompts[0]), 0, start]))
        is_same = torch.equal(scores(some, shared), scores(some))
        lengths = torch.tensor([len(row) for row in rows])
        packed = token_scores(model[0], torch.tensor(sum(rows, [])), lengths, 1.0, vocab)
    images = torch.tensor(sum(rows, [])) < 0
    unscored = float(packed.logprobs[images].abs().max() + packed.entropy[images].abs().max())
    return own, again, is_same, unscored


@pytest.mark.parametrize("kind", by_default(["qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3"], ["qwen3_vl"]))
def test_gradients_are_those_of_transformers(kind):
    folder = vision_folders.folder_of(kind)
    ((own, again, is_same, unscored),) = run_world(trained, 1, folder, "")
    assert own.keys() == again.keys() and all(torch.equal(own[name], again[name]) for name in own)
    assert is_same and unscored == 0
    (theirs,) = run_world(gradients_of_transformers, 1, kind, folder)
    for name, expected in theirs.items():
        found = own[name][: len(expected)]
        if expected.dim() == 2:  # token 0, on which rows of images stand: in no text, and transformers' padding
            assert found[0].abs().max() == 0 and expected[0].abs().max() == 0
        assert float((found - expected).abs().max() / expected.abs().max()) < CLOSE, name


def gradients_of_transformers(rank: int, kind: str, folder: VisionFolder) -> dict[str, torch.Tensor]:
    """By megarl's names."""
    model = vision_folders.module_of(kind)
    for prompt, more in zip(vision_folders.PROMPTS, folder.greedy, strict=True):
        vision_folders.scored(model, kind, prompt, more, folder.images).sum().backward()
    text = model.model.language_model
    return {"embedding.word_embeddings.weight": text.embed_tokens.weight.grad,
            "decoder.final_layernorm.weight": text.norm.weight.grad}  # fmt: skip


def exported(rank: int, folder: VisionFolder, path: Path):
    from megarl.mcore.weights.hf.folder_weights import export_weights

    _, groups, model, weights = vision_folders.model_of(folder)
    export_weights(weights.weight_map, model, groups.pg_collection, path)


@pytest.mark.parametrize("kind", by_default(KINDS, ["qwen3_vl"]))
def test_exports_have_the_tower_as_it_was(kind, tmp_path):
    folder = vision_folders.folder_of(kind)
    run_world(exported, 1, folder, tmp_path / "export")

    def tensors(path: Path) -> dict[str, torch.Tensor]:
        return {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}

    before, after = tensors(folder.path), tensors(tmp_path / "export")
    assert before.keys() == after.keys() and any(re.search("visual|vision", name) for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)


def unread(rank: int, folder: VisionFolder) -> list[str]:
    """The errors of a model without a store of images."""
    from tests.helpers.folders import hf_layouts

    role, groups, model, _ = hf_layouts.build(folder.path, "", False)
    vocab, errors = role.model_vocab_size(0), []
    for use in (
        lambda: generated(engine_of(model, groups, vocab), requests_of(folder, 4)),
        lambda: hf_layouts.logprobs(model, groups, folder.prompts, vocab),
    ):
        try:
            use()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_a_model_without_images_never_reads_their_ids():
    (errors,) = run_world(unread, 1, vision_folders.folder_of("qwen3_vl"))
    assert errors == [
        "a prompt has rows of images, and this model has no store of them",
        "a token stream has rows of images, and this model has no store of them",
    ]
