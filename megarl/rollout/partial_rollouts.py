"""Groups whose responses are not finished, which the next round continues.

Partial rollouts (Kimi k1.5, arXiv 2501.12599 §2.6; APRIL, 2509.18521): a round that stops early keeps its unfinished
groups, with the log-probs and the version of the policy that generated each token. The next round starts with them.
Every rank holds all of them, so any replica of any layout can continue any group.
"""

import io
import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import GENERATED_FIELDS, Batch, concatenate, expand_ranges
from megarl.comm.exchange import from_bytes, to_bytes
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.rollout.requests import PartialResponse, PromptRequest

VERSIONS = "versions"  # kept in addition to `GENERATED_FIELDS`
_RESTORED_FIELDS = ("response_mask", "rollout_logprobs", VERSIONS)


class PartialRolloutBuffer:
    """The unfinished groups, oldest first; the same on every rank."""

    def __init__(self, mesh: RoleMesh, settings: Settings):
        self.mesh, self.settings, self.samples = mesh, settings, settings.samples_per_prompt
        self.version = 0  # policy version: updates so far
        self.dropped = 0  # groups dropped for `--max-staleness` since the last `metrics`
        self._groups: list[tuple[int, int, int]] = []  # line, draw index, step that drew the line
        self._responses: Batch | None = None  # of `_groups`, numbered from 0, on the host
        self._continued: Batch | None = None  # of the groups that the present round continues

    def __len__(self) -> int:
        return len(self._groups)

    def pop_oldest(self, count: int) -> list[PromptRequest]:
        """Removes and returns at most `count` groups, oldest first. `keep_unfinished` puts back those not taken."""
        self._drop_stale()
        popped, self._groups = self._groups[:count], self._groups[count:]
        self._continued, self._responses = _split_batch(self._responses, len(popped) * self.samples)
        if not popped:
            return []
        b, requests = self._continued, []
        responses = zip(b.tokens.split(b.lengths.tolist()), b.prompt_lengths.tolist(), b.finished.tolist(), strict=True)
        for line, draw_index, step in popped:
            group = list(itertools.islice(responses, self.samples))
            partial = tuple(
                PartialResponse(tokens[start:].tolist(), is_finished) for tokens, start, is_finished in group
            )
            tokens, prompt_length, _ = group[0]
            requests.append(PromptRequest(line, tokens[:prompt_length].tolist(), draw_index, step, partial))
        return requests

    def _drop_stale(self):
        limit = self.settings.max_staleness
        if not limit or not len(self):
            return
        batch, oldest = self._responses, torch.full((len(self) * self.samples,), self.version, dtype=torch.int32)
        token_ids = torch.repeat_interleave(batch.sequence_ids, batch.lengths)[batch.response_mask]
        oldest = oldest.scatter_reduce(0, token_ids, batch.versions[batch.response_mask], "amin")
        is_fresh = self.version - oldest.view(-1, self.samples).amin(1) <= limit
        self.dropped += int((~is_fresh).sum())
        self._groups = [group for group, fresh in zip(self._groups, is_fresh.tolist(), strict=True) if fresh]
        self._responses = _renumbered(batch.select(is_fresh.repeat_interleave(self.samples).nonzero().flatten()))

    def keep_unfinished(
        self, batch: Batch | None, requests: list[PromptRequest], step: int, taken: Tensor, longest: int | None
    ) -> tuple[Batch | None, int]:
        """Keeps the groups of a round that are not taken. Returns (this rank's restored batch, its new tokens).

        Responses are truncated to `longest` new tokens. An unfinished response has at least that many, so the result
        does not depend on the layout or on timing. A collective of the world if groups are kept.

        Args:
            batch: of `Rollout.generate`.
            requests: given to `Rollout.generate`, those of `pop_oldest` first.
            taken, longest: of `Rollout.earliest_groups`; all groups and None if all are taken.
        """
        new_tokens = 0
        if batch is not None:
            batch = batch if longest is None else _truncate(batch, longest)
            new_tokens = int(batch.response_mask.sum())
            self._restore_continued(batch)
        if len(taken) < len(requests):
            is_kept = torch.ones(len(requests), dtype=torch.bool)
            is_kept[taken] = False
            self._keep(batch, is_kept)
            kept = [requests[i] for i in is_kept.nonzero().flatten().tolist()]
            self._groups = [(r.line, r.draw_index, step if r.step is None else r.step) for r in kept] + self._groups
        self._continued = None
        return batch, new_tokens

    def _restore_continued(self, batch: Batch):
        """Restores continued tokens, which the engine had as prompt: mask, log-probs, versions, prompt lengths."""
        batch.versions = torch.full_like(batch.tokens, self.version, dtype=torch.int32)
        if self._continued is None:
            return
        is_continued = (batch.sequence_ids < len(self._continued)).nonzero().flatten()
        before = self._continued.select(batch.sequence_ids[is_continued].cpu()).to(batch.tokens.device)
        positions = expand_ranges(batch.cu_seqlens[:-1][is_continued], before.lengths)
        for name in _RESTORED_FIELDS:
            getattr(batch, name)[positions] = getattr(before, name)
        batch.prompt_lengths[is_continued] = before.prompt_lengths

    def _keep(self, batch: Batch | None, is_kept: Tensor):
        """Copies the sequences of the kept groups ([G] bool) from the replicas that hold them to every rank."""
        role_groups, names = self.mesh[ROLLOUT], [*GENERATED_FIELDS, VERSIONS]
        sizes = torch.zeros(len(role_groups.replicas), dtype=torch.int64, device=device.device())
        if role_groups.is_leader:
            chosen = is_kept.to(batch.sequence_ids.device).repeat_interleave(self.samples)[batch.sequence_ids]
            mine = to_bytes(batch.select(chosen.nonzero().flatten()), names)
            sizes[role_groups.dp_rank] = len(mine)
        dist.all_reduce(sizes)
        payload = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=sizes.device)
        shares = payload.split(sizes.tolist())
        if role_groups.is_leader:
            shares[role_groups.dp_rank].copy_(mine)
        dist.all_reduce(payload)  # as an all-gather: each share is 0 on all ranks but one
        kept = concatenate([from_bytes(share, names) for share in shares]).to("cpu")
        self._responses = _renumbered(kept, self._responses)

    def staleness_metrics(self, batch: Batch | None) -> dict[str, float]:
        """Staleness, in updates, of the response tokens of a batch before it is trained on; {} outside the rollout.

        `batch`: this rank's share. A collective of the rollout.
        """
        role_groups = self.mesh[ROLLOUT]
        if not role_groups.is_member:
            return {}
        ages = (self.version - batch.versions[batch.response_mask]).double()
        sums = torch.stack([ages.sum(), (ages > 0).sum().double(), ages.new_tensor(len(ages))])
        largest = torch.cat([ages, ages.new_zeros(1)]).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=role_groups.pg_collection.dp)
        age, old, count = role_groups.dp_all_reduce(sums).tolist()
        return {
            "rollout/staleness": age / max(count, 1.0),
            "rollout/staleness_max": int(largest),
            "rollout/carried_fraction": old / max(count, 1.0),
        }

    def advance_version(self, step: int):
        """Counts the policy update of a step; during critic warm-up a step has none."""
        self.version += step > self.settings.critic_warmup_steps

    def metrics(self) -> dict[str, int]:
        """Groups carried to the next step, and groups dropped as too old in this one."""
        dropped, self.dropped = self.dropped, 0
        return {"rollout/carried_groups": len(self), "rollout/dropped_groups": dropped}

    def to_bytes(self) -> bytes:
        """The state for `from_bytes`."""
        fields = {name: getattr(self._responses, name) for name in self._responses.present()} if len(self) else {}
        file = io.BytesIO()
        torch.save({"version": self.version, "samples": self.samples, "groups": self._groups, **fields}, file)
        return file.getvalue()

    def from_bytes(self, data: bytes):
        """Loads the groups of a checkpoint.

        Raises:
            UsageError: the run has no partial rollouts, another group size, or too small length limits.
        """
        s, fields = self.settings, torch.load(io.BytesIO(data), weights_only=True)
        version, samples, groups = (fields.pop(name) for name in ("version", "samples", "groups"))
        if not s.partial_rollouts and not groups:
            return
        if not s.partial_rollouts or (groups and samples != self.samples):
            raise UsageError(
                f"--load: the checkpoint holds {len(groups)} unfinished groups of {samples} responses; add "
                f"--partial-rollouts --samples-per-prompt {samples}"
            )
        self.version, self._groups, self._responses = version, groups, Batch(**fields) if groups else None
        if not groups:
            return
        prompt = int(self._responses.prompt_lengths.max())
        response = int((self._responses.lengths - self._responses.prompt_lengths).max())
        if prompt > s.max_prompt_length or response > s.max_response_length:
            raise UsageError(
                f"--load: the checkpoint holds unfinished groups with prompts of up to {prompt} and responses of up to "
                f"{response} tokens; raise --max-prompt-length and --max-response-length to at least these"
            )


def _split_batch(batch: Batch | None, count: int) -> tuple[Batch | None, Batch | None]:
    """The first `count` sequences and the others, each numbered from 0; None instead of an empty batch."""
    if batch is None:
        return None, None
    front, back = torch.arange(len(batch)).tensor_split([count])
    return tuple(_renumbered(batch.select(index)) if len(index) else None for index in (front, back))


def _renumbered(*batches: Batch | None) -> Batch | None:
    """Joins batches in the order given, numbered from 0; None without sequences."""
    batches = [batch for batch in batches if batch is not None and len(batch)]
    if not batches:
        return None
    new_ids = torch.arange(sum(map(len, batches))).split([len(batch) for batch in batches])
    for batch, ids in zip(batches, new_ids, strict=True):
        batch.sequence_ids = ids
    return concatenate(batches)


def _truncate(batch: Batch, longest: int) -> Batch:
    """Truncates each response to `longest` new tokens; a truncated response is not finished."""
    lengths = batch.lengths.minimum(batch.prompt_lengths + longest)
    every = torch.arange(len(batch), device=lengths.device)
    truncated = batch.take(every, expand_ranges(batch.cu_seqlens[:-1], lengths))
    truncated.lengths, truncated.finished = lengths, batch.finished & (lengths == batch.lengths)
    return truncated
