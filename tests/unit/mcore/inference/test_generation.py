"""Requests: where their responses begin, and which random streams the samples of a branch share."""

from megarl.mcore.inference.generation import GenerationRequest, Trunk


def test_a_response_begins_after_what_was_asked():
    assert GenerationRequest([5, 6, 7], 1, 4).start == 3
    assert GenerationRequest([5, 6, 7, 8, 9], 1, 2, written=2).start == 3


def test_first_turns_have_the_stream_of_the_trunk():
    alone, branch = GenerationRequest([1], 7, 4), GenerationRequest([1], 7, 4, trunk=Trunk(key=3, turns=2))
    assert [alone.stream_of(turn) for turn in range(3)] == [7, 7, 7]
    assert [branch.stream_of(turn) for turn in range(3)] == [3, 3, 7]
    assert alone.trunk_of(0) is None is branch.trunk_of(2) and branch.trunk_of(1) == branch.trunk
