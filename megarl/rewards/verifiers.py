"""All verifiers of a run: where each runs, its time limit, and the fallback score of a sample on which one fails."""

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from megarl import plugins
from megarl.observe import activity
from megarl.rewards import guard
from megarl.rewards.base import Job, Sample, Score, TimedOut, Verifier, failure, reference_sample
from megarl.rewards.verifier_workers import Workers


class VerifierSet:
    """Scores samples with all `verifiers`; `failures` holds the last call's reasons, one per failed sample, by name.

    `reasons` holds for each sample of the last call why it has no score, or None.

    Verifiers in `seconds` may hang: they have that many seconds per sample (a call with several: times these) and run
    in `workers`, or without workers in this process under an alarm. Those in `threads` enforce their own limit and run
    concurrently on that many threads. All others run in this process without a limit.

    `wrong` holds the score of a wrong answer for verifiers of responses alone. If such a one exceeds its seconds, the
    response is at fault: it gets this score, unless the reference answer takes too long, too. Plug-ins may wait for
    something else, so their time-outs are failures. `timeouts` counts the last call's wrong answers of this kind.

    `seconds_of_calls` has for each verifier of the last call how long all its calls took, added up: several may run at
    a time.
    """

    def __init__(self, verifiers: dict[str, Verifier], seconds: dict[str, float], threads: dict[str, int],
                 workers: Workers | None, fallback: float, wrong: dict[str, Score], timing: Sequence[str]):  # fmt: skip
        self.names = tuple(verifiers)
        self.failures: dict[str, list[str]] = {name: [] for name in verifiers}
        self.reasons: list[str | None] = []
        self.seconds_of_calls: dict[str, float] = defaultdict(float)
        self.timeouts = dict.fromkeys(timing, 0)
        self._wrong = {name: dataclasses.replace(score, timed_out=True) for name, score in wrong.items()}
        self._verifiers, self._seconds, self._workers = verifiers, seconds, workers
        self._threads = {name: ThreadPoolExecutor(count, f"reward-{name}") for name, count in threads.items()}
        self._fallback = Score(fallback, False)

    @property
    def needs_whole_groups(self) -> bool:
        """Whether a verifier gets all samples of a prompt together."""
        return any(verifier.grouped for verifier in self._verifiers.values())

    def score(
        self, samples: list[Sample], groups: Sequence[Sequence[int]] = (), names: Collection[str] | None = None
    ) -> dict[str, list[Score]]:
        """Each verifier's scores of the samples; a failure gives the fallback score and a line in `failures`.

        `groups`: positions of each prompt's samples, all of 0, 1, … in order; read for grouped verifiers only. `names`:
        the verifiers to use; None: all.
        A verifier fails if it raises, takes too long, or returns anything but finite numbers. UsageError if it needs an
        alarm and none can be set (see `guard`); RuntimeError if a worker cannot start.
        """
        used = [name for name in self.names if names is None or name in names]
        self.seconds_of_calls = defaultdict(float)
        in_threads = {
            name: [threads.submit(self._timed, name, [sample]) for sample in samples]
            for name, threads in self._threads.items()
            if name in used
        }
        with activity.limited():
            outcomes = self._limited(samples, groups, used)
            for name, futures in in_threads.items():
                outcomes[name] = [outcome for future in futures for outcome in self._counted(name, future.result())]
        for name in used:
            if name not in outcomes:
                outcomes[name] = self._counted(name, self._timed(name, samples))
        self.failures = {name: [each for each in outcomes[name] if isinstance(each, str)] for name in used}
        self.reasons = [
            next((each for each in of_sample if isinstance(each, str)), None)
            for of_sample in (zip(*outcomes.values(), strict=True) if outcomes else [()] * len(samples))
        ]
        for name in self.timeouts.keys() & set(used):
            self.timeouts[name] = sum(isinstance(each, Score) and each.timed_out for each in outcomes[name])
        return {name: [self._fallback if isinstance(each, str) else each for each in outcomes[name]] for name in used}

    def close(self):
        """Kill the workers and shut the threads down; these finish their current sample."""
        if self._workers is not None:
            self._workers.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _timed(self, name: str, samples: list[Sample]) -> tuple[list[Score | str], float]:
        start = time.perf_counter()
        outcomes = self._verifiers[name].outcomes(samples)
        return outcomes, time.perf_counter() - start

    def _counted(self, name: str, timed: tuple[list[Score | str], float]) -> list[Score | str]:
        self.seconds_of_calls[name] += timed[1]
        return timed[0]

    def _limited(
        self, samples: list[Sample], groups: Sequence[Sequence[int]], used: Collection[str]
    ) -> dict[str, list[Score | str]]:
        jobs: list[Job] = []
        limited = {name: seconds for name, seconds in self._seconds.items() if name in used}
        for name, seconds in limited.items():
            calls = [[sample] for sample in samples]
            if self._verifiers[name].grouped:
                calls = [[samples[i] for i in group] for group in groups]
            elif self._verifiers[name].batched and samples:
                calls = [samples]
            elif self._verifiers[name].concurrent and samples:
                shares = 1 if self._workers is None else self._workers.count
                calls = list(map(list, itertools.batched(samples, -(-len(samples) // shares))))  # of nearly one length
            jobs += [Job(name, call, seconds * len(call)) for call in calls]
        outcomes: dict[str, list[Score | str]] = {name: [] for name in limited}
        results = self._run(jobs)
        are_late = [isinstance(result[0], TimedOut) for result in results]
        late = [number for number, job in enumerate(jobs) if job.name in self._wrong and are_late[number]]
        checks = [
            dataclasses.replace(jobs[number], samples=[reference_sample(*jobs[number].samples)]) for number in late
        ]
        for number, check in zip(late, self._run(checks), strict=True):
            if isinstance(check[0], Score):
                results[number] = [self._wrong[jobs[number].name]]
        for job, result in zip(jobs, results, strict=True):
            outcomes[job.name] += result
        return outcomes

    def _run(self, jobs: list[Job]) -> list[list[Score | str]]:
        if self._workers is not None:
            found = self._workers.run(jobs)
            for name, seconds in self._workers.seconds.items():
                self.seconds_of_calls[name] += seconds
            return found
        results: list[list[Score | str]] = []
        for name, of_verifier in itertools.groupby(jobs, key=lambda job: job.name):
            with plugins.kept(f"--reward {name}"):
                results += map(self._run_here, of_verifier)
        return results

    def _run_here(self, job: Job) -> list[Score | str]:
        start = time.perf_counter()
        try:
            return guard.call(self._verifiers[job.name].outcomes, job.samples, job.seconds)
        except TimeoutError as error:
            return [TimedOut(failure(job.name, sample, str(error))) for sample in job.samples]
        finally:
            self.seconds_of_calls[job.name] += time.perf_counter() - start
