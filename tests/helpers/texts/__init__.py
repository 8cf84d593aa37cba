"""Small tokenizers, templates and conversations."""
