"""What a role map costs before anything runs: parameters, memory, traffic, and which map to choose.

Counts of parameters, gradients and optimizer states are exact; activations, traffic and costs are estimates whose
formulas stand in the docstrings and in docs/plan.md.
"""
