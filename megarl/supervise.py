"""Sets a supervised run up, and what one of its steps does: loss on responses, evaluation loss, checkpoints."""

import torch

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.arguments import Program
from megarl.batch import Batch
from megarl.checkpoint import folders, state
from megarl.data.order import PromptOrder
from megarl.data.prompts import load_prompts
from megarl.data.sft import sft_examples
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError
from megarl.mcore import device, model
from megarl.observe.timers import Timers
from megarl.roles import lanes
from megarl.roles.learner import Learner
from megarl.run import Run, check_common, check_given, create_world

SFT_FIELDS = (("loss", "sft/loss", ".4f"), ("eval loss", "eval/loss", ".4f"))


class Inputs:
    """Examples and tokenizer, read and checked before any rank joins another."""

    def __init__(self, program: Program):
        s = program.settings
        check_common(program)
        args = program.roles["actor"].megatron
        check_given({"--global-batch-size": args.global_batch_size})
        if s.target_eval_loss and not s.eval_interval:
            raise UsageError(f"--target-eval-loss {s.target_eval_loss}: needs --eval-interval")
        self.tokenizer = build_tokenizer(s.tokenizer_type, s.tokenizer_model)
        limits = (self.tokenizer, s.max_prompt_length, s.max_response_length)
        self.examples = sft_examples(load_prompts(s.prompts, "--prompts"), *limits)
        self.held_out = sft_examples(load_prompts(s.eval_prompts, "--eval-prompts"), *limits) if s.eval_prompts else []
        described = ("actor", args, self.tokenizer.vocab_size)
        self.pretrained = self.resume = None
        if args.pretrained_checkpoint:
            self.pretrained = folders.find(args.pretrained_checkpoint, "--pretrained-checkpoint")
            folders.check_weights(self.pretrained, "--pretrained-checkpoint", "actor", model.weight_shapes(*described))
        if s.load:
            shapes = {"actor": model.weight_shapes(*described, resumes=True)}
            self.resume = folders.check_resume(s.load, "train_sft", s.train_iters, shapes)


class Supervision(Run):
    """A supervised run on this rank; the role is called actor, as the policy that it trains will be."""

    def __init__(self, program: Program, timers: Timers):
        inputs = Inputs(program)
        if program.check:
            raise SystemExit(0)
        super().__init__(program, create_world(program), timers, SFT_FIELDS)
        self.inputs, self.place = inputs, self.world["actor"]
        role = program.roles["actor"]
        self.vocab_size = inputs.tokenizer.vocab_size
        self.learner = Learner(role, self.place, self.vocab_size, updates=1)
        self.batch_size = role.megatron.global_batch_size
        self.order = PromptOrder(len(inputs.examples), self.settings.seed)
        self.metrics: dict[str, float] = {}
        if inputs.pretrained:
            state.load_weights(inputs.pretrained, self.learner.model, self.place.collection)
        if inputs.resume:
            self._resume()
        self.open(resumed=bool(inputs.resume))

    def next_examples(self) -> Batch:
        """This lane's share of the next `--global-batch-size` examples."""
        return self._batch(self.inputs.examples, self.order.take(self.batch_size))

    def _batch(self, examples: list, lines: list[int]) -> Batch:
        lengths = torch.tensor([len(examples[line][0]) for line in lines], dtype=torch.int64)
        ids = torch.arange(len(lines))
        owners = lanes.by_work(lengths, [ids], len(self.place.lanes), self.learner.role.megatron.hidden_size)
        ids = ids[owners == self.place.lane]
        mine = [examples[lines[i]] for i in ids.tolist()]
        batch = Batch(
            sequence_ids=ids,
            lengths=torch.tensor([len(tokens) for tokens, _ in mine], dtype=torch.int64),
            tokens=torch.tensor([t for tokens, _ in mine for t in tokens], dtype=torch.int64),
            response_mask=torch.tensor([m for _, mask in mine for m in mask], dtype=torch.bool),
        )
        return batch.to(device.device())

    def _forward(self, network, part) -> model.TokenScores:
        return model.token_scores(network, part.tokens, part.lengths, 1.0, self.vocab_size, part.routing)

    def _parts(self, batch: Batch):
        return self.learner.microbatches(batch, torch.arange(len(batch)))

    def learn(self, batch: Batch, step: int):
        """One update on the mean negative log-probability of response tokens."""
        with self.timers.phase("actor", "update"):
            self.learner.routes.begin()
            tokens = torch.stack([batch.response_mask.sum(), batch.lengths.sum()]).double()
            count, total = self.place.sum_over_lanes(tokens)

            def loss(scores, part):
                value = token_mean(-scores.logprobs, part.response_mask, count)
                return value, value.detach().double()

            losses, applied, norm = self.learner.update(self._parts(batch), self._forward, loss)
            mean = self.place.sum_over_lanes(torch.stack(losses).sum())
            self.metrics = {
                "sft/loss": float(mean),
                "sft/grad_norm": norm,
                "sft/learning_rate": self.learner.learning_rate(),
                "actor/updates_skipped": int(not applied),
                "perf/tokens": int(total),
                **self.learner.routes.metrics("router"),
            }

    def evaluation_loss(self) -> float:
        """Mean negative log-probability of the held-out responses' tokens. Collective."""
        lines = list(range(len(self.inputs.held_out)))[: self.settings.eval_samples]
        batch = self._batch(self.inputs.held_out, lines)
        sums = torch.zeros(2, dtype=torch.float64, device=device.device())
        for scores, places in self.learner.evaluate(self._parts(batch), self._forward):
            mask = batch.select(places).response_mask
            if len(places):
                sums += torch.stack([-masked_sum(scores.logprobs, mask).double(), mask.sum().double()])
        total, count = self.place.sum_over_lanes(sums).tolist()
        return total / max(count, 1.0)

    def finish(self):
        """Ends a step: evaluation, metrics, checkpoint. Collective."""
        s = self.settings
        if s.eval_prompts and self.is_due(s.eval_interval):
            self.metrics["eval/loss"] = self.evaluation_loss()
            if s.target_eval_loss and self.metrics["eval/loss"] <= s.target_eval_loss:
                self.last_step = self.step
        self.record(self.metrics)
        if self.folder and self.is_due(s.save_interval):
            self._save()

    def _save(self):
        facts = self.facts("train_sft", self.vocab_size, self.order)
        state.save(self.folder, self.step, self.world, {"actor": self.learner.state({})}, facts)

    def _resume(self):
        loaded = state.load(self.inputs.resume, self.world, {"actor": self.learner.state({}, loading=True)})
        self.take_up(self.inputs.resume, self.order)
        self.learner.restore(loaded["actor"])
