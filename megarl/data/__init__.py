"""Tokenizers, prompt files, prompt order and supervised examples."""
