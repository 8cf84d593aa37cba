"""What a replica makes of messages, with an engine that only remembers them; whole servers are in tests/programs."""

import base64
from types import SimpleNamespace

from megarl.mcore.inference.generation import TokenChunk
from megarl.serving import replica_messages as said
from megarl.serving.replica_service import ReplicaService
from tests.helpers.texts.picture_prompts import encoded, encoder_of, picture, write_folder

GENERATE = said.Generate([1, 2], -5, 9, 0.5, False, 0, 1.0, 0.0, [2], [], None, 1, False, 7)
REPORT = said.Report(3, "step_3", 5)


class Engine:
    """A paused engine that takes any number of requests and generates nothing."""

    version, has_room, needs_steps = 3, True, False

    def __init__(self):
        self.rollout_engine = SimpleNamespace(
            free_blocks=5, max_requests=4, capacity=20, max_length=30, is_coupled=False, step_tokens=64
        )
        self.is_paused, self.added, self.aborted = True, [], set()

    def resume(self):
        self.is_paused = False

    def pause(self, mode: str = "keep") -> list:
        self.is_paused = True
        return []

    def add(self, number, request):
        self.added.append((number, request))

    def abort(self, numbers):
        self.aborted |= numbers


class Frontend:
    """The HTTP process: what it says next, and what it was told."""

    def __init__(self, *says):
        self.says, self.told = [list(each) for each in says], []

    def receive(self, seconds: float) -> list:
        return self.says.pop(0) if self.says else []

    def send(self, message):
        self.told.append(message)

    def close_link(self):
        """See FrontendProcess."""


def service(*says) -> tuple[ReplicaService, Engine, Frontend]:
    engine, frontend, groups = Engine(), Frontend(*says), SimpleNamespace(dp_rank=1, pg_collection=None)
    tokenizer = SimpleNamespace(special={}, vocab_size=9)
    return ReplicaService(engine, None, groups, frontend, 9, "step_3", tokenizer), engine, frontend


def test_requests_are_given_to_the_engine_or_refused():
    long, empty = GENERATE._replace(max_tokens=19, id=8), GENERATE._replace(prompt=[], id=9)
    replica, engine, frontend = service([GENERATE, long, empty], [said.Control("stop")])
    replica.open()
    replica.run()
    ((number, request),) = engine.added
    assert number == 7 and (request.prompt, request.key, request.max_new_tokens) == ([1, 2], -5, 9)
    assert (request.sampling.temperature, request.end_ids, request.top_logprobs) == (0.5, (2,), 1)
    problem = "prompt and max_tokens are 21 tokens; at most 20 fit"
    assert frontend.told == [
        said.Ready(1, 4, 20, 5, 3, "step_3"),
        REPORT._replace(updates=[said.RequestUpdate(8, error=problem)]),
        REPORT._replace(updates=[said.RequestUpdate(9, error="an empty prompt")]),
    ]
    assert engine.is_paused


def test_commands_are_answered_in_their_order():
    commands = [said.Control("pause", 1, "keep"), said.Control("resume", 2)]
    replica, engine, frontend = service(commands, [], [said.Control("stop")])
    replica.run()
    assert frontend.told == [REPORT._replace(command=1), REPORT._replace(command=2)]


def test_what_comes_in_a_window_waits_for_the_next_one():
    late = GENERATE._replace(id=8)
    replica, engine, frontend = service([said.Control("resume", 1)], [late, GENERATE, said.Abort([7])])
    replica.answer_waiting()
    assert engine.added == [] and engine.aborted == {7}
    assert frontend.told == [REPORT, REPORT._replace(command=1), REPORT._replace(is_open=False)]
    replica.answer_waiting()
    assert [number for number, _ in engine.added] == [8]


def test_aborted_scores_are_not_computed():
    replica, engine, frontend = service([said.ScorePrompt([1], 1.0, 0, 4), said.Abort([4])], [said.Control("stop")])
    replica.run()
    assert frontend.told == [] and engine.aborted == {4}


def test_images_of_a_request_are_known_until_it_ends(tmp_path):
    images = encoder_of(write_folder(tmp_path / "model")).images
    data = encoded(picture(80, 64, 3))
    (ref,) = [images.add_bytes(data)]
    prompt = images.ids(ref)[:4]
    images.forget([ref])
    asked = GENERATE._replace(prompt=prompt, images=[base64.b64encode(data).decode()])
    bad = asked._replace(id=9, images=["AAAA"])
    replica, engine, frontend = service([asked, bad, said.Abort([4])], [said.Control("stop")])
    replica._images, seen = images, []
    engine.add = lambda number, request: seen.append((number, images.of_token(request.prompt[0]).digest))
    replica.open()
    replica.run()
    assert seen == [(7, ref.digest)] and "not PNG" in frontend.told[1].updates[0].error and len(images) == 1
    replica._report([TokenChunk(7, [5], [-1.0])])
    assert len(images) == 1
    replica._report([TokenChunk(7, [5], [-1.0], finish_reason="stop")])
    assert len(images) == 0
    other, _, told = service([asked], [said.Control("stop")])
    other.run()
    assert told.told[0].updates[0].error == "this replica reads no images"
