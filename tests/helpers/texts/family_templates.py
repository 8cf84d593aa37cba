"""Chat templates that treat turns as the published ones of their families do, with tokenizers that have their marks."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.helpers.texts.chat_templates import QWEN3
from tests.helpers.texts.small_tokenizers import save

# DeepSeek V3.1: arguments are texts; results of tools follow the turn, and the next turn has no opening.
DEEPSEEK = """\
{{- bos_token }}
{%- set state = namespace(after_user=false, after_tool=false) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}
        {%- set state.after_user, state.after_tool = true, false %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {%- set state.after_user, state.after_tool = false, true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- else %}
        {{- '<｜Assistant｜></think>' if state.after_user else '' }}
        {{- message.content if message.tool_calls or state.after_tool else message.content.split('</think>')[-1] }}
        {%- set state.after_user, state.after_tool = false, false %}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜Assistant｜></think>' if add_generation_prompt and state.after_user else '' }}
"""

# GLM 4.5: a turn ends with the token with which the next message begins; earlier thoughts are dropped after a question.
GLM = """\
{{- '[gMASK]<sop>' }}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts, said = message.reasoning_content or '', message.content %}
        {%- if not thoughts and '</think>' in said %}
            {%- set thoughts = said.split('</think>')[0].split('<think>')[-1] %}
            {%- set said = said.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>\\n<think>' + (thoughts.strip() if loop.index0 > last.question else '') + '</think>' }}
        {{- '\\n' + said.strip() if said.strip() else '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' else '' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt else '' }}
"""

# Kimi K2 Thinking: calls are named by their ids; thoughts are dropped once a turn without calls follows.
KIMI = """\
{%- set last = namespace(answer=-1) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and not message.tool_calls %}{%- set last.answer = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set group = message.role if message.role in ('user', 'assistant') else 'system' %}
    {{- '<|im_' + group + '|>' + (message.name or message.role) + '<|im_middle|>' }}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = message.reasoning_content or '' if loop.index0 > last.answer else '' %}
        {{- '<think>' + thoughts + '</think>' }}
    {%- elif message.role == 'tool' %}
        {{- '## Return of ' + message.tool_call_id + '\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_calls_section_begin|>' if loop.first else '' }}
        {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
        {{- call.function.arguments | tojson + '<|tool_call_end|>' }}
        {{- '<|tool_calls_section_end|>' if loop.last else '' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' }}
"""

# gpt-oss: one call in a turn; thoughts are dropped once a final answer follows, which ends otherwise within a
# conversation than at its end.
HARMONY = """\
{%- set last = namespace(answer=-1, call='') %}
{%- for message in messages if message.role == 'assistant' %}
    {%- if not message.tool_calls %}{%- set last.answer = messages.index(message) %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.call = call.name %}
        {%- if message.content and loop.index0 > last.answer %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if not last.call %}{{- raise_exception('no call before the result of a tool') }}{%- endif %}
        {{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt else '' }}
"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- for id in (message.tool_calls or []) | map(attribute='id') | list + [message.tool_call_id or '123456789'] %}
        {%- if id | length != 9 %}{{- raise_exception('ids of calls have 9 characters') }}{%- endif %}
    {%- endfor %}
    {%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        CALLS
        {{- eos_token }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# Mistral Small 3.2, and Nemo: ids of nine characters; a turn with calls loses its content.
MISTRAL = _MISTRAL.replace("CALLS", """\
{%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}""")  # fmt: skip
NEMO = _MISTRAL.replace("CALLS", """\
{{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}""")  # fmt: skip

# Qwen3-Coder: an argument is a tag.
QWEN_CODER = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n' if loop.previtem.role != 'tool' else '' }}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}
            {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}
"""

# Llama 3: one call in a turn, alone.
LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- message.content | tojson if role == 'ipython' else message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' }}
"""


def tokenizer(special: tuple[str, ...], ordinary: tuple[str, ...], ends: tuple[str, ...], folder: Path) -> str:
    """Writes a tokenizer of bytes with these tokens; `ends`: those that end a response, EOS first."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*special, *ends])
    made.add_tokens(list(ordinary))
    path = save(folder, made, [], bos_token=special[0], eos_token=ends[0], pad_token=ends[0])
    ids = [made.token_to_id(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


class FamilyTemplate(NamedTuple):
    """A template with its tokenizer, the format of its calls, and after whose messages its conversations continue."""

    template: str
    tokenizer: Callable[[Path], str]
    form: str
    roles: tuple[str, ...]
    calls: int = 2  # that a turn may have


def _tokens(special: str, ends: str, ordinary: str = "<think> </think>") -> Callable[[Path], str]:
    return functools.partial(tokenizer, tuple(special.split()), tuple(ordinary.split()), tuple(ends.split()))


_DEEPSEEK = _tokens("<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>", "<｜end▁of▁sentence｜>",
                    "<think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>"
                    " <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>")  # fmt: skip
_KIMI = _tokens("[BOS] <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>"
                " <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
                "<|im_end|> [EOS]")  # fmt: skip
_HARMONY = _tokens("<|startoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|>",
                   "<|return|> <|endoftext|> <|call|>", "")  # fmt: skip
_MISTRAL_TOKENS = _tokens("<s> [INST] [/INST] [TOOL_CALLS] [CALL_ID] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS]"
                          " [TOOL_CONTENT] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [THINK] [/THINK]", "</s>", "")  # fmt: skip
_GLM = _tokens("[gMASK] <sop> <|system|> <|assistant|>", "<|endoftext|> <|user|> <|observation|>",
               "<think> </think> <tool_call> </tool_call>")  # fmt: skip
_QWEN = _tokens("<|endoftext|> <|im_start|>", "<|im_end|>", "<think> </think> <tool_call> </tool_call>")

FAMILY_TEMPLATES = {
    "qwen3": FamilyTemplate(QWEN3, _QWEN, "hermes", ("tool",)),
    "qwen3-coder": FamilyTemplate(QWEN_CODER, _QWEN, "qwen3-coder", ("tool", "user")),
    "deepseek": FamilyTemplate(DEEPSEEK, _DEEPSEEK, "deepseek", ("tool", "user")),
    "glm": FamilyTemplate(GLM, _GLM, "glm", ("tool",)),
    "kimi": FamilyTemplate(KIMI, _KIMI, "kimi", ("tool",)),
    "gpt-oss": FamilyTemplate(HARMONY, _HARMONY, "gpt-oss", ("tool",), calls=1),
    "mistral": FamilyTemplate(MISTRAL, _MISTRAL_TOKENS, "mistral", ("tool", "user")),
    "mistral nemo": FamilyTemplate(NEMO, _MISTRAL_TOKENS, "mistral", ("tool", "user")),
    "llama": FamilyTemplate(LLAMA, _tokens("<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|python_tag|>",
                                           "<|eot_id|> <|eom_id|>", ""), "llama", ("tool", "user"), calls=1),
}  # fmt: skip
