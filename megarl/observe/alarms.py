"""`--alarms`: conditions on metrics, and what follows when one holds: a warning, a skipped update, the end of the run.

    actor/ppo_kl > 0.3: skip; critic/loss > 10x: warn; reward/mean < 0.2: stop; reward/std < 1e-9 for 5: warn

A limit is a number, or a multiple (`10x`) of the metric's median over the last steps, which must be positive. `for 5`
says that the condition must hold in so many steps one after another.
"""

import math
import operator
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from megarl.errors import RunStopped, UsageError, warn

DEFAULT_ALARMS = (
    "actor/grad_norm > 30x: warn; actor/ppo_kl > 0.5: warn; critic/loss > 10x: warn; sft/loss > 3x: warn; "
    "reward/loss > 3x: warn; reward/mean < 0.3x: warn; rollout/response_length_mean < 0.3x: warn; "
    "rollout/logprob_gap_mean > 0.05: warn; "
    # Runs that learn nothing.
    "actor/updates < 1 for 3: warn; actor/grad_norm < 1e-12 for 5: warn; reward/std < 1e-09 for 5: warn; "
    "environment/failed_fraction > 0.9: warn"
)
# Of runs whose rewards do not count.
ALARMS_WITHOUT_REWARD = "; ".join(alarm for alarm in DEFAULT_ALARMS.split("; ") if not alarm.startswith("reward/"))
ACTIONS = ("warn", "skip", "stop")
# Metrics of one update, which all ranks of the role have before they apply it.
OF_UPDATE = {
    "actor": ("actor/loss", "actor/entropy", "actor/ppo_kl", "actor/clip_fraction", "actor/kl_loss", "actor/grad_norm"),
    "critic": ("critic/loss", "critic/clip_fraction", "critic/grad_norm"),
}
# The default alarm on it looks for differences between engine and training, so it holds for steps without older tokens:
# between policies of different age there is a gap, too.
OF_ENGINE = "rollout/logprob_gap_mean"
HISTORY, MIN_HISTORY = 20, 5  # steps that the median is taken of
_ALARM = re.compile(r"\s*(\S+?)\s*([<>])\s*([^\s:]+?)(x?)(?:\s+for\s+([1-9]\d{0,5}))?\s*:\s*(\w+)\s*")
_OPERATORS = {"<": operator.lt, ">": operator.gt}


class Alarm(NamedTuple):
    """One condition and its action."""

    metric: str
    sign: str  # "<" or ">"
    limit: float
    is_relative: bool  # whether the limit is a multiple of the median
    action: str  # one of ACTIONS
    steps: int = 1  # one after another, in which it must hold

    def __str__(self) -> str:
        steps = f" for {self.steps}" if self.steps > 1 else ""
        return f"{self.metric} {self.sign} {self.limit:g}{'x' * self.is_relative}{steps}: {self.action}"

    def holds(self, value: float, history: Sequence[float] = ()) -> bool:
        """Whether a metric's value meets the condition; a relative one needs a history with a positive median."""
        limit = self.limit
        if self.is_relative:
            if len(history) < MIN_HISTORY or (middle := median(history)) <= 0:
                return False
            limit *= middle
        return _OPERATORS[self.sign](value, limit)


def parse_alarms(text: str) -> list[Alarm]:
    """The alarms of a flag's value, separated by `;`. UsageError for a malformed one, or one that cannot skip."""
    return [_parse(part) for part in text.split(";") if part.strip()]


def _parse(text: str) -> Alarm:
    match, error = _ALARM.fullmatch(text), f"--alarms {text.strip()!r}: "
    if match is None:
        raise UsageError(f"{error}allowed is 'METRIC > LIMIT: ACTION' or with <, as in 'actor/ppo_kl > 0.3: warn'")
    metric, sign, limit, multiple, steps, action = match.groups()
    try:
        number = float(limit)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{error}{limit!r} is no limit; allowed is a number such as 0.3, or a multiple such as 10x")
    if action not in ACTIONS:
        raise UsageError(f"{error}{action!r} is no action; allowed are {', '.join(ACTIONS)}")
    alarm = Alarm(metric, sign, number, is_relative=bool(multiple), action=action, steps=int(steps or 1))
    skippable = [name for names in OF_UPDATE.values() for name in names]
    if action == "skip" and metric not in skippable:
        raise UsageError(f"{error}only an update can be skipped, by what is known before it: {', '.join(skippable)}")
    if action == "skip" and (alarm.is_relative or alarm.steps > 1):
        raise UsageError(f"{error}skip needs a number as its limit, and no steps; warn and stop may have more")
    return alarm


def update_check(text: str, role: str) -> Callable[[float, Mapping[str, float]], bool]:
    """What decides before an update of a role whether it is applied: whether its loss is finite and no alarm says to
    skip. Its numbers are the same on all ranks of the role. `text`: value of `--alarms`."""
    alarms = [each for each in parse_alarms(text) if each.action == "skip" and each.metric in OF_UPDATE[role]]

    def accepts(loss: float, metrics: Mapping[str, float]) -> bool:
        return math.isfinite(loss) and not any(
            alarm.metric in metrics and alarm.holds(metrics[alarm.metric]) for alarm in alarms
        )

    return accepts


class Alarms:
    """Watches the metrics of steps; rank 0 only. Alarms that skip are those of `update_check`."""

    def __init__(self, text: str):
        """`text`: value of `--alarms`."""
        self._alarms = [alarm for alarm in parse_alarms(text) if alarm.action != "skip"]
        self._is_default = text in (DEFAULT_ALARMS, ALARMS_WITHOUT_REWARD)
        self._unseen = set() if self._is_default else {alarm.metric for alarm in self._alarms}
        self._history = defaultdict(lambda: deque(maxlen=HISTORY))
        self._holding: set[Alarm] = set()
        self._held = Counter[Alarm]()  # steps up to the present one

    def watch(self, step: int, metrics: Mapping[str, float]):
        """Looks at the metrics of a step: an alarm warns once when its condition begins to hold.

        Raises:
            RunStopped: an alarm with the action `stop` holds.
        """
        if unknown := sorted(name for name in self._unseen - metrics.keys() if not name.startswith("eval/")):
            warn([f"--alarms: step {step} has no metric {', '.join(unknown)}"])
        self._unseen = set()
        self._held = Counter({a: self._held[a] + 1 for a in self._alarms if self._holds(a, metrics)})
        found = {alarm for alarm, steps in self._held.items() if steps >= alarm.steps}
        texts = {alarm: self._text(alarm, step, metrics) for alarm in found - self._holding}
        for metric in {alarm.metric for alarm in self._alarms if alarm.is_relative} & metrics.keys():
            if math.isfinite(metrics[metric]):
                self._history[metric].append(metrics[metric])
        for alarm in sorted(texts):
            if alarm.action == "stop":
                raise RunStopped(texts[alarm])
            warn([texts[alarm]])
        self._holding = found

    def _text(self, alarm: Alarm, step: int, metrics: Mapping[str, float]) -> str:
        usual = f", median {median(self._history[alarm.metric]):.4g}" if alarm.is_relative else ""
        steps = f", for {alarm.steps} steps" if alarm.steps > 1 else ""
        return f"step {step}: {alarm.metric} is {metrics[alarm.metric]:.4g}{usual}{steps} (--alarms {str(alarm)!r})"

    def _holds(self, alarm: Alarm, metrics: Mapping[str, float]) -> bool:
        if self._is_default and alarm.metric == OF_ENGINE and metrics.get("rollout/staleness", 0) > 0:
            return False
        value = metrics.get(alarm.metric)
        return value is not None and alarm.holds(value, self._history[alarm.metric])
