"""Actor and critic on one rank, the data of a step for them without a rollout, and what they make of it."""

from typing import NamedTuple

import pytest
import torch

from megarl.batch import Batch
from megarl.data.tokenizers import build_tokenizer
from megarl.groups import PromptGroups
from megarl.observe.timers import Timers
from tests.helpers.programs import program, rl_argv
from tests.helpers.worlds import SAFETY, run_world

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


class Updated(NamedTuple):
    """A role after its updates: gradients of the last one, weights, metrics, the schedule's position."""

    gradients: dict
    weights: dict
    metrics: dict
    changed: bool
    schedule: int


def updated(rank: int, parsed, name: str, groups, batch_of, kl: float, is_recomputed: bool) -> Updated:
    role, place = role_of(name, parsed)
    batch = batch_of(place.dp_rank, len(place.replicas))
    parameters = dict(role.trainable_model.model.named_parameters())
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    if is_recomputed:
        role._updates_on_policy = lambda *_: False
    held = LocalStepBatch({name: batch})
    held.groups = groups
    role.update(held, *[kl] * (name == "actor"))
    gradients = {key: parameter.main_grad.clone() for key, parameter in parameters.items()}
    weights = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    changed = any(not torch.equal(before[key], weights[key]) for key in weights)
    return Updated(gradients, weights, role.metrics, changed, role.trainable_model.scheduler.num_steps)


def update(folder, name: str, flags: str, size: int = 1, batch_of=experience, groups=LocalStepBatch.groups,
           kl: float = 0.0, is_recomputed: bool = True) -> list[Updated]:  # fmt: skip
    """Of each rank; `is_recomputed`: the batch's old log-probs count, even where it is read once."""
    parsed = program("rl", rl_argv(folder, f"{PLAIN} --critic-lr 0.05 {flags}"), size)
    return run_world(updated, size, parsed, name, groups, batch_of, kl, is_recomputed)


def assert_equal_updates(found: Updated, expected: Updated):
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    assert largest > 1e-3
    for key, gradient in expected.gradients.items():
        assert (found.gradients[key] - gradient).abs().max() <= 2e-6 * largest, key
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-7)


def assert_no_update(name: str, metrics: dict):
    assert metrics[f"{name}/updates_skipped"] == 0
    assert not {f"{name}/loss", f"{name}/grad_norm"} & metrics.keys()
    assert all(value == value and abs(value) != float("inf") for value in metrics.values())


class Computed(NamedTuple):
    """A replica's batch with advantages, its token rewards, metrics, and the KL coefficient of the next step."""

    batch: Batch
    rewards: torch.Tensor
    metrics: dict
    kl_coefficient: float


def computed(rank: int, parsed, groups, batch_of) -> Computed:
    from megarl.comm import role_mesh
    from megarl.roles.advantage_computer import AdvantageComputer

    place = role_mesh.create_mesh(parsed.roles, SAFETY)["actor"]
    batch = batch_of(place.dp_rank, len(place.replicas))
    role = AdvantageComputer(parsed.settings, parsed.estimator, place, Timers())
    batch.advantages = batch.returns = None
    held = LocalStepBatch(actor=batch)
    held.groups = groups
    role.compute(held)
    role.update_kl_coefficient(held)
    return Computed(batch, role._token_rewards(batch, 0.0), role.metrics, role.kl_coefficient)


def compute(folder, flags: str, size: int = 1, batch_of=experience, groups=LocalStepBatch.groups) -> list[Computed]:
    return run_world(computed, size, program("rl", rl_argv(folder, flags), size), groups, batch_of)


def by_sequence(results: list[Computed], name: str) -> dict[int, list]:
    rows = {}
    for batch, *_ in results:
        parts = getattr(batch, name).split(batch.lengths.tolist())
        rows |= dict(zip(batch.sequence_ids.tolist(), (part.tolist() for part in parts), strict=True))
    return rows
