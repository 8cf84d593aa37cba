"""Programs of others that ask a model, unchanged; each runs with an interpreter that has its package."""
