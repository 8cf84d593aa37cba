"""No micro-batch makes the host wait for the device: here device tensors have no data that could be read."""

import dataclasses
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.rollout_correction import LEVELS
from tests.helpers.models.tiny_models import VOCAB, join_actor
from tests.helpers.programs import CRITIC, RL, SHAPE, program
from tests.helpers.worlds import run_world

LENGTHS = [7, 2, 11, 1, 4, 9]
FIELDS = ("logprobs", "rollout_logprobs", "reference_logprobs", "advantages", "values", "returns")
TP2, CP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2"
READS = (DataDependentOutputException, DynamicOutputShapeException)
FLAGS = f"{SHAPE}{RL}{CRITIC} --dual-clip 3 --kl-in loss --prompts none --tokenizer-model none --save none"
# Each policy loss and each level of correction with an aggregation.
CASES = [*itertools.product(POLICY_LOSSES, ["token"]), *itertools.product(["ppo-clip"], LEVELS)]


class Device(TorchDispatchMode):
    """Fake device tensors without data; tensors that the host computes from its own stay real.

    Also rejects assignment through a mask, whose shape depends on data and which torch's fake tensors allow.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if tensors and not any(isinstance(x, FakeTensor) for x in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.index_put_ and any(x.dtype is torch.bool for x in args[1]):
            if len(args[1]) > 1 or isinstance(args[2], FakeTensor) or args[2].numel() > 1:
                raise DynamicOutputShapeException(func)
            with unset_fake_temporarily():
                number = args[2].item()
            mask = args[1][0][(..., *[None] * (args[0].dim() - args[1][0].dim()))]
            return args[0].masked_fill_(mask, number)  # as torch does with one number of the host
        return func(*args, **kwargs)


def on_device(mode: FakeTensorMode):
    """Micro-batches on the device; later copies from the host arrive there. Batches were packed by the host."""
    from megarl.batch import Batch
    from megarl.comm import microbatches as mb
    from megarl.mcore import device

    total, mask = sum(LENGTHS), torch.rand(sum(LENGTHS)) > 0.4
    mask[25:28] = False
    batch = Batch(sequence_ids=torch.arange(len(LENGTHS)), lengths=torch.tensor(LENGTHS), response_mask=mask,
                  tokens=torch.randint(0, VOCAB, (total,)), **{n: torch.randn(total) for n in FIELDS})  # fmt: skip
    batch.tokens[25:27] = batch.tokens[21:23]
    prompts, found = mb.PromptPrefixes(torch.tensor([0, 1, 2, 3, 4, 4]), torch.full((6,), 2)), []  # two begin alike
    for part, places in mb.build_microbatches(batch, [torch.tensor([0, 2, 3]), torch.tensor([1, 4, 5])], prompts):
        there = Batch(**{name: mode.from_tensor(getattr(part, name)) for name in part.present()})
        there.host_metadata = part.host_metadata
        found.append((there, places))
    device.to_device = lambda arrays, send=device.to_device: [mode.from_tensor(tensor) for tensor in send(arrays)]
    return found


def model_on(mode: FakeTensorMode, flags: str, value_head: bool):
    """(stages, in gradient buffers, collection): a model of the device."""
    from megarl.mcore.kernels import native
    from megarl.mcore.model import gpt
    from megarl.mcore.training import optimizer

    native.enable(False)  # the device has no such kernels
    args, place = join_actor(flags)
    torch.nn.Module.to = lambda module, *_, **__: module  # torch cannot move such tensors, and they are there already
    with mode:
        stages = gpt.build_model(args, VOCAB, place.pg_collection, value_head)
        wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
    wrapped[0].config.finalize_model_grads_func = None  # once per update, after its micro-batches
    return stages, wrapped, place.pg_collection


def objectives() -> list:
    """An actor loss with all optional terms."""
    from megarl.roles.actor_loss import ActorLoss

    parsed = program("rl", FLAGS.split(), 1)
    found = []
    for (name, level), mode in zip(CASES, itertools.cycle(AGGREGATIONS)):
        changed = {"loss_aggregation": mode, "rollout_correction": "mis", "rollout_correction_level": level}
        found.append(ActorLoss(dataclasses.replace(parsed.settings, **changed), POLICY_LOSSES[name]))
    return found


def run(rank: int, flags: str, most: int, spoils: dict) -> tuple[int, list[str]]:
    """Passes of every role over micro-batches: (results, names of `spoils` that end one, as what its loss does).

    `most`: losses of the actor that are looked at.
    """
    from megarl.algorithms.advantages import clipped_value_loss
    from megarl.algorithms.aggregation import token_mean
    from megarl.mcore.model import forward_pass
    from megarl.mcore.parallel import pipeline
    from megarl.roles.passes import forward_only

    mode, losses = FakeTensorMode(), objectives()[:most]
    policy, critic = (model_on(mode, flags, value_head) for value_head in (False, True))
    parts = on_device(mode)
    counts = mode.from_tensor(torch.tensor([20.0, 6.0], dtype=torch.float64))

    def scores(chunk, part):
        known = part.host_metadata
        return forward_pass.token_scores(
            chunk, part.tokens, known.lengths, 0.9, VOCAB, None, known.response_mask, known.shared
        )

    def values(chunk, part):
        return forward_pass.token_values(
            chunk, part.tokens, part.host_metadata.lengths, shared=part.host_metadata.shared
        )

    def reward_scores(chunk, part):
        return forward_pass.sequence_scores(chunk, part.tokens, part.host_metadata.lengths)

    def surrogate(out, part):
        part.selected = part.response_mask  # what `PolicyLoss.select` would have chosen before the update
        return sum(loss(out, part, part.logprobs, counts, 0.1)[0] for loss in losses), out.logprobs.detach()

    def regression(out, part):
        losses, _ = clipped_value_loss(out, part.values, part.returns, 0.2)
        return token_mean(losses, part.response_mask, counts[0]), out.detach()

    def train(role, forward, loss):
        return pipeline.run_microbatches(
            role[1], parts, lambda chunk, part: forward(chunk, part[0]), lambda out, part: loss(out, part[0]),
            role[2], True,
        )  # fmt: skip

    caught = []
    with mode, Device():
        results = [train(policy, scores, surrogate), train(critic, values, regression)]
        results += [forward_only(role[0], parts, forward, role[2])
                    for role, forward in ((policy, scores), (critic, values), (critic, reward_scores))]  # fmt: skip
        for name, spoil in spoils.items():
            try:
                if caught:  # the first one in a pass, which takes longest
                    spoil(parts[0][0])
                else:
                    train(critic, values, lambda out, part, spoil=spoil: (spoil(part), out.sum(), out)[1:])
            except READS:
                caught.append(name)
    return sum(map(len, results)), caught


SPOILS = {
    "a number": lambda part: float(part.advantages.sum()),
    "a truth": lambda part: bool((part.advantages > 0).any()),
    "a list": lambda part: part.lengths.tolist(),
    "places": lambda part: part.response_mask.nonzero(),
    "a mask as an index": lambda part: part.advantages[part.response_mask],
    "a mask written through": lambda part: part.advantages.index_put_((part.response_mask,), part.values),
    "repeats": lambda part: torch.repeat_interleave(part.lengths, part.lengths),
    "equality": lambda part: torch.equal(part.tokens, part.tokens),
}


def test_no_pass_of_a_micro_batch_reads_the_device():
    ((results, caught),) = run_world(run, 1, "", len(CASES), SPOILS)
    assert results == 2 * 5
    assert caught == list(SPOILS)  # whatever waits for the device is seen


@pytest.mark.long
@pytest.mark.parametrize("flags", [f"{TP2} --sequence-parallel", CP2])
def test_no_pass_of_a_parallel_replica_reads_the_device(flags):
    assert run_world(run, 2, flags, 1, {}) == [(2 * 5, [])] * 2
