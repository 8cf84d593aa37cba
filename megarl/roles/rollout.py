"""The rollout: writes text with the actor's policy, on the actor's own module or on a model of its own layout."""

import time

import torch
import torch.distributed as dist

from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch, lane_of
from megarl.data.tokenizers import Tokenizer
from megarl.mcore import device, model
from megarl.mcore.engine import RolloutEngine
from megarl.mcore.reshard import WeightTransfer
from megarl.observe.timers import Timers
from megarl.rollout.requests import Drawn, build_requests, pack_completions
from megarl.rollout.sampling import SamplingSettings
from megarl.world import World


class Rollout:
    """The engine that writes, and the way by which the actor's weights come to it."""

    name = "rollout"

    def __init__(
        self, settings: Settings, role: RoleSettings, world: World, trained: model.Stages | None, tokenizer: Tokenizer,
        timers: Timers,
    ):  # fmt: skip
        """Takes the actor's module where the two share it, else builds a model and plans the transfer. Collective.

        `trained` is the actor's module on this rank, None outside the actor.
        """
        self.settings, self.role, self.timers, self.tokenizer = settings, role, timers, tokenizer
        self.world, self.place = world, world["rollout"]
        self.metrics: dict[str, float] = {}
        self.engine = self._transfer = self.model = None
        if role.host == "actor":
            self.model = trained
        elif self.place.is_member:
            self.model = model.build_frozen(role.megatron, tokenizer.vocab_size, self.place.collection)
        if role.host == self.name and (trained is not None or self.model is not None):
            self._group = world.ranks_group("actor", self.name)
            self._transfer = WeightTransfer(
                trained, world["actor"].collection, self.model, self.place.collection, self._group
            )
        if self.place.is_member:
            self.engine = RolloutEngine(
                self.model[0],
                self.place.collection,
                tokenizer.vocab_size,
                settings.max_prompt_length + settings.max_response_length,
                settings.rollout_buffer_gb,
                settings.rollout_max_requests,
                settings.rollout_prefix_caching,
                settings.rollout_chunked_prefill,
            )

    @property
    def recorded_layers(self) -> tuple[int, ...] | None:
        """Numbers of the MoE layers whose routes this rank records; None in a run that records none."""
        if self.settings.router_replay != "rollout":
            return None
        return self.engine.layers if self.place.is_member else ()

    def refresh(self):
        """Brings the actor's present weights to the engine; nothing to do where it runs on the actor's module.

        A collective of the actor's and the rollout's ranks. Waiting for the others is no work of either role.
        """
        self.metrics = {"weights/sync_bytes": 0, "weights/sync_s": 0.0}
        if self._transfer is None:
            return
        roles = [name for name in ("actor", "rollout") if self.world[name].is_member]
        with self.timers.phase(roles[-1], "wait"):
            dist.barrier(group=self._group)
        start = time.perf_counter()
        # A rank of both roles books the time to the rollout.
        with self.timers.phase(roles[0], "sync"), self.timers.phase(roles[-1], "sync"):
            sent = torch.tensor(self._transfer.run(), dtype=torch.int64, device=device.device())
            dist.all_reduce(sent, group=self._group)
            self.metrics = {"weights/sync_bytes": int(sent)}
            if self.settings.verify_weights:
                self._transfer.verify()
        self.metrics["weights/sync_s"] = time.perf_counter() - start

    def generate(
        self, prompts: list[Drawn], samples: int, step: int, temperature: float | None = None
    ) -> Batch | None:
        """Writes `samples` responses to each prompt; this lane's share of them, packed.

        `temperature` is `--temperature` by default, of text to learn from, and has its routes with
        `--router-replay rollout`; 0 takes the likeliest token each time.
        """
        if not self.place.is_member:
            return None
        s = self.settings
        with self.timers.phase(self.place.host, "rollout"):
            ids = torch.arange(len(prompts) * samples)
            ids = ids[lane_of(ids, len(self.place.lanes), samples) == self.place.lane]
            requests = build_requests(ids, prompts, samples, s.seed, step, s.max_response_length)
            routes = temperature is None and self.recorded_layers is not None
            temperature = s.temperature if temperature is None else temperature
            sampling = SamplingSettings(temperature or 1.0, s.top_k, s.top_p, greedy=temperature == 0)
            completions = self.engine.generate(requests, self.tokenizer.eos_id, sampling, routes)
            no_routes = self.engine.no_routes if routes else None
            return pack_completions(ids, prompts, samples, requests, completions, no_routes)
