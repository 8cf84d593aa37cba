"""Generation: the batcher, the engine's requests, load sharing between replicas, and buffers of groups."""
