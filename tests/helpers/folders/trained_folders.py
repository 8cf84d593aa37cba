"""Gradients of models with the weights of a Hugging Face folder, and those of transformers."""

from pathlib import Path

import torch


def trained(folder: Path, flags: str = "", longest: int = 200):
    """(model with a folder's weights, its vocabulary, its groups, writer); `longest` as in `hf_layouts.build`."""
    from megarl.mcore.model import gpt
    from tests.helpers.folders import hf_layouts

    role, groups, _, weights = hf_layouts.build(folder, flags, False, load=False, longest=longest)
    model = gpt.build_model(role.megatron, role.model_vocab_size(0), groups.pg_collection)
    weights.load(model, groups.pg_collection)
    for module in model.modules():
        if hasattr(module, "counts_tokens"):
            module.counts_tokens = False  # of the experts, which wants those of a whole mini-batch
    return model.train(), role.model_vocab_size(0), groups, weights


def gradients(model, vocabulary: int, rows, shared=None):
    """(log-probs, gradients by name) of one micro-batch, of log-probs times fixed numbers."""
    model[0].zero_grad()
    found = logprobs(model, vocabulary, rows, shared)
    factors = torch.randn(len(found), generator=torch.Generator().manual_seed(0))
    (found * factors).sum().backward()
    return found.detach(), {n: p.grad.clone() for n, p in model[0].named_parameters() if p.grad is not None}, factors


def logprobs(model, vocabulary: int, rows, shared=None):
    """Those of a micro-batch of rows [T]."""
    from megarl.mcore.model.forward_pass import token_scores

    tokens, lengths = torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows])
    return token_scores(model[0], tokens, lengths, 1.0, vocabulary, shared=shared).logprobs


def of_transformers(folder: Path, rows, factors) -> dict[str, torch.Tensor]:
    """The same gradients, by transformers' names."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = torch.zeros(())
    for row, part in zip(rows, factors.split([len(row) for row in rows]), strict=True):
        logprobs = theirs(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        total = total + (logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0] * part[1:]).sum()
    total.backward()
    return {name: p.grad for name, p in theirs.named_parameters()}
