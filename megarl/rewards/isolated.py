"""Verifiers that parse or evaluate responses: each response is scored in a confined process of its own.

A warm process per verifier (`scorer.py`) has the slow imports and forks for each sample, which takes milliseconds.
"""

import json
import os
import threading

from megarl.child_process import Child
from megarl.rewards.base import Sample, Score, ScoringError

_idle: dict[tuple[int, str], list["_Scorer"]] = {}  # by process, because a fork must not share its parent's
_lock = threading.Lock()


class Isolated:
    """The verifier `name`, called for one sample at a time by each thread; `seconds` limit a sample.

    A response with which scoring takes too long, raises, or kills its process is a wrong answer, unless the reference
    answer fares no better: then the verifier has failed, and ScoringError says why.
    """

    def __init__(self, name: str, seconds: float):
        self._name, self._seconds = name, seconds

    def __call__(self, sample: Sample) -> Score:
        fields = {name: getattr(sample, name) for name in ("prompt", "response", "answer", "metadata", "finished")}
        return Score(**self._ask({"sample": fields, "seconds": self._seconds})["score"])

    def prepare(self, metadata: dict):
        """ScoringError if samples with such metadata cannot be scored."""
        self._ask({"sample": None, "metadata": metadata})

    def _ask(self, request: dict) -> dict:
        key = (os.getpid(), self._name)
        with _lock:
            waiting = _idle.setdefault(key, [])
            scorer = waiting.pop() if waiting else None
        scorer = scorer or _Scorer(self._name)
        try:
            reply = scorer.ask(request)
        except BaseException:
            scorer.end()
            raise
        with _lock:
            waiting.append(scorer)
        if reply.get("problem") is not None:
            raise ScoringError(reply["problem"])
        return reply


class _Scorer(Child):
    """One process; it ends with its connection, at the latest when this process does."""

    def __init__(self, name: str):
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        environment["LANG"] = "C.UTF-8"
        # Sets in the same order each time; no threads, which a fork would not have.
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__("megarl.rewards.scorer", name, environment=environment)
        problem = self._reply()["problem"]
        if problem is not None:
            self.end()
            raise ScoringError(f"this machine cannot confine a process: {problem}")

    def ask(self, request: dict) -> dict:
        self.connection.send_bytes(json.dumps(request).encode())
        return self._reply()

    def _reply(self) -> dict:
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise ScoringError(f"its process ended with status {self.status()}") from None
