"""Published templates: the marks that known ones get (their texts are in published/), and those whose generation
prompt no finished turn begins with. The reference is transformers, with the template as published."""

import json
import logging
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.marks import with_marks
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder, EncodedSample
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation
from torchtitan.components.data.finetuning.loss_mask import TrainOn
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.weights.assets import chat_assets

Message = dict[str, Any]

FAMILIES = ["qwen3", "qwen3-now", "phi-3", "phi-3.5", "gpt-oss"]

SPECIAL = ["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
SPECIAL += ["<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"]
TAKING_WHITE_SPACE = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
"""As in Phi-3's vocabulary."""

SAID = {
    "qwen3": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)\n",
    "phi-3": r"<\|assistant\|>\n(.*?<\|end\|>)\n",
    "gpt-oss": r"<\|start\|>assistant((?:<\|channel\|>analysis<\|message\|>[^<]*<\|end\|><\|start\|>assistant)?"
    r"(?:<\|channel\|>final<\|message\|>[^<]*(?:<\|return\|>)?"
    r"| to=functions\.\w+<\|channel\|>commentary json<\|message\|>[^<]*<\|call\|>))",
}
"""What the model writes, told from the text alone: from the end of the generation prompt to the token at which
generation stops. (gpt-oss's earlier answers end with another one, which is not the model's.)"""

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


def said_by_family(name: str) -> str:
    return next(pattern for family, pattern in SAID.items() if name.startswith(family))


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
        [tokenizers.AddedToken(text, normalized=False, rstrip=True) for text in TAKING_WHITE_SPACE]
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


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def words(rng: random.Random) -> str:
    """Some, or none; letters at the ends, so that no family takes white space off or merges it into a token."""
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
    # gpt-oss takes content or reasoning beside a call, but not both.
    content = "" if thought or rng.random() < 0.5 else words(rng)
    # gpt-oss writes the first call only.
    calls = [{"type": "function", "function": function}] * rng.randint(1, 2)
    asked = assistant(content, tool_calls=calls, **thought)
    return [asked, {"role": "tool", "name": "add", "content": words(rng)}]


def answer(rng: random.Random, name: str) -> Message:
    # A character of several tokens in front of text that is not marked: see ChatEncoder for how it differs there.
    text = words(rng) + ("." if name == "gpt-oss" else "")
    if rng.random() < 0.3:
        return assistant(text, **{rng.choice(["reasoning_content", "thinking", "reasoning"]): words(rng)})
    if name.startswith("qwen") and rng.random() < 0.3:
        return assistant(f"<think>\n{words(rng)}\n</think>\n\n{text}")
    return assistant(text)


# Known templates get marks.


def check_text(reference: Any, original: str, marked: str, name: str) -> None:
    """That transformers writes the same with and without the marks."""
    variables: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"builtin_tools": ["python"]}]
    for i, (messages, tools) in enumerate(chats(name)):
        for prompted in (False, True):
            options = {"tools": tools, "add_generation_prompt": prompted, "tokenize": False, **variables[i % 3]}
            expected = reference.apply_chat_template(messages, chat_template=original, **options)
            assert reference.apply_chat_template(messages, chat_template=marked, **options) == expected


def check_marks(original: str, marked: str, name: str) -> None:
    """That each mark is one turn of the assistant, as the original's text shows it."""
    n_turns, published, template = 0, template_of(original + " "), template_of(marked)
    for messages, tools in chats(name):
        text = published.render(messages, tools=tools, add_generation_prompt=False)
        found = [match.span(1) for match in re.finditer(said_by_family(name), text, flags=re.DOTALL)]
        assert template.render_marked(messages, tools=tools)[1] == found
        assert len(found) == sum(message["role"] == "assistant" for message in messages)
        n_turns += len(found)
    assert n_turns > 60


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_leave_the_text_as_it_is(name: str, originals: dict[str, str], reference: Any) -> None:
    original = originals[name]
    marked = with_marks(original)
    assert "generation %}" in marked and "{% generation" not in original and "{%- generation" not in original
    check_text(reference, original, marked, name)
    check_marks(original, marked, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_are_those_of_transformers(
    name: str, originals: dict[str, str], reference: Any, tokenizer: PretrainedTokenizer
) -> None:
    """The ids with the original, the mask with the marked one."""
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
def test_what_the_last_turn_follows_is_what_inference_gives(
    name: str, originals: dict[str, str], tokenizer: PretrainedTokenizer
) -> None:
    template = template_of(originals[name])
    encoder = ChatEncoder(tokenizer, template, "last_assistant")
    for messages, tools in chats(name):
        # gpt-oss's template leaves out the reasoning of a call as soon as an answer follows.
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
def test_what_the_original_refuses_is_refused(name: str, originals: dict[str, str], reference: Any) -> None:
    """Content that is missing or no text; gpt-oss's own rules."""
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
    assert refused or name == "qwen3-now"  # which takes anything


def test_only_the_published_text_is_known(originals: dict[str, str]) -> None:
    for name in FAMILIES:
        assert set(originals) == set(FAMILIES)
        original = originals[name]
        assert with_marks(original.replace("\n", "\r\n") + "\r\n") == with_marks(original) != original
        assert with_marks(original + " ") == original + " "


def test_the_published_text_is_exported(originals: dict[str, str], tokenizer: PretrainedTokenizer) -> None:
    template = template_of(originals["qwen3-now"])
    assert template.marks_generation
    assert chat_assets(tokenizer, template)["chat_template.jinja"] == originals["qwen3-now"]


def test_white_space_of_an_answer_that_the_header_takes(
    originals: dict[str, str], tokenizer: PretrainedTokenizer
) -> None:
    """Phi-3's `<|assistant|>` is one token with the white space behind it, the answer's first included."""
    encoder = ChatEncoder(tokenizer, template_of(originals["phi-3"]), "assistant")
    assert decoded(tokenizer, encoder, [user("a"), assistant("\n b")]) == "b<|end|>"
    assert decoded(tokenizer, encoder, [user("a"), assistant(" ")]) == "<|end|>"


def test_which_of_qwens_turns_are_trained(originals: dict[str, str], tokenizer: PretrainedTokenizer) -> None:
    """The reasoning of an earlier turn is not in the text, so it is not trained; white space that the last turn loses
    does not confuse turns."""
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
    # Of the four newlines, which are one token, the header has the first.
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


# Generation prompts that no finished turn begins with.

R1 = r"""{{ bos_token }}{% for message in messages %}
    {%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{% endif %}
    {%- if message['role'] == 'assistant' %}{% set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"""
"""As that of DeepSeek-R1's distills, without tools."""

NEMOTRON = r"""{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and '</think>' not in message.content %}{{ '<think></think>' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{'<|im_start|>assistant\n<think>' + ('</think>' if enable_thinking is false else '\n')}}
{%- endif %}"""
"""As that of Nemotron 3: a finished turn has a closed thought where it has none of its own."""

TALK = [user("Hi <b>?"), assistant("<b>Yes</b>"), user("More?"), assistant("<th>No 👩")]


def test_a_turn_without_the_whole_generation_prompt(
    tokenizer: PretrainedTokenizer, reference: Any, caplog: pytest.LogCaptureFixture
) -> None:
    template = template_of(R1)
    every, last = (ChatEncoder(tokenizer, template, train_on) for train_on in TRAIN_ON)
    end = "<｜end▁of▁sentence｜>"
    with caplog.at_level(logging.WARNING, "torchtitan"):
        assert decoded(tokenizer, every, TALK) == f"<b>Yes</b>{end}<th>No 👩{end}"
        assert decoded(tokenizer, every, TALK[:2]) == f"<b>Yes</b>{end}"
    # Once, however many turns.
    assert (
        caplog.text.count(r"is '<｜Assistant｜><think>\n', but in its finished turns answers follow '<｜Assistant｜>'")
        == 1
    )
    assert decoded(tokenizer, last, TALK) == f"<th>No 👩{end}"
    assert decoded(tokenizer, last, TALK, [None, True, None, False]) == f"<b>Yes</b>{end}"
    assert encoded(last, TALK).ids.tolist() == reference.apply_chat_template(TALK, chat_template=R1, return_dict=False)


def test_reasoning_that_the_template_takes_out_is_refused(tokenizer: PretrainedTokenizer) -> None:
    """What the generation prompt asks for would be missing. A template that keeps it is exact: what is trained follows
    the prompt of inference."""
    thoughtful = [user("Hi"), assistant("<think>\nHm.\n</think>\n\nYes.")]
    apart = [user("Hi"), assistant("Yes.", reasoning_content="Hm.")]
    for train_on in TRAIN_ON:
        encoder = ChatEncoder(tokenizer, template_of(R1), train_on)
        for messages in (thoughtful, apart):
            [error] = encoder.encode_batch([Conversation(messages)])
            assert isinstance(error, BrokenSample)
            assert "omits a part of message 2 (assistant), such as its reasoning" in str(error)
            assert r"generation prompt is '<｜Assistant｜><think>\n'" in str(error) and "chat_template" in str(error)
        # Only of what is trained.
        assert decoded(tokenizer, encoder, [*thoughtful, *TALK[2:]], [None, False, None, None]).startswith("<th>No")
    keeps = R1.replace("{% set content = content.split('</think>')[-1] %}", "")
    encoder = ChatEncoder(tokenizer, template_of(keeps), "assistant")
    sample, prompt = encoded(encoder, thoughtful), encoder.encode_prompt(Conversation(thoughtful[:1]))
    assert tokenizer.decode(sample.ids[sample.trained]) == "Hm.\n</think>\n\nYes.<｜end▁of▁sentence｜>"
    assert sample.ids[: len(prompt)].tolist() == prompt.tolist() and not sample.trained[: len(prompt)].any()


def test_a_header_that_is_no_beginning_of_the_generation_prompt(
    tokenizer: PretrainedTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The closed thought is the template's; behind it an answer is what follows the prompt without thinking."""
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
    assert r"writes '<|im_start|>assistant\\n<think></think>'" in caplog.text
    without = template.render(TALK[:1], add_generation_prompt=True, enable_thinking=False)
    assert template.render(TALK[:2], add_generation_prompt=False) == f"{without}<b>Yes</b><|im_end|>\n"


def test_the_reason_is_true(tokenizer: PretrainedTokenizer) -> None:
    """Whether earlier text changes, or a turn begins as no other does."""
    changes = "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else '' }};{% endfor %}"
    otherwise = (
        "{% for m in messages %}{{ '<b>' if m.role != 'assistant' else '<c>' if m.content == 'No.' else '<d>' }}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    cases = [(changes, "message 2 (assistant) differently where it goes on"), (otherwise, "neither with its gen")]
    for source, reason in cases:
        encoder = ChatEncoder(tokenizer, template_of(source), "assistant")
        messages = [user("a"), assistant("b"), user("c"), assistant("No.")]
        [error] = encoder.encode_batch([Conversation(messages)])
        assert isinstance(error, BrokenSample) and reason in str(error)
        assert ("last_assistant" in str(error)) == (source == changes)
    assert "begins message 4 (assistant) neither with its generation prompt, '<a>', nor" in str(error)
