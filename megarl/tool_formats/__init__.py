"""How policies write tool calls and thoughts: a table of formats, for environments and the server. Imports no torch.

A format (`tool_format.py`) is a grammar over texts with the strings of its marks, special tokens or not, which
`TurnReader` (`reader.py`) runs. `calls.py` has the limits that hold for the calls of each.
"""

from megarl.tool_formats import formats
from megarl.tool_formats.tool_format import ToolFormat

# Name in --tool-call-parser -> the format.
FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(formats.hermes, formats.CALL_MARKS, has_apart=False),
    "qwen3-coder": ToolFormat(formats.qwen_coder, formats.CALL_MARKS),
    "deepseek": ToolFormat(formats.deepseek, formats.DEEPSEEK_MARKS),
    "glm": ToolFormat(formats.glm, formats.GLM_MARKS),
    "kimi": ToolFormat(formats.kimi, formats.KIMI_MARKS, writes_ids=True),
    "gpt-oss": ToolFormat(formats.harmony, formats.HARMONY_MARKS, thoughts=None),
    "mistral": ToolFormat(
        formats.mistral, formats.MISTRAL_MARKS, formats.MISTRAL_THOUGHTS, writes_ids=True, id_length=9
    ),
    "json": ToolFormat(formats.plain_json, has_apart=False),
    "llama": ToolFormat(formats.llama, (formats.LLAMA_TAG,)),
}
