"""Two nodes on one machine."""
