"""Supervised fine-tuning: the loss is the mean negative log-probability of the response tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.arguments import RunConfig, Settings
from megarl.data.columns import SFT
from megarl.data.conversations import Encoder
from megarl.data.examples import Examples
from megarl.data.prompts import PromptSet
from megarl.data.sft import sft_examples
from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.model import forward_pass
from megarl.observe.progress import SFT_FIELDS
from megarl.trainers.supervised_trainer import ExampleBatch, SupervisedTrainer, TaskSpec


class SFTTrainer(SupervisedTrainer):
    """Trains a language model on responses. Its role is the actor, so that train_rl can start from it."""

    task = TaskSpec(
        program="train_sft", role="actor", prefix="sft", value_head=False, sequence_names=("first",), best="loss",
        sources=("actor",), purpose=SFT,
    )  # fmt: skip
    metric_names = ("loss",)
    fields = SFT_FIELDS

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, config: RunConfig) -> Examples:
        """(tokens, mask of the tokens in the loss) of each line."""
        s = config.settings
        return sft_examples(prompts, encoder, s.max_prompt_length, s.max_response_length, s.filter_long_prompts)

    @staticmethod
    def check(settings: Settings):
        """The checks of `SupervisedTrainer`, and that a conversation has no parts of its own."""
        SupervisedTrainer.check(settings)
        for flag, name in (
            ("--prompt-column", settings.prompt_column),
            ("--response-column", settings.response_column),
        ):
            if name is not None and settings.messages_column is not None:
                raise UsageError(f"{flag} {name}: not allowed with --messages-column, which holds whole conversations")

    @staticmethod
    def sequences(example) -> list[tuple[list[int], list[bool]]]:
        """The example is one sequence."""
        return [example]

    def _forward(self, chunk, microbatch) -> forward_pass.TokenScores:
        lengths, mask = microbatch.host_metadata.lengths, microbatch.host_metadata.response_mask
        return forward_pass.token_scores(
            chunk, microbatch.tokens, lengths, 1.0, self.vocab_size, microbatch.routing, mask
        )

    def loss_of(self, examples: ExampleBatch, tokens: Tensor) -> Callable:
        """The mean negative log-probability of the response tokens."""

        def loss(scores, microbatch):
            value = token_mean(-scores.logprobs, microbatch.response_mask, tokens)
            return value, (value.detach().double().view(1),)

        return loss

    def evaluate_batch(self, examples: ExampleBatch) -> dict[str, float]:
        """Mean negative log-probability of the held-out responses' tokens. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=device.device())
        for scores, positions in self.trainable_model.forward_only(self.microbatches(examples.batch), self._forward):
            mask = examples.batch.select(positions).response_mask
            if len(positions):
                sums += torch.stack([-masked_sum(scores.logprobs, mask).double(), mask.sum().double()])
        total, count = self.role_groups.dp_all_reduce(sums).tolist()
        return {"eval/loss": total / max(count, 1.0)}
