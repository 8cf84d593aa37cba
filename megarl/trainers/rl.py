"""Sets a reinforcement-learning run up: checks, roles, warm start, resume; and what surrounds each of its steps."""

import argparse
from collections.abc import Iterator

from megarl.arguments import RoleSettings, RunConfig, Settings
from megarl.checkpoint import folders, run_state
from megarl.comm.step_batch import StepBatch
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from megarl.mcore.model import gpt
from megarl.observe.timers import Timers
from megarl.roles.actor import Actor
from megarl.roles.advantage_computer import AdvantageComputer
from megarl.roles.critic import Critic
from megarl.roles.reference import Reference
from megarl.rollout.batcher import RolloutBatcher
from megarl.rollout.rollout import Rollout
from megarl.router_replay.replay import RoutingReplay
from megarl.trainers.evaluator import BestCheckpoint, Evaluator
from megarl.trainers.reward_factory import RewardFactory
from megarl.trainers.trainer import Trainer, build_role_encoder, check_common, create_role_mesh

CHECKPOINTED_ROLES = (
    "actor",
    "critic",
    "reference",
)  # roles whose models a checkpoint holds: the reward role's are in their own
SAMPLES_PER_FILE = 64  # of a step's responses in the samples file
GROUP_BUFFER_FILE = "waiting.pt"  # groups of an unfinished batch, in a checkpoint's folder
PARTIAL_ROLLOUTS_FILE = "parts.pt"  # groups that are half written


class RLInputs:
    """Prompts, tokenizers and rewards, read and checked before any rank joins another."""

    def __init__(self, program: RunConfig):
        s = program.settings
        check_common(program)
        _check_rollout(s, program.roles)
        _check_replay(program)
        encoder = build_role_encoder(program.roles["actor"], s)
        self.tokenizer = encoder.tokenizer
        self.prompts = load_prompts(s.prompts, "--prompts")
        self.tokens = self.prompts.encode(encoder, s.max_prompt_length)
        self.eval_prompts = load_prompts(s.eval_prompts, "--eval-prompts") if s.eval_prompts else None
        self.eval_tokens = self.eval_prompts.encode(encoder, s.max_prompt_length) if self.eval_prompts else []
        self.scoring = RewardFactory(program, *filter(None, (self.prompts, self.eval_prompts)))
        vocab = self.tokenizer.vocab_size
        self.pretrained = _check_pretrained(program, vocab)
        self.resume = None
        if s.load:
            models = {name: program.roles[name].megatron for name in CHECKPOINTED_ROLES if name in program.roles}
            shapes = {name: gpt.weight_shapes(name, args, vocab, resumes=True) for name, args in models.items()}
            self.resume = folders.check_resume(s.load, "train_rl", s.train_iters, shapes)


def _check_rollout(s: Settings, roles: dict[str, RoleSettings]):
    rollout, ranks = roles["rollout"], set(roles["rollout"].ranks)
    if s.verify_weights and rollout.model_role != "rollout":
        raise UsageError("--verify-weights: the rollout runs on the actor's own weights, so there is no transfer")
    if s.one_step_off and not ranks.isdisjoint(roles["actor"].ranks):
        raise UsageError("--one-step-off: needs a rollout in --role-map that shares no ranks with the actor")


def _check_replay(program: RunConfig):
    replay, kinds = program.settings.router_replay, {}
    for name in ("actor", "reference") if program.settings.router_replay_reference else ("actor",):
        args = program.roles[name].megatron
        kinds[name] = (args.num_experts, args.moe_router_topk, gpt.moe_layers(args))
    if replay != "none" and not kinds["actor"][0]:
        raise UsageError(f"--router-replay {replay}: the actor has no experts; allowed is none, or --num-experts")
    if kinds.get("reference", kinds["actor"]) != kinds["actor"]:
        raise UsageError(
            "--router-replay-reference: the reference takes the actor's routes; allowed are the actor's --num-experts, "
            "--moe-router-topk and --moe-layer-freq"
        )


def _check_pretrained(program: RunConfig, vocab_size: int) -> dict:
    """Checkpoint of each role that starts from one; a critic may start from a reward model, which has its head."""
    found = {}
    for name in filter(program.roles.get, CHECKPOINTED_ROLES):
        args: argparse.Namespace = program.roles[name].megatron
        if args.pretrained_checkpoint:
            sources = ("actor", "reward") if name == "critic" else ("actor",)
            flag, path = "--pretrained-checkpoint", args.pretrained_checkpoint
            found[name] = run_state.find_weights(path, flag, name, args, vocab_size, sources)
    return found


class RLTrainer(Trainer):
    """A reinforcement-learning run on this rank: its roles, its data, and what happens around a step."""

    def __init__(self, program: RunConfig, timers: Timers):
        inputs = RLInputs(program)
        if program.check:
            raise SystemExit(0)
        super().__init__(program, create_role_mesh(program), timers)
        self.inputs, self.prompts, self.tokenizer = inputs, inputs.prompts, inputs.tokenizer
        self._build(program, timers)
        self._accuracy_before: float | None = None  # of held-out prompts, known on rank 0
        self._accuracy_after: float | None = None
        if inputs.resume:
            self._resume()
        else:
            self._warm_start()
        self.rollout.sync_weights()
        self.open(resumed=bool(inputs.resume))
        if not inputs.resume and self.evaluation:
            found = self.evaluation.evaluate()
            if found is not None:
                self._accuracy_before = found["eval/accuracy"]
                self.write(0, found)
                print(f"held-out accuracy before training: {self._accuracy_before:.4f}", flush=True)
        timers.end_step(0)

    def _build(self, program: RunConfig, timers: Timers):
        """Every rank builds every role; outside its ranks a role holds nothing."""
        s, mesh, roles, inputs = self.settings, self.mesh, program.roles, self.inputs
        vocab = self.tokenizer.vocab_size
        self.actor = Actor(s, roles["actor"], mesh["actor"], vocab, program.policy_loss, timers)
        self.critic = Critic(s, roles.get("critic"), mesh["critic"], vocab, timers)
        self.reward = inputs.scoring.role(mesh["reward"], self.tokenizer, timers)
        self.reference = Reference(s, roles.get("reference"), mesh["reference"], vocab, timers)
        self.experience = AdvantageComputer(s, program.estimator, mesh["actor"], timers)
        trainable_model = self.actor.trainable_model
        trained, cache_in_grad_buffer = (
            (trainable_model.model, trainable_model.cache_in_grad_buffer) if trainable_model else (None, None)
        )
        self.rollout = Rollout(s, roles["rollout"], mesh, trained, self.tokenizer, timers, cache_in_grad_buffer)
        models = (self.actor, self.critic, self.reference)
        self.replay = RoutingReplay(s, roles["actor"], mesh, self.rollout, *models)
        writing = (s, mesh, self.rollout, self.reward)
        hidden = roles["actor"].megatron.hidden_size
        self.sampling = RolloutBatcher(*writing, self.prompts, inputs.tokens, hidden, timers)
        self.evaluation, self.best = None, BestCheckpoint(mesh)
        if s.eval_prompts:
            self.evaluation = Evaluator(*writing, inputs.eval_prompts, inputs.eval_tokens, timers)

    def _warm_start(self):
        starting = {
            "actor": self.actor.trainable_model,
            "critic": self.critic.trainable_model,
            "reference": self.reference.frozen_model,
        }
        for name, folder in self.inputs.pretrained.items():
            if self.mesh[name].is_member:
                starting[name].load_pretrained(folder)

    def batches(self) -> Iterator[tuple[int, StepBatch]]:
        """Number and data of each step that is left. Collective.

        A step whose batch could not be filled ends here: nothing is learnt, what it has waits for the next one.
        """
        for step in self.steps():
            self.reward.begin()
            self.replay.begin()
            for role in self._measuring():
                role.metrics = {}
            flow = self.sampling.next_batch(step)
            self.flush(wait=False)
            if flow is None:
                self.finish(None)
            else:
                yield step, flow

    def _measuring(self) -> list:
        return [self.sampling, self.actor, self.critic, self.reference, self.experience, self.rollout]

    def finish(self, flow: StepBatch | None):
        """Ends a step: samples, evaluation, metrics, checkpoint; `flow` is None without a batch. Collective."""
        if flow is not None:
            flow.wait_sends()
            self.experience.measure(flow)
        metrics = {name: value for role in (*self._measuring(), self.reward) for name, value in role.metrics.items()}
        s, is_best, rows = self.settings, False, self.reward.rows if self.mesh["reward"].is_leader else []
        samples = [row for row in rows if row["sequence"] < SAMPLES_PER_FILE]
        if self.evaluation and self.is_due(s.eval_interval):
            found = self.evaluation.evaluate()
            is_best = bool(s.keep_best and self.folder) and self.best.update(found, self.step)
            if found is not None:
                metrics |= found
                self._accuracy_after = found["eval/accuracy"]
        self.record(metrics, samples)
        is_due = self.is_due(s.save_interval)
        if self.folder and (is_due or is_best):
            self._save(kept_for="interval" if is_due else "best")

    def close(self):
        """Ends the run: time line, report, and how far it got. Collective."""
        super().close()
        self.reward.verifiers.close()
        if self._accuracy_after is not None:
            before = "" if self._accuracy_before is None else f"{self._accuracy_before:.4f} before, "
            print(f"held-out accuracy: {before}{self._accuracy_after:.4f} after {self.step} steps", flush=True)

    def _states(self, loading: bool) -> dict:
        states = {}
        if self.actor.trainable_model:
            extra = {"kl_controller": self.experience.controller.state_dict()}
            states["actor"] = self.actor.trainable_model.state(extra, loading)
        if self.critic.trainable_model:
            states["critic"] = self.critic.trainable_model.state({}, loading)
        if self.reference.frozen_model:
            states["reference"] = self.reference.state()
        return states

    def _moments(self) -> dict | None:
        """The reward role's running moments, on rank 0. Collective."""
        leader = self.mesh["reward"].is_leader
        gathered = self.mesh.gather(self.reward.moments.state_dict() if leader else None)
        return gathered and next(filter(None, gathered))

    def _save(self, kept_for: str):
        manifest_entries = self.manifest_entries("train_rl", self.tokenizer.vocab_size, self.sampling.order)
        manifest_entries |= {"best": self.best.state_dict(), "kept_for": kept_for, "reward": self._moments()}
        with self.timers.phase("actor", "save"):
            waiting = self.sampling.waiting.to_bytes()
            files = {} if waiting is None else {GROUP_BUFFER_FILE: waiting}
            if self.settings.partial_rollouts:
                files[PARTIAL_ROLLOUTS_FILE] = self.sampling.parts.to_bytes()
            run_state.save(self.folder, self.step, self.mesh, self._states(loading=False), manifest_entries, files)

    def _resume(self):
        folder = self.inputs.resume
        loaded = run_state.load(folder, self.mesh, self._states(loading=True))
        manifest = self.resume_from(folder, self.sampling.order)
        if "best" in manifest:
            self.best.load_state_dict(manifest["best"])
        if manifest.get("reward"):
            self.reward.moments.load_state_dict(manifest["reward"])
        if (folder / GROUP_BUFFER_FILE).exists():
            self._take_up_waiting((folder / GROUP_BUFFER_FILE).read_bytes())
        if (folder / PARTIAL_ROLLOUTS_FILE).exists():
            self.sampling.parts.from_bytes((folder / PARTIAL_ROLLOUTS_FILE).read_bytes())
        if "critic" in loaded:
            self.critic.trainable_model.restore(loaded["critic"])
        if "reference" in loaded:
            self.reference.restore(loaded["reference"])
        if "actor" in loaded:
            extra = self.actor.trainable_model.restore(loaded["actor"])
            self.experience.controller.load_state_dict(extra["kl_controller"])

    def _take_up_waiting(self, data: bytes):
        """Groups of a batch that is not full, or of one that was written ahead."""
        s, waiting = self.settings, self.sampling.waiting
        waiting.from_bytes(data)
        if len(waiting) >= s.prompts_per_step if not s.one_step_off else len(waiting) != s.prompts_per_step:
            raise UsageError(
                f"--load: a batch of {len(waiting)} groups was written ahead; allowed are --one-step-off and "
                f"--prompts-per-step {len(waiting)}"
            )
