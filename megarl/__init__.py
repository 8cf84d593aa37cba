"""megarl: reinforcement-learning post-training of language models in one SPMD program on Megatron."""

__version__ = "0.1.0"  # the only place; CONTRIBUTING.md says when it changes
