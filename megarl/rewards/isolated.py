"""Verifiers that parse or evaluate responses: each response is scored in a confined process of its own (`confine`).

`python -m megarl.rewards.isolated FD DOOR NAME` is the warm process of the verifier NAME.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import asdict, replace
from types import ModuleType

from megarl.confine import warm_process
from megarl.measurements import parts_of, value_of
from megarl.rewards.base import Sample, Score, ScoringError, reference_sample

# Verifier -> its package, and its module, which only the warm process imports. In it `score_inside(sample)` scores in
# the child, and `prepare(metadata)` runs before the fork, without the response. It returns None if the verifier parses
# the response; if it only compares its text, responses share a child, and the result changes with what they inherit.
_MODULES = {
    "math-verify": ("math_verify", "megarl.rewards.mathematics"),
    "reasoning-gym": ("reasoning_gym", "megarl.rewards.tasks"),
}


def begin(verifiers: Iterable[str]):
    """Starts the processes of those of the verifiers that have one and can be imported, which takes seconds."""
    for name in sorted(_MODULES.keys() & set(verifiers)):
        if importlib.util.find_spec(_MODULES[name][0]) is not None:
            warm_process.begin(__spec__.name, name)


def score(name: str, seconds: float, sample: Sample) -> Score:
    """The score of the verifier `name`, called for one sample at a time by each thread; `seconds` limit a sample.

    A response with which scoring takes too long, raises, or kills its process is a wrong answer, unless the reference
    answer fares no better: then the verifier has failed, and ScoringError says why.
    """
    fields = {field: getattr(sample, field) for field in ("prompt", "response", "answer", "metadata", "finished")}
    return Score(**_ask(name, {"sample": fields, "seconds": seconds})["score"])


def prepare(name: str, metadata: dict):
    """ScoringError if the verifier `name` cannot score samples with such metadata."""
    _ask(name, {"sample": None, "metadata": metadata})


def _ask(name: str, request: dict) -> dict:
    try:
        return warm_process.ask(__spec__.name, name, request)
    except warm_process.NoAnswer as error:
        raise ScoringError(str(error)) from None


class Scorer:
    """The `warm_process.Answers` of the warm process: scores with the functions of a verifier's module."""

    max_result = 1 << 22

    def __init__(self, module: ModuleType):
        self._module = module

    def warm_up(self):
        """Imports what all responses need."""
        self._module.warm_up()

    def work(self, item: dict) -> dict:
        """{"score": fields of a Score} of the fields of a Sample."""
        return {"score": asdict(self._module.score_inside(Sample(**item)))}

    @staticmethod
    def checked(result: dict) -> dict:
        """The score of a child with what a Score may hold, and a reward of 0 to 1."""
        fields = result["score"]
        score = Score(
            reward=value_of("reward", fields["reward"]),
            correct=bool(fields["correct"]),
            parts=parts_of(fields["parts"]),
            extracted=None if fields["extracted"] is None else str(fields["extracted"]),
        )
        if not 0.0 <= score.reward <= 1.0:
            raise ValueError("outside 0 to 1")
        return {"score": asdict(score)}

    def answer(self, request: dict, within: warm_process.Children) -> dict:
        """{"score": fields of a Score}, or {"problem": why the verifier has failed}; of a preparation the latter."""
        if request["sample"] is None:
            self._module.prepare(request["metadata"])
            return {"problem": None}
        sample = Sample(**request["sample"])
        inherits = self._module.prepare(sample.metadata)
        result = self._result(sample, request["seconds"], within, inherits)
        if "score" in result:
            return result
        # Is it the response's fault? Not if the reference answer fares no better.
        reference = self._result(reference_sample(sample), request["seconds"], within, inherits)
        if "score" not in reference:
            return reference
        wrong = replace(self._module.WRONG, extracted=None, timed_out="late" in result)
        return {"score": asdict(wrong)}

    def _result(self, sample: Sample, seconds: float, within: warm_process.Children, inherits: int | None) -> dict:
        if inherits is None:
            return within.in_own_child(asdict(sample), seconds)
        return within.in_shared_child(asdict(sample), seconds, inherits)


if __name__ == "__main__":
    warm_process.main(lambda name: Scorer(importlib.import_module(_MODULES[name][1])))
