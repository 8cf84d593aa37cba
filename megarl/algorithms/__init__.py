"""Pure tensor functions of reinforcement learning: advantages, losses, KL, aggregation. Imports only torch."""
