"""Tests of low-rank factors: products, merged weights, layers of experts under tensor parallelism."""
