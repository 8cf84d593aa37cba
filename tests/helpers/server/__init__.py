"""Servers, their clients and their links."""
