"""Device memory of a role: offload to the host, and the KV cache in the gradient buffer."""
