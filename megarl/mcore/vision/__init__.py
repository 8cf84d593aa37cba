"""Images for language models: what a frozen vision tower computes, and how a model's layers read it."""
