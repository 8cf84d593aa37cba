"""Environments of multi-turn rollouts: what a policy's turns act on and what answers them. Imports no torch.

A policy writes a turn, its environment answers with an observation, and so on until the episode ends. Environments run
in worker processes next to the leader of each replica of the rollout (`pool.py`).
"""
