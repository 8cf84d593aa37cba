"""Supervised fine-tuning: the mean negative log-probability of response tokens, and of held-out ones."""

import torch

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.arguments import RunConfig
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.sft import sft_examples
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.observe.progress import SFT_FIELDS
from megarl.trainers.supervised_trainer import ExampleBatch, SupervisedTrainer, TaskSpec


class SFTTrainer(SupervisedTrainer):
    """A language model learns responses; the role is called actor, as the policy that it trains will be."""

    task = TaskSpec("train_sft", "actor", value_head=False, sequences_per_example=1, sources=("actor",))
    fields = SFT_FIELDS

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> list:
        """(tokens, mask of what is learnt) of each line."""
        limits = config.settings.max_prompt_length, config.settings.max_response_length
        return sft_examples(prompts, encoder, *limits)

    def texts(self, example) -> list[tuple[list[int], list[bool]]]:
        """The example is one sequence."""
        return [example]

    def _forward(self, network, part) -> forward_pass.TokenScores:
        return forward_pass.token_scores(
            network,
            part.tokens,
            part.host_metadata.lengths,
            1.0,
            self.vocab_size,
            part.routing,
            part.host_metadata.response_mask,
        )

    def update(self, examples: ExampleBatch):
        """One update on the mean negative log-probability of response tokens."""
        with self.timers.phase("actor", "update"):
            self.trainable_model.routes.begin()
            tokens = torch.stack([examples.batch.response_mask.sum(), examples.batch.lengths.sum()]).double()
            count, total = self.role_groups.dp_all_reduce(tokens)

            def loss(scores, part):
                value = token_mean(-scores.logprobs, part.response_mask, count)
                return value, value.detach().double()

            losses, applied, norm = self.trainable_model.update(self.microbatches(examples.batch), self._forward, loss)
            mean = self.role_groups.dp_all_reduce(torch.stack(losses).sum())
            self.metrics = {
                "sft/loss": float(mean),
                "sft/grad_norm": norm,
                "sft/learning_rate": self.trainable_model.learning_rate(),
                "actor/updates_skipped": int(not applied),
                "perf/tokens": int(total),
                **self.trainable_model.routes.metrics("router"),
            }

    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """Mean negative log-probability of the held-out responses' tokens. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=device.device())
        for scores, places in self.trainable_model.forward_only(self.microbatches(examples.batch), self._forward):
            mask = examples.batch.select(places).response_mask
            if len(places):
                sums += torch.stack([-masked_sum(scores.logprobs, mask).double(), mask.sum().double()])
        total, count = self.role_groups.dp_all_reduce(sums).tolist()
        return {"eval/loss": total / max(count, 1.0)}
