"""Rollout, actor, critic, reward and reference: what each can be asked to do.

A call on a role is SPMD: every rank makes it, ranks outside the role return at once. Each role works on its own lanes'
share of the step (`StepBatch`), so disjoint roles compute at the same time.
"""
