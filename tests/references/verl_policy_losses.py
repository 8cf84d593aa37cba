"""verl's policy losses, called on packed batches."""

from unittest import mock

from torch import Tensor

from megarl.algorithms.policy_loss import ClipOptions, PolicyTokens
from tests.references.ragged import RaggedBatch
from tests.references.verl_core_algos import load_verl


def policy_tokens(
    batch: RaggedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, rollout: Tensor | None = None
) -> PolicyTokens:
    """The batch as our losses take it."""
    return PolicyTokens(logprobs, old, advantages, batch.mask, batch.cu_seqlens, rollout)


def verl_loss(name: str, batch: RaggedBatch, tokens: PolicyTokens, clip: ClipOptions, mode: str | None = None, **more):
    """verl's loss and its metrics. `name` is the end of compute_policy_loss_…; `more` are further settings of it.

    Without `mode` the loss is that of each token, [T], before aggregation; with it, the aggregated scalar.
    """
    core = load_verl().core_algos
    fields = (tokens.old_logprobs, tokens.logprobs, tokens.advantages, tokens.response_mask.double())
    function, padded = getattr(core, f"compute_policy_loss_{name}"), [batch.padded(field) for field in fields]
    config = _config(core.ActorConfig, clip, more)
    if mode is not None:
        return function(*padded, loss_agg_mode=mode, config=config)
    with mock.patch.object(core, "agg_loss", lambda loss_mat, **_: loss_mat):
        matrix, metrics = function(*padded, config=config)
    return batch.packed(matrix), metrics


def _config(base: type, clip: ClipOptions, more: dict):
    """The settings that verl's losses read; an unreachable dual clip means none."""
    config = type("Config", (base,), {"get": lambda self, name, default: getattr(self, name, default)})()
    config.clip_ratio = config.clip_ratio_low = clip.low
    config.clip_ratio_high = clip.high
    config.clip_ratio_c = 1e300 if clip.dual is None else clip.dual
    config.global_batch_info = {}
    vars(config).update(more)
    return config
