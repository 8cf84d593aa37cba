"""Low-rank factors of transformers' modules, against PEFT: adapters in and out, log-probs, gradients; a gap of 0."""

import functools
import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.helpers.folders import any_measures, any_types
from tests.helpers.folders.any_measures import loaded, trainable
from tests.helpers.forked_programs import refusal
from tests.helpers.models.lora_models import draw_factors, trained_state, whole_gradients
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

# PEFT runs in a process of its own: it starts threads, and worlds are forked from this process.
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Type -> PEFT's targets. Of a model with experts PEFT's all-linear names experts, too.
TARGETS = {
    "granite": "all-linear", "gemma4_text": "all-linear", "phi": "all-linear", "ernie4_5_moe": ATTENTION,
    "llama4_text": ATTENTION, "longcat_flash": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"], "phimoe": ATTENTION,
}  # fmt: skip
LAYOUTS = {"one": (1, ""), "tp2": (2, "--tensor-model-parallel-size 2"), "fsdp2": (2, "--use-torch-fsdp2")}
SEQUENCES = [list(range(3, 3 + length)) for length in (9, 1 + 16, 5)]
EXPORT = "adapter_model.safetensors"


class Found(NamedTuple):
    """What one rank, or PEFT, computes with an adapter."""

    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]  # by the name of a tensor in an adapter's file; of the sum of log-probs
    base: list[torch.Tensor]  # log-probs without the factors
    gap: float = 0.0
    errors: dict[str, float] = {}  # of PEFT's gradients in fp32, relative to those in fp64


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("types")
    return functools.cache(lambda kind: any_types.save(kind, root / kind) and root / kind)


def of_sequences(model, sequences) -> list[torch.Tensor]:
    found = []
    for ids in map(torch.tensor, sequences):
        rows = model(ids.unsqueeze(0), use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(rows.gather(1, ids[1:, None])[:, 0])
    return found


def made_by_peft(_, folder: Path, target: Path, targets, rslora: bool) -> Found:
    """Writes an adapter with random factors."""
    import peft

    base = loaded(folder)
    with torch.no_grad():
        without = of_sequences(base, SEQUENCES)
    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, task_type="CAUSAL_LM", target_modules=targets)
    model = peft.get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(target)
    rows, rounded = of_sequences(model, SEQUENCES), gradients(model)
    exact = gradients(model.double())
    errors = {name: float((rounded[name] - each).norm() / each.norm()) for name, each in exact.items()}
    return Found([row.detach() for row in rows], exact, without, errors=errors)


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.cat(of_sequences(model, SEQUENCES)).sum().backward()
    named = [(name.replace(".default", ""), each) for name, each in model.named_parameters() if "lora_" in name]
    return {name: each.grad.clone() for name, each in named}


def read_by_peft(_, folder: Path, adapter: Path) -> list[torch.Tensor]:
    import peft

    with torch.no_grad():
        return of_sequences(peft.PeftModel.from_pretrained(loaded(folder), adapter).eval(), SEQUENCES)


def in_megarl(_, folder: Path, flags: str, target: Path, draws: bool = False) -> Found:
    """Reads or draws factors, writes them, and computes with them, at last the gradients."""
    from megarl.mcore.lora import adapter
    from tests.helpers.folders.hf_layouts import logprobs

    model, place = trainable(folder, flags)
    vocabulary = model.role.model_vocab_size(0)
    if draws:
        draw_factors(model.model)
    model.export_peft(target)
    rows, gap = logprobs(model.model, place, SEQUENCES, vocabulary), rollout_gap(model, place, vocabulary)
    with adapter.base_weights(model.model):
        base = logprobs(model.model, place, SEQUENCES, vocabulary)
    assert all(map(torch.equal, rows, logprobs(model.model, place, SEQUENCES, vocabulary)))
    return Found(rows, gradients_of(model, place, vocabulary), base, gap)


def rollout_gap(model, place, vocabulary: int) -> float:
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest
    from tests.helpers.folders.hf_layouts import logprobs

    if dist.get_world_size() > 1:
        return 0.0
    engine = RolloutEngine(model.model[0], place.pg_collection, vocabulary, 64, 0.02, 8)
    asked = [GenerationRequest(prompt, key, 12) for key, prompt in enumerate(SEQUENCES)]
    done = engine.generate(asked, (), SamplingSettings())
    rows = logprobs(
        model.model, place, [a.prompt + each.tokens for a, each in zip(asked, done, strict=True)], vocabulary
    )
    pairs = [(row[-len(each.tokens) :], torch.tensor(each.logprobs)) for row, each in zip(rows, done, strict=True)]
    return float(torch.cat([(one - other).abs() for one, other in pairs]).max())


def gradients_of(model, place, vocabulary: int) -> dict[str, torch.Tensor]:
    """Of the sum of all sequences' log-probs; the model cannot be used afterwards."""
    from megarl.batch import Batch
    from megarl.mcore.model.forward_pass import token_scores
    from tests.helpers.models.updates import split_microbatches

    lengths = torch.tensor([len(row) for row in SEQUENCES])
    batch = Batch(sequence_ids=torch.arange(len(lengths)), lengths=lengths, tokens=torch.tensor(sum(SEQUENCES, [])))
    batch = batch.select(torch.arange(len(lengths))[place.dp_rank :: len(place.replicas)])
    is_target = torch.ones(len(batch.tokens), dtype=torch.bool)
    is_target[batch.lengths.cumsum(0) - batch.lengths] = False

    def forward(chunk, part):
        return token_scores(chunk, part.tokens, part.lengths, 1.0, vocabulary, part.routing)

    def loss(out, part):
        first = part.lengths.cumsum(0) - part.lengths
        kept = torch.ones_like(out.logprobs, dtype=torch.bool).index_fill_(0, first[first < len(out.logprobs)], False)
        total = out.logprobs.masked_fill(~kept, 0.0).sum()
        return total, total.detach().double()

    microbatches = split_microbatches(batch, 1, 1)
    model.router_state.attach(batch, microbatches)
    model.update(microbatches, forward, loss)
    found = whole_gradients(model.model, place.pg_collection, trained_state)
    return {f"base_model.model.{key.removeprefix('lora.hf.')}.weight": grad for key, grad in found.items()}


def farthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


# Not over tensor-parallel ranks: the plan of the first splits no experts; layers of the second have one key.
WHOLE = "longcat_flash", "gemma4_text"
ROWS = [(kind, layout) for kind in TARGETS for layout in LAYOUTS if layout != "tp2" or kind not in WHOLE]


@pytest.mark.parametrize(("kind", "layout"), by_default(ROWS, [("granite", "one"), ("granite", "tp2")]))
def test_an_adapter_of_peft_computes_as_in_peft(kind, layout, folder_of, tmp_path):
    size, flags = LAYOUTS[layout]
    rslora = kind == "phi"
    (theirs,) = run_world(made_by_peft, 1, folder_of(kind), tmp_path / "peft", TARGETS[kind], rslora)
    assert farthest(theirs.base, theirs.logprobs) > 0.1
    flags = f"{flags} --lora-adapter {tmp_path / 'peft'}"
    for ours in run_world(in_megarl, size, folder_of(kind), flags, tmp_path / "out"):
        assert farthest(ours.logprobs, theirs.logprobs) < 2e-5 and farthest(ours.base, theirs.base) < 2e-5
        assert ours.gap == 0
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, grad in ours.gradients.items():
            expected, allowed = theirs.gradients[name], max(1e-5, 5 * theirs.errors[name])
            assert (grad - expected).norm() <= allowed * expected.norm(), name
    read, written = (load_file(tmp_path / each / EXPORT) for each in ("peft", "out"))
    assert read.keys() == written.keys() and all(torch.equal(each, written[name]) for name, each in read.items())


@pytest.mark.parametrize("kind", by_default(TARGETS, ["granite"]))
def test_peft_reads_what_is_written(kind, folder_of, tmp_path):
    flags = "--lora-rank 3 --lora-alpha 5"
    (ours,) = run_world(in_megarl, 1, folder_of(kind), flags, tmp_path / "out", True)
    (theirs,) = run_world(read_by_peft, 1, folder_of(kind), tmp_path / "out")
    assert farthest(ours.logprobs, theirs) < 2e-5 and farthest(ours.base, ours.logprobs) > 0.05 and ours.gap == 0


# What is refused, and what the line says, by flags.
REFUSED = {
    "--lora-rank 2 --lora-targets q_proj,nothing": "no linear layer of {folder} is nothing; allowed are all-linear",
    "--lora-rank 2 --lora-targets lm_head": "no linear layer of {folder} is lm_head",
    "--lora-adapter {experts}": "trains modules that have no factors in megarl: model.layers.*.mlp.experts",
}


def with_experts(_, folder: Path, target: Path):
    import peft

    names = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    peft.get_peft_model(loaded(folder), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **names)).save_pretrained(target)


@pytest.mark.parametrize("flags", by_default(REFUSED, [flags for flags in REFUSED if "adapter" not in flags]))
def test_what_has_no_factors_is_refused_in_a_line(flags, folder_of, tmp_path):
    folder = folder_of("ernie4_5_moe" if "adapter" in flags else "granite")
    if "adapter" in flags:
        run_world(with_experts, 1, folder, tmp_path)
    argv = f"--hf-model {folder} {any_measures.FLAGS} --max-prompt-length 8 --max-response-length 8 --prompts {folder}"
    says = refusal([*argv.split(), *flags.format(experts=tmp_path).split()])
    assert REFUSED[flags].format(folder=folder) in says
