"""The trainable model of an actor or critic, with optimizer, learning-rate schedule and update step."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.checkpoint.pretrained import PretrainedWeights
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import offload
from megarl.mcore.lora import adapter, peft_files, transfer
from megarl.mcore.model import gpt, sparse_attention
from megarl.mcore.training import optimizer
from megarl.mcore.training.weight_average import WeightAverage
from megarl.mcore.weights import dist_checkpoint, optimizer_states
from megarl.mcore.weights.hf.folder_weights import export_weights
from megarl.mcore.weights.hf.weight_map import weight_map_of
from megarl.roles.passes import forward_only, run_microbatches
from megarl.roles.policy_prediction import PolicyPrediction
from megarl.router_replay.router_state import Microbatches, RouterState


class Update(NamedTuple):
    """An optimizer update."""

    means: torch.Tensor  # its metrics [M], each a mean over the mini-batch
    counts: torch.Tensor  # what each of them is a mean over: [M], or [] for all
    has_loss: bool  # False: no token of the mini-batch counts
    is_skipped: bool  # although there was a loss
    is_overflow: bool  # not applied, but only lowered the loss scale of fp16
    norm: float  # of the gradient


class TrainableModel:
    """A role's model, optimizer and schedule on this rank; exists only on ranks of the role."""

    def __init__(
        self, role: RoleSettings, role_groups: RoleGroups, vocab_size: int, updates: int, value_head: bool = False
    ):
        """Builds model, optimizer and schedule.

        Args:
            vocab_size: of the tokenizer, without padding.
            updates: optimizer updates in a step with a full batch.
            value_head: a scalar head instead of the vocabulary projection.
        """
        self.role, self.role_groups = role, role_groups
        self.value_head, self.updates = value_head, updates
        self.model = gpt.build_model(role.megatron, vocab_size, role_groups.pg_collection, value_head)
        optimizer.freeze(self.model, role.megatron, role_groups.pg_collection)
        if role.lora:
            adapter.add_factors(self.model, role.lora, role.megatron, role_groups.pg_collection)
        self.wrapped = optimizer.wrap_for_training(self.model, role.megatron, role_groups.pg_collection)
        adapter.keep_base(self.model)
        self.optimizer = optimizer.build_optimizer(self.wrapped, role.megatron, role_groups.pg_collection)
        self.scheduler, self._step = optimizer.build_scheduler(self.optimizer, role.megatron, updates), 1
        self._base_fingerprint: str | None = None  # of the weights under low-rank factors
        self.prediction: PolicyPrediction | None = None
        if role.megatron.predicts:
            self.prediction = PolicyPrediction(role, role_groups, vocab_size, updates)
        self.router_state = RouterState(role, role_groups, self.model)
        self.offload = offload.Offload({}, offload.bytes_on_host(self.optimizer))
        if role.offload:
            keeps_weights = role.name == "actor"  # generation uses them
            self.offload = offload.offload_trainable(self.model, self.wrapped, self.optimizer, keeps_weights)
        if self._trains_prediction:
            self.offload.host_states += offload.bytes_on_host(self.prediction.optimizer)
        self.average: WeightAverage | None = None
        self.cache_in_grad_buffer = None
        if not role.megatron.use_torch_fsdp2:  # FSDP has no persistent gradient buffer
            self.cache_in_grad_buffer = offload.KVCacheInGradBuffer(self.wrapped, self.offload)

    @property
    def all_chunks(self) -> gpt.ModelChunks:
        """The model's chunks, and the layer of multi-token prediction if it has one: what a rollout has, too."""
        return self.model if self.prediction is None else gpt.ModelChunks([*self.model, self.prediction.layer])

    def forward_only(self, microbatches: Microbatches, forward) -> list:
        """Runs `forward(chunk, micro-batch)` without gradients: [(result, positions)]."""
        with self.offload.present("weights"):
            results = forward_only(self.model, microbatches, forward, self.role_groups.pg_collection)
        self.router_state.add_statistics(microbatches, trained=False)
        return results

    def keep_average(self, decay: float):
        """Keeps a moving average of the weights from now on, with this decay (`--ema-decay`)."""
        with self.offload.present("weights"):
            self.average = WeightAverage(self.model, decay)

    def update_average(self) -> dict[str, float]:
        """Moves the average, if one is kept, towards the present weights; after each step. Returns metrics."""
        if self.average is None:
            return {}
        with self.offload.present("weights"):
            self.average.update()
        return {f"memory/{self.role.name}/average_bytes": self.average.bytes}

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model, and so everything that is sent from it, has the average's weights; then its own
        again, to the bit. A collective of the role."""
        with self.offload.present("weights", changed=True), self.average.in_model():
            yield

    def load_pretrained(self, weights: PretrainedWeights):
        """Loads only weights. A collective of the role."""
        with self.offload.present("weights", "optimizer", changed=True):
            weights.load(self.model, self.role_groups.pg_collection, self.optimizer)
            adapter.set_base(self.model)
            self._base_fingerprint = None
            if self.role.lora_adapter:
                self._load_adapter()
            if self.average is not None:
                self.average.reset()
        if self.prediction is not None:
            self.prediction.load(getattr(weights, "folder", None))

    def _load_adapter(self):
        path, family = self.role.lora_adapter, self.role.hf_model.family
        found = peft_files.read_adapter(path, self.role.megatron, family)
        transfer.fill_factors(self.model, found.factors, found.head, self.role_groups.pg_collection)
        adapter.merge(self.model)
        self.optimizer.reload_model_params()

    def export_peft(self, folder: Path):
        """Writes the low-rank factors as a PEFT adapter. A collective of the role."""
        with self.offload.present("weights"):
            gathered = transfer.gather_factors(self.model, self.role_groups.pg_collection)
        if gathered is not None:
            factors, head = gathered
            args, known = self.role.megatron, self.role.hf_model
            peft_files.write_adapter(folder, self.role.lora, factors, head, str(known.folder.path), args, known.family)

    def export_hf(self, folder: Path, files: Mapping[str, bytes]):
        """Writes the model as a Hugging Face folder like the one it came from. A collective of the role.

        `files`: content by name of files that are not those of that folder.
        """
        weight_map = weight_map_of(self.role.hf_model, self.role.megatron, self.value_head)
        with self.offload.present("weights"), adapter.folded_weights(self.model):
            export_weights(weight_map, self.all_chunks, self.role_groups.pg_collection, folder, files)

    @property
    def _trains_prediction(self) -> bool:
        return self.prediction is not None and self.prediction.is_trained

    def learner(self, microbatch: Batch) -> Callable | None:
        """What learns in the forward pass of an update, for `token_scores`: the layer of multi-token prediction."""
        is_learning = self._trains_prediction and torch.is_grad_enabled()
        return functools.partial(self.prediction.learn, microbatch) if is_learning else None

    def present_for_updates(self):
        """Context for a step's updates: keeps offloaded weights and gradients on the device in between."""
        return self.offload.present("weights", "gradients", changed=True)

    def update(
        self, microbatches: Microbatches, forward, loss, accepts: Callable[[list, float], bool] = lambda *_: True
    ) -> tuple[list, bool, float]:
        """One optimizer update over the micro-batches of a mini-batch.

        Args:
            forward: (chunk, micro-batch) -> output.
            loss: (output, micro-batch) -> (local sum divided by the global count, result).
            accepts: (results, gradient norm) -> whether to apply the update; called on every rank of the role, with the
                same answer.

        Returns:
            Results of the micro-batches, whether the update was applied, and the gradient norm.
        """
        with self.present_for_updates():
            for chunk in self.wrapped:
                chunk.zero_grad_buffer()
            self.router_state.set_token_counts(microbatches)
            pg_collection = self.role_groups.pg_collection
            if self._trains_prediction:
                self.prediction.begin_update([microbatch for microbatch, _ in microbatches])
            results = run_microbatches(self.wrapped, microbatches, forward, loss, pg_collection, train=True)
            if self._trains_prediction:
                self.prediction.end_update()
            self.router_state.add_statistics(microbatches, trained=True)
            with self.offload.present("optimizer", changed=True):
                applied, norm = optimizer.update(self.optimizer, functools.partial(accepts, results))
            adapter.merge(self.model)
            self.optimizer.zero_grad()  # frees the optimizer's copies of the gradients
        self._set_schedule(min(self.scheduler.num_steps + 1, self._step * self.updates))
        return results, applied, norm

    def checked_update(
        self, microbatches: Microbatches, forward, loss, names: tuple[str, ...],
        counts: torch.Tensor, check: Callable[[float, dict[str, float]], bool], has_loss: bool = True,
    ) -> tuple[list, Update]:  # fmt: skip
        """One optimizer update, unless `check` rejects it or the mini-batch has no loss. A collective of the role.

        Args:
            forward, loss: as of `update`; a result's first item is its metrics [len(names)], whose sums over
                micro-batches and replicas are those of the mini-batch. `names[0]` is the loss.
            counts: what these metrics are means over, as of `Update`.
            check: (loss, metrics with the gradient norm) -> whether to apply the update.

        Returns:
            Results of the micro-batches, and what the update has shown.
        """
        means = torch.empty(0)

        def accepts(results: list, norm: float) -> bool:
            nonlocal means
            means = self.role_groups.dp_all_reduce(torch.stack([of_microbatch for of_microbatch, *_ in results]).sum(0))
            metrics = dict(zip(names, means.tolist(), strict=True)) | {f"{self.role.name}/grad_norm": norm}
            return has_loss and check(metrics[names[0]], metrics)

        adapts_scale = optimizer.can_lower_loss_scale(self.optimizer)
        results, applied, norm = self.update(microbatches, forward, loss, accepts)
        is_overflow = adapts_scale and has_loss and not math.isfinite(norm) and bool(means[0].isfinite())
        is_skipped = has_loss and not applied and not is_overflow
        return results, Update(means, counts, has_loss, is_skipped, is_overflow, norm)

    def update_metrics(self, updates: list[Update], names: tuple[str, ...], prefix: str) -> dict[str, float]:
        """Metrics of a step after its last update: means over the tokens or sequences of all updates.

        An update without a loss counts in none of them; without any loss, the step has no means.

        Args:
            names: of the updates' own metrics.
            prefix: of the others.
        """
        self.end_step()
        metrics = dict(self.prediction.take_metrics()) if self.prediction else {}
        trained = [update for update in updates if update.has_loss]
        if trained:
            counts = torch.stack([update.counts.expand_as(update.means) for update in trained])
            totals = counts.sum(0)
            shares = counts / totals.clamp(min=1)  # exactly 1 for a single update
            means = (torch.stack([update.means for update in trained]) * shares).sum(0)
            found = zip(names, means.tolist(), totals.tolist(), strict=True)
            metrics |= {name: mean for name, mean, total in found if total}  # a mean over nothing is none
        if norms := [update.norm for update in trained if not update.is_overflow]:
            metrics[f"{prefix}/grad_norm"] = sum(norms) / len(norms)
        if (scale := optimizer.loss_scale(self.optimizer)) is not None:
            overflows = sum(update.is_overflow for update in updates)
            metrics |= {f"{prefix}/loss_scale": scale, f"{prefix}/overflows": overflows}
        if self.role.megatron.dsa_indexer_topk is not None:
            metrics |= self._indexer_metrics("critic/indexer" if self.role.name == "critic" else "indexer")
        return metrics | {
            f"{prefix}/learning_rate": self.learning_rate(),
            f"{self.role.name}/updates": sum(not update.is_skipped and not update.is_overflow for update in trained),
            f"{self.role.name}/updates_skipped": sum(update.is_skipped for update in updates),
        }

    def _indexer_metrics(self, prefix: str) -> dict[str, float]:
        layers, group = self.role.megatron.num_layers, self.role_groups.pg_collection.intra_dist_opt
        found = sparse_attention.take_disagreement(self.model, layers, group)
        return {f"{prefix}/{name}": value for name, value in found.items()}

    def begin_step(self, step: int):
        """Sets learning rate and weight decay for a step of the run, counted from 1, whatever earlier steps updated."""
        self._step = step
        self._set_schedule((step - 1) * self.updates)

    def end_step(self):
        """Sets learning rate and weight decay to those after the step, also if it had fewer updates or none."""
        self._set_schedule(self._step * self.updates)

    def _set_schedule(self, position: int):
        """`position`: in updates of full batches."""
        self.scheduler.num_steps = position
        self.scheduler.step(0)
        if self.prediction is not None:
            self.prediction.set_schedule(position)

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.scheduler.get_lr({})

    def microbatches(self, batch: Batch, positions: torch.Tensor, sequences_per_example: int = 1) -> Microbatches:
        """The micro-batches of this replica's sequences at `positions`, as of `role_microbatches`. Collective."""
        microbatches = mb.role_microbatches(batch, positions, self.role, self.role_groups, sequences_per_example)
        self.router_state.attach(batch, microbatches)
        return microbatches

    def state(self, extra: dict, loading: bool = False, has_average: bool = True) -> dict:
        """The role's checkpoint state with picklable `extra` of the caller.

        Args:
            loading: as a template to fill.
            has_average: whether the checkpoint has the moving average, too, if one is kept.
        """
        name, fingerprint, pg_collection = self.role.name, self._fingerprint(), self.role_groups.pg_collection
        with self.offload.present("weights", "optimizer"):  # a distributed optimizer gathers its state
            plain = extra | fingerprint
            state = dist_checkpoint.role_state(name, self.model, self.optimizer, plain, pg_collection, loading)
            if self.average is not None and has_average:
                state["average"] = self.average.state(name, fingerprint, pg_collection, loading)
            if self.prediction is not None:
                state[dist_checkpoint.PREDICTION] = self.prediction.state(loading)
        return self.offload.on_host(state)

    def _fingerprint(self) -> dict[str, str]:
        """Identifies in a checkpoint the weights under low-rank factors; {} without factors. Collective."""
        if self.role.lora and self._base_fingerprint is None:
            with self.offload.present("weights"):
                self._base_fingerprint = transfer.base_fingerprint(self.model, self.role_groups.pg_collection)
        return {transfer.FINGERPRINT: self._base_fingerprint} if self.role.lora else {}

    def restore(self, loaded: dict) -> dict:
        """Loads the filled state of `state(..., loading=True)`; returns the caller's `extra`.

        Raises:
            UsageError: other weights under the low-rank factors.
        """
        for name, found in self._fingerprint().items():
            pg_collection = self.role_groups.pg_collection
            transfer.check_fingerprint(loaded["plain"].pop(name), found, self.role.name, pg_collection)
        with self.offload.present("weights", "optimizer", changed=True):
            # Low-rank factors are loaded onto weights that come from elsewhere.
            dist_checkpoint.load_weights(self.model, loaded["model"], strict=not adapter.adapted_linears(self.model))
            adapter.merge(self.model)
            optimizer_states.restore(loaded, self.optimizer)
            if self.prediction is not None:
                self.prediction.restore(loaded.get(dist_checkpoint.PREDICTION))
            if "average" in loaded:
                self.average.load(loaded["average"], self.role_groups.pg_collection)
            elif self.average is not None:
                self.average.reset()
        return loaded["plain"]
