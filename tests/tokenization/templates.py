"""Chat templates as test data: shapes that real models' templates take, written for these tests."""

from __future__ import annotations

CHATML = (
    "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0]['content'] + "
    "'<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role != 'system' %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- endif "
    "%}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined and "
    "enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}\n"
)

HEADERS = (
    "{{ bos_token }}\n{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}\n"
    "{%- macro header(role) %}{{- '<|h|>' + role + '<|/h|>\\n\\n' }}{%- endmacro %}\n"
    "{%- set ns = namespace(system='') %}\n"
    "{%- if messages[0].role == 'system' %}{%- set ns.system = messages[0].content | trim %}{%- set messages = "
    "messages[1:] %}{%- endif %}\n"
    "{{- header('system') }}{{- 'Today is ' + date_string + '\\n' }}{{- ns.system + '<|eot|>' }}\n"
    "{%- if tools is not none %}{{- 'Tools:' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif "
    "%}\n"
    "{%- for message in messages %}{{- header(message.role) + message.content | trim + '<|eot|>' }}{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- header('assistant') }}{%- endif %}\n"
)

TURNS = (
    "{{ bos_token }}\n"
    "{%- if messages[0]['role'] == 'system' -%}\n"
    "    {%- set first = (messages[0]['content'] if messages[0]['content'] is string else "
    "messages[0]['content'][0]['text']) + '\\n\\n' -%}\n"
    "    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n    {%- set first = '' -%}\n    {%- set loop_messages "
    "= messages -%}\n{%- endif -%}\n"
    "{%- for message in loop_messages -%}\n"
    "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
    "        {{ raise_exception('roles must alternate user/assistant/user/...') }}\n    {%- endif -%}\n"
    "    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\n"
    "    {{ '<turn>' + role + '\\n' + (first if loop.first else '') }}\n"
    "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n    {%- else -%}\n"
    "        {%- for item in message['content'] -%}{{ item['text'] | trim if item['type'] == 'text' else '<image>' "
    "}}{%- endfor -%}\n    {%- endif -%}\n"
    "    {{ '<end>\\n' }}\n{%- endfor -%}\n{%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}\n"
)

PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% "
    "endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

LOOPS = (
    "{% for m in messages %}{% if m.role == 'hidden' %}{% continue %}{% endif %}{% if m.role == 'stop' %}{% break %}{% "
    "endif %}"
    "{{ m.role }}: {% generation %}{{ m.content | tojson }}{% endgeneration %}\n"
    "{% endfor %}{{ strftime_now('%Y') | length }}"
)

WHITESPACE = "  {% if true %}  \n   {{ messages[0].content }}  \n  {% endif %}\n\n{# note #}\n end {{ eos_token }}"

ALL = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS, "loops": LOOPS, "whitespace": WHITESPACE}
