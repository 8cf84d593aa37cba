"""The reference role: log-probs under the initial policy, or with `--reference-update-interval` under a later one."""

from megarl.arguments import RoleSettings, Settings
from megarl.batch import Batch
from megarl.comm import microbatches as mb
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.comm.step_batch import StepBatch
from megarl.mcore.config import kernel_rules, supported_flags
from megarl.mcore.model.forward_pass import TokenScores
from megarl.mcore.weights import dist_checkpoint
from megarl.observe.timers import Timers
from megarl.roles.frozen_model import FrozenModel, WeightRefresh
from megarl.roles.passes import policy_scores
from megarl.roles.trainable_model import TrainableModel

# What the actor's model may have of its own: the kernels of an exact rollout, and what backward computes again.
_OF_THE_ACTOR = {"exact_rollout", "recompute_modules"}
_OF_THE_ACTOR |= {"recompute_granularity", "recompute_method", "recompute_num_layers"}


def shares_base(actor: RoleSettings, reference: RoleSettings | None) -> bool:
    """Whether the reference is the model under the actor's low-rank factors, on the same ranks in the same layout."""
    if reference is None or actor.lora is None or actor.ranks != reference.ranks:
        return False
    args = actor.megatron
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate:  # then the routers change
        return False
    ignored = supported_flags.training() | _OF_THE_ACTOR
    if kernel_rules.is_exact(args):
        ignored |= {"attention_kernel"}
    described = [{n: v for n, v in vars(role.megatron).items() if n not in ignored} for role in (actor, reference)]
    return described[0] == described[1] and actor.hf_model == reference.hf_model


class Reference:
    """The policy that the KL is to, frozen between refreshes; only for runs with a KL term."""

    name = "reference"

    def __init__(
        self,
        settings: Settings,
        role: RoleSettings | None,
        role_groups: RoleGroups,
        vocab_size: int,
        timers: Timers,
        policy: TrainableModel | None = None,
    ):
        """`policy`: the actor, if the reference is the model under its low-rank factors (`shares_base`)."""
        self.role, self.is_shared = role, policy is not None
        self.settings, self.role_groups = settings, role_groups
        self.timers, self.vocab_size = timers, vocab_size
        self.metrics: dict[str, float] = {}
        self.step = 0  # whose weights it has
        self._refresh: WeightRefresh | None = None
        self.frozen_model: FrozenModel | None = None
        if self.is_shared or role_groups.is_member:
            self.frozen_model = FrozenModel(role, role_groups, vocab_size, timers, trained=policy)

    def logprobs(self, step_batch: StepBatch):
        """Fills `reference_logprobs`, at the rollout's temperature."""
        batch = step_batch[self.name]
        if batch is None:
            return
        with self.timers.phase(self.name, "logprobs"):
            results = self.frozen_model.forward_only(batch, self._forward)
            mb.write_back(batch, "reference_logprobs", [(scores.logprobs, at) for scores, at in results])
            self.metrics = self.frozen_model.offload.metrics(self.name)
            if self.settings.reference_update_interval:
                self.metrics["reference/step"] = self.step

    def plan_refreshes(self, mesh: RoleMesh, actor: TrainableModel | None):
        """Plans how the actor's weights come here, if they ever do. A collective of the ranks of both roles.

        `actor`: its model on this rank, None outside the role.
        """
        if self.settings.reference_update_interval and (actor or self.frozen_model):
            mixup = self.settings.reference_mixup
            self._refresh = WeightRefresh(mesh, self.name, actor, self.frozen_model, mixup, self.timers)

    def refresh(self, step: int):
        """Takes the actor's weights after the steps that `--reference-update-interval` divides. On the ranks of both;
        others return at once."""
        if self._refresh is not None and step % self.settings.reference_update_interval == 0:
            self.metrics["weights/reference_bytes"] = self._refresh.run()
            self.step = step

    def _forward(self, chunk, microbatch: Batch) -> TokenScores:
        return policy_scores(chunk, microbatch, self.settings.temperature, self.vocab_size)

    def state(self) -> dict:
        """The role's state in a checkpoint, so that a resumed run keeps the same reference."""
        model, groups = self.frozen_model.model, self.role_groups.pg_collection
        state = dist_checkpoint.role_state(self.name, model, None, {"step": self.step}, groups)
        return self.frozen_model.offload.on_host(state)

    def restore(self, loaded: dict):
        """Loads the state of a checkpoint."""
        self.step = loaded["plain"].get("step", 0)
        with self.frozen_model.offload.present("weights", changed=True):
            dist_checkpoint.load_weights(self.frozen_model.model, loaded["model"])
