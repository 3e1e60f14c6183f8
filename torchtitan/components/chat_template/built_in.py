"""Built-in chat formats. Their generation marks cover the assistant's text, including the token that ends its turn."""

from collections.abc import Mapping
from types import MappingProxyType

_REFUSE_TOOLS = """\
{%- if tools or messages | selectattr("tool_calls", "defined") | list %}
    {{- raise_exception("it has no form for tools; use the model's own template, or chatml") }}
{%- endif %}
"""

_REFUSE_ROLE = """{{- raise_exception("it has no form for the role " + message.role + " at this place") }}"""

_CHATML = """\
{%- set schemas %}
# Tools

You may call the functions that are described by JSON schemas between <tools> and </tools>:
<tools>
{% for tool in tools or [] %}
{{ tool | tojson }}
{% endfor %}
</tools>

To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>
{%- endset %}
{{- bos_token }}
{%- if tools and messages[0].role != "system" %}
    {{- "<|im_start|>system\n" + schemas + "<|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "\n" if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": ' + call.function.name | tojson }}
            {{- ', "arguments": ' + call.function.arguments | tojson + "}\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>" }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {{- "<tool_response>\n" + message.content + "\n</tool_response><|im_end|>" }}
    {%- elif message.role == "system" and tools and loop.first %}
        {{- message.content + "\n\n" + schemas + "<|im_end|>" }}
    {%- else %}
        {{- message.content + "<|im_end|>" }}
    {%- endif %}
    {{- "\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""

_LLAMA3 = """\
REFUSE_TOOLS
{{- "<|begin_of_text|>" }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        REFUSE_ROLE
    {%- endif %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\n\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content | trim + "<|eot_id|>" }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}
{%- endif %}
"""

# The system message precedes the first question: in front of the last one, as in Mistral's own template, it would move
# with every turn.
_MISTRAL = """\
REFUSE_TOOLS
{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}
        {%- set ns.system = message.content + "\n\n" %}
    {%- elif message.role == "user" %}
        {{- "[INST] " + ns.system + message.content + "[/INST]" }}
        {%- set ns.system = "" %}
    {%- elif message.role == "assistant" and not ns.system %}
        {%- generation %}{{ " " + message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}
        REFUSE_ROLE
    {%- endif %}
{%- endfor %}
"""

_ALPACA = """\
REFUSE_TOOLS
{{- bos_token }}
{%- if messages[0].role != "system" %}
    {{- "Below is an instruction that describes a task. " }}
    {{- "Write a response that appropriately completes the request.\n\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}
        {{- message.content + "\n\n" }}
    {%- elif message.role == "user" %}
        {{- "### Instruction:\n" + message.content + "\n\n" }}
    {%- elif message.role == "assistant" %}
        {{- "### Response:\n" }}
        {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
        {{- "\n\n" if not loop.last }}
    {%- else %}
        REFUSE_ROLE
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "### Response:\n" }}
{%- endif %}
"""

BUILT_IN_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        name: text.replace("REFUSE_TOOLS\n", _REFUSE_TOOLS).replace("REFUSE_ROLE", _REFUSE_ROLE)
        for name, text in (("chatml", _CHATML), ("llama3", _LLAMA3), ("mistral", _MISTRAL), ("alpaca", _ALPACA))
    }
)
"""Name → template, which reads `bos_token` and `eos_token`: `resolve_chat_template` sets them for a tokenizer.

- `chatml`: each turn between `<|im_start|>` and `<|im_end|>`; tools and calls as JSON, between tags.
- `llama3`: Llama 3's headers and `<|eot_id|>`, which only its vocabulary has.
- `mistral`: the question between `[INST]` and `[/INST]`, as in Mistral v0.3; EOS after the answer.
- `alpaca`: `### Instruction:` and `### Response:`, as ordinary text; EOS after the answer.
"""

REQUIRED_TOKENS: Mapping[str, tuple[str, ...]] = MappingProxyType({"mistral": ("[INST]", "[/INST]")})
"""Special tokens of a built-in template that are not recognizable by their spelling."""
