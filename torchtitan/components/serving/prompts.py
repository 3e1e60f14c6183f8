"""From a checked request to jobs: prompts as token ids, stops, random numbers."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtitan.components.chat_template import ChatTemplate
from torchtitan.components.chat_template.replies import Reader, ReplyFormat
from torchtitan.components.chat_template.stops import Stops
from torchtitan.components.data.finetuning.histories import render_history
from torchtitan.components.data.finetuning.losses import is_written
from torchtitan.components.generation import start_id, stop_ids
from torchtitan.components.serving.errors import RequestError
from torchtitan.components.serving.fields import shown
from torchtitan.components.serving.jobs import Job
from torchtitan.components.serving.requests import (
    MESSAGE_KEYS,
    ChatRequest,
    CompletionRequest,
    Prompt,
    Request,
)
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError, suggest

_CHARACTERS = 32
"""Characters that a token of the context may have in a text that is encoded at once."""


@dataclass(slots=True)
class Prepared:
    """Jobs of a request, in the order of its choices."""

    jobs: list[Job]
    n_prompt_tokens: int
    echoes: list[str]
    """Texts that the choices of a completion begin with."""
    readers: list[Reader]
    """Readers of the choices of a chat."""


class Preparer:
    """Makes jobs of requests for one model.

    Args:
        folders: searched in order for generation_config.json.
        context: maximum tokens of a text with its prompt.
        vocab_size: number of token ids that model and tokenizer know.
        template: chat template; None: the model has none, and chats are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        folders: Sequence[Path],
        *,
        context: int,
        vocab_size: int,
        template: ChatTemplate | None,
    ):
        self.tokenizer = tokenizer
        self.context = context
        self._vocab_size = vocab_size
        self.template = template
        self._stop_ids = stop_ids(tokenizer, *folders)
        self._stop_texts: list[str] = []
        self._replies: ReplyFormat | None = None
        if template is not None:
            stops = Stops(template, tokenizer)
            self._stop_ids |= {*stops.ids()}
            self._stop_texts = stops.texts()
            self._replies = ReplyFormat(template, tokenizer)

    @property
    def unread_calls(self) -> str:
        """Message for clients with tools (`ReplyFormat.unread_calls`); empty if there is nothing to
        tell."""
        return self._replies.unread_calls if self._replies else ""

    @property
    def has_template(self) -> bool:
        """True if the model answers chats."""
        return self.template is not None

    def completion(self, request: CompletionRequest) -> Prepared:
        """Return the jobs of `/v1/completions`. Raise `RequestError` for a prompt that does not
        fit."""
        prompts = [self._ids(prompt) for prompt in request.prompts]
        jobs: list[Job] = []
        echoes = []
        for prompt, ids in zip(request.prompts, prompts, strict=True):
            most = self._most_tokens(request, ids)
            text = prompt if isinstance(prompt, str) else self._decode(ids)
            for _ in range(request.n):
                jobs.append(self._job(request, len(jobs), ids, most, [], {}))
                jobs[-1].scores_prompt = request.echo and request.logprobs
                echoes.append(text if request.echo else "")
        return Prepared(jobs, sum(map(len, prompts)), echoes, [])

    def chat(self, request: ChatRequest) -> Prepared:
        """Return the jobs of `/v1/chat/completions`. Raise `RequestError` if the template rejects
        the conversation, or it does not fit."""
        replies = self._replies
        if replies is None:
            raise RequestError(
                "the model has no chat template, so it may not be trained on conversations; use "
                "/v1/completions, or start the server with --chat_template",
                code="no_chat_template",
            )
        text = self._render(request)
        prefix = self._forced(request, replies)
        ids = self._encode(
            text + prefix, "messages", add_bos=False, add_eos=False, allow_special=True
        )
        tools = request.conversation.tools or []
        reads_calls = bool(tools) and request.tool_choice != "none"
        kept = replies.kept(with_calls=reads_calls)
        most = self._most_tokens(request, ids)
        jobs = []
        readers = []
        for index in range(request.n):
            jobs.append(self._job(request, index, ids, most, self._stop_texts, kept))
            readers.append(replies.reader(text, tools, reads_calls=reads_calls, begun=prefix))
        return Prepared(jobs, len(ids), [], readers)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, "prompt", add_eos=False) or [start_id(self.tokenizer)]
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"prompt has the token {token}, but the vocabulary ends at "
                    f"{self._vocab_size - 1}",
                    param="prompt",
                    code="invalid_value",
                )
        return prompt

    def _encode(self, text: str, param: str, **options: bool) -> list[int]:
        """Return the token ids of a text. Raise `RequestError` if its beginning has twice as many
        as the context: all of a body's text may take seconds and gigabytes."""
        beginning = text[: _CHARACTERS * self.context]
        if len(beginning) < len(text):
            n_tokens = len(self.tokenizer.encode(beginning, **options))
            if n_tokens > 2 * self.context:
                raise self._no_room(f"more than {n_tokens}", param)
        return self.tokenizer.encode(text, **options)

    def _no_room(self, n_tokens: int | str, param: str) -> RequestError:
        return RequestError(
            f"the prompt has {n_tokens} tokens, which leaves no room for a new one in the model's "
            f"context of {self.context} tokens; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _most_tokens(self, request: Request, ids: Sequence[int]) -> int:
        """Return the limit of new tokens."""
        room = self.context - len(ids)
        wanted = max(room, 1) if request.max_tokens is None else request.max_tokens
        if wanted <= room:
            return wanted
        if room <= 0:
            param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise self._no_room(len(ids), param)
        raise RequestError(
            f"the prompt has {len(ids)} tokens and max_tokens is {wanted}, together "
            f"{len(ids) + wanted}, but the model's context has {self.context} tokens; shorten "
            f"the prompt, or set max_tokens to at most {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )

    def _job(
        self,
        request: Request,
        index: int,
        ids: list[int],
        most: int,
        stop_texts: Sequence[str],
        kept: dict[int, str],
    ) -> Job:
        seed = secrets.token_hex(8) if request.seed is None else request.seed
        return Job(
            index=index,
            prompt=ids,
            max_new_tokens=most,
            sampling=request.sampling,
            key=f"{seed}/{index}",
            stop=[*request.stop, *stop_texts],
            stop_ids=self._stop_ids,
            kept=kept,
            wants_logprobs=request.logprobs,
            n_top=min(request.n_top, self._vocab_size),
            streams=request.stream,
        )

    def _render(self, request: ChatRequest) -> str:
        template = self.template
        assert template is not None
        conversation = request.conversation
        messages = [
            {**message, "role": "system"}
            if message["role"] == "developer" and not self._writes_developers
            else message
            for message in conversation.messages
        ]
        for name in request.options:
            if name not in template.option_names:
                known = ", ".join(template.option_names) or "none"
                raise RequestError(
                    f"{template.name} does not read the option {shown(name)}, but {known}"
                    + suggest(name, template.option_names),
                    param="chat_template_kwargs",
                    code="unsupported_field",
                )
        self._check_keys(messages)
        # With tool_choice none, the model does not see the tools.
        tools = conversation.tools if request.tool_choice != "none" else None
        if tools and not template.reads("tools"):
            raise RequestError(
                f"{template.name} has no place for tools; leave tools out, or start the server "
                "with another --chat_template",
                param="tools",
                code="unsupported_field",
            )
        try:
            text = render_history(template, messages, tools=tools, **request.options)
        except UserError as error:
            raise RequestError(str(error), param="messages", code="invalid_value") from None
        self._check_written(text, messages, tools)
        return text

    @cached_property
    def _writes_developers(self) -> bool:
        """True if the template has a place for developers, OpenAI's later name of the system."""
        assert self.template is not None
        words = "Answer in rhymes."
        trial = [{"role": "developer", "content": words}, {"role": "user", "content": "Hi."}]
        try:
            return words in self.template.render(trial, add_generation_prompt=True)
        except UserError:
            return False

    def _check_keys(self, messages: Sequence[dict[str, Any]]) -> None:
        """Raise `RequestError` for a key of a message that asks for something and that the template
        does not read, such as `prefix`."""
        assert self.template is not None
        for number, message in enumerate(messages):
            for key in message.keys() - MESSAGE_KEYS:
                if not message[key] or re.search(
                    rf"[.'\"]{re.escape(key)}\b", self.template.source
                ):
                    continue
                name = f"messages[{number}].{key[:80]}"
                raise RequestError(
                    f"{name} is {shown(message[key])}, but {self.template.name} does not read it; "
                    "leave it out",
                    param=name,
                    code="unsupported_field",
                )

    def _check_written(
        self,
        text: str,
        messages: Sequence[dict[str, object]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Raise `RequestError` if the template omits a message that it should show."""
        assert self.template is not None
        place = 0  # most templates write messages in order: do not search all text for each
        for number, message in enumerate(messages):
            content = message.get("content")
            if message["role"] == "assistant" or not isinstance(content, str):
                continue  # templates drop earlier reasoning and calls on purpose
            content = content.strip()
            if (found := text.find(content, place)) >= 0:
                place = found + len(content)
            elif not is_written(content, text):
                raise RequestError(
                    f"{self.template.name} omits messages[{number}], of the role "
                    f"{message['role']}; put its content into another message",
                    param="messages",
                    code="unsupported_field",
                )
        for tool in tools or []:
            name = tool["function"]["name"]
            if name not in text:
                raise RequestError(
                    f"{self.template.name} omits the tool {shown(name)} in this conversation",
                    param="tools",
                    code="unsupported_field",
                )

    def _forced(self, request: ChatRequest, replies: ReplyFormat) -> str:
        """Return the beginning of a reply that calls a function; empty if it need not."""
        if request.tool_choice != "required":
            return ""
        marks = replies.calls
        if marks is None or marks.before_name is None:
            assert self.template is not None
            raise RequestError(
                f"tool_choice cannot force a call, since {self.template.name} writes none that "
                'can be begun for the model; set "auto"',
                param="tool_choice",
                code="unsupported_field",
            )
        if not request.function:
            return marks.before_name
        return marks.before_name + request.function + marks.after_name
