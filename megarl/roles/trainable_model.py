"""What the actor and the critic have in common: a trainable model, its optimizer and schedule, and one update."""

from pathlib import Path

import torch

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.checkpoint import run_state
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError
from megarl.mcore.attention import packing
from megarl.mcore.memory import offload
from megarl.mcore.model import forward_pass, gpt
from megarl.mcore.parallel import pipeline
from megarl.mcore.training import optimizer
from megarl.mcore.weights import dist_checkpoint
from megarl.router_replay.router_state import RouterState


def _run_microbatches(
    stages, parts: list[tuple[Batch, torch.Tensor]], forward, loss, pg_collection, train: bool
) -> list:
    is_cut, known = stages[0].config.sequence_parallel, [part.host_metadata for part, _ in parts]
    return pipeline.run_microbatches(
        stages, [part for part, _ in parts], forward, loss, pg_collection, train,
        rows=[packing.hidden_rows(found.lengths, found.shared, pg_collection, is_cut) for found in known],
    )  # fmt: skip


def forward_only(stages, parts: list[tuple[Batch, torch.Tensor]], forward, pg_collection) -> list:
    """`forward(chunk, micro-batch)` of each micro-batch without gradients: [(result, places)] on every rank."""
    with forward_pass.inference_mode(stages):
        results = _run_microbatches(
            stages, parts, forward, lambda out, part: (torch.zeros(()), out), pg_collection, train=False
        )
    return [(result, places) for result, (_, places) in zip(results, parts, strict=True)]


class TrainableModel:
    """A role's model on this rank. Nothing of it exists on ranks outside the role."""

    def __init__(
        self, role: RoleSettings, role_groups: RoleGroups, vocab_size: int, updates: int, value_head: bool = False
    ):
        """Builds model, optimizer and schedule.

        Args:
            vocab_size: the tokenizer's.
            updates: optimizer updates of one iteration, the unit of the schedule's flags.
            value_head: a scalar head in the place of the vocabulary's.
        """
        self.role, self.role_groups = role, role_groups
        self.model = gpt.build_model(role.megatron, vocab_size, role_groups.pg_collection, value_head)
        self.wrapped = optimizer.wrap_for_training(self.model, role.megatron, role_groups.pg_collection)
        self.optimizer = optimizer.build_optimizer(self.wrapped, role.megatron, role_groups.pg_collection)
        self.scheduler = optimizer.build_scheduler(self.optimizer, role.megatron, updates)
        self.routes = RouterState(role, role_groups, self.model)
        self.offload = offload.Offload({})
        if role.offload:
            trained, keeps_weights = (self.model, self.wrapped, self.optimizer), role.name == "actor"  # it writes
            self.offload = offload.offload_trainable(*trained, keeps_weights)
        # Sharded gradients have no buffer that stays.
        self.cache_in_grad_buffer = (
            None if role.megatron.use_torch_fsdp2 else offload.KVCacheInGradBuffer(self.wrapped, self.offload)
        )

    def forward_only(self, parts: list[tuple[Batch, torch.Tensor]], forward) -> list:
        """`forward(chunk, micro-batch)` of each micro-batch without gradients: [(result, places)]."""
        with self.offload.present("weights"):
            results = forward_only(self.model, parts, forward, self.role_groups.pg_collection)
        self.routes.collect(parts, trained=False)
        return results

    def load_pretrained(self, folder: Path):
        """Takes the weights of a checkpoint, checked, of which nothing else is wanted. A collective of the role."""
        with self.offload.present("weights", "optimizer", changed=True):
            run_state.load_weights(folder, self.model, self.role_groups.pg_collection, optimizer=self.optimizer)

    def on_device_for_updates(self):
        """Context of a step's updates: memory that leaves between turns stays from one update to the next."""
        return self.offload.present("weights", "gradients", changed=True)

    def update(self, parts: list[tuple[Batch, torch.Tensor]], forward, loss) -> tuple[list, bool, float]:
        """One optimizer update over the micro-batches of a mini-batch.

        Args:
            forward: (chunk, micro-batch) -> output.
            loss: (output, micro-batch) -> (local sum over global count, result).

        Returns:
            Results of the micro-batches, whether the update was applied, the gradient norm.
        """
        with self.on_device_for_updates():
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
            self.routes.train(parts)
            results = _run_microbatches(self.wrapped, parts, forward, loss, self.role_groups.pg_collection, train=True)
            self.routes.collect(parts, trained=True)
            with self.offload.present("optimizer", changed=True):
                applied, norm = optimizer.update(self.optimizer)
            self.optimizer.zero_grad()  # what it made of the gradients is dead as they are
        if applied:
            self.scheduler.step(1)
        return results, applied, norm

    def learning_rate(self) -> float:
        """The rate of the next update."""
        return self.optimizer.param_groups[0]["lr"]

    def microbatches(self, batch: Batch, places: torch.Tensor) -> list[tuple[Batch, torch.Tensor]]:
        """This lane's micro-batches of the sequences at `places`, as many as on every other lane."""
        parts = mb.role_microbatches(batch, places, self.role, self.role_groups)
        self.routes.attach(batch, parts)
        return parts

    def state(self, extra: dict, loading: bool = False) -> dict:
        """What a checkpoint holds of this role; `extra` is picklable state of the caller."""
        plain = {"scheduler": self.scheduler.state_dict(), **extra}
        with self.offload.present("weights", "optimizer"):  # a distributed optimizer gathers its states
            state = dist_checkpoint.role_state(
                self.role.name,
                self.model,
                self.optimizer,
                plain,
                self.role_groups.pg_collection,
                self.role.ranks,
                loading,
            )
        return self.offload.on_host(state)

    def restore(self, loaded: dict) -> dict:
        """Takes up what `state(..., loading=True)` was filled with; returns the caller's part."""
        with self.offload.present("weights", "optimizer", changed=True):
            dist_checkpoint.load_weights(self.model, loaded["model"])
            self.optimizer.load_state_dict(dist_checkpoint.optimizer_state(loaded, self.optimizer))
        try:
            self.scheduler.load_state_dict(loaded["plain"].pop("scheduler"))
        except AssertionError as error:
            raise UsageError(
                f"{self.role.name}: the schedule differs from the checkpoint's ({error}); give the same flags, or "
                "--override-opt-param-scheduler to take the new, --use-checkpoint-opt-param-scheduler the old ones",
                speaker=self.role.ranks.start,
            ) from None
        return loaded["plain"]
