"""What ranks report of a step: a rank's record of it, and how rank 0 collects those of all ranks.

Reports go through the process group's store and no collective: a rank that has finished a step starts the next one
while others still train. Anyone who reaches the store's port can write to it, so reports are plain JSON, checked when
read. They are cut into pieces: a TCPStore closes the connection on a value above 8 MiB.

A record is kept from the iteration that works on a batch to the one that ends its step. With `--generation-lag` these
are different iterations on ranks that generate, and a checkpoint holds the records of batches that wait for training.
"""

import functools
import json
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megarl.batch import Batch
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ACTOR, StepBatch
from megarl.data.detokenizer import Vocabulary
from megarl.data.images.book import Images
from megarl.data.prompts import PromptSet
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.observe.samples import QUANTITIES
from megarl.plain_files import read_json, reading
from megarl.plain_values import Each, fits
from megarl.roles.reward import Reward
from megarl.rollout.episodes.results import episodes_to_batch
from megarl.rollout.episodes.runner import EpisodeRunner

PIECE_BYTES = 4 << 20  # of a report, per value in the store
MAX_PIECES = 1024  # of a report


class StepReport(NamedTuple):
    """What a rank reports of a step."""

    metrics: dict[str, float]
    times: dict[tuple[str, str], float]  # result of `Timers.end_step`
    seconds: float  # since the previous report
    samples: list[dict]  # rows of the samples file

    def encode(self) -> bytes:
        """The report as JSON. Finite floats read back as the same number; NaN and infinities are kept.

        Raises TypeError if a value is neither a number, text, a list nor a dict of these.
        """
        times = [[role, phase, seconds] for (role, phase), seconds in self.times.items()]
        return json.dumps([self.metrics, times, self.seconds, self.samples], default=_scalar).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> "StepReport":
        """The report from JSON. Raises ValueError for anything that `encode` does not write."""
        item = json.loads(data)
        if not isinstance(item, list) or len(item) != 4:
            raise ValueError("not a list of metrics, times, seconds and samples")
        metrics, times, seconds, samples = item
        if not isinstance(metrics, dict) or not all(map(_is_number, metrics.values())):
            raise ValueError("a metric is not a number")
        if not isinstance(times, list) or not all(map(_is_time, times)) or not _is_number(seconds):
            raise ValueError("a time is not a number")
        if not isinstance(samples, list) or not all(isinstance(row, dict) and "sequence" in row for row in samples):
            raise ValueError("a sample is not a row of the samples file")
        by_phase = {(role, phase): spent for role, phase, spent in times}
        return cls(metrics=metrics, times=by_phase, seconds=seconds, samples=samples)


def _scalar(value):
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a report holds a {type(value).__name__}")


def _is_number(value) -> bool:
    return value is None or isinstance(value, (int, float))


def _is_time(entry) -> bool:
    is_triple = isinstance(entry, list) and len(entry) == 3
    return is_triple and isinstance(entry[0], str) and isinstance(entry[1], str) and _is_number(entry[2])


class AsyncMetrics:
    """All ranks publish their report of a step; rank 0 polls them."""

    def __init__(self, mesh: RoleMesh, timeout: timedelta):
        """`timeout`: maximum time that rank 0 waits for other ranks."""
        self._mesh, self._timeout = mesh, timeout
        self._store = dist.distributed_c10d._get_default_store()
        self._own: deque[tuple[int, StepReport]] = deque()  # (step, report) that rank 0 published, oldest first

    def publish(self, step: int, report: StepReport):
        """Publishes this rank's report of a step. Steps must ascend."""
        if not self._mesh.rank:
            self._own.append((step, report))
            return
        data, key = report.encode(), self._key(step, self._mesh.rank)
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # takes bytes, too
        self._store.set(key, str(len(pieces)))  # last: rank 0 looks for it

    def poll(self, wait: bool) -> list[tuple[int, list[StepReport]]]:
        """[(step, reports by rank)] of the steps that all ranks have published, oldest first, on rank 0; [] elsewhere.

        Args:
            wait: wait until all ranks have published the steps that rank 0 has published.

        Raises:
            DistStoreError: a rank does not publish in time.
            RuntimeError: a report in the store is damaged.
        """
        complete = []
        while self._own:
            step, own = self._own[0]
            keys = [self._key(step, rank) for rank in range(1, self._mesh.size)]
            if wait:
                self._store.wait(keys, self._timeout)
            elif keys and not self._store.check(keys):
                break
            complete.append((step, [own, *(self._take(step, rank) for rank in range(1, self._mesh.size))]))
            self._own.popleft()
        return complete

    def _take(self, step: int, rank: int) -> StepReport:
        key = self._key(step, rank)
        try:
            count = int(self._store.get(key))
            if not 0 < count <= MAX_PIECES:
                raise ValueError(f"{count} pieces")
            names = [f"{key}/{number}" for number in range(count)]
            if not self._store.check(names):  # `get` would wait for it
                raise ValueError("a piece is missing")
            report = StepReport.decode(b"".join(map(self._store.get, names)))
        except (ValueError, RecursionError) as error:
            raise RuntimeError(f"the report of rank {rank} on step {step} is damaged: {error}") from None
        for name in (key, *names):
            self._store.delete_key(name)
        return report

    @staticmethod
    def _key(step: int, rank: int) -> str:
        return f"megarl/report/{step}/{rank}"


FILE = "queued_records.json"  # in a checkpoint: metrics and samples of the steps whose batches it holds


class StepRecord(NamedTuple):
    """What a rank knows of the batch of a step when it has done its part of it."""

    metrics: dict[str, float]
    samples: list[dict]  # rows of the samples file
    moments: dict[str, float]  # of the reward role, after the step's scores


class StepRecords:
    """This rank's records of the step that it ends and of later ones."""

    def __init__(self):
        self._records: dict[int, StepRecord] = {}
        self._restored: dict[int, tuple[dict, list]] = {}  # metrics and samples of a checkpoint, by step

    def __getitem__(self, step: int) -> StepRecord:
        return self._records[step]

    def add(self, step: int, record: StepRecord):
        """Keeps a record; metrics and samples of a batch that a checkpoint held are those of its generation."""
        if step in self._restored:
            metrics, samples = self._restored.pop(step)
            record = record._replace(metrics=metrics, samples=samples)
        self._records[step] = record

    def forget_before(self, step: int):
        """Removes the records of earlier steps."""
        self._records = {number: record for number, record in self._records.items() if number >= step}

    def files(self, mesh: RoleMesh, step: int) -> dict[str, bytes]:
        """The file of all ranks' records of later steps, on rank 0; {} elsewhere, and if there are none. Collective."""
        own = {number: record[:2] for number, record in self._records.items() if number > step}
        merged: dict[int, tuple[dict, list]] = {}
        for of_rank in mesh.gather(own) or []:
            for number, (metrics, rows) in of_rank.items():
                before = merged.get(number, ({}, []))
                merged[number] = metrics | before[0], before[1] + rows  # the first rank wins, as in a report
        return {FILE: json.dumps(merged).encode()} if merged else {}

    def restore(self, folder: Path, through: int, reporting_rank: int):
        """Reads the records of a checkpoint, which `reporting_rank` reports; the others then report nothing.

        `through`: the last step whose batch the checkpoint holds; records of later steps are of a run that ended.

        Raises:
            UsageError: the file is damaged.
        """
        records, reports = _read(folder / FILE, reporting_rank), dist.get_rank() == reporting_rank
        held = {step: record for step, record in records.items() if step <= through}
        self._restored = {step: record if reports else ({}, []) for step, record in held.items()}


def _read(path: Path, reporting_rank: int) -> dict[int, tuple[dict, list]]:
    if not path.exists():
        return {}
    try:
        with reading(f"--load {path}", "is damaged"):
            records = read_json(path)
            if not fits(records, Each(_is_record, str.isdecimal)):
                raise ValueError("it is not what megarl writes")
    except UsageError as error:
        raise UsageError(str(error), reporting_rank) from None
    return {int(step): (metrics, samples) for step, (metrics, samples) in records.items()}


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and fits(value[0], Each((None, int, float)))
        and fits(value[1], [dict])
    )


# -- rows of responses ---------------------------------------------------------------------------------------------

# Rows of responses for the samples of a run: token by token for the report, and what there is of a step that fails.
#
# The tokens of a step's first responses, with log-probs, advantages and values, are files of their own beside the
# samples: the numbers of a token differ by rounding between layouts of a run, its samples are the same to the byte.


_WRITTEN = "response_mask"
MAX_TOKENS = 1024  # tokens of a response; the rest of a longer one is left out, which bounds a step's file


class TokenSamples:
    """Makes the rows of `tokens/step_%08d.jsonl`."""

    def __init__(self, count: int, tokenizer: Tokenizer, has_forced: bool = False, images: Images | None = None):
        """`count`: responses of a step; 0: none. `has_forced`: responses may have tokens of a thinking budget.
        `images`: those of the policy."""
        self._count, self._decode, self._has_forced = count, tokenizer.decode, has_forced
        if images is not None:
            self._decode = functools.partial(images.text, decode=tokenizer.decode)
        self._vocabulary = Vocabulary(tokenizer)

    def rows(self, step_batch: StepBatch) -> list[dict]:
        """Rows of the responses that this rank's replica of the actor holds; its leader calls this after the update.

        A row has `sequence` (number in the batch), `prompt` and `response` (text), `reward`, `finished`, `length` (all
        response tokens), and lists with an item for each of the first `MAX_TOKENS` response tokens: `tokens` (their
        texts), `token_ids`, and the fields of `QUANTITIES` (nats, except advantages, values and returns). Numbers are
        the shortest decimals that read back as the same float32. With an environment or a thinking budget, `observed`
        says which tokens are theirs, and not the policy's: `response`, `length` and the lists have both.
        """
        batch = step_batch[ACTOR]
        assert batch is not None  # on the actor's ranks
        chosen = (batch.sequence_ids < self._count).nonzero().flatten()
        if not len(chosen):
            return []
        part = batch.select(chosen)
        names = [name for name in QUANTITIES if getattr(part, name) is not None]
        columns = [getattr(part, name).float() for name in names]
        if part.turn_rewards is not None or self._has_forced:
            names, columns = [*names, _WRITTEN], [*columns, part.response_mask.float()]
        fields = torch.stack(columns).cpu().numpy()
        return [
            self._row(columns, ids, values, names, step_batch.prompts)
            for columns, ids, values in _sequences(part, fields)
        ]

    def _row(self, columns: dict, ids: list[int], values: np.ndarray, names: list[str], prompts: PromptSet) -> dict:
        """`values`: [F, T] of the response tokens `ids` [T]."""
        shown, fields = ids[:MAX_TOKENS], dict(zip(names, values[:, :MAX_TOKENS], strict=True))
        written = fields.pop(_WRITTEN, None)
        observed = {} if written is None else {"observed": (written == 0).tolist()}
        return {
            "sequence": columns["sequence_ids"],
            "prompt": prompts[columns["prompt_ids"]].text,
            "response": self._decode(ids),
            "reward": columns["scores"],
            "finished": columns["finished"],
            "length": len(ids),
            "tokens": [self._decode([each]) if each < 0 else self._vocabulary.token(each)[0] for each in shown],
            "token_ids": shown,
            **observed,
            # The shortest decimals that name the 32-bit numbers.
            **{name: [float(str(value)) for value in of_field] for name, of_field in fields.items()},
        }


def _sequences(batch: Batch, fields: np.ndarray):
    """For each sequence of a batch (its per-sequence fields, ids of its response tokens, their `fields` [F, T])."""
    names = ("sequence_ids", "prompt_ids", "scores", "finished")
    columns = zip(*(getattr(batch, name).tolist() for name in names), strict=True)
    tokens, starts = batch.tokens.cpu().numpy(), batch.cu_seqlens.tolist()
    prompt_lengths = batch.prompt_lengths.tolist()
    for number, of_sequence in enumerate(columns):
        response = slice(starts[number] + prompt_lengths[number], starts[number + 1])
        yield dict(zip(names, of_sequence, strict=True)), tokens[response].tolist(), fields[:, response]


def rows_so_far(
    reward: Reward, step_batch: StepBatch | None, episodes: EpisodeRunner | None, scored: Sequence[dict] = ()
) -> Sequence[dict]:
    """Rows of the responses that this rank holds, with what is known of them; for `samples.keep_for_failure`.

    Args:
        step_batch: None until all are generated; then the `episodes` that have ended are what there is.
        scored: rows of those that were scored before.
    """
    if rows := (reward.running.rows if reward.running is not None else []) or scored:
        return rows
    if step_batch is not None and (batch := step_batch[ACTOR] or step_batch[reward.name]):
        rows = reward.unscored_rows(batch, step_batch.prompts)
        if batch.scores is None:
            return rows
        scores = dict(zip(batch.sequence_ids.tolist(), batch.scores.tolist(), strict=True))
        return [row | {"reward": scores[row["sequence"]]} for row in rows]
    if episodes is not None and episodes.ended is not None:
        ended, prompts = episodes.ended
        assert prompts is not None  # episodes that have begun have some
        return reward.unscored_rows(episodes_to_batch(ended), prompts)
    return []
