"""Trained turns of published templates, against inference simulated by transformers' own rendering,
turn by turn."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest

from tests.components.chat_template.generic import generic_tokenizer, published
from tests.components.chat_template.helpers import Message, assistant, user
from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.data.finetuning.chat_encoding import ChatEncoder
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    LossySample,
    Pair,
    Prompt,
    Sample,
    Text,
    normalize,
)
from torchtitan.components.data.finetuning.encoded import EncodedSample
from torchtitan.components.data.finetuning.filters import Dropped, FilterConfig
from torchtitan.components.data.finetuning.sample_texts import TrainOn
from torchtitan.components.data.finetuning.sft import ConversationEncoder, SFTDataLoader
from torchtitan.components.data.plan import ShuffleSampler
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.weights.assets import chat_assets

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "A number."},
                "b": {"type": "string", "description": "A unit."},
            },
            "required": ["a", "b"],
        },
    },
}


def call(number: int, id: str = "abcdefghi") -> dict[str, Any]:
    return {
        "id": id,
        "type": "function",
        "function": {"name": "add", "arguments": {"a": number, "b": "miles"}},
    }


def result(text: str, id: str = "abcdefghi") -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": id, "content": text}


SYSTEM = {"role": "system", "content": "Be kind."}
TWO_CALLS = [call(15, "abcdefgh1"), call(17, "abcdefgh2")]
THOUGHT, SECOND = {"reasoning_content": "Hm, think."}, {"reasoning_content": "Hm, again."}

SHAPES: dict[str, list[Message]] = {
    "one turn": [user("Hi"), assistant("Ho!")],
    "turns": [
        user("Hi"),
        assistant("Ho!"),
        user("More"),
        assistant("No."),
        user("Why"),
        assistant("So."),
    ],
    "system": [SYSTEM, user("Hi"), assistant("Ho!"), user("More"), assistant("No.")],
    "developer": [{"role": "developer", "content": "Be kind."}, user("Hi"), assistant("Ho!")],
    "reasoning": [
        user("Hi"),
        assistant("Ho!", **THOUGHT),
        user("More"),
        assistant("No.", **SECOND),
    ],
    "reasoning at the end": [
        user("Hi"),
        assistant("Ho!"),
        user("More"),
        assistant("No.", **SECOND),
    ],
    "reasoning inside": [user("Hi"), assistant("<think>\nHm, think.\n</think>\n\nHo!")],
    "call": [
        user("Hi"),
        assistant("", tool_calls=[call(15)]),
        result("r1"),
        assistant("It is 15."),
    ],
    "call, null": [
        user("Hi"),
        assistant(None, tool_calls=[call(15)]),
        result("r1"),
        assistant("It is 15."),
    ],
    "call, text": [
        user("Hi"),
        assistant("Wait.", tool_calls=[call(15)]),
        result("r1"),
        assistant("It is 15."),
    ],
    "call, reasoning": [
        user("Hi"),
        assistant("", tool_calls=[call(15)], **THOUGHT),
        result("r1"),
        assistant("It is 15.", **SECOND),
    ],
    "calls": [
        user("Hi"),
        assistant("", tool_calls=TWO_CALLS),
        result("r1", "abcdefgh1"),
        result("r2", "abcdefgh2"),
        assistant("It is 15."),
    ],
    "calls, other order": [
        user("Hi"),
        assistant("", tool_calls=TWO_CALLS),
        result("r2", "abcdefgh2"),
        result("r1", "abcdefgh1"),
        assistant("It is 15."),
    ],
    "empty answer": [user("Hi"), assistant(""), user("More"), assistant("No.")],
    "unanswered": [user("Hi"), assistant("Ho!"), user("More")],
    "two answers": [user("Hi"), assistant("Ho!"), assistant("No."), user("More"), assistant("So.")],
    "names": [
        {**user("Hi"), "name": "Ann"},
        assistant("Ho!"),
        {**user("More"), "name": "Bob"},
        assistant("No."),
    ],
}

IM_END = {"<|im_end|>"}
STOPS: dict[str, set[str]] = {
    "Apriel-1.6-15b-Thinker-fixed": {"<|end|>"},
    "Cohere2MoE": {"<|END_OF_TURN_TOKEN|>"},
    "CohereForAI-c4ai-command-r-plus-tool_use": {"<|END_OF_TURN_TOKEN|>"},
    "GLM-4.6": {"<|user|>", "<|observation|>"},
    "HuggingFaceTB-SmolLM3-3B": IM_END,
    "Kimi-K2-Instruct": IM_END,
    "Kimi-K2-Thinking": IM_END,
    "LFM2-8B-A1B": IM_END,
    "LFM2.5-8B-A1B": IM_END,
    "MiniMax-M2": {"[e~["},
    "Mistral-Small-3.2-24B-Instruct-2506": {"</s>"},
    "NVIDIA-Nemotron-Nano-v2": {"<SPECIAL_12>"},
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": IM_END,
    "Qwen-Qwen2.5-7B-Instruct": IM_END,
    "Qwen-Qwen3-0.6B": IM_END,
    "Qwen3.5-4B": IM_END,
    "StepFun3.5-Flash": IM_END,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": {
        "<｜end▁of▁sentence｜>",
        "<｜tool▁outputs▁begin｜>",
    },
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {"<｜end▁of▁sentence｜>"},
    "deepseek-ai-DeepSeek-V3.1": {"<｜end▁of▁sentence｜>"},
    "google-gemma-2-2b-it": {"<end_of_turn>"},
    "google-gemma-4-31B-it": {"<turn|>", "<|tool_response>"},
    "ibm-granite-granite-3.3-2B-Instruct": {"<|end_of_text|>"},
    "ibm-granite-granite-4.0": {"<|end_of_text|>"},
    "llama-cpp-deepseek-r1": {"<｜end▁of▁sentence｜>"},
    "meetkai-functionary-medium-v3.1": {"<|eot_id|>", "<|eom_id|>"},
    "meta-llama-Llama-3.1-8B-Instruct": {"<|eot_id|>"},
    "meta-llama-Llama-3.2-3B-Instruct": {"<|eot_id|>"},
    "microsoft-Phi-3.5-mini-instruct": {"<|end|>"},
    "mistralai-Mistral-Nemo-Instruct-2407": {"</s>"},
    "moonshotai-Kimi-K2": IM_END,
    "openai-gpt-oss-120b": {"<|return|>", "<|call|>"},
    "poolside-Laguna-S-2.1": {"</assistant>"},
    "unsloth-Apriel-1.5": {"</s>"},
    **dict.fromkeys(("TRL's cohere", "TRL's cohere2"), {"<|END_OF_TURN_TOKEN|>"}),
    "TRL's deepseekv3": {"<｜end▁of▁sentence｜>"},
    "TRL's gemma3": {"<end_of_turn>"},
    "TRL's glm4moe": {"<|user|>", "<|observation|>"},
    "TRL's llama3": {"<|eot_id|>"},
    **dict.fromkeys(("TRL's lfm2_v2", "TRL's lfm2_2_5_v2"), IM_END),
    **dict.fromkeys(
        ("TRL's nemotron_3_nano", "TRL's nemotron_3_super", "TRL's nemotron_3_ultra"), IM_END
    ),
    **dict.fromkeys(
        ("TRL's qwen3_5_nothink", "TRL's qwen3_8", "TRL's qwen3_instruct_2507"), IM_END
    ),
    **{
        "qwen3": IM_END,
        "phi-3": {"<|end|>"},
        "phi-3.5": {"<|end|>"},
        "gpt-oss": {"<|return|>", "<|call|>"},
    },
    **{"chatml": IM_END, "llama3": {"<|eot_id|>"}, "mistral": {"</s>"}, "alpaca": {"</s>"}},
}
"""Template → the tokens at which its model stops, from the models' cards. (RWKV's template has no
tokens.)"""

QUICK = (
    "GLM-4.6",
    "Qwen3.5-4B",
    "openai-gpt-oss-120b",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "qwen3",
    "phi-3",
    *BUILT_IN_TEMPLATES,
)

WITHOUT_CALLS = (
    *(
        "HuggingFaceTB-SmolLM3-3B",
        "LFM2-8B-A1B",
        "google-gemma-2-2b-it",
        "ibm-granite-granite-3.3-2B-Instruct",
    ),
    "microsoft-Phi-3.5-mini-instruct",
)
"""Templates that leave out `tool_calls`."""

WITH_TOOLS_ONLY = (
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
)

PLAIN = (
    "one turn",
    "turns",
    "system",
    "developer",
    "empty answer",
    "unanswered",
    "two answers",
    "names",
)
WITH_CALL = ("call", "call, null", "call, text", "call, reasoning", "calls", "calls, other order")
TWO_CALLS_SHAPES = ("calls", "calls, other order")
OF_REASONING = ("reasoning", "reasoning at the end", "reasoning inside")

REFUSED: dict[str, dict[str, str]] = {
    **dict.fromkeys(WITH_TOOLS_ONLY, dict.fromkeys((*PLAIN, *OF_REASONING), "failed.*NoneType")),
    # llama.cpp's adapted templates change lists; moonshotai-Kimi-K2 is the model's own.
    **dict.fromkeys(
        ("Kimi-K2-Instruct", "Kimi-K2-Thinking"),
        dict.fromkeys(WITH_CALL, "the sandbox for templates forbids here and in transformers"),
    ),
    # The calls are a turn, and the text is the next one.
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": {
        "call, text": "with a stop, '<｜end▁of▁sentence｜>', inside"
    },
    "google-gemma-2-2b-it": {
        "system": "rejects .*System role not supported",
        "developer": "rejects .*must alternate",
        "two answers": "rejects .*must alternate",
    },
    **dict.fromkeys(
        ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"),
        dict.fromkeys(TWO_CALLS_SHAPES, "rejects .*only supports single tool-calls"),
    ),
    **dict.fromkeys(
        ("TRL's cohere", "TRL's cohere2", "TRL's gemma3"),
        {"two answers": "rejects .*must alternate"},
    ),
    **dict.fromkeys(
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"),
        {"two answers": "rejects .*must alternate"},
    ),
    **dict.fromkeys(
        ("llama3", "mistral", "alpaca"), dict.fromkeys(WITH_CALL, "rejects .*no form for tools")
    ),
}
"""Template → conversations that it refuses for another reason than the loss of a part, with the
reason."""

TEMPLATES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in STOPS]


@pytest.fixture
def templates(assets: Path) -> Path:
    return assets / "templates"


def encoded(
    template: ChatTemplate, tokenizer: PretrainedTokenizer, messages: Sequence[Message], **more: Any
) -> list[EncodedSample] | BrokenSample:
    has_calls = any(message.get("tool_calls") for message in messages)
    train_on: TrainOn = more.pop("train_on", "assistant")
    encoder = ChatEncoder(tokenizer, template, train_on, more.pop("accepted", ()))
    [samples] = encoder.encode_batch(
        [normalize(messages, [TOOL] if has_calls else None, more.pop("options", None))]
    )
    return samples


def turns_of(sample: EncodedSample, tokenizer: PretrainedTokenizer) -> Iterator[tuple[str, str]]:
    """Yield the prompt and the text of each trained turn."""
    position = 0
    for trained, tokens in groupby(sample.trained.tolist()):
        n = len(list(tokens))
        if trained:
            ids = sample.ids.tolist()
            yield tokenizer.decode(ids[:position]), tokenizer.decode(ids[position : position + n])
        position += n


def inference_prompts(
    template: ChatTemplate, messages: Sequence[Message], tools: Any, *, finished: bool = False
) -> set[str]:
    """Return what inference may see before a turn, with reasoning on, off or by default, or after
    finished turns."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    prompts = set()
    options: list[dict[str, Any]] = [{}]
    options += [
        {name: value} for name in ("enable_thinking", "reasoning") for value in (True, False)
    ]
    for chosen in options:
        for system in ("developer", "system"):
            renamed = [{**m, "role": system} if m["role"] == "developer" else m for m in messages]
            # Calls without text have none of three contents, and arguments of two types.
            for content, as_text in product(("", None, ...), (False, True)):
                chat = [with_content(message, content, as_text) for message in renamed]
                try:
                    [text], _ = utils.render_jinja_template(
                        [chat], tools, chat_template=template.source,
                        add_generation_prompt=not finished, **{**template.variables, **chosen},
                    )  # fmt: skip
                    prompts.add(text)
                except Exception:  # noqa: S112 - a template may reject a form
                    continue
    return prompts


def with_content(message: Message, content: Any, as_text: bool) -> Message:
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return message
    if as_text:
        functions = [each["function"] for each in message["tool_calls"]]
        texts = [
            {**function, "arguments": json.dumps(function["arguments"])} for function in functions
        ]
        calls = [
            {**each, "function": text}
            for each, text in zip(message["tool_calls"], texts, strict=True)
        ]
        message = {**message, "tool_calls": calls}
    if message.get("content"):
        return message
    others = {key: value for key, value in message.items() if key != "content"}
    return others if content is ... else {**others, "content": content}


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_what_inference_needs(
    name: str, templates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template, tokenizer = published(name, templates)
    checked = 0
    refused = {}
    for shape, messages in SHAPES.items():
        samples = encoded(template, tokenizer, messages)
        if isinstance(samples, LossySample):
            assert is_lost(template, messages, samples), (shape, samples)
            continue
        if isinstance(samples, BrokenSample):
            refused[shape] = str(samples)
            continue
        tools = [TOOL] if any(message.get("tool_calls") for message in messages) else None
        turns = [turn for sample in samples for turn in turns_of(sample, tokenizer)]
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if shape == "two answers" and len(turns) < len(numbers):
            # The next turn has no prompt, or begins where the first one ends, in the same sample.
            continue
        assert len(turns) == len(numbers), shape
        for number, (prompt, text) in zip(numbers, turns, strict=True):
            message = messages[number]
            inline = "<think>" in (message["content"] or "")
            prompts = inference_prompts(template, messages[:number], tools)
            if prompts and not inline:  # transformers fails for some
                assert prompt in prompts, (shape, prompt[-80:])
            ends = [stop for stop in STOPS[name] if text.endswith(stop)]
            assert ends, (shape, text)
            assert not any(stop in text.removesuffix(ends[0]) for stop in STOPS[name]), (
                shape,
                text,
            )
            content = (message["content"] or "").rpartition("</think>")[2].strip()
            reasoning = "Hm, think." if inline else message.get("reasoning_content", "")
            assert content in text and reasoning in text, (shape, text)
            assert not reasoning or not content or text.index(reasoning) < text.index(content), (
                shape
            )
            if prompt.rstrip().endswith("<think>"):
                assert [text.partition("</think>")[0].strip(), text.count("</think>")] == [
                    reasoning,
                    1,
                ], (shape, text)
            for each in message.get("tool_calls") or []:
                assert (
                    "add" in text
                    and str(each["function"]["arguments"]["a"]) in text
                    and "miles" in text
                ), shape
            checked += 1
    assert checked >= (2 if name in WITH_TOOLS_ONLY else 7)
    expected = REFUSED.get(name, {})
    assert refused.keys() == expected.keys()
    assert all(re.search(reason, refused[shape]) for shape, reason in expected.items()), refused


def is_lost(template: ChatTemplate, messages: Sequence[Message], lossy: LossySample) -> bool:
    """Return whether no rendering by transformers contains the part that is lost."""
    found = re.search(r"leaves out the (\w+) of message (\d+)", str(lossy))
    assert found, lossy
    part, number = found[1], int(found[2])
    message = messages[number - 1]
    tools = [TOOL] if any(m.get("tool_calls") for m in messages) else None
    texts = {
        "reasoning": [message.get("reasoning_content")],
        "content": [message["content"]],
        "tools": [
            str(each["function"]["arguments"]["a"]) for each in message.get("tool_calls") or []
        ],
    }
    whole = inference_prompts(template, messages[:number], tools)
    return not any(all(text in rendering for text in texts[part]) for rendering in whole)


@pytest.mark.parametrize("name", TEMPLATES)
def test_stops(name: str, templates: Path) -> None:
    template, tokenizer = published(name, templates)
    stops = Stops(template, tokenizer)
    assert {stop.text for stop in stops.all()} == STOPS[name]
    assert [tokenizer.decode([token_id]) for token_id in stops.ids()] == [
        stop.text for stop in stops.all()
    ]
    assert stops.texts() == []


def test_text_that_ends_a_turn_without_tokens(templates: Path) -> None:
    template, tokenizer = published("llama-cpp-rwkv-world", templates)
    assert (
        Stops(template, tokenizer).texts() == ["\n\nUser:"]
        and Stops(template, tokenizer).ids() == []
    )


@pytest.mark.parametrize("name", [*WITHOUT_CALLS, "openai-gpt-oss-120b"])
def test_lost_calls_are_dropped(name: str, templates: Path) -> None:
    """gpt-oss's template writes the first of two calls."""
    template, tokenizer = published(name, templates)
    messages = SHAPES["calls"][:2]
    lossy = encoded(template, tokenizer, messages)
    assert isinstance(lossy, LossySample) and lossy.reason == "on_loss_of_tools"
    assert f"{name} leaves out the tools of message 2 (assistant)" in str(lossy)
    accepted = encoded(template, tokenizer, messages, accepted=["tools"])
    assert isinstance(accepted, list) and "tools" in accepted[0].facts.lost


def test_lost_reasoning_is_dropped_or_left_out(templates: Path) -> None:
    template, tokenizer = published("chatml", templates)
    lossy = encoded(template, tokenizer, SHAPES["reasoning"])
    assert isinstance(lossy, LossySample) and lossy.reason == "on_loss_of_reasoning"
    [sample] = encoded(template, tokenizer, SHAPES["reasoning"], accepted=["reasoning"])
    assert [text for _, text in turns_of(sample, tokenizer)] == ["Ho!<|im_end|>", "No.<|im_end|>"]
    assert sample.facts.lost == ("reasoning",)
    # Reasoning that the row itself writes as text is not lost.
    [sample] = encoded(template, tokenizer, SHAPES["reasoning inside"])
    assert [text for _, text in turns_of(sample, tokenizer)] == [
        "<think>\nHm, think.\n</think>\n\nHo!<|im_end|>"
    ]


def test_opened_reasoning_is_closed_once(templates: Path) -> None:
    """DeepSeek V3.1 writes `</think>` before the content of a call, after a prompt that ends with
    `<think>`."""
    template, tokenizer = published("deepseek-ai-DeepSeek-V3.1", templates)
    samples = encoded(template, tokenizer, SHAPES["call, reasoning"])
    assert isinstance(samples, list)
    prompt, text = next(turns_of(samples[0], tokenizer))
    assert prompt.endswith("<think>") and text.startswith(
        "Hm, think.</think><｜tool▁calls▁begin｜>"
    )


CLOSED = "\n</think>\n\n"


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (
            "call, text",
            'Wait.\n<TOOLCALL>[{"name": "add", "arguments": {"a": 15, "b": "miles"}}]</TOOLCALL>\n',
        ),
        ("empty answer", "\n"),
    ],
)
def test_turns_that_only_earlier_ones_show(shape: str, text: str, templates: Path) -> None:
    """Nemotron Nano v2 leaves out a last message that is empty, and writes a last call with text as
    two messages."""
    template, tokenizer = published("NVIDIA-Nemotron-Nano-v2", templates)
    samples = encoded(template, tokenizer, SHAPES[shape])
    assert isinstance(samples, list)
    prompt, completion = next(turns_of(samples[0], tokenizer))
    assert (
        prompt.endswith("<SPECIAL_11>Assistant\n<think>\n")
        and completion == f"{CLOSED}{text}<SPECIAL_12>"
    )
    # The next prompt has the same turn, without reasoning.
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    [following], _ = utils.render_jinja_template(
        [SHAPES[shape][:3]], [TOOL], chat_template=template.source, add_generation_prompt=True
    )
    assert f"<SPECIAL_11>Assistant\n{text}<SPECIAL_12>" in following


def test_first_messages_of_the_assistant(templates: Path) -> None:
    """Apriel's template writes a system prompt before a first message, but not in the prompt for
    one."""
    messages = [assistant("Welcome!"), user("Hi"), assistant("Ho!")]
    reasons = {
        "Apriel-1.6-15b-Thinker-fixed": "text before it that no prompt has, '<s><.begin_system.>",
        "qwen3": r"message 1 \(assistant\) has no prompt, as the template needs a message before "
        r"it",
    }
    for name, reason in reasons.items():
        template, tokenizer = published(name, templates)
        wanted = [{**messages[0], "weight": 1}, *messages[1:]]
        for rows in (wanted, messages[:1], messages[:2]):
            refused = encoded(template, tokenizer, rows)
            assert isinstance(refused, BrokenSample) and re.search(reason, str(refused))
        unwanted = [{**messages[0], "weight": 0}, *messages[1:]]
        for rows, n_told in ((messages, 1), (unwanted, 0)):
            [sample] = encoded(template, tokenizer, rows)
            [(prompt, text)] = turns_of(sample, tokenizer)
            assert "Welcome!" in prompt and "Ho!" in text and "Welcome!" not in text
            assert len(sample.facts.unprompted) == n_told
            assert all(re.search(reason, told) for told in sample.facts.unprompted)
    for name in ("GLM-4.6", "chatml"):
        template, tokenizer = published(name, templates)
        [sample] = encoded(template, tokenizer, messages)
        assert [text.strip().partition("<|")[0] for _, text in turns_of(sample, tokenizer)] == [
            {"GLM-4.6": "<think></think>\n", "chatml": ""}[name] + text
            for text in ("Welcome!", "Ho!")
        ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NVIDIA-Nemotron-Nano-v2", "the generation prompt of .* continues message 2"),
        ("Apriel-1.6-15b-Thinker-fixed", "message 3 .* inside"),
    ],
)
def test_turns_without_a_prompt_are_left_out(name: str, reason: str, templates: Path) -> None:
    """The generation prompt continues a last answer, so none begins an answer after it."""
    template, tokenizer = published(name, templates)
    messages = SHAPES["two answers"]
    samples = encoded(template, tokenizer, messages)
    assert isinstance(samples, list)
    turns = [turn for sample in samples for turn in turns_of(sample, tokenizer)]
    ends = {"NVIDIA-Nemotron-Nano-v2": "\n<SPECIAL_12>"}
    end = ends.get(name, "\n<|end|>")
    assert [text.strip().rpartition("\n\n")[2] for _, text in turns] == [f"Ho!{end}", f"So.{end}"]
    assert "No." in turns[1][0]
    [told] = [told for sample in samples for told in sample.facts.unprompted]
    assert re.search(reason, told)
    wanted = [*messages[:2], {**messages[2], "weight": 1}, *messages[3:]]
    for rows, train_on in ((wanted, "assistant"), (messages[:3], "last_assistant")):
        refused = encoded(template, tokenizer, rows, train_on=train_on)
        assert isinstance(refused, BrokenSample) and re.search(reason, str(refused))


@pytest.mark.parametrize("shape", ["call", "call, null", "call, text", "calls"])
def test_instructions_after_the_conversation_are_not_trained(shape: str, templates: Path) -> None:
    """Command R+ writes an instruction after the last message, with and without the generation
    prompt. Its calls have no end of their own, so that inference stops at the end of an answer."""
    template, tokenizer = published("CohereForAI-c4ai-command-r-plus-tool_use", templates)
    samples = encoded(template, tokenizer, SHAPES[shape])
    assert isinstance(samples, list)
    turns = [turn for sample in samples for turn in turns_of(sample, tokenizer)]
    prompts, texts = zip(*turns, strict=True)
    assert texts[1] == "It is 15.<|END_OF_TURN_TOKEN|>"
    assert all("Write 'Action:'" in prompt.rpartition("<|SYSTEM_TOKEN|>")[2] for prompt in prompts)
    # The next prompt has the call.
    call_text = texts[0].removesuffix("<|END_OF_TURN_TOKEN|>")
    assert f"<|CHATBOT_TOKEN|>{call_text}<|START_OF_TURN_TOKEN|>" in prompts[1]
    assert call_text.count('"tool_name": "add"') == len(SHAPES[shape][1]["tool_calls"])


def test_calls_after_a_system_prompt_that_moves(templates: Path) -> None:
    """Mistral Nemo writes the system prompt in the last message if it is a question, so that it is
    in the prompt and in no finished call."""
    template, tokenizer = published("mistralai-Mistral-Nemo-Instruct-2407", templates)
    messages = [SYSTEM, *SHAPES["call"], user("More"), *SHAPES["calls"][1:]]
    samples = encoded(template, tokenizer, messages)
    assert isinstance(samples, list)
    turns = [turn for sample in samples for turn in turns_of(sample, tokenizer)]
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for number, (prompt, text) in zip(numbers, sorted(turns, key=lambda t: len(t[0])), strict=True):
        assert prompt in inference_prompts(template, messages[:number], [TOOL])
        assert ("Be kind." in prompt) == (messages[number - 1]["role"] == "user")
        calls = messages[number].get("tool_calls", [])
        assert text.startswith("[TOOL_CALLS]" if calls else "It is 15.") and text.endswith("</s>")
        assert text.count('"name": "add"') == len(calls) and "Be kind." not in text


ROUNDS = [
    *[user("Hi"), assistant("", tool_calls=[call(15)]), result("r1"), assistant("It is 15.")],
    *[user("More"), assistant("", tool_calls=[call(17, "abcdefgh2")]), result("r2", "abcdefgh2")],
    assistant("It is 17."),
]


@pytest.mark.parametrize("thought", [{}, THOUGHT])
def test_later_calls_begin_like_the_first_ones(thought: Message, templates: Path) -> None:
    """DeepSeek R1's templates remember in all of a conversation that calls have begun, so that
    later ones lack their beginning. Others write both alike."""
    messages = [{**m, **thought} if m["role"] == "assistant" else m for m in ROUNDS]
    template, tokenizer = published("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", templates)
    refused = encoded(template, tokenizer, messages)
    assert isinstance(refused, BrokenSample)
    assert re.search("message 6 .* with calls without '<｜tool▁calls▁begin｜>'", str(refused))
    assert isinstance(encoded(template, tokenizer, messages[:4]), list)
    for name in ("deepseek-ai-DeepSeek-V3.1", "qwen3", "GLM-4.6"):
        template, tokenizer = published(name, templates)
        samples = encoded(template, tokenizer, messages)
        assert isinstance(samples, list)
        texts = [text for sample in samples for _, text in turns_of(sample, tokenizer)]
        first, later = texts[0], texts[2]
        assert first.replace("15", "17") == later


def test_reasoning_that_a_row_switches_off_is_not_closed(templates: Path) -> None:
    """Nemotron Nano v2 reads the switch from the text, and then closes the reasoning in its
    prompt; otherwise the model must close what the prompt opens."""
    template, tokenizer = published("NVIDIA-Nemotron-Nano-v2", templates)
    switch = {"role": "system", "content": "Be kind. /no_think"}
    for before, end, begin in ([switch], "<think></think>", ""), ([], "<think>\n", CLOSED):
        samples = encoded(template, tokenizer, [*before, *SHAPES["turns"]])
        assert isinstance(samples, list)
        turns = [turn for sample in samples for turn in turns_of(sample, tokenizer)]
        assert all(prompt.endswith(f"Assistant\n{end}") for prompt, _ in turns)
        assert [text for _, text in turns] == [
            f"{begin}{answer}\n<SPECIAL_12>" for answer in ("Ho!", "No.", "So.")
        ]


def test_refusals_give_the_words_of_the_template(templates: Path) -> None:
    """In other forms, no turn of gpt-oss has its reasoning, its text and its call."""
    template, tokenizer = published("openai-gpt-oss-120b", templates)
    both = assistant("Wait.", tool_calls=[call(15)], **THOUGHT)
    refused = encoded(template, tokenizer, [user("Hi"), both])
    assert isinstance(refused, BrokenSample)
    assert "rejects this conversation: Cannot pass both content and thinking" in str(refused)


@pytest.mark.parametrize("name", ["GLM-4.6", "qwen3", "deepseek-ai-DeepSeek-V3.1", "Cohere2MoE"])
def test_reasoning_with_its_own_closing_tag(name: str, templates: Path) -> None:
    """A model cannot write the tag inside its reasoning, since the reasoning ends there."""
    template, tokenizer = published(name, templates)
    closing = "<|END_THINKING|>" if name == "Cohere2MoE" else "</think>"
    messages = [user("Hi"), assistant("Ho!", reasoning_content=f"Hm, {closing} ends it.")]
    lossy = encoded(template, tokenizer, messages, accepted=["reasoning"])
    assert isinstance(lossy, LossySample) and lossy.reason == "tag_in_reasoning"
    policies = FilterConfig(on_loss_of_reasoning="train", broken="error")
    assert policies.apply(lossy) == Dropped("tag_in_reasoning", str(lossy))
    assert f"the reasoning of message 2 (assistant) contains '{closing}'" in str(lossy)


def test_reasoning_with_the_closing_tag_of_others(templates: Path) -> None:
    template, tokenizer = published("openai-gpt-oss-120b", templates)
    messages = [user("Hi"), assistant("Ho!", reasoning_content="Hm, </think> ends it.")]
    [sample] = encoded(template, tokenizer, messages)
    [(_, text)] = turns_of(sample, tokenizer)
    assert "<|message|>Hm, </think> ends it.<|end|>" in text


def test_forms_with_faults_are_not_used(templates: Path) -> None:
    """A text that all forms without faults lose is not written as code."""
    template, tokenizer = published("llama-cpp-rwkv-world", templates)
    messages = [user("Hi"), assistant("Use </think> here.", **THOUGHT)]
    lossy = encoded(template, tokenizer, messages)
    assert isinstance(lossy, LossySample) and lossy.reason == "on_loss_of_content"


@pytest.mark.parametrize(
    "name", ["Qwen3.5-4B", "GLM-4.6", "Cohere2MoE", "openai-gpt-oss-120b", "chatml"]
)
def test_turns_of_nothing_but_a_stop_are_counted(name: str, templates: Path) -> None:
    """The markup of an empty answer teaches nothing else."""
    template, tokenizer = published(name, templates)
    samples = encoded(template, tokenizer, SHAPES["empty answer"])
    assert isinstance(samples, list)
    assert sum(sample.facts.n_only_stops for sample in samples) == 1


def test_rows_set_options(templates: Path) -> None:
    template, tokenizer = published("Qwen3.5-4B", templates)
    expected = {
        None: ("<think>\n\n</think>\n\n", "Ho!<|im_end|>"),
        True: ("<think>\n", "\n</think>\n\nHo!<|im_end|>"),
        False: ("<think>\n\n</think>\n\n", "Ho!<|im_end|>"),
    }
    for thinking, (end, text) in expected.items():
        options = None if thinking is None else {"enable_thinking": thinking}
        [sample] = encoded(template, tokenizer, SHAPES["one turn"], options=options)
        [(prompt, trained)] = turns_of(sample, tokenizer)
        assert prompt.endswith(f"<|im_start|>assistant\n{end}") and trained == text
        shown = "enable_thinking=True" if thinking else "enable_thinking=False"
        assert sample.facts.options == (shown,)


def test_options_without_effect_are_told(templates: Path) -> None:
    """The template reads its options in a macro, and after it sets their defaults."""
    source = (
        "{% macro header() %}<|im_start|>assistant\n{% if brief %}Brief: {% endif %}{% endmacro %}"
        "{% if end is not defined %}{% set end = '<|im_end|>' %}{% endif %}"
        "{% set unseen = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{{ header() }}"
        "{% else %}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content + end }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ header() }}{% endif %}"
    )
    template, tokenizer = ChatTemplate(source, name="own"), generic_tokenizer(source)
    options = {"brief": True, "end": "</s>", "unseen": 2, "briefs": True, "documents": []}
    [sample] = encoded(template, tokenizer, SHAPES["one turn"], options=options)
    assert sample.facts.options == ("brief=True", "end=</s>")
    [(prompt, text)] = turns_of(sample, tokenizer)
    assert prompt.endswith("Brief: ") and text == "Ho!</s>"
    rows = ConversationEncoder(ChatEncoder(tokenizer, template, "assistant"))
    prompt_only = Prompt(normalize([user("Hi")], None, options), None)
    pair = Pair(normalize([user("Hi")], None, options), [assistant("Ho!")], [assistant("No.")])
    samples: list[Sample] = [normalize(SHAPES["one turn"], None, options), prompt_only, pair]
    for row in samples:
        reason = "own reads brief, end"
        unread = ("unseen", "briefs", "documents")
        assert rows.unread_options(row) == dict.fromkeys(unread, reason)
    assert rows.unread_options(Text("Hi")) == {}


def test_whitespace_that_cannot_be_tried_is_told_once(
    templates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template, tokenizer = published("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", templates)
    encoder = ChatEncoder(tokenizer, template, "assistant")
    with caplog.at_level(logging.WARNING, "torchtitan"):
        [samples] = encoder.encode_batch([normalize(SHAPES["reasoning"])])
    assert (
        caplog.text.count("this whitespace is a guess") == 1
        and repr("\n</think>\n\n") in caplog.text
    )
    assert isinstance(samples, list)
    texts = [text for sample in samples for _, text in turns_of(sample, tokenizer)]
    end = "<｜end▁of▁sentence｜>"
    assert texts == [f"Hm, think.\n</think>\n\nHo!{end}", f"Hm, again.\n</think>\n\nNo.{end}"]


def test_tags_inside_an_answer_do_not_hide_its_beginning(templates: Path) -> None:
    """Qwen3's template writes an answer from `</think>` on; text before `<think>` would vanish."""
    answer = "Write <think>so</think> and then the rest."
    template, tokenizer = published("qwen3", templates)
    lossy = encoded(template, tokenizer, [user("Hi"), assistant(answer)])
    assert isinstance(lossy, LossySample) and lossy.reason == "on_loss_of_content"
    template, tokenizer = published("chatml", templates)
    [sample] = encoded(template, tokenizer, [user("Hi"), assistant(answer)])
    assert [text for _, text in turns_of(sample, tokenizer)] == [f"{answer}<|im_end|>"]


def test_empty_blocks_of_reasoning_are_no_content(templates: Path) -> None:
    """Rows of models that think have empty blocks, which the generation prompt of Qwen3.5
    contains."""
    template, tokenizer = published("Qwen3.5-4B", templates)
    answers = [assistant(f"<think>\n\n</think>\n\n{text}") for text in ("Ho!", "No.")]
    # The template removes the block from the first turn when the second one follows, so each turn
    # is a sample.
    samples = encoded(template, tokenizer, [user("Hi"), answers[0], user("More"), answers[1]])
    prompts, texts = zip(
        *(turn for sample in samples for turn in turns_of(sample, tokenizer)), strict=True
    )
    assert texts == ("Ho!<|im_end|>", "No.<|im_end|>")
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts)


EARLIER = {
    "calls if the content is none": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.tool_calls and m.content is none %}{{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "reasoning": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning %}[{{ m.reasoning }}]{% endif %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
        "{{ m.content or '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


EARLIER["parts"] = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string or not m.content %}{{ m.content or '' }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'thinking' %}[{{ part.thinking }}]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("kind", EARLIER)
def test_prompts_keep_earlier_calls_and_reasoning(kind: str) -> None:
    """The last turn has neither, so that any form suits it; its prompt must have those of the turn
    before."""
    tokenizer = generic_tokenizer(EARLIER[kind])
    template = ChatTemplate(EARLIER[kind], name="own", of_model=True)
    more = THOUGHT if kind in ("reasoning", "parts") else {}
    messages = [
        user("Hi"),
        assistant(None, tool_calls=[call(15)], **more),
        result("r1"),
        assistant("It is 15."),
    ]
    samples = encoded(template, tokenizer, messages)
    assert isinstance(samples, list)
    *_, (prompt, text) = [turn for sample in samples for turn in turns_of(sample, tokenizer)]
    assert text == "It is 15.<|im_end|>"
    assert "miles" in prompt and (not more or "[Hm, think.]" in prompt)


@pytest.mark.parametrize("name", ["LFM2-8B-A1B", "google-gemma-2-2b-it", "chatml"])
def test_prompts_do_not_keep_reasoning_as_code(name: str, templates: Path) -> None:
    """These templates write parts of a content as code, with the reasoning."""
    template, tokenizer = published(name, templates)
    messages = [user("Hi"), assistant("Ho!", **THOUGHT), user("More"), assistant("No.")]
    samples = encoded(template, tokenizer, messages, accepted=["reasoning"])
    assert isinstance(samples, list)
    text = "".join(tokenizer.decode(sample.ids.tolist()) for sample in samples)
    assert "Ho!" in text and "thinking" not in text and "Hm" not in text


def test_calls_that_are_messages_stop_after_each() -> None:
    """The end of a call stands between two calls, as does the header of the next message: inference
    stops there."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "<|start|>assistant to={{ c.function.name }}<|message|>{{ c.function.arguments | tojson "
        "}}<|call|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    template, tokenizer = ChatTemplate(source, name="own", of_model=True), generic_tokenizer(source)
    assert {stop.text for stop in Stops(template, tokenizer).all()} == {"<|end|>", "<|call|>"}
    samples = encoded(template, tokenizer, SHAPES["call"])
    assert isinstance(samples, list)
    _, text = next(turns_of(samples[0], tokenizer))
    assert text == ' to=add<|message|>{"a": 15, "b": "miles"}<|call|>'
    refused = encoded(template, tokenizer, SHAPES["calls"])
    assert isinstance(refused, BrokenSample) and "a stop, '<|call|>', inside" in str(refused)


def test_whole_conversations_lose_nothing(templates: Path) -> None:
    """With `train_on` all, templates also leave out calls, and reasoning of earlier turns."""
    for name, shape, part in [("qwen3", "reasoning", "reasoning"), ("phi-3", "call", "tools")]:
        template, tokenizer = published(name, templates)
        lossy = encoded(template, tokenizer, SHAPES[shape], train_on="all")
        assert isinstance(lossy, LossySample) and lossy.reason == f"on_loss_of_{part}"
        [sample] = encoded(template, tokenizer, SHAPES[shape], train_on="all", accepted=[part])
        assert sample.facts.lost == (part,)


@pytest.mark.parametrize(
    ("name", "shape", "n_stops"),
    [
        ("qwen3", "turns", 3),
        ("qwen3", "call, reasoning", 2),
        ("chatml", "empty answer", 2),
        ("GLM-4.6", "turns", 2),  # nobody speaks after the last answer
        ("GLM-4.6", "call", 1),
        # earlier turns end with another token than inference stops at
        ("openai-gpt-oss-120b", "turns", 1),
    ],
)
def test_whole_conversations_count_stops(
    name: str, shape: str, n_stops: int, templates: Path
) -> None:
    template, tokenizer = published(name, templates)
    [sample] = encoded(template, tokenizer, SHAPES[shape], train_on="all", accepted=["reasoning"])
    n_turns = sum(message["role"] == "assistant" for message in SHAPES[shape])
    assert (sample.facts.n_turns, sample.facts.n_stops) == (n_turns, n_stops)
    assert sample.facts.n_only_stops == (shape == "empty answer")


def test_stops_are_not_counted_if_the_template_rejects_markers(templates: Path) -> None:
    """A count must not drop a row of which the template writes the whole text."""
    _, tokenizer = published("chatml", templates)
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content not in ['Ho!', 'No.'] %}"
        "{{ raise_exception('unknown answer') }}{% endif %}"
        "{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [user("Hi"), assistant("Ho!"), user("More"), assistant("No.")]
    [sample] = encoded(ChatTemplate(source), tokenizer, messages, train_on="all")
    assert (sample.facts.n_turns, sample.facts.n_stops) == (2, 0)
    assert sample.trained.all()


def test_judged_answers_lose_nothing(templates: Path) -> None:
    template, tokenizer = published("chatml", templates)
    encoder = ChatEncoder(tokenizer, template, "assistant")
    with pytest.raises(LossySample, match="leaves out the reasoning of message 2"):
        encoder.encode_whole(normalize([user("Hi")]), [assistant("Ho!", **THOUGHT)])


def test_pairs_have_one_prompt(templates: Path) -> None:
    """Both answers are written after the same prompt, although only one has reasoning."""
    template, tokenizer = published("Qwen3.5-4B", templates)
    encoder = ChatEncoder(tokenizer, template, "assistant")
    prompt = normalize([user("Hi")])
    chosen, rejected = [assistant("Ho!", **THOUGHT)], [assistant("No.")]
    pair = encoder.encode_pair(Pair(prompt, chosen, rejected))
    prompts = [next(turns_of(side, tokenizer)) for side in pair]
    assert prompts[0][0] == prompts[1][0] and prompts[0][0].endswith("<think>\n")
    assert [text for _, text in prompts] == [
        "Hm, think.\n</think>\n\nHo!<|im_end|>",
        "\n</think>\n\nNo.<|im_end|>",
    ]
    with pytest.raises(LossySample, match="rewrites earlier turns") as raised:
        encoder.encode_pair(Pair(prompt, [*chosen, user("More"), *chosen], rejected))
    assert raised.value.reason == "rewritten"


def test_null_arguments_of_tables() -> None:
    """Tables store every key in every object; JSON text has the nulls that were meant."""
    arguments = {"a": None, "b": "x", "c": None, "inside": {"d": None, "e": 1}}
    schema = {"properties": {"a": {"type": ["integer", "null"]}}}
    function: dict[str, Any] = {"name": "f", "parameters": schema, "strict": None}
    tool = {"type": "function", "function": function}
    turns: list[Any] = [
        user("Hi"),
        assistant(None, tool_calls=[{"name": "f", "arguments": arguments}]),
    ]
    conversation = normalize(turns, [tool])
    [made] = conversation.messages[1]["tool_calls"]
    assert made["function"]["arguments"] == {"a": None, "b": "x", "inside": {"e": 1}}
    assert conversation.tools is not None and "strict" not in conversation.tools[0]["function"]
    turns[1]["tool_calls"] = [{"name": "f", "arguments": '{"c": null}'}]
    assert normalize(turns, [tool]).messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "c": None
    }
    turns[1]["tool_calls"] = [{"name": "f", "arguments": {"c": None, "d": 1}}]
    for wrong in (5, "c", None, {}):  # no lists of keys
        function["parameters"] = {"required": wrong}
        [made] = normalize(turns, [tool]).messages[1]["tool_calls"]
        assert made["function"]["arguments"] == {"d": 1}


def test_samples_of_a_row(tmp_path: Path, templates: Path) -> None:
    """A row of two turns is two samples, whose names differ; one that is too long leaves the
    other."""
    template, tokenizer = published("qwen3", templates)
    (tmp_path / "template.jinja").write_text(template.source)
    rows = [[user("Hi"), assistant("Ho!"), user("More " * n), assistant("No.")] for n in (1, 60, 1)]
    rows.append([user("Hi " * 200), assistant("Ho!")])
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    config = SFTDataLoader.Config(
        dataset=[str(tmp_path / "a.jsonl")],
        chat_template=str(tmp_path / "template.jinja"),
        cache_dir=str(tmp_path / "cache"),
        packing="none",
        sampler=ShuffleSampler.Config(shuffle=False),
    )
    loader = config.build(tokenizer=tokenizer, seq_len=220, local_batch_size=1, epochs=1)
    names = [loader.document_names(batch["documents"][0]) for batch in loader]
    expected = [
        "a.jsonl:1, sample 1",
        "a.jsonl:1, sample 2",
        "a.jsonl:2, sample 1",
        "a.jsonl:3, sample 1",
        "a.jsonl:3, sample 2",
    ]
    assert names == [[name] for name in expected]
    report = loader.samples.sets[0].report
    assert (report.rows, report.kept, report.samples, report.n_dropped) == (4, 3, 5, 1)
    assert report.left_out.count == 1 and report.left_out.examples[0][0] == "a.jsonl:2, sample 2"
    assert (report.turns, report.stops) == (7, 7)
    shown = loader.batch_of(expected[1:2])
    assert loader.document_names(shown["documents"][0]) == expected[1:2]
    # The position is exact between the samples of a row.
    first = config.build(tokenizer=tokenizer, seq_len=220, local_batch_size=1, epochs=1)
    next(first)
    resumed = config.build(tokenizer=tokenizer, seq_len=220, local_batch_size=1, epochs=1)
    resumed.load_state_dict(first.state_dict())
    assert [resumed.document_names(batch["documents"][0]) for batch in resumed] == names[1:]
    for each in (loader, first, resumed):
        each.close()


def test_chat_and_exports_stop_at_every_stop(templates: Path) -> None:
    template, tokenizer = published("GLM-4.6", templates)
    stops = [tokenizer.id_of("<|user|>"), tokenizer.id_of("<|observation|>")]
    settings = json.loads(chat_assets(tokenizer, template)["generation_config.json"])
    assert settings["eos_token_id"] == [tokenizer.eos_id, *stops]


def test_prompts_have_the_options_of_their_row(templates: Path) -> None:
    """Templates whose default the search for a trainable form would change: with reasoning on
    (Gemma 4) or off (Nemotron 3)."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    names = ("google-gemma-4-31B-it", "TRL's nemotron_3_nano", "Qwen3.5-4B", "qwen3", "GLM-4.6")
    options: list[dict[str, bool]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    for name, tools, chosen in product(names, (None, [TOOL]), options):
        template, tokenizer = published(name, templates)
        encoder = ChatEncoder(tokenizer, template, "assistant")
        messages = [SYSTEM, user("Hi")]
        ids = encoder.encode_prompt(normalize(messages, tools, chosen))
        [expected], _ = utils.render_jinja_template(
            [messages], tools, chat_template=template.source, add_generation_prompt=True,
            **{**template.variables, **chosen},
        )  # fmt: skip
        assert tokenizer.decode(ids.tolist()) == expected, (name, chosen)
