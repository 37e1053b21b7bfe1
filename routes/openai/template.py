"""The chat template as Jinja text, for tools that render conversations themselves: it gives what `prompts.conversation` does.

No filter, extension or undefined variable is needed, so any environment renders it alike: transformers', lm-evaluation-harness'
strict one, a plain one.
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

{%- macro said(message, role) -%}
  {%- set text = joined(message.get('content')) -%}
  {%- if role in ['tool', 'function'] -%}
    {%- set text = 'Function output:\n' + text -%}
  {%- elif role == 'assistant' -%}
    {%- set text = text or message.get('refusal') or '' -%}
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
  {{- ns.gap + ('Assistant: <think' if enable_thinking is defined and enable_thinking else 'Assistant: <think>\n</think>\n') -}}
{%- endif -%}
"""
