"""Text for a terminal: tables, and the progress line that a run prints per step.

Nothing that a file or a policy wrote can move the cursor, hide text or turn its direction.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence


def printable(text: object) -> str:
    """`text` on one line, with an escape such as \\x1b for each control, format and direction character."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text))


def table(rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """Lines of columns that are as wide as their widest cell, aligned to the left except for some at the right end.

    Args:
        rows: printable cells, equally many in each row; at least one row.
        right: number of columns at the end that are aligned to the right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    first_right = len(widths) - right
    return [
        "  ".join(
            cell.rjust(width) if number >= first_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_bytes(count: float, digits: int = 1) -> str:
    """`3.2 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while abs(count) >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {units[power]}" if power == 0 else f"{count:.{digits}f} {units[power]}"


def ranges_text(numbers: Iterable[int]) -> str:
    """`1-3,5` of the numbers 1, 2, 3, 5, in any order."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


AVERAGED_STEPS = 20
SLOW_SHARE, SLOW_SECONDS = 0.25, 1.0  # of a step; below them rewards are not worth a word
_CALLS = re.compile("time/reward/([^/]+)/calls_s")

# (label, metric, number format); every program appends tokens/s, seconds and ETA.
_TEACHER = ("kl to teacher", "distill/reverse_kl", ".4f")
_ACCURACY = ("eval", "eval/accuracy", ".3f")
RL_FIELDS = (("reward", "reward/mean", ".3f"), _ACCURACY, ("kl", "kl/reference", ".4f"), _TEACHER)
SFT_FIELDS = (("loss", "sft/loss", ".4f"), ("eval loss", "eval/loss", ".4f"), _TEACHER)
REWARD_FIELDS = (
    ("loss", "reward/loss", ".4f"),
    ("accuracy", "reward/accuracy", ".3f"),
    ("margin", "reward/margin", ".3f"),
    ("eval loss", "eval/loss", ".4f"),
    ("eval accuracy", "eval/accuracy", ".3f"),
)
PREFERENCE_FIELDS = tuple(
    (label, name.replace("reward/", "preference/"), digits) for label, name, digits in REWARD_FIELDS
)


class Progress:
    """Prints `step   12/200 | reward 0.532 | kl 0.0123 | 15,200 tokens/s | 1.21 s | ETA 3m48s`.

    Failures of verifiers and environments, if there are any, are one more column: `3 failed`; so is `no update`. Where
    rewards take much of the step, a column names the slowest: `rewards 4.2 s (my_rewards:slow 3.9 s)`.

    total_steps  the step at which the run ends.
    fields       (label, metric name, number format) in printing order; PPO's by default.

    Plain text without control characters. Rank 0 only.
    """

    def __init__(self, total_steps: int, fields: tuple = RL_FIELDS):
        self._total_steps = total_steps
        self._fields = fields
        self._recent_seconds: deque[float] = deque(maxlen=AVERAGED_STEPS)

    def line(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Print the line of a finished step that took `seconds`; missing metrics are skipped.

        The ETA is the number of remaining steps times the mean seconds of the last 20 steps.
        """
        self._recent_seconds.append(seconds)
        columns = [f"step {step:>4}/{self._total_steps}"]
        for label, name, number_format in self._fields:
            if metrics.get(name) is not None:
                columns.append(f"{label} {metrics[name]:{number_format}}")
        if metrics.get("actor/updates") == 0:
            columns.append("no update")
        if failed := sum(value for name, value in metrics.items() if name.endswith("/failures")):
            columns.append(f"{failed:.0f} failed")
        if metrics.get("perf/tokens_per_s") is not None:
            columns.append(f"{metrics['perf/tokens_per_s']:,.0f} tokens/s")
        columns.append(f"{seconds:.2f} s")
        if slow := slow_reward(metrics, seconds):
            columns.append(slow)
        mean_seconds = sum(self._recent_seconds) / len(self._recent_seconds)
        columns.append(f"ETA {format_duration(mean_seconds * (self._total_steps - step))}")
        print(" | ".join(columns), flush=True)


def slow_reward(metrics: dict[str, float], seconds: float) -> str | None:
    """How long the terms of the reward took, and the slowest, if all took `SLOW_SHARE` of a step's `seconds` and
    `SLOW_SECONDS`; else None.

    Verifiers share the time of the phase `score` by the seconds of their calls, which may run together.
    """
    of_terms = {"model": metrics.get("time/reward/model_s", 0.0), "judge": metrics.get("time/reward/judge_s", 0.0)}
    calls = {match[1]: value for name, value in metrics.items() if (match := _CALLS.fullmatch(name))}
    score, total = metrics.get("time/reward/score_s", 0.0), sum(calls.values())
    of_terms |= {term: score * of_calls / total for term, of_calls in calls.items() if total}
    spent = sum(of_terms.values())
    if spent < max(SLOW_SHARE * seconds, SLOW_SECONDS):
        return None
    slowest = max(of_terms, key=of_terms.__getitem__)
    return f"rewards {spent:.1f} s ({slowest} {of_terms[slowest]:.1f} s)"


def format_duration(seconds: float) -> str:
    """Seconds as `48s`, `3m48s`, `2h05m` or `1d03h`: the two largest units."""
    total = max(0, round(seconds))
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    if minutes:
        return f"{minutes}m{second:02d}s"
    return f"{second}s"
