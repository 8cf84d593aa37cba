"""Answers the requests that come from the HTTP process (`replica_messages.py`) on the ranks of one replica.

Between two steps of the engine, the leader takes the messages that have come, and tells the other ranks. So all ranks
of a replica see the same requests, and make the same decisions without a clock. Replicas that share experts compute in
step: before each step they agree what it does.
"""

import base64
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.comm.role_mesh import RoleGroups
from megarl.data.detokenizer import StopMatcher, Vocabulary
from megarl.data.images.book import Images
from megarl.data.images.names import ImageRef
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.inference.generation import GenerationRequest, TokenChunk
from megarl.observe import activity
from megarl.serving import replica_messages as messages
from megarl.serving.frontend_process import FrontendProcess
from megarl.serving.served_engine import PauseMode, ServedEngine, score_sequences, together
from megarl.tool_formats import FORMATS
from megarl.tool_formats.thinking_budget import ThinkingBudget, ThoughtReader

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "greedy")  # fields of a request
IDLE_SECONDS = 1.0  # longest wait for a message; then the ranks show that they are alive
COUPLED_SECONDS = 0.01  # the same if other replicas may need this one's experts


class ReplicaService:
    """One replica of a generation service, on each of its ranks."""

    def __init__(
        self,
        engine: ServedEngine,
        model,
        role_groups: RoleGroups,
        frontend: FrontendProcess,
        vocab_size: int,
        label: str,
        tokenizer: Tokenizer,
        images: Images | None = None,
    ):
        """`engine`: paused, without requests; `model`: its model, for scores; `label`: name of the weights; `images`:
        that its model reads; None: none."""
        self.engine, self.model, self.role_groups, self.frontend = engine, model, role_groups, frontend
        self.vocab_size, self.label = vocab_size, label
        self._matcher: Callable[[tuple[str, ...]], StopMatcher] = functools.lru_cache(64)(
            functools.partial(StopMatcher, tokenizer)
        )
        self._vocabulary = Vocabulary(tokenizer)
        self._waiting: deque[tuple[int, GenerationRequest]] = deque()
        self._scores: deque[messages.ScorePrompt] = deque()
        self._controls: deque[messages.Control] = deque()  # not done yet
        self._routes_wanted: set[int] = set()
        self._images = images
        self._images_of: dict[int, list[ImageRef]] = {}  # those that requests have sent
        self._is_stopped = self._is_draining = False
        self._is_open = True  # as the last report has said
        self._reported_blocks = engine.rollout_engine.free_blocks

    def open(self):
        """Tells the HTTP process that this replica is there."""
        engine = self.engine.rollout_engine
        number, version = self.role_groups.dp_rank, self.engine.version
        assert number is not None  # the engine is on members of the role alone
        ready = messages.Ready(number, engine.max_requests, engine.capacity, engine.free_blocks, version, self.label)
        self.frontend.send(ready)

    def run(self, is_draining: Callable[[], bool] = lambda: False):
        """Serves until the HTTP process says stop, which one rank's `is_draining` begins. A collective of the role."""
        self.engine.resume()
        while not self._is_stopped:
            activity.tick()
            if is_draining() and not self._is_draining:
                self._is_draining = True
                self.frontend.send(messages.Drain())
            for message in self.frontend.receive(self._patience()):
                self._take(message)
            self._admit()
            self._act()
        self.engine.pause("abort")
        self.frontend.close_link()

    def answer_waiting(self):
        """Answers what has come so far. A collective of the replica, and of those that share its experts."""
        for message in self.frontend.receive(0.0):
            self._take(message)
        self._is_open = True
        self._send()
        self.engine.resume()
        late: list[messages.Request] = []
        while self._has_work():
            for message in self.frontend.receive(0.0):
                if isinstance(message, messages.Generate | messages.ScorePrompt):
                    late.append(message)
                    continue
                if isinstance(message, messages.Abort):
                    late = [each for each in late if each.id not in message.ids]
                self._take(message)
            self._admit()
            self._act()
        self.engine.pause()
        self._is_open = False
        self._send()
        for message in late:
            self._take(message)

    def _has_work(self) -> bool:
        has_work = bool(self._waiting or self._scores or self._controls) or self.engine.needs_steps
        return any(self._agree(False, False, has_work))

    def _patience(self) -> float:
        if self.engine.needs_steps or self._scores or self._controls:
            return 0.0
        return COUPLED_SECONDS if self.engine.rollout_engine.is_coupled else IDLE_SECONDS

    # -- messages ------------------------------------------------------------------------------------------------------

    def _take(self, message: messages.ToReplica):
        match message:
            case messages.Generate():
                self._take_request(message)
            case messages.ScorePrompt():
                self._scores.append(message)
            case messages.Abort():
                self._abort(set(message.ids))
            case messages.Control():
                self._controls.append(message)

    def _take_request(self, asked: messages.Generate):
        engine = self.engine.rollout_engine
        length, max_length = len(asked.prompt) + asked.max_tokens, min(engine.max_length, engine.capacity)
        if not asked.prompt or length > max_length:
            fits = f"prompt and max_tokens are {length} tokens; at most {max_length} fit"
            self._send([messages.RequestUpdate(asked.id, error=fits if asked.prompt else "an empty prompt")])
            return
        if asked.images and not self._take_images(asked):
            return
        options: dict[str, Any] = {"stops": self._matcher(tuple(asked.stops))} if asked.stops else {}
        if asked.thinking is not None:
            limit, tokens, form = asked.thinking
            reader = ThoughtReader(self._vocabulary, FORMATS[form])
            options["thinking"] = ThinkingBudget(limit, "", tuple(tokens), reader)
        options["sampling"] = SamplingSettings(**{name: getattr(asked, name) for name in SAMPLING})
        options |= {"end_ids": tuple(asked.end_ids), "top_logprobs": asked.top_logprobs}
        request = GenerationRequest(asked.prompt, asked.key, asked.max_tokens, **options)
        if asked.routes:
            self._routes_wanted.add(asked.id)
        self._waiting.append((asked.id, request))

    def _take_images(self, asked: messages.Generate) -> bool:
        """Makes a request's images known until it ends; the HTTP process has decoded them once."""
        refs: list[ImageRef] = self._images_of.setdefault(asked.id, [])
        try:
            if self._images is None:
                raise UsageError("this replica reads no images")
            refs += map(self._images.add_bytes, map(base64.b64decode, asked.images))
        except UsageError as error:
            self._forget_images([asked.id])
            self._send([messages.RequestUpdate(asked.id, error=str(error))])
            return False
        return True

    def _forget_images(self, numbers: Iterable[int]):
        for number in numbers:
            if refs := self._images_of.pop(number, None):
                assert self._images is not None
                self._images.forget(refs)

    def _abort(self, numbers: set[int]):
        self._waiting = deque(item for item in self._waiting if item[0] not in numbers)
        self._scores = deque(each for each in self._scores if each.id not in numbers)
        self._routes_wanted -= numbers
        self.engine.abort(numbers)
        self._forget_images(numbers)

    def _send(self, updates: Sequence[messages.RequestUpdate] = (), version: int | None = None, **command: Any):
        """Sends a report, with what there is of requests. `version`: of the policy; None: the one that the engine has
        now; `command`: that has been run, and its error."""
        version = self.engine.version if version is None else version
        report = messages.Report(version, self.label, self._reported_blocks, self._is_open, updates, **command)
        self.frontend.send(report)

    def _report(self, chunks: list[TokenChunk]):
        """Sends the new tokens of requests, and how much of the cache is free if only that has changed."""
        free = self.engine.rollout_engine.free_blocks
        if not chunks and free == self._reported_blocks:
            return
        self._reported_blocks = free
        self._send([self._update_of(chunk) for chunk in chunks], chunks[0].version if chunks else None)
        self._forget_images(chunk.number for chunk in chunks if chunk.finish_reason)

    def _update_of(self, chunk: TokenChunk) -> messages.RequestUpdate:
        number, tokens, logprobs, top, finish, routes, _ = chunk
        found = None
        if finish and number in self._routes_wanted:
            self._routes_wanted.remove(number)
            if routes is not None:
                data = base64.b64encode(routes.cpu().numpy().astype("<i2").tobytes()).decode()
                found = {"shape": list(routes.shape), "data": data}
        return messages.RequestUpdate(number, tokens, logprobs, top, finish, found)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _admit(self):
        """Gives waiting requests to the engine, none while a control command waits for the running ones."""
        if self.engine.is_paused or self._waits_for_end:
            return
        while self._waiting and self.engine.has_room:
            self.engine.add(*self._waiting.popleft())

    @property
    def _waits_for_end(self) -> bool:
        """Whether the next control command comes after the running requests."""
        return bool(self._controls) and self._controls[0].mode == "wait"

    def _act(self):
        """Does one thing: a control command, a pass of scores, or a step of the engine."""
        may_control = bool(self._controls) and not (self._waits_for_end and self.engine.needs_steps)
        may_control, scores, generates = self._agree(may_control, bool(self._scores), self.engine.needs_steps)
        if may_control:
            self._control(self._controls.popleft())
        elif scores:
            self._score()
        elif generates:
            self._report(self.engine.step())

    def _agree(self, may_control: bool, scores: bool, generates: bool) -> tuple[bool, bool, bool]:
        """Whether all replicas that share experts may run a command, and any of them scores, or generates."""
        engine = self.engine.rollout_engine
        if not engine.is_coupled:
            return may_control, scores, generates
        flags = torch.tensor([not may_control, scores, generates], dtype=torch.int32, device=device.device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=engine.expert_group)
        some_may_not, scores, generates = map(bool, flags.tolist())
        return not some_may_not, scores, generates

    def _score(self):
        """Scores the first sequences that wait, in one pass; the engine is suspended meanwhile."""
        count = together(self._scores, self.engine.rollout_engine.step_tokens)
        requests = [self._scores.popleft() for _ in range(count)]
        self._send(score_sequences(self.model, self.role_groups.pg_collection, self.vocab_size, requests))

    # -- control -----------------------------------------------------------------------------------------------------

    def _control(self, asked: messages.Control):
        """Runs a command. All replicas run the same ones, in the same order."""
        error = None
        match asked.command:
            case "stop":
                self._is_stopped = True
                return
            case "pause":
                self._pause(cast(PauseMode, asked.mode))
            case "resume":
                self.engine.resume()
            case "weights":
                error = self._change_weights(str(asked.path))
        self._send(command=asked.number, error=error)

    def _pause(self, mode: PauseMode):
        if mode == "abort":
            numbers = [number for number, _ in self._waiting]
            self._waiting.clear()
            self._report([TokenChunk(number, [], [], finish_reason="abort") for number in numbers])
        self._report(self.engine.pause(mode))

    def _change_weights(self, path: str) -> str | None:
        """Loads weights; returns why they cannot be loaded, None if they were."""
        try:
            self.engine.update_weights(path)
        except UsageError as error:
            return str(error)
        self.label = path.rstrip("/").rsplit("/", 1)[-1]
        return None
