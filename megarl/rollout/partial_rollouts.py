"""Groups that were begun and did not come in: what there is of their responses, to be gone on with.

Partial rollouts (Kimi k1.5, arXiv 2501.12599 §2.6; APRIL, 2509.18521): a round that stops before all of its groups are
whole keeps the others, with the log-probs of the policy that wrote them and its version. The next round begins with
them. Every rank holds all of them, so any lane of any layout may go on with any group.
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

VERSIONS = "versions"  # the field that is kept beyond those that writing gives
_RESTORED_FIELDS = ("response_mask", "rollout_logprobs", VERSIONS)


class PartialRolloutBuffer:
    """The groups that go on, oldest first; the same ones on every rank."""

    def __init__(self, mesh: RoleMesh, settings: Settings):
        self.mesh, self.settings, self.samples = mesh, settings, settings.samples_per_prompt
        self.version = 0  # batches learnt so far: names the policy that writes
        self.dropped = 0  # groups that were too old, since it was asked last
        self._groups: list[tuple[int, int, int]] = []  # line, times drawn before, step that drew it
        self._written: Batch | None = None  # on the host; sequence ids number the groups' responses
        self._taken: Batch | None = None  # the same of those that a round goes on with

    def __len__(self) -> int:
        return len(self._groups)

    def pop_oldest(self, most: int) -> list[PromptRequest]:
        """The oldest groups, `most` of them if there are as many. They come back by `settle`, if they are not whole."""
        self._drop_stale()
        taken, self._groups = self._groups[:most], self._groups[most:]
        self._taken, self._written = _split_batch(self._written, len(taken) * self.samples)
        if not taken:
            return []
        b, prompts = self._taken, []
        responses = zip(b.tokens.split(b.lengths.tolist()), b.prompt_lengths.tolist(), b.finished.tolist(), strict=True)
        for line, again, step in taken:
            group = list(itertools.islice(responses, self.samples))
            parts = tuple(
                PartialResponse(tokens[prompt:].tolist(), is_finished) for tokens, prompt, is_finished in group
            )
            prompts.append(PromptRequest(line, group[0][0][: group[0][1]].tolist(), again, step, parts))
        return prompts

    def _drop_stale(self):
        limit = self.settings.max_staleness
        if not limit or not len(self):
            return
        batch, oldest = self._written, torch.full((len(self) * self.samples,), self.version, dtype=torch.int32)
        numbers = torch.repeat_interleave(batch.sequence_ids, batch.lengths)[batch.response_mask]
        oldest = oldest.scatter_reduce(0, numbers, batch.versions[batch.response_mask], "amin")
        keeps = self.version - oldest.view(-1, self.samples).amin(1) <= limit
        self.dropped += int((~keeps).sum())
        self._groups = [group for group, keep in zip(self._groups, keeps.tolist(), strict=True) if keep]
        self._written = _renumbered(batch.select(keeps.repeat_interleave(self.samples).nonzero().flatten()))

    def keep_unfinished(
        self, batch: Batch | None, prompts: list[PromptRequest], step: int, first: Tensor, longest: int | None
    ) -> tuple[Batch | None, int]:
        """(this rank's share of a round with whole responses, tokens of it that are new); keeps what did not come in.

        What is kept of a response is cut to the round's `longest` new tokens: no response ended before has fewer, so
        it is the same whoever wrote it and whenever. A collective of the world where some groups did not come in.

        Args:
            batch: of `Rollout.generate`.
            prompts: that it was given, those of `take` in front.
            first, longest: of `Rollout.first`; all groups and None where all came in.
        """
        new = 0
        if batch is not None:
            batch = batch if longest is None else _truncate(batch, longest)
            new = int(batch.response_mask.sum())
            self._join(batch)
        if len(first) < len(prompts):
            out = torch.ones(len(prompts), dtype=torch.bool)
            out[first] = False
            self._keep(batch, out)
            kept = [prompts[i] for i in out.nonzero().flatten().tolist()]
            before = [(p.line, p.again, step if p.step is None else p.step) for p in kept]
            self._groups = before + self._groups
        self._taken = None
        return batch, new

    def _join(self, batch: Batch):
        """What was written before is no prompt: it gets its log-probs and versions back."""
        batch.versions = torch.full_like(batch.tokens, self.version, dtype=torch.int32)
        if self._taken is None:
            return
        goes_on = (batch.sequence_ids < len(self._taken)).nonzero().flatten()
        before = self._taken.select(batch.sequence_ids[goes_on].cpu()).to(batch.tokens.device)
        places = expand_ranges(batch.cu_seqlens[:-1][goes_on], before.lengths)
        for name in _RESTORED_FIELDS:
            getattr(batch, name)[places] = getattr(before, name)
        batch.prompt_lengths[goes_on] = before.prompt_lengths

    def _keep(self, batch: Batch | None, out: Tensor):
        """Every rank gets the sequences of the groups [G] that are out, from the lanes that hold them."""
        role_groups, names = self.mesh[ROLLOUT], [*GENERATED_FIELDS, VERSIONS]
        sizes = torch.zeros(len(role_groups.replicas), dtype=torch.int64, device=device.device())
        if role_groups.is_leader:
            where = out.to(batch.sequence_ids.device).repeat_interleave(self.samples)[batch.sequence_ids]
            mine = to_bytes(batch.select(where.nonzero().flatten()), names)
            sizes[role_groups.dp_rank] = len(mine)
        dist.all_reduce(sizes)
        payload = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=sizes.device)
        shares = payload.split(sizes.tolist())
        if role_groups.is_leader:
            shares[role_groups.dp_rank].copy_(mine)
        dist.all_reduce(payload)  # one adds, others add 0
        found = concatenate([from_bytes(share, names) for share in shares]).to("cpu")
        self._written = _renumbered(found, self._written)

    def staleness_metrics(self, batch: Batch | None) -> dict[str, float]:
        """How many updates old the tokens of a batch are that is about to be trained on; nothing outside the rollout.

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
        """Counts the policy update that a step makes; while the critic warms up it makes none."""
        self.version += step > self.settings.critic_warmup_steps

    def metrics(self) -> dict[str, int]:
        """What goes on in the next step, and what was too old for this one."""
        dropped, self.dropped = self.dropped, 0
        return {"rollout/carried_groups": len(self), "rollout/dropped_groups": dropped}

    def to_bytes(self) -> bytes:
        """What `from_bytes` takes up."""
        fields = {name: getattr(self._written, name) for name in self._written.present()} if len(self) else {}
        file = io.BytesIO()
        torch.save({"version": self.version, "samples": self.samples, "groups": self._groups, **fields}, file)
        return file.getvalue()

    def from_bytes(self, data: bytes):
        """Takes the groups of a checkpoint up.

        Raises:
            UsageError: the run does not go on with them, or not within its lengths.
        """
        s, fields = self.settings, torch.load(io.BytesIO(data), weights_only=True)
        version, samples, groups = (fields.pop(name) for name in ("version", "samples", "groups"))
        if not s.partial_rollouts and not groups:
            return
        if not s.partial_rollouts or (groups and samples != self.samples):
            raise UsageError(
                f"--load: {len(groups)} groups of {samples} responses are half written in the checkpoint; allowed are "
                f"--partial-rollouts and --samples-per-prompt {samples}"
            )
        self.version, self._groups, self._written = version, groups, Batch(**fields) if groups else None
        if not groups:
            return
        prompt = int(self._written.prompt_lengths.max())
        response = int((self._written.lengths - self._written.prompt_lengths).max())
        if prompt > s.max_prompt_length or response > s.max_response_length:
            raise UsageError(
                f"--load: half written in the checkpoint are prompts of up to {prompt} and responses of up to "
                f"{response} tokens; allowed are no smaller --max-prompt-length and --max-response-length"
            )


def _split_batch(batch: Batch | None, count: int) -> tuple[Batch | None, Batch | None]:
    """The first `count` sequences and the others, each numbered from 0; None for none."""
    if batch is None:
        return None, None
    front, back = torch.arange(len(batch)).tensor_split([count])
    return tuple(_renumbered(batch.select(index)) if len(index) else None for index in (front, back))


def _renumbered(*batches: Batch | None) -> Batch | None:
    """One batch of several in their order, numbered from 0; None of nothing."""
    given = [batch for batch in batches if batch is not None and len(batch)]
    if not given:
        return None
    ids = torch.arange(sum(map(len, given))).split([len(batch) for batch in given])
    for batch, numbers in zip(given, ids, strict=True):
        batch.sequence_ids = numbers
    return concatenate(given)


def _truncate(batch: Batch, longest: int) -> Batch:
    """The same with at most so many tokens of each response; those that lose some lose their end, too."""
    lengths = batch.lengths.minimum(batch.prompt_lengths + longest)
    every = torch.arange(len(batch), device=lengths.device)
    cut = batch.take(every, expand_ranges(batch.cu_seqlens[:-1], lengths))
    cut.lengths, cut.finished = lengths, batch.finished & (lengths == batch.lengths)
    return cut
