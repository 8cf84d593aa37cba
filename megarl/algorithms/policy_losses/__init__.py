"""The policy losses by name: a row for each, its function in the file of its kind. Their options become flags."""

from megarl.algorithms.policy_loss import ClipOptions, ClipRange, PolicyLoss
from megarl.algorithms.policy_losses import selected_tokens as selected
from megarl.algorithms.policy_losses import single_tokens as single
from megarl.algorithms.policy_losses import whole_responses as whole

_PPO = selected.masked_ppo_clip
POLICY_LOSSES: dict[str, PolicyLoss] = {
    loss.name: loss
    for loss in (
        PolicyLoss("cispo", single.cispo, ClipRange()),
        PolicyLoss("clip-cov", _PPO, selected.ClipCovOptions(), select=selected.random_by_covariance),
        PolicyLoss("dppo-kl", single.dppo_kl, single.DppoKlOptions(), reads_rollout=True),
        PolicyLoss("dppo-tv", single.dppo_tv, single.DppoTvOptions(), reads_rollout=True),
        PolicyLoss("fipo", single.fipo, single.FipoOptions()),
        PolicyLoss("gmpo", whole.gmpo, ClipRange()),
        PolicyLoss("gspo", whole.gspo, ClipRange()),
        PolicyLoss("gspo-token", whole.gspo_token, ClipRange()),
        PolicyLoss("kl-cov", selected.kl_cov, selected.KlCovOptions(), select=selected.largest_covariance),
        PolicyLoss("luspo", whole.luspo, ClipRange()),
        PolicyLoss("m2po", _PPO, selected.M2poOptions(), select=selected.farthest_from_rollout),
        PolicyLoss("ppo-clip", single.ppo_clip, ClipOptions()),
        PolicyLoss("real", whole.real, whole.RealOptions(), compare=whole.real_advantages),
        PolicyLoss("reinforce", single.reinforce, None),
        PolicyLoss("rollout-is", single.rollout_is, ClipRange(), reads_rollout=True),
        PolicyLoss("sapo", single.sapo, single.SapoOptions()),
        PolicyLoss("topr", whole.topr, whole.ToprOptions(), reads_rollout=True),
        PolicyLoss("vespo", whole.vespo, whole.VespoOptions(), reads_rollout=True),
    )
}
