"""Chat templates in the shapes of well-known models: with tools, thoughts, and ways to treat earlier turns.

Each belongs to a tokenizer of `small_tokenizers`.
"""

from tests.helpers.texts import small_tokenizers

_SYSTEM_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_CALLS = """\
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if content or not loop.first else '' }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
"""
_TOOL_RESULTS = """\
    {{- '<|im_start|>user' if loop.previtem.role != 'tool' else '' }}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
"""
_OPENING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"

# Qwen 2.5: results of tools in one message of the user; nothing is ever rewritten.
QWEN25 = f"""\
{_SYSTEM_WITH_TOOLS}
{{%- for message in messages %}}
{{%- set content = message.content %}}
{{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}}
    {{{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}}}
{{%- elif message.role == 'assistant' %}}
    {{{{- '<|im_start|>assistant\\n' + content }}}}
{_CALLS}
{{%- elif message.role == 'tool' %}}
{_TOOL_RESULTS}
{{%- endif %}}
{{%- endfor %}}
{_OPENING}"""

# Qwen 3: thoughts stay in the turns after the last question of the user alone.
QWEN3 = f"""\
{_SYSTEM_WITH_TOOLS}
{{%- set last = namespace(question=-1) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{%- set last.question = loop.index0 %}}{{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
{{%- set content = message.content %}}
{{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}}
    {{{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}}}
{{%- elif message.role == 'assistant' %}}
    {{%- set thoughts = message.reasoning_content or '' %}}
    {{%- if not thoughts and '</think>' in content %}}
        {{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}}
        {{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}
    {{%- endif %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{%- if loop.index0 > last.question and (thoughts or loop.last) %}}
        {{{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}}}
    {{%- endif %}}
    {{{{- content }}}}
{_CALLS}
{{%- elif message.role == 'tool' %}}
{_TOOL_RESULTS}
{{%- endif %}}
{{%- endfor %}}
{_OPENING}"""

# The same with an opening that begins the thoughts, as the models that always think have it.
QWEN3_THINKING = QWEN3.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

# Hermes: a message for each result, which needs the tool's name; a turn with calls loses its content.
HERMES = f"""\
{_SYSTEM_WITH_TOOLS}
{{%- for message in messages %}}
{{%- set content = '' %}}
{{%- if message.role == 'tool' %}}
    {{%- if message.name is not defined %}}{{{{- raise_exception("a tool's message needs its name") }}}}{{%- endif %}}
    {{{{- '<|im_start|>tool\\n<tool_response>\\n{{"name": "' + message.name + '", "content": ' }}}}
    {{{{- message.content | tojson + '}}\\n</tool_response><|im_end|>\\n' }}}}
{{%- elif message.tool_calls is defined %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
{_CALLS}
{{%- elif not (loop.first and message.role == 'system') %}}
    {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- endfor %}}
{_OPENING}"""

# DeepSeek R1: thoughts are dropped even from the last turn.
FORGETS = small_tokenizers.CHATML.replace(
    "{{- message.content + '<|im_end|>' }}{%- endgeneration %}",
    "{{- message.content.split('</think>')[-1] + '<|im_end|>' }}{%- endgeneration %}",
)

# Llama 3: one call at a time; the words around it are trimmed.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Mistral: the system's message and the tools stand before the last message of the user.
MISTRAL_LAST = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set last = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[TOOLS] ' + tools | tojson if tools and loop.index0 == last.user else '' }}
        {{- '[INST] ' + (system + '\\n\\n' if system and loop.index0 == last.user else '') }}
        {{- message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content }}
        {%- for call in message.tool_calls or [] %}{{- '[CALL] ' + call.function | tojson }}{%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT] ' + message.content + ' [/RESULT]' }}
    {%- endif %}
{%- endfor %}
"""

# Gemma: the answer of a tool is part of the assistant's turn.
GEMMA_TOOLS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- 'result: ' + message.content + '\\n' }}
    {%- else %}
        {{- '<start_of_turn>' + message.role + '\\n' + message.content }}
        {{- 'call' if message.tool_calls else '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<start_of_turn>assistant\\n' }}{%- endif %}
"""

# Name -> (tokenizer, template, roles after whose messages a conversation may continue, every turn as it was).
TEMPLATES = {
    "qwen2.5": (small_tokenizers.chatml, QWEN25, ("user", "tool")),
    "hermes": (small_tokenizers.chatml, HERMES, ("user", "tool")),
    "llama": (small_tokenizers.llama, small_tokenizers.LLAMA, ("user", "tool")),
    "plain": (small_tokenizers.gemma, small_tokenizers.PLAIN, ("user", "tool")),
    "plain unigram": (small_tokenizers.unigram, small_tokenizers.PLAIN, ("user", "tool")),
    "qwen3": (small_tokenizers.chatml, QWEN3, ("tool",)),
    "qwen3 thinking": (small_tokenizers.chatml, QWEN3_THINKING, ("tool",)),
    "mistral": (small_tokenizers.mistral, MISTRAL_LAST, ("tool",)),
    "llama3": (small_tokenizers.llama, LLAMA3, ("user",)),
    "gemma": (small_tokenizers.gemma, GEMMA_TOOLS, ("user",)),
}
# Recorded with transformers; "qwen3 thinking" opens thoughts that the turns of these conversations do not have.
RECORDED = {name: TEMPLATES[name] for name in TEMPLATES if name != "qwen3 thinking"}
