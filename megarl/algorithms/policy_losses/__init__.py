"""The policy losses by name: a row for each, its function in the file of its kind. Their options become flags."""

from megarl.algorithms.policy_loss import ClipOptions, ClipRange, PolicyLoss
from megarl.algorithms.policy_losses import selected_tokens, single_tokens, whole_responses

POLICY_LOSSES: dict[str, PolicyLoss] = {
    loss.name: loss
    for loss in (
        PolicyLoss("cispo", single_tokens.cispo, ClipRange()),
        PolicyLoss(
            "clip-cov",
            selected_tokens.masked_ppo_clip,
            selected_tokens.ClipCovOptions(),
            select=selected_tokens.random_by_covariance,
        ),
        PolicyLoss("dppo-kl", single_tokens.dppo_kl, single_tokens.DppoKlOptions(), reads_rollout=True),
        PolicyLoss("dppo-tv", single_tokens.dppo_tv, single_tokens.DppoTvOptions(), reads_rollout=True),
        PolicyLoss("fipo", single_tokens.fipo, single_tokens.FipoOptions()),
        PolicyLoss("gmpo", whole_responses.gmpo, ClipRange()),
        PolicyLoss("gspo", whole_responses.gspo, ClipRange()),
        PolicyLoss("gspo-token", whole_responses.gspo_token, ClipRange()),
        PolicyLoss(
            "kl-cov", selected_tokens.kl_cov, selected_tokens.KlCovOptions(), select=selected_tokens.largest_covariance
        ),
        PolicyLoss("luspo", whole_responses.luspo, ClipRange()),
        PolicyLoss(
            "m2po",
            selected_tokens.masked_ppo_clip,
            selected_tokens.M2poOptions(),
            select=selected_tokens.farthest_from_rollout,
        ),
        PolicyLoss("ppo-clip", single_tokens.ppo_clip, ClipOptions()),
        PolicyLoss(
            "real", whole_responses.real, whole_responses.RealOptions(), compare=whole_responses.real_advantages
        ),
        PolicyLoss("reinforce", single_tokens.reinforce, None),
        PolicyLoss("rollout-is", single_tokens.rollout_is, ClipRange(), reads_rollout=True),
        PolicyLoss("sapo", single_tokens.sapo, single_tokens.SapoOptions()),
        PolicyLoss("topr", whole_responses.topr, whole_responses.ToprOptions(), reads_rollout=True),
        PolicyLoss("vespo", whole_responses.vespo, whole_responses.VespoOptions(), reads_rollout=True),
    )
}
