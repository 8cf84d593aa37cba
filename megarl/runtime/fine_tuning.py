"""Supervised fine-tuning: the mean negative log-probability of response tokens, and of held-out ones."""

import torch

from megarl.algorithms.aggregation import masked_sum, token_mean
from megarl.arguments import Program
from megarl.data.conversations import Encoder
from megarl.data.prompts import PromptSet
from megarl.data.sft import sft_examples
from megarl.mcore import device, passes
from megarl.observe.progress import SFT_FIELDS
from megarl.runtime.supervise import Drawn, Kind, Supervision


class FineTuning(Supervision):
    """A language model learns responses; the role is called actor, as the policy that it trains will be."""

    kind = Kind("train_sft", "actor", value_head=False, together=1, sources=("actor",))
    fields = SFT_FIELDS

    @staticmethod
    def read(prompts: PromptSet, encoder: Encoder, program: Program) -> list:
        """(tokens, mask of what is learnt) of each line."""
        limits = program.settings.max_prompt_length, program.settings.max_response_length
        return sft_examples(prompts, encoder, *limits)

    def texts(self, example) -> list[tuple[list[int], list[bool]]]:
        """The example is one sequence."""
        return [example]

    def _forward(self, network, part) -> passes.TokenScores:
        return passes.token_scores(
            network, part.tokens, part.on_host.lengths, 1.0, self.vocab_size, part.routing, part.on_host.response_mask
        )

    def learn(self, drawn: Drawn, step: int):
        """One update on the mean negative log-probability of response tokens."""
        with self.timers.phase("actor", "update"):
            self.learner.routes.begin()
            tokens = torch.stack([drawn.batch.response_mask.sum(), drawn.batch.lengths.sum()]).double()
            count, total = self.place.sum_over_lanes(tokens)

            def loss(scores, part):
                value = token_mean(-scores.logprobs, part.response_mask, count)
                return value, value.detach().double()

            losses, applied, norm = self.learner.update(self.parts(drawn.batch), self._forward, loss)
            mean = self.place.sum_over_lanes(torch.stack(losses).sum())
            self.metrics = {
                "sft/loss": float(mean),
                "sft/grad_norm": norm,
                "sft/learning_rate": self.learner.learning_rate(),
                "actor/updates_skipped": int(not applied),
                "perf/tokens": int(total),
                **self.learner.routes.metrics("router"),
            }

    def evaluate(self, drawn: Drawn) -> dict[str, float]:
        """Mean negative log-probability of the held-out responses' tokens. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=device.device())
        for scores, places in self.learner.evaluate(self.parts(drawn.batch), self._forward):
            mask = drawn.batch.select(places).response_mask
            if len(places):
                sums += torch.stack([-masked_sum(scores.logprobs, mask).double(), mask.sum().double()])
        total, count = self.place.sum_over_lanes(sums).tolist()
        return {"eval/loss": total / max(count, 1.0)}
