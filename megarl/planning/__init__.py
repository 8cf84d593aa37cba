"""Plans a role map without running it: parameters, memory and traffic.

Parameters, gradients and optimizer states are exact; activations and traffic are estimates, whose formulas are in the
docstrings and in docs/plan.md.
"""
