"""A role's GPT model: layers, heads, initialization, and the forward passes over packed micro-batches."""
