"""Encoding of conversations and texts as token ids with a training mask."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation, Pair, Sample, Text
from torchtitan.components.data.finetuning.loss_mask import Rendered, TrainOn, render_with_mask
from torchtitan.components.tokenizer import Offsets, Tokenizer
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?s>|<(?:start|end)_of_turn>")
"""Text that can only be a special token, in the forms of most models, DeepSeek (full-width bars) and Gemma. Excludes
`[INST]` and similar markers, which are ordinary text in Llama 2."""

_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Text that looks like a single token; applied only to the end of an answer."""


class EncodedSample(NamedTuple):
    """A sample as token ids."""

    ids: np.ndarray
    """Token ids, int64 (n,)."""
    trained: np.ndarray
    """Mask of the tokens that the model learns to predict, bool (n,)."""
    n_special_in_text: int = 0
    """Special tokens written in the text rather than by the template."""


class EncodedRow(NamedTuple):
    """An encoded row."""

    parts: tuple[EncodedSample, ...]
    """Token sequences; all rows of a kind have the same number."""
    answer: str | None = None

    @property
    def ids(self) -> np.ndarray:
        """Concatenated token ids of all parts, int64 (n,)."""
        return np.concatenate([part.ids for part in self.parts])

    @property
    def trained(self) -> np.ndarray:
        """Mask of the tokens that the model learns to predict, bool (n,)."""
        return np.concatenate([part.trained for part in self.parts])

    @property
    def n_tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    @property
    def n_trained(self) -> int:
        """Predicted tokens: the trained tokens except the first token of each part."""
        return sum(int(part.trained[1:].sum()) for part in self.parts)

    @property
    def n_special_in_text(self) -> int:
        return sum(part.n_special_in_text for part in self.parts)


class ChatEncoder:
    """Encodes conversations with a chat template.

    The ids encode the whole rendered text, as transformers' `apply_chat_template` does. The mask equals its
    `assistant_masks` if the template marks the assistant's text (see `render_with_mask`), with three exceptions: the
    end token of a trained turn and all tokens of its last character are trained even if they are not marked; a special
    token that absorbs the leading whitespace of the next turn is not trained; whitespace after a turn found by
    prefixes is not trained.

    Args:
        tokenizer: tokenizer of the model.
        template: chat template; None for data without conversations.
        train_on: turns to train on if the row does not specify them.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, train_on: TrainOn):
        self._tokenizer, self._template, self._train_on = tokenizer, template, train_on
        self._special_ids = tokenizer.special_ids
        special = sorted((tokenizer.decode([token_id]) for token_id in self._special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(token) for token in special if token) or "(?!)")
        self._end_ids = {tokenizer.eos_id, template.end_of_turn_id(tokenizer) if template else None} - {None}
        self._reported = self._warned = False

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of tokenizer, template and `train_on`, for cache keys."""
        template = [self._template.source, self._template.variables] if self._template else None
        parts = [self._tokenizer.fingerprint, sorted(self._special_ids), template, self._train_on]
        return digest_of(parts)

    def check(self) -> None:
        """Raise `UserError` if tokens of the template are missing from the vocabulary (see `_check_template_tokens`).
        Warn if the template's text depends on the date."""
        if self._template:
            _check_template_tokens(self._template, self._tokenizer)
            if "strftime_now" in self._template.source:
                logger.warning(
                    f"{self._template.name} writes the current date (strftime_now): cached samples keep the date of "
                    "their tokenization"
                )

    def encode_batch(self, samples: Sequence[Conversation | Text]) -> list[EncodedSample | BrokenSample]:
        """Return each encoded sample, or the error that prevents encoding. Raise `UserError` if a template is missing.

        Texts get BOS (if the model has it) and EOS, as by `Tokenizer.encode_documents`; all tokens but BOS are trained.
        """
        texts = iter(self._encode_texts([sample.text for sample in samples if isinstance(sample, Text)]))
        conversations = [sample for sample in samples if not isinstance(sample, Text)]
        chats = iter(self._encode_conversations(conversations, self._train_on))
        return [next(texts) if isinstance(sample, Text) else next(chats) for sample in samples]

    def encode_prompt(self, conversation: Conversation) -> np.ndarray:
        """Return the ids, int64 (n,), of a conversation followed by the generation prompt. Raise `BrokenSample` if
        the template does not accept the conversation, `UserError` if there is none."""
        template = self._required_template()
        try:
            text = template.render(conversation.messages, tools=conversation.tools, add_generation_prompt=True)
        except UserError as error:
            raise BrokenSample(str(error)) from error
        return np.array(self._tokenizer.tokenize([text], allow_special=True)[0], dtype=np.int64)

    def encode_pair(self, pair: Pair) -> tuple[EncodedSample, EncodedSample]:
        """Encode the prompt with each continuation. Only the assistant's turns in the continuations are trained. Raise
        `BrokenSample` if a continuation cannot be encoded, `UserError` if there is no template."""
        chosen, rejected = self._encode_conversations(
            [_continued(pair.prompt, pair.chosen), _continued(pair.prompt, pair.rejected)], "assistant"
        )
        for encoded in (chosen, rejected):
            if isinstance(encoded, BrokenSample):
                raise encoded
        assert isinstance(chosen, EncodedSample) and isinstance(rejected, EncodedSample)
        return chosen, rejected

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError(
                "the data contains conversations, but the model has no chat template; set --dataloader.chat_template "
                f"to a file or one of: {', '.join(BUILT_IN_TEMPLATES)}"
            )
        return self._template

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[EncodedSample]:
        for ids in self._tokenizer.encode_documents(texts) if texts else []:
            yield EncodedSample(np.array(ids, dtype=np.int64), self._without_bos(ids, np.ones(len(ids), dtype=bool)))

    def _encode_conversations(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[EncodedSample | BrokenSample]:
        results: list[Rendered | BrokenSample] = [self._render(sample, train_on) for sample in conversations]
        texts = [result.text for result in results if isinstance(result, Rendered)]
        encoded = iter(self._tokenizer.tokenize_with_offsets(texts, allow_special=True) if texts else [])
        return [
            self._masked(result, *next(encoded), self._count_special(conversation))
            if isinstance(result, Rendered)
            else result
            for conversation, result in zip(conversations, results, strict=True)
        ]

    def _render(self, conversation: Conversation, train_on: TrainOn) -> Rendered | BrokenSample:
        template = self._required_template()
        try:
            rendered = render_with_mask(template, conversation, train_on)
        except BrokenSample as error:
            return error
        if rendered.unprompted and not self._warned:
            self._warned = True
            prompt, header = rendered.unprompted
            logger.warning(
                f"{template.name} writes {header!r} before finished answers, but its generation prompt is {prompt!r}: "
                "training uses the first, generation the second by default"
            )
        return rendered

    def _masked(self, rendered: Rendered, ids: list[int], offsets: Offsets, n_special_in_text: int) -> EncodedSample:
        tokens = _Tokens(rendered.text, ids, offsets, self._special_ids)
        trained = np.full(len(ids), rendered.default)
        # Unmarked turns that the row selects come last, so that marked turns do not overwrite them.
        for turn in rendered.turns:
            positions = tokens.range_of(*turn.span)
            if turn.marked:
                stop = self._end_of_marked(tokens, positions)
            else:
                stop = tokens.end_of_turn(positions) if turn.trained else positions.stop
            trained[positions.start : stop] = turn.trained
        return EncodedSample(np.array(ids, dtype=np.int64), self._without_bos(ids, trained), n_special_in_text)

    def _count_special(self, conversation: Conversation) -> int:
        """Count the special tokens that are written in the text of a conversation."""
        texts = chain(_texts(conversation.messages), _texts(conversation.tools))
        return sum(1 for text in texts for _ in self._special.finditer(text))

    def _end_of_marked(self, tokens: "_Tokens", turn: range) -> int:
        """Return the position after a turn and its end token, marked or not."""
        if tokens.ends_with_special(turn) or tokens.special_at(turn.stop) not in self._end_ids:
            return turn.stop
        if not self._reported:
            self._reported = True
            text = self._tokenizer.decode([tokens.ids[turn.stop]])
            logger.info(
                f"{self._required_template().name} does not mark the end token {text!r} of the assistant's turns; it "
                "is trained anyway, so that the model learns to stop"
            )
        return turn.stop + 1

    def _without_bos(self, ids: Sequence[int], trained: np.ndarray) -> np.ndarray:
        if ids and ids[0] == self._tokenizer.bos_id:
            trained[0] = False
        return trained


def _continued(prompt: Conversation, messages: Sequence[dict[str, Any]]) -> Conversation:
    trained: list[bool | None] = [False for _ in prompt.messages]
    trained += [message["role"] == "assistant" for message in messages]
    return Conversation([*prompt.messages, *messages], prompt.tools, trained)


class _Tokens:
    def __init__(self, text: str, ids: list[int], offsets: Offsets, special_ids: frozenset[int]):
        self._text, self.ids, self._special_ids = text, ids, special_ids
        self._starts, self._ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T

    def range_of(self, start: int, end: int) -> range:
        """Return the tokens with a character in [start, end), or an empty range at `start`. Excludes a special token
        that begins before `start` and absorbs the whitespace after it."""
        found = np.flatnonzero((self._starts < end) & (self._ends > start) & (self._ends > self._starts))
        if len(found):
            first = int(found[0])
            is_excluded = self._starts[first] < start and self.special_at(first) is not None
            return range(first + is_excluded, int(found[-1]) + 1)
        position = int(np.searchsorted(self._starts, start))
        return range(position, position)

    def special_at(self, position: int) -> int | None:
        token = self.ids[position] if position < len(self.ids) else None
        return token if token in self._special_ids else None

    def ends_with_special(self, turn: range) -> bool:
        """Return whether a turn ends with a special token, ignoring whitespace after it."""
        return bool(turn) and self.special_at(self.end_of_turn(turn) - 1) is not None

    def end_of_turn(self, turn: range) -> int:
        """Return the position after the special token that ends a turn, or after the turn if there is none."""
        for position in reversed(turn):
            if self.special_at(position) is not None:
                return position + 1
            if self._text[self._starts[position] : self._ends[position]].strip():
                break
        return turn.stop


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            pending.extend(value.values() if isinstance(value, dict) else value)


def _check_template_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if the template writes special tokens that are not in the vocabulary.

    They would be learned as ordinary text, and none would end an answer. A model's own template may contain such
    markers (Zephyr's `<|user|>`) if a special token ends its turns. In any other template, all markup after an answer
    must be special tokens.
    """
    end = template.end_of_turn()
    [end_ids] = tokenizer.tokenize([end], allow_special=True)
    ends_with_special = not tokenizer.special_ids.isdisjoint(end_ids)
    texts = [token for text in template.literals for token in _LOOKS_SPECIAL.findall(text)]
    texts += template.required_tokens
    if not ends_with_special and not template.of_model:
        texts += _MARKUP.findall(end)
    missing = [token for token in dict.fromkeys(texts) if tokenizer.id_of(token) is None]
    if missing and template.of_model and ends_with_special:
        logger.warning(f"{template.name} writes {', '.join(missing)}, which the tokenizer encodes as ordinary text")
    elif missing:
        raise UserError(
            f"{template.name} writes {', '.join(missing)}, which the vocabulary does not contain; set "
            "another --dataloader.chat_template, or add the tokens with --tokenizer.added_tokens "
            + " ".join(map(repr, missing))
        )
    elif not ends_with_special:
        logger.warning(
            f"{template.name} writes no special token after an answer: a model trained with it will not stop"
        )


class RowEncoder:
    """Encodes the rows of one kind for a `SampleCache`."""

    n_parts: ClassVar[int] = 1
    """Number of token sequences per row."""
    has_answers: ClassVar[bool] = False
    """True if rows may have reference answers."""

    def __init__(self, chat: ChatEncoder):
        self._chat = chat

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest; equal digests mean equal encodings."""
        return digest_of([type(self).__name__, self._chat.fingerprint])

    def check(self) -> None:
        """Raise `UserError` if conversations cannot be encoded; called before the first one."""
        self._chat.check()

    def encode_batch(self, samples: Sequence[Sample]) -> list[EncodedRow | BrokenSample]:
        """Return each encoded sample, or the error that prevents encoding."""
        return [self._try_encode(sample) for sample in samples]

    def encode(self, sample: Sample) -> EncodedRow:
        """Encode one sample. Raise `BrokenSample` if this is impossible."""
        raise NotImplementedError

    def _try_encode(self, sample: Sample) -> EncodedRow | BrokenSample:
        try:
            return self.encode(sample)
        except BrokenSample as error:
            return error
