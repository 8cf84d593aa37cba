"""The generation server: HTTP endpoints in a process of their own, and the wire to the replicas that generate."""
