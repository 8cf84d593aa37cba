"""Parallelism: process groups, pipeline schedules, context parallelism and FSDP."""
