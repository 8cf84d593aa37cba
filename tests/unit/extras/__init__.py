"""The rooms that a reader may skip."""
