"""All verifiers of a run at once: where each runs, its time limit, and what a sample gets that one fails on."""

from concurrent.futures import ThreadPoolExecutor

from megarl.rewards import guard
from megarl.rewards.base import Job, Sample, Score, Verifier, failure
from megarl.rewards.pool import Workers


class VerifierSet:
    """Scores samples with all of `rewards`; `failures` has for each the reasons of the last call, one a failed sample.

    Those in `seconds` may hang, and have that long for a sample (a batched one: that times the samples): they run in
    `workers`, or, without these, here under an alarm. Those in `threads` keep to a limit of their own: beside the
    others, on that many threads. The rest runs here as it is.
    """

    def __init__(self, rewards: dict[str, Verifier], seconds: dict[str, float], threads: dict[str, int],
                 workers: Workers | None, fallback: float):  # fmt: skip
        self.names = tuple(rewards)
        self.failures: dict[str, list[str]] = {name: [] for name in rewards}
        self._rewards, self._seconds, self._workers = rewards, seconds, workers
        self._threads = {name: ThreadPoolExecutor(count, f"reward-{name}") for name, count in threads.items()}
        self._fallback = Score(fallback, False)

    def score(self, samples: list[Sample]) -> dict[str, list[Score]]:
        """Each verifier's scores of the samples; where it fails on one, the fall-back, and a line in `failures`.

        A verifier fails that raises, takes too long, or gives something else than finite numbers. UsageError where
        it would need an alarm and there can be none (see `guard`); RuntimeError if a worker cannot start.
        """
        beside = {
            name: [threads.submit(self._rewards[name].outcomes, [sample]) for sample in samples]
            for name, threads in self._threads.items()
        }
        outcomes = self._limited(samples)
        for name in self.names:
            if name in beside:
                outcomes[name] = [future.result()[0] for future in beside[name]]
            elif name not in outcomes:
                outcomes[name] = self._rewards[name].outcomes(samples)
        self.failures = {name: [each for each in outcomes[name] if isinstance(each, str)] for name in self.names}
        return {
            name: [self._fallback if isinstance(each, str) else each for each in outcomes[name]] for name in self.names
        }

    def close(self):
        """Ends workers and threads; these end with what they are at."""
        if self._workers is not None:
            self._workers.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _limited(self, samples: list[Sample]) -> dict[str, list[Score | str]]:
        jobs: list[Job] = []
        for name, seconds in self._seconds.items():
            if self._rewards[name].batched and samples:
                jobs.append(Job(name, samples, seconds * len(samples)))
            else:
                jobs += [Job(name, [sample], seconds) for sample in samples]
        outcomes: dict[str, list[Score | str]] = {name: [] for name in self._seconds}
        results = self._workers.run(jobs) if self._workers is not None else map(self._run_here, jobs)
        for job, result in zip(jobs, results, strict=True):
            outcomes[job.name] += result
        return outcomes

    def _run_here(self, job: Job) -> list[Score | str]:
        try:
            return guard.call(self._rewards[job.name].outcomes, job.samples, job.seconds)
        except TimeoutError as error:
            return [failure(job.name, sample, str(error)) for sample in job.samples]
