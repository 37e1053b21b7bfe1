"""The chat template as Jinja text, for tools that render conversations themselves: it gives what `prompts.conversation` does.

No filter, extension or undefined variable is needed, so any environment renders it alike: transformers', lm-evaluation-harness'
strict one, a plain one. JSON is written by a macro, for `tojson` is not the same everywhere. Of `tools` functions are rendered,
and `tool_choice` may be "required".
"""

CHAT_TEMPLATE = r"""
{%- macro joined(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part is string -%}
        {{- part -}}
      {%- elif part['type'] == 'refusal' -%}
        {{- part['refusal'] -}}
      {%- elif part['type'] in ['text', 'input_text', 'output_text'] -%}
        {{- part['text'] -}}
      {%- else -%}
        {{- raise_exception('only text parts can be read') -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}

{%- macro lines(text) -%}
  {%- for line in text.replace('\r\n', '\n').replace('\r', '\n').split('\n') -%}
    {%- if line.strip('\t ') -%}
      {{- line + '\n' -}}
    {%- endif -%}
  {%- endfor -%}
{%- endmacro -%}

{%- macro quoted(text) -%}
  {%- set ns = namespace(text=text.replace('\\', '\\\\').replace('"', '\\"').replace('\n', '\\n').replace('\r', '\\r')) -%}
  {%- set ns.text = ns.text.replace('\t', '\\t').replace('\u0008', '\\b').replace('\u000c', '\\f') -%}
  {%- set controls = '\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\u0008\u0009\u000a\u000b\u000c\u000d\u000e\u000f'
    ~ '\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f' -%}
  {%- for control in controls -%}
    {%- if control in ns.text -%}
      {%- set ns.text = ns.text.replace(control, '\\u%04x' % loop.index0) -%}
    {%- endif -%}
  {%- endfor -%}
  {{- '"' + ns.text + '"' -}}
{%- endmacro -%}

{%- macro json(value) -%}
  {%- if value is string -%}
    {{- quoted(value) -}}
  {%- elif value is mapping -%}
    {{- '{' -}}
    {%- for key, inner in value.items() -%}
      {{- (',' if not loop.first else '') + quoted(key) + ':' + json(inner) -}}
    {%- endfor -%}
    {{- '}' -}}
  {%- elif value is none -%}
    {{- 'null' -}}
  {%- elif value is true or value is false -%}
    {{- 'true' if value else 'false' -}}
  {%- elif value is number -%}
    {{- value -}}
  {%- else -%}
    {{- '[' -}}
    {%- for inner in value -%}
      {{- (',' if not loop.first else '') + json(inner) -}}
    {%- endfor -%}
    {{- ']' -}}
  {%- endif -%}
{%- endmacro -%}

{%- macro described(tool) -%}
  {%- set schema = tool.get('parameters') or {} -%}
  {%- set properties = schema.get('properties') or {} -%}
  {%- set ns = namespace(required=[]) -%}
  {%- for name in properties -%}
    {%- if name in (schema.get('required') or []) -%}
      {%- set ns.required = ns.required + [name] -%}
    {%- endif -%}
  {%- endfor -%}
  {{- '{"name":' + quoted(tool['name']) -}}
  {%- if tool.get('description') -%}
    {{- ',"description":' + quoted(tool['description']) -}}
  {%- endif -%}
  {{- ',"arguments":' + json(properties) -}}
  {%- if ns.required and ns.required | length < properties | length -%}
    {{- ',"required":' + json(ns.required) -}}
  {%- endif -%}
  {%- for key in ['$defs', 'definitions'] -%}
    {%- if schema.get(key) -%}
      {{- ',' + quoted(key) + ':' + json(schema[key]) -}}
    {%- endif -%}
  {%- endfor -%}
  {{- '}' -}}
{%- endmacro -%}

{%- macro called(call) -%}
  {%- set function = call['function'] if call.get('function') else call -%}
  {%- set arguments = function.get('arguments') -%}
  {%- set written = (arguments if arguments is string else json(arguments or {})).strip() -%}
  {{- '```json\n{"name":' + quoted(function['name']) + ',"arguments":' + (written or '{}') + '}\n```' -}}
{%- endmacro -%}

{%- macro said(message, role) -%}
  {%- set text = joined(message.get('content')) -%}
  {%- if role in ['tool', 'function'] -%}
    {%- set text = 'Function output:\n' + text -%}
  {%- elif role == 'assistant' -%}
    {%- set ns = namespace(text=text or message.get('refusal') or '') -%}
    {%- for call in message.get('tool_calls') or ([message['function_call']] if message.get('function_call') else []) -%}
      {%- set ns.text = ns.text + ('\n' if ns.text else '') + called(call) -%}
    {%- endfor -%}
    {%- set text = ns.text -%}
    {%- set start = text.lstrip() -%}
    {%- if start.startswith(('<think>', 'think>', '>')) and '</think>' in start -%}
      {%- set text = start.split('</think>', 1)[1] -%}
    {%- endif -%}
  {%- endif -%}
  {{- lines(text).strip() -}}
{%- endmacro -%}

{%- set names = {'user': 'User', 'tool': 'User', 'function': 'User', 'assistant': 'Assistant'} -%}
{%- set ns = namespace(system='', gap='') -%}
{%- for message in messages -%}
  {%- set role = message['role'] | lower -%}
  {%- if role in ['system', 'developer'] -%}
    {%- set text = said(message, role) -%}
    {%- set ns.system = ns.system + ('\n' if ns.system and text else '') + text -%}
  {%- elif role not in names -%}
    {{- raise_exception('a role that is not known') -}}
  {%- endif -%}
{%- endfor -%}
{%- set ns.told = '' -%}
{%- for tool in ((tools or []) if tools is defined else []) -%}
  {%- if tool.get('type', 'function') == 'function' -%}
    {%- set ns.told = ns.told + (',\n' if ns.told else '') + described(tool['function'] if tool.get('function') else tool) -%}
  {%- endif -%}
{%- endfor -%}
{%- set forced = ns.told and tool_choice is defined and tool_choice == 'required' -%}
{%- if ns.told -%}
  {%- set ns.system = ns.system + ('\n' if ns.system else '') + 'Tools:\n[\n' + ns.told + '\n]\n' -%}
  {%- if forced -%}
    {%- set ns.system = ns.system + 'Return only a JSON function call.' -%}
  {%- else -%}
    {%- set ns.system = ns.system + 'To use a tool, return only a JSON function call. Otherwise answer in words.' -%}
  {%- endif -%}
{%- endif -%}
{%- if ns.system -%}
  {{- 'System: ' + ns.system -}}
  {%- set ns.gap = '\n\n' -%}
{%- endif -%}

{%- for message in messages -%}
  {%- set role = message['role'] | lower -%}
  {%- set text = said(message, role) -%}
  {%- if role in names and text -%}
    {{- ns.gap + names[role] + ': ' + text -}}
    {%- set ns.gap = '\n\n' -%}
  {%- endif -%}
{%- endfor -%}

{%- if add_generation_prompt is defined and add_generation_prompt -%}
  {%- if enable_thinking is defined and enable_thinking -%}
    {{- ns.gap + 'Assistant: <think' -}}
  {%- elif forced -%}
    {{- ns.gap + 'Assistant: ```json' -}}
  {%- else -%}
    {{- ns.gap + 'Assistant: <think>\n</think>\n' -}}
  {%- endif -%}
{%- endif -%}
"""
