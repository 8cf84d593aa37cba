"""What the catalog says about a metric, and the placeholders of names."""

import re
from typing import NamedTuple

PLACEHOLDERS = {  # placeholder -> what it stands for, as a pattern
    "role": "actor|critic|reward|reference|teacher|rollout|sft|preference",
    "phase": "[a-z_]+",
    "term": "[^/]+",  # of --reward; a plug-in's has a colon
    "task": ".+?",  # of a prompt's line, any text; or a name of --evals, also before a task
    "component": ".+",  # of an environment's rewards; any text
    "layer": r"\d{3}",
    "k": r"\d+",
    "teacher": r"[\w.-]+",  # of --teachers
    "file": r"[\w.-]+",  # of a mixture in --prompts
    "bound": "(?:token|sum|mean|max)_(?:k1|k2|k3|abs)",  # of --rollout-rejection
}


class Metric(NamedTuple):
    """A metric, or a family of them. `programs`: that write it; `when`: what else it needs, "" for nothing."""

    name: str
    unit: str
    meaning: str
    when: str = ""
    programs: tuple[str, ...] = ("train_rl",)

    @property
    def pattern(self) -> str:
        """A regular expression of the names."""
        pieces = re.split("<([a-z]+)>", self.name)
        return "".join(f"({PLACEHOLDERS[x]})" if i % 2 else re.escape(x) for i, x in enumerate(pieces))
