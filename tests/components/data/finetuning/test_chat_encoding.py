"""Ids and loss masks of conversations. The reference is transformers for templates with generation
marks, and a mask built by hand, segment by segment, for other templates."""

import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.components.chat_template.helpers import Message, assistant, user
from tests.components.tokenizer.helpers import load_tokenizer
from torchtitan.components.chat_template import (
    BUILT_IN_TEMPLATES,
    ChatTemplate,
    resolve_chat_template,
)
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    Pair,
    Text,
    normalize,
)
from torchtitan.components.data.finetuning.encoded import EncodedSample
from torchtitan.components.data.finetuning.sample_texts import TrainOn
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError

# Templates for training with the end of the turn inside and outside the marks.
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
OPEN = MARKED.replace(
    "{{ message.content + '<|im_end|>' }}{% endgen", "{{ message.content }}{% endgen"
).replace("{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
UNMARKED = MARKED.replace("\n        {%- generation %}", "").replace("{% endgeneration %}", "")

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}


cached_tokenizer = cache(load_tokenizer)


def system(text: str) -> Message:
    return {"role": "system", "content": text}


CALL: list[Message] = [
    user("How much is 1 + 2?"),
    assistant(
        "",
        tool_calls=[
            {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {}}}
        ],
    ),
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"},
    assistant("It is 3."),
]

WORDS = [
    "cat",
    "Größe",
    "  two",
    "\n",
    "\n\n",
    "👩‍👩‍👧",
    "é",
    "中文",
    "<|im_end|>",
    "</s>",
    "[INST]",
    "12345",
    "\t",
    " ",
    "don't",
]


def conversations(n: int = 60) -> Iterator[list[Message]]:
    """Generate alternating turns of random words, with whitespace at the ends, characters of
    several tokens, and the text of special tokens."""
    rng = random.Random(0)
    for _ in range(n):
        turns = [rng.choice([user, system])("begin")] if rng.random() < 0.3 else []
        turns = [turn for turn in turns if turn["role"] == "system"]
        for _ in range(rng.randint(1, 3)):
            turns += [
                role(" ".join(rng.choices(WORDS, k=rng.randint(1, 6))))
                if rng.random() < 0.9
                else role("")
                for role in (user, assistant)
            ]
        yield turns


def unspaced(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose answers begin with a word. Otherwise, their first token may merge with
    the prompt's last one, and both are encoded separately."""
    return [
        {**m, "content": f"w{m['content']}"} if m["role"] == "assistant" else m for m in messages
    ]


# Tokenizers of the library and of transformers.


@pytest.fixture(scope="session")
def qwen(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's vocabulary with Qwen3's added tokens and its chat template."""
    settings = json.loads((assets / "qwen3-chat-template" / "tokenizer_config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(assets / "gpt2-tokenizer" / "tokenizer.json"))
    for token in settings.pop("added_tokens_decoder").values():
        added = tokenizers.AddedToken(token["content"], normalized=False, special=token["special"])
        (tokenizer.add_special_tokens if token["special"] else tokenizer.add_tokens)([added])
    folder = tmp_path_factory.mktemp("qwen")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@cache
def reference_of(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder. transformers converts Llama 3's file in tiktoken
    format."""
    transformers = pytest.importorskip("transformers")
    if (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text()) if path.is_file() else {}
        tokens = {
            name: settings.get(name)
            for name in ("bos_token", "eos_token", "pad_token")
            if settings.get(name)
        }
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), **tokens
        )
    ours = cached_tokenizer(folder)
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    special = [ours.decode([i]) for i in range(128_000, 128_256)]
    converter = convert.TikTokenConverter(
        str(folder / "tokenizer.model"), extra_special_tokens=special
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(),
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
    )


def encode(encoder: ChatEncoder, *samples: Conversation | Text) -> list[EncodedSample]:
    encoded = encoder.encode_batch(samples)
    found = []
    for of_sample in encoded:
        assert isinstance(of_sample, list), of_sample
        found += of_sample
    return found


def one(encoder: ChatEncoder, messages: Sequence[Message], **more: Any) -> EncodedSample:
    [sample] = encode(encoder, Conversation(list(messages), **more))
    return sample


def assert_equal(sample: EncodedSample, ids: Sequence[int], trained: Sequence[int]) -> None:
    assert sample.ids.dtype == np.int64 and sample.trained.dtype == bool
    assert sample.ids.tolist() == list(ids)
    assert sample.trained.astype(int).tolist() == list(trained)


def by_hand(
    tokenizer: PretrainedTokenizer, segments: Sequence[tuple[str, int]]
) -> tuple[list[int], list[int]]:
    """Return ids and mask of separately tokenized segments, each trained (1) or not (0)."""
    ids, trained = [], []
    for text, is_trained in segments:
        [piece] = tokenizer.tokenize([text], allow_special=True)
        ids += piece
        trained += [is_trained] * len(piece)
    return ids, trained


def decoded(tokenizer: PretrainedTokenizer, sample: EncodedSample) -> str:
    return tokenizer.decode(sample.ids[sample.trained])


# Templates with generation marks, against transformers.


def theirs(
    reference: Any, template: str, messages: Sequence[Message], **more: Any
) -> tuple[list[int], list[int]]:
    result = reference.apply_chat_template(
        messages,
        chat_template=template,
        return_assistant_tokens_mask=True,
        return_dict=True,
        **more,
    )
    return result["input_ids"], result["assistant_masks"]


def test_masks_equal_transformers(qwen: Path) -> None:
    reference, tokenizer = reference_of(qwen), cached_tokenizer(qwen)
    encoder = ChatEncoder(tokenizer, ChatTemplate(MARKED), "assistant")
    encoder.check()
    for messages in map(unspaced, conversations()):
        expected = theirs(reference, MARKED, messages)
        assert_equal(one(encoder, messages), *expected)
        assert 1 in expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
@pytest.mark.parametrize(
    "folder", ["mistral-v0.3-tokenizer", "llama3-tokenizer", "stories260K/hf-converted"]
)
def test_built_in_templates_equal_transformers(
    name: str, folder: str, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for vocabularies without the tokens of the template, which `check` rejects."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    reference, tokenizer = reference_of(assets / folder), cached_tokenizer(assets / folder)
    template = resolve_chat_template(name, [], tokenizer)
    encoder = ChatEncoder(tokenizer, template, "assistant")
    for messages in map(unspaced, conversations(20)):
        ids, trained = theirs(reference, template.source, messages)
        samples = encode(encoder, Conversation(messages))
        end = Stops(template, tokenizer).all()[0].text
        [tokens_of_end] = tokenizer.tokenize([end], allow_special=True)
        # An end of several tokens may merge with the text after it. Inference would not continue
        # these tokens, so such turns are trained in samples of their own.
        if len(tokens_of_end) > 1:
            longest = max(samples, key=lambda sample: len(sample.ids))
            prompt = reference.apply_chat_template(
                messages[:-1],
                chat_template=template.source,
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            assert longest.ids[: len(prompt)].tolist() == prompt
            assert longest.trained[len(prompt) : -1].all()
            assert longest.ids[:-1].tolist() == ids[: len(longest.ids) - 1]
            continue
        [sample] = samples
        assert_equal(sample, ids, trained)
        if "bos_token" in BUILT_IN_TEMPLATES[name]:
            assert [i for i, token_id in enumerate(ids) if token_id == tokenizer.bos_id] == [0]
        assert decoded(tokenizer, sample).count(end) >= sum(
            turn["role"] == "assistant" for turn in messages
        )


def test_tools_in_a_marked_template(qwen: Path) -> None:
    reference, tokenizer = reference_of(qwen), cached_tokenizer(qwen)
    template = resolve_chat_template("chatml", [], tokenizer)
    sample = one(ChatEncoder(tokenizer, template, "assistant"), CALL, tools=[TOOL])
    assert_equal(sample, *theirs(reference, template.source, CALL, tools=[TOOL]))
    expected = (
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>It is 3.<|im_end|>'
    )
    assert decoded(tokenizer, sample) == expected


@pytest.mark.parametrize("family", ["qwen", "llama3-tokenizer"])
def test_end_of_turn_outside_the_marks_is_trained(
    family: str, qwen: Path, assets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end token is EOS (Qwen3) or the token after every turn (Llama 3)."""
    tokenizer = cached_tokenizer(qwen if family == "qwen" else assets / family)
    sources = [MARKED, OPEN]
    if family != "qwen":
        sources = [
            text.replace("<|im_start|>", "<|python_tag|>").replace("<|im_end|>", "<|eot_id|>")
            for text in sources
        ]
    closed, opened = (
        ChatEncoder(tokenizer, ChatTemplate(source), "assistant") for source in sources
    )
    opened.check()
    with caplog.at_level(logging.INFO, "torchtitan"):
        for messages in map(unspaced, conversations()):
            # An answer that contains the text of the token already has its end.
            messages = [
                {**turn, "content": turn["content"].replace("<|im_end|>", "x")} for turn in messages
            ]
            expected = one(closed, messages)
            assert_equal(
                one(opened, messages), expected.ids.tolist(), expected.trained.astype(int).tolist()
            )


def test_all_tokens_of_the_last_character_are_trained(qwen: Path) -> None:
    """transformers trains only the first one."""
    tokenizer = cached_tokenizer(qwen)
    messages = [user("a"), assistant("👩")]
    [face] = tokenizer.tokenize(["👩"], allow_special=False)
    sample = one(ChatEncoder(tokenizer, ChatTemplate(OPEN), "assistant"), messages)
    assert len(face) > 1 and sample.ids[sample.trained].tolist() == [*face, tokenizer.eos_id]


# Templates without marks, against masks by hand.


def chatml_by_hand(
    tokenizer: PretrainedTokenizer, messages: Sequence[Message], trained: Sequence[bool]
) -> tuple[list[int], list[int]]:
    segments = []
    for message, is_trained in zip(messages, trained, strict=True):
        header = f"<|im_start|>{message['role']}\n"
        # A row may enable training on a turn of another role, which includes the header.
        segments += [(header, is_trained and message["role"] != "assistant")]
        segments += [(message["content"], is_trained), ("<|im_end|>", is_trained), ("\n", False)]
    return by_hand(tokenizer, segments)


PLAIN = [system("Be kind."), user("Hi"), assistant("Good day 👩!"), user("More?"), assistant("No.")]


@pytest.mark.parametrize("source", [UNMARKED, MARKED])
@pytest.mark.parametrize(
    ("train_on", "flags", "expected"),
    [
        ("assistant", None, [0, 0, 1, 0, 1]),
        ("last_assistant", None, [0, 0, 0, 0, 1]),
        ("assistant", [None, None, False, None, None], [0, 0, 0, 0, 1]),
        ("assistant", [None, None, True, None, False], [0, 0, 1, 0, 0]),
        ("last_assistant", [None, None, True, None, None], [0, 0, 1, 0, 1]),
        ("assistant", [None, True, None, None, None], [0, 1, 1, 0, 1]),
        ("assistant", [False] * 5, [0] * 5),
    ],
)
def test_trained_turns(
    source: str, train_on: TrainOn, flags: list[bool | None] | None, expected: list[int], qwen: Path
) -> None:
    tokenizer = cached_tokenizer(qwen)
    encoder = ChatEncoder(tokenizer, ChatTemplate(source), train_on)
    sample = one(encoder, PLAIN, trained=flags or [])
    assert_equal(sample, *chatml_by_hand(tokenizer, PLAIN, [bool(x) for x in expected]))


def test_train_on_all_excludes_bos_and_disabled_turns(qwen: Path, assets: Path) -> None:
    tokenizer = cached_tokenizer(qwen)
    encoder = ChatEncoder(tokenizer, ChatTemplate(UNMARKED), "all")
    assert one(encoder, PLAIN).trained.all()
    left_out = one(encoder, PLAIN, trained=[None, None, None, False, None])
    assert (
        tokenizer.decode(left_out.ids[~left_out.trained]) == "<|im_start|>user\nMore?<|im_end|>\n"
    )
    mistral = cached_tokenizer(assets / "mistral-v0.3-tokenizer")
    own = resolve_chat_template("", [assets / "mistral-v0.3-tokenizer"], mistral)
    sample = one(ChatEncoder(mistral, own, "all"), PLAIN[1:])
    assert sample.trained.tolist() == [False] + [True] * (len(sample.ids) - 1)


def test_template_of_mistral(assets: Path) -> None:
    folder = assets / "mistral-v0.3-tokenizer"
    tokenizer, reference = cached_tokenizer(folder), reference_of(folder)
    template = resolve_chat_template("", [folder], tokenizer)
    assert not template.marks_generation
    encoder = ChatEncoder(tokenizer, template, "assistant")
    encoder.check()
    for messages in conversations():
        turns = [turn for turn in messages if turn["role"] != "system"]
        segments = [("<s>", 0)]
        for turn in turns:
            text = turn["content"]
            if turn["role"] == "user":
                segments += [("[INST]", 0), (f" {text}", 0), ("[/INST]", 0)]
            else:
                segments += [(f" {text.strip()}", 1), ("</s>", 1)]
        sample = one(encoder, turns)
        assert_equal(sample, *by_hand(tokenizer, segments))
        assert sample.ids.tolist() == reference.apply_chat_template(
            turns, chat_template=template.source, return_dict=False
        )


def test_tools_of_mistral(assets: Path) -> None:
    folder = assets / "mistral-v0.3-tokenizer"
    tokenizer = cached_tokenizer(folder)
    template = resolve_chat_template("", [folder], tokenizer)
    sample = one(ChatEncoder(tokenizer, template, "assistant"), CALL, tools=[TOOL])
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "abcdefghi"}]</s>'
    assert decoded(tokenizer, sample) == f"{call} It is 3.</s>"
    reference = reference_of(folder).apply_chat_template(
        CALL, tools=[TOOL], chat_template=template.source, return_dict=False
    )
    assert sample.ids.tolist() == reference


def test_template_error_breaks_one_sample_of_the_batch(qwen: Path) -> None:
    source = (
        UNMARKED + "{% if messages[0].content == 'x' %}{{ raise_exception('no x') }}{% endif %}"
    )
    encoder = ChatEncoder(cached_tokenizer(qwen), ChatTemplate(source, name="mine"), "assistant")
    bad, text, good = encoder.encode_batch(
        [Conversation([user("x")]), Text("Hi"), Conversation(PLAIN)]
    )
    assert isinstance(bad, BrokenSample) and str(bad) == "mine rejects this conversation: no x"
    assert isinstance(text, list) and isinstance(good, list)


def qwen_turns(reasoning: str = "") -> list[tuple[str, int]]:
    return [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
        (f"<think>\n{reasoning}\n</think>\n\nGood day 👩!<|im_end|>", 1),
    ]


def test_template_of_qwen3(qwen: Path) -> None:
    """It writes empty reasoning in the last answer only, so that each answer is a sample."""
    tokenizer, reference = cached_tokenizer(qwen), reference_of(qwen)
    template = resolve_chat_template("", [qwen], tokenizer)
    every, last = (
        ChatEncoder(tokenizer, template, train_on) for train_on in ("assistant", "last_assistant")
    )
    every.check()
    first, second = encode(every, Conversation(PLAIN[1:]))
    assert_equal(first, *by_hand(tokenizer, qwen_turns()))
    ids = reference.apply_chat_template(PLAIN[1:], chat_template=template.source, return_dict=False)
    assert second.ids.tolist() == ids == one(last, PLAIN[1:]).ids.tolist()
    assert decoded(tokenizer, second) == "<think>\n\n</think>\n\nNo.<|im_end|>"
    thoughtful = [user("Hi"), assistant("Good day 👩!", reasoning_content="Hm, yes.")]
    segments = [*qwen_turns("Hm, yes."), ("\n", 0)]  # the end of the whole conversation
    assert_equal(one(every, thoughtful), *by_hand(tokenizer, segments))


def test_moving_system_message(assets: Path) -> None:
    """Mistral v0.3's template writes the system message with the last question, and only until it
    is answered."""
    folder = assets / "mistral-v0.3-tokenizer"
    tokenizer, reference = cached_tokenizer(folder), reference_of(folder)
    template = resolve_chat_template("", [folder], tokenizer)
    samples = encode(ChatEncoder(tokenizer, template, "assistant"), Conversation(PLAIN))
    for sample, number, answer in zip(
        samples, (2, 4), (" Good day 👩!</s>", " No.</s>"), strict=True
    ):
        n_prompt = int(sample.trained.argmax())
        assert sample.ids[:n_prompt].tolist() == reference.apply_chat_template(
            PLAIN[:number], chat_template=template.source, return_dict=False
        )
        assert (
            tokenizer.decode(sample.ids[n_prompt:]) == answer.strip()
            or decoded(tokenizer, sample) == answer
        )


def test_prompt_and_answer_whose_tokens_would_merge(qwen: Path) -> None:
    """The prompt ends with a line break, and the answer begins with others; two of them are one
    token."""
    tokenizer = cached_tokenizer(qwen)
    messages = [user("Hi"), assistant("\n\nHo"), user("More"), assistant("No")]
    first, second = encode(
        ChatEncoder(tokenizer, ChatTemplate(UNMARKED), "assistant"), Conversation(messages)
    )
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert_equal(first, *by_hand(tokenizer, [(prompt, 0), ("\n\nHo<|im_end|>", 1)]))
    [whole] = tokenizer.tokenize([f"{prompt}\n\nHo<|im_end|>"], allow_special=True)
    assert whole != first.ids.tolist()
    assert decoded(tokenizer, second) == "No<|im_end|>"


def test_several_marks_in_a_turn(qwen: Path) -> None:
    source = MARKED.replace(
        "{%- generation %}", "{%- generation %}{% endgeneration %}{% generation %}"
    )
    tokenizer = cached_tokenizer(qwen)
    expected: list[tuple[TrainOn, list[bool]]] = [
        ("assistant", [False, False, True, False, True]),
        ("last_assistant", [False, False, False, False, True]),
    ]
    for train_on, trained in expected:
        sample = one(ChatEncoder(tokenizer, ChatTemplate(source), train_on), PLAIN)
        assert_equal(sample, *chatml_by_hand(tokenizer, PLAIN, trained))


MARKED_APART = """\
{%- for m in messages %}[{{ m.role }}]
    {%- if m.role != 'assistant' %}{{ m.content }}{% endif %}
    {%- if m.role == 'assistant' and m.content %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}
    {%- for f in m.tool_calls or [] %}{% generation %}{{ f.function.name }}<|im_end|>{% endgeneration %}{% endfor %}
{%- endfor %}"""


def test_marks_belong_to_their_turn(qwen: Path) -> None:
    """Of two turns, the first has two marks for its two calls, and the empty one has none."""
    tokenizer = cached_tokenizer(qwen)
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
    encoder = ChatEncoder(tokenizer, ChatTemplate(MARKED_APART), "last_assistant")
    twice = [user("Hi"), assistant("", tool_calls=calls), {"role": "tool", "content": "r"}]
    assert (
        decoded(tokenizer, one(encoder, [*twice, assistant("")], trained=[None, None, None, True]))
        == ""
    )
    assert (
        decoded(tokenizer, one(encoder, [*twice, assistant("a", tool_calls=calls)]))
        == "a<|im_end|>f<|im_end|>g<|im_end|>"
    )
    flags = [None, True, None, None]
    first = one(
        ChatEncoder(tokenizer, ChatTemplate(MARKED_APART), "last_assistant"),
        [*twice, assistant("")],
        trained=flags,
    )
    assert decoded(tokenizer, first) == "f<|im_end|>g<|im_end|>"


def test_marks_of_a_turn_without_its_reasoning(qwen: Path) -> None:
    """Qwen3's template for training writes only a part of an earlier turn."""
    source = MARKED.replace(
        "{{ message.content + ",
        "{{ '' if not loop.last else '<think>Hm</think>' }}{{ message.content + ",
    )
    tokenizer = cached_tokenizer(qwen)
    sample = one(ChatEncoder(tokenizer, ChatTemplate(source), "last_assistant"), PLAIN)
    assert decoded(tokenizer, sample) == "<think>Hm</think>No.<|im_end|>"


def test_empty_turn_needs_its_own_end_token(qwen: Path) -> None:
    """Inference stops at what the template writes after the last turn."""
    tokenizer = cached_tokenizer(qwen)
    source = OPEN.replace("{{ '<|im_end|>' }}", "{{ '<|im_end|>' if not loop.last else 'TAIL' }}")
    encoder = ChatEncoder(tokenizer, ChatTemplate(source, {"eos_token": "<|im_end|>"}), "assistant")
    samples = encode(encoder, Conversation([user("a"), assistant(""), user("b"), assistant("")]))
    assert [decoded(tokenizer, sample) for sample in samples] == ["TAIL", "TAIL"]


def test_each_prefix_of_a_conversation_is_rendered_once(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    template = ChatTemplate(UNMARKED)
    render = template.render_inputs

    def recorded(inputs: Sequence[Any], *, add_generation_prompt: bool, **more: Any) -> str:
        seen.append((len(inputs), add_generation_prompt))
        return render(inputs, add_generation_prompt=add_generation_prompt, **more)

    monkeypatch.setattr(template, "render_inputs", recorded)
    encoder = ChatEncoder(cached_tokenizer(qwen), template, "assistant")
    one(encoder, PLAIN)  # which finds the form of such turns
    seen.clear()
    one(encoder, PLAIN)
    assert sorted(seen) == [(2, True), (3, False), (4, True), (5, False)]


# Texts, prompts, pairs.


@pytest.mark.parametrize("name", ["gpt2-tokenizer", "mistral-v0.3-tokenizer", "llama3-tokenizer"])
def test_texts_are_trained_except_bos(name: str, assets: Path) -> None:
    tokenizer = cached_tokenizer(assets / name)
    encoder = ChatEncoder(tokenizer, None, "assistant")
    encoder.check()
    texts = ["Once upon a time", "<s>x</s> 👩"]
    for sample, ids in zip(
        encode(encoder, *map(Text, texts)), tokenizer.encode_documents(texts), strict=True
    ):
        assert_equal(
            sample, ids, [0 if tokenizer.adds_bos and i == 0 else 1 for i in range(len(ids))]
        )
        assert sample.ids[-1] == tokenizer.eos_id
    with pytest.raises(UserError, match="chat_template"):
        encoder.encode_batch([Conversation(PLAIN)])


def test_texts_and_conversations_keep_their_order(qwen: Path) -> None:
    encoder = ChatEncoder(cached_tokenizer(qwen), ChatTemplate(MARKED), "assistant")
    samples: list[Conversation | Text] = [
        Text("a"),
        Conversation(PLAIN),
        Text("b"),
        Conversation(CALL[:1]),
    ]
    apart = [encode(encoder, sample)[0] for sample in samples]
    for together, alone in zip(encode(encoder, *samples), apart, strict=True):
        assert_equal(together, alone.ids.tolist(), alone.trained.astype(int).tolist())
    assert encoder.encode_batch([]) == []


def test_prompt_ends_with_the_generation_prompt(qwen: Path) -> None:
    tokenizer, reference = cached_tokenizer(qwen), reference_of(qwen)
    template = resolve_chat_template("", [qwen], tokenizer)
    encoder = ChatEncoder(tokenizer, template, "assistant")
    with pytest.raises(BrokenSample, match="rejects this conversation"):
        encoder.encode_prompt(Conversation([]))
    ids = encoder.encode_prompt(Conversation(PLAIN[:2]))
    expected = reference.apply_chat_template(
        PLAIN[:2], chat_template=template.source, add_generation_prompt=True, return_dict=False
    )
    assert ids.dtype == np.int64 and ids.tolist() == expected


@pytest.mark.parametrize("source", [UNMARKED, MARKED])
@pytest.mark.parametrize("train_on", ["all", "last_assistant"])
def test_pairs(source: str, train_on: TrainOn, qwen: Path) -> None:
    tokenizer = cached_tokenizer(qwen)
    encoder = ChatEncoder(tokenizer, ChatTemplate(source), train_on)
    rejected = [assistant("Maybe."), user("Sure?"), assistant("Not.")]
    pair = encoder.encode_pair(Pair(Conversation(PLAIN[:4]), [assistant("No.")], rejected))
    assert_equal(pair[0], *chatml_by_hand(tokenizer, PLAIN, [False] * 4 + [True]))
    assert_equal(
        pair[1], *chatml_by_hand(tokenizer, PLAIN[:4] + rejected, [False] * 4 + [True, False, True])
    )
    broken = ChatEncoder(tokenizer, ChatTemplate("{{ raise_exception('never') }}"), train_on)
    with pytest.raises(BrokenSample, match="never"):
        broken.encode_pair(Pair(Conversation(PLAIN[:4]), [assistant("No.")], rejected))


# Special tokens.


def test_special_tokens_in_content_are_counted(qwen: Path) -> None:
    tokenizer = cached_tokenizer(qwen)
    encoder = ChatEncoder(tokenizer, ChatTemplate(MARKED), "assistant")
    messages = [
        user("a <|im_end|> <|im_start|>system"),
        assistant("<|im_ <think> <|endoftext|><|im_end|> <|"),
        user("<"),
    ]
    sample = one(encoder, messages)
    assert sample.n_special_in_text == 4
    # The template itself writes two special tokens per turn.
    assert int(np.isin(sample.ids, list(tokenizer.special_ids)).sum()) == 4 + 2 * len(messages)
    assert one(encoder, PLAIN).n_special_in_text == 0
    deep: list[Any] = ["<|im_end|>"]
    for _ in range(5000):
        deep = [deep]
    PLAIN_WITH_MORE = [{**PLAIN[0], "beside": deep}, *PLAIN[1:]]
    assert one(encoder, PLAIN_WITH_MORE).n_special_in_text == 1


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_tokens_missing_from_the_vocabulary_are_rejected(name: str, assets: Path) -> None:
    tokenizer = cached_tokenizer("")
    encoder = ChatEncoder(tokenizer, resolve_chat_template(name, [], tokenizer), "assistant")
    with pytest.raises(UserError, match="--tokenizer.added_tokens") as raised:
        encoder.check()
    first = {"chatml": "'<|im_end|>'", "llama3": "'<|eot_id|>'", "mistral": "'[/INST]'"}[name]
    assert first in str(raised.value) and "<|begin_of_text|>" not in str(raised.value)
    added = {
        "chatml": ["<|im_start|>", "<|im_end|>"],
        "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "mistral": ["[INST]", "[/INST]"],
    }
    extended = PretrainedTokenizer.Config(added_tokens=added[name]).build(path="")
    encoder = ChatEncoder(extended, resolve_chat_template(name, [], extended), "assistant")
    encoder.check()
    assert decoded(extended, one(encoder, PLAIN)).count("No.") == 1


def test_missing_tokens_of_the_models_own_template(
    qwen: Path, tmp_path: Path, assets: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model's template may write missing tokens as text if its turns end with a token (Zephyr); a
    file may not."""
    shutil.copy(assets / "stories260K/hf-converted/tokenizer.json", tmp_path)
    tokenizer = cached_tokenizer(tmp_path)
    zephyr = (
        "{% for m in messages %}<|{{ '|' }}user|>\n<|assistant|>\n{{ m.content }}</s>\n{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(zephyr)
    with caplog.at_level(logging.WARNING, "torchtitan"):
        ChatEncoder(
            tokenizer, resolve_chat_template("", [tmp_path], tokenizer), "assistant"
        ).check()
    assert "<|assistant|>" in caplog.text and "ordinary text" in caplog.text
    as_a_file = resolve_chat_template(str(tmp_path / "chat_template.jinja"), [tmp_path], tokenizer)
    with pytest.raises(UserError, match="assistant"):
        ChatEncoder(tokenizer, as_a_file, "assistant").check()
    shutil.copy(qwen / "tokenizer_config.json", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    own = resolve_chat_template(
        "", [tmp_path], cached_tokenizer(assets / "stories260K/hf-converted")
    )
    with pytest.raises(UserError, match="<|im_end|>"):
        ChatEncoder(tokenizer, own, "assistant").check()


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        (
            "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% "
            "endfor %}",
            "'<start_of_turn>' '<end_of_turn>'",
        ),
        (
            "{% for m in messages %}<｜User｜>{{ m.content }}<｜end▁of▁sentence｜>{% endfor %}",
            "'<｜User｜>' '<｜end▁of▁sentence｜>'",
        ),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }}<end>\n{% endfor %}", "'<end>'"),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
            "'[STOP]'",
        ),
    ],
)
def test_missing_tokens_in_other_notations_are_rejected(source: str, missing: str) -> None:
    """Tokens in the notations of Gemma and DeepSeek, and any text that a template file writes after
    an answer."""
    template = ChatTemplate(source, {"eos_token": "[STOP]"})
    with pytest.raises(UserError) as raised:
        ChatEncoder(cached_tokenizer(""), template, "assistant").check()
    assert str(raised.value).endswith(f"--tokenizer.added_tokens {missing}")
    added = [token.strip("'") for token in missing.split()]
    extended = PretrainedTokenizer.Config(added_tokens=added).build(path="")
    ChatEncoder(extended, template, "assistant").check()


def test_tags_before_the_end_of_a_turn_are_text(qwen: Path) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<answer>{{ m.content }}</answer><|im_end|>{% endfor %}"
    )
    ChatEncoder(cached_tokenizer(qwen), template, "assistant").check()


def test_template_without_end_token_warns(qwen: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", name="mine"
    )
    with caplog.at_level(logging.WARNING, "torchtitan"):
        ChatEncoder(cached_tokenizer(qwen), template, "assistant").check()
    assert "mine writes no special token after an answer" in caplog.text


def test_fingerprint_changes_with_ids_and_masks(qwen: Path, assets: Path) -> None:
    tokenizer = cached_tokenizer(qwen)
    encoders: list[Callable[[], ChatEncoder]] = [
        lambda: ChatEncoder(tokenizer, ChatTemplate(MARKED), "assistant"),
        lambda: ChatEncoder(tokenizer, ChatTemplate(MARKED), "all"),
        lambda: ChatEncoder(tokenizer, ChatTemplate(MARKED + "x"), "assistant"),
        lambda: ChatEncoder(tokenizer, ChatTemplate(MARKED, {"bos_token": "x"}), "assistant"),
        lambda: ChatEncoder(
            cached_tokenizer(assets / "gpt2-tokenizer"), ChatTemplate(MARKED), "assistant"
        ),
        lambda: ChatEncoder(tokenizer, None, "assistant"),
    ]
    assert len({encoder().fingerprint for encoder in encoders}) == len(encoders)
    assert all(encoder().fingerprint == encoder().fingerprint for encoder in encoders)


def test_real_rows(assets: Path) -> None:
    """OpenAI's example, and a row without a question."""
    tokenizer = PretrainedTokenizer.Config(added_tokens=["<|im_start|>", "<|im_end|>"]).build(
        path=""
    )
    encoder = ChatEncoder(tokenizer, resolve_chat_template("chatml", [], tokenizer), "assistant")
    lines = (assets / "sft" / "toy_chat_fine_tuning.jsonl").read_text().splitlines()
    rows = [json.loads(line)["messages"] for line in lines]
    for row, sample in zip(rows, encode(encoder, *(normalize(row) for row in rows)), strict=True):
        answers = [
            message["content"] + "<|im_end|>" for message in row if message["role"] == "assistant"
        ]
        assert decoded(tokenizer, sample) == "".join(answers)


def test_template_with_the_current_date_warns(caplog: pytest.LogCaptureFixture) -> None:
    """All texts get the same date, so that a conversation and its prefixes agree; a warning
    mentions it."""
    tokenizer = PretrainedTokenizer.Config().build()
    template = ChatTemplate(
        "{{ strftime_now('%S.%f') }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    texts = {template.render([user("q")], add_generation_prompt=False) for _ in range(20)}
    assert len(texts) == 1
    with caplog.at_level(logging.WARNING, "torchtitan"):
        ChatEncoder(tokenizer, template, "assistant").check()
    assert "writes the current date (strftime_now)" in caplog.text
