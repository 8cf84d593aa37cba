"""Sets a reinforcement-learning run up: checks, roles, warm start, resume; and what surrounds each of its steps."""

import argparse
import os

from megarl.arguments import MODELS, Program, RoleSettings, Settings
from megarl.batch import Batch
from megarl.checkpoint import folders, state
from megarl.data.order import PromptOrder
from megarl.data.prompts import load_prompts
from megarl.data.tokenizers import Tokenizer, build_tokenizer
from megarl.errors import UsageError
from megarl.mcore import model
from megarl.observe.samples import SamplesWriter
from megarl.observe.timers import Timers
from megarl.rewards.build import build_reward, check_prompts
from megarl.roles import lanes
from megarl.roles import microbatches as mb
from megarl.roles.actor import Actor
from megarl.roles.critic import Critic
from megarl.roles.experience import Experience
from megarl.roles.flow import Flow
from megarl.roles.reference import Reference
from megarl.roles.reward import Reward
from megarl.roles.rollout import Rollout
from megarl.run import Run, check_common, create_world

SAMPLE_ROWS = 64  # of a step's responses in the samples file
EVAL_STEP = 2**31  # evaluation draws from random streams that no training step uses


class Inputs:
    """Prompts, tokenizer and reward, read and checked before any rank joins another."""

    def __init__(self, program: Program):
        s = program.settings
        check_common(program)
        _check_sizes(s)
        _check_rollout(s, program.roles["rollout"])
        self.tokenizer: Tokenizer = build_tokenizer(s.tokenizer_type, s.tokenizer_model)
        self.prompts = load_prompts(s.prompts, "--prompts")
        self.tokens = self.prompts.encode(self.tokenizer, s.max_prompt_length)
        self.eval_prompts = load_prompts(s.eval_prompts, "--eval-prompts") if s.eval_prompts else None
        self.eval_tokens = self.eval_prompts.encode(self.tokenizer, s.max_prompt_length) if self.eval_prompts else []
        self.verifier = build_reward(s.reward)
        rank = int(os.environ.get("RANK", 0))
        scores_here = rank == 0 or rank in program.roles["reward"].ranks  # rank 0 tells what is wrong
        for prompts in filter(None, (self.prompts, self.eval_prompts)):
            check_prompts(s.reward, prompts, scores_here)
        vocab = self.tokenizer.vocab_size
        self.pretrained = _check_pretrained(program, vocab)
        self.resume = None
        if s.load:
            shapes = {r: model.weight_shapes(r, program.roles[r].megatron, vocab) for r in MODELS}
            self.resume = folders.check_resume(s.load, "train_rl", s.train_iters, shapes)


def _check_sizes(s: Settings):
    if s.kl_target and s.kl_coefficient == 0:
        raise UsageError("--kl-target: needs a --kl-coefficient above 0 to start from")
    sequences = s.prompts_per_step * s.samples_per_prompt
    if s.kl_target and s.kl_horizon <= 0.2 * sequences:
        raise UsageError(f"--kl-horizon {s.kl_horizon}: allowed is more than 0.2 × {sequences} responses of a step")
    if s.minibatch_size and s.minibatch_size > sequences:
        raise UsageError(
            f"--minibatch-size {s.minibatch_size}: allowed is at most --prompts-per-step × --samples-per-prompt = "
            f"{sequences}"
        )


def _check_rollout(s: Settings, rollout: RoleSettings):
    if s.verify_weights and rollout.host != "rollout":
        raise UsageError("--verify-weights: the rollout runs on the actor's own weights, so there is no transfer")


def _check_pretrained(program: Program, vocab_size: int) -> dict:
    found = {}
    for name in MODELS:
        args: argparse.Namespace = program.roles[name].megatron
        if args.pretrained_checkpoint:
            flag = "--pretrained-checkpoint"
            found[name] = folders.find(args.pretrained_checkpoint, flag)
            folders.check_weights(found[name], flag, name, model.weight_shapes("actor", args, vocab_size))
    return found


class Reinforcement(Run):
    """A reinforcement-learning run on this rank: its roles, its data, and what happens around a step."""

    def __init__(self, program: Program, timers: Timers):
        inputs = Inputs(program)
        if program.check:
            raise SystemExit(0)
        super().__init__(program, create_world(program), timers)
        s, place, roles = self.settings, self.world.places, program.roles
        self.inputs, self.prompts, self.tokenizer = inputs, inputs.prompts, inputs.tokenizer
        self.samples_per_prompt = s.samples_per_prompt
        vocab = self.tokenizer.vocab_size
        self.actor = Actor(s, roles["actor"], place["actor"], vocab, timers)
        self.critic = Critic(s, roles["critic"], place["critic"], vocab, timers)
        self.reward = Reward(s, place["reward"], self.tokenizer, inputs.verifier, timers)
        self.reference = Reference(s, roles["reference"], place["reference"], vocab, timers)
        self.experience = Experience(s, place["actor"], timers)
        self.rollout = Rollout(s, roles["rollout"], self.world, self.actor, self.tokenizer, timers)
        self.order = PromptOrder(len(self.prompts), s.seed)
        self._accuracy_before: float | None = None  # of held-out prompts, known on rank 0
        self._accuracy_after: float | None = None
        if inputs.resume:
            self._resume()
        else:
            self._warm_start()
        self.rollout.refresh()
        self.open(resumed=bool(inputs.resume))
        if not inputs.resume and s.eval_prompts:
            self._accuracy_before = self.evaluate()
            if self.world.rank == 0:
                self.write({"eval/accuracy": self._accuracy_before})
                print(f"held-out accuracy before training: {self._accuracy_before:.4f}", flush=True)
        timers.end_step(0)

    def _warm_start(self):
        learners = {"actor": self.actor.learner, "critic": self.critic.learner}
        models = {name: learner.model for name, learner in learners.items() if learner}
        if self.reference.model is not None:
            models["reference"] = self.reference.model
        for name, network in models.items():
            if name in self.inputs.pretrained:
                state.load_weights(self.inputs.pretrained[name], network, self.world[name].collection)

    def next_prompts(self) -> list[tuple[int, list[int]]]:
        """Line and tokens of this step's prompts; the same on every rank."""
        return [(line, self.inputs.tokens[line]) for line in self.order.take(self.settings.prompts_per_step)]

    def flow(self, rollout: Batch | None) -> Flow:
        """The step's data, from this rank's share of the rollout; lanes share its work out evenly. Collective."""
        minibatches = mb.minibatches_of_step(self.settings, self.step, epoch=0)
        hidden = self.program.roles["actor"].megatron.hidden_size
        with self.timers.phase(self.world["rollout"].host, "exchange"):
            owners = lanes.balanced(self.world, rollout, minibatches, self.samples_per_prompt, hidden)
        return Flow(self.world, self.timers, owners, rollout)

    def evaluate(self) -> float | None:
        """Share of held-out prompts whose greedy answer is correct, on rank 0 (None elsewhere). Collective."""
        tokens = self.inputs.eval_tokens[: self.settings.eval_samples]
        rollout = self.rollout.generate(list(enumerate(tokens)), 1, EVAL_STEP, greedy=True)
        flow = Flow(self.world, self.timers, lanes.dealt(self.world, len(tokens), 1), rollout)
        flow.share(["reward"])
        self.reward.score(flow, self.inputs.eval_prompts)
        mine = 0
        if self.world["reward"].is_leader:
            mine = int(flow["reward"].correct.sum())
        counts = self.world.gather(mine)
        return sum(counts) / len(tokens) if counts is not None else None

    def finish(self, flow: Flow):
        """Ends a step: samples, evaluation, metrics, checkpoint. Collective."""
        s, metrics = self.settings, {}
        self._write_samples()
        for role in (self.actor, self.critic, self.experience, self.rollout):
            if role.place.is_member:
                metrics |= role.metrics
        if s.eval_prompts and self.is_due(s.eval_interval):
            accuracy = self.evaluate()
            if accuracy is not None:
                metrics["eval/accuracy"] = self._accuracy_after = accuracy
        self.record(metrics)
        if self.folder and self.is_due(s.save_interval):
            self._save()

    def close(self):
        """Ends the run: time line, report, and how far it got. Collective."""
        super().close()
        if self._accuracy_after is not None:
            before = "" if self._accuracy_before is None else f"{self._accuracy_before:.4f} before, "
            print(f"held-out accuracy: {before}{self._accuracy_after:.4f} after {self.step} steps", flush=True)

    def _write_samples(self):
        if not self.folder:
            return
        first = [row for row in self.reward.rows if row["sequence"] < SAMPLE_ROWS]
        gathered = self.world.gather(first if self.world["reward"].is_leader else [])
        if gathered is not None:
            rows = sorted((row for part in gathered for row in part), key=lambda row: row["sequence"])
            SamplesWriter(self.folder).write(self.step, rows)

    def _states(self, loading: bool) -> dict:
        states = {}
        if self.actor.learner:
            extra = {"kl_controller": self.experience.controller.state_dict()}
            states["actor"] = self.actor.learner.state(extra, loading)
        if self.critic.learner:
            states["critic"] = self.critic.learner.state({}, loading)
        if self.reference.model is not None:
            states["reference"] = self.reference.state()
        return states

    def _save(self):
        facts = self.facts("train_rl", self.tokenizer.vocab_size, self.order)
        with self.timers.phase("actor", "save"):
            state.save(self.folder, self.step, self.world, self._states(loading=False), facts)

    def _resume(self):
        loaded = state.load(self.inputs.resume, self.world, self._states(loading=True))
        self.take_up(self.inputs.resume, self.order)
        if "critic" in loaded:
            self.critic.learner.restore(loaded["critic"])
        if "reference" in loaded:
            self.reference.restore(loaded["reference"])
        if "actor" in loaded:
            extra = self.actor.learner.restore(loaded["actor"])
            self.experience.controller.load_state_dict(extra["kl_controller"])
