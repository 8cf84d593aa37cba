"""The rollout's engine: small ones, what they were asked, recorded and replayed runs."""
