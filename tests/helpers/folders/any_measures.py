"""What a small model of transformers computes under `--model-source transformers`, beside what it computes alone."""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from tests.helpers.folders.any_types import AFTER_PADDING
from tests.helpers.worlds import SAFETY

FLAGS = "--model-source transformers"
LENGTHS = (1, 30, 16, 17, 2, 5)  # of prompts: above and below blocks of the cache and windows
COUNT = 24  # tokens of a response
LONGEST = 64
SEED = 3
WRONG_CACHE = ("zamba2",)  # transformers 5.24: other tokens after prompts of 1 and 2 tokens than without its cache
# `generate` of these takes other inputs than tokens, searches by beams, or counts positions from 0.
OTHER_GENERATE = (
    "moshi", "bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", *AFTER_PADDING,
)  # fmt: skip


class Measured(NamedTuple):
    """What one rank found of a type."""

    difference: float  # largest, of log-probs from those of the module alone
    greedy: list[bool]  # whether the greedy tokens of each prompt are those of `generate`
    gaps: list[float]  # of the rollout's log-probs from the training forward: greedy, sampled
    is_alone_equal: bool  # a request alone has the same tokens and bits
    changed: list[str]  # names of tensors that an export does not have as the folder has them
    score_rows: list[torch.Tensor]  # log-probs of the training forward


def measure(rank: int, folders: dict[str, Path], exports: Path, flags: str = "") -> dict[str, Measured]:
    """Measures folders by type. A collective of the world; every rank finds the same."""
    torch.set_num_threads(1)
    return {kind: _measure(folder, exports / kind, f"{FLAGS} {flags}") for kind, folder in folders.items()}


def _measure(folder: Path, export: Path, flags: str) -> Measured:
    from transformers import AutoModelForCausalLM

    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.weights.hf.folder_weights import export_weights
    from tests.helpers.folders import hf_layouts

    role, groups, model, weights = hf_layouts.build(folder, flags, False, longest=LONGEST)
    vocabulary = role.model_vocab_size(0)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    asked = _requests(vocabulary)
    generate = _engine(model, groups, vocabulary)
    done = {name: generate(asked, SamplingSettings(greedy=name == "greedy")) for name in ("greedy", "sampled")}
    rows = [request.prompt + each.tokens for request, each in zip(asked, done["sampled"], strict=True)]
    scores = hf_layouts.logprobs(model, groups, rows, vocabulary)
    alone = [generate([request], SamplingSettings())[0] for request in asked[:3]]
    export_weights(weights.weight_map, model, groups.pg_collection, export)
    pairs = list(zip(scores, rows, strict=True))
    greedy = zip(asked, done["greedy"], strict=True)
    both = zip(alone, done["sampled"], strict=False)
    return Measured(
        difference=max(float((row - _alone(plain, tokens)).abs().max()) for row, tokens in pairs),
        greedy=[_greedy(plain, request.prompt) == each.tokens for request, each in greedy],
        gaps=[_gap(model, groups, asked, each, vocabulary) for each in done.values()],
        is_alone_equal=all(one.tokens == other.tokens and one.logprobs == other.logprobs for one, other in both),
        changed=_changed(folder, export),
        score_rows=scores,
    )


def _requests(vocabulary: int):
    from megarl.mcore.inference.generation import GenerationRequest

    generator = torch.Generator().manual_seed(SEED)
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    return [GenerationRequest(prompt, key, COUNT) for key, prompt in enumerate(prompts)]


def _engine(model, groups, vocabulary: int):
    from megarl.mcore.inference.engine import RolloutEngine

    engine = RolloutEngine(model[0], groups.pg_collection, vocabulary, LONGEST + COUNT, 0.02, 8)
    return lambda requests, settings: engine.generate(requests, (), settings)


def _gap(model, groups, requests, done, vocabulary: int) -> float:
    from tests.helpers.folders.hf_layouts import logprobs

    rows = logprobs(model, groups, [r.prompt + c.tokens for r, c in zip(requests, done, strict=True)], vocabulary)
    gaps = [(row[-COUNT:] - torch.tensor(c.logprobs)).abs().max() for row, c in zip(rows, done, strict=True)]
    return float(torch.stack(gaps).max())  # NaN when one is


@torch.no_grad()
def _logits(plain, tokens: list[int]) -> torch.Tensor:
    """[T, V] of a sequence, by transformers without a cache."""
    ids, others = torch.tensor([tokens]), {}
    if plain.config.model_type in AFTER_PADDING:  # their own positions leave out a sampled token of padding
        others["position_ids"] = torch.arange(len(tokens)).unsqueeze(0) + plain.config.pad_token_id + 1
    return plain(ids, use_cache=False, **others).logits[0].float()


def _alone(plain, tokens: list[int]) -> torch.Tensor:
    """Log-probs of a sequence's tokens from the second on, by transformers."""
    logprobs = _logits(plain, tokens).log_softmax(-1)[:-1]
    return logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


def _greedy(plain, prompt: list[int]) -> list[int]:
    if plain.config.model_type in OTHER_GENERATE:
        tokens = list(prompt)
        for _ in range(COUNT):
            tokens.append(int(_logits(plain, tokens)[-1].argmax()))
        return tokens[len(prompt) :]
    ids = torch.tensor([prompt])
    asked = dict(max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)
    if plain.config.model_type in WRONG_CACHE:
        asked["use_cache"] = False
    return plain.generate(ids, attention_mask=torch.ones_like(ids), **asked)[0, len(prompt) :].tolist()


def _changed(folder: Path, export: Path) -> list[str]:
    stored, written = (
        {name: each for file in sorted(where.glob("*.safetensors")) for name, each in load_file(file).items()}
        for where in (folder, export)
    )
    assert stored.keys() == written.keys()
    return [name for name, each in stored.items() if not torch.equal(each, written[name])]


class Gradients(NamedTuple):
    """Of a sum of log-probs, over all ranks."""

    norm: float  # as the optimizer sees it
    by_name: dict[str, torch.Tensor]  # whole


def gradients(rank: int, folder: Path, flags: str) -> Gradients:
    """The gradients of a folder's model in a layout. A collective of the world; every rank finds the same."""
    from megarl.checkpoint.pretrained import find_pretrained
    from megarl.comm import role_mesh
    from megarl.mcore.any_model.tensor_parallel import gathered_whole
    from megarl.mcore.model import forward_pass, gpt
    from megarl.mcore.parallel.fsdp import whole
    from megarl.mcore.training import optimizer as optimizers
    from megarl.roles.passes import run_microbatches
    from tests.helpers.folders import hf_layouts
    from tests.helpers.models.tiny_models import one_microbatch

    torch.set_num_threads(1)
    role = hf_layouts.role_of(folder, f"{FLAGS} {flags}", torch.distributed.get_world_size(), False, LONGEST)
    groups = role_mesh.create_mesh({role.name: role}, SAFETY)[role.name]
    vocabulary, pg = role.model_vocab_size(0), groups.pg_collection
    stages = gpt.build_model(role.megatron, vocabulary, pg)
    find_pretrained(role, vocabulary, value_head=False).load(stages, pg)
    wrapped = optimizers.wrap_for_training(stages, role.megatron, pg)
    optimizer = optimizers.build_optimizer(wrapped, role.megatron, pg)
    rows = _rows(vocabulary)

    def forward(chunk, part):
        return forward_pass.token_scores(chunk, part.tokens, part.lengths, 1.0, vocabulary, part.routing)

    def loss(scores, part):
        return scores.logprobs.sum() / pg.dp.size(), None

    run_microbatches(wrapped, one_microbatch(rows), forward, loss, pg, train=True)
    optimizers.finish_gradients(wrapped, pg)
    optimizer.prepare_grads()
    splits, prefix = stages[0].splits, len("hf.")
    return Gradients(
        float(optimizer.get_grad_norm()),
        {
            name: gathered_whole(whole(parameter.main_grad), splits.get(name[prefix:]), pg.tp).clone()
            for name, parameter in stages[0].named_parameters()
            if parameter.requires_grad
        },
    )


def loaded(folder: Path, dtype: torch.dtype = torch.float32):
    """The model as transformers computes it, with its own attention and experts."""
    from transformers import AutoModelForCausalLM

    own = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **own).eval()


def trainable(folder: Path, flags: str):
    """(the model of a folder as an actor trains it, the actor's place). A collective of the world."""
    from megarl.checkpoint.pretrained import find_pretrained
    from megarl.comm import role_mesh
    from megarl.roles.trainable_model import TrainableModel
    from tests.helpers.folders.hf_layouts import role_of

    torch.set_num_threads(1)
    role = role_of(folder, f"--lr 1e-3 --clip-grad 0 {FLAGS} {flags}", torch.distributed.get_world_size(), False)
    place = role_mesh.create_mesh({"actor": role}, SAFETY)["actor"]
    model = TrainableModel(role, place, role.model_vocab_size(0), 1)
    model.load_pretrained(find_pretrained(role, role.model_vocab_size(0)))
    return model, place


def _rows(vocabulary: int) -> list[list[int]]:
    rows = [request.prompt for request in _requests(vocabulary)]
    return [*rows, [vocabulary // 2, 0, 5]]  # the first row of the second rank's vocabulary, and padding


def own_gradients(_, folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As of `gradients`, by transformers' own module and backward; by its names, of parameters that have some."""
    module = loaded(folder, dtype)
    for row in _rows(module.config.get_text_config().vocab_size):
        if len(row) > 1:
            logprobs = module(torch.tensor([row]), use_cache=False).logits[0, :-1].to(dtype).log_softmax(-1)
            logprobs.gather(1, torch.tensor(row[1:])[:, None]).sum().backward()
    return {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def differences(rank: int, folders: dict[str, Path]) -> dict[str, float]:
    """Largest difference of log-probs between Megatron's layers and transformers' of a folder, by type; a collective.
    The module's are of float32, and of the same packed sequences."""
    torch.set_num_threads(1)
    return {kind: _difference(folder) for kind, folder in folders.items()}


def _difference(folder: Path) -> float:
    from tests.helpers.folders import hf_layouts

    generator, found = torch.Generator().manual_seed(SEED), []
    sequences = [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (40, 17, 2, 33)]
    for flags in ("", FLAGS):
        role, groups, model, _ = hf_layouts.build(folder, flags, False, longest=LONGEST)
        assert bool(model[0].config.attention_slots) == bool(flags)  # a model of transformers
        found.append(torch.cat(hf_layouts.logprobs(model, groups, sequences, role.model_vocab_size(0))))
    return float((found[0] - found[1]).abs().max())
