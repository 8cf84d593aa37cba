"""Evaluation of a checkpoint on held-out prompts: accuracy, pass@k, mean@k and maj@k, by task, greedy or sampled.

Loads any policy of train_rl or train_sft, whatever layout wrote it: `--load RUN` (its latest checkpoint),
`RUN/checkpoints/best`, or the folder of a step. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.evaluate --config model.yaml --load runs/quickstart/ppo/checkpoints/best \
        --eval-prompts heldout.jsonl --eval-responses 8 --eval-temperature 1 --eval-k 1,4,8 --save runs/evaluation
"""

from megarl.trainers.launch import launch


def evaluate(config, timers):
    """Generates and scores responses with the policy, prints a table and writes the results to `--save`."""
    from megarl.trainers.evaluation_program import evaluate  # after the flags: it imports torch and Megatron

    evaluate(config, timers)


if __name__ == "__main__":
    launch(evaluate, "evaluate")
