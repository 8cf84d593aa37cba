"""The compiled kernels: PyTorch's results, and a row's bits that depend on nothing but the row."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from megarl.mcore.kernels import native
from megarl.mcore.kernels.linear import weight_gradient
from megarl.mcore.kernels.native import build
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.skipif(not native.is_built(), reason="no compiled kernels: no C++ compiler, or CUDA")
ROWS = [1, 2, 3, 4, 5, 7, 11, 12, 13, 25, 193]  # around the sizes of a tile and of a block
FEW = list(itertools.product([1, 17, 64, 100, 300], [1, 16, 33, 320]))  # inner size, columns


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


def assert_fits(found: torch.Tensor, wanted: torch.Tensor, terms: int = 1):
    """A tolerance for sums of so many terms, relative to the largest element."""
    assert found.dtype is torch.float32
    assert_close(found.double(), wanted.double(), rtol=0, atol=2e-6 * terms**0.5 * float(wanted.abs().max()))


# -- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "columns"), FEW)
def test_products_equal_exact_ones_and_each_row_has_its_own_bits(inner, columns):
    x, weight, bias = torch.randn(193, inner), torch.randn(columns, inner), torch.randn(columns)
    packed = native.ops.pack_weight(weight)
    found = native.ops.linear(x, weight, packed, bias)
    assert_fits(found, functional.linear(x.double(), weight.double(), bias.double()), inner)
    assert torch.equal(native.ops.linear(x, weight, None, bias), found)
    assert torch.equal(native.ops.linear(x, weight.t().contiguous().t(), None, bias), found)  # in other strides
    for rows in ROWS:
        assert torch.equal(native.ops.linear(x[:rows], weight, packed, bias), found[:rows])
        assert torch.equal(native.ops.linear(x[-rows:].clone(), weight, None, bias), found[-rows:])


def test_a_long_inner_size_is_summed_in_one_order():
    x, weight, bias = torch.randn(9, 3000), torch.randn(70, 3000), torch.randn(70)  # several blocks
    packed = native.ops.pack_weight(weight)
    found = native.ops.linear(x, weight, packed, bias)
    assert torch.equal(native.ops.linear(x, weight, None, bias), found)
    assert torch.equal(native.ops.linear(x[4:5].clone(), weight, packed, bias), found[4:5])
    assert_fits(found, functional.linear(x.double(), weight.double(), bias.double()), 3000)


@pytest.mark.parametrize("tokens", [1, 30, 2500])
def test_weight_gradients_equal_exact_ones_and_add_up(tokens):
    grad, x = torch.randn(tokens, 2 * 37)[:, ::2], torch.randn(tokens, 70)
    wanted = grad.double().t() @ x.double()
    found = weight_gradient(grad, x)
    assert_fits(found, wanted, tokens)
    native.ops.add_weight_gradient(found, grad, x)
    assert_fits(found, 2 * wanted, tokens)


def test_a_weight_gradient_of_no_tokens_is_zero():
    assert weight_gradient(torch.randn(0, 3), torch.randn(0, 5)).tolist() == [[0.0] * 5] * 3


# -- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 15, 16, 64, 100, 257])
def test_norms_and_swiglu_equal_torchs_and_each_row_has_its_own_bits(width):
    x, weight = torch.randn(300, 2 * width) * 4, torch.randn(width)
    narrow = x[:, :width].contiguous()
    normed, scales = native.ops.rms_norm(narrow, weight, 1e-5)
    assert_fits(normed, functional.rms_norm(narrow.double(), (width,), weight.double(), 1e-5))
    assert_fits(scales, narrow.double().square().mean(-1, keepdim=True).add(1e-5).rsqrt())
    product = native.ops.swiglu(x)
    assert_fits(product, functional.silu(x[:, :width].double()) * x[:, width:].double())
    for rows in ROWS:
        assert torch.equal(native.ops.rms_norm(narrow[rows : 2 * rows], weight, 1e-5)[0], normed[rows : 2 * rows])
        assert torch.equal(native.ops.swiglu(x[rows : 2 * rows]), product[rows : 2 * rows])


def test_swiglus_gradient_equals_autograds():
    x, grad = (torch.randn(5, 200) * 30).double().requires_grad_(), torch.randn(5, 100)
    gate, up = x.chunk(2, -1)
    (wanted,) = torch.autograd.grad(functional.silu(gate) * up, x, grad.double())
    assert_fits(native.ops.swiglu_backward(grad, x.detach().float()), wanted)


def test_extreme_inputs_give_finite_products_and_nan_stays_nan():
    gate = torch.tensor([-3e38, -200.0, -88.5, -87.0, -0.0, 0.0, 88.5, 200.0, 3e38, float("nan")])
    found = native.ops.swiglu(torch.cat([gate, torch.ones(10)])[None])[0]
    assert found[:-1].isfinite().all() and found[-1].isnan()
    assert_close(found[4:-1], functional.silu(gate[4:-1]))
    assert found[:4].abs().max() < 2e-36
    slopes = native.ops.swiglu_backward(torch.ones(1, 10), torch.cat([gate, torch.ones(10)])[None])[0]
    assert slopes[[*range(9), *range(10, 19)]].isfinite().all() and slopes[:4].abs().max() < 2e-36


def test_softmax_sums_equal_exact_ones_and_drop_padding():
    logits = torch.randn(6, 1000) * 5
    tops, weights = logits.amax(-1), torch.empty(6, 1000)
    sums = native.ops.softmax_sums(logits, tops, weights, 3)
    shifted = logits.double() - tops.double().unsqueeze(-1)
    exact = shifted.exp()
    assert_fits(weights, exact)
    for found, wanted in zip(sums, (exact.sum(-1), (shifted * exact).sum(-1), exact.square().sum(-1)), strict=True):
        assert_fits(found, wanted, 8)
    padded = torch.cat([logits, torch.full((6, 24), -1e30)], dim=-1)
    for count in (1, 2):
        assert torch.equal(native.ops.softmax_sums(logits, tops, torch.empty_like(logits), count), sums[:count])
    assert torch.equal(native.ops.softmax_sums(padded, tops, padded, 3), sums)  # in place
    assert torch.equal(padded[:, :1000], weights) and not padded[:, 1000:].any()


# -- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "parts"), [(5, 1), (1000, 1), (1000, 2), (1024, 2)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_are_those_of_the_inverse_cdf(vocab, parts, temperature):
    logits = torch.randn(200, 1024) * 3
    numbers = torch.rand(200, dtype=torch.float64)
    tokens, chosen, totals = native.ops.sample(logits, temperature, vocab, parts, numbers)
    scaled = logits[:, :vocab].double() / temperature
    cumulative = scaled.softmax(-1).cumsum(-1)
    before = torch.cat([cumulative.new_zeros(200, 1), cumulative], dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    after = cumulative.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert ((before - 1e-5 <= numbers) & (numbers <= after + 1e-5)).all()
    logprobs = chosen - totals.sum(-1).log()
    assert_close(logprobs.double(), scaled.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1), atol=1e-5, rtol=0)


def test_without_numbers_the_most_probable_token_is_taken():
    logits = torch.randn(50, 77)
    tokens, *_ = native.ops.sample(logits, 1.0, 70, 1, torch.empty(0, dtype=torch.float64))
    assert torch.equal(tokens, logits[:, :70].argmax(-1))


@pytest.mark.parametrize("number", [1e-300, 1 - 2**-53])
def test_extreme_numbers_take_a_token_with_weight(number):
    logits = torch.full((1, 600), -1e30)
    logits[0, [3, 590]] = 0.0
    tokens, *_ = native.ops.sample(logits, 1.0, 600, 1, torch.tensor([number], dtype=torch.float64))
    assert tokens.item() == (3 if number < 0.5 else 590)


# -- threads -----------------------------------------------------------------------------------------------------


def results(threads):
    """Results of every kernel on inputs large enough for several threads."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    x, weight, few = torch.randn(700, 128), torch.randn(330, 128), torch.randn(70, 128)
    heads, indices = torch.randn(3, 700, 2, 64), torch.arange(700).view(7, 100)
    logits, numbers = torch.randn(64, 3000), torch.rand(64, dtype=torch.float64)
    attended, turned, sums = torch.empty(700, 2, 64), torch.empty(700, 2, 64), torch.empty(700, 2)
    scores, real = (0.1, 60, 3.0), torch.arange(700)
    native.ops.segment_attention(*heads, indices, indices, None, real, *scores, few[0, :2].clone(), attended, sums)
    native.ops.rotate(heads[0], *heads[1:, :, 0].contiguous(), False, turned)
    grads = [torch.zeros_like(x) for x in heads]
    native.ops.segment_attention_backward(
        heads[2], *heads, indices, indices, None, real, attended, sums, *scores, *grads
    )
    return [
        *(native.ops.linear(x, w, None, None) for w in (weight, weight[:40])),
        weight_gradient(native.ops.linear(x, weight, None, None), x),
        native.ops.linear(few[:4], weight, None, None),
        *native.ops.rms_norm(x.repeat(9, 1), few[0], 1e-5),
        native.ops.swiglu(x.repeat(9, 1)),
        *native.ops.sample(logits, 1.0, 3000, 1, numbers),
        attended,
        turned,
        *grads,
    ]


def results_with_threads(rank):
    return results(2)  # in a world's process: a process that has started threads cannot be forked


def test_threads_change_no_bit():
    for one, two in zip(results(1), run_world(results_with_threads, 1)[0], strict=True):
        assert torch.equal(one, two)


# -- instruction sets ---------------------------------------------------------------------------------------------

# Runs tests with another library of kernels: the first argument.
WITH_LIBRARY = """
import sys
from pathlib import Path
import pytest
from megarl.mcore.kernels import native
native.library_path = lambda: Path(sys.argv[1])
assert native.is_built()
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.long
@pytest.mark.parametrize("march", ["haswell", "x86-64-v2"])
def test_the_kernels_for_avx2_and_for_other_processors_pass_the_same_tests(march, tmp_path, monkeypatch):
    """Vectors, tiles and blocks have other sizes there; the second has neither AVX nor fused multiply-adds."""
    monkeypatch.setenv("MEGARL_KERNELS_MARCH", march)
    library = tmp_path / "other.so"
    assert build.build(native.SOURCES, library) is None
    folders = Path(__file__).parents[1]
    tests = [folders / "kernels/test_native.py", folders / "kernels/cuda/test_segment_attention.py",
             *(folders / f"attention/test_{name}.py" for name in ("native_attention", "segments", "long_sequences")),
             folders / "attention/backends/test_eager.py", folders / "inference/test_exact_rollout.py"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WITH_LIBRARY, library, *tests], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
