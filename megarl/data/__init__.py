"""Prompt files and their order, tokenizers, chat templates, supervised examples and preference pairs."""
