"""megarl: reinforcement-learning post-training of language models in one SPMD program on Megatron."""

__version__ = "0.2.0.dev0"  # the only place; CONTRIBUTING.md says when it changes
