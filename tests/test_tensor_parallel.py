"""Log-probabilities and entropy over a split vocabulary against log_softmax of the whole in float64."""

import pytest
import torch
import torch.distributed as dist

from megarl.mcore import tensor_parallel
from megarl.mcore.tensor_parallel import head_logprob_entropy, mask_padding, vocab_parallel_logprob_entropy
from tests.worlds import run_world

T, H, V, PADDED = 10, 12, 21, 32


def problem(seed: int = 0):
    """hidden [T, H], head weights [PADDED, H] and targets [T] below the true vocabulary, with edges of the shares."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(PADDED, H, generator=generator)
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[:5] = torch.tensor([0, 7, 8, 16, V - 1])
    return hidden, weight, targets


def exact(hidden, weight, targets, temperature):
    """Log-probabilities, entropies and their gradients (of a weighted sum) in float64, from the whole logits."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = (hidden @ weight[:V].T / temperature).log_softmax(-1)
    chosen, entropy = logp[torch.arange(T), targets], -(logp.exp() * logp).sum(-1)
    gradients = torch.autograd.grad(weighted(chosen, entropy), (hidden, weight))
    return chosen.detach(), entropy.detach(), gradients


def weighted(chosen, entropy):
    row = torch.linspace(-1, 2, T, dtype=chosen.dtype)
    return (row * chosen + row.flip(0) * 0.7 * entropy).sum()


def on_rank(rank, chunk, temperature):
    """What one rank computes from its rows of the head's weights; gradients of the whole."""
    tensor_parallel.CHUNK_TOKENS = chunk  # in the forked rank alone
    size, group = dist.get_world_size(), dist.group.WORLD
    hidden, weight, targets = problem()
    hidden.requires_grad_()
    share = weight.chunk(size)[rank].clone().requires_grad_()
    chunks = []

    def head(h):
        chunks.append(len(h))
        return h @ share.T

    chosen, entropy = head_logprob_entropy(hidden, head, targets, temperature, V, group)
    forward_chunks = list(chunks)
    to_hidden, to_share = torch.autograd.grad(weighted(chosen, entropy), (hidden, share))
    dist.all_reduce(to_hidden)  # what Megatron's column-parallel layer does in its backward
    return chosen.detach(), entropy.detach(), to_hidden, to_share, forward_chunks


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("chunk, temperature", [(1024, 1.0), (3, 1.0), (3, 0.5), (10, 2.0)])
def test_values_and_gradients_are_those_of_log_softmax(size, chunk, temperature):
    results = run_world(on_rank, size, chunk, temperature)
    chosen, entropy, (to_hidden, to_weight) = exact(*problem(), temperature)
    for result in results:
        assert result[0].dtype == result[1].dtype == torch.float32
        assert (result[0] - chosen).abs().max() <= 1e-6 * max(1.0, float(chosen.abs().max()))
        assert (result[1] - entropy).abs().max() <= 1e-6
        assert (result[2] - to_hidden).abs().max() <= 1e-5
        assert torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1])
        assert result[4] == ([3, 3, 2, 2] if chunk == 3 else [10])  # no part of few rows
    gathered = torch.cat([result[3] for result in results])
    assert (gathered - to_weight).abs().max() <= 1e-5
    assert torch.equal(gathered[V:], torch.zeros(PADDED - V, H))  # padded columns are never pulled at


def check_gradients(rank):
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3])
    return torch.autograd.gradcheck(lambda x: vocab_parallel_logprob_entropy(x, targets, dist.group.WORLD), logits)


def test_the_formulas_of_the_gradient():
    assert run_world(check_gradients, 1) == [True]


def caller_keeps_logits(rank):
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    before = logits.detach().clone()
    targets = torch.tensor([0, 3, 8, 15, 9])
    chosen, entropy = vocab_parallel_logprob_entropy(logits, targets, dist.group.WORLD)
    (chosen.sum() + entropy.sum()).backward()
    first = logits.grad.clone()
    assert torch.equal(logits.detach(), before)
    logits.grad = None
    vocab_parallel_logprob_entropy(logits, targets, dist.group.WORLD)[0].sum().backward()
    return chosen.detach(), first


def test_the_callers_logits_are_unchanged():
    (first, _), (second, _) = run_world(caller_keeps_logits, 2)
    assert torch.equal(first, second) and bool((first < 0).all())


def without_entropy(rank):
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank + 3))
    targets = torch.arange(6)
    with_it, _ = vocab_parallel_logprob_entropy(logits.clone().requires_grad_(), targets, dist.group.WORLD)
    with torch.no_grad():
        alone, _ = vocab_parallel_logprob_entropy(logits, targets, dist.group.WORLD)
    return torch.equal(with_it.detach(), alone)


def test_log_probs_with_and_without_gradients_are_identical():
    assert run_world(without_entropy, 2) == [True, True]


def extremes(rank, scale):
    size = dist.get_world_size()
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(1)).sign() * scale
    logits[0], logits[1, 5], logits[2] = scale, -3 * scale, -scale
    targets = torch.tensor([0, 5, 2, 15, 8, 7])
    share = logits.chunk(size, dim=1)[rank].clone().requires_grad_()
    masked = mask_padding(share, 14, rank * 16 // size)
    chosen, entropy = vocab_parallel_logprob_entropy(masked, targets, dist.group.WORLD)
    (chosen[targets < 14].sum() + entropy.sum()).backward()
    logp = logits[:, :14].double().log_softmax(-1)
    wanted = logp.gather(1, targets.clamp_max(13).unsqueeze(1)).squeeze(1)
    known = targets < 14
    assert torch.isfinite(chosen).all() and torch.isfinite(entropy).all() and torch.isfinite(share.grad).all()
    assert ((chosen - wanted)[known].abs() <= 1e-6 * wanted[known].abs().clamp_min(1)).all()
    assert (entropy - -(logp.exp() * logp).sum(-1)).abs().max() <= 2e-6
    return True


@pytest.mark.parametrize("size", [1, 2, 4])
def test_extreme_logits_stay_finite(size):
    assert run_world(extremes, size, 1e4) == [True] * size


def test_padded_columns_have_probability_zero():
    logits = torch.full((2, 6), 100.0)
    masked = mask_padding(logits, 10, 8)
    assert (logits == 100.0).all()
    assert torch.equal(masked[:, :2], logits[:, :2])
    assert (masked[:, 2:] == -1e30).all()
    assert torch.equal(mask_padding(logits, 10, 0), logits)

    def certain(rank):
        chosen, entropy = vocab_parallel_logprob_entropy(masked[:, :3], torch.tensor([0, 1]), dist.group.WORLD)
        return chosen, entropy

    chosen, entropy = run_world(certain, 1)[0]
    assert torch.allclose(chosen, torch.tensor(-0.6931472)) and torch.allclose(entropy, torch.tensor(0.6931472))


def chunk_memory(rank):
    tensor_parallel.CHUNK_TOKENS = 2
    hidden, weight, targets = problem()
    alive, widest = [], []

    def head(h):
        logits = h @ weight.T
        alive.append(torch.utils.weak.WeakTensorKeyDictionary({logits: None}))
        widest.append(sum(len(entry) for entry in alive))
        return logits

    hidden.requires_grad_()
    head_logprob_entropy(hidden, head, targets, 1.0, V, dist.group.WORLD)
    return max(widest), sum(len(entry) for entry in alive)


def test_logits_of_one_chunk_are_alive_at_a_time():
    most, left = run_world(chunk_memory, 1)[0]
    assert most <= 2 and left == 0
