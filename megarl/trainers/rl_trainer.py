"""RLTrainer: inputs and checks of an RL run, its roles, and dispatch, evaluation, logging and saving of a step."""

import contextlib
from collections import deque
from collections.abc import Iterator

from megarl.arguments import RoleSettings, RunConfig
from megarl.checkpoint import folders, resume
from megarl.checkpoint.resume import PROMPTS
from megarl.comm.step_batch import StepBatch
from megarl.errors import UsageError
from megarl.flags.distillation import AVERAGE, LOSS
from megarl.observe import samples
from megarl.observe.timers import Timers
from megarl.roles.actor import Actor
from megarl.roles.advantage_computer import AdvantageComputer
from megarl.roles.critic import Critic
from megarl.roles.reference import Reference, shares_base
from megarl.roles.teacher import TeacherOutput, Teachers
from megarl.roles.teacher_prompts import SiblingContext
from megarl.roles.trainable_model import TrainableModel
from megarl.rollout import waiting_groups
from megarl.rollout.batcher import RolloutBatcher
from megarl.rollout.episodes.runner import EpisodeRunner
from megarl.rollout.group_collector import SavedGroupCollector, SavedRollout
from megarl.rollout.guest_engine import GuestEngine
from megarl.rollout.rollout import Rollout
from megarl.rollout.rollout_files import RolloutWriter
from megarl.router_replay.route_exchange import RoutingReplay
from megarl.trainers.environment_inputs import open_sessions
from megarl.trainers.evaluator import ACCURACY, Evaluations
from megarl.trainers.events import export
from megarl.trainers.generation_lag import leading_ranks
from megarl.trainers.policy import PolicyService, load_policy
from megarl.trainers.rl_inputs import RLInputs, saves_reference
from megarl.trainers.setup import read_inputs
from megarl.trainers.step_reports import StepRecord, StepRecords, TokenSamples, rows_so_far
from megarl.trainers.trainer import Trainer

SAMPLES_PER_FILE = 64  # responses of a step in its samples file


class RLTrainer(Trainer):
    """A reinforcement-learning run on this rank: roles, data, and everything of a step besides the algorithm."""

    def __init__(self, config: RunConfig, timers: Timers):
        inputs, mesh, used = read_inputs(config, timers, lambda: RLInputs(config), folder=config.settings.save)
        super().__init__(config, mesh, inputs, timers, config.settings.best_metric or ACCURACY)
        if inputs.saved_rollouts:
            damaged = folders.find_damage(inputs.saved_rollouts.folders, "--load-rollouts")
            for folder, problem in damaged.items():
                raise UsageError(f"--load-rollouts {folder}: {problem}")
        self.tokenizer = inputs.tokenizer
        self._processes = contextlib.ExitStack()  # the HTTP process of `--agent-sessions`
        self._build_roles(config, timers)
        # With `--debug-train-only`, too, what these ranks report of batches in the checkpoint is in the checkpoint.
        self._is_ahead = mesh.rank in leading_ranks(self.settings, config.roles) and not self.trained_models()
        if self._is_ahead and not self.settings.debug_train_only:
            self.lead = self.settings.generation_lag
        self._records = StepRecords()
        self._metrics: dict[str, float] = {}  # of the step that the iteration ends
        self._samples: list[dict] = []
        self._sent = deque[StepBatch]()  # batches that may still be on their way to other ranks
        self._token_samples = None
        if self.folder:
            count, is_forced = self.settings.token_samples, inputs.thinking is not None
            self._token_samples = TokenSamples(count, self.tokenizer, is_forced, inputs.encoder.images)
        self._batch: StepBatch | None = None
        if self.folder:
            # Of a step that the user's code ends.
            so_far = lambda: rows_so_far(self.reward, self._batch, self.rollout.episodes, self._rows())  # noqa: E731
            samples.keep_for_failure(self.folder, so_far)
        self._accuracy_before: float | None = None  # on held-out prompts, on rank 0
        self._accuracy_after: float | None = None
        self._load_pretrained()
        self._copy_teacher_output()
        if inputs.resume:
            self._resume()
        self._saved = self.step  # of the last checkpoint
        if isinstance(self.batcher.collector, SavedGroupCollector):
            self.batcher.collector.check_start(self.step + 1)
        self.rollout.load_weights()
        self.rollout.restart(self.step)
        self.open(inputs.resume, used)
        self.policy_service = None
        if self.settings.serve_policy:
            front = inputs.frontend_config
            self.policy_service = PolicyService(config, front, mesh, self.rollout, self.tokenizer, timers)
        if self.events.evaluates_before:
            self._evaluate_before_training()
        timers.end_step(0)

    def _build_roles(self, config: RunConfig, timers: Timers):
        """Builds every role on every rank; a role has a model on its own ranks only."""
        s, mesh = self.settings, self.mesh
        roles, inputs = config.roles, self.inputs
        sizes = {name: role.model_vocab_size(self.tokenizer.vocab_size) for name, role in roles.items()}
        self.actor = Actor(s, roles["actor"], mesh["actor"], sizes["actor"], config.policy_loss, timers)
        self.critic = Critic(s, roles.get("critic"), mesh["critic"], sizes.get("critic"), timers)
        self.reward = inputs.reward_factory.role(mesh["reward"], inputs.encoder, timers)
        policy, reference = self.actor.trainable_model, roles.get("reference")
        is_shared = shares_base(roles["actor"], reference) and not s.reference_update_interval
        shared = policy if is_shared else None
        self.reference = Reference(s, reference, mesh["reference"], sizes.get("reference"), timers, shared)
        self.reference.plan_refreshes(mesh, policy)
        vocab_size, context = self.tokenizer.vocab_size, None
        if inputs.teacher_context is not None:
            context = SiblingContext(s, inputs.teacher_context, inputs.encoder)
        tokens, numbers = inputs.teacher_tokens, inputs.teacher_numbers
        self.teacher = Teachers(config, mesh["teacher"], vocab_size, timers, tokens, numbers, context)
        self.teacher.plan_refreshes(mesh, policy)
        self.advantages = AdvantageComputer(s, config.estimator, mesh["actor"], timers)
        self.rollout = self._build_rollout(timers)
        self._attach_images(roles)
        states = {name: model.router_state for name, model in self._models().items()}
        states |= {f"teacher {number}": state for number, state in enumerate(self.teacher.router_states)}
        self.routing_replay = RoutingReplay(
            s, roles["actor"], mesh, self.rollout.recorded_layers, states, self.actor.passes_of_step
        )
        self.batcher, self.evaluator = self._build_batcher(), None
        if self.events.evaluates:
            prompts, tokens = inputs.eval_prompts, inputs.eval_tokens
            self.evaluator = Evaluations(s, mesh, self.rollout, self.reward, prompts, tokens, timers)

    def _attach_images(self, roles: dict[str, RoleSettings]):
        """Has the models on this rank read the images of prompts, if they have any."""
        if self.images is None:
            return
        for name, model in self._models().items():
            self.images.attach(roles[name], model.model)
        for frozen in (*self.teacher.frozen_models, *self.reward.frozen_models):
            self.images.attach(frozen.role, frozen.model)
        self.images.attach(roles["actor"], self.rollout.model)

    def _build_rollout(self, timers: Timers) -> Rollout | SavedRollout:
        s, mesh = self.settings, self.mesh
        role = self.inputs.rollout_role(self.config)
        if s.debug_train_only:
            return SavedRollout(s, role, mesh, timers)
        policy = self.actor.trainable_model
        trained = cache = None
        if policy:
            trained, cache = policy.all_chunks, policy.cache_in_grad_buffer
        elif s.debug_rollout_only:
            actor = self.config.roles["actor"]
            vocab_size = actor.model_vocab_size(self.tokenizer.vocab_size)
            trained = load_policy(actor, mesh["actor"], vocab_size, self.inputs.frozen_policy)
        episodes = None
        if s.environment:
            inputs, sessions = self.inputs, None
            if inputs.sessions is not None:
                sessions = open_sessions(inputs.sessions, s, mesh["rollout"], inputs.encoder, self._processes)
            episodes = EpisodeRunner(s, mesh["rollout"], inputs.encoder, self.folder, sessions)
        schedule, thinking, guests = self.inputs.schedule, self.inputs.thinking, None
        if s.replica_port is not None and mesh["rollout"].is_member:
            guests = GuestEngine(self.config, mesh["rollout"])
        return Rollout(s, role, mesh, trained, self.tokenizer, timers, cache, episodes, schedule, thinking, guests)

    def _build_batcher(self) -> RolloutBatcher:
        s, inputs, rollout = self.settings, self.inputs, self.rollout
        hidden_size, writer = self.config.roles["actor"].megatron.hidden_size, None
        if s.save_rollouts:
            writer = RolloutWriter(self.folder, self.mesh["rollout"], rollout.recorded_layers, inputs.rollout_facts)
        return RolloutBatcher(
            rollout, self.reward, inputs.prompts, inputs.prompt_tokens, hidden_size, writer, inputs.saved_rollouts
        )

    def _models(self) -> dict:
        actor, critic = self.actor.trainable_model, self.critic.trainable_model
        models = {"actor": actor, "critic": critic, "reference": self.reference.frozen_model}
        return {name: model for name, model in models.items() if model}

    def trained_models(self) -> list[TrainableModel]:
        return [model for model in (self.actor.trainable_model, self.critic.trainable_model) if model]

    def _load_pretrained(self):
        models = self._models()
        for name, weights in self.inputs.pretrained.items():
            if name in models and not (name == "reference" and self.reference.is_shared):
                models[name].load_pretrained(weights)
        self.teacher.load(self.inputs.teachers)

    def _copy_teacher_output(self):
        is_involved = self.mesh["teacher"].is_member or self.mesh["actor"].is_member
        if self.settings.distill == LOSS and is_involved:
            policy = self.actor.trainable_model
            self.actor.teacher_output = TeacherOutput(
                self.settings, self.teacher, self.mesh, None if policy is None else policy.model, self.config.teachers
            )

    def _evaluate_before_training(self):
        metrics = self._evaluated()
        if metrics is not None:
            self._accuracy_before = metrics["eval/accuracy"]
            self.write(0, metrics)
            print(f"held-out accuracy before training: {self._accuracy_before:.4f}", flush=True)

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps; resets the metrics of all roles before each."""
        for step in super().steps():
            self.reward.begin_step()
            self.routing_replay.begin_step()
            for source in self._metric_sources():
                source.metrics = {}
            if self.actor.trainable_model and step > self.settings.critic_warmup_steps:
                self.actor.metrics = {"actor/updates": 0}  # also of a step without a batch
            self._batch = None
            self._refresh_teacher()
            yield step

    def _refresh_teacher(self):
        """Gives a teacher that is the policy's moving average the present one. A collective of teacher and actor."""
        if self.settings.teacher == AVERAGE and "teacher" in self.mesh.roles:
            with self.actor.averaged():
                self.teacher.refresh()
            if self.actor.teacher_output is not None:
                self.actor.teacher_output.refresh()

    def may_stop(self, step: int) -> bool:
        """Whether the run can end after a step: not if rounds up to `--generation-lag` steps later follow a schedule
        in which they wait for weights of a step that would not come."""
        schedule = self.inputs.schedule
        return schedule is None or schedule.needs(step + self.settings.generation_lag) <= step

    def _metric_sources(self) -> list:
        return [self.batcher, self.actor, self.critic, self.reference, self.teacher, self.advantages]

    def dispatch(self, batch: StepBatch):
        """Sends the responses to all roles, and the rollout's routes for router replay. Collective."""
        self._batch = batch
        self._sent.append(batch)
        self.flush(wait=False)  # prints earlier steps that all ranks have ended by now
        batch.dispatch("actor", "reward", "reference", "teacher", "critic")
        self.routing_replay.send_routes(batch)
        if self.images is not None:
            self.images.dispatch(batch, self.config.roles)

    def serve(self, step: int):
        """Answers requests that have come from outside, with `--serve-policy`. Collective."""
        if self.policy_service is not None and self.ends_step:
            self.policy_service.answer(self.rollout.weights_at(self.step))

    def evaluate(self, step: int):
        """Evaluates on held-out prompts every `--eval-interval` steps. Collective.

        It first saves the metrics and samples of the iteration, since the evaluation overwrites those of the roles.
        """
        while len(self._sent) > self.lead:  # until those of earlier iterations are on their way
            self._sent.popleft().wait_sends()
        self._records.add(step, self._record())
        if not self.ends_step:
            return
        self._records.forget_before(self.step)
        record = self._records[self.step]
        self._metrics, self._samples, self._is_best = record.metrics | self.rollout.metrics, record.samples, False
        if not self.evaluator or not self.is_due(self.settings.eval_interval):
            return
        metrics = self._evaluated()
        self._is_best = self.events.keeps_best and self.best.update(metrics, self.step)
        if metrics is not None:
            self._metrics |= metrics
            self._accuracy_after = metrics["eval/accuracy"]

    def _evaluated(self) -> dict[str, float] | None:
        """Metrics of an evaluation, on rank 0: of the policy, or with `--evaluate-ema` of its moving average."""
        if not self.settings.evaluate_ema:
            return self.evaluator.evaluate()[0]
        assert isinstance(self.rollout, Rollout)  # saved rollouts evaluate nothing
        with self.actor.averaged(), self.rollout.other_weights():
            return self.evaluator.evaluate()[0]

    def _record(self) -> StepRecord:
        """What this rank knows of the iteration's batch. A collective of the reward role's leaders."""
        sources = (*self._metric_sources(), self.reward)
        metrics = {name: value for source in sources for name, value in source.metrics.items()}
        samples = [row for row in self._rows() if row["sequence"] < SAMPLES_PER_FILE]
        if self._token_samples and self._batch is not None and self.mesh["actor"].is_leader:
            samples += self._token_samples.rows(self._batch)
        return StepRecord(metrics, samples, self.reward.moments.state_dict())

    def _rows(self) -> list[dict]:
        """Rows of the samples file of what this rank has scored in the iteration."""
        return self.batcher.rows or ([] if self._batch is None else self._batch.rows)

    def log(self, step: int):
        """Publishes the step's metrics and samples; rank 0 writes them once all ranks have ended the step."""
        if self.ends_step:
            self.publish(self._metrics, self._samples)
        else:
            self._end_timers(step)

    def save(self, step: int):
        """Saves a checkpoint every `--save-interval` steps, and after the best evaluation so far. Collective."""
        if not self.ends_step:
            return
        is_due = self.is_due(self.settings.save_interval)
        self.batcher.forget(self.step)
        if not (writers := self.writers(is_due)):
            return
        manifest = self.manifest_entries("train_rl", self.tokenizer.vocab_size, is_due)
        manifest |= self._entries_of_other_ranks()
        with self.timers.phase("actor", "save"):
            files = self.batcher.files() | self._records.files(self.mesh, self.step)
            interval, saved, self._saved = self.settings.reference_update_interval, self._saved, self.step
            if interval and self.step // interval > saved // interval:  # it was refreshed after the last checkpoint
                self.checkpoints.forget_frozen("reference")
            states = self._states(loading=False)
            for writer in writers:
                writer.save(self.step, states, manifest, files, self._frozen_states())
            if self.checkpoints not in writers:
                return
            if self.rollout.bank:
                self.rollout.bank.discard(self.folder)
            if self.rollout.episodes:
                self.rollout.episodes.discard_journal(self.folder)
            if self.actor.trainable_model:
                policy = self.actor.trainable_model
                export(policy, self.inputs.encoder, self.folder, self.events.exports, self.step)

    def close(self):
        """Ends the run: writes timeline and report, prints the final accuracy. Collective."""
        for batch in self._sent:
            if batch.step <= self.step:  # nobody receives later ones if a signal has stopped the run
                batch.wait_sends()
        self.rollout.wait_sends()
        if self.policy_service is not None:
            self.policy_service.close()
        super().close()
        self.reward.verifiers.close()
        if self.rollout.episodes:
            self.rollout.episodes.close()
        if self.rollout.guests is not None:
            self.rollout.guests.close()
        self._processes.close()
        if self._accuracy_after is not None:
            before = "" if self._accuracy_before is None else f"{self._accuracy_before:.4f} before, "
            print(f"held-out accuracy: {before}{self._accuracy_after:.4f} after {self.step} steps", flush=True)

    def _states(self, loading: bool) -> dict:
        """Checkpoint state of this rank's models by role, to save or, if `loading`, to fill."""
        states = {}
        if self.actor.trainable_model:
            extra = {"kl_controller": self.advantages.controller.state_dict()}
            has_average = not loading or resume.holds_average(self.inputs.manifest)
            states["actor"] = self.actor.trainable_model.state(extra, loading, has_average)
        if self.critic.trainable_model:
            states["critic"] = self.critic.trainable_model.state({}, loading)
        if loading:
            states |= {name: state() for name, state in self._frozen_states().items() if self.mesh[name].is_member}
        return states

    def _frozen_states(self) -> dict:
        """Role -> function that returns its checkpoint state on this rank, for roles whose weights seldom change."""
        if not saves_reference(self.settings, self.config.roles):
            return {}
        return {"reference": self.reference.state if self.mesh["reference"].is_member else dict}

    def _entries_of_other_ranks(self) -> dict:
        """Manifest entries of the rollout and of the reward role, on rank 0; {} elsewhere. Collective."""
        own = self.batcher.manifest_entries(self.step)
        if self.mesh["reward"].is_leader:
            own["reward"] = self._records[self.step].moments
        gathered = self.mesh.gather(own) or []
        return {name: entry for of_rank in reversed(gathered) for name, entry in of_rank.items()}

    def _resume(self):
        folder, manifest = self.inputs.resume, self.inputs.manifest
        loaded = resume.load_states(folder, self.mesh, self._states(loading=True))
        self.restore_progress(self.batcher.order)
        if manifest.get("reward"):
            self.reward.moments.load_state_dict(manifest["reward"])
        has_new_prompts = PROMPTS in resume.changed_data(manifest, self.inputs.data)
        self.batcher.resume(folder, manifest, has_new_prompts)
        if self._is_ahead:
            through = waiting_groups.queued(manifest)["through"]
            self._records.restore(folder, through, self.mesh["rollout"].ranks.start)
        if "critic" in loaded:
            self.critic.trainable_model.restore(loaded["critic"])
        if "reference" in loaded:
            self.reference.restore(loaded["reference"])
        if "actor" in loaded:
            extra = self.actor.trainable_model.restore(loaded["actor"])
            self.advantages.controller.load_state_dict(extra["kl_controller"])
