"""The evaluations of a run: on `--eval-prompts`, and on each file of `--evals` by its name."""

from collections.abc import Iterable
from statistics import fmean

from megarl.arguments import Settings
from megarl.checkpoint.resume import EVAL_PROMPTS, is_held_out
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.observe.timers import Timers
from megarl.rewards import by_file
from megarl.roles.reward import Reward
from megarl.rollout.remote_rollout import RemoteRollout
from megarl.rollout.rollout import Rollout
from megarl.trainers.evaluator import Evaluator, eval_ks
from megarl.trainers.prompt_inputs import name_of_eval

ACCURACY = "accuracy"


class Evaluations:
    """Evaluates on one set after the other. Each draws its responses as it would alone."""

    def __init__(
        self, settings: Settings, mesh: RoleMesh, rollout: Rollout | RemoteRollout, reward: Reward,
        prompts: dict[str, PromptSet], tokens: dict[str, Ragged], timers: Timers,
    ):  # fmt: skip
        """`prompts`, `tokens`: of the held-out sets of `held_out`."""
        common = settings, mesh, rollout, reward
        self._by_name = {
            name_of_eval(name): Evaluator(*common, found, tokens[name], timers) for name, found in prompts.items()
        }
        self._running = next(iter(self._by_name.values()))

    @property
    def prompts(self) -> int:
        return sum(len(evaluator.requests) for evaluator in self._by_name.values())

    def evaluate(self, with_samples: bool = False) -> tuple[dict[str, float] | None, list[dict] | None]:
        """(metrics by name, rows of all responses `with_samples`) on rank 0, None elsewhere. A collective of the world.

        Metrics are `eval/accuracy`, and `eval/<name>/accuracy` of a named evaluation, whose rows have its name. Where
        all are named, `eval/accuracy` is the mean of theirs.
        """
        metrics: dict[str, float] = {}
        samples: list[dict] = []
        for name, evaluator in self._by_name.items():
            self._running = evaluator
            found, rows = evaluator.evaluate(), evaluator.samples() if with_samples else None
            if found is not None:
                metrics |= {named(metric, name): value for metric, value in found.items()}
            if rows is not None:
                samples += rows if name is None else [row | {"eval": name} for row in rows]
        if not metrics:
            return None, None
        if None not in self._by_name:
            mean = fmean(metrics[named(f"eval/{ACCURACY}", name)] for name in self._by_name)
            metrics = {f"eval/{ACCURACY}": mean} | metrics
        return metrics, samples

    def samples_so_far(self) -> list[dict]:
        """As of `Evaluator`, of the one that runs."""
        return self._running.samples_so_far()


def named(metric: str, name: str | None) -> str:
    """`eval/accuracy` -> `eval/<name>/accuracy`; of no name as it is."""
    return metric if name is None else f"eval/{name}/{metric.removeprefix('eval/')}"


def held_out(sets: dict) -> dict:
    """The entries of held-out sets, by their names in the manifest."""
    return {name: found for name, found in sets.items() if is_held_out(name)}


def check_best_metric(settings: Settings, prompts: dict[str, PromptSet]):
    """UsageError if no evaluation has the metric of `--best-metric`. `prompts`: the held-out sets."""
    wanted, n = settings.best_metric, settings.eval_samples
    if wanted is None:
        return
    common = [ACCURACY, "reward", *(f"{kind}@{k}" for kind in ("pass", "mean") for k in eval_ks(settings))]
    allowed = [ACCURACY] if prompts and EVAL_PROMPTS not in prompts else []
    for key, found in prompts.items():
        tasks = {found[line].task for line in range(min(len(found), n))} - {None}
        kinds = [*common, *_term_metrics(settings, found)]
        for task in ("", *(f"{task}/" for task in sorted(tasks) if len(tasks) > 1)):
            allowed += [named(f"eval/{task}{kind}", name_of_eval(key)).removeprefix("eval/") for kind in kinds]
    if wanted not in allowed:
        raise UsageError(f"--best-metric {wanted}: no evaluation has it; allowed: {', '.join(allowed)}")


def _term_metrics(settings: Settings, prompts: PromptSet) -> dict[str, None]:
    """Names of the metrics of terms: a reward of one term has none besides its own mean."""
    expressions = by_file.expressions_of(settings)
    texts = by_file.rewards_of(settings, prompts.entries) or [settings.reward]
    of_several = [expressions[text] for text in texts if len(expressions[text]) > 1]
    return {f"reward/{term.name}": None for terms in of_several for term in terms}


def check_names(prompts: dict[str, PromptSet], lines: int):
    """UsageError if metrics of a named evaluation would have the names of others, of a term or a task.

    `prompts`: the held-out sets; `lines`: how many of a set are evaluated.
    """
    found = prompts.get(EVAL_PROMPTS)
    tasks = set() if found is None else _tasks(found[line].task for line in range(min(len(found), lines)))
    for name in filter(None, map(name_of_eval, prompts)):
        if name == "reward":
            raise UsageError("--evals reward: metrics eval/reward/… are those of the terms; give another name")
        if name in tasks:
            raise UsageError(
                f"--evals {name}: a task of --eval-prompts has metrics eval/{name}/…, too; give another name"
            )


def _tasks(tasks: Iterable[str | None]) -> set[str]:
    """First parts of the tasks' names."""
    return {task.partition("/")[0] for task in tasks if task is not None}
