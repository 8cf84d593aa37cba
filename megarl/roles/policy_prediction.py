"""The policy's layer of multi-token prediction: its weights and, with `--mtp-train`, its own training.

It learns from the policy's hidden states in the forward passes of an update, detached from them: its gradients reach
neither the policy nor the embedding and head that both share.
"""

import argparse
import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum
from megarl.arguments import RoleSettings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device
from megarl.mcore.attention.packing import PackedLayout
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.head import HeadOptions
from megarl.mcore.kernels.head_scores import head_scores
from megarl.mcore.model.prediction_layer import PredictionLayer
from megarl.mcore.training import optimizer
from megarl.mcore.weights import dist_checkpoint, optimizer_states
from megarl.mcore.weights.hf.folder_weights import import_weights
from megarl.mcore.weights.hf.weight_map import weight_map_of


class PolicyPrediction:
    """The layer on this rank of the policy."""

    def __init__(self, role: RoleSettings, role_groups: RoleGroups, vocab_size: int, updates: int):
        """Builds it, with an optimizer if it is trained; arguments as of `TrainableModel`."""
        self.role, self.role_groups, self.vocab_size = role, role_groups, vocab_size
        self._name = dist_checkpoint.prediction_of(role.name)
        # It is reduced after its last micro-batch: nothing of the policy's backward is beside it. Patterns of names are
        # of the policy's parameters.
        own = {"overlap_grad_reduce": False, "lr_multipliers": None, "weight_decay_multipliers": None}
        args = argparse.Namespace(**{**vars(role.megatron), **own})
        self.layer = PredictionLayer(args, role_groups.pg_collection)
        self.optimizer = None
        if not args.trains_prediction:
            self.layer.requires_grad_(False)
            return
        self._wrapped = optimizer.wrap_for_training([self.layer], args, role_groups.pg_collection)
        self.optimizer = optimizer.build_optimizer(self._wrapped, args, role_groups.pg_collection)
        self.optimizer.routers = []  # experts keep the bias of their balance
        self._scheduler = optimizer.build_scheduler(self.optimizer, args, updates)
        self._losses: list[float] = []  # of the step's updates
        self._norms: list[float] = []

    @property
    def is_trained(self) -> bool:
        """Whether updates of the policy also train the layer."""
        return self.optimizer is not None

    # -- weights -------------------------------------------------------------------------------------------------

    def load(self, checkpoint: Path | None):
        """Loads the layer's first weights: those of a checkpoint of megarl that has some, else of the policy's Hugging
        Face folder; without either they stay as they were drawn. A collective of the role."""
        pg_collection = self.role_groups.pg_collection
        weights = {"model": dist_checkpoint.model_state(self._name, [self.layer], pg_collection)}
        loaded = checkpoint and dist_checkpoint.load_if_held(weights, checkpoint, pg_collection, self._name)
        if loaded:
            dist_checkpoint.load_weights([self.layer], loaded["model"])
        elif self.role.hf_model is not None:
            import_weights(weight_map_of(self.role.hf_model, self.role.megatron), [self.layer], pg_collection)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def state(self, loading: bool = False) -> dict:
        """The layer's checkpoint state, as of `dist_checkpoint.role_state`."""
        groups = self.role_groups.pg_collection
        return dist_checkpoint.role_state(self._name, [self.layer], self.optimizer, {}, groups, loading)

    def restore(self, loaded: dict | None):
        """Takes the filled state of `state(loading=True)`; without one, or its optimizer, that begins anew."""
        if loaded is None:
            return self.load(None)
        dist_checkpoint.load_weights([self.layer], loaded["model"])
        if self.optimizer is not None and "optimizer" in loaded:
            optimizer_states.restore(loaded, self.optimizer)
        elif self.optimizer is not None:
            self.optimizer.reload_model_params()

    # -- training ------------------------------------------------------------------------------------------------

    def begin_update(self, microbatches: list[Batch]):
        """Begins an update of the policy over these micro-batches. A collective of the role."""
        self._wrapped[0].zero_grad_buffer()
        counts = [_predicted(m.host_metadata.response_mask.numpy()).sum() for m in microbatches]
        count = torch.tensor(float(sum(counts)), dtype=torch.float64, device=device.device())
        self._count = self.role_groups.dp_all_reduce(count).clamp(min=1)
        self._sum = torch.zeros((), dtype=torch.float64, device=device.device())

    def learn(self, microbatch: Batch, hidden: Tensor, output_layer, weight: Tensor, packing: PackedLayout, model):
        """Adds the gradients of a micro-batch whose forward pass is running; arguments as of `token_scores`' hook."""
        predicted, targets = self._hidden_states(microbatch.tokens, hidden, packing, model)
        rows, counts = device.to_device(self._rows(microbatch, packing))
        c = model.config
        options = HeadOptions(
            1.0, self.vocab_size, output_layer.tp_group, c.sequence_parallel, c.final_logit_softcapping
        )
        states, places = predicted.squeeze(1), rows if len(rows) >= MIN_ROWS else None
        logprobs, *_ = head_scores(states, weight.detach(), targets[rows], options, places, squares=False)
        loss = -masked_sum(logprobs.double(), counts.bool()) / self._count
        self.optimizer.scale_loss(loss).backward()
        self._sum += loss.detach()

    def _rows(self, microbatch: Batch, packing: PackedLayout) -> list[np.ndarray]:
        """[n] rows among this rank's tokens, the first `MIN_ROWS` and those from which a token of a response is
        predicted, and [n] whether each is one of these."""
        mask = microbatch.host_metadata.response_mask.numpy()
        mask = mask if packing.host_held is None else mask[packing.host_held]
        counts = _predicted(np.append(mask, np.zeros(packing.padding, bool)))[packing.host_token_indices]
        is_row = counts.copy()
        is_row[:MIN_ROWS] = True
        return [np.flatnonzero(is_row), counts[is_row]]

    def _hidden_states(self, tokens: Tensor, hidden: Tensor, packing: PackedLayout, model) -> tuple[Tensor, Tensor]:
        """The layer's hidden states [T, 1, H], and [T] the token after the next one of each."""
        stream = tokens if packing.held is None else tokens.index_select(0, packing.held)
        stream = torch.cat([stream, stream.new_zeros(packing.padding)])
        own = copy.copy(packing)
        own.routing = None  # of the policy's layers
        with torch.no_grad():
            following = stream.roll(-1)[packing.token_indices].unsqueeze(0)
            embedded, frequencies, *_ = model._preprocess(
                following, packing.positions.unsqueeze(0), packed_seq_params=own
            )
        states = self.layer(hidden.detach().unsqueeze(1), embedded.detach(), frequencies, own)
        return states, stream.roll(-2)[packing.token_indices]

    def end_update(self):
        """Reduces the gradients and applies them, clipped by their own norm. A collective of the role."""
        pg_collection = self.role_groups.pg_collection
        optimizer.finish_gradients(self._wrapped, pg_collection)
        _, norm = optimizer.update(self.optimizer)
        self.optimizer.zero_grad()
        dist.all_reduce(self._sum, group=pg_collection.dp_cp)  # context-parallel ranks have tokens of their own
        self._losses.append(float(self._sum))
        self._norms.append(norm)

    def set_schedule(self, position: int):
        """Sets learning rate and weight decay; `position`: in updates of full batches."""
        if self.optimizer is not None:
            self._scheduler.num_steps = position
            self._scheduler.step(0)

    def take_metrics(self) -> Mapping[str, float]:
        """Means over the updates since the last call."""
        if self.optimizer is None or not self._losses:
            return {}
        found = {"actor/mtp_loss": np.mean(self._losses), "actor/mtp_grad_norm": np.mean(self._norms)}
        self._losses, self._norms = [], []
        return {name: float(value) for name, value in found.items()}


def _predicted(mask: np.ndarray) -> np.ndarray:
    """[T] mask of tokens of responses -> whether the next two tokens of each token are such tokens."""
    following, second = np.zeros_like(mask), np.zeros_like(mask)
    following[:-1], second[:-2] = mask[1:], mask[2:]
    return following & second
