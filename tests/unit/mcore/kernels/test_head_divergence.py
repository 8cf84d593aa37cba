"""Divergence of two heads over a split vocabulary against float64 torch over full logits, and against TRL's formula."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import kl_div

from megarl.algorithms.kl import DIVERGENCES, JSD, Divergence
from megarl.mcore.kernels import head_divergence as kernel
from megarl.mcore.kernels.head import HeadOptions
from megarl.mcore.kernels.head_divergence import DistillScores, TeacherHead, head_divergence
from tests.helpers.models.output_heads import cut_chunks
from tests.helpers.tiers import long
from tests.helpers.worlds import on_each_rank, run_world

CASES = 200
UPSTREAM = 3.0  # scale of the gradients that come from the loss


def draw(number):
    """Inputs of a random case in float64: two widths, a vocabulary that no number of ranks divides, a softcap."""
    generator = torch.Generator().manual_seed(number)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    tokens, width, wide, vocab = pick(1, 24), pick(3, 20), pick(3, 30), pick(5, 61)
    padded = -(-vocab // 8) * 8 + 8 * pick(0, 3)
    scale = float(10 ** (2 * torch.rand((), generator=generator) - 1))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden": normal(tokens, width) * scale, "weight": normal(padded, width),
        "states": normal(tokens, wide) * scale,
        "teacher": normal(padded, wide), "targets": torch.randint(0, vocab, (tokens,), generator=generator),
        "upstream": normal(tokens) * UPSTREAM, "vocab": vocab,
        "temperatures": (0.5 + float(torch.rand((), generator=generator)), 1.0 + number % 2),
        "softcaps": ((None, 20.0)[number % 3 == 1], (None, 30.0)[number % 5 == 1]),
        "divergence": Divergence(DIVERGENCES[number % 3], (0.5, 0.1, 0.9)[number // 3 % 3]),
    }  # fmt: skip


def logprobs_of(hidden, weight, vocab, temperature, softcap):
    logits = hidden @ weight[:vocab].T
    return ((softcap * (logits / softcap).tanh() if softcap else logits) / temperature).log_softmax(-1)


def exact(case):
    """`DistillScores` and the gradients of hidden states and weight, in float64 from whole logits."""
    inputs = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
    student = logprobs_of(*inputs, case["vocab"], case["temperatures"][0], case["softcaps"][0])
    teacher = logprobs_of(case["states"], case["teacher"], case["vocab"], case["temperatures"][1], case["softcaps"][1])
    name, beta = case["divergence"]

    def kl(one, other):
        return kl_div(other, one, reduction="none", log_target=True).sum(-1)

    forward, reverse = kl(teacher, student), kl(student, teacher)
    mixture = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())
    value = {"forward": forward, "reverse": reverse,
             "jsd": beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)}[name]  # fmt: skip
    gradients = torch.autograd.grad((value * case["upstream"]).sum(), inputs)
    agrees = (student.argmax(-1) == teacher.argmax(-1)).double()
    chosen = teacher.gather(-1, case["targets"].unsqueeze(-1)).squeeze(-1)
    return DistillScores(value, forward, reverse, agrees, chosen), gradients


def options_of(case, sequence_parallel):
    """The student's."""
    return HeadOptions(case["temperatures"][0], case["vocab"], dist.group.WORLD, sequence_parallel, case["softcaps"][0])


def of_kernel(case, rank, size, sequence_parallel=False, indices=None):
    share = case["weight"].chunk(size)[rank].clone().requires_grad_()
    hidden = case["hidden"].clone()
    hidden = (hidden.chunk(size)[rank].clone() if sequence_parallel else hidden).requires_grad_()
    teacher = TeacherHead(
        case["teacher"].chunk(size)[rank], case["temperatures"][1], case["softcaps"][1], case["divergence"]
    )
    options = options_of(case, sequence_parallel)
    taught = [(None, case["states"], teacher)]
    scores = head_divergence(hidden, share, taught, case["targets"], options, indices)
    return scores, torch.autograd.grad((scores.divergence * case["upstream"]).sum(), (hidden, share))


def worst_differences(rank, numbers, kept):
    """The largest relative difference of a score, and of a gradient, over cases."""
    kernel.MAX_KEPT = kept
    size, worst = dist.get_world_size(), [0.0, 0.0]
    for number in numbers:
        case = draw(number)
        cut_chunks(5, len(case["weight"]) // size * kernel.BUFFERS)
        scores, gradients = of_kernel(case, rank, size)
        wanted, of_exact = exact(case)
        of_exact = of_exact[0], of_exact[1].chunk(size)[rank]
        for found, right in zip(scores, wanted, strict=True):
            worst[0] = max(worst[0], float(((found - right).abs() / right.abs().clamp(min=1e-3)).max()))
        for found, right, whole in zip(gradients, of_exact, exact(case)[1], strict=True):
            worst[1] = max(worst[1], float((found - right).abs().max() / whole.abs().max()))
    return worst


@pytest.mark.parametrize("size, kept", [long((1, 2**26)), (1, 0), (2, 2**26), long((4, 0))])
def test_values_and_gradients_are_those_of_full_logits_in_float64(size, kept):
    numbers = range(0, CASES, 1 if size == 1 else 4)
    for scores, gradients in run_world(worst_differences, size, numbers, kept):
        assert scores <= 1e-6 and gradients <= 1e-6


def equal_models(rank, dtype):
    """Whether every score of a student that is its own teacher, and every gradient, is exactly 0."""
    size, found = dist.get_world_size(), []
    for number, divergence in itertools.product(range(6), DIVERGENCES):
        case = draw(number)
        for name in ("hidden", "weight", "upstream"):
            case[name] = case[name].to(dtype)
        case |= {"states": case["hidden"], "teacher": case["weight"], "divergence": Divergence(divergence, 0.3)}
        case |= {"temperatures": (0.7, 0.7), "softcaps": case["softcaps"][:1] * 2}
        for kernel.MAX_KEPT in (0, 2**26):
            scores, gradients = of_kernel(case, rank, size)
            found += [not float(x.abs().max()) for x in (*scores[:3], *gradients)]
            found.append(bool((scores.top1_agreement == 1).all()))
    return all(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_a_student_that_is_its_own_teacher_has_exactly_no_divergence_and_no_gradient(size, dtype):
    assert run_world(equal_models, size, dtype) == [True] * size


def extremes(rank):
    """Whether everything stays finite where one distribution has no mass for what the other is certain of."""
    size, found = dist.get_world_size(), []
    for divergence in DIVERGENCES:
        case = draw(0) | {"hidden": torch.eye(4) * 1e4, "states": -torch.eye(4) * 1e4, "vocab": 5}
        weight = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        case |= {"weight": weight, "divergence": Divergence(divergence), "softcaps": (None, None)}
        case |= {"teacher": case["weight"], "targets": torch.arange(4), "upstream": torch.full((4,), 2.0**20)}
        scores, gradients = of_kernel(case, rank, size)
        found += [bool(x.isfinite().all()) for x in (*scores, *gradients)]
        if divergence == JSD:
            found.append(bool((scores.divergence <= 0.6932).all()))
    return all(found)


@pytest.mark.parametrize("size", [1, 2, 4])  # the last of four ranks has no token
def test_opposite_distributions_stay_finite(size):
    assert run_world(extremes, size) == [True] * size


def parts(rank):
    """Whether some tokens, and a share of the tokens per rank, have the scores and gradients of all."""
    size, case = dist.get_world_size(), draw(6)
    count = len(case["hidden"]) // 4 * 4
    case |= {name: case[name][:count] for name in ("hidden", "states", "targets", "upstream")}
    whole, (to_hidden, to_weight) = of_kernel(case, rank, size)
    scores, gradients = of_kernel(case, rank, size, sequence_parallel=True)
    same = [torch.equal(*pair) for pair in zip(scores, whole, strict=True)]
    same += [torch.allclose(gradients[0], to_hidden.chunk(size)[rank]), torch.allclose(gradients[1], to_weight)]
    chosen = torch.arange(count).roll(3)[: count - 4]
    scores, gradients = of_kernel(
        case | {name: case[name][chosen] for name in ("states", "targets", "upstream")}, rank, size, indices=chosen
    )
    same += [torch.allclose(x, y[chosen]) for x, y in zip(scores, whole, strict=True)]
    left_out = torch.ones(count, dtype=torch.bool).index_fill(0, chosen, False)
    return all(same) and not gradients[0][left_out].any() and torch.allclose(gradients[0][chosen], to_hidden[chosen])


def test_some_tokens_and_split_tokens():
    assert len(draw(6)["hidden"]) >= 8
    assert run_world(parts, 2) == [True, True]


def several(rank, dtype):
    """(whether the scores are those of each teacher alone, the largest relative difference of a gradient)."""
    size, same, worst = dist.get_world_size(), True, 0.0
    for number, is_split in itertools.product(range(0, 40, 5), (False, True)):
        case, generator = draw(number), torch.Generator().manual_seed(number)
        tokens, padded = len(case["hidden"]) // size * size, len(case["weight"])
        if not tokens:
            continue
        case |= {name: case[name][:tokens] for name in ("hidden", "states", "targets", "upstream")}
        other = {"states": torch.randn(tokens, 7, generator=generator), "softcaps": (case["softcaps"][0], 11.0)}
        other["teacher"] = torch.randn(padded, 7, generator=generator)
        names = ("hidden", "weight", "states", "teacher", "upstream")
        cases = [each | {name: each[name].to(dtype) for name in names} for each in (case, case | other, case)]
        is_first = torch.rand(tokens, generator=generator) < (number + 1) / 40
        rows = [is_first.nonzero().flatten(), (~is_first).nonzero().flatten().flip(0), torch.arange(0)]
        found, gradients = of_several(cases, rows, rank, size, is_split)
        sums = [torch.zeros_like(gradient) for gradient in gradients]
        for each, own in zip(cases[:2], rows, strict=False):
            kept = torch.zeros(tokens, dtype=dtype).index_fill(0, own, 1)
            alone, of_alone = of_kernel(each | {"upstream": each["upstream"] * kept}, rank, size, is_split)
            # Products in float64 are those of BLAS, of which a row depends on the number of rows.
            equal = torch.equal if dtype is torch.float32 else torch.allclose
            same &= all(equal(x[own], y[own]) for x, y in zip(found, alone, strict=True))
            sums = [total + part for total, part in zip(sums, of_alone, strict=True)]
        pairs = zip(gradients, sums, strict=True)
        worst = max([worst, *(float((x - y).abs().max() / y.abs().max().clamp(min=1e-9)) for x, y in pairs)])
    return same, worst


def of_several(cases, rows, rank, size, sequence_parallel):
    case, hidden = cases[0], cases[0]["hidden"].clone()
    share = case["weight"].chunk(size)[rank].clone().requires_grad_()
    hidden = (hidden.chunk(size)[rank].clone() if sequence_parallel else hidden).requires_grad_()
    taught = [
        (at, each["states"][at], TeacherHead(
            each["teacher"].chunk(size)[rank], each["temperatures"][1], each["softcaps"][1], each["divergence"]
        ))
        for each, at in zip(cases, rows, strict=True)
    ]  # fmt: skip
    scores = head_divergence(hidden, share, taught, case["targets"], options_of(case, sequence_parallel))
    return scores, torch.autograd.grad((scores.divergence * case["upstream"]).sum(), (hidden, share))


@pytest.mark.parametrize("size, dtype, tolerance", [(1, torch.float64, 1e-12), (2, torch.float32, 1e-5)])
def test_each_of_several_teachers_gives_its_tokens_what_it_gives_alone(size, dtype, tolerance):
    for same, worst in run_world(several, size, dtype):
        assert same and worst <= tolerance


@on_each_rank()
def test_wrong_sizes_and_tokens_without_a_teacher_are_rejected(rank):
    case = draw(6)
    with pytest.raises(ValueError, match="of the teacher's states"):
        of_kernel(case | {"states": case["states"][1:]}, rank, 1)
    with pytest.raises(ValueError, match="but teachers for"):
        of_several([case], [torch.arange(2)], rank, 1, False)
