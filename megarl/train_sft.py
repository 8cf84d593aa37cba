"""Supervised fine-tuning of a language model on prompts with responses, or on conversations.

Every rank runs this file from top to bottom. The loss covers only response tokens; in a conversation, every assistant
turn. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.train_sft --config configs/quickstart_sft.yaml
"""

from megarl.trainers.launch import launch


def train(config, timers):
    """Each step: one mini-batch, loss over its response tokens, one update."""
    from megarl.trainers.sft_trainer import SFTTrainer  # after the flags: it imports torch and Megatron

    SFTTrainer(config, timers).train()


if __name__ == "__main__":
    launch(train, "sft")
