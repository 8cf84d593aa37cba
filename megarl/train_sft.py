"""Supervised fine-tuning of a language model on prompts with responses, or on conversations.

Every rank runs this file from top to bottom; the loss counts response tokens alone, of a conversation all that the
assistant says. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.train_sft --config configs/quickstart_sft.yaml
"""

from megarl.trainers.sft import SFTTrainer
from megarl.trainers.trainer import launch


def train(program, timers):
    """One mini-batch a step: forward, loss over response tokens, update."""
    run = SFTTrainer(program, timers)
    for step in run.steps():
        run.learn(run.next_examples(), step)
        run.finish()
    run.close()


if __name__ == "__main__":
    launch(train, "sft")
