"""Actor and critic on one rank, and the data of a step for them without a rollout."""

import torch

from megarl.batch import Batch
from megarl.data.tokenizers import build_tokenizer
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from tests.helpers.worlds import SAFETY

SEQUENCES = 12
# No division by tiny second moments: differences of rounding stay as small as they are in the gradient.
PLAIN = "--adam-eps 1 --lr 0.05 --weight-decay 0 --lr-decay-style constant"


def experience(dp_rank: int, replicas: int) -> Batch:
    """A replica's share of a step that is the same for every number of replicas.

    One sequence has no response; each prompt has two.
    """
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 7, (SEQUENCES // 2,), generator=generator).repeat_interleave(2)
    responses = torch.randint(1, 5, (SEQUENCES,), generator=generator)
    responses[3] = 0
    lengths = prompts + responses
    total = int(lengths.sum())
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompts.tolist(), strict=True)])
    names = "logprobs reference_logprobs values returns advantages entropy rollout_logprobs"
    noise = {name: torch.randn(total, generator=generator) * mask for name in names.split()}
    noise["logprobs"] = -2.7 + 0.1 * noise["logprobs"]
    noise["rollout_logprobs"] = noise["logprobs"] + 0.2 * noise["rollout_logprobs"]
    ids, starts = torch.arange(SEQUENCES), lengths.cumsum(0) - lengths
    tokens = torch.randint(0, 16, (total,), generator=generator)
    for first, second, count in zip(starts[::2].tolist(), starts[1::2].tolist(), prompts[::2].tolist(), strict=True):
        tokens[second : second + count] = tokens[first : first + count]
    batch = Batch(
        sequence_ids=ids, lengths=lengths, prompt_lengths=prompts, prompt_ids=ids // 2, response_mask=mask,
        tokens=tokens, finished=ids % 3 > 0, correct=ids % 2 > 0,
        scores=torch.randn(SEQUENCES, generator=generator), **noise,
    )  # fmt: skip
    return batch.select((ids // 2 % replicas == dp_rank).nonzero().flatten())


class LocalStepBatch(dict):
    """A step batch whose data are already on the ranks of the roles."""

    groups, step = PromptGroups.equal(SEQUENCES // 2, 2), 1
    count = property(lambda self: self.groups.count)


def role_of(name: str, parsed):
    """(actor or critic, its role groups) on this rank; the value head gets random weights."""
    from megarl.comm import role_mesh
    from megarl.roles.actor import Actor
    from megarl.roles.critic import Critic

    here = role_mesh.create_mesh(parsed.roles, SAFETY)
    tokenizer = build_tokenizer("SentencePieceTokenizer", parsed.settings.tokenizer_model)
    if name == "actor":
        vocab = tokenizer.vocab_size
        return Actor(parsed.settings, parsed.roles[name], here[name], vocab, parsed.policy_loss, Timers()), here[name]
    role = Critic(parsed.settings, parsed.roles[name], here[name], tokenizer.vocab_size, Timers())
    with torch.no_grad():
        role.trainable_model.model[0].output_layer.weight.copy_(torch.linspace(-0.2, 0.3, 32))
    return role, here[name]
