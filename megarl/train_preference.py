"""Training of a policy on preferences between responses: DPO and its relatives.

Every rank runs this file from top to bottom. A line of `--prompts` has `prompt`, `chosen`, `rejected` and
optionally the `margin` of the preference; with `--preference-loss kto` it may have one `response` that is
`desirable` or not. `--global-batch-size` counts pairs, or such responses. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.train_preference --config my_run.yaml --preference-loss dpo
"""

from megarl.trainers.launch import launch


def train(config, timers):
    """Each step: one mini-batch of pairs, the log-probs of their responses, one update."""
    # After the flags: it imports torch and Megatron.
    from megarl.trainers.preference_trainer import KTOTrainer, PairTrainer

    trainer = KTOTrainer if config.settings.preference_loss == "kto" else PairTrainer
    trainer(config, timers).train()


if __name__ == "__main__":
    launch(train, "preference")
