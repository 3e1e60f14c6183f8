"""The server's answers, compared with the engine and plain forward passes."""

import asyncio
import contextlib
import copy
import json
import random
import socket
import threading
import time
import types

import pytest
import torch

from tests.components.serving.servers import CONTEXT, listening, make_app
from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.generation import Sampling, TextStream, TextWriter, generate
from torchtitan.components.serving.app import Limits
from torchtitan.components.serving.connections import TimedConnection
from torchtitan.components.serving.metrics import Metrics
from torchtitan.components.serving.prompts import Preparer
from torchtitan.components.serving.requests import chat_request, completion_request
from torchtitan.components.tokenizer import PretrainedTokenizer

httpx = pytest.importorskip("httpx")

from starlette.applications import Starlette  # noqa: E402
from starlette.responses import Response, StreamingResponse  # noqa: E402
from starlette.routing import Mount, Route  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me about Lily."}]
LONG_MESSAGES = [{"role": "user", "content": "Lily " * 600}]
ANY_HOST = "http://localhost"


@pytest.fixture(scope="module")
def client(stories):
    app, _ = make_app(stories)
    with TestClient(app, base_url=ANY_HOST) as client:
        yield client


def ask(client, path=COMPLETIONS, **fields):
    body = {"model": "stories"} | fields
    if path == COMPLETIONS:
        body = {"prompt": PROMPT} | body
    else:
        body = {"messages": MESSAGES} | body
    return client.post(path, json=body)


def choices(client, path=COMPLETIONS, **fields):
    answer = ask(client, path, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def events(client, path=COMPLETIONS, **fields):
    """Return the parts of a stream."""
    answer = ask(client, path, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    *parts, last, rest = answer.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def texts_of(model, tokenizer, prompts, n_tokens, sampling=None, stop=()):
    """Return the continuations that the engine generates in one call."""
    ids = [tokenizer.encode(prompt, add_eos=False) for prompt in prompts]
    streams = [TextStream(tokenizer, one, stop) for one in ids]

    def on_token(row, token):
        streams[row].push(token)
        return streams[row].stopped

    generate(
        model,
        ids,
        max_new_tokens=n_tokens,
        sampling=sampling,
        stop_ids={tokenizer.eos_id},
        on_token=on_token,
    )
    for stream in streams:
        stream.finish()
    return [stream.text for stream in streams]


# Texts.


def test_greedy_texts_equal_the_engine(client, stories_model, stories_tokenizer):
    prompts = [PROMPT, "", "Tom and his dog"]
    expected = texts_of(stories_model, stories_tokenizer, prompts, 60)
    found = choices(client, prompt=prompts, max_tokens=60, temperature=0)
    assert [choice["text"] for choice in found] == expected
    assert [choice["index"] for choice in found] == [0, 1, 2]
    ids = stories_tokenizer.encode(PROMPT, add_eos=False)
    [choice] = choices(client, prompt=ids, max_tokens=60, temperature=0)
    assert choice["text"] == expected[0] and choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {},
    ],
)
def test_samples_of_a_seed_equal_the_engine(client, stories_model, stories_tokenizer, fields):
    sampling = Sampling(**{"temperature": 1.0, **fields, "seed": 7})
    expected = texts_of(stories_model, stories_tokenizer, [PROMPT] * 3, 30, sampling)
    found = choices(client, n=3, seed=7, max_tokens=30, **fields)
    assert [choice["text"] for choice in found] == expected
    assert len(set(expected)) == 3


def test_without_a_seed_texts_differ(client):
    found = {choices(client, max_tokens=30)[0]["text"] for _ in range(3)}
    assert len(found) == 3


def test_stop_strings_end_texts_across_tokens(client, stories_model, stories_tokenizer):
    stop = ["Lily. Sh", "dog"]
    for path in ("whole", "stream"):
        if path == "whole":
            [choice] = choices(client, stop=stop, max_tokens=60, temperature=0)
            text, reason = choice["text"], choice["finish_reason"]
        else:
            parts = events(client, stop=stop, max_tokens=60, temperature=0)
            text = "".join(part["choices"][0]["text"] for part in parts)
            reason = parts[-1]["choices"][0]["finish_reason"]
        expected = texts_of(stories_model, stories_tokenizer, [PROMPT], 60, stop=stop)
        assert [text] == expected and expected[0].endswith("named ") and reason == "stop"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ([], "Ok. [CALL]add[CALL]"),
        (["[CALL]"], "Ok. "),
        (["[CA"], "Ok. "),
        (["LL]add"], "Ok. [CA"),
        (["k. [CALL]ad"], "O"),
        (["add[CALL]", "x"], "Ok. [CALL]"),
        (["add[CALL]x"], "Ok. [CALL]add[CALL]"),
    ],
)
def test_stop_strings_contain_special_tokens_that_are_written(stories_tokenizer, stop, expected):
    mark = 2
    before, after = (
        stories_tokenizer.encode(f"a{text}", add_bos=False, add_eos=False)
        for text in ("Ok. ", "add")
    )
    tokens = [*before[1:], mark, *after[1:], mark]
    writer = TextWriter(stories_tokenizer, before[:1], stop, {mark: "[CALL]"})
    text = "".join(writer.push(token) for token in tokens)
    is_found = expected != "Ok. [CALL]add[CALL]"
    assert writer.stopped == is_found
    assert text + writer.finish() == expected


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_equals_the_whole_answer(client, path):
    options = {} if path == CHAT else {"echo": True}
    logprobs = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    fields = {"n": 3, "seed": 5, "max_tokens": 40, "stop": "and", **logprobs, **options}
    whole = ask(client, path, **fields).json()
    parts = events(client, path, stream_options={"include_usage": True}, **fields)
    assert parts.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        known = [part["logprobs"] for part in own if part["logprobs"]]
        if path == CHAT:
            text = "".join(part["delta"].get("content", "") for part in own)
            assert text == choice["message"]["content"]
            entries = [entry for one in known for entry in one["content"]]
            assert entries == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in own) == choice["text"]
            for name, expected in choice["logprobs"].items():
                assert [entry for one in known for entry in one[name]] == expected
        reasons = [part["finish_reason"] for part in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
    assert all(part["usage"] is None for part in parts)


def test_a_chat_uses_the_template(client, stories_model, stories_tokenizer):
    text = "<|im_start|>user\nTell me about Lily.<|im_end|>\n<|im_start|>assistant\n"
    [expected] = texts_of(stories_model, stories_tokenizer, [text], 20)
    [choice] = choices(client, CHAT, max_tokens=20, temperature=0)
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    parts = [{"type": "text", "text": part} for part in ("Tell me", " about Lily.")]
    [same] = choices(
        client,
        CHAT,
        messages=[{"role": "user", "content": parts}],
        max_completion_tokens=20,
        temperature=0,
    )
    assert same["message"]["content"] == expected


def test_a_chat_without_a_limit_uses_the_context(client):
    answer = ask(client, CHAT, seed=1, stop="zzzz").json()
    usage = answer["usage"]
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    if answer["choices"][0]["finish_reason"] == "length":
        assert usage["total_tokens"] == CONTEXT


# Log-probabilities.


def logprobs_of(model, ids):
    """Return the log-probabilities after each token, (L, V), by a plain forward pass."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logprobs_equal_a_forward_pass(client, stories_model, stories_tokenizer, temperature):
    """At any temperature, they are those of temperature 1."""
    fields = {"max_tokens": 12, "seed": 3, "temperature": temperature}
    [choice] = choices(client, logprobs=3, **fields)
    found = choice["logprobs"]
    prompt = stories_tokenizer.encode(PROMPT, add_eos=False)
    whole = stories_tokenizer.encode(PROMPT + choice["text"], add_eos=False)
    ids = next(
        [*prompt, *tail]
        for tail in [whole[len(prompt) :]]
        if whole[: len(prompt)] == prompt and len(tail) == 12
    )
    expected = logprobs_of(stories_model, ids)[len(prompt) - 1 : -1]
    own = expected[range(12), ids[len(prompt) :]]
    # float32 sums in another order
    assert found["token_logprobs"] == pytest.approx(own.tolist(), abs=1e-4)
    for place, top in enumerate(found["top_logprobs"]):
        values = sorted(top.values(), reverse=True)
        assert values[:3] == pytest.approx(expected[place].topk(3).values.tolist(), abs=1e-4)
    assert "".join(found["tokens"]) == choice["text"]
    for text, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(text)
    [chat] = choices(client, CHAT, logprobs=True, top_logprobs=2, **fields)
    for entry in chat["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2


@pytest.mark.parametrize("n_new", [0, 1, 5])
def test_echo_scores_the_prompt(client, stories_model, stories_tokenizer, n_new):
    """With one new token, there are prompt + 1 entries, as lm-eval expects; the first is null."""
    texts = [PROMPT, "Lily and Tom"]
    found = choices(client, prompt=texts, echo=True, logprobs=1, max_tokens=n_new, temperature=0)
    continued = texts_of(stories_model, stories_tokenizer, texts, n_new) if n_new else ["", ""]
    for text, more, choice in zip(texts, continued, found, strict=True):
        ids = stories_tokenizer.encode(text, add_eos=False)
        logprobs = choice["logprobs"]
        expected = logprobs_of(stories_model, ids)
        first, *others = logprobs["token_logprobs"]
        assert choice["text"] == text + more
        assert first is None and logprobs["top_logprobs"][0] is None
        assert len(others) == len(ids) - 1 + n_new
        own = expected[range(len(ids) - 1), ids[1:]].tolist()
        assert others[: len(ids) - 1] == pytest.approx(own, abs=1e-4)
        for place, top in enumerate(logprobs["top_logprobs"][1 : len(ids)]):
            assert max(top.values()) == pytest.approx(float(expected[place].max()), abs=1e-4)
            is_greedy = int(expected[place].argmax()) == ids[place + 1]
            assert (max(top.values()) == others[place]) == is_greedy


def test_tokens_may_be_written_as_ids(client, stories_tokenizer):
    [choice] = choices(client, echo=True, logprobs=0, max_tokens=0, return_tokens_as_token_ids=True)
    ids = stories_tokenizer.encode(PROMPT, add_eos=False)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]


# Calls and reasoning; `test_replies` has the notations.


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


class Scripted:
    """Writes a text instead of the model."""

    def __init__(self, monkeypatch, tokenizer, text):
        newline = tokenizer.encode("\n", add_bos=False)
        # after a newline, since a text's first token has a space
        ids = tokenizer.encode("\n" + text, add_bos=False)[len(newline) :] + [tokenizer.eos_id]

        def draw(logits_BV, sampling, generators, *weights):
            n_rows = len(generators)
            return torch.tensor([ids[min(self.n_drawn(), len(ids) - 1)]] * n_rows)

        self.n = -1
        monkeypatch.setattr("torchtitan.components.generation.next_tokens.draw", draw)

    def n_drawn(self) -> int:
        self.n += 1
        return self.n


@pytest.fixture(scope="module")
def hermes(stories, assets):
    source = (assets / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    # shorter, for the small model's context
    for words in (
        "You may call one or more functions to assist with the user query.",
        "You are provided with function signatures within",
        "For each function call, return a json object with function name and arguments within",
    ):
        assert words in source
        source = source.replace(words, "")
    template = ChatTemplate(source, name="qwen3")
    app, _ = make_app(stories, template=template)
    with TestClient(app, base_url=ANY_HOST) as client:
        yield client


REPLY = '<think>\nadd it\n</think>\n\nOk.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_and_reasoning_are_fields_of_a_message(hermes, stories_tokenizer, monkeypatch):
    fields = {"tools": [TOOL], "temperature": 1}
    Scripted(monkeypatch, stories_tokenizer, REPLY)
    [choice] = choices(hermes, CHAT, **fields)
    message = choice["message"]
    [call] = message["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("add it", "Ok.")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    Scripted(monkeypatch, stories_tokenizer, REPLY)
    parts = [part["choices"][0] for part in events(hermes, CHAT, **fields)]
    deltas = [part["delta"] for part in parts]
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    [[streamed]] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (reasoning, content) == ("add it", "Ok.")
    assert streamed["index"] == 0 and streamed["function"] == call["function"]
    assert parts[-1]["finish_reason"] == "tool_calls"
    # The answer and a result can be sent back.
    Scripted(monkeypatch, stories_tokenizer, "2")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "two"}
    [choice] = choices(hermes, CHAT, messages=[*MESSAGES, message, result], **fields)
    assert choice["message"]["content"] == "2" and choice["finish_reason"] == "stop"


def test_a_choice_of_tools_is_kept(hermes, stories_tokenizer, monkeypatch):
    fields = {"tools": [TOOL], "temperature": 1}
    Scripted(monkeypatch, stories_tokenizer, REPLY)
    [choice] = choices(hermes, CHAT, tool_choice="none", **fields)
    assert choice["message"]["content"].startswith("Ok.\n<tool_call>")
    assert choice["finish_reason"] == "stop"
    named = {"type": "function", "function": {"name": "add"}}
    for forced, rest in ((named, "{}}"), ("required", 'add", "arguments": {}}')):
        Scripted(monkeypatch, stories_tokenizer, rest + "\n</tool_call>")
        [choice] = choices(hermes, CHAT, tool_choice=forced, **fields)
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": "{}"}
    named["function"]["name"] = "other"
    assert ask(hermes, CHAT, tool_choice=named, **fields).status_code == 400


def test_a_call_without_content_can_be_sent_back(hermes, stories_tokenizer, monkeypatch):
    """Its content is null, as OpenAI's; Qwen 3's template takes neither null nor its absence."""
    Scripted(monkeypatch, stories_tokenizer, REPLY.replace("Ok.\n", ""))
    [choice] = choices(hermes, CHAT, tools=[TOOL], temperature=1)
    message = choice["message"]
    assert message["content"] is None
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "two"}
    Scripted(monkeypatch, stories_tokenizer, "2")
    [choice] = choices(
        hermes, CHAT, messages=[*MESSAGES, message, result], tools=[TOOL], temperature=1
    )
    assert choice["message"]["content"] == "2"


@pytest.mark.parametrize("value", [r'"\ud800"', "1e999", "-1e999", r'{"\udfff": 1}'])
def test_calls_with_what_json_cannot_carry_stay_in_the_text(
    hermes, stories_tokenizer, monkeypatch, value
):
    """Half a character, and infinity, which `json.loads` reads."""
    reply = REPLY.replace('"a": 1', f'"a": {value}')
    for stream in (False, True):
        Scripted(monkeypatch, stories_tokenizer, reply)
        answer = ask(hermes, CHAT, tools=[TOOL], temperature=1, stream=stream)
        assert answer.status_code == 200 and "Infinity" not in answer.text
        parts = answer.text.split("\n\n")[:-2] if stream else [answer.text]
        found = [json.loads(part.removeprefix("data: "))["choices"][0] for part in parts]
        messages = [choice["delta" if stream else "message"] for choice in found]
        content = "".join(message.get("content") or "" for message in messages)
        assert value in content and not any("tool_calls" in message for message in messages)


def test_a_reply_has_one_call_if_parallel_ones_are_off(hermes, stories_tokenizer, monkeypatch):
    call = REPLY.partition("Ok.")[2]
    for is_on, number in ((True, 2), (False, 1)):
        fields = {"tools": [TOOL], "temperature": 1, "parallel_tool_calls": is_on}
        Scripted(monkeypatch, stories_tokenizer, REPLY + call)
        [choice] = choices(hermes, CHAT, **fields)
        assert len(choice["message"]["tool_calls"]) == number
        assert choice["finish_reason"] == "tool_calls"
        Scripted(monkeypatch, stories_tokenizer, REPLY + call)
        deltas = [part["choices"][0]["delta"] for part in events(hermes, CHAT, **fields)]
        assert len([delta for delta in deltas if "tool_calls" in delta]) == number


def test_developers_are_the_system_of_templates_without_them(hermes, client):
    def n_tokens(client, role):
        messages = [{"role": role, "content": "Be brief."}, *MESSAGES]
        answer = ask(client, CHAT, messages=messages, max_tokens=1)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    assert n_tokens(hermes, "developer") == n_tokens(hermes, "system")
    # chatml writes any role
    assert n_tokens(client, "developer") != n_tokens(client, "system")


def test_nulls_in_schemas_of_tools_are_kept():
    """As pydantic writes optional arguments; nulls outside of schemas are absent fields."""
    argument = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    schema = {"type": "object", "properties": {"n": {**argument, "enum": [1, None]}}}
    functions = [
        {"name": "f", "description": None, "strict": None, "parameters": schema},
        {"name": "g", "parameters": None},
    ]
    tools = [{"type": "function", "extra": None, "function": one} for one in functions]
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    found = [tool["function"] for tool in chat_request(body).conversation.tools or []]
    assert found == [{"name": "f", "parameters": schema}, {"name": "g"}]


def test_what_a_template_omits_is_refused(stories):
    source = (
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    app, _ = make_app(stories, template=ChatTemplate(source, name="the template"))
    with TestClient(app, base_url=ANY_HOST) as client:
        assert ask(client, CHAT, max_tokens=2).status_code == 200
        for param, fields in (
            ("tools", {"tools": [TOOL]}),
            ("messages", {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]}),
        ):
            answer = ask(client, CHAT, **fields)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_keys_of_messages_that_the_template_does_not_read_are_refused(client, stories):
    def answered(client, **keys):
        answer = {"role": "assistant", "content": "She", **keys}
        return ask(client, CHAT, messages=[*MESSAGES, answer], max_tokens=1)

    harmless = {"annotations": [1], "id": "x", "name": "b", "refusal": None, "prefix": False}
    assert answered(client, reasoning="so", **harmless).status_code == 200
    call = {"name": "f", "arguments": "{}"}
    for key, value in (
        *(("prefix", True), ("partial", True), ("function_call", call), ("audio", {"id": "x"})),
        *(("refusal", "no"), ("reasoning_details", [{"text": "so"}]), ("a" * 99, 1)),
    ):
        error = answered(client, **{key: value}).json()["error"]
        assert (
            error["param"] == f"messages[1].{key[:80]}" and "does not read it" in error["message"]
        )
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '' if m.prefix else '\n' }}"
        "{% endfor %}"
    )
    app, _ = make_app(stories, template=ChatTemplate(source))
    with TestClient(app, base_url=ANY_HOST) as other:
        assert answered(other, prefix=True).status_code == 200
        assert answered(other, partial=True).status_code == 400


def test_more_top_logprobs_than_tokens_are_all_tokens(stories_tokenizer):
    preparer = Preparer(stories_tokenizer, [], context=CONTEXT, vocab_size=7, template=None)
    body = {"model": "m", "prompt": [1, 2], "logprobs": 20}
    [job] = preparer.completion(completion_request(body)).jobs
    assert job.n_top == 7


# Mistakes.


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETIONS, {"model": None}, "model", "has no model"),
        (COMPLETIONS, {"model": 5}, "model", "must be a string"),
        (COMPLETIONS, {"prompt": None}, "prompt", "has no prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": [512]}, "prompt", "the vocabulary ends at 511"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "the vocabulary ends at 511"),
        (COMPLETIONS, {"prompt": [1] * 600}, "prompt", "600 tokens, which leaves no room"),
        (COMPLETIONS, {"max_tokens": 600}, "max_tokens", "context has 512 tokens"),
        (COMPLETIONS, {"prompt": [1] * 512}, "prompt", "512 tokens, which leaves no room"),
        (COMPLETIONS, {"prompt": [1] * 510}, "max_tokens", "set max_tokens to at most 2"),
        (CHAT, {"messages": LONG_MESSAGES}, "messages", "leaves no room for a new one"),
        (CHAT, {"messages": LONG_MESSAGES, "max_tokens": 5}, "messages", "shorten the prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt", "257 texts (prompts: 257, n: 1)"),
        (COMPLETIONS, {"prompt": ["a"] * 129, "n": 2}, "n", "more than the 256 that may wait"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "-1, but must be an integer from 0"),
        (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens", "must be an integer"),
        (COMPLETIONS, {"n": 0}, "n", "an integer from 1 to 128"),
        (COMPLETIONS, {"n": True}, "n", "n is true"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "must be a number from 0 to 100"),
        (COMPLETIONS, {"temperature": -0.1}, "temperature", "must be a number from 0"),
        (COMPLETIONS, {"temperature": 1e400}, "temperature", "must be a number"),
        (COMPLETIONS, {"top_p": 0}, "top_p", "above 0"),
        (COMPLETIONS, {"top_k": 1.0}, "top_k", "must be an integer"),
        (COMPLETIONS, {"min_p": 2}, "min_p", "from 0 to 1"),
        (COMPLETIONS, {"seed": "1"}, "seed", "must be an integer"),
        (COMPLETIONS, {"stop": [""]}, "stop", "1 to 256 characters"),
        (COMPLETIONS, {"stop": 5}, "stop", "must be a string"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "up to 16"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "must be an integer from 0 to 20"),
        (COMPLETIONS, {"stream": 1}, "stream", "must be true or false"),
        (COMPLETIONS, {"stream_options": {}}, "stream_options", "needs stream true"),
        (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "x", "unknown field"),
        (COMPLETIONS, {"max_tokenz": 1}, "max_tokenz", "did you mean 'max_tokens'"),
        (COMPLETIONS, {"logit_bias": {"1": 5}}, "logit_bias", "not supported"),
        (COMPLETIONS, {"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        (COMPLETIONS, {"best_of": True}, "best_of", "not supported"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
        (CHAT, {"messages": []}, "messages", "not empty"),
        (CHAT, {"messages": ["hi"]}, "messages[0]", "must be an object"),
        (CHAT, {"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "one of"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "has no content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0]",
            "this server reads text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content",
            "parts",
        ),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs true"),
        (CHAT, {"logprobs": 1}, "logprobs", "must be true or false"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "from 1"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "one of them"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (CHAT, {"tools": {}}, "tools", "an array"),
        (CHAT, {"tools": [{"type": "web"}]}, "tools[0]", "must be"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice", "needs tools"),
        (CHAT, {"tool_choice": "maybe"}, "tool_choice", "must be"),
        (CHAT, {"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "not read"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "not supported"),
    ],
)
def test_a_mistake_names_the_field(client, path, fields, param, words):
    body = {"model": "stories"} | ({"prompt": "a"} if path == COMPLETIONS else {})
    body = {"messages": MESSAGES} | body if path == CHAT else body
    content = json.dumps(body | fields).replace("Infinity", "1e400")
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"model": NaN}',
        b"\xff\xfe",
        b'{"model": "a", "model": "b"}',
        b'{"model": "stories", "prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"n": ' + b"1" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(client, content):
    headers = {"content-type": "application/json"}
    for path in (COMPLETIONS, CHAT):
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"


VALUES = [
    *(None, True, False, 0, -1, 1, 5, 10**30, 0.5, -0.0, "", "a", "é\x00\n", "x" * 5000),
    *([], [[]], {}, [None], ["a"], [1, 2], [{}], {"a": 1}, {"type": "function"}),
    *([{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text"}]}]),
    *([{"type": "function", "function": {"name": "f"}}], [[1, 2], [3]], {"include_usage": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_any_values_of_fields_are_answered(client, path):
    """Each field with each value of a wrong or right type: an answer, or a mistake by name."""
    honored = (
        "model messages prompt max_tokens max_completion_tokens temperature top_p top_k min_p n "
        "seed stop logprobs top_logprobs echo stream stream_options tools tool_choice "
        "chat_template_kwargs reasoning_effort return_tokens_as_token_ids logit_bias "
        "response_format metadata unknown"
    ).split()
    statuses = set()
    for name in honored:
        for value in VALUES:
            answer = ask(client, path, **{"max_tokens": 1, name: value})
            statuses.add(answer.status_code)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert answer.status_code in (400, 404), (name, value, error)
                assert error["message"] and error["param"], (name, value, error)
    assert statuses == {200, 400, 404}


ARGUMENT_SCHEMAS = [
    *({"type": "integer"}, {"type": ["string", "null"]}, {"enum": ["1", 2]}, {"const": 1}, True),
    *({"$ref": "#/$defs/A"}, {"anyOf": [True, {"type": 5}]}, {"allOf": 1}, {"enum": 5}, 5, None),
]


@pytest.fixture(scope="module")
def keyed(stories, assets):
    """A template whose calls have arguments without quotes."""
    source = (assets / "templates" / "Qwen3.5-4B.jinja").read_text()
    # the place of tools without its long instructions
    start, end = source.index("<IMPORTANT>"), source.index("</IMPORTANT>")
    template = ChatTemplate(source[:start] + source[end:], name="qwen3.5")
    app, scheduler = make_app(stories, template=template)
    with TestClient(app, base_url=ANY_HOST) as client:
        yield client, scheduler


@pytest.mark.slow
def test_conversations_at_random_are_answered(keyed, stories_tokenizer, monkeypatch):
    """Shapes of messages, schemas of tools, and calls in replies: an answer in JSON or a mistake by
    name, and no row stays."""
    client, scheduler = keyed
    draws = random.Random(0)
    statuses = []

    def any_of(*values, wrong=0.05):
        return draws.choice(VALUES if draws.random() < wrong else values)

    for _ in range(80):
        schema = {"type": "object", "properties": {"a": draws.choice(ARGUMENT_SCHEMAS)}}
        function = {"name": "f", "parameters": any_of(schema, {}, None)}
        call = {"id": "abcdefghi", "function": {"name": "f", "arguments": any_of("{}", '{"a":1}')}}
        answer = {"role": "assistant", "content": any_of(None, "", "x")}
        answer["tool_calls"] = any_of([call], [call, call], None)
        answer[draws.choice(["name", "prefix", "reasoning", "weight", "x"])] = any_of(
            None, True, "y"
        )
        result = {
            "role": any_of("tool", "user"),
            "content": any_of("5", [{"type": "text", "text": "5"}]),
        }
        fields = {
            "messages": [*MESSAGES, *draws.sample([answer, result], draws.randrange(3))],
            "tools": [{"type": "function", "function": function}],
            "stream": any_of(True, False),
            "n": any_of(1, 2),
            "parallel_tool_calls": any_of(True, False, None),
            "tool_choice": any_of("auto", "none", "required"),
            "logprobs": any_of(True, False),
        }
        value = draws.choice(["1", "True", "null", "{", '"x"', "1e999", r'"\ud800"', ""])
        Scripted(
            monkeypatch,
            stories_tokenizer,
            "x</think>\n<tool_call>\n<function=f>\n<parameter=a>\n"
            f"{value}\n</parameter>\n</function>\n</tool_call>",
        )
        reply = ask(client, CHAT, **fields, temperature=1)
        statuses.append(reply.status_code)
        assert reply.status_code in (200, 400), (fields, reply.text)
        if reply.status_code == 400:
            assert reply.json()["error"]["param"], (fields, reply.text)
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.text.endswith("data: [DONE]\n\n"), (fields, reply.text)
        else:
            assert reply.json()["choices"]
        assert scheduler.n_running == scheduler.n_waiting == 0
    assert min(statuses.count(200), statuses.count(400)) > 10


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_deep_objects_are_answered(client, depth):
    """The parser takes some that other functions do not."""
    schema = '{"a":' * depth + "1" + "}" * depth
    tools = f'[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]'
    messages = json.dumps(MESSAGES)
    content = f'{{"model":"stories","max_tokens":1,"messages":{messages},"tools":{tools}}}'
    answer = client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_large_bodies_are_refused_in_linear_time(client, monkeypatch):
    """Quadratic checks of a body of a megabyte take minutes, in which no other request begins."""
    keys = ",".join(f'"k{n}":0' for n in range(60_000))
    begun = time.process_time()
    headers = {"content-type": "application/json"}
    answer = client.post(CHAT, content=f'{{{keys},"x":0,"x":0}}', headers=headers)
    assert "the key 'x' is there twice" in answer.json()["error"]["message"]
    assert time.process_time() - begun < 10  # 30 seconds, if all keys are counted for each
    lengths = []
    encode = PretrainedTokenizer.encode

    def counted(tokenizer, text, **options):
        lengths.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(PretrainedTokenizer, "encode", counted)
    text = "Lily " * 10_000
    for path, fields, param in (
        (COMPLETIONS, {"prompt": text}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        error = ask(client, path, **fields).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert "the prompt has more than" in error["message"]
    assert lengths == [32 * CONTEXT, 32 * CONTEXT]


def test_a_long_text_of_few_tokens_is_answered(client, monkeypatch):
    monkeypatch.setattr("torchtitan.components.serving.prompts._CHARACTERS", 0)
    assert choices(client, prompt=PROMPT, max_tokens=1)


def test_messages_are_searched_in_order(client, monkeypatch):
    """Only a message that is not where it is expected is searched for in the whole text."""
    monkeypatch.setattr(
        "torchtitan.components.serving.prompts.is_written", lambda part, text: 1 / 0
    )
    messages = [{"role": "user", "content": f" {n} b"} for n in (1, 2, 1, 1, 3)]
    assert ask(client, CHAT, messages=messages, max_tokens=1).status_code == 200


def test_a_text_that_cannot_be_decoded_fails_alone(client, monkeypatch, log):
    push = TextWriter.push

    def failing(self, *tokens):
        assert "fails" not in self._stops._strings
        return push(self, *tokens)

    monkeypatch.setattr(TextWriter, "push", failing)
    assert ask(client, stop="fails").status_code == 500
    assert "a text failed" in log.text
    assert choices(client, max_tokens=2)


def test_harmless_and_neutral_fields_are_accepted(client):
    expected = choices(client, temperature=0)
    fields = {
        "user": "me",
        "metadata": {"a": 1},
        "store": True,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "best_of": 1,
        "seed": None,
        "top_k": -1,
        "suffix": None,
    }
    assert choices(client, temperature=0, **fields) == expected


def test_other_mistakes_have_their_status(client):
    assert ask(client, model="other").status_code == 404
    assert client.get("/v1/other").json()["error"]["type"] == "not_found_error"
    assert client.get(COMPLETIONS).status_code == 405
    answer = client.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert client.get("/v1/models/stories").json()["max_model_len"] == CONTEXT
    assert client.get("/v1/models/x/y").status_code == 404


def test_keys_hosts_and_sizes_are_checked(stories):
    limits = Limits(api_key="secret", hosts=("localhost",), body_bytes=1000)
    app, _ = make_app(stories, limits=limits)
    with TestClient(app, base_url=ANY_HOST) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer wrong"
        assert ask(client).json()["error"]["code"] == "invalid_api_key"
        client.headers["authorization"] = "Bearer secret"
        assert ask(client).status_code == 200
        assert ask(client, prompt="a" * 1000).status_code == 413
        assert client.get("/v1/models", headers={"host": "LocalHost:80"}).status_code == 200
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 421


def test_clients_make_no_labels_and_no_errors(client, monkeypatch):
    """Old versions of starlette cannot read the URL of each request, which has the Host."""

    def unreadable(self):
        raise ValueError("Invalid IPv6 URL")

    monkeypatch.setattr("starlette.requests.HTTPConnection.url", property(unreadable))
    before = client.get("/metrics").text.count("requests_total{")
    for n in range(3):
        for host in ("[", f'{n}"\\'):
            for path in (f"/v1/models/x{n}", f"/x{n}", f"/v1/completions/x{n}"):
                assert client.get(path, headers={"host": host}).status_code == 404
            assert ask(client, max_tokens=1).status_code == 200
            assert client.delete(CHAT, headers={"host": host}).status_code == 405
    shown = client.get("/metrics").text
    # /metrics itself, completions, unknown models, and unknown paths and methods
    assert shown.count("requests_total{") <= before + 5
    assert 'requests_total{path="other",status="404"}' in shown
    assert 'requests_total{path="/v1/models/{name:path}",status="404"}' in shown
    metrics = Metrics([])
    metrics.count('a"b\\c\nd', 200)
    assert r'{path="a\"b\\c\nd",status="200"} 1' in metrics.text()


def test_a_mounted_application_answers(stories):
    """Starlette runs no lifespan of it; an outer one may, which closes it."""
    app, scheduler = make_app(stories)

    @contextlib.asynccontextmanager
    async def lifespan(outer):
        async with app.router.lifespan_context(app):
            yield

    mounted = [Mount("/llm", app=app)]
    with TestClient(Starlette(routes=mounted), base_url=f"{ANY_HOST}/llm") as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert choices(client, max_tokens=2)
        assert client.get("/v1/models/x1").status_code == 404
        shown = client.get("/metrics").text
        assert 'requests_total{path="/v1/models/{name:path}",status="404"} 1' in shown
        assert "x1" not in shown
    with TestClient(Starlette(routes=mounted, lifespan=lifespan), base_url=f"{ANY_HOST}/llm"):
        assert scheduler.is_alive
    assert not scheduler.is_alive
    with TestClient(Starlette(routes=mounted), base_url=f"{ANY_HOST}/llm") as client:
        assert client.get("/health").status_code == 503


# Many clients.


def test_a_full_queue_refuses(stories, monkeypatch):
    """Meanwhile, the model takes its time for a token. What is refused is not tokenized."""
    app, scheduler = make_app(stories, max_rows=1, max_queue=2)
    prepared = []
    completion = Preparer.completion

    def counted(self, request):
        prepared.append(request.n)
        return completion(self, request)

    monkeypatch.setattr(Preparer, "completion", counted)
    goes_on = threading.Event()

    def draw(logits_BV, sampling, generators, *weights):
        goes_on.wait(60)
        return logits_BV.argmax(-1)

    with TestClient(app, base_url=ANY_HOST) as client:
        too_many = ask(client, n=3)
        assert too_many.status_code == 400 and "max_queue" in too_many.text
        assert ask(client, prompt=[[1], [2]], n=2).status_code == 400
        assert not prepared
        assert len(choices(client, n=2, max_tokens=2)) == 2
        monkeypatch.setattr("torchtitan.components.generation.next_tokens.draw", draw)
        found: list[int] = []
        threads = []

        def ask_one() -> None:
            found.append(ask(client, max_tokens=2).status_code)

        for n in (0, 1, 2):
            # the first one gets the row, the others wait
            threads.append(threading.Thread(target=ask_one))
            threads[-1].start()
            while scheduler.n_running + scheduler.n_waiting <= n or not scheduler.n_running:
                time.sleep(0.01)
        prepared.clear()
        full = ask(client)
        goes_on.set()
        for thread in threads:
            thread.join()
    assert not prepared
    assert full.status_code == 429 and full.headers["retry-after"] == "1"
    assert full.json()["error"]["type"] == "rate_limit_error"
    assert found == [200] * 3


@pytest.mark.slow
def test_many_clients_get_their_own_texts(stories, stories_model, stories_tokenizer):
    """64 at once, whole answers and streams, over sockets; a few leave early, and one reads
    nothing."""
    starts = ["Once", "Lily", "Tom", "The dog", "One day", "A cat", "Mom", "She"]
    prompts = [f"{starts[n % 8]}{' and' * (n // 8)}" for n in range(64)]
    expected = texts_of(stories_model, stories_tokenizer, prompts, 24)
    app, scheduler = make_app(stories, max_rows=16)
    found: dict[int, str] = {}

    def ask_one(number: int) -> None:
        body = {"model": "stories", "prompt": prompts[number], "temperature": 0, "max_tokens": 24}
        if number % 2:
            found[number] = http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
            return
        with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
            parts = [line for line in answer.iter_lines() if line.startswith("data: {")]
        found[number] = "".join(
            json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts
        )

    def leave(number: int) -> None:
        long = {"prompt": "Once", "max_tokens": 500, "stream": number % 2 == 0, "n": 3, "seed": 1}
        with pytest.raises(httpx.TimeoutException), httpx.Client(base_url=url) as other:
            if number % 2:
                other.post(COMPLETIONS, json={"model": "stories"} | long, timeout=0.05)
            with other.stream("POST", COMPLETIONS, json={"model": "stories"} | long) as answer:
                next(answer.iter_lines())
                raise httpx.ReadTimeout("enough")

    with listening(app) as port:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=120) as http:
            threads = [threading.Thread(target=ask_one, args=(n,)) for n in range(64)]
            threads += [threading.Thread(target=leave, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            deadline = time.monotonic() + 60
            while (scheduler.n_running or scheduler.n_waiting) and time.monotonic() < deadline:
                time.sleep(0.01)
            shown = http.get("/metrics").text
    assert [found[n] for n in range(64)] == expected
    assert scheduler.n_running == scheduler.n_waiting == 0
    assert scheduler.totals.cancelled > 0 and scheduler.totals.failed == 0
    assert f"torchtitan_serve_cancelled_total {scheduler.totals.cancelled}" in shown


def test_a_client_that_sends_slowly_is_closed(stories, monkeypatch):
    monkeypatch.setattr(TimedConnection, "header_seconds", 0.2)
    app, _ = make_app(stories, limits=Limits(body_seconds=0.2))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with listening(app) as port:
        for sent, answer in (
            (b"", b""),
            (b"GET /health HT", b""),
            (head, b""),
            (head + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408"),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(sent)
                received = client.recv(1000)
                assert received.startswith(answer) if answer else received == b""
        # a second request on a connection
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += client.recv(1000)
            client.sendall(b"GET /health HT")
            assert client.recv(1000) == b""


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_client_that_reads_nothing_is_closed(monkeypatch, is_whole):
    """Also after the end of an answer, which would wait in memory."""
    has_ended = threading.Event()
    is_lost = threading.Event()
    connection_lost = TimedConnection.connection_lost
    block = b"a" * 2**20

    def lost(self, error):
        connection_lost(self, error)
        is_lost.set()

    async def blocks():
        try:
            while True:
                yield block
                await asyncio.sleep(0)
        finally:
            has_ended.set()

    async def answer(request):
        # more than the system's buffers have room for
        return Response(block * 64) if is_whole else StreamingResponse(blocks())

    monkeypatch.setattr(TimedConnection, "write_seconds", 0.2)
    monkeypatch.setattr(TimedConnection, "connection_lost", lost)
    with (
        listening(Starlette(routes=[Route("/", answer)]), timeout_graceful_shutdown=1) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert is_lost.wait(30)
        assert is_whole or has_ended.wait(30)


def test_a_client_that_reads_slowly_is_kept():
    """As long as it takes 64 KiB each time."""
    sizes = [200_000, 130_000, 60_000, 10_000]
    aborted = []
    transport = types.SimpleNamespace(
        get_write_buffer_size=lambda: sizes[0], abort=lambda: aborted.append(sizes[0])
    )
    waiting = []
    connection = TimedConnection.__new__(TimedConnection)
    connection.transport = transport
    connection.loop = types.SimpleNamespace(call_later=lambda _, *call: waiting.append(call))
    connection._expect_reading()
    while waiting:
        sizes.pop(0)
        check, n_before = waiting.pop()
        check(n_before)
    assert aborted == [10_000]


def test_an_error_of_the_model_fails_only_its_requests(stories, log):
    app, scheduler = make_app(stories)
    weight = next(scheduler._model.parameters())
    with TestClient(app, base_url=ANY_HOST, raise_server_exceptions=False) as client:
        with torch.no_grad():
            kept = weight.clone()
            weight.fill_(float("nan"))
        answer = ask(client, max_tokens=3)
        assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]
        [error] = [
            json.loads(line.removeprefix("data: "))
            for line in ask(client, stream=True).text.splitlines()
            if line
        ]
        assert error["error"]["type"] == "server_error"
        assert ask(client, echo=True, logprobs=1).status_code == 500
        with torch.no_grad():
            weight.copy_(kept)
        assert choices(client, max_tokens=3)
    assert scheduler.totals.failed == 3


# Clients.


def test_the_official_client_works(stories):
    openai = pytest.importorskip("openai")  # importing it takes a second
    app, _ = make_app(stories)
    with listening(app) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any")
        assert [model.id for model in client.models.list()] == ["stories"]
        fields = {"model": "stories", "messages": MESSAGES, "seed": 3, "max_tokens": 12}
        whole = client.chat.completions.create(**fields, logprobs=True, top_logprobs=1)
        stream = client.chat.completions.create(**fields, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in stream)
        assert text == whole.choices[0].message.content
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 12
        done = client.completions.create(model="stories", prompt=PROMPT, echo=True, n=2)
        assert all(choice.text.startswith(PROMPT) for choice in done.choices)
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**fields, presence_penalty=1.0)
        assert error.value.param == "presence_penalty"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt=PROMPT)


def test_running_texts_end_with_the_model_they_began_with(
    stories, stories_model, stories_tokenizer, monkeypatch
):
    other = copy.deepcopy(stories_model)
    with torch.no_grad():
        for parameter in other.layers["4"].parameters():
            parameter.mul_(-1)
    [old] = texts_of(stories_model, stories_tokenizer, [PROMPT], 60)
    [new] = texts_of(other, stories_tokenizer, [PROMPT], 60)
    assert old != new
    app, scheduler = make_app(stories)
    goes_on = threading.Event()
    has_begun = threading.Event()
    uses: list[list[str]] = []

    def draw(logits_BV, sampling, generators, *weights):
        has_begun.set()
        goes_on.wait(60)
        return logits_BV.argmax(-1)

    monkeypatch.setattr("torchtitan.components.generation.next_tokens.draw", draw)
    with TestClient(app, base_url=ANY_HOST) as client:
        found: dict[str, str] = {}

        def ask_one(name: str) -> None:
            found[name] = choices(client, max_tokens=60)[0]["text"]

        threads = [threading.Thread(target=ask_one, args=("before",))]
        threads[0].start()
        assert has_begun.wait(60)
        scheduler.replace(other, lambda: uses.append(sorted(found)))
        threads.append(threading.Thread(target=ask_one, args=("after",)))
        threads[1].start()
        while not scheduler.n_waiting:
            time.sleep(0.01)
        goes_on.set()
        for thread in threads:
            thread.join()
    assert found == {"before": old, "after": new}
    assert len(uses) == 1 and "after" not in uses[0]
