"""megarl: reinforcement-learning post-training of language models in one SPMD program on Megatron."""
