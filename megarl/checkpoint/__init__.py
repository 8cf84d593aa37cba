"""Checkpoint folders in Megatron's distributed format: names, manifest, `latest` and `best`, save and resume."""
