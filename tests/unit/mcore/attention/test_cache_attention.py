"""Equal prompts of a step are computed once."""

import pytest
import torch

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.rollout.engines import NEVER, largest_gap, make_engine, make_requests, settings_of, texts
from tests.helpers.worlds import run_world


def with_twins(rank, may_share, shape, flags):
    """(responses to duplicate prompts, rows of the steps that were computed once)."""
    engine, model, _ = make_engine(flags, shape, max_requests=16)
    context, saved = engine.context, []
    plan, context._may_share = context._reads, context._may_share and may_share

    def watched():
        dedup, reads = plan()
        saved.append(0 if dedup is None else len(dedup.inverse) - len(dedup.kept_tokens))
        return dedup, reads

    context._reads = watched
    context.memory_buffer.fill_(float("nan"))
    some = make_requests()
    requests = [type(r)(some[i // 3].prompt, r.key, 1 + i % 5) for i, r in enumerate(some)]
    done = engine.generate(requests, NEVER, settings_of())
    gap = 0.0 if flags else largest_gap(model, requests, done, 1.0)
    return texts(done), [c.logprobs for c in done], sum(saved), gap


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_duplicate_prompts_are_prefilled_once(shape):
    once, alone = (run_world(with_twins, 1, may_share, shape, "")[0] for may_share in (True, False))
    assert once[2] > 100 > 0 == alone[2]
    assert once[:2] == alone[:2]
    assert once[3] <= largest_gap_allowed()


def test_each_pipeline_stage_prefills_duplicates_once():
    stages = run_world(with_twins, 2, True, "llama", "--pipeline-model-parallel-size 2")
    assert all(texts_and_more[:3] == run_world(with_twins, 1, True, "llama", "")[0][:3] for texts_and_more in stages)


def test_duplicates_are_whole_equal_prompts():
    """A request with older keys is not a duplicate; padding keeps its rows; too few rows are not deduplicated."""
    from megarl.mcore.attention.cache_attention import deduplicate_prefills

    text = torch.tensor([7, 8, 9, 7, 8, 9, 7, 8, 9, 5, 0, 0])
    queries, keys = torch.tensor([3, 3, 3, 1]), torch.tensor([3, 9, 3, 1])
    found = deduplicate_prefills(text, queries, keys)
    assert found.requests.tolist() == [0, 1, 3]
    assert found.kept_tokens.tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11]
    assert found.inverse.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 8]
    assert torch.equal(text[found.kept_tokens][found.inverse], text)
    assert deduplicate_prefills(text[:9], queries[:3], torch.tensor([3, 9, 8])) is None
    assert deduplicate_prefills(torch.tensor([4] * 6), torch.ones(6).long(), torch.ones(6).long()) is None
