"""What `--debug-train-only` has instead of a rollout: the responses of each step come from files."""

import torch
import torch.distributed as dist

from megarl.arguments import RoleSettings, Settings
from megarl.batch import generated_fields
from megarl.comm.role_mesh import RoleMesh
from megarl.comm.step_batch import ROLLOUT
from megarl.data.prompts import PromptSet
from megarl.data.ragged import Ragged
from megarl.errors import UsageError
from megarl.groups import PromptGroups
from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.observe.timers import Timers
from megarl.rollout.group_collector import GroupCollector, SamplingStatistics
from megarl.rollout.rollout import Rollout
from megarl.rollout.rollout_files import GREEDY, RESPONSES, SavedRollouts
from megarl.rollout.round_scores import GenerationRound
from megarl.rollout.waiting_groups import VERSIONS


class SavedRollout(Rollout):
    """The rollout's ranks without an engine and without weights."""

    def __init__(self, settings: Settings, role: RoleSettings, mesh: RoleMesh, timers: Timers):
        self.settings, self.role, self.timers = settings, role, timers
        self.mesh, self.role_groups = mesh, mesh[ROLLOUT]
        self.metrics: dict[str, float] = {}
        self.bank = self.episodes = self.scheduled = self._weight_sync = self.model = None

    @property
    def recorded_layers(self) -> tuple[int, ...] | None:
        """Numbers of the MoE layers whose routes this rank holds: all of them on a replica's first pipeline stage."""
        if self.settings.router_replay != "rollout":
            return None
        is_first = self.role_groups.is_member and dist.get_rank(self.role_groups.pg_collection.pp) == 0
        return RoutedLayers.of(self.role.megatron).numbers if is_first else ()

    def load_weights(self):
        """There are no weights to copy."""

    def sync_weights(self, step: int, has_trained: bool):
        """As `load_weights`."""

    def generation_metrics(self) -> dict[str, float]:
        """Nothing is generated; the metrics of the generation are in the record of the step."""
        return {}


class SavedGroupCollector(GroupCollector):
    """Fills the group buffer with the saved groups of each step. Rewards and baselines are computed again."""

    def __init__(self, saved: SavedRollouts, rollout, prompts: PromptSet, prompt_tokens: Ragged, scorer, announcements):
        """Arguments after `saved` as of `GroupCollector`, with a `SavedRollout`."""
        super().__init__(rollout, prompts, prompt_tokens, scorer, announcements)
        self._saved, self._step = saved, 0  # the step that is read

    def check_start(self, step: int):
        """UsageError unless the groups that waited when the first step was generated also wait now."""
        waits, needed = len(self.group_buffer), self._saved.records[step].waiting
        if waits not in (needed, self.settings.prompts_per_step):
            raise UsageError(
                f"--load-rollouts {self._saved.path}: {needed} groups waited from earlier steps when step {step} was "
                f"generated, and {waits} do now; start from that step's checkpoint, or from the first step",
                self.role_groups.ranks.start,
            )
        self.partial_rollouts.clear()  # what continues them is in the files

    def _run_rounds(self, step: int, statistics: SamplingStatistics):
        record, self._step = self._saved.records[step], step
        for number in range(len(record.rounds)):
            self._accept(self._read(step, number), step, statistics)
        statistics.tokens = record.tokens if self.role_groups.dp_rank == 0 else 0
        self.order.load_state_dict(record.order)

    def _read(self, step: int, number: int) -> GenerationRound:
        record, s, role_groups = self._saved.records[step], self.settings, self.role_groups
        lines, kept = record.rounds[number]["lines"], record.rounds[number]["kept"]
        fields = generated_fields(s)
        versions = [VERSIONS] if self._has_versions else []  # of one policy, none were written
        with self.timers.phase(role_groups.model_role, "read"):
            layers = self.rollout.recorded_layers
            groups = PromptGroups(self.prompts.group_sizes(lines, s.samples_per_prompt))
            responses = self._saved.read(record, number, RESPONSES, fields, layers, role_groups, groups, versions)
            if self._has_versions and responses.versions is None:
                version = self.versions.of_step(step)[0]
                responses.versions = torch.full_like(responses.tokens, version, dtype=torch.int32)
            greedy, single = None, PromptGroups.equal(len(lines), 1)
            if s.greedy_baseline:
                greedy = self._saved.read(record, number, GREEDY, fields, None, role_groups, single)
        return GenerationRound(lines=lines, batch=responses, greedy=greedy, kept=kept)

    def _set_metrics(self, statistics: SamplingStatistics, waiting_groups: int):
        super()._set_metrics(statistics, waiting_groups)
        self.metrics |= self._saved.records[self._step].metrics
