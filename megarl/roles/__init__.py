"""The roles actor, critic, reference and reward, and the models that they train or run.

A call on a role is SPMD: every rank makes it, and ranks outside the role return at once. Each replica works on its own
sequences of the step (`StepBatch`), so disjoint roles compute at the same time.
"""
