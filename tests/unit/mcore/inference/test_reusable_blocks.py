"""Blocks that outlive their request: turns of episodes find what the last one read and wrote, and no bit changes."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.tiny_models import build, build_stages
from tests.helpers.rollout.engine_turns import BLOCK, engine_of, make_episodes, play
from tests.helpers.rollout.engines import NEVER, are_same, largest_gap, make_requests, settings_of
from tests.helpers.tiers import long
from tests.helpers.worlds import on_each_rank, run_world

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EP2, SP = "--expert-model-parallel-size 2", "--sequence-parallel"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"
WINDOW = "--window-size 20,0 --window-attn-skip-freq 2"
STATES = {"shape": "recurrent"}
CHUNKS = {"chunked_prefill": True, "step_tokens": 24, "max_requests": 8}
SMALL = {"buffer_gb": 0.0002}  # 26 blocks of 16 tokens: those of three episodes
TINY = {"buffer_gb": 0.00012}  # 15 blocks
SMALL_STATES = {"buffer_gb": (16 * 8064 + 22 * 4096) / 2**30, "max_requests": 8}  # 22 blocks after 16 states


def with_and_without(rank, flags="", shape="llama", end=(3,), routes=False, episodes=None, sampling=None, **settings):
    """((episodes, counts of prefilled tokens) of an engine without reuse, the same with it, how many blocks the latter
    emptied, how many requests it evicted)."""
    stages, _, place = build_stages(flags, shape)
    found = []
    for options in ({}, {"prefix_caching": True, **settings}):
        engine = engine_of(stages[0], place, **options)
        blocks, emptied = engine.context.kv_block_allocator, []
        empty = blocks._deregister_blocks
        blocks._deregister_blocks = lambda ids, empty=empty, emptied=emptied: emptied.append(len(ids)) or empty(ids)
        made = make_episodes(**(episodes or {}))
        if len(place.replicas) > 1:  # with unequal work
            made = make_episodes(**{"count": 3 + 4 * place.dp_rank, **(episodes or {})})
        done = play(engine, made, end, sampling, routes)
        found.append((done, engine.take_counts()))
        assert blocks.available == blocks.total_count - 1, "some blocks are lost"
    return *found, sum(emptied), engine.engine.evicted_request_count


def assert_same(ours, theirs):
    """Requests, tokens, log-probs and routes of both, to the bit."""
    numbers = sorted(theirs.done)
    assert ours.sent == theirs.sent and sorted(ours.done) == numbers
    assert are_same([ours.done[number] for number in numbers], [theirs.done[number] for number in numbers])


@pytest.mark.parametrize(("ranks", "case"), [
    long((1, {})),
    long((1, {"end": NEVER})),
    (1, {"shape": "latent"}),
    (1, {"flags": WINDOW, "end": NEVER}),
    long((1, {"flags": EXPERTS, "routes": True})),
    long((2, {"flags": TP2})),
    long((2, {"flags": f"{EXPERTS} {TP2} {SP}", "routes": True})),
    long((2, {"flags": f"{EXPERTS} {PP2}", "routes": True})),
    long((2, {"flags": f"{EXPERTS} {EP2}", "routes": True})),
    long((4, {"flags": f"{EXPERTS} {TP2} {EP2} {SP}", "routes": True})),
    long((1, {"speculative": True})),
    (1, {"speculative": True, "flags": EXPERTS, "routes": True, "sampling": {"temperature": 0.2}}),
    (1, {"episodes": {"late": True}, "max_requests": 4}),
    (1, {**STATES, "episodes": {"late": True}}),
    long((1, {**STATES, "end": NEVER})),
    long((1, {**STATES, "flags": EXPERTS, "routes": True})),
    long((1, {**STATES, "speculative": True})),
    long((2, {**STATES, "flags": TP2})),
    long((2, {**STATES, "flags": f"{EXPERTS} {TP2} {SP}", "routes": True})),
    long((2, {**STATES, "flags": PP2})),
    (1, {"shape": "kimi", "episodes": {"late": True}}),
    long((2, {"shape": "ling", "flags": TP2, "speculative": True})),
    long((1, {"shape": "mamba", "episodes": {"late": True}})),
    long((2, {"shape": "mamba", "flags": TP2, "speculative": True})),
], ids=str)  # fmt: skip
def test_turns_read_only_what_is_new(ranks, case):
    """Recurrent states are continued at the end of the last prompt alone."""
    has_states = case.get("shape") in ("recurrent", "kimi", "ling", "mamba")
    for (plain, without), (found, counts), *lost in run_world(functools.partial(with_and_without, **case), ranks):
        assert_same(found, plain)
        prompts = sum(len(request.prompt) for request in plain.sent.values())
        expected = plain.found_states() if has_states else plain.found_again()
        assert without[-2:] == (prompts, 0) and lost == [0, 0]
        assert counts[-2:] == (prompts - expected, expected) and expected > (0.4 if has_states else 0.5) * prompts


@pytest.mark.parametrize(("ranks", "case"), [
    long((1, CHUNKS)),
    (1, {"episodes": {"siblings": 5, "late": True}}),
    long((1, {"episodes": {"siblings": 5}, "sampling": {"temperature": 0.2}, "speculative": True})),
    (1, {"episodes": {"siblings": 5}, "sampling": {"greedy": True}, "flags": EXPERTS, "routes": True, **CHUNKS}),
    long((2, {"episodes": {"siblings": 5}, "flags": f"{TP2} {SP}", "max_requests": 6})),
], ids=str)  # fmt: skip
def test_episodes_that_begin_or_go_on_alike(ranks, case):
    for (plain, without), (found, counts), _, _ in run_world(functools.partial(with_and_without, **case), ranks):
        assert_same(found, plain)
        assert without.reused == 0 and counts.read + counts.reused == without.read
        assert counts.reused > 0.8 * plain.found_again()  # in chunks, two may compute a block at the same time


@pytest.mark.parametrize(("ranks", "case"), [
    (1, {"episodes": {"siblings": 5, "late": True}}),
    long((1, {"episodes": {"siblings": 5}, "sampling": {"greedy": True}, **CHUNKS})),
    long((1, CHUNKS)), long((1, {"snapshots": 2})), long((1, {**SMALL_STATES})),
    long((1, {**SMALL_STATES, **CHUNKS, "step_tokens": 64, "snapshots": 3, "episodes": {"late": True}})),
    long((1, {"episodes": {"siblings": 5}, "sampling": {"temperature": 0.2}, "speculative": True, "snapshots": 4})),
    long((2, {"episodes": {"siblings": 5}, "flags": f"{TP2} {SP}", "max_requests": 8})),
    long((1, {"shape": "mamba", "episodes": {"siblings": 5, "late": True}, "snapshots": 3})),
    long((1, {"shape": "kimi", "episodes": {"siblings": 5, "late": True}, "snapshots": 3})),
], ids=str)  # fmt: skip
def test_states_of_few_slots_and_shared_prompts_change_no_bit(ranks, case):
    for result in run_world(functools.partial(with_and_without, **{**STATES, **case}), ranks):
        (plain, without), (found, counts), emptied, _ = result
        assert_same(found, plain)
        assert without.reused == 0 < counts.reused and (emptied > 0 or "buffer_gb" not in case)
        assert counts.read + counts.reused == without.read or "buffer_gb" in case


def shared_prompts(rank, **settings):
    """(gap, counts, snapshots) of groups that are admitted in several steps, and the same with other weights."""
    stages, _, place = build_stages("", "recurrent")
    engine, found = engine_of(stages[0], place, prefix_caching=True, max_requests=8, **settings), []
    prompts = [one.prompt * 2 for one in make_requests(12, 6)]
    requests = [replace(one, prompt=prompts[i // 4]) for i, one in enumerate(make_requests(12, 24))]
    for _ in range(2):
        done = engine.generate(requests, NEVER, settings_of(temperature=1.1))
        counts = engine.take_counts()
        found.append((largest_gap(stages[0], requests, done, 1.1), counts, len(engine.context.snapshots)))
        with torch.no_grad():
            for parameter in stages[0].parameters():
                parameter.mul_(1.1)
    lengths = [len(one.prompt) for one in requests]
    return found, sum(lengths), sum((n - 1) // BLOCK * BLOCK for n in lengths[::4])


def test_responses_to_a_prompt_continue_its_state_and_no_state_of_old_weights():
    ((found, tokens, kept),) = run_world(shared_prompts, 1)
    for gap, counts, snapshots in found:
        assert gap <= largest_gap_allowed() and counts[-2:] == (tokens - 3 * kept, 3 * kept) and kept > 0
        assert snapshots == 4  # one prompt is shorter than a block


@on_each_rank()
def test_a_snapshot_that_is_read_is_not_overwritten_and_some_token_is_read(rank):
    stages, _, place = build_stages("", "recurrent")
    first, other, again, shorter = make_requests(8, 5)[:4]
    prompts = first.prompt + list(range(1, 30)), list(range(30, 5, -1)) * 2
    first, again, shorter = (replace(one, prompt=prompts[0][:length])
                             for one, length in ((first, 30), (again, 30), (shorter, 16)))  # fmt: skip
    other, found = replace(other, prompt=prompts[1]), []
    for options in ({}, {"prefix_caching": True, "snapshots": 1}):
        engine, done = engine_of(stages[0], place, **options), {}
        with engine.session() as session, session.inference():
            for batch in ([first], [other, again, shorter]):
                for request in batch:
                    session.add(len(done) + len(session), request)
                while len(session):
                    done |= dict(session.step())
        found.append((done, engine.take_counts()))
    (plain, without), (found, counts) = found
    assert found == plain and without[-2:] == (30 + 50 + 30 + 16, 0)
    assert counts[-2:] == (without.read - 16, 16)  # by the one with the same prompt; the other one ends there


@pytest.mark.parametrize("case", [
    long(SMALL), long({**TINY, "max_requests": 4}), {**TINY, "episodes": {"late": True}},
    long({**SMALL, "flags": EXPERTS, "routes": True, "episodes": {"siblings": 5}}),
    long({**SMALL, "speculative": True, "episodes": {"siblings": 5}, "sampling": {"temperature": 0.2}}),
    long({"shape": "latent", "buffer_gb": 0.0001}), long({**SMALL, **CHUNKS, "step_tokens": 64}),
    {**SMALL, **CHUNKS, "step_tokens": 64, "flags": EXPERTS, "routes": True, "episodes": {"late": True}},
], ids=str)  # fmt: skip
def test_a_full_cache_changes_no_bit(case):
    (plain, without), (found, counts), emptied, evicted = run_world(functools.partial(with_and_without, **case), 1)[0]
    assert_same(found, plain)
    assert emptied > 20 and 0 < counts.reused < plain.found_again() and (evicted > 0 or "max_requests" in case)


def contents(rank, flags, shape, routes, **settings):
    """([(keys and values, routes) by hash] of blocks that were filled by decoding and of those that prefills filled,
    tokens of the texts, whole blocks of the first prompts)."""
    stages, _, place = build_stages(flags, shape)
    engine = engine_of(stages[0], place, prefix_caching=True, **settings)
    requests, blocks = make_requests(40, 8), engine.context.kv_block_allocator

    def filled(session, requests):
        done = {}
        for number, request in enumerate(requests):
            session.add(number, request)
        while len(session):
            with session.inference():
                done |= dict(session.step())
        caches = engine.context.layer_caches()
        found = {}
        for value, block in blocks.kv_hash_to_block_id.items():
            numbers = torch.stack([cache[block].flatten(1) for cache in caches])
            found[value] = numbers, blocks.routes[block].clone() if routes else None
        return [done[number].tokens for number in range(len(requests))], found

    with engine.session(settings=settings_of(temperature=0.5), routes=routes) as session:
        written, decoded = filled(session, requests)
        session.clear()
        texts = [[*one.prompt, *tokens] for one, tokens in zip(requests, written, strict=True)]
        again = [replace(one, prompt=text[:-1], max_new_tokens=1) for one, text in zip(requests, texts, strict=True)]
        ends, read = filled(session, again)
    assert ends == [[text[-1]] for text in texts], "the last token is drawn again"
    return decoded, read, [len(text) for text in texts], sum(len(one.prompt) // BLOCK for one in requests)


@pytest.mark.parametrize(("ranks", "flags", "shape", "routes", "settings"), [
    (1, "", "llama", False, {}), (1, "", "latent", False, {}), (1, WINDOW, "llama", False, {}),
    (1, EXPERTS, "llama", True, {}), (1, "", "llama", False, {"speculative": True}), long((2, TP2, "llama", False, {})),
    long((1, EXPERTS, "llama", True, {"speculative": True})),
])  # fmt: skip
def test_decoded_blocks_hold_what_a_prefill_computes(ranks, flags, shape, routes, settings):
    work = functools.partial(contents, flags=flags, shape=shape, routes=routes, **settings)
    for decoded, read, lengths, of_prompts in run_world(work, ranks):
        assert decoded.keys() == read.keys()
        assert 64 in lengths, "a text that fills its last block: that block has a token without keys"
        assert len(decoded) == sum((length - 1) // BLOCK for length in lengths) > 2 * of_prompts
        for value, (keys, experts) in decoded.items():
            assert torch.equal(keys, read[value][0]) and keys.abs().sum(-1).all()
            assert experts is None or torch.equal(experts, read[value][1]) and (experts >= 0).all()


def overtaken(rank, **settings):
    """(completions, counts) without and with reuse, of requests whose prompts others are about to write."""
    model, _, place = build()
    writers = make_requests(60, 5)
    written = engine_of(model, place).generate(writers, NEVER, settings_of())
    texts = [[*one.prompt, *done.tokens] for one, done in zip(writers, written, strict=True)]
    readers = [replace(writers[i], prompt=text[:length], max_new_tokens=20)
               for length in (30, 45, 47, 48, 49, 56) for i, text in enumerate(texts)]  # fmt: skip
    requests = [*(replace(one, max_new_tokens=20 + 7 * i) for i, one in enumerate(writers)), *readers, *writers]
    found = []
    for options in ({}, {"prefix_caching": True, **settings}):
        engine = engine_of(model, place, **options)
        found.append((engine.generate(requests, NEVER, settings_of()), engine.take_counts()))
    return found


@pytest.mark.parametrize("settings", [
    long({}), long({"max_requests": 6}), long(CHUNKS), {**CHUNKS, "step_tokens": 13}, long({**CHUNKS, **SMALL}),
    long({"speculative": True}), long(TINY),
], ids=str)  # fmt: skip
def test_prompts_that_others_are_writing(settings):
    (plain, without), (found, counts) = run_world(functools.partial(overtaken, **settings), 1)[0]
    assert found == plain and counts.reused > 0
    assert counts.read + counts.reused == without.read or "buffer_gb" in settings


def aborted(rank):
    """(tokens of an aborted request, completion of a request that continues them and of the whole one, counts)."""
    model, _, place = build()
    engine = engine_of(model, place, prefix_caching=True)
    request, written, done = make_requests(60, 5)[1], [], {}
    with engine.session() as session, session.inference():
        session.add(0, request)
        while len(written) < 40:
            session.step()
            (written,) = [chunk.tokens for chunk in session.new_tokens({0: 0})]
        session.abort([0])
        assert session.step() == [] and not len(session)
        session.add(1, replace(request, prompt=[*request.prompt, *written], max_new_tokens=20))
        while len(session):
            done |= dict(session.step())
    counts = engine.take_counts()
    (whole,) = engine.generate([request], NEVER, settings_of())
    return written, done[1], whole, counts, len(request.prompt)


def test_what_an_aborted_request_wrote_is_found():
    written, rest, whole, counts, prompt = run_world(aborted, 1)[0]
    assert len(written) == 40 and written + rest.tokens == whole.tokens and rest.logprobs == whole.logprobs[40:]
    assert prompt + len(written) == 64 and counts[-2:] == (24 + 16, 48)  # some token has to be read


@on_each_rank()
def test_the_oldest_blocks_are_emptied_first_and_the_last_ones_of_a_text_before_those(rank):
    model, _, place = build()
    blocks = engine_of(model, place, prefix_caching=True, **TINY).context.kv_block_allocator
    first, second = blocks.allocate_memory_blocks(3).clone(), blocks.allocate_memory_blocks(2).clone()
    blocks.register_kv_block_hashes(first.tolist(), [11, 12, 13])
    blocks.register_kv_block_hashes(second.tolist(), [11, 22])  # the first block has the same tokens
    known = [dict(blocks.kv_hash_to_block_id)]
    free = [blocks.total_avail]
    for released in (first, second):
        blocks.release_memory_blocks(released)
        free.append(blocks.total_avail)
    blocks.block_ref_counts[first[0].long()] += 1  # used again, and left
    blocks.release_memory_blocks(first[:1])
    for count in (1, 1, 1, 1):
        assert blocks.evict_lru_blocks(count)
        known.append(dict(blocks.kv_hash_to_block_id))
    assert not blocks.evict_lru_blocks(1) and blocks.total_avail == blocks.total_count - 1
    count, first, second = blocks.total_count, first.tolist(), second.tolist()
    assert known[0] == {11: first[0], 12: first[1], 13: first[2], 22: second[1]}
    assert free == [count - 6, count - 6, count - 5], "a block that nothing can find is free at once"
    assert [set(one) for one in known[1:]] == [{11, 12, 22}, {11, 22}, {11}, set()]
