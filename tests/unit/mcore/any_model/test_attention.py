"""The attention function of modules of transformers: what it refuses, its slots, its scores written out; its caches."""

import math

import pytest
import torch
from torch import nn

from megarl.mcore.any_model import attention
from megarl.mcore.any_model.attention import CachePass, FirstPass, PackedPass, Unsupported
from megarl.mcore.attention.backends import eager
from megarl.mcore.attention.cache_attention import StepRequests
from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.model.decoder_layer import StepPlan
from tests.helpers.folders import any_measures, any_types, hf_layouts
from tests.helpers.rollout.engines import NEVER, assert_all_blocks_are_free, settings_of
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

HEADS, GROUPS, KEY, VALUE, WINDOW = 4, 2, 24, 16, 5
LENGTHS = (9, 1, 14)
TOKENS = sum(LENGTHS)


class Attention(nn.Module):
    """Stands for a module of transformers."""


def tensors(tokens=TOKENS):
    generator = torch.Generator().manual_seed(2)
    shapes = (HEADS, KEY), (GROUPS, KEY), (GROUPS, VALUE)
    return [torch.randn(1, heads, tokens, channels, generator=generator) for heads, channels in shapes]


def found_slots(window=None, **options):
    """A module whose one slot a first pass has found."""
    module = Attention()
    with attention.running(first := FirstPass()):
        attention.attention(module, *tensors(), None, sliding_window=window, **options)
    first.set_slots()
    return module


REFUSED = {
    "Attention makes an attention mask of its own": {"attention_mask": torch.ones(1)},
    "Attention attends to later tokens, too": {"is_causal": False},
    "Attention asks attention for block_indices, position_bias": {"position_bias": 1, "block_indices": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_module_asks_for_is_computed_or_refused(message):
    with attention.running(FirstPass()), pytest.raises(Unsupported) as error:
        attention.attention(Attention(), *tensors(), **{"attention_mask": None} | REFUSED[message])
    assert str(error.value) == message


def test_what_changes_no_score_and_what_is_none_is_taken():
    unread = dict.fromkeys(attention.UNREAD, 1)
    assert found_slots(**unread, position_bias=None, is_causal=True).attention_slots[0].window is None


def test_more_keys_than_tokens_and_modules_that_see_later_tokens_are_refused():
    query, key, value = tensors()
    with attention.running(FirstPass()):
        with pytest.raises(Unsupported, match=f"^Attention attends to {TOKENS} keys of 3 tokens$"):
            attention.attention(Attention(), query[:, :, :3], key, value, None)
        encoder = Attention()
        encoder.is_causal = False
        with pytest.raises(Unsupported, match="^Attention attends to later tokens, too$"):
            attention.attention(encoder, query, key, value, None)


def test_a_module_outside_of_a_pass_fails():
    with pytest.raises(RuntimeError, match="outside of a pass"):
        attention.attention(Attention(), *tensors(), None)


def test_each_call_of_a_module_has_a_slot_and_the_next_pass_begins_again():
    one, other = Attention(), Attention()
    with attention.running(first := FirstPass()):
        for module, window in ((one, None), (other, 3), (one, 7)):
            attention.attention(module, *tensors(), None, sliding_window=window, softcap=None if window else 2.0)
    first.set_slots()
    each = attention.Pass()
    found = [each.slot(module) for module in (one, other, one, one)]
    assert [slot.number for slot in found] == [0, 1, 2, 0]
    assert [slot.window for slot in found] == [None, 3, 7, None]
    assert [slot.has_score_options for slot in found] == [True, False, False, True]
    assert found[0].channels == 32 and found[0].heads == HEADS and found[0].groups == GROUPS


OPTIONS = {
    "plain": {},
    "scale": {"scaling": 0.3},
    "window": {"sliding_window": WINDOW},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"scaling": 0.3, "sliding_window": WINDOW, "softcap": 1.5, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def written_out(query, key, value, scaling=None, sliding_window=None, softcap=None, s_aux=None):
    """[T, H, V] of one sequence, query by query, in fp64."""
    out = torch.zeros(query.shape[2], HEADS, VALUE, dtype=torch.float64)
    for token in range(query.shape[2]):
        first = 0 if sliding_window is None else max(0, token - sliding_window + 1)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            keys = key[0, group, first : token + 1].double()
            scores = keys @ query[0, head, token].double() * (KEY**-0.5 if scaling is None else scaling)
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            sink = math.exp(s_aux[head]) if s_aux is not None else 0.0
            weights = scores.exp() / (scores.exp().sum() + sink)
            out[token, head] = weights @ value[0, group, first : token + 1].double()
    return out


def of_sequences(each, query, key, value, options):
    """`written_out` of packed sequences of some lengths."""
    parts = zip(*(x.split(each, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([written_out(*part, **options) for part in parts])


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences_have_the_scores_that_the_module_asks_for(name):
    options, qkv = OPTIONS[name], tensors()
    module = found_slots(options.get("sliding_window"), **{k: v for k, v in options.items() if k != "sliding_window"})
    layout = pack_sequences(torch.tensor(LENGTHS), window=WINDOW, plan=eager.plan_attention)
    with attention.running(PackedPass(TOKENS, layout=layout, backend=eager)):
        out, weights = attention.attention(module, *qkv, None, **options)
    assert weights is None and out.shape == (1, TOKENS, HEADS, VALUE)
    assert torch.allclose(out[0].double(), of_sequences(LENGTHS, *qkv, options), atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_prefill_and_a_step_after_it_read_the_cache(name):
    """One sequence of nine tokens, of which eight are read together, in blocks of four."""
    options, qkv = OPTIONS[name], tensors(9)
    window = options.get("sliding_window")
    module = found_slots(window, **{k: v for k, v in options.items() if k != "sliding_window"})
    cache, found, block = torch.zeros(5, 4, GROUPS, 2, 32), [], torch.tensor([[4, 1, 2]])
    for tokens in (slice(0, 8), slice(8, 9)):
        count = tokens.stop - tokens.start
        requests = StepRequests(torch.tensor([count]), torch.tensor([tokens.stop]), block, count, cache, window, None)
        reads, places = eager.plan_cache_reads(requests), torch.arange(tokens.start, tokens.stop)
        slots = block[0, places // 4] * 4 + places % 4
        plan = StepPlan(slots, None, None, (reads, reads), (cache,), eager.PagedAttention())
        with attention.running(CachePass(count, plan=plan)):
            found.append(attention.attention(module, *(x[:, :, tokens] for x in qkv), None, **options)[0][0])
    assert torch.allclose(torch.cat(found).double(), written_out(*qkv, **options), atol=1e-5)


def test_rows_that_fill_up_a_pass_are_no_keys_and_get_zeros():
    module, qkv = found_slots(), tensors()
    layout = pack_sequences(torch.tensor([TOKENS - 3]), plan=eager.plan_attention)
    with attention.running(PackedPass(TOKENS - 3, layout=layout, backend=eager)):
        out, _ = attention.attention(module, *qkv, None)
    wanted = written_out(*(x[:, :, : TOKENS - 3] for x in qkv))
    assert torch.allclose(out[0, :-3].double(), wanted, atol=1e-5) and not out[0, -3:].any()


# -- the engine's cache: shared prefixes, prompts in chunks and drafts change no bit -----------------------------------


PROMPTS = 3, 16, 37, 50  # of prompts
NEW = 24  # tokens of a response: over the borders of blocks and windows
CHUNKS = {"chunked_prefill": True, "step_tokens": 16}
WAYS = {
    "prefixes": {"prefix_caching": True},
    "chunks": CHUNKS,
    "drafts": {"speculative": True},
    "few": {"blocks": 12},  # of the cache: requests are evicted, and read again
    "all": {"prefix_caching": True, "speculative": True, **CHUNKS},
}


def in_ways(rank, folder, ways):
    """Without any way, and by way: tokens and log-probs of siblings, the second time that they are asked, if with a
    way; how many prompt tokens were read and how many drafted tokens accepted."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest

    torch.set_num_threads(1)
    engine = None
    role, groups, model, _ = hf_layouts.build(folder, any_measures.FLAGS, False, any_measures.LONGEST)
    vocabulary, found = role.model_vocab_size(0), {}
    prompts = [torch.arange(3, 3 + length).mul(7).remainder(vocabulary).tolist() for length in PROMPTS]
    asked = [GenerationRequest(prompt, key * 2 + n, NEW) for key, prompt in enumerate(prompts) for n in range(2)]
    for way in ("plain", *ways):
        options, size = dict(WAYS.get(way, {})), 0.02
        if blocks := options.pop("blocks", None):
            size = (getattr(engine.context, "_state_bytes", 0) + blocks * engine.context.block_size_bytes) / 2**30
        engine = RolloutEngine(model[0], groups.pg_collection, vocabulary, 128, size, 16, **options)
        if options.get("speculative"):  # as if looking for drafts took no time
            engine.drafter.costs = engine.drafter.costs._replace(looking=0.0, looking_row=0.0, drafting=0.0)
        for _ in range(2 if options else 1):
            done = engine.generate(asked, NEVER, settings_of(temperature=0.3))
        assert_all_blocks_are_free(engine)
        read = engine.context.lifetime_prefill_token_count
        found[way] = (
            [(x.tokens, x.logprobs) for x in done],
            read,
            engine.take_counts().accepted if "speculative" in options else 0,
        )
    return found


# Unlike layers that share keys; windows and sinks with experts; expanded latents.
# Convolutions, state spaces, delta rules.
KINDS = "gemma4_text", "gpt_oss", "longcat_flash", "lfm2", "bamba", "mamba2", "qwen3_next"
ENTRIES = {"gemma4_text": dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)}
ROWS = [(kind, ways) for kind in KINDS for ways in ("few all", "prefixes chunks drafts")]


@pytest.mark.parametrize(("kind", "ways"), by_default(ROWS, [(kind, "few all") for kind in ("gemma4_text", "lfm2")]))
def test_no_way_to_fill_a_cache_changes_a_bit(kind, ways, tmp_path):
    any_types.save(kind, tmp_path / kind, **ENTRIES.get(kind, {}))
    (found,) = run_world(in_ways, 1, tmp_path / kind, ways.split())
    plain, read, accepted = found.pop("plain")
    assert accepted == 0 and list(found) == ways.split()
    for way, (done, also_read, also_accepted) in found.items():
        assert done == plain, way
        assert "prefix_caching" not in WAYS[way] or also_read < read  # for twice as many
        assert "blocks" not in WAYS[way] or also_read > read
        assert "speculative" not in WAYS[way] or also_accepted > NEW
