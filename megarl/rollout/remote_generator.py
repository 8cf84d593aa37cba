"""A generator elsewhere: the client of a generation server's `/generate` (`python -m megarl.serve`), and the rollout of
a program without the policy, in which each replica's leader asks it for its share."""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.mcore.inference.engine import RequestList, RequestSource
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe import activity
from megarl.observe.timers import Timers
from megarl.plain_files import read_text, reading
from megarl.rollout.episodes.runner import EpisodeRunner
from megarl.rollout.requests import PromptRequest, ResponseEnds, RoundRequests, sampling_of
from megarl.tool_formats.thinking_budget import ThinkingBudget

FLAG = "--rollout-server"
BATCH = 32  # requests in one HTTP request
CONNECTIONS = 8  # at a time for the requests of one call
MAX_CONNECTIONS = 64  # that stay open
BUSY = (429, 503)  # statuses of a server that asks to come later
MIN_PAUSE, MAX_PAUSE = 0.2, 5.0  # seconds


class RemoteGenerator:
    """Requests that a server answers, with the bits that an engine with its weights gives.

    It raises UsageError for what the server refuses, RuntimeError if it cannot answer.
    """

    def __init__(self, url: str, api_key: str | None = None, seconds: float = 3600.0):
        """
        Args:
            url: of the server, as 'http://host:8000'.
            seconds: that a request may take, with all of its attempts.
        """
        self.url, self._seconds = url.rstrip("/"), seconds
        self._api_key = api_key
        self._connections = urllib3.PoolManager(maxsize=MAX_CONNECTIONS, retries=False, cert_reqs="CERT_REQUIRED")

    @classmethod
    def of_settings(cls, settings: Settings) -> "RemoteGenerator":
        """The generator that `--rollout-server` names. UsageError for a wrong key file."""
        key, path = None, settings.rollout_server_key_file
        if path is not None:
            where = f"--rollout-server-key-file {path}"
            with reading(where):
                words = read_text(path).split()
            if not words or not (words[0].isascii() and words[0].isprintable()):
                raise UsageError(f"{where}: has no key of letters, digits and signs")
            key = words[0]
        return cls(settings.rollout_server, key)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Returns one completion per request, in their order; several HTTP requests run at a time."""
        batches = _batches(requests)
        with activity.limited(), ThreadPoolExecutor(CONNECTIONS) as pool:
            answers = [*pool.map(self._generate, ([requests[number] for number in batch] for batch in batches))]
        joined = itertools.chain.from_iterable
        found = dict(zip(joined(batches), joined(answers), strict=True))
        return [found[number] for number in range(len(requests))]

    def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        found = self._json(self._ask("POST", "/generate", request_body(requests)))
        if len(found) != len(requests):
            raise RuntimeError(f"{FLAG} {self.url}: the answer is not one of a generation server")
        return [_completion(result) for result in found]

    def _ask(self, method: str, path: str, body: Any = None, **options: Any) -> urllib3.BaseHTTPResponse:
        """The server's answer with status 200; waits while it is busy."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        deadline, pause = time.monotonic() + self._seconds, MIN_PAUSE
        while True:
            timeout = urllib3.Timeout(total=max(deadline - time.monotonic(), 1.0))
            try:
                response = self._connections.request(
                    method, self.url + path, json=body, headers=headers, timeout=timeout, **options
                )
            except HTTPError as error:
                raise RuntimeError(f"{FLAG} {self.url}: no answer: {error}") from None
            if response.status == 200:
                return response
            wait = _pause_of(response, pause)
            if response.status not in BUSY or time.monotonic() + wait > deadline:
                raise self._error(response)
            pause = min(2 * pause, MAX_PAUSE)
            time.sleep(wait)

    def _error(self, response: urllib3.BaseHTTPResponse) -> Exception:
        try:
            message = json.loads(response.data)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = "the answer is not one of a generation server"
        kind = UsageError if 400 <= response.status < 500 else RuntimeError
        return kind(f"{FLAG} {self.url}: status {response.status}: {message}")

    def _json(self, response: urllib3.BaseHTTPResponse) -> Any:
        try:
            return json.loads(response.data)
        except ValueError:
            raise RuntimeError(f"{FLAG} {self.url}: the answer is not one of a generation server") from None


def _pause_of(response: urllib3.BaseHTTPResponse, default: float) -> float:
    try:
        return min(max(float(response.headers.get("Retry-After", default)), MIN_PAUSE), MAX_PAUSE)
    except ValueError:
        return default


def _batches(requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """Numbers of requests that differ in prompt and key alone, at most `BATCH` together."""
    alike: dict[tuple, list[int]] = {}
    for number, request in enumerate(requests):
        ends = request.end_ids, _stops_of(request), *_thinking_of(request).values()
        kind = request.sampling, request.max_new_tokens, request.top_logprobs, ends
        alike.setdefault(kind, []).append(number)
    return [batch for members in alike.values() for batch in itertools.batched(members, BATCH)]


def _stops_of(request: GenerationRequest) -> tuple[str, ...]:
    return () if request.stops is None else tuple(stop.decode() for stop in request.stops.stops)


def _thinking_of(request: GenerationRequest) -> dict[str, Any]:
    budget = request.thinking
    return {} if budget is None else {"thinking_budget": budget.limit, "thinking_budget_text": budget.text}


def request_body(requests: list[GenerationRequest]) -> dict[str, Any]:
    """The body of a request for `/generate`."""
    first = requests[0]
    if first.sampling is None or first.end_ids is None:
        raise ValueError("a request to a server needs its own sampling settings and end tokens")
    s = first.sampling
    return {
        "input_ids": [request.prompt for request in requests],
        "key": [request.key for request in requests],
        "top_logprobs": first.top_logprobs,
        "sampling_params": {
            "temperature": 0 if s.greedy else s.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "max_tokens": first.max_new_tokens,
            "stop": list(_stops_of(first)),
            "stop_token_ids": list(first.end_ids),
            "ignore_eos": True,  # the end tokens are exactly those of the request
            **_thinking_of(first),
        },
    }


def _completion(result: dict[str, Any]) -> Completion:
    top = result.get("top_logprobs")
    return Completion(
        tokens=result["output_ids"],
        logprobs=result["logprobs"],
        finished=result["finish_reason"] == "stop",
        top_logprobs=top and [[(token, logprob) for token, logprob in best] for best in top],
        versions=result["versions"],
    )


# -- the rollout -------------------------------------------------------------------------------------------------------


_WAIT_SECONDS = 0.02  # for a completion, before environments are looked at again


class RemoteRollout:
    """Generates what `Rollout` would: a request has the same random stream wherever it runs."""

    max_requests = 64  # of turns, at a time

    def __init__(
        self, settings: Settings, mesh: RoleMesh, generator: RemoteGenerator, ends: ResponseEnds, timers: Timers,
        episodes: EpisodeRunner | None = None, thinking: ThinkingBudget | None = None,
    ):  # fmt: skip
        """`generator`: of the leader's requests; `episodes`: runs the environments; None: one turn; `thinking`: the
        budget of each response, or turn; None: none."""
        self.thinking, self.settings, self.role_groups, self.episodes = thinking, settings, mesh["rollout"], episodes
        self._generator, self._ends, self.timers = generator, ends, timers

    def load_weights(self):
        """Does nothing: the server has the weights."""

    def generate(
        self, prompts: list[PromptRequest], step: int, temperature: float, prompt_set: PromptSet | None = None
    ) -> Batch | None:
        """Generates the responses to each prompt; returns this replica's share.

        `temperature` 0 is greedy. `prompt_set`: the set whose lines the prompts are, for environments.
        """
        role_groups, s = self.role_groups, self.settings
        if not role_groups.is_member:
            return None
        sampling = sampling_of(s, temperature)
        with self.timers.phase(role_groups.model_role, "rollout"):
            requests = RoundRequests(prompts, s.seed, step, self.thinking, prompt_set=prompt_set)
            ids = requests.assigned_to(role_groups.dp_rank, len(role_groups.replicas))
            built, done = requests.build(ids), None
            if self.episodes is not None:
                source = RequestList(zip(ids, built, strict=True))
                stream = functools.partial(self._stream, sampling=sampling)
                self.episodes.run(stream, source, requests, 2 * self.max_requests, is_training=False)
                return self.episodes.settle(None)
            if role_groups.is_leader:
                done = self._generated(built, sampling)
            for i, completion in zip(ids, role_groups.broadcast_object(done), strict=True):
                requests.take(i, completion, None)
            return requests.to_batch()

    def _generated(self, requests: list[GenerationRequest], sampling: SamplingSettings) -> list[Completion]:
        """The server's answers; the run's stop strings end responses to requests without own ones."""
        own, matcher = functools.partial(dataclasses.replace, sampling=sampling), self._ends.matcher
        stops = [matcher if request.stops is None else request.stops for request in requests]
        asked = zip(requests, stops, strict=True)
        return self._generator.generate([own(each, end_ids=self._ends.ids, stops=of_one) for each, of_one in asked])

    def _stream(
        self, source: RequestSource, sampling: SamplingSettings, max_requests: int, response_limit: None
    ) -> Iterator[tuple[int, Completion]]:
        """Has all requests of a source answered; yields (request number, completion) as each ends, on all ranks of the
        replica. Arguments as of `RolloutEngine.stream`; limits are for training."""
        running: dict[Future, int] = {}  # on the leader
        count, most = 0, min(max_requests, self.max_requests)
        with activity.limited(), ThreadPoolExecutor(self.max_requests) as pool:
            while count or not source.is_empty():
                for number, request in source.take(most - count) if count < most and not source.is_empty() else ():
                    count += 1
                    if self.role_groups.is_leader:
                        running[pool.submit(self._generated, [request], sampling)] = number
                if not count:
                    source.wait()
                    continue
                ended = self.role_groups.broadcast_object(_take_ended(running))
                count -= len(ended)
                yield from ended


def _take_ended(running: dict[Future, int]) -> list[tuple[int, Completion]]:
    """(number, completion) of the requests that have ended, in the order of their numbers; removes them."""
    ended, _ = wait(running, _WAIT_SECONDS, FIRST_COMPLETED)
    return sorted(((running.pop(future), future.result()[0]) for future in ended), key=lambda each: each[0])
