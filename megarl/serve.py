"""The generation server: a policy answers requests from anywhere, in OpenAI's API and in one for RL (`/generate`).

Loads any policy of train_rl or train_sft, from a checkpoint of any layout, or a Hugging Face folder. The ranks
generate; one process next to rank 0 speaks HTTP. Launch it with torchrun or srun:

    torchrun --nproc-per-node 2 -m megarl.serve --config model.yaml --load runs/quickstart/ppo/checkpoints/best
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "71 + 44 =", "max_tokens": 4}'
"""

from megarl.trainers.launch import launch


def serve(config, timers):
    """Loads the policy and answers requests until a signal."""
    from megarl.trainers.policy import serve  # after the flags: it imports torch and Megatron

    serve(config, timers)


if __name__ == "__main__":
    launch(serve, "serve")
