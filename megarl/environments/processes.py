"""The worker processes of a replica's environments: which one an episode gets, and when one ends."""

import os
from collections.abc import Iterator

from megarl.child_process import Child

MAX_ALONE = 4  # processes at a time that have one episode each


class EnvironmentProcess(Child):
    """A process with environments; `episodes` are the numbers of those that it has."""

    def __init__(self, timeout: float, is_alone: bool = False):
        """`timeout`: seconds that a call of an environment may take; `is_alone`: it gets one episode only."""
        # Sets in the same order in each process: an environment that is played again may depend on it.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        super().__init__("megarl.environments.worker", repr(timeout), environment=environment)
        self.episodes: set[int] = set()
        self.is_alone = is_alone


class Processes:
    """The processes of a pool: those that share the episodes, those with one each, and those that get no more."""

    def __init__(self, workers: int, timeout: float):
        """`workers`: how many share the episodes; `timeout`: seconds that a call may take."""
        self.shared: list[EnvironmentProcess | None] = [None] * workers
        self.others: list[EnvironmentProcess] = []
        self._timeout = timeout

    def __iter__(self) -> Iterator[EnvironmentProcess]:
        return iter([*filter(None, self.shared), *self.others])

    def least_busy(self) -> EnvironmentProcess:
        """The process for one more episode. Starts one that is missing."""
        for slot, process in enumerate(self.shared):
            if process is None:
                process = self.shared[slot] = EnvironmentProcess(self._timeout)
                return process
        return min(filter(None, self.shared), key=lambda process: len(process.episodes))

    def alone(self) -> EnvironmentProcess | None:
        """A new process for a single episode; None if there are as many as may be."""
        if sum(process.is_alone for process in self.others) >= MAX_ALONE:
            return None
        self.others.append(EnvironmentProcess(self._timeout, is_alone=True))
        return self.others[-1]

    def retire(self, process: EnvironmentProcess):
        """The process gets no more episodes, and ends with the last one that it has."""
        if process in self.shared:
            self.shared[self.shared.index(process)] = None
            self.others.append(process)

    def leave(self, process: EnvironmentProcess, number: int):
        """An episode has left a process."""
        process.episodes.discard(number)
        if not process.episodes and process in self.others:
            self.end(process)

    def end(self, process: EnvironmentProcess):
        """Ends a process with all that it has started."""
        process.end()
        if process in self.others:
            self.others.remove(process)
        else:
            self.shared[self.shared.index(process)] = None

    def close(self):
        for process in self:
            process.end()
        self.shared, self.others = [None] * len(self.shared), []
