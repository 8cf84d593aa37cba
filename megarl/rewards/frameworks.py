"""Rewards that are written for TRL, verl or OpenRLHF, as functions of a `Sample`.

What such a function returns is read as it is (`base._score_of`), and one that is async stays so.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megarl.rewards.base import Sample
from megarl.user_results import is_async

# What TRL's trainer hands a reward besides the columns, and a Sample does not have.
_OF_THE_TRAINER = ("completion_ids", "trainer_state", "environments", "log_extra", "log_metric")


def of_trl(function: Callable, messages: bool | None = None) -> Callable[[Sample], Any]:
    """A reward of TRL: `function(prompts, completions, **columns)`, of lists of one.

    It gets all columns of the prompt's row by their own names; those that it does not take are left out.

    `messages`: whether prompt and completion are lists of messages; None: as the prompt of the row is one (TRL).
    TypeError: the function needs something of TRL's trainer.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if lacking := [each.name for each in parameters if each.name in _OF_THE_TRAINER and each.default is each.empty]:
        raise TypeError(f"a reward of TRL that needs {', '.join(lacking)} cannot be called: a Sample does not have it")

    def arguments(sample: Sample) -> dict[str, list[Any]]:
        columns = dict(sample.columns) or {"answer": sample.answer, **(sample.metadata or {})}
        prompt = columns.pop("prompt", sample.prompt)
        in_messages = not isinstance(prompt, str) if messages is None else messages
        completion = [{"role": "assistant", "content": sample.response}] if in_messages else sample.response
        if in_messages and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        values = {**columns, "prompts": prompt, "completions": completion}
        return _taken(function, {name: [value] for name, value in values.items()})

    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    optional = [each.name for each in parameters if each.default is not each.empty]
    wrapped = _wrapped(function, lambda sample: function(**arguments(sample)))
    # `build.check_prompts` refuses data without them.
    wrapped.needed_columns = tuple(name for name in named if name not in ("prompts", "completions", *optional))  # type: ignore[attr-defined]  # functions have attributes
    return wrapped


def of_verl(function: Callable) -> Callable[[Sample], Any]:
    """A reward of verl: `compute_score(data_source, solution_str, ground_truth, extra_info)`, or some of these. Of a
    tuple the first entry is the score, as in verl."""

    def arguments(sample: Sample) -> dict[str, Any]:
        metadata = sample.metadata or {}
        of_model = metadata.get("reward_model")
        truth = of_model.get("ground_truth", sample.answer) if isinstance(of_model, dict) else sample.answer
        source = metadata.get("data_source", sample.columns.get("data_source"))
        values = {"data_source": source, "extra_info": metadata.get("extra_info")}
        return _taken(function, values | {"solution_str": sample.response, "ground_truth": truth})

    return _wrapped(function, lambda sample: function(**arguments(sample)), _first_of_tuple)


def _first_of_tuple(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def of_openrlhf(function: Callable) -> Callable[[Sample], Any]:
    """A reward of OpenRLHF: `reward_func(queries, prompts, labels)`, of lists of one; queries end with responses."""
    return _wrapped(
        function, lambda sample: function([sample.prompt + sample.response], [sample.prompt], [sample.answer])
    )


def _taken(function: Callable, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that the function has a parameter for."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in values.items() if takes_all or name in parameters}


def _wrapped(
    function: Callable, call: Callable[[Sample], Any], read: Callable[[Any], Any] = lambda result: result
) -> Callable:
    """A function of a Sample that reads the result of `call`, with the name of `function`, but its own signature."""

    async def awaits(sample: Sample) -> Any:
        return read(await call(sample))

    wrapper: Callable = awaits if is_async(function) else lambda sample: read(call(sample))
    names = [name for name in ("__name__", "__qualname__", "__doc__", "__module__") if hasattr(function, name)]
    wrapper = functools.update_wrapper(wrapper, function, assigned=names, updated=())
    del wrapper.__wrapped__
    return wrapper
