"""What pages, flags and sources say: commands, snippets, cases for flags."""
