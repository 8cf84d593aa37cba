"""Training of a policy on pairs of a chosen and a rejected response: DPO and its relatives.

Every rank runs this file from top to bottom. A line of `--prompts` has `prompt`, `chosen`, `rejected` and
optionally the `margin` of the preference; `--global-batch-size` counts pairs. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.train_preference --config my_run.yaml --preference-loss dpo
"""

from megarl.trainers.launch import launch
from megarl.trainers.preference_trainer import PreferenceTrainer


def train(config, timers):
    """Each step: one mini-batch of pairs, the log-probs of their responses, one update."""
    run = PreferenceTrainer(config, timers)
    for step in run.steps():
        batch = run.next_batch()
        run.update(batch)
        run.evaluate(step)
        run.log(step)
        run.save(step)
    run.close()


if __name__ == "__main__":
    launch(train, "preference")
