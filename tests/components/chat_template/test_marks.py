"""Generation marks of known published templates (texts in `published/`), and templates whose finished turns do not
begin with the generation prompt. The reference is transformers with the published template."""

import json
import logging
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.components.chat_template.helpers import Message, assistant, user
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.marks import with_marks
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedSample
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation
from torchtitan.components.data.finetuning.loss_mask import TrainOn
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.weights.assets import chat_assets

FAMILIES = ["qwen3", "qwen3-now", "phi-3", "phi-3.5", "gpt-oss"]

SPECIAL = ["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
SPECIAL += ["<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"]
STRIPS_WHITE_SPACE = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
"""Tokens of Phi-3 that include the following whitespace."""

ANSWER_PATTERNS = {
    "qwen3": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)\n",
    "phi-3": r"<\|assistant\|>\n(.*?<\|end\|>)\n",
    "gpt-oss": r"<\|start\|>assistant((?:<\|channel\|>analysis<\|message\|>[^<]*<\|end\|><\|start\|>assistant)?"
    r"(?:<\|channel\|>final<\|message\|>[^<]*(?:<\|return\|>)?"
    r"| to=functions\.\w+<\|channel\|>commentary json<\|message\|>[^<]*<\|call\|>))",
}
"""Patterns of the generated text, from the end of the generation prompt to the token that stops generation. (gpt-oss's
earlier answers end with a different token, which the model does not write.)"""

WORDS = ["cat", "Größe", " two", "\n\n", "👩‍👩‍👧", "中文", "12345", "\t", "don't", "é"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number", "description": "One."}, "b": {"type": "string", "default": "é"}},
                "required": ["a"],
            },
        },
    }
]


def answer_pattern(name: str) -> str:
    return next(pattern for family, pattern in ANSWER_PATTERNS.items() if name.startswith(family))


@pytest.fixture(scope="module")
def originals(assets: Path) -> dict[str, str]:
    folder = Path(__file__).parent / "published"
    texts = {file.stem: file.read_bytes().decode() for file in folder.glob("*.jinja")}
    published = json.loads((assets / "qwen3-chat-template" / "tokenizer_config.json").read_text())
    return texts | {"qwen3-now": published["chat_template"]}


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's vocabulary with the special tokens of all families."""
    tokenizer = tokenizers.Tokenizer.from_file(str(assets / "gpt2-tokenizer" / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(text, normalized=False, rstrip=True) for text in STRIPS_WHITE_SPACE]
    )
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PretrainedTokenizer:
    tokenizer: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=folder)
    return tokenizer


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|endoftext|>"
    )


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|endoftext|>"}, "the published template")


# Conversations.


def words(rng: random.Random) -> str:
    """Return 0 to 5 words without whitespace at the ends, which some families strip or merge into a token."""
    return "".join(rng.choices(WORDS, k=rng.randint(0, 5))).strip() + rng.choice([".", "!", ""])


def chats(name: str, n: int = 30) -> Iterator[tuple[list[Message], list[Any] | None]]:
    rng = random.Random(name)
    with_tools = not name.startswith("phi")
    for _ in range(n):
        messages: list[Message] = [{"role": "system", "content": words(rng)}] if rng.random() < 0.4 else []
        tools = TOOLS if with_tools and rng.random() < 0.5 else None
        for _ in range(rng.randint(1, 4)):
            messages.append(user(words(rng)))
            for _ in range(rng.choice([0, 0, 1, 2]) if tools else 0):
                messages += call(rng)
            messages.append(answer(rng, name))
        if rng.random() < 0.2:
            messages.append(user("And?"))
        yield messages, tools


def call(rng: random.Random) -> list[Message]:
    function = {"name": "add", "arguments": {"a": rng.randint(1, 9), "b": words(rng)}}
    thought = {"reasoning_content": words(rng)} if rng.random() < 0.5 else {}
    # gpt-oss accepts either content or reasoning with a call.
    content = "" if thought or rng.random() < 0.5 else words(rng)
    # gpt-oss writes the first call only.
    calls = [{"type": "function", "function": function}] * rng.randint(1, 2)
    request = assistant(content, tool_calls=calls, **thought)
    return [request, {"role": "tool", "name": "add", "content": words(rng)}]


def answer(rng: random.Random, name: str) -> Message:
    # Avoid characters of several tokens before unmarked text: there, ChatEncoder differs from transformers.
    text = words(rng) + ("." if name == "gpt-oss" else "")
    if rng.random() < 0.3:
        return assistant(text, **{rng.choice(["reasoning_content", "thinking", "reasoning"]): words(rng)})
    if name.startswith("qwen") and rng.random() < 0.3:
        return assistant(f"<think>\n{words(rng)}\n</think>\n\n{text}")
    return assistant(text)


# Marks of known templates.


def check_text(reference: Any, original: str, marked: str, name: str) -> None:
    """Check that the marks do not change the text that transformers renders."""
    variables: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"builtin_tools": ["python"]}]
    for i, (messages, tools) in enumerate(chats(name)):
        for prompted in (False, True):
            options = {"tools": tools, "add_generation_prompt": prompted, "tokenize": False, **variables[i % 3]}
            expected = reference.apply_chat_template(messages, chat_template=original, **options)
            assert reference.apply_chat_template(messages, chat_template=marked, **options) == expected


def check_marks(original: str, marked: str, name: str) -> None:
    """Check that each mark covers one turn of the assistant in the text of the original."""
    n_turns, published, template = 0, template_of(original + " "), template_of(marked)
    for messages, tools in chats(name):
        text = published.render(messages, tools=tools, add_generation_prompt=False)
        found = [match.span(1) for match in re.finditer(answer_pattern(name), text, flags=re.DOTALL)]
        assert template.render_marked(messages, tools=tools)[1] == found
        assert len(found) == sum(message["role"] == "assistant" for message in messages)
        n_turns += len(found)
    assert n_turns > 60


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_do_not_change_the_text(name: str, originals: dict[str, str], reference: Any) -> None:
    original = originals[name]
    marked = with_marks(original)
    assert "generation %}" in marked and "{% generation" not in original and "{%- generation" not in original
    check_text(reference, original, marked, name)
    check_marks(original, marked, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_equal_transformers(
    name: str, originals: dict[str, str], reference: Any, tokenizer: PretrainedTokenizer
) -> None:
    """The reference ids come from the original template, the mask from the marked one."""
    original = originals[name]
    encoder = ChatEncoder(tokenizer, template_of(original), "assistant")
    encoder.check()
    for messages, tools in chats(name):
        [sample] = encoder.encode_batch([Conversation(messages, tools)])
        assert isinstance(sample, EncodedSample), sample
        options = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": True}
        masked = reference.apply_chat_template(messages, chat_template=with_marks(original), **options)
        ids = reference.apply_chat_template(messages, chat_template=original, tools=tools, return_dict=False)
        assert sample.ids.tolist() == ids == masked["input_ids"]
        assert sample.trained.astype(int).tolist() == masked["assistant_masks"]


@pytest.mark.parametrize("name", FAMILIES)
def test_last_turn_follows_the_generation_prompt(
    name: str, originals: dict[str, str], tokenizer: PretrainedTokenizer
) -> None:
    template = template_of(originals[name])
    encoder = ChatEncoder(tokenizer, template, "last_assistant")
    for messages, tools in chats(name):
        # gpt-oss's template omits the reasoning of a call once an answer follows.
        if messages[-1]["role"] != "assistant" or (tools and name == "gpt-oss"):
            continue
        [sample] = encoder.encode_batch([Conversation(messages, tools)])
        assert isinstance(sample, EncodedSample), sample
        prompt = encoder.encode_prompt(Conversation(messages[:-1], tools))
        assert sample.trained.tolist().index(True) == len(prompt)
        assert sample.ids[: len(prompt)].tolist() == prompt.tolist()
        last = int(sample.ids[sample.trained][-1])
        assert last == template.end_of_turn_id(tokenizer)


GPT_OSS_ANSWER = '{{- "<|channel|>final<|message|>" + message.content }}'
QWEN3_HEADER = r"{{- '<|im_start|>' + message.role + '\n' }}"

WRONG = {
    "the header is marked": ("qwen3", QWEN3_HEADER + "{%- generation %}", "{%- generation %}" + QWEN3_HEADER),
    "the end is not marked": (
        "phi-3",
        "'<|end|>'}}{% endgeneration %}{{'\n'}}",
        "''}}{% endgeneration %}{{'<|end|>\n'}}",
    ),
    "the next line is marked": ("phi-3", "{% endgeneration %}{{'\n'}}", "{{'\n'}}{% endgeneration %}"),
    "a turn is not marked": (
        "gpt-oss",
        "{%- generation %}" + GPT_OSS_ANSWER + "{%- endgeneration %}",
        GPT_OSS_ANSWER,
    ),
    "the text has one more blank": ("gpt-oss", '{{- " to=" }}', '{{- "  to=" }}'),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_marks_are_caught(mistake: str, originals: dict[str, str], reference: Any) -> None:
    name, right, wrong = WRONG[mistake]
    marked = with_marks(originals[name])
    assert right in marked
    with pytest.raises(AssertionError):
        check_text(reference, originals[name], marked.replace(right, wrong), name)
        check_marks(originals[name], marked.replace(right, wrong), name)


@pytest.mark.parametrize("name", FAMILIES)
def test_marked_template_rejects_the_same_conversations(name: str, originals: dict[str, str], reference: Any) -> None:
    """Missing content, content that is not text, and gpt-oss's own rules."""
    refused = 0
    for turn in (
        {"role": "assistant"},
        assistant("a", tool_calls=[{"function": {"name": "f", "arguments": {}}}], thinking="b"),
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "content": ["a"]},
        assistant("<|channel|>final<|message|>"),
    ):
        results = []
        for source in (originals[name], with_marks(originals[name])):
            try:
                results.append(reference.apply_chat_template([user("a"), turn], chat_template=source, tokenize=False))
            except Exception as error:
                results.append(type(error))
        assert results[0] == results[1]
        refused += not isinstance(results[0], str)
    assert refused or name == "qwen3-now"  # accepts all of these


def test_only_the_exact_published_text_is_known(originals: dict[str, str]) -> None:
    for name in FAMILIES:
        assert set(originals) == set(FAMILIES)
        original = originals[name]
        assert with_marks(original.replace("\n", "\r\n") + "\r\n") == with_marks(original) != original
        assert with_marks(original + " ") == original + " "


def test_published_text_is_exported(originals: dict[str, str], tokenizer: PretrainedTokenizer) -> None:
    template = template_of(originals["qwen3-now"])
    assert template.marks_generation
    assert chat_assets(tokenizer, template)["chat_template.jinja"] == originals["qwen3-now"]


def test_header_token_includes_leading_white_space(originals: dict[str, str], tokenizer: PretrainedTokenizer) -> None:
    """Phi-3's `<|assistant|>` is one token with the following whitespace, including the start of the answer."""
    encoder = ChatEncoder(tokenizer, template_of(originals["phi-3"]), "assistant")
    assert decoded(tokenizer, encoder, [user("a"), assistant("\n b")]) == "b<|end|>"
    assert decoded(tokenizer, encoder, [user("a"), assistant(" ")]) == "<|end|>"


def test_trained_turns_of_qwen3(originals: dict[str, str], tokenizer: PretrainedTokenizer) -> None:
    """The template omits the reasoning of earlier turns, so it is not trained. Turns are still matched if the template
    strips whitespace from the last one."""
    messages = [
        user("a"),
        assistant("<think>\nHm.\n</think>\n\nb"),
        user("c"),
        assistant("\n\n\nd"),
        user("e"),
        assistant("f", reasoning_content="So."),
    ]
    template = template_of(originals["qwen3-now"])
    every, last = (ChatEncoder(tokenizer, template, train_on) for train_on in TRAIN_ON)
    end = "<think>\nSo.\n</think>\n\nf<|im_end|>"
    # The four newlines are one token, and the first one belongs to the header.
    assert decoded(tokenizer, every, messages) == f"b<|im_end|>\n\n\n\nd<|im_end|>{end}"
    assert decoded(tokenizer, last, messages) == end
    assert decoded(tokenizer, last, messages, [None, None, None, True, None, False]) == "\n\n\n\nd<|im_end|>"


TRAIN_ON: tuple[TrainOn, TrainOn] = ("assistant", "last_assistant")


def encoded(
    encoder: ChatEncoder, messages: Sequence[Message], trained: list[bool | None] | None = None
) -> EncodedSample:
    [sample] = encoder.encode_batch([Conversation(list(messages), None, trained or [])])
    assert isinstance(sample, EncodedSample), sample
    return sample


def decoded(
    tokenizer: PretrainedTokenizer,
    encoder: ChatEncoder,
    messages: Sequence[Message],
    trained: list[bool | None] | None = None,
) -> str:
    sample = encoded(encoder, messages, trained)
    return tokenizer.decode(sample.ids[sample.trained])


# Templates whose finished turns do not begin with the generation prompt.

R1 = r"""{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{% endif %}
    {%- if message['role'] == 'assistant' %}{% set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"""
"""Template of DeepSeek-R1's distilled models, without tools."""

NEMOTRON = r"""{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and '</think>' not in message.content %}{{ '<think></think>' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{'<|im_start|>assistant\n<think>' + ('</think>' if enable_thinking is false else '\n')}}
{%- endif %}"""
"""Template of Nemotron 3, which writes empty reasoning in finished turns without reasoning."""

TALK = [user("Hi <b>?"), assistant("<b>Yes</b>"), user("More?"), assistant("<th>No 👩")]


def test_turn_without_the_whole_generation_prompt(
    tokenizer: PretrainedTokenizer, reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    template = template_of(R1)
    every, last = (ChatEncoder(tokenizer, template, train_on) for train_on in TRAIN_ON)
    end = "<｜end▁of▁sentence｜>"
    with caplog.at_level(logging.WARNING, "torchtitan"):
        assert decoded(tokenizer, every, TALK) == f"<b>Yes</b>{end}<th>No 👩{end}"
        assert decoded(tokenizer, every, TALK[:2]) == f"<b>Yes</b>{end}"
    # There is one warning for any number of turns.
    assert (
        caplog.text.count(
            r"writes '<｜Assistant｜>' before finished answers, but its generation prompt is '<｜Assistant｜><think>\n'"
        )
        == 1
    )
    assert decoded(tokenizer, last, TALK) == f"<th>No 👩{end}"
    assert decoded(tokenizer, last, TALK, [None, True, None, False]) == f"<b>Yes</b>{end}"
    assert encoded(last, TALK).ids.tolist() == reference.apply_chat_template(TALK, chat_template=R1, return_dict=False)


def test_turn_with_omitted_reasoning_is_rejected(tokenizer: PretrainedTokenizer) -> None:
    """Training on the turn would teach the model to skip the reasoning that the generation prompt asks for. If the
    template keeps the reasoning, the trained tokens follow the generation prompt."""
    inline = [user("Hi"), assistant("<think>\nHm.\n</think>\n\nYes.")]
    separate = [user("Hi"), assistant("Yes.", reasoning_content="Hm.")]
    for train_on in TRAIN_ON:
        encoder = ChatEncoder(tokenizer, template_of(R1), train_on)
        for messages in (inline, separate):
            [error] = encoder.encode_batch([Conversation(messages)])
            assert isinstance(error, BrokenSample)
            assert "omits a part of message 2 (assistant), such as its reasoning" in str(error)
            assert r"generation prompt is '<｜Assistant｜><think>\n'" in str(error) and "chat_template" in str(error)
        # Untrained turns may lose their reasoning.
        assert decoded(tokenizer, encoder, [*inline, *TALK[2:]], [None, False, None, None]).startswith("<th>No")
    keeps = R1.replace("{% set content = content.split('</think>')[-1] %}", "")
    encoder = ChatEncoder(tokenizer, template_of(keeps), "assistant")
    sample, prompt = encoded(encoder, inline), encoder.encode_prompt(Conversation(inline[:1]))
    assert tokenizer.decode(sample.ids[sample.trained]) == "Hm.\n</think>\n\nYes.<｜end▁of▁sentence｜>"
    assert sample.ids[: len(prompt)].tolist() == prompt.tolist() and not sample.trained[: len(prompt)].any()


def test_header_differs_from_the_generation_prompt(
    tokenizer: PretrainedTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The template writes the empty reasoning; after it, the answer equals an answer without thinking."""
    template = template_of(NEMOTRON)
    encoder = ChatEncoder(tokenizer, template, "assistant")
    with caplog.at_level(logging.WARNING, "torchtitan"):
        assert decoded(tokenizer, encoder, [user("a"), assistant("<think>\nb\n</think>\nc")]) == (
            "b\n</think>\nc<|im_end|>"
        )
        assert not caplog.text
        assert decoded(tokenizer, encoder, [user("a"), assistant("Yes."), user("b"), assistant("No 👩")]) == (
            "Yes.<|im_end|>No 👩<|im_end|>"
        )
    assert r"writes '<|im_start|>assistant\n<think></think>' before finished answers" in caplog.text
    without = template.render(TALK[:1], add_generation_prompt=True, enable_thinking=False)
    assert template.render(TALK[:2], add_generation_prompt=False) == f"{without}<b>Yes</b><|im_end|>\n"


def test_error_states_the_correct_reason(tokenizer: PretrainedTokenizer) -> None:
    """Either the earlier text changes, or a turn begins differently from the others."""
    changes = "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else '' }};{% endfor %}"
    varies = (
        "{% for m in messages %}{{ '<b>' if m.role != 'assistant' else '<c>' if m.content == 'No.' else '<d>' }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    cases = [
        (changes, "message 2 (assistant) differently if more messages follow"),
        (varies, "neither with its gen"),
    ]
    for source, reason in cases:
        encoder = ChatEncoder(tokenizer, template_of(source), "assistant")
        messages = [user("a"), assistant("b"), user("c"), assistant("No.")]
        [error] = encoder.encode_batch([Conversation(messages)])
        assert isinstance(error, BrokenSample) and reason in str(error)
        assert ("last_assistant" in str(error)) == (source == changes)
    assert "begins message 4 (assistant) neither with its generation prompt, '<a>', nor" in str(error)
