"""A step of multi-turn episodes without a rollout; two failed, and the samples of a group are on different replicas."""

import torch

from megarl.batch import Batch

COUNT, SAMPLES = 12, 3  # episodes of a step, of a group
FAILED = (4, 9)
TURNS = [1, 2, 3, 2, 0, 1, 3, 2, 2, 0, 1, 3]
FLAGS = f"--prompts-per-step {COUNT // SAMPLES} --samples-per-prompt {SAMPLES} --max-turns 3 --environment x:y"


def episodes(dp_rank: int, replicas: int, failed: tuple[int, ...] = FAILED) -> Batch:
    """A replica's share of a step that is the same for every number of replicas.

    Each turn has two tokens of the policy and one of the environment, its reward is a multiple of 1/8. Numbers of
    `FAILED` that are not `failed` have one turn.
    """
    generator = torch.Generator().manual_seed(3)
    turns = [0 if i in failed else max(count, 1) for i, count in enumerate(TURNS)]
    mask, lengths = [], []
    for i, count in enumerate(turns):
        tokens = [False] * (3 + i // SAMPLES) + [True, True, False] * count
        tokens = tokens[: len(tokens) - (count > 0)]
        lengths.append(len(tokens))
        mask += tokens
    mask, lengths, ids = torch.tensor(mask), torch.tensor(lengths), torch.arange(COUNT)
    ends = mask & ~torch.cat([mask[1:], torch.zeros(1).bool()])
    ends[(lengths.cumsum(0) - 1)[torch.tensor(turns) > 0]] = True
    rewards = torch.randint(-8, 9, (COUNT, 3), generator=generator) / 8
    names = "logprobs reference_logprobs values returns advantages entropy rollout_logprobs"
    # Drawn per sequence, so that an episode that failed changes nothing of the others.
    noise = torch.randn(COUNT, 16, len(names.split()), generator=generator)
    noise = torch.cat([of_sequence[:length] for of_sequence, length in zip(noise, lengths.tolist(), strict=True)])
    fields = dict(zip(names.split(), (noise * mask.unsqueeze(1)).unbind(1), strict=True))
    turn_rewards = torch.zeros(len(mask))
    turn_rewards[ends] = torch.cat([row[:count] for row, count in zip(rewards, turns, strict=True)])
    tokens = torch.randint(0, 16, (COUNT, 16), generator=generator)
    tokens[:, :6] = tokens[ids // SAMPLES * SAMPLES, :6]  # the longest prompt
    batch = Batch(
        sequence_ids=ids, lengths=lengths, prompt_lengths=3 + ids // SAMPLES, prompt_ids=ids // SAMPLES,
        tokens=torch.cat([row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]),
        response_mask=mask, finished=(torch.tensor(turns) > 0) & (ids % 4 > 0), solved=ids % 2 > 0,
        turn_rewards=turn_rewards, correct=(torch.tensor(turns) > 0) & (ids % 2 > 0),
        scores=torch.stack([row[:count].sum() for row, count in zip(rewards, turns, strict=True)]),
        **{name: values.contiguous() for name, values in fields.items()},
    )  # fmt: skip
    return batch.select((ids % replicas == dp_rank).nonzero().flatten())
