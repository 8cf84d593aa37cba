"""Inputs of an RL run: prompts, tokenizers, rewards, checkpoints and saved rollouts, checked before any work starts."""

from megarl.arguments import RoleSettings, RunConfig, Settings
from megarl.checkpoint import folders, host_memory, resume
from megarl.checkpoint.pretrained import PretrainedWeights, checkpoint_weights, find_pretrained, with_stored_factors
from megarl.data.places import read_context_template
from megarl.errors import UsageError, warn_as_first
from megarl.flags.distillation import SIBLING
from megarl.mcore.model.pipeline_layout import RoutedLayers
from megarl.rollout import waiting_groups
from megarl.rollout.bank import keeps, lacks_routes
from megarl.rollout.requests import check_ends, thinking_budget_of
from megarl.rollout.rollout_files import SavedRollouts
from megarl.serving.configuration import check_server_flags, frontend_config
from megarl.trainers.environment_inputs import check_environment_flags, check_environments, sessions_of
from megarl.trainers.evaluator import check_best_metric, check_names, held_out
from megarl.trainers.generation_lag import check_lead, read_schedule
from megarl.trainers.image_inputs import RunImages, folders_of
from megarl.trainers.prompt_inputs import PROMPTS, read_encoded_prompts
from megarl.trainers.reward_factory import RewardFactory
from megarl.trainers.setup import build_role_encoder, check_training_flags, check_vocabulary
from megarl.trainers.teacher_inputs import check_same_model, find_teachers, teachers_of_lines

CHECKPOINTED_ROLES = ("actor", "critic", "reference")  # not reward models, which only score


class RLInputs:
    """Prompts, tokenizers, rewards and checkpoints, read and checked before the process group exists."""

    def __init__(self, config: RunConfig):
        s = config.settings
        check_training_flags(config)
        _check_rollout(s, config.roles)
        _check_replay(config)
        _check_debug_flags(s, config.roles["actor"])
        if s.reference_update_interval and "reference" in config.roles:
            flag = f"--reference-update-interval {s.reference_update_interval}"
            check_same_model(flag, config.roles["actor"], config.roles["reference"])
        check_environment_flags(s)
        self.reward_factory = RewardFactory(config)
        keys = check_server_flags(config) if s.serve_policy else None
        self.sessions = sessions_of(s) if s.agent_sessions else None
        self.encoder = encoder = build_role_encoder(config.roles["actor"], s)
        self.tokenizer = encoder.tokenizer
        check_ends(s, encoder.tokenizer)
        self.thinking = thinking_budget_of(s, encoder)
        self.prompt_sets, tokens_of = read_encoded_prompts(s, encoder)
        self.images = RunImages.of(config, encoder, folders_of(s))
        if self.images is not None and s.replica_port is not None:
            raise UsageError(f"--replica-port {s.replica_port}: replicas that join read no images of prompts")
        self.prompts, self.prompt_tokens = self.prompt_sets[PROMPTS], tokens_of[PROMPTS]
        self.eval_prompts, self.eval_tokens = held_out(self.prompt_sets), held_out(tokens_of)
        check_names(self.eval_prompts, s.eval_samples)
        check_best_metric(s, self.eval_prompts)
        self._read_teachers_lines(config)
        check_environments(s, encoder, self.prompt_sets)
        self.reward_factory.check(*self.prompt_sets.values())
        if self.images is not None:
            self.images.add_scorer(config.roles["reward"], self.reward_factory.encoder)
        tokens = self.tokenizer.vocab_size
        self.frontend_config = None if keys is None else frontend_config(config, keys, encoder)
        check_vocabulary(config.roles["actor"], tokens)
        for role in filter(None, map(config.roles.get, ("critic", "reference"))):  # a policy may sample any of its rows
            check_vocabulary(role, config.roles["actor"].model_vocab_size(tokens))
        saved = [r for r in _models_of(config.roles) if r.name != "reference" or saves_reference(s, config.roles)]
        self.pretrained = _find_pretrained(config.roles, tokens, saved if s.load else [])
        self.teachers = find_teachers(config, encoder)
        self.resume, self.manifest = None, {}  # the checkpoint to resume from
        is_compared = s.load or s.save or s.load_rollouts or s.replay_schedule
        self.data = resume.data_fingerprints(encoder, s, self.prompt_sets) if is_compared else {}
        if s.load:
            self.resume, self.manifest = resume.check_resume("train_rl", config, self.data, saved, tokens)
            if self.images is not None:
                self.images.check_resumed(self.manifest, s.load)
            _check_stored_reference(s, config.roles, self.manifest)
            waiting_groups.check(self.manifest, s, "prompts" in resume.changed_data(self.manifest, self.data))
        self.schedule = read_schedule(config, self.data, self.resume, self.manifest)
        is_own = s.save is not None and folders.is_of_run(self.resume, s.save)
        if is_own and (s.debug_train_only or s.debug_rollout_only):  # it would set aside the run that it starts from
            raise UsageError(f"--save {s.save}: is the run of --load; give a debug run another folder")
        self.rollout_facts = self._rollout_facts(config) if s.save_rollouts or s.load_rollouts else {}
        self.saved_rollouts = None
        if s.load_rollouts:
            steps = range(1 + self.manifest.get("step", 0), s.train_iters + 1)
            longest = s.max_prompt_length + s.max_response_length
            self.saved_rollouts = SavedRollouts(s.load_rollouts, steps, self.rollout_facts, longest)
        self.frozen_policy = self._frozen_policy(config) if s.debug_rollout_only else None
        host_memory.check_room(config, tokens)

    def _read_teachers_lines(self, config: RunConfig):
        """Sets the tokens that a teacher reads instead of the prompts (None: it reads the prompts), and which teacher
        each line has (None: the run has one, or none)."""
        s, self.teacher_tokens, self.teacher_context = config.settings, None, None
        if s.teacher_context == SIBLING:
            self.teacher_context = read_context_template(s.teacher_context_template)
        if "teacher" in config.roles:
            limit = s.teacher_max_prompt_length or s.max_prompt_length
            self.teacher_tokens = self.prompts.encode_for_teacher(self.encoder, limit)
        else:
            self.prompts = self.prompts.note_unread("teacher_prompt", "--distill")
        self.prompts, self.teacher_numbers = teachers_of_lines(self.prompts, config, self.encoder)
        self.prompt_sets[PROMPTS] = self.prompts

    def _rollout_facts(self, config: RunConfig) -> dict:
        """What the manifest of a saved rollout says about the run, and what a run that loads it compares."""
        s, actor = config.settings, config.roles["actor"]
        names = "seed temperature prompts_per_step samples_per_prompt greedy_baseline partial_rollouts environment"
        routes = None
        if s.router_replay == "rollout":
            numbers, experts, topk = RoutedLayers.of(actor.megatron)
            routes = {"layers": list(numbers), "topk": topk, "experts": experts}
        vocab_size = actor.model_vocab_size(self.tokenizer.vocab_size)
        settings = {name: getattr(s, name) for name in names.split()}
        of_images = {} if self.images is None else {"reads_images": True}
        return settings | of_images | {"vocab_size": vocab_size, "data": self.data, "routes": routes}

    def _frozen_policy(self, config: RunConfig) -> PretrainedWeights:
        s, actor = config.settings, config.roles["actor"]
        if s.load:
            return checkpoint_weights(s.load, "--load", actor, actor.model_vocab_size(self.tokenizer.vocab_size))
        return self.pretrained["actor"]

    def rollout_role(self, config: RunConfig) -> RoleSettings:
        """The rollout's settings; a policy that is not trained has the low-rank factors of its checkpoint."""
        role = config.roles["rollout"]
        return role if self.frozen_policy is None else with_stored_factors(role, self.frozen_policy)


def _check_debug_flags(s: Settings, actor: RoleSettings):
    """UsageError if a run for debugging has no weights, or would set aside the saved rollouts that it reads."""
    if s.debug_rollout_only and not s.load:
        if actor.lora_adapter:
            raise UsageError(
                f"--lora-adapter {actor.lora_adapter}: not allowed with --debug-rollout-only; give a checkpoint with "
                "the factors in --load or --pretrained-checkpoint"
            )
        if not (actor.megatron.pretrained_checkpoint or actor.hf_model):
            raise UsageError(
                "--debug-rollout-only: needs weights to generate with, in --load, --pretrained-checkpoint or --hf-model"
            )


def _check_rollout(s: Settings, roles: dict[str, RoleSettings]):
    rollout = roles["rollout"]
    if s.verify_weights and rollout.model_role != "rollout":
        raise UsageError(
            "--verify-weights: the rollout shares the actor's weights, so there is no weight sync to verify"
        )
    if keeps(s) and lacks_routes(s, rollout.megatron):
        why = "with --router-replay rollout and several pipeline stages in the rollout responses are not kept"
        warn_as_first([f"--keep-responses: {why}"])
    if s.replica_port is not None:
        experts, shards = rollout.megatron.expert_model_parallel_size, rollout.megatron.use_torch_fsdp2
        if experts > 1 or shards:
            problem = "replicas share experts" if experts > 1 else "replicas share weights (--use-torch-fsdp2)"
            raise UsageError(f"--replica-port {s.replica_port}: {problem}, so that none of them can be missing")
    check_lead(s, roles)


def _check_replay(config: RunConfig):
    replay, experts = config.settings.router_replay, {}
    for name in ("actor", "reference") if config.settings.router_replay_reference else ("actor",):
        experts[name] = RoutedLayers.of(config.roles[name].megatron)
    folder = config.roles["actor"].megatron.model_folder
    if replay != "none" and not experts["actor"].experts and folder is not None:
        raise UsageError(f"--router-replay {replay}: allowed is none: {folder.routed_layers()[1]}")
    if replay != "none" and not experts["actor"].experts:
        raise UsageError(f"--router-replay {replay}: the actor has no experts; allowed is none, or set --num-experts")
    if experts.get("reference", experts["actor"]) != experts["actor"]:
        raise UsageError(
            "--router-replay-reference: the reference replays the actor's routes; allowed are the actor's "
            "--num-experts, --moe-router-topk and --moe-layer-freq"
        )


def _check_stored_reference(s: Settings, roles: dict[str, RoleSettings], manifest: dict):
    """UsageError if a run of low-rank factors would go on with the initial reference instead of the stored one."""
    if "reference" in roles and not saves_reference(s, roles) and "reference" in manifest.get(folders.FROZEN, {}):
        raise UsageError(
            f"--load {s.load}: has a reference of its own; give --reference-update-interval again, above --train-iters "
            "to refresh it no more"
        )


def _models_of(roles: dict[str, RoleSettings]) -> list[RoleSettings]:
    return [roles[name] for name in CHECKPOINTED_ROLES if name in roles]


def saves_reference(s: Settings, roles: dict[str, RoleSettings]) -> bool:
    """Whether checkpoints hold the reference; beside low-rank factors of the actor only one that has been refreshed."""
    return "reference" in roles and (roles["actor"].lora is None or s.reference_update_interval > 0)


def _find_pretrained(
    roles: dict[str, RoleSettings], tokens: int, saved: list[RoleSettings]
) -> dict[str, PretrainedWeights]:
    """The initial weights of roles that neither draw them nor load them from a checkpoint of the run, which has those
    of `saved`, except for the weights under low-rank factors. A critic may start from a reward model."""
    found = {}
    for role in (role for role in _models_of(roles) if role.lora or role not in saved):
        is_critic = role.name == "critic"
        sources = ("actor", "reward") if is_critic else ("actor",)
        found[role.name] = find_pretrained(role, role.model_vocab_size(tokens), sources, value_head=is_critic)
    return {name: weights for name, weights in found.items() if weights}
