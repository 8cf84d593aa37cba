"""The engine of a server: every request gets the bits that it gets alone, whatever happens beside it."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.helpers.folders import any_types, hf_layouts
from tests.helpers.models.tiny_models import VOCAB
from tests.helpers.rollout.engines import NEVER, make_engine, make_requests, settings_of
from tests.helpers.rollout.served_engines import generate, steps
from tests.helpers.server.server_clients import completions_of
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import run_world

EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32"


def various_requests(limit=12, count=20):
    """Requests of which each has settings, end tokens and a number of top log-probs of its own."""
    kinds = [
        {}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}, {"greedy": True},
        {"temperature": 0.7},
    ]  # fmt: skip
    ends, tops, found = ((), (3, 5), (7,)), (0, 1, 4), []
    for i, request in enumerate(make_requests(limit, count)):
        sampling = settings_of(**kinds[i % len(kinds)])
        found.append(replace(request, sampling=sampling, end_ids=ends[i % 3], top_logprobs=tops[i % 3]))
    return found


def make_served(flags="", shape="llama", load_weights=None, **settings):
    """(served engine, model, role groups)."""
    from megarl.serving.served_engine import ServedEngine

    engine, model, groups = make_engine(flags, shape, **settings)
    return ServedEngine(engine, NEVER, load_weights=load_weights), model, groups


def alone(engine, request):
    """The completion of a request that has the engine for itself, with its settings as those of the call."""
    plain = replace(request, sampling=None, end_ids=None, top_logprobs=0)
    return engine.generate([plain], request.end_ids, request.sampling)[0]


def scores_of(model, groups, sequences):
    """Scores of (tokens, temperature, top log-probs) by a model of one stage, all of one temperature."""
    from megarl.mcore.model.gpt import ModelChunks
    from megarl.serving.served_engine import ScorePrompt, score_sequences

    asked = [ScorePrompt(*sequence) for sequence in sequences]
    return score_sequences(ModelChunks([model]), groups.pg_collection, VOCAB, asked)


def blocks(engine):
    """(free blocks of the cache, all of them but the spare one)."""
    return engine.free_blocks, engine.context.kv_block_allocator.total_count - 1


def together_and_alone(rank, flags="", shape="llama", **settings):
    """Completions of various requests together, and of each alone."""
    served, _, _ = make_served(flags, shape, **settings)
    requests = various_requests()
    done = generate(served, requests)
    served.pause("abort")
    return done, [alone(served.rollout_engine, request) for request in requests], blocks(served.rollout_engine)


@pytest.mark.parametrize(("size", "flags", "shape"), [
    long((1, "", "llama")), long((1, "", "gpt2")), (1, EXPERTS, "llama"),
    long((2, "--tensor-model-parallel-size 2", "llama")), (2, "--pipeline-model-parallel-size 2", "llama"),
])  # fmt: skip
def test_requests_with_own_settings_get_the_bits_that_they_get_alone(size, flags, shape):
    for done, expected, (free, total) in run_world(together_and_alone, size, flags, shape):
        assert done == expected and len({len(completion.tokens) for completion in done}) > 1
        assert any(completion.finished for completion in done) and free == total


def test_few_places_and_little_cache_change_nothing():
    """Requests wait, are evicted, and take the ids of others."""
    full = run_world(together_and_alone, 1)
    assert run_world(functools.partial(together_and_alone, max_requests=4), 1)[0][0] == full[0][0]
    assert run_world(functools.partial(together_and_alone, buffer_gb=0.0001), 1)[0][0] == full[0][0]


def scored(rank, flags, shape="llama"):
    """(completions, scores of prompt and response of each) of various requests; temperature 1 where greedy."""
    served, model, groups = make_served(flags, shape)
    requests = various_requests()
    done = generate(served, requests)
    served.pause()
    return requests, done, [score for r, c in zip(requests, done, strict=True) for score in scores_of(
        model, groups, [([*r.prompt, *c.tokens], r.sampling.temperature, r.top_logprobs)])]  # fmt: skip


@pytest.mark.parametrize(("size", "flags", "shape"), [
    long((1, "", "llama")), (1, EXPERTS, "llama"), (1, "--final-logit-softcapping 5.0", "llama"),
    (2, "--tensor-model-parallel-size 2", "llama"),
])  # fmt: skip
def test_scores_of_a_response_are_its_log_probs_to_the_bit(size, flags, shape):
    for requests, done, scores in run_world(scored, size, flags, shape):
        for request, completion, score in zip(requests, done, scores, strict=True):
            start = len(request.prompt)
            assert score.logprobs[0] is None and score.logprobs[start:] == completion.logprobs
            assert bool(request.top_logprobs) == bool(completion.top_logprobs) == bool(score.top)
            if request.top_logprobs:
                assert score.top[start:] == completion.top_logprobs
                check_top(request, completion)


def check_top(request, completion):
    """Top log-probs are the largest, in descending order, and a sampled token among them has its log-prob."""
    for token, logprob, best in zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True):
        values = [value for _, value in best]
        assert len(best) == request.top_logprobs and values == sorted(values, reverse=True)
        assert dict(best).get(token, logprob) == logprob <= values[0]


def test_several_sequences_are_scored_in_one_pass():
    def passes(rank):
        from megarl.serving.served_engine import ScorePrompt, together

        _, model, groups = make_served()
        requests = [ScorePrompt(request.prompt, 1.0, i % 3) for i, request in enumerate(make_requests())]
        one = [scores_of(model, groups, [request[:3]])[0] for request in requests]
        first_two = len(requests[0].prompt) + len(requests[1].prompt)
        counts = [together(requests, tokens) for tokens in (1, first_two, 10**6)]
        other = [*requests[:2], requests[2]._replace(temperature=2.0)]
        return one == scores_of(model, groups, [each[:3] for each in requests]), counts, together(other, 10**6)

    assert run_world(passes, 1) == [(True, [1, 2, 20], 2)]


def interrupted(rank, flags, shape, mode, **settings):
    """(chunks with a pause after some steps, chunks without one, free and all blocks while paused)."""
    served, _, _ = make_served(flags, shape, **settings)
    requests = various_requests()
    plain = sum(steps(served, requests), [])
    chunks = []
    for number, found in enumerate(steps(served, requests)):
        chunks += found
        if number in (1, 2, 5):
            chunks += served.pause(mode)
            paused = served.is_paused, blocks(served.rollout_engine)
            served.resume()
    return chunks, plain, paused


@pytest.mark.parametrize(("flags", "shape", "mode"), [
    ("", "llama", "keep"), (EXPERTS, "llama", "wait"), long(("", "gpt2", "keep")), long(("", "llama", "wait")),
    long((EXPERTS, "llama", "keep")), long(("", "gpt2", "wait")),
])  # fmt: skip
def test_a_pause_changes_no_bit(flags, shape, mode):
    ((chunks, plain, (paused, (free, total))),) = run_world(interrupted, 1, flags, shape, mode)
    assert completions_of(chunks, 20) == completions_of(plain, 20) and paused and free == total


@pytest.mark.parametrize("settings", [{}, long({"max_requests": 4}), long({"buffer_gb": 0.0001})])
def test_aborted_requests_free_their_cache_and_leave_the_others_alone(settings):
    def run(rank):
        served, _, _ = make_served(**settings)
        requests = various_requests()
        expected, dropped, chunks = generate(served, requests), set(), []
        served.pause("abort")
        for number, found in enumerate(steps(served, requests, dropped)):
            chunks += found
            if number == 2:
                dropped |= {1, 4, 6, 13, 19}
                served.abort(dropped)
                after = len(chunks)
        late = {chunk.number for chunk in chunks[after:]} & dropped
        kept = {n: [t for c in chunks if c.number == n for t in c.tokens] for n in range(20) if n not in dropped}
        ended = {chunk.number for chunk in chunks if chunk.finish_reason}
        same = [expected[n].tokens == tokens for n, tokens in kept.items()]
        return late, same, ended >= set(kept), blocks(served.rollout_engine)

    ((late, same, ended, (free, total)),) = run_world(run, 1)
    assert not late and all(same) and ended and free == total


def test_an_aborting_pause_ends_every_request():
    def run(rank):
        served, _, _ = make_served()
        served.resume()
        for number, request in enumerate(make_requests()):
            served.add(number, request)
        first = served.step()
        chunks = served.pause("abort")
        ends = sorted((c.number, c.finish_reason, c.tokens) for c in chunks)
        return len(first), ends, len(served), blocks(served.rollout_engine)

    ((first, ends, left, (free, total)),) = run_world(run, 1)
    assert first == 20 and ends == [(n, "abort", []) for n in range(20)] and left == 0 and free == total


def test_each_token_has_the_log_prob_of_its_version_of_the_weights():
    def run(rank):
        def change(path):
            with torch.no_grad():
                for parameter, values in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(values * 1.1 ** int(path))

        served, model, groups = make_served(load_weights=change)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        requests, chunks, scores = various_requests(limit=20), [], {}
        for number, found in enumerate(steps(served, requests)):
            chunks += found
            if number in (3, 9):
                version = served.version + 1
                served.update_weights(str(version))
                assert served.version == version
        done = completions_of(chunks, 20)
        served.pause()
        for version in range(3):
            change(version)
            sequences = [([*r.prompt, *c.tokens], r.sampling.temperature, 0) for r, c in zip(requests, done)]
            scores[version] = [scores_of(model, groups, [sequence])[0].logprobs for sequence in sequences]
        return requests, done, scores

    ((requests, done, scores),) = run_world(run, 1)
    versions = {version for completion in done for version in completion.versions}
    assert versions == {0, 1, 2} and any(len(set(c.versions)) == 3 for c in done)
    for number, (request, completion) in enumerate(zip(requests, done, strict=True)):
        start = len(request.prompt)
        expected = [scores[version][number][start + i] for i, version in enumerate(completion.versions)]
        assert completion.logprobs == expected
        others = [scores[(version + 1) % 3][number][start + i] for i, version in enumerate(completion.versions)]
        assert max(abs(a - b) for a, b in zip(completion.logprobs, others, strict=True)) > 1e-3


def test_an_engine_that_cannot_change_weights_says_so():
    def run(rank):
        served, _, _ = make_served()
        with pytest.raises(RuntimeError, match="without a source of weights"):
            served.update_weights("x")

    run_world(run, 1)


# -- models of transformers --------------------------------------------------------------------------------------


def served_module(rank, kind, folder):
    """Completions of requests with a common beginning, with and without prefix caching, and tokens found in it."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.serving.served_engine import ServedEngine

    any_types.save(kind, folder)
    role, groups, (model,), _ = hf_layouts.build(folder, "--model-source transformers", False)
    beginning, *ends = torch.arange(3, 3 + 80).split([50, 20, 10])
    prompts = [beginning, torch.cat([beginning, ends[0]]), torch.cat([beginning, ends[1]]), beginning]
    requests = [replace(each, prompt=prompts[i % 4].tolist()) for i, each in enumerate(make_requests(12, 12))]
    done, found = [], []
    for shares in (True, False):
        # Four at a time: the others wait until some have ended.
        engine = RolloutEngine(
            model, groups.pg_collection, role.model_vocab_size(0), 100, 0.02, 4, prefix_caching=shares
        )
        done.append(generate(ServedEngine(engine, NEVER), requests))
        found.append(engine.take_counts().reused)
    return done, found


@pytest.mark.parametrize("kind", by_default(["gemma2", "gemma4_text", "qwen3_moe"], ["gemma2"]))
def test_a_served_module_of_transformers_has_the_bits_of_one_without_hits_in_the_cache(kind, tmp_path):
    (((with_hits, without), (found, none)),) = run_world(served_module, 1, kind, tmp_path / kind)
    assert found >= 8 * 48 and none == 0  # two rounds of four requests find three blocks of 16 each
    assert with_hits == without and all(len(each.logprobs) == 12 for each in with_hits)
