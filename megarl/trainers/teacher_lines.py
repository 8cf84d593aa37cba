"""Which of several teachers the responses to each line of a set have, by the line's field `teacher`."""

import numpy as np
import torch
from torch import Tensor

from megarl.arguments import RunConfig
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.errors import UsageError
from megarl.flags.teachers import DEFAULT, FLAG


def teachers_of_lines(prompts: PromptSet, config: RunConfig, encoder: Encoder) -> tuple[PromptSet, Tensor | None]:
    """(the set, [lines] int64: the position of each line's teacher in `--teachers`; None without that flag).

    The set has a note if the field is not read, or some teacher has no line. One rank of a node reads the lines for
    all. `encoder`: the policy's.

    Raises:
        UsageError: a line that names another teacher, or none although none is called `default`.
    """
    names = config.teachers.names
    if not names:
        return prompts.note_unread("teacher", FLAG), None

    def numbers() -> dict[str, np.ndarray]:
        return {"numbers": np.array([_number(prompts, line, names) for line in range(len(prompts))], np.int64)}

    found = prompts.on_node(numbers, "teachers", encoder, names)["numbers"]
    counts = np.bincount(found, minlength=len(names))
    idle = [name for name, count in zip(names, counts, strict=True) if not count]
    noted = prompts.noted(f"no line has the teacher {', '.join(idle)} of {FLAG}") if idle else prompts
    return noted, torch.from_numpy(np.array(found))  # a copy: the array may be a file's


def _number(prompts: PromptSet, line: int, names: tuple[str, ...]) -> int:
    name = prompts[line].teacher
    if name is None and DEFAULT not in names:
        raise UsageError(
            f"{prompts.where(line)}: teacher is missing, and {FLAG} has none called {DEFAULT}; allowed: "
            f"{', '.join(names)}"
        )
    if name is not None and name not in names:
        raise UsageError(f"{prompts.where(line)}: teacher {name!r} is not in {FLAG}; allowed: {', '.join(names)}")
    return names.index(DEFAULT if name is None else name)
