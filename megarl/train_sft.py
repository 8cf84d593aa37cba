"""Supervised fine-tuning of a language model on prompts with responses, or on conversations.

Every rank runs this file from top to bottom; the loss counts response tokens alone, of a conversation all that the
assistant says. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.train_sft --config configs/quickstart_sft.yaml
"""

from megarl.trainers.launch import launch
from megarl.trainers.sft_trainer import SFTTrainer


def train(config, timers):
    """One mini-batch a step: forward, loss over response tokens, update."""
    run = SFTTrainer(config, timers)
    for step in run.steps():
        batch = run.next_batch()
        run.update(batch)
        run.evaluate(step)
        run.log(step)
        run.save(step)
    run.close()


if __name__ == "__main__":
    launch(train, "sft")
