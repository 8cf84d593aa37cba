"""Megatron's flags for a role: which are supported, how they are parsed, and rules on their values."""
