"""What shuts text and programs of a policy in, so that they cannot harm the run or the machine.

Code runs in one of two regimes. What the user wrote is trusted: it runs in the run's processes, at most under a time
limit (`rewards.guard`, worker processes). What a policy wrote runs in an isolated process, which the kernel confines,
or not at all: each kind tries its limits at its start and refuses to work where they do not hold.

| what the policy wrote | is confined to | modules |
|---|---|---|
| text that a verifier parses or evaluates | computing, in a fork | `warm_process`, `compute_only` |
| a Python program, for its output | namespaces without files and network | `sandbox`, `jail` |
| what an agent's program does | a folder and the way to its endpoint | `agent_sandbox`, `agent_jail` |

`keeper` runs an agent's program that its user trusts: it only sees to it that nothing of it is left.
"""
