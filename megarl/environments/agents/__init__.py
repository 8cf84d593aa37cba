"""Agents that own the loop: programs and coroutines that ask the policy over HTTP, in a worker of the environments."""
