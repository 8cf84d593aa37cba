"""Folders of checkpoints above megarl's use of Megatron's format: names, manifest, which one is latest, resume."""
