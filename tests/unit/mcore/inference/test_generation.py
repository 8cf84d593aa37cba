"""Requests: where their responses begin, and which random streams the samples of a branch share. A response that is
stopped: what there is of it, and the request for the rest."""

from megarl.mcore.inference.generation import Completion, GenerationRequest, Response, Span, Trunk


def test_a_response_begins_after_what_was_asked():
    assert GenerationRequest([5, 6, 7], 1, 4).start == 3
    assert GenerationRequest([5, 6, 7, 8, 9], 1, 2, written=2).start == 3


def test_first_turns_have_the_stream_of_the_trunk():
    alone, branch = GenerationRequest([1], 7, 4), GenerationRequest([1], 7, 4, trunk=Trunk(key=3, turns=2))
    assert [alone.stream_of(turn) for turn in range(3)] == [7, 7, 7]
    assert [branch.stream_of(turn) for turn in range(3)] == [3, 3, 7]
    assert alone.trunk_of(0) is None is branch.trunk_of(2) and branch.trunk_of(1) == branch.trunk


def stopped() -> Response:
    """Six of at most nine tokens, by the weights 3, 3 and 5, of a request with a token that was written before."""
    response = Response(GenerationRequest([1, 2, 3, 40], key=7, max_new_tokens=9, written=1))
    for tokens, weights in (([41, 42], 3), ([], 4), ([43], 3), ([44, 45, 46], 5)):
        response.take(Completion(tokens, [-t / 10 for t in tokens], False), weights)
    return response


def test_the_request_for_the_rest_says_where_the_response_begins():
    response = stopped()
    assert response.spans[0] == Span(3, [41, 42, 43], [-4.1, -4.2, -4.3]) and len(response.spans) == 2
    rest = response.request()
    assert rest.prompt == [1, 2, 3, 40, 41, 42, 43, 44, 45, 46] and rest.start == 3 and rest.written == 7
    assert (rest.key, rest.max_new_tokens) == (7, 3) and response.request(2).max_new_tokens == 2
    assert response.asked.prompt == [1, 2, 3, 40], "the first request stays as it is"
    assert not response.has_ended
    response.take(Completion([47, 48, 49], [0.0] * 3, False), 6)
    assert response.has_ended and response.room == 0
    whole = response.completion()
    assert whole.tokens == [*range(41, 50)] and whole.versions == [3] * 3 + [5] * 3 + [6] * 3
    assert whole.logprobs[:4] == [-4.1, -4.2, -4.3, -4.4]


def test_what_is_new_begins_where_the_response_has_gone_on():
    response = stopped()
    assert response.new == 6 and response.go_on() == response.request() and response.new == 0
    response.take(Completion([47], [0.0], True), 5)
    assert response.new == 1 and response.has_ended and response.room == 2
    assert len(response.spans) == 2, "the weights are the same"


def test_a_response_that_is_cut_goes_on():
    for length in range(7):
        response = stopped()
        response.take(Completion([], [], True), 5)
        response.cut(length)
        assert response.tokens == [*range(41, 47)][:length] and response.versions == [3, 3, 3, 5, 5, 5][:length]
        assert len(response.logprobs) == length and not response.has_ended and response.room == 9 - length


def test_versions_can_be_learnt_later():
    response = stopped()
    response.learn([0, 0, 1, 1, 1, 2])
    response.take(Completion([47, 48], [0.0] * 2, False), None)
    assert response.versions == [0, 0, 1, 1, 1, 2] and response.length == 8
    assert [len(span.tokens) for span in response.spans] == [2, 3, 1, 2]
    response.learn(response.versions + [4, 4])
    assert response.spans[-1] == Span(4, [47, 48], [0.0, 0.0])
