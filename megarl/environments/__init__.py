"""Environments of multi-turn rollouts: what a policy's turns act on and what answers them. Imports no torch.

A policy writes a turn, its environment answers with an observation, and so on until the episode ends. Environments run
in worker processes next to the leader of each replica of the rollout (`pool.py`).
"""

# Name in --environment -> its factory, imported when it is asked for: some need packages that others do not.
ENVIRONMENTS = {
    "guess-number": "megarl.environments.built_in:GuessNumber",
    "guess-number-blind": "megarl.environments.built_in:guess_number_blind",
    "calculator": "megarl.environments.built_in:calculator",
    "calculator-agent": "megarl.environments.built_in:calculator_agent",
    "calculator-offset": "megarl.environments.built_in:calculator_offset",
    "python-tool": "megarl.environments.built_in:python_tool",
    "frozen-lake": "megarl.environments.adapters.gymnasium_env:FrozenLake",
    "reasoning-gym": "megarl.environments.adapters.reasoning_gym_env:ReasoningGymEnvironment",
}
