"""Who holds which sequences: role meshes, load balancing, micro-batches, and the exchange between roles."""
