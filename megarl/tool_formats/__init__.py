"""How policies write tool calls and thoughts: a table of formats, for environments and the server. Imports no torch.

A format is a grammar (`marked_formats.py`, `json_formats.py`, `harmony.py`) over texts with the strings of its marks,
special tokens or not. `TurnReader` (`reader.py`) runs it over a text that comes at once or in pieces; the parts that it
finds are the same. `table.py` has all formats, `calls.py` the limits that hold for the calls of each.
"""
