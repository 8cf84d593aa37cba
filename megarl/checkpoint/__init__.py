"""Folders of checkpoints above Megarl's use of Megatron's format: names, manifest, which one is latest, resume."""
