"""Chat templates with the interface of those of gpt-oss and Gemma 4, made for these tests.

They take the same variables and fields, write the same forms and refuse the same messages. What
they tell the model about itself and about tools is shorter.
"""

GPT_OSS = """{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{{- '<|start|>system<|message|>' + (model_identity if model_identity is defined else 'A model.') }}
{{- '\\nDate: ' + strftime_now('%Y-%m-%d') + '\\nReasoning: ' + effort + '<|end|>' }}
{%- set rest, rules = messages, '' %}
{%- if messages[0].role in ['developer', 'system'] %}
{%- set rest, rules = messages[1:], messages[0].content %}{% endif %}
{%- if rules or tools %}{{- '<|start|>developer<|message|>' + rules }}
{%- for tool in tools or [] %}{{- '\\n// ' + tool.function.name }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
{%- if message.role == 'assistant' %}
{%- for text in [message.content, message.thinking] %}
{%- if '<|channel|>analysis<|message|>' in text or '<|channel|>final<|message|>' in text %}
{{- raise_exception('There is a channel in a text') }}{% endif %}{% endfor %}
{%- if 'tool_calls' in message %}
{%- set later = namespace(final=false) %}
{%- for other in rest[loop.index:] %}
{%- if other.role == 'assistant' and 'tool_calls' not in other %}
{%- set later.final = true %}{% endif %}{% endfor %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}
{{- raise_exception('Content and thinking beside a call') }}
{%- elif (message.content or message.thinking) and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' }}
{{- (message.content or message.thinking) + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '<|call|>' }}{% set last.name = call.name %}
{%- else %}
{{- '<|start|>assistant<|channel|>' + ('analysis' if 'thinking' in message else 'final') }}
{{- '<|message|>' + message.content + '<|end|>' }}{% set last.name = none %}{% endif %}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{- raise_exception('There is no call before this result') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- elif message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
"""Writes a message with one call, thoughts only until the model has answered, and results by the
name of the last call. It leaves out later system messages and the thoughts of answers."""

GEMMA_4 = """{%- macro value(it) %}
{%- if it is string %}{{- '<|"|>' + it + '<|"|>' }}
{%- elif it is boolean %}{{- 'true' if it else 'false' }}
{%- elif it is mapping %}{{- '{' }}
{%- for key, each in it | dictsort %}{{- key + ':' + value(each) }}
{{- ',' if not loop.last }}{% endfor %}{{- '}' }}
{%- elif it is sequence %}{{- '[' }}
{%- for each in it %}{{- value(each) }}{{- ',' if not loop.last }}{% endfor %}{{- ']' }}
{%- else %}{{- it }}{% endif %}{% endmacro %}
{{- bos_token }}{% set ns = namespace(last='', asked=-1, role='') %}
{%- set rest, rules = messages, '' %}
{%- if messages[0]['role'] in ['developer', 'system'] %}
{%- set rest, rules = messages[1:], messages[0]['content'] | trim %}{% endif %}
{%- if enable_thinking or tools or rules %}
{{- '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') + rules }}
{%- for tool in tools or [] %}{{- '<|tool>declaration:' + tool['function']['name'] }}
{{- value(tool['function']['parameters'] or {}) + '<tool|>' }}{% endfor %}
{{- '<turn|>\\n' }}{% endif %}
{%- for message in rest %}{% if message['role'] == 'user' %}
{%- set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for message in rest %}{% if message['role'] != 'tool' %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{%- if not (role == 'model' and ns.role == 'model') %}{{- '<|turn>' + role + '\\n' }}{% endif %}
{%- set ns.role, ns.last, at = role, '', loop.index0 %}
{%- set thoughts = message.get('reasoning') or message.get('reasoning_content') %}
{%- if thoughts and at > ns.asked and message.get('tool_calls') %}
{{- '<|channel>thought\\n' + thoughts + '\\n<channel|>' }}{% endif %}
{%- for call in message.get('tool_calls') or [] %}{% set ns.last = 'call' %}
{{- '<|tool_call>call:' + call['function']['name'] + value(call['function']['arguments']) }}
{{- '<tool_call|>' }}{% endfor %}
{%- if message.get('tool_calls') %}{% set scan = namespace(on=true) %}
{%- for result in rest[at + 1:] %}
{%- if result['role'] != 'tool' %}{% set scan.on = false %}
{%- elif scan.on %}{% set ns.last = 'result' %}
{%- for call in message['tool_calls'] if call.get('id') == result.get('tool_call_id') %}
{{- '<|tool_response>response:' + call['function']['name'] }}{% endfor %}
{{- '{value:' + value(result['content']) + '}<tool_response|>' }}{% endif %}{% endfor %}{% endif %}
{%- set text = message['content'] | trim %}{{- text }}
{%- if ns.last == 'call' %}{{- '<|tool_response>' }}
{%- elif text or ns.last != 'result' %}{{- '<turn|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt and not ns.last %}{{- '<|turn>model\\n' }}
{%- if not enable_thinking %}{{- '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}"""
"""Writes the results of calls behind these, where the model goes on; a text comes last. Thoughts
stand before the calls since the last question, and an answer without thoughts begins with none."""

SPECIAL = {
    "gpt-oss": [
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"),
        "<|call|>",
    ],
    "gemma-4": [
        *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
        *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|think|>"),
        '<|"|>',
    ],
}
"""The special tokens that their templates and models write."""
