"""Prompts longer than any block of a kernel: folders of small Hugging Face models, their rollouts, and their scores."""

import copy
from pathlib import Path
from typing import NamedTuple

import torch

from tests.helpers.folders import hf_folders

LONGEST, COUNT = 1100, 8  # tokens of a prompt and of a response
PROMPTS = (600, LONGEST, 2, 390, 150)  # above and below the 384 terms of which MKL makes one sum
INDEX_HEADS = 16
WINDOW = 700  # in place of the folders' short ones
MODES = {
    "whole": {}, "chunked": {"chunked_prefill": True, "step_tokens": 64},
    "drafts": {"speculative": True, "max_requests": 4},
    "prefix caching": {"prefix_caching": True, "chunked_prefill": True, "step_tokens": 400, "max_requests": 3},
}  # fmt: skip


class Found(NamedTuple):
    """What one rank found of a folder."""

    backend: str  # the module of its attention
    scores: list[torch.Tensor]  # log-probs of the training forward of each prompt
    gaps: dict[str, float]  # by mode of the engine; empty if it did not run
    difference: float | None  # from transformers' log-probs of the longest prompt


def write_folder(case: str, folder: Path, window: int = WINDOW) -> Path:
    """A case of `hf_folders` for long sequences; `window` in layers that have one. `CASE+N`: queries choose N keys."""
    case, _, chosen = case.partition("+")
    content = copy.deepcopy(hf_folders.stored(case))
    _lengthen(content["config"], window)
    if chosen:
        _choose(content, int(chosen))
    return hf_folders.write(content, folder)


def _choose(content: dict, count: int):
    """Gives indexers `INDEX_HEADS` heads: with few of them, the scores of many keys are exactly 0."""
    config = content["config"]
    config |= {"index_topk": count, "index_n_heads": INDEX_HEADS}
    rows = {"wq_b": INDEX_HEADS * config["index_head_dim"], "weights_proj": INDEX_HEADS}
    for name, _, shape, _ in content["tensors"]:
        if ".indexer." in name and (kind := name.split(".")[-2]) in rows:
            shape[0] = rows[kind]


def _lengthen(config: dict, window: int):
    longer = {"max_position_embeddings": 4096, "model_max_length": 4096, "index_topk": 4096, "sliding_window": window}
    for name, value in config.items():
        if isinstance(value, dict):
            _lengthen(value, window)
        elif name in longer and value is not None:
            config[name] = longer[name]


def prompts(vocabulary: int) -> list[list[int]]:
    """Random ones of `PROMPTS` tokens; then two that begin as others do."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in PROMPTS]
    return [*rows, rows[1][:700] + [5], rows[1]]


def run(
    rank: int, folders: dict[str, Path], flags: str = "", kernels: str = "compiled", modes=tuple(MODES), compares=False
) -> dict[str, Found]:  # fmt: skip
    """Measures folders by case. A collective. `kernels`: a value of `--kernels`; `compares`: with transformers."""
    from megarl.mcore import kernel_choice

    kernel_choice.use(kernels)
    return {case: _measure(folder, flags, modes, compares) for case, folder in folders.items()}


def _measure(folder: Path, flags: str, modes: tuple[str, ...], compares: bool) -> Found:
    from tests.helpers.folders import hf_layouts

    role, groups, model, _ = hf_layouts.build(folder, flags, False, longest=LONGEST)
    vocabulary = role.model_vocab_size(0)
    asked = prompts(min(vocabulary, 120))
    scores = hf_layouts.logprobs(model, groups, asked, vocabulary)
    gaps = {mode: _gap(model, groups, asked, vocabulary, **MODES[mode]) for mode in modes}
    attention = [layer.self_attention for layer in model[0].decoder.layers]
    backend = next(each.core_attention.backend for each in attention if hasattr(each, "core_attention"))
    difference = _from_transformers(folder, asked[1], scores[1]) if compares else None
    return Found(backend.__name__.rpartition(".")[2], scores, gaps, difference)


def _gap(model, groups, asked, vocabulary: int, max_requests: int = 8, **options) -> float:
    """Largest difference of sampled and of greedy tokens' log-probs from those of the training forward."""
    from megarl.algorithms.token_sampling import SamplingSettings
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest
    from tests.helpers.folders.hf_layouts import logprobs

    gaps = []
    for greedy in (True, False):
        requests = [GenerationRequest(prompt, key, COUNT) for key, prompt in enumerate(asked)]
        engine = RolloutEngine(
            model[0], groups.pg_collection, vocabulary, LONGEST + COUNT, 0.03, max_requests, **options
        )
        done = engine.generate(requests, (), SamplingSettings(greedy=greedy))
        rows = [request.prompt + each.tokens for request, each in zip(requests, done, strict=True)]
        for row, each in zip(logprobs(model, groups, rows, vocabulary), done, strict=True):
            assert len(each.tokens) == COUNT
            gaps.append((row[-COUNT:] - torch.tensor(each.logprobs)).abs().max())
    return float(torch.stack(gaps).max())  # NaN when one is


def _from_transformers(folder: Path, tokens: list[int], scores: torch.Tensor) -> float:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = theirs(torch.tensor([tokens])).logits[0].double().log_softmax(-1)[:-1]
    wanted = logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    return float((scores.double() - wanted).abs().max())
