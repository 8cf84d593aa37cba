"""Folders and files of other projects: Hugging Face models, damaged and hostile ones."""
