"""Small models on one rank or several, their inputs, updates and kernels."""
