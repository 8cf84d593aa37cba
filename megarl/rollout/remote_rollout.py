"""The rollout of a program without the policy: a server generates, each replica's leader asks for its share."""

import dataclasses
import functools

from megarl.arguments import Settings
from megarl.batch import Batch
from megarl.comm.role_mesh import RoleMesh
from megarl.data.prompts import PromptSet
from megarl.mcore.inference.engine import RequestList
from megarl.observe.timers import Timers
from megarl.rollout.episodes.runner import EpisodeRunner
from megarl.rollout.remote_generator import RemoteEngine, RemoteGenerator
from megarl.rollout.requests import PromptRequest, RoundRequests, completions_to_batch, sampling_of
from megarl.rollout.response_ends import ResponseEnds
from megarl.tool_formats.thinking_budget import ThinkingBudget


class RemoteRollout:
    """Generates what `Rollout` would: a request has the same random stream wherever it runs."""

    def __init__(
        self, settings: Settings, mesh: RoleMesh, generator: RemoteGenerator, ends: ResponseEnds, timers: Timers,
        episodes: EpisodeRunner | None = None, thinking: ThinkingBudget | None = None,
    ):  # fmt: skip
        """`generator`: of the leader's requests; `episodes`: runs the environments; None: one turn; `thinking`: the
        budget of each response, or turn; None: none."""
        self.thinking, self.settings, self.role_groups, self.episodes = thinking, settings, mesh["rollout"], episodes
        self._generator, self._ends = generator, ends
        self.timers = timers

    def load_weights(self):
        """Does nothing: the server has the weights."""

    def generate(
        self, prompts: list[PromptRequest], step: int, temperature: float, prompt_set: PromptSet | None = None
    ) -> Batch | None:
        """Generates the responses to each prompt; returns this replica's share.

        `temperature` 0 is greedy. `prompt_set`: the set whose lines the prompts are, for environments.
        """
        role_groups, s = self.role_groups, self.settings
        if not role_groups.is_member:
            return None
        sampling = sampling_of(s, temperature)
        with self.timers.phase(role_groups.model_role, "rollout"):
            requests = RoundRequests(prompts, s.seed, step, self.thinking, prompt_set=prompt_set)
            ids = requests.assigned_to(role_groups.dp_rank, len(role_groups.replicas))
            if self.episodes is not None:
                source = RequestList(zip(ids, requests.build(ids), strict=True))
                engine = RemoteEngine(self._generator, role_groups, self._ends.matcher)
                stream = functools.partial(engine.stream, end_ids=self._ends.ids, settings=sampling)
                self.episodes.run(stream, source, requests, 2 * engine.max_requests, is_training=False)
                return self.episodes.settle(None)
            done = None
            if role_groups.is_leader:
                built = requests.build(ids, sampling, self._ends.ids)
                asked = [dataclasses.replace(request, stops=self._ends.matcher) for request in built]
                done = dict(zip(ids, self._generator.generate(asked), strict=True))
            return completions_to_batch(role_groups.broadcast_object(done), requests)
