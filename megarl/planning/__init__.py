"""What a role map costs before anything runs: parameters, memory and traffic.

Counts of parameters, gradients and optimizer states are exact; activations and traffic are estimates whose formulas
stand in the docstrings and in docs/plan.md.
"""
