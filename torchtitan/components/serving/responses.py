"""Answers in the shapes of OpenAI's API."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchtitan.components.chat_template.parts import Piece
from torchtitan.components.serving.jobs import Entry, FinishReason, Job, Update
from torchtitan.components.serving.prompts import Prepared
from torchtitan.components.serving.requests import ChatRequest, CompletionRequest, Request
from torchtitan.components.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity
_UNDECODED = "�"


class TokenTexts:
    """Texts of single tokens, which together are the whole text. A part of a character has the text
    U+FFFD."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Before a token, so that a space at its beginning is not dropped.
        self._anchor = tokenizer.encode("a", add_bos=False, add_eos=False)[-1:]
        self._start = tokenizer.decode(self._anchor)
        self._known: dict[int, str] = {}
        self._special = tokenizer.special_ids

    def of(self, token: int) -> str:
        """Return the text of a token."""
        if token not in self._known:
            text = self._tokenizer.decode([*self._anchor, token])
            is_plain = text.startswith(self._start)
            self._known[token] = (
                text.removeprefix(self._start) if is_plain else self._tokenizer.decode([token])
            )
        return self._known[token]

    def is_special(self, token: int) -> bool:
        return token in self._special


@dataclass(slots=True)
class _Choice:
    """The state of a choice."""

    texts: list[str] = field(default_factory=list)
    piece: Piece = field(default_factory=Piece)
    entries: list[Entry] = field(default_factory=list)
    finish_reason: str | None = None
    n_characters: int = 0
    """Characters before the next token."""


class _Answer:
    """Builds the answer to one request, whole or as a stream."""

    name: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]

    def __init__(self, request: Request, prepared: Prepared, texts: TokenTexts):
        self._request = request
        self._prepared = prepared
        self._token_texts = texts
        self._id = f"{self.name}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._n_generated = 0
        self._choices = [_Choice() for _ in prepared.jobs]

    @property
    def jobs(self) -> list[Job]:
        return self._prepared.jobs

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self._request.model)

    @property
    def streams(self) -> bool:
        return bool(self._request.stream)

    def usage(self) -> dict[str, object]:
        """Return the numbers of tokens. A prompt counts once, however many choices it has."""
        n_prompt = self._prepared.n_prompt_tokens
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self._n_generated,
            "total_tokens": n_prompt + self._n_generated,
        }

    def add(self, update: Update) -> None:
        """Add an update, for `to_dict`."""
        raise NotImplementedError

    def chunks(self, update: Update) -> list[dict[str, object]]:
        """Return the parts of a stream for an update."""
        raise NotImplementedError

    def last_chunks(self) -> list[dict[str, object]]:
        """Return the parts after all choices."""
        if not self._request.include_usage:
            return []
        return [self._document(self.part, [], usage=self.usage())]

    def first_chunks(self) -> list[dict[str, object]]:
        """Return the parts before all choices."""
        return []

    def to_dict(self) -> dict[str, object]:
        """Return the whole answer."""
        choices = [self._whole_choice(index) for index in range(len(self._choices))]
        return self._document(self.whole, choices, usage=self.usage())

    def _whole_choice(self, index: int) -> dict[str, object]:
        raise NotImplementedError

    def _document(self, kind: str, choices: Sequence[object], **more: object) -> dict[str, object]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
            **more,
        }

    def _part(self, choice: dict[str, object]) -> dict[str, object]:
        usage = {"usage": None} if self._request.include_usage else {}
        return self._document(self.part, [choice], **usage)

    def _shown(self, token: int) -> str:
        return f"token_id:{token}" if self._request.ids_as_tokens else self._token_texts.of(token)


class CompletionAnswer(_Answer):
    """Answer of `/v1/completions`."""

    name = "cmpl"
    whole = "text_completion"
    part = "text_completion"
    _request: CompletionRequest

    def first_chunks(self) -> list[dict[str, object]]:
        return [
            self._part({"index": index, "text": echo, "logprobs": None, "finish_reason": None})
            for index, echo in enumerate(self._prepared.echoes)
            if echo
        ]

    def add(self, update: Update) -> None:
        self._n_generated += update.n_generated
        choice = self._choices[update.index]
        choice.texts.append(update.text)
        choice.entries += update.entries
        choice.finish_reason = update.finish_reason

    def chunks(self, update: Update) -> list[dict[str, object]]:
        self._n_generated += update.n_generated
        choice = self._choices[update.index]
        choice.entries += update.entries
        part = {
            "index": update.index,
            "text": update.text,
            "logprobs": self._logprobs(update.index, update.entries),
            "finish_reason": update.finish_reason,
        }
        return [self._part(part)]

    def _whole_choice(self, index: int) -> dict[str, object]:
        choice = self._choices[index]
        return {
            "index": index,
            "text": self._prepared.echoes[index] + "".join(choice.texts),
            "logprobs": self._logprobs(index, choice.entries),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, index: int, entries: Sequence[Entry]) -> dict[str, object] | None:
        if not self._request.logprobs:
            return None
        offsets = []
        choice = self._choices[index]
        has_echo = bool(self._prepared.echoes[index])
        if choice.n_characters == 0 and has_echo and not self._prepared.jobs[index].scores_prompt:
            choice.n_characters = len(self._prepared.echoes[index])
        for entry in entries:
            offsets.append(choice.n_characters)
            if not self._token_texts.is_special(entry.token):
                choice.n_characters += len(self._token_texts.of(entry.token))
        return {
            "tokens": [self._shown(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Entry) -> dict[str, float] | None:
        """Return the most probable tokens and the token itself. Of tokens with equal texts, such as
        parts of characters, the most probable one is there."""
        if entry.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
            found.setdefault(self._shown(token), max(logprob, _LOWEST))
        return found


class ChatAnswer(_Answer):
    """Answer of `/v1/chat/completions`."""

    name = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"
    _request: ChatRequest

    def first_chunks(self) -> list[dict[str, object]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chat_part(index, delta, [], None) for index in range(len(self._choices))]

    def add(self, update: Update) -> None:
        self._n_generated += update.n_generated
        choice = self._choices[update.index]
        choice.entries += update.entries
        for piece in self._pieces(update):
            for kind, text in piece.texts.items():
                choice.piece.add(kind, text)
            choice.piece.calls += piece.calls
        choice.finish_reason = self._reason(update.finish_reason, choice.piece)

    def chunks(self, update: Update) -> list[dict[str, object]]:
        self._n_generated += update.n_generated
        entries = update.entries
        found = []
        last = Piece()
        for piece in self._pieces(update):
            for kind, text in piece.texts.items():
                found.append(self._chat_part(update.index, {kind: text}, entries, None))
                entries = []
            for number, call in enumerate(piece.calls):
                delta = {"tool_calls": [{"index": number, **call.to_dict()}]}
                found.append(self._chat_part(update.index, delta, entries, None))
                entries = []
            last = piece
        if update.finish_reason is not None:
            reason = self._reason(update.finish_reason, last)
            found.append(self._chat_part(update.index, {}, entries, reason))
        elif entries and self._request.logprobs:
            found.append(self._chat_part(update.index, {}, entries, None))
        return found

    def _pieces(self, update: Update) -> list[Piece]:
        reader = self._prepared.readers[update.index]
        pieces = [reader.push(update.text)]
        if update.finish_reason is not None:
            pieces.append(reader.finish())
        if not self._request.has_parallel_calls:
            for piece in pieces:
                del piece.calls[1:]
        return pieces

    @staticmethod
    def _reason(reason: FinishReason | None, piece: Piece) -> str | None:
        return "tool_calls" if piece.calls and reason == "stop" else reason

    def _whole_choice(self, index: int) -> dict[str, object]:
        choice = self._choices[index]
        texts = choice.piece.texts
        message: dict[str, object] = {
            "role": "assistant",
            "content": texts.get("content", None if choice.piece.calls else ""),
            "refusal": None,
        }
        if reasoning := texts.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls := choice.piece.calls:
            message["tool_calls"] = [call.to_dict() for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.entries),
            "finish_reason": choice.finish_reason,
        }

    def _chat_part(
        self, index: int, delta: Mapping[str, object], entries: Sequence[Entry], reason: str | None
    ) -> dict[str, object]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(entries) if entries else None,
            "finish_reason": reason,
        }
        return self._part(choice)

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, object] | None:
        if not self._request.logprobs:
            return None
        content = [
            {
                **self._item(entry.token, entry.logprob),
                "top_logprobs": [self._item(token, logprob) for token, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _item(self, token: int, logprob: float | None) -> dict[str, object]:
        text = self._token_texts.of(token)
        return {
            "token": self._shown(token),
            "logprob": _finite(logprob),
            # A part of a character has bytes that the tokenizer does not tell.
            "bytes": None if _UNDECODED in text else list(text.encode()),
        }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST)
