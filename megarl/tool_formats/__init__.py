"""How policies write tool calls and thoughts: a table of formats, for environments and the server. Imports no torch.

A format (`tool_format.py`) is a grammar over texts with the strings of its marks, special tokens or not, which
`TurnReader` (`reader.py`) runs. `calls.py` has the limits that hold for the calls of each.
"""

from megarl.tool_formats import json_formats, marked_formats
from megarl.tool_formats.tool_format import ToolFormat

# Name in --tool-call-parser -> the format.
FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(marked_formats.hermes, marked_formats.CALL_MARKS, has_apart=False),
    "qwen3-coder": ToolFormat(marked_formats.qwen_coder, marked_formats.CALL_MARKS),
    "deepseek": ToolFormat(marked_formats.deepseek, marked_formats.DEEPSEEK_MARKS),
    "glm": ToolFormat(marked_formats.glm, marked_formats.GLM_MARKS),
    "kimi": ToolFormat(marked_formats.kimi, marked_formats.KIMI_MARKS, writes_ids=True),
    "gpt-oss": ToolFormat(marked_formats.harmony, marked_formats.HARMONY_MARKS, thoughts=None),
    "mistral": ToolFormat(
        json_formats.mistral, json_formats.MISTRAL_MARKS, json_formats.MISTRAL_THOUGHTS, writes_ids=True, id_length=9
    ),
    "json": ToolFormat(json_formats.plain_json, has_apart=False),
    "llama": ToolFormat(json_formats.llama, (json_formats.LLAMA_TAG,)),
}
