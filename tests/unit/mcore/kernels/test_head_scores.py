"""Log-probabilities, entropy and Σπ² over a split vocabulary against log_softmax of the whole in float64."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.mcore.kernels import head_scores as kernel
from megarl.mcore.kernels.head import HeadOptions, row_chunks, softcap_
from megarl.mcore.kernels.head_scores import GatheredPolicy, HeadScores, head_scores
from megarl.mcore.kernels.linear import matmul
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.output_heads import PADDED, PER_TOKEN, H, T, V, cut_chunks, problem, use_row_kernels, weighted
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY_SECONDS, on_each_rank, run_world

ROOT = Path(__file__).parents[4]
ROUNDING = 2e-5  # of float32 numbers of about 1, whose sums have other orders on other processors


def of_logits(logits, targets):
    logp = logits.log_softmax(-1)
    return HeadScores(logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1),
                      logp.exp().square().sum(-1))  # fmt: skip


def exact(hidden, weight, targets, temperature):
    """Scores in float64 from the whole logits, and the gradients of their weighted sum."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    temperature = temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
    scores = of_logits(hidden @ weight[:V].T / temperature, targets)
    return scores, torch.autograd.grad(weighted(scores), (hidden, weight))


def on_rank(rank, chunk, temperature, sequence_parallel, dtype=torch.float32, by_rows=False):
    """Scores and gradients of one rank from its shard of the inputs, and the collectives that it called."""
    size, collectives = dist.get_world_size(), []
    by_rows and use_row_kernels()
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        count_calls(name, collectives)
    hidden, weight, targets = problem(dtype)
    if sequence_parallel:
        hidden = hidden.chunk(size)[rank].clone()
    share = weight.chunk(size)[rank].clone()
    cut_chunks(chunk, len(share))
    before = [x.clone() for x in (hidden, share, targets)]
    hidden.requires_grad_()
    share.requires_grad_()
    scores = head_scores(hidden, share, targets, HeadOptions(temperature, V, dist.group.WORLD, sequence_parallel))
    forward = len(collectives)
    gradients = torch.autograd.grad(weighted(scores), (hidden, share))
    assert all(torch.equal(x, y) for x, y in zip(before, (hidden, share, targets), strict=True))
    return [score.detach() for score in scores], gradients, collectives[:forward], collectives[forward:]


# Tokens of a chunk, and the temperature.
CHUNKS = {"whole": (T, 1.0), "one temperature": (8, 0.5), "per token": (4, PER_TOKEN)}


def count_calls(name, calls):
    from megatron.core.tensor_parallel import mappings

    function = getattr(dist, name)

    def counted(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    setattr(dist, name, counted)
    for place in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        if getattr(mappings, place) is function:
            setattr(mappings, place, counted)


@pytest.mark.parametrize("size, case, sequence_parallel, by_rows", by_default(
    itertools.product([1, 2, 4], CHUNKS, [False, True], [False, True]),
    [(1, "whole", False, False), (1, "one temperature", False, True), (2, "whole", True, True),
     (2, "one temperature", False, False), (2, "per token", False, True), (2, "per token", True, False)],
))  # fmt: skip
def test_scores_and_gradients_are_those_of_log_softmax(size, case, sequence_parallel, by_rows):
    chunk, temperature = CHUNKS[case]
    results = run_world(on_rank, size, chunk, temperature, sequence_parallel, torch.float32, by_rows)
    wanted, (to_hidden, to_weight) = exact(*problem(), temperature)
    for scores, _, forward, backward in results:
        for score, right, first in zip(scores, wanted, results[0][0], strict=True):
            assert score.dtype == torch.float32 and torch.equal(score, first)
            assert (score - right).abs().max() <= ROUNDING * max(1.0, float(right.detach().abs().max()))
        split = size > 1
        reductions = ["all_reduce"] * 2 * (1 if by_rows else {T: 1, 8: 3, 4: 5}[chunk]) * split
        assert forward == ["all_gather_into_tensor"] * (split and sequence_parallel) + reductions
        assert backward == ["reduce_scatter_tensor" if sequence_parallel else "all_reduce"] * split
    gathered = [torch.cat([result[1][i] for result in results]) for i in (0, 1)]
    for found in [gathered[0]] if sequence_parallel else [result[1][0] for result in results]:
        assert (found - to_hidden).abs().max() <= 1e-4 * to_hidden.abs().max()
    assert (gathered[1] - to_weight).abs().max() <= 1e-4 * to_weight.abs().max()
    assert torch.equal(gathered[1][V:], torch.zeros(PADDED - V, H))  # padded columns are never pulled at


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_logits_are_scored_in_fp32(size):
    results = run_world(on_rank, size, 8, 0.5, False, torch.bfloat16)
    hidden, weight, targets = problem(torch.bfloat16)
    logits = torch.nn.functional.linear(hidden, weight)[:, :V]
    wanted, (_, gradients) = of_logits(logits.double() / 0.5, targets), exact(hidden, weight, targets, 0.5)
    for score, right in zip(results[0][0], wanted, strict=True):
        assert score.dtype == torch.float32 and (score - right).abs().max() <= 2 * ROUNDING
    to_weight = torch.cat([result[1][1] for result in results])
    for gradient, right in ((results[0][1][0], gradients[0]), (to_weight, gradients[1])):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - right).abs().max() <= 0.03 * right.abs().max()


def sum_of_many_chunks(rank):
    """Weight gradient of 512 equal chunks as a multiple of the gradient of one."""
    hidden, weight, targets = (x[:1] if len(x) == T else x for x in problem(torch.bfloat16))
    cut_chunks(4, PADDED)
    found = []
    for rows in (4, 2048):
        weight.requires_grad_()
        scores = head_scores(
            hidden.expand(rows, H), weight, targets.expand(rows), HeadOptions(1.0, V, dist.group.WORLD)
        )
        found.append(torch.autograd.grad(scores.logprobs.sum(), weight)[0])
    return float((found[1] / 512 - found[0]).abs().max() / found[0].abs().max())


def test_the_weights_gradient_is_summed_over_chunks_in_fp32():
    assert run_world(sum_of_many_chunks, 1)[0] <= 0.01


@on_each_rank()
def test_the_formulas_of_the_gradients(rank):
    hidden, weight, targets = (x[:9] for x in problem(torch.float64))
    inputs, options = (hidden[:5].requires_grad_(), weight.requires_grad_()), (PER_TOKEN[:5], 7, dist.group.WORLD)
    for used in ((1, None, None), (None, 1, None), (None, None, 1), (1, -2, None), (None, 1, 2)):
        torch.autograd.gradcheck(
            lambda x, w, used=used: weighted(head_scores(x, w, targets[:5] % 7, HeadOptions(*options)), used), inputs
        )


def many_and_few(rank):
    """Rows of a large batch against the same rows alone and in other chunks; against the rollout's log-probs."""
    size, allowed = dist.get_world_size(), largest_gap_allowed()
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(300, 32, generator=generator), torch.randn(64, 32, generator=generator)
    targets = torch.randint(0, 61, (300,), generator=generator)
    share = weight.chunk(size)[rank].clone()

    def score(rows, temperature=0.7):
        return head_scores(hidden[rows], share, targets[rows], HeadOptions(temperature, 61, dist.group.WORLD))

    whole = score(slice(None))
    rollout = GatheredPolicy(matmul(hidden, weight), 0.7, 61, size)
    assert (rollout.logprobs(targets) - whole.logprobs).abs().max() <= allowed
    assert all(map(torch.equal, score(slice(None), torch.full((300,), 0.7)), whole))
    for count in (0, 1, 2, 3, 4, 5, 9, 31):
        for part, all_of_them in zip(score(slice(7, 7 + count)), whole, strict=True):
            assert part.shape == (count,)
            assert ((part - all_of_them[7 : 7 + count]).abs() <= allowed).all()
    cut_chunks(16, len(share))
    assert all((x - y).abs().max() <= allowed for x, y in zip(score(slice(None)), whole, strict=True))
    return True


@pytest.mark.parametrize("size", [1, 2])
def test_a_tokens_scores_do_not_depend_on_its_batch_and_equal_the_rollouts(size):
    assert run_world(many_and_few, size) == [True] * size


def few_rows(rank, count, sequence_parallel):
    size = dist.get_world_size()
    hidden, weight, targets = problem()
    hidden, targets, temperature = hidden[:count], targets[:count], PER_TOKEN[:count]
    _, wanted = exact(hidden, weight, targets, temperature)
    if sequence_parallel:
        hidden, wanted = hidden.chunk(size)[rank], (wanted[0].chunk(size)[rank], wanted[1])
    inputs = (hidden.clone().requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_())
    scores = head_scores(*inputs, targets, HeadOptions(temperature, V, dist.group.WORLD, sequence_parallel))
    gradients = torch.autograd.grad(weighted(scores), inputs)
    wanted = wanted[0], wanted[1].chunk(size)[rank]
    return [float((x - y).abs().sum()) for x, y in zip(gradients, wanted, strict=True)]


@pytest.mark.parametrize("count, size", [(0, 1), (1, 1), (2, 1), (3, 1), (5, 1), (0, 2), (2, 2), (6, 2)])
def test_gradients_of_few_rows(count, size):
    worst = max(max(found) for found in run_world(few_rows, size, count, size > 1))
    assert worst <= (2e-3 if count else 0.0)  # the differences of all elements together


def extremes(rank, scale, pull, by_rows):
    """Logits of ±scale, the last quarter of the columns padding, and gradients as loss scaling makes them."""
    size = dist.get_world_size()
    by_rows and use_row_kernels()
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).sign() * scale
    logits[0], logits[1, 5], logits[2] = scale, -3 * scale, -scale
    targets = torch.tensor([0, 5, 2, 11, 8, 7])
    weight = logits.T.chunk(size)[rank].clone().requires_grad_()
    hidden = torch.eye(6).requires_grad_()
    scores = head_scores(hidden, weight, targets, HeadOptions(1.0, 12, dist.group.WORLD))
    to_hidden, to_weight = torch.autograd.grad(sum(score.sum() for score in scores) * pull, (hidden, weight))
    assert torch.isfinite(to_hidden).all() and torch.isfinite(to_weight).all()
    for score, wanted in zip(scores, of_logits(logits[:, :12].double(), targets), strict=True):
        assert ((score - wanted).abs() <= 1e-5 * wanted.abs().clamp_min(1)).all()
    return True


@pytest.mark.parametrize("size", [1, 2, 4])  # the last of four ranks has no token
@pytest.mark.parametrize("by_rows", [False, True])
def test_extreme_logits_and_gradients_stay_finite(size, by_rows):
    assert run_world(extremes, size, 1e4, 2.0**32, by_rows) == [True] * size


@on_each_rank()
def test_wrong_sizes_are_rejected(rank):
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match="20 hidden states, but targets and temperatures of shape .*19"):
        head_scores(hidden, weight, targets[1:], HeadOptions(1.0, V, dist.group.WORLD))
    with pytest.raises(ValueError, match="20 hidden states"):
        head_scores(hidden, weight, targets, HeadOptions(torch.tensor(0.5), V, dist.group.WORLD))


def test_padded_columns_have_probability_zero():
    logits = torch.full((2, 6), 100.0)
    logits[:, 2:] = 300.0
    before = logits.clone()
    policy = GatheredPolicy(logits, 1.0, 2, 2)
    assert policy.weights.tolist() == [[1, 1, 0, 0, 0, 0]] * 2 and torch.equal(logits, before)
    assert policy.logprobs(torch.tensor([0, 1])).tolist() == pytest.approx([-math.log(2)] * 2)


@pytest.mark.long
def test_peak_memory_is_at_most_a_tenth_of_the_naive_computations(tmp_path):
    tokens, vocab, hidden = 2560, 32_000, 64  # more logits than are kept
    sizes = ["--tokens", str(tokens), "--vocab", str(vocab), "--hidden", str(hidden)]
    command = [sys.executable, "tools/bench/head_memory.py", *sizes, "--json", str(tmp_path / "out.jsonl")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=SAFETY_SECONDS)
    report = json.loads((tmp_path / "out.jsonl").read_text())
    assert report["naive_peak_bytes"] >= 3 * 4 * tokens * vocab  # the measurement sees what is there
    assert report["ratio"] <= 0.10
    assert report["divergence_ratio"] <= 1.3  # with more buffers of smaller chunks
    rows = row_chunks(tokens, vocab)[0].stop
    kept = 2 * vocab * hidden  # the weight's gradient, and its copy in the layout of the compiled kernel
    assert report["chunked_peak_bytes"] <= 4 * (2.5 * rows * vocab + kept)  # two buffers
    assert max(value for key, value in report.items() if key.endswith("_difference")) <= 5e-5


def one_sided(rank, largest_kept):
    """(whether gradients of single inputs equal those of both, elements that autograd saves for backward)."""
    kernel.MAX_KEPT = largest_kept
    hidden, weight, targets = problem()
    both = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        scores = head_scores(*both, targets, HeadOptions(1.0, V, dist.group.WORLD))
    wanted = torch.autograd.grad(weighted(scores), both)
    alone = []
    for i in (0, 1):
        inputs = [x if j == i else x.detach() for j, x in enumerate(both)]
        scores = head_scores(*inputs, targets, HeadOptions(1.0, V, dist.group.WORLD))
        alone.append(torch.autograd.grad(weighted(scores), both[i])[0])
    with torch.no_grad():
        silent = head_scores(*both, targets, HeadOptions(1.0, V, dist.group.WORLD))
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
    for kernel.MAX_KEPT in (2**20, 0):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        scores = head_scores(*inputs, targets, HeadOptions(PER_TOKEN, V, dist.group.WORLD))
        found.append(torch.autograd.grad(weighted(scores, used), inputs))
    return found


@pytest.mark.parametrize("used", [(1.0, None, None), (1.0, 0.7, -3.0)])
def test_saved_logits_give_the_gradients_of_recomputed_ones(used):
    kept, again = run_world(kept_or_not, 1, used)[0]
    assert all(map(torch.equal, kept, again))


def some_places(rank, sequence_parallel):
    """Scores and gradients of some tokens, and those computed from all tokens with the others masked."""
    size = dist.get_world_size()
    hidden, weight, targets = problem()
    cut_chunks(5, PADDED // size)
    places = torch.tensor([3, 0, 7, 8, 9, 15, 19, 2, 11])
    part, share = (x.chunk(size)[rank] if cut else x for x, cut in ((hidden, sequence_parallel), (weight, True)))
    found = []
    for chosen in (None, places):
        inputs = [part.clone().requires_grad_(), share.clone().requires_grad_()]
        rows = slice(None) if chosen is None else chosen
        options = HeadOptions(PER_TOKEN[rows], V, dist.group.WORLD, sequence_parallel)
        scores = head_scores(*inputs, targets[rows], options, chosen, squares=chosen is None)
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


def capped_on_rank(rank, chunk, temperature):
    """Scores and gradients under a softcap, and how far the rollout's log-probs of the same logits are."""
    size = dist.get_world_size()
    hidden, weight, targets = problem()
    share = weight.chunk(size)[rank].clone().requires_grad_()
    cut_chunks(chunk, len(share))
    hidden.requires_grad_()
    scores = head_scores(hidden, share, targets, HeadOptions(temperature, V, dist.group.WORLD, softcap=1.5))
    gradients = torch.autograd.grad(weighted(scores), (hidden, share))
    gap = None
    if not isinstance(temperature, torch.Tensor):
        capped = softcap_(matmul(hidden.detach(), weight), 1.5)
        rollout = GatheredPolicy(capped, temperature, V, size).logprobs(targets)
        gap = float((rollout - scores.logprobs.detach()).abs().max())
    return [score.detach() for score in scores], gradients, gap


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("chunk, temperature", [(T, 1.0), (4, 0.5), (8, PER_TOKEN)])
def test_softcapped_scores_and_gradients_are_those_of_log_softmax(size, chunk, temperature):
    hidden, weight, targets = problem()
    inputs = hidden.double().requires_grad_(), weight.double().requires_grad_()
    divisor = temperature.double().unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
    expected = of_logits(1.5 * torch.tanh(inputs[0] @ inputs[1][:V].T / 1.5) / divisor, targets)
    wanted = torch.autograd.grad(weighted(expected), inputs)
    results = run_world(capped_on_rank, size, chunk, temperature)
    for scores, (to_hidden, _), gap in results:
        assert all((x - y).abs().max() <= ROUNDING for x, y in zip(scores, expected, strict=True))
        assert gap is None or gap <= largest_gap_allowed()
    to_hidden = sum(gradients[0] for _, gradients, _ in results) / size  # each rank has that of all
    to_weight = torch.cat([gradients[1] for _, gradients, _ in results])
    for found, want in zip((to_hidden, to_weight), wanted, strict=True):
        assert (found - want).abs().max() <= 1e-4 * want.abs().max()
