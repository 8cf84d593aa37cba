"""Recurrent states instead of attention over keys: runs of rows that continue states, and the gated delta rule."""
