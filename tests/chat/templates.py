"""Chat templates in the families' form, our own wording: what the tests render."""

from __future__ import annotations

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant, message ' ~ loop.index0) }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {{- first_prefix if loop.first else '' -}}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

_GEMMA4 = """{%- macro words(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- else -%}
        {%- for part in content if part.type == 'text' -%}{{ part.text | trim }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- set ns = namespace(opened=false) -%}
{%- if enable_thinking or tools or messages[0].role in ['system', 'developer'] -%}
    {{ '<|turn>system\\n' }}
    {%- if enable_thinking -%}{{ '<|think|>\\n' }}{%- endif -%}
    {%- if messages[0].role in ['system', 'developer'] -%}{{ words(messages[0].content) }}{%- endif -%}
    {%- for tool in tools or [] -%}{{ '<|tool>' + tool | tojson + '<tool|>' }}{%- endfor -%}
    {{ '<turn|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and message.role in ['system', 'developer'] -%}{%- continue -%}{%- endif -%}
    {{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- words(message.content) -}}
    {{ '<turn|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}TAIL{%- endif -%}
"""
GEMMA4 = _GEMMA4.replace("TAIL", "")
"""As in E2B and E4B: nothing after the model's turn opens."""
GEMMA4_LARGE = _GEMMA4.replace(
    "TAIL", "{%- if not enable_thinking -%}{{ '<|channel>thought\\n<channel|>' }}{%- endif -%}"
)
"""As in 12B to 31B: a closed, empty thought when thinking is off."""
