"""What a pass skips: logits that were saved, scores that are not needed, intermediate results of norms."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.mcore.kernels import vocab_parallel_logprobs
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.norm import RMSNorm
from megarl.mcore.kernels.vocab_parallel_logprobs import head_scores
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.output_heads import PADDED, PER_TOKEN, H, T, V, cut_chunks, problem, weighted
from tests.helpers.tiny_models import VOCAB, build, ragged_tokens
from tests.helpers.worlds import run_world


def one_sided(rank, largest_kept):
    """Gradients when only one input wants one, and what autograd keeps between forward and backward."""
    vocab_parallel_logprobs.LARGEST_KEPT = largest_kept
    hidden, weight, targets = problem()
    both = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        scores = head_scores(*both, targets, 1.0, V, dist.group.WORLD)
    wanted = torch.autograd.grad(weighted(scores), both)
    alone = []
    for i in (0, 1):
        inputs = [x if j == i else x.detach() for j, x in enumerate(both)]
        scores = head_scores(*inputs, targets, 1.0, V, dist.group.WORLD)
        alone.append(torch.autograd.grad(weighted(scores), both[i])[0])
    with torch.no_grad():
        silent = head_scores(*both, targets, 1.0, V, dist.group.WORLD)
    return all(map(torch.equal, [*silent, *alone], [*scores, *wanted])), sum(kept)


@pytest.mark.parametrize("largest_kept, logits", [(T * PADDED, T * PADDED), (T * PADDED - 1, 0)])
def test_only_needed_gradients_are_computed_and_only_inputs_and_small_logits_are_saved(largest_kept, logits):
    same, kept = run_world(one_sided, 1, largest_kept)[0]
    assert same and kept - logits <= T * H + PADDED * H + 5 * T


def kept_or_not(rank, used):
    """Gradients with logits that are kept and with logits that are computed again, and in float64."""
    hidden, weight, targets = problem()
    cut_chunks(8, PADDED)
    found = []
    for vocab_parallel_logprobs.LARGEST_KEPT in (2**20, 0):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        scores = head_scores(*inputs, targets, PER_TOKEN, V, dist.group.WORLD)
        found.append(torch.autograd.grad(weighted(scores, used), inputs))
    return found


@pytest.mark.parametrize("used", [(1.0, None, None), (1.0, 0.7, -3.0)])
def test_saved_logits_give_the_gradients_of_recomputed_ones(used):
    kept, again = run_world(kept_or_not, 1, used)[0]
    assert all(map(torch.equal, kept, again))


def some_places(rank, sequence_parallel):
    """Scores and gradients of some tokens, and those that all tokens give when the others do not count."""
    size = dist.get_world_size()
    hidden, weight, targets = problem()
    cut_chunks(5, PADDED // size)
    places = torch.tensor([3, 0, 7, 8, 9, 15, 19, 2, 11])
    part, share = (x.chunk(size)[rank] if cut else x for x, cut in ((hidden, sequence_parallel), (weight, True)))
    found = []
    for chosen in (None, places):
        inputs = [part.clone().requires_grad_(), share.clone().requires_grad_()]
        rows = slice(None) if chosen is None else chosen
        scores = head_scores(*inputs, targets[rows], PER_TOKEN[rows], V, dist.group.WORLD, sequence_parallel,
                             chosen, squares=chosen is None)  # fmt: skip
        assert (scores.square_sum is None) == (chosen is not None)
        scores = [score[places] if chosen is None else score for score in scores[:2]]
        gradients = torch.autograd.grad((scores[0] * PER_TOKEN[places]).sum() - scores[1].sum(), inputs)
        found.append(([score.detach() for score in scores], gradients))
    return found


@pytest.mark.parametrize("size, sequence_parallel", [(1, False), (2, True)])
def test_scores_of_some_tokens_equal_those_of_all_tokens(size, sequence_parallel):
    for (whole, whole_gradients), (some, gradients) in run_world(some_places, size, sequence_parallel):
        assert all((x - y).abs().max() <= largest_gap_allowed() for x, y in zip(some, whole, strict=True))
        assert_close(gradients, whole_gradients, rtol=1e-5, atol=1e-5)


def masked_scores(rank):
    """Scores of a mask's tokens against those of all tokens, at a mask's edges."""
    from megarl.mcore.model.forward_pass import inference_mode, token_scores

    model, _, _ = build("", "llama")
    tokens, lengths = ragged_tokens([8, 1, 5, 3])
    generator = torch.Generator().manual_seed(3)
    first = torch.zeros(17, dtype=torch.bool)
    first[lengths.cumsum(0) - lengths] = True
    with inference_mode(model):
        whole = token_scores(model, tokens, lengths, 0.7, VOCAB)
        for share in (0.0, 0.1, 0.5, 1.0):
            mask = (torch.rand(17, generator=generator) < share) & ~first
            found = token_scores(model, tokens, lengths, 0.7, VOCAB, mask=mask)
            for all_of_them, some in zip(whole, found, strict=True):
                assert (some - all_of_them)[mask].abs().sum() <= 17 * largest_gap_allowed()
                assert torch.equal(some[~mask], torch.zeros(int((~mask).sum())))
        few = token_scores(model, tokens[:2], torch.tensor([2]), 0.7, VOCAB, mask=torch.tensor([False, True]))
        assert (few.logprobs - whole.logprobs[:2]).abs().max() <= largest_gap_allowed()
    return True


def test_a_mask_leaves_its_tokens_scores_as_they_are_and_the_others_at_zero():
    assert run_world(masked_scores, 1) == [True]


def norms(rank):
    """[(result, gradients)] of megarl's norm and of the formula in float64, and whether rows and modes agree."""
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(50, 1, 96, generator=generator) for _ in range(2))
    norm = RMSNorm(96, 1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0, generator=generator)
    inputs = [x.clone().requires_grad_(), norm.weight]
    out = norm(inputs[0])
    found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    right = exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[1]
    expected = [right.detach(), *torch.autograd.grad(right, exact, grad.double())]
    with torch.inference_mode():
        same = [torch.equal(norm(x[:rows]), found[0][:rows]) for rows in (MIN_ROWS, 7, 50)]
    return [each.double() for each in found], expected, same


def test_the_norm_and_its_gradients_are_those_of_the_formula():
    ((found, expected, same),) = run_world(norms, 1)
    assert_close(found, expected, rtol=5e-5, atol=5e-5)
    assert all(same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_of_other_precisions_are_torchs(dtype):
    x, norm = torch.randn(6, 32).to(dtype), RMSNorm(32, 1e-5, dtype=dtype)
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (32,), norm.weight, 1e-5))
