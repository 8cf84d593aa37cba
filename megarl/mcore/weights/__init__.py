"""Weights outside one layout: distributed checkpoints, and resharding between models of different layouts."""
