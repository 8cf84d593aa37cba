"""Router replay for MoE models: records the routes of rollout or training, sends them, and replays them (R2, R3)."""
