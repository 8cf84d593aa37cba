"""The rollout of a program without the policy: a server generates, each replica's leader asks for its share."""

from megarl.algorithms.sampling_settings import SamplingSettings
from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.observe.timers import Timers
from megarl.rollout.remote_generator import RemoteGenerator
from megarl.rollout.requests import PromptRequest, RoundRequests, completions_to_batch


class RemoteRollout:
    """Generates what `Rollout` would: a request has the same random stream wherever it runs."""

    def __init__(
        self, settings: Settings, mesh: RoleMesh, generator: RemoteGenerator, end_ids: tuple[int, ...], timers: Timers
    ):
        """`generator`: of the leader's requests; `end_ids`: tokens that end a response."""
        self.settings, self.role_groups = settings, mesh["rollout"]
        self._generator, self._end_ids = generator, end_ids
        self.timers = timers

    def load_weights(self):
        """Does nothing: the server has the weights."""

    def generate(
        self, prompts: list[PromptRequest], samples: int, step: int, temperature: float,
        prompt_set: PromptSet | None = None,
    ) -> Batch | None:  # fmt: skip
        """Generates `samples` responses to each prompt; returns this replica's share.

        `temperature` 0 is greedy. `prompt_set` is for environments, which a server does not have.
        """
        role_groups, s = self.role_groups, self.settings
        if not role_groups.is_member:
            return None
        sampling = SamplingSettings(
            temperature=temperature or 1.0, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, greedy=temperature == 0
        )
        with self.timers.phase(role_groups.model_role, "rollout"):
            round_requests = RoundRequests(prompts, samples, s.seed, step, s.max_response_length)
            ids = round_requests.assigned_to(role_groups.dp_rank, len(role_groups.replicas))
            done = None
            if role_groups.is_leader:
                requests = round_requests.build(ids, sampling, self._end_ids)
                done = dict(zip(ids, self._generator.generate(requests), strict=True))
            return completions_to_batch(role_groups.broadcast_object(done), round_requests)
