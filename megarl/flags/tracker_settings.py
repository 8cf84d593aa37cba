"""Flags of trackers, where a training run's metrics go besides metrics.jsonl, and of its report."""

import dataclasses
from typing import Any

from megarl.flags.fields import TRAINING, flag, not_negative, parses
from megarl.observe.trackers.base import NAMES, NONE, parse_names

TRACKED: dict[str, Any] = {"programs": TRAINING, "when": "tracked"}
_PLAIN = "printable text without / and :"


def _is_plain(text: str) -> bool:
    return text.isprintable() and bool(text.strip()) and not set("/:") & set(text)


@dataclasses.dataclass(frozen=True)
class TrackerSettings:
    """Trackers, and the names of a run there."""

    trackers: str = flag("tensorboard", "where metrics go besides metrics.jsonl: names with commas among "
                         f"{', '.join(NAMES)}; or {NONE}", parses(parse_names),
                         f"names with commas among {', '.join(NAMES)}, each once, or {NONE}",
                         programs=TRAINING, when="saved")  # fmt: skip
    tracker_project: str = flag("megarl", "project in Weights & Biases, experiment in MLflow", _is_plain, _PLAIN,
                                **TRACKED)  # fmt: skip
    tracker_run: str | None = flag(None, "name of the run there; default: that of the folder --save", _is_plain, _PLAIN,
                                   **TRACKED)  # fmt: skip
    tracker_folder: str | None = flag(None, "folder for their files, which several runs may share; default: --save",
                                      **TRACKED)  # fmt: skip
    tracker_offline: bool = flag(False, "write their files only, without network; `wandb sync` sends them later",
                                 **TRACKED)  # fmt: skip
    # Report.
    token_samples: int = not_negative(8, "responses of each step whose tokens are recorded one by one in tokens/: text,"
                                       " log-probs, advantage, value; 0: none", when="saved")  # fmt: skip
