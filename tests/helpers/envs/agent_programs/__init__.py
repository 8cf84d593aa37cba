"""Programs of others that ask a model, unchanged; each runs with an interpreter that has its package."""

# A chat template that shows tools and calls.
TEMPLATE = """\
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
    {{- eos_token }}
{%- endfor %}
"""
