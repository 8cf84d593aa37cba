"""Mixture of experts: routers with replay and load balancing, and batch-invariant experts."""
