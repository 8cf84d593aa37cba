"""The rollout engine: Megatron's dynamic inference on the actor's own model, with exact sampling and routes."""
