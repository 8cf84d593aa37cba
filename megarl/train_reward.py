"""Training of a reward model: a language model with a scalar head, on pairs of a chosen and a rejected response.

Every rank runs this file from top to bottom. A line of `--prompts` has `prompt`, `chosen`, `rejected` and
optionally the `margin` of the preference; `--global-batch-size` counts pairs. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.train_reward --config configs/rlhf_reward.yaml
"""

from megarl.trainers.launch import launch


def train(config, timers):
    """Each step: one mini-batch of pairs, their scores and loss, one update."""
    # After the flags: it imports torch and Megatron.
    from megarl.trainers.preference_trainer import RewardModelTrainer

    RewardModelTrainer(config, timers).train()


if __name__ == "__main__":
    launch(train, "reward")
