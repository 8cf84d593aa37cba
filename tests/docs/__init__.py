"""Tests of the documentation: links, commands, quoted messages, examples, generated pages, the site."""
