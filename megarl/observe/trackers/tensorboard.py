"""TensorBoard: one event file per start of a run."""

import time
from pathlib import Path


class TensorBoardTracker:
    """Writes one event per step with tensorboard's own file writer.

    directory   of the event files.
    purge_step  readers hide earlier events from this step on; None: a new run.

    The package is imported here, so that only rank 0 pays for it. Unlike torch's SummaryWriter it needs no torch and
    writes all scalars of a step in one record.
    """

    def __init__(self, directory: Path, purge_step: int | None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))
        if purge_step is not None:  # restart marker: readers hide earlier events from this step on
            self._writer.add_event(
                Event(wall_time=time.time(), step=purge_step, session_log=SessionLog(status=SessionLog.START))
            )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
