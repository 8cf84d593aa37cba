"""Adapters to environments of other packages, each imported only where its environment is used."""
