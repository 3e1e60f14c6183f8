"""Generation marks for published templates that have none and whose turns cannot be located by comparing prefixes.

The marks are added by editing the template's text: the header of an assistant's turn moves before `{% generation %}`,
and `{% endgeneration %}` follows the token that ends the turn. The rendered text does not change. Templates are
identified by digest; to add one, add an entry to `_KNOWN` and the text to `tests/chat_templates`.

The quoted text is from Qwen3 (Apache-2.0, Alibaba Cloud), Phi-3 (MIT, Microsoft) and gpt-oss (Apache-2.0, OpenAI).
"""

import hashlib
from typing import NamedTuple


class _Known(NamedTuple):
    digests: tuple[str, ...]
    """Digests of the templates to edit; see `with_marks`."""
    edits: tuple[tuple[str, str], ...]
    """Old and new text, in order; all occurrences of each old text are replaced."""


_QWEN3 = _Known(
    digests=(
        "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",  # April 2025
        "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",  # since then
    ),
    edits=(
        (
            "{%- if loop.index0 > ns.last_query_index %}",
            r"{{- '<|im_start|>' + message.role + '\n' }}"
            "{%- generation %}{%- if loop.index0 > ns.last_query_index %}",
        ),
        (r"'<|im_start|>' + message.role + '\n<think>\n' + reasoning", r"'<think>\n' + reasoning"),
        # Adding to a string raises an error for content that is not text, like the original.
        (r"{{- '<|im_start|>' + message.role + '\n' + content }}", "{{- '' + content }}"),
        (
            r"{{- '<|im_end|>\n' }}" + '\n    {%- elif message.role == "tool" %}',
            r"{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}" + '{%- elif message.role == "tool" %}',
        ),
    ),
)

# The template writes EOS after finished conversations; it is not part of a turn.
_PHI3 = _Known(
    digests=(
        "dcaee66df77bfbb789ec541fe713218da30225a526f1db97138fc39ee6dc56aa",  # Phi-3-mini
        "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90",  # Phi-3.5-mini
    ),
    edits=(
        (
            "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}",
            "{{'<|assistant|>\n'}}{% generation %}{{message['content'] + '<|end|>'}}{% endgeneration %}{{'\n'}}",
        ),
    ),
)

# The model writes everything after `<|start|>assistant`, including the header of its second message. In earlier
# answers, the template replaces the model's `<|return|>` with `<|end|>`, which is not marked: a model that learned it
# would not stop.
_GPT_OSS = _Known(
    digests=("a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146",),
    edits=(
        ('"<|start|>assistant<|channel|>analysis<|message|>"', '"<|channel|>analysis<|message|>"'),
        ('message.thinking + "<|end|>"', 'message.thinking + "<|end|><|start|>assistant"'),
        (
            '{{- "<|channel|>analysis<|message|>" + message.content + "<|end|>" }}',
            '{{- "<|channel|>analysis<|message|>" + message.content + "<|end|><|start|>assistant" }}',
        ),
        (
            "{%- if message.content and message.thinking %}",
            '{{- "<|start|>assistant" }}{%- generation %}{%- if message.content and message.thinking %}',
        ),
        ('{{- "<|start|>assistant to=" }}', '{{- " to=" }}'),
        ('{{- "<|call|>" }}', '{{- "<|call|>" }}{%- endgeneration %}'),
        (
            "{#- This is a situation that should only occur in training, never in inference. #}",
            '{{- "<|start|>assistant" }}{%- generation %}',
        ),
        (
            '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}',
            '{{- "<|channel|>final<|message|>" + message.content + "<|return|>" }}{%- endgeneration %}',
        ),
        (
            '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}',
            '{{- "<|start|>assistant" }}{%- generation %}{{- "<|channel|>final<|message|>" + message.content }}'
            '{%- endgeneration %}{{- "<|end|>" }}',
        ),
    ),
)

_KNOWN = (_QWEN3, _PHI3, _GPT_OSS)
_EDITS = {digest: known.edits for known in _KNOWN for digest in known.digests}


def with_marks(source: str) -> str:
    """Add generation marks to a known template; return other templates unchanged."""
    text = source.replace("\r\n", "\n").removesuffix("\n")  # equivalent in Jinja
    edits = _EDITS.get(hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest())
    if edits is None:
        return source
    for old, new in edits:
        assert old in text, f"the template does not contain {old!r}"
        text = text.replace(old, new)
    return text
