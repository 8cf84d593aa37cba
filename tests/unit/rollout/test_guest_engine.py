"""What a run takes from guests, which may answer twice, wrongly, in part, or not at all."""

import functools
import json
import threading

import pytest
from torch.distributed import PrefixStore

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.mcore.inference.engine import RequestList
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.rollout import guest_ledger
from megarl.rollout.bank import pack
from megarl.rollout.guest_ledger import HOME, LEFT, front_of, is_set, request_of
from tests.helpers.processes import free_port
from tests.helpers.programs import program, rl_argv
from tests.helpers.waiting import wait_until
from tests.helpers.worlds import RankFailed, run_world

COUNT, LENGTH, NAME = 5, 4, "weights 1"


def tokens_of(request: GenerationRequest) -> list[int]:
    """What every guest would write: it follows from key and position alone."""
    start = len(request.prompt)
    return [(request.key * 31 + start + i) % 97 for i in range(request.max_new_tokens)]


class Guest:
    """A guest in a thread, which does what a test says with each request that it has leased."""

    def __init__(self, port: int, act):
        store = guest_ledger.find(f"127.0.0.1:{port}", 60.0)
        facts = json.loads(store.get(HOME))
        self.ledger, self.act, self.beats = PrefixStore(facts["start"], store), act, 0
        self.name = str(self.ledger.add("members", 1) - 1)
        self.is_silent = self.has_ended = False
        self.held: set[int] = set()
        self.beat()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def beat(self, state: str = ""):
        self.beats += 1
        self.ledger.set(f"beat/{self.name}", f"{self.beats} 3 {state}")

    def _run(self):
        while not self.has_ended:
            if not self.is_silent:
                self.beat()
            front = front_of(self.ledger, 0)
            again = [int(self.ledger.get(f"again/0/{front.first}/{i}")) for i in range(front.again)]
            for number in [*range(front.first, front.posted), *again] if front.weights and not self.is_silent else ():
                if self.is_silent:  # since it took the one before
                    break
                if is_set(self.ledger, f"lease/0/{number}", "", f"{self.name}") and number not in self.held:
                    self.held.add(number)
                    self.act(self, number, request_of(self.ledger, f"request/0/{number}", None, list))

    def answer(self, number: int, request: GenerationRequest, count: int | None = None, **other):
        """Sends a response, or its first tokens."""
        tokens = tokens_of(request)[:count]
        facts = {"number": number, "guest": self.name, "weights": NAME, "counts": [0] * 9, "base": request.written}
        completion = Completion(tokens, [-float(token) for token in tokens], finished=False)
        self.ledger.queue_push("answers/0", pack(facts | {"left": count is not None} | other, completion))


def generated(save, acts, check=None) -> dict[str, float]:
    """The events of `stream`."""
    port = free_port()
    config = program("rl", rl_argv(save, f"--replica-port {port} --replica-timeout 0.3"), 1)
    return run_world(stream, 1, config, acts, check)[0]


def stream(rank: int, config, acts, check) -> dict[str, float]:
    """The responses to five requests, by number, and the events; a guest for each of `acts`, the first alone until it
    has leased one."""
    from megarl.comm.role_mesh import create_mesh
    from megarl.rollout.guest_engine import GuestEngine

    port = config.settings.replica_port
    groups = create_mesh(config.roles, guest_ledger.PATIENCE)["rollout"]
    engine = GuestEngine(config, groups)
    engine.weights = NAME
    guests = [Guest(port, acts[0])]

    def join():
        assert wait_until(lambda: guests[0].held)
        for act in acts[1:]:
            guests.append(Guest(port, act))

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    requests = [GenerationRequest([1] * (i + 1), 100 + i, LENGTH) for i in range(COUNT)]
    done = dict(engine.stream(RequestList(enumerate(requests)), (), SamplingSettings()))
    if check is not None:
        check(engine, guests, requests)
    for guest in guests:
        guest.has_ended = True
    assert sorted(done) == [*range(COUNT)]
    for number, request in enumerate(requests):
        expected = tokens_of(request)
        assert done[number].tokens == expected and done[number].logprobs == [-float(token) for token in expected]
    return engine.take_metrics()


def answer(guest, number, request):
    guest.answer(number, request)


def go_silent(guest, number, request):
    guest.is_silent = True


def leave(guest, number, request):
    """Gives back what it has, with the first tokens of the response."""
    guest.answer(number, request, 2)
    guest.is_silent = True
    guest.beat(LEFT)


def damaged(guest, number, request):
    """Its first answer is none."""
    if guest.ledger.add("damaged", 1) == 1:
        guest.ledger.queue_push("answers/0", b"MRL1" + bytes(60))
        guest.held.discard(number)
    else:
        guest.answer(number, request)


def stranger(guest, number, request):
    """Answers, too, what nobody has asked for."""
    guest.answer(number + 1000, request)
    guest.answer(number, request)


@pytest.mark.parametrize("acts, reissued", [
    ([answer], 0), ([go_silent, answer], 1), ([leave, answer], 1), ([damaged], 1), ([stranger], 0),
    ([leave, leave, go_silent, answer], 3),
])  # fmt: skip
def test_each_request_is_answered_once_and_whole(acts, reissued, tmp_path):
    found = generated(tmp_path, acts)
    assert found["rollout/joined"] == len(acts) and found["rollout/reissued"] >= reissued
    assert found["rollout/duplicates_differ"] == 0
    assert (found["rollout/lost_tokens"] > 0) == (go_silent in acts)


def send_again(wrong: bool, engine, guests, requests):
    """The guest that was silent answers in the next call."""
    late, number = guests[0], min(guests[0].held)
    late.answer(number, requests[number], counts=[1] * 9)
    if wrong:
        completion = Completion([1] * LENGTH, [0.5] * LENGTH, finished=False)
        facts = {"number": number, "guest": "0", "weights": NAME, "counts": [0] * 9, "base": 0, "left": False}
        late.ledger.queue_push("answers/0", pack(facts, completion))
    more = [GenerationRequest([2], 7, LENGTH)]
    assert [done.tokens for _, done in engine.stream(RequestList(enumerate(more)), (), SamplingSettings())] == [
        tokens_of(more[0])
    ]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_second_answer_is_compared_with_the_first(wrong, tmp_path, capfd):
    check = functools.partial(send_again, wrong)
    found = generated(tmp_path, [go_silent, answer], check)
    assert found["rollout/reissued"] >= 1 and found["rollout/duplicates_differ"] == wrong
    assert ("have generated request" in capfd.readouterr().err) == wrong


def test_other_weights_are_an_error(tmp_path):
    def of_others(guest, number, request):
        guest.answer(number, request, weights="weights 0")

    with pytest.raises(RankFailed, match="other weights than those that it was asked for"):
        generated(tmp_path, [of_others])


def test_weights_that_do_not_arrive_hold_nobody_up(tmp_path, capfd):
    def asks_and_answers(guest, number, request):
        if len(guest.held) == 1:
            guest.ledger.queue_push("wants/0", json.dumps(["gone", NAME, False]).encode())
            guest.ledger.queue_push("wants/0", json.dumps(["old", "weights 0", False]).encode())
            assert wait_until(lambda: guest.ledger.check(["pair/gone"]))
        guest.answer(number, request)

    def check(engine, guests, requests):
        assert guests[0].ledger.get("pair/gone") == b"given" and not guests[0].ledger.check(["pair/old"])

    found = generated(tmp_path, [asks_and_answers], check)
    assert found["rollout/replicas"] == 1
