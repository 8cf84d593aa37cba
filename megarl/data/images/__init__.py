"""Images of prompts and messages: their forms in data, headers, pixels, and the ids that name them among tokens."""
