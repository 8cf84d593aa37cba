"""The samples of a step or an evaluation that the user's code ends: what a rank holds of them by then."""

from megarl.comm.step_batch import ACTOR, StepBatch
from megarl.roles.reward import Reward
from megarl.rollout.episodes.results import episodes_to_batch
from megarl.rollout.episodes.runner import EpisodeRunner


def rows_so_far(reward: Reward, step_batch: StepBatch | None, episodes: EpisodeRunner | None) -> list[dict]:
    """Rows of the responses that this rank holds, with what is known of them; for `samples.keep_for_failure`.

    `step_batch`: None until all are generated; then the `episodes` that have ended are what there is.
    """
    if reward.rows:
        return reward.rows
    if step_batch is not None and (batch := step_batch[ACTOR] or step_batch[reward.name]):
        rows = reward.unscored_rows(batch, step_batch.prompts)
        if batch.scores is None:
            return rows
        scores = dict(zip(batch.sequence_ids.tolist(), batch.scores.tolist(), strict=True))
        return [row | {"reward": scores[row["sequence"]]} for row in rows]
    if episodes is not None and episodes.ended is not None:
        ended, prompts = episodes.ended
        return reward.unscored_rows(episodes_to_batch(ended), prompts)
    return []
