"""Keyed random numbers and the tokens drawn with them."""

import pytest
import torch

from megarl.algorithms import token_sampling
from megarl.algorithms.token_sampling import (
    GOLDEN_GAMMA,
    SamplingSettings,
    inverse_cdf,
    restrict,
    sample_tokens_by_integers,
    signed,
    splitmix64,
    stream_keys,
    uniforms,
)

M64 = (1 << 64) - 1
BELOW_ONE = 1 - 2.0**-53


# -- numbers -----------------------------------------------------------------------------------------------------


def reference_splitmix64(state: int) -> int:
    """Steele, Lea, Flood 2014, with Python's integers."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def inverse_splitmix64(output: int) -> int:
    """The state whose output this is: every step of the hash can be undone."""

    def unshift(z, bits):
        x = z
        for _ in range(64 // bits):
            x = z ^ (x >> bits)
        return x

    z = unshift(output, 31)
    z = unshift((z * pow(0x94D049BB133111EB, -1, 1 << 64)) & M64, 27)
    return unshift((z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & M64, 30)


def number_of(output: int) -> float:
    """The uniform number that `uniforms` makes of this 64-bit output."""
    key = inverse_splitmix64(output) - GOLDEN_GAMMA
    return uniforms(torch.tensor([signed(key)]), torch.zeros(1, dtype=torch.int64)).item()


def outputs(seed: int, count: int) -> list[int]:
    steps = torch.arange(1, count + 1)
    return [z & M64 for z in splitmix64(signed(seed) + steps * signed(GOLDEN_GAMMA)).tolist()]


def test_known_answers():
    assert outputs(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_equals_the_reference_for_any_state():
    generator = torch.Generator().manual_seed(0)
    states = torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator)
    states[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    expected = [reference_splitmix64(s & M64) for s in states.tolist()]
    assert [z & M64 for z in splitmix64(states).tolist()] == expected
    assert [inverse_splitmix64(z) for z in expected] == [s & M64 for s in states.tolist()]


def test_numbers_are_inside_0_and_1_at_the_edges():
    assert 0.0 < number_of(0) < 1e-15
    assert 1 - 1e-15 < number_of(M64) < 1.0
    assert number_of(1 << 63) == pytest.approx(0.5, abs=1e-15)


def chi_square(numbers, bins: int) -> float:
    counts = torch.histc(numbers, bins, 0, 1)
    expected = len(numbers) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_numbers_are_uniform_along_a_stream_and_across_streams():
    """100 bins: the 0.1 % and 99.9 % points of chi-square with 99 degrees of freedom are 60 and 149."""
    count = 100_000
    one_key = stream_keys(1, 0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    along = uniforms(one_key.expand(count), torch.arange(count))
    keys = stream_keys(1, 3, torch.arange(count) // 8, torch.arange(count) % 8)
    across = uniforms(keys, torch.full((count,), 17))
    for numbers in (along, across):
        assert numbers.dtype == torch.float64
        assert 60 < chi_square(numbers, 100) < 149
        assert len(numbers.unique()) == count
    pairs = along[:-1] * 0.1 + (along[1:] * 10).floor() / 10  # neighbours: 10 by 10 cells
    assert 60 < chi_square(pairs, 100) < 149
    assert abs(float(torch.corrcoef(torch.stack([along, across]))[0, 1])) < 0.01


def test_a_random_number_depends_only_on_its_key():
    prompts, samples = torch.arange(6) // 2, torch.arange(6) % 2
    keys, positions = stream_keys(5, 9, prompts, samples), torch.tensor([3, 1, 4, 1, 5, 9])
    numbers = uniforms(keys, positions)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    assert torch.equal(uniforms(stream_keys(5, 9, prompts[order], samples[order]), positions[order]), numbers[order])
    for i in range(6):
        alone = uniforms(stream_keys(5, 9, prompts[i : i + 1], samples[i : i + 1]), positions[i : i + 1])
        assert alone.item() == numbers[i].item()
    torch.manual_seed(3)
    assert torch.equal(uniforms(keys, positions), numbers)


def test_every_part_of_the_key_counts():
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    keys = [stream_keys(seed, step, prompt, sample).item() for seed in (0, 1, -1, 2**63) for step in (0, 1)
            for prompt in (zero, one) for sample in (zero, one)]  # fmt: skip
    assert len(set(keys)) == len(keys) == 32
    assert uniforms(zero, zero).item() != uniforms(zero, one).item()


# -- tokens ------------------------------------------------------------------------------------------------------


def distribution(logits, settings):
    return restrict((logits / settings.temperature).softmax(-1), settings)


def draw(logits, numbers, settings):
    return token_sampling.sample_tokens(logits, (logits / settings.temperature).softmax(-1), numbers, settings)


SETTINGS = [
    SamplingSettings(), SamplingSettings(temperature=0.5), SamplingSettings(temperature=3.0),
    SamplingSettings(top_k=1), SamplingSettings(top_k=5), SamplingSettings(top_k=50), SamplingSettings(top_p=0.6),
    SamplingSettings(top_p=0.05), SamplingSettings(top_k=7, top_p=0.7, temperature=0.8), SamplingSettings(min_p=0.1),
    SamplingSettings(min_p=1.0), SamplingSettings(top_k=9, top_p=0.9, min_p=0.07, temperature=1.5),
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_tokens_that_transformers_keeps(settings):
    from transformers.generation import logits_process as theirs

    logits = 2 * torch.randn(200, 17, generator=torch.Generator().manual_seed(2))
    scores = theirs.TemperatureLogitsWarper(settings.temperature)(None, logits)
    if settings.top_k:
        scores = theirs.TopKLogitsWarper(settings.top_k)(None, scores)
    if settings.top_p < 1:
        scores = theirs.TopPLogitsWarper(settings.top_p)(None, scores)
    if settings.min_p:
        scores = theirs.MinPLogitsWarper(settings.min_p)(None, scores)
    kept, whole = distribution(logits, settings), (logits / settings.temperature).softmax(-1)
    assert torch.equal(kept > 0, scores > float("-inf"))
    assert torch.equal(kept[kept > 0], whole[kept > 0])


def test_top_k_of_equal_logits_keeps_k():
    kept = distribution(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), SamplingSettings(top_k=2))
    assert int((kept > 0).sum()) == 2


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_match_the_probabilities(settings):
    """Chi-square over the tokens that may come; its 99.99 % point with 16 degrees of freedom is 45."""
    count = 20_000
    logits = torch.randn(1, 17, generator=torch.Generator().manual_seed(2))
    numbers = uniforms(torch.full((count,), 77), torch.arange(count))
    tokens = draw(logits.expand(count, -1), numbers, settings)
    probabilities = distribution(logits, settings)[0].double()
    expected = probabilities / probabilities.sum() * count
    counts = torch.bincount(tokens, minlength=17)
    assert counts[expected == 0].sum() == 0
    allowed = expected > 0
    assert float(((counts - expected) ** 2 / expected)[allowed].sum()) < 45


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_smallest_and_the_largest_number_give_the_first_and_the_last_token(settings):
    logits = torch.randn(50, 17, generator=torch.Generator().manual_seed(3))
    logits[:, 0], logits[:, -1] = -1e30, -1e30
    tiny, large = torch.full((50,), 2.0**-54).double(), torch.full((50,), BELOW_ONE).double()
    firsts, lasts = draw(logits, tiny, settings), draw(logits, large, settings)
    for row, first, last in zip(distribution(logits, settings), firsts, lasts, strict=True):
        kept = row.nonzero()
        assert (first, last) == (kept.min(), kept.max())
    assert torch.equal(draw(logits, torch.ones(50).double(), settings), draw(logits, large, settings))


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    numbers = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999]).double()
    assert draw(logits.expand(6, -1), numbers, SamplingSettings()).tolist() == [0, 0, 1, 1, 2, 2]


def test_greedy_takes_the_likeliest_whatever_the_number():
    logits = torch.randn(40, 17, generator=torch.Generator().manual_seed(4))
    numbers = uniforms(torch.arange(40), torch.zeros(40, dtype=torch.int64))
    assert torch.equal(draw(logits, numbers, SamplingSettings(greedy=True)), logits.argmax(-1))
    assert torch.equal(draw(logits, numbers, SamplingSettings(top_k=1)), logits.argmax(-1))


def test_a_row_is_drawn_the_same_alone_and_in_a_batch():
    logits = torch.randn(30, 17, generator=torch.Generator().manual_seed(5))
    numbers = uniforms(torch.arange(30), torch.arange(30))
    settings = SamplingSettings(temperature=0.7, top_k=9, top_p=0.9)
    together = draw(logits, numbers, settings)
    assert together.tolist() == [draw(logits[i : i + 1], numbers[i : i + 1], settings).item() for i in range(30)]


def test_logits_are_not_changed():
    logits = torch.randn(4, 17, generator=torch.Generator().manual_seed(6))
    before = logits.clone()
    draw(logits, torch.full((4,), 0.5).double(), SamplingSettings(top_k=3, top_p=0.5, temperature=0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [64, 96, 512, 768, 1000, 4096 + 32])
def test_tokens_found_by_blocks_are_those_of_the_whole_cumulative_distribution(size):
    """Checked where no random number is within rounding of a border between two tokens."""
    generator = torch.Generator().manual_seed(size)
    weights = (3 * torch.randn(200, size, generator=generator)).softmax(-1) * 7
    weights[::2, : size // 2], weights[1::2, size // 2 :] = 0.0, 0.0  # whole blocks without mass
    numbers = torch.rand(200, generator=generator, dtype=torch.float64)
    shares = weights.double() / weights.double().sum(-1, keepdim=True)
    cumulative = shares.cumsum(-1)
    tokens = inverse_cdf(weights, numbers)
    above = cumulative.gather(1, tokens.unsqueeze(1)).squeeze(1)
    below = above - shares.gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (numbers < above + 1e-6).all() and (numbers > below - 1e-6).all()
    edges = torch.tensor([0.0, 1.0]).double()
    for row in weights[:4]:
        kept = row.nonzero().flatten().tolist()
        assert inverse_cdf(row.expand(2, -1), edges).tolist() == [kept[0], kept[-1]]
    assert [inverse_cdf(weights[i : i + 1], numbers[i : i + 1]).item() for i in range(200)] == tokens.tolist()


# -- sums of integers --------------------------------------------------------------------------------------------

RESTRICTED = [
    SamplingSettings(top_k=1), SamplingSettings(top_k=5), SamplingSettings(top_k=40), SamplingSettings(top_k=5000),
    SamplingSettings(top_p=0.5), SamplingSettings(top_p=0.03125), SamplingSettings(top_k=7, top_p=0.75),
    SamplingSettings(top_k=300, top_p=0.9375), SamplingSettings(), SamplingSettings(min_p=0.25),
    SamplingSettings(top_k=40, top_p=0.75, min_p=0.5),
]  # fmt: skip


def exact_weights(size: int, values: int, seed: int) -> torch.Tensor:
    """[64, size] weights with exact sums, of few values so that most are equal; the largest of a row is 1."""
    weights = torch.randint(0, values, (64, size), generator=torch.Generator().manual_seed(seed)) / 1024
    weights[torch.arange(64), torch.arange(64) % size] = 1.0
    return weights


@pytest.mark.parametrize("size", [17, 96, 1000])
@pytest.mark.parametrize("values", [2, 5, 900])
@pytest.mark.parametrize("settings", RESTRICTED, ids=str)
def test_integers_keep_the_tokens_that_floating_point_numbers_keep_also_of_equal_ones(settings, values, size):
    weights = exact_weights(size, values, seed=size + values)
    kept = token_sampling.restricted_integers(weights, settings)
    assert torch.equal(kept / token_sampling.UNIT, restrict(weights, settings).double())


@pytest.mark.parametrize("settings", [*RESTRICTED, SamplingSettings(greedy=True)], ids=str)
def test_integers_draw_the_tokens_that_floating_point_numbers_draw(settings):
    weights = exact_weights(512, 900, seed=3)
    numbers = uniforms(torch.arange(64), torch.arange(64))
    numbers[:3] = torch.tensor([0.0, BELOW_ONE, 1.0])
    logits, before = weights.log(), weights.clone()
    tokens = sample_tokens_by_integers(logits, weights, numbers, settings)
    assert torch.equal(tokens, token_sampling.sample_tokens(logits, weights, numbers, settings))
    assert torch.equal(weights, before)


def test_chunks_of_rows_draw_what_all_rows_draw(monkeypatch):
    weights, numbers = exact_weights(96, 900, seed=4), uniforms(torch.arange(64), torch.arange(64))
    settings = SamplingSettings(top_k=20, top_p=0.75)
    together = sample_tokens_by_integers(weights.log(), weights, numbers, settings)
    for rows in (1, 7, 64):
        monkeypatch.setattr(token_sampling, "CHUNK", rows * 96)
        assert torch.equal(sample_tokens_by_integers(weights.log(), weights, numbers, settings), together)


def test_integers_of_a_large_vocabulary_do_not_overflow():
    weights, numbers = torch.ones(1, 2**20 - 1), torch.tensor([BELOW_ONE], dtype=torch.float64)
    for settings in (SamplingSettings(), SamplingSettings(top_k=2**19, top_p=0.99)):
        token = sample_tokens_by_integers(weights, weights, numbers, settings)
        assert token == token_sampling.sample_tokens(weights, weights, numbers, settings)
