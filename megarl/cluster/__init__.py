"""Ranks on several nodes: what Slurm says about them, where they meet, and over which network interface."""
