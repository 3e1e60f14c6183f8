"""Encoding of conversations and texts as token ids with a training mask."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.data.disk_cache import digest_of
from torchtitan.components.data.finetuning.conversation import BrokenSample, Conversation, Pair, Sample, Text
from torchtitan.components.data.finetuning.loss_mask import Rendered, TrainOn, render_with_mask
from torchtitan.components.tokenizer import Offsets, Tokenizer
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?s>|<(?:start|end)_of_turn>")
"""Text that is always meant as a special token: the forms of most models, DeepSeek (full-width bars) and Gemma. Not
`[INST]` and the like, which is ordinary text in Llama 2."""

_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Text that looks like one token, at the place where a model has to stop."""


class EncodedSample(NamedTuple):
    """A sample as token ids."""

    ids: np.ndarray
    """Token ids, int64 (n,)."""
    trained: np.ndarray
    """Mask of the tokens that the model learns to predict, bool (n,)."""
    n_special_in_text: int = 0
    """Special tokens, not written by the template, that its content spells."""


class EncodedRow(NamedTuple):
    """A row as a model sees it."""

    parts: tuple[EncodedSample, ...]
    """Token sequences, the same number for every row of a kind."""
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
        """Predicted tokens: trained ones except the first of each part."""
        return sum(int(part.trained[1:].sum()) for part in self.parts)

    @property
    def n_special_in_text(self) -> int:
        return sum(part.n_special_in_text for part in self.parts)


class ChatEncoder:
    """Encodes conversations by a chat template.

    The ids encode the whole rendered text, as transformers' `apply_chat_template` does. The mask equals its
    `assistant_masks` if the template marks the assistant's text (see `render_with_mask`), with three exceptions: a
    trained turn's end token is trained even if it is not marked, as are all tokens of the turn's last character; a
    special token before a turn that absorbs the turn's leading white space is not trained; nor is white space after a
    turn found by prefixes.

    Args:
        tokenizer: of the model.
        template: None if there are only texts.
        train_on: turns to train on, unless a conversation's row says so itself.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, train_on: TrainOn):
        self._tokenizer, self._template, self._train_on = tokenizer, template, train_on
        self._special_ids = tokenizer.special_ids
        self._spellings = _Spellings([tokenizer.decode([token_id]) for token_id in self._special_ids])
        self._end_ids = {tokenizer.eos_id, template.end_of_turn_id(tokenizer) if template else None} - {None}
        self._reported = self._warned = False

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of tokenizer, template and `train_on`, which decide ids and masks, for cache keys."""
        template = [self._template.source, self._template.variables] if self._template else None
        parts = [self._tokenizer.fingerprint, sorted(self._special_ids), template, self._train_on]
        return digest_of(parts)

    def check(self) -> None:
        """Raise `UserError` if the vocabulary lacks tokens of the template, see `_check_template_tokens`; warn if the
        template's text depends on the date."""
        if self._template:
            _check_template_tokens(self._template, self._tokenizer)
            if "strftime_now" in self._template.source:
                logger.warning(
                    f"{self._template.name} writes the date, by strftime_now: what is tokenized now keeps this day's, "
                    "also where it is found again in the cache"
                )

    def encode_batch(self, samples: Sequence[Conversation | Text]) -> list[EncodedSample | BrokenSample]:
        """Return the ids and mask of each sample, or why it cannot be encoded; raises `UserError` if a template is
        missing.

        A text gets BOS if the model has it, and EOS, see `Tokenizer.encode_documents`; all but BOS is trained on.
        """
        texts = iter(self._encode_texts([sample.text for sample in samples if isinstance(sample, Text)]))
        conversations = [sample for sample in samples if not isinstance(sample, Text)]
        chats = iter(self._encode_conversations(conversations, self._train_on))
        return [next(texts) if isinstance(sample, Text) else next(chats) for sample in samples]

    def encode_prompt(self, conversation: Conversation) -> np.ndarray:
        """Return the ids, int64 (n,), of a conversation that awaits the assistant's answer, with the generation prompt.

        Raises:
            BrokenSample: the template does not accept the conversation.
            UserError: there is no template.
        """
        template = self._required_template()
        try:
            text = template.render(conversation.messages, tools=conversation.tools, add_generation_prompt=True)
        except UserError as error:
            raise BrokenSample(str(error)) from error
        return np.array(self._tokenizer.tokenize([text], allow_special=True)[0], dtype=np.int64)

    def encode_pair(self, pair: Pair) -> tuple[EncodedSample, EncodedSample]:
        """Encode the prompt with each continuation; only the assistant's turns of the continuation are trained on.

        Raises:
            BrokenSample: one of them cannot be encoded.
            UserError: there is no template.
        """
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
                "there are conversations, which need a chat template: --dataloader.chat_template "
                f"{'|'.join(BUILT_IN_TEMPLATES)} sets one, as does a file"
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
            self._masked(result, *next(encoded), self._spellings.count(conversation))
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
                f"the generation prompt of {template.name} is {prompt!r}, but in its finished turns answers follow "
                f"{header!r}: they are trained behind that header, and generation begins behind that prompt by default"
            )
        return rendered

    def _masked(self, rendered: Rendered, ids: list[int], offsets: Offsets, n_special_in_text: int) -> EncodedSample:
        tokens = _Tokens(rendered.text, ids, offsets, self._special_ids)
        trained = np.full(len(ids), rendered.default)
        # Unmarked turns that a row asks for come last, so that marked turns do not undo them.
        for turn in rendered.turns:
            positions = tokens.range_of(*turn.span)
            if turn.marked:
                stop = self._end_of_marked(tokens, positions)
            else:
                stop = tokens.end_of_turn(positions) if turn.trained else positions.stop
            trained[positions.start : stop] = turn.trained
        return EncodedSample(np.array(ids, dtype=np.int64), self._without_bos(ids, trained), n_special_in_text)

    def _end_of_marked(self, tokens: "_Tokens", turn: range) -> int:
        """Return the position after a turn, including its end token even if the template does not mark it."""
        if tokens.ends_with_special(turn) or tokens.special_at(turn.stop) not in self._end_ids:
            return turn.stop
        if not self._reported:
            self._reported = True
            text = self._tokenizer.decode([tokens.ids[turn.stop]])
            logger.info(
                f"{self._required_template().name} marks the assistant's turns without {text!r}, which ends them: it "
                "is trained on as well, for the model to learn to stop"
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
        """Return the tokens with a character in [start, end), or an empty range at `start`, without a special token
        that begins before `start`: some absorb the white space that follows them."""
        found = np.flatnonzero((self._starts < end) & (self._ends > start) & (self._ends > self._starts))
        if len(found):
            first = int(found[0])
            in_front = self._starts[first] < start and self.special_at(first) is not None
            return range(first + in_front, int(found[-1]) + 1)
        position = int(np.searchsorted(self._starts, start))
        return range(position, position)

    def special_at(self, position: int) -> int | None:
        token = self.ids[position] if position < len(self.ids) else None
        return token if token in self._special_ids else None

    def ends_with_special(self, turn: range) -> bool:
        """Return whether a turn ends with a special token, followed by white space at most."""
        return bool(turn) and self.special_at(self.end_of_turn(turn) - 1) is not None

    def end_of_turn(self, turn: range) -> int:
        """Return the position after the special token that ends a turn, where the model stops, else after the turn."""
        for position in reversed(turn):
            if self.special_at(position) is not None:
                return position + 1
            if self._text[self._starts[position] : self._ends[position]].strip():
                break
        return turn.stop


class _Spellings:
    """Finds special tokens spelled in user content."""

    def __init__(self, tokens: Sequence[str]):
        self._tokens = frozenset(tokens)
        self._lengths = sorted({len(token) for token in self._tokens})
        first = "".join(sorted({re.escape(token[0]) for token in self._tokens if token}))
        self._candidate = re.compile(f"[{first}]" if first else "(?!)")

    def count(self, conversation: Conversation) -> int:
        texts = chain(_texts(conversation.messages), _texts(conversation.tools))
        return sum(self._starts_at(text, found.start()) for text in texts for found in self._candidate.finditer(text))

    def _starts_at(self, text: str, position: int) -> bool:
        return any(text[position : position + length] in self._tokens for length in self._lengths)


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)


def _check_template_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if the template writes special tokens that the vocabulary does not have.

    They would be learned as ordinary text, and none would end an answer. A model's own template may have such markers
    if the model was trained with them (Zephyr's `<|user|>`) and a special token ends its turns. In any other template,
    markup after an answer must be a token, whatever it looks like.
    """
    end = template.end_of_turn()
    [end_ids] = tokenizer.tokenize([end], allow_special=True)
    ends_by_special = not tokenizer.special_ids.isdisjoint(end_ids)
    texts = [token for text in template.literals for token in _LOOKS_SPECIAL.findall(text)]
    texts += template.required_tokens
    if not ends_by_special and not template.of_model:
        texts += _MARKUP.findall(end)
    missing = [token for token in dict.fromkeys(texts) if tokenizer.id_of(token) is None]
    if missing and template.of_model and ends_by_special:
        logger.warning(f"{template.name} writes {', '.join(missing)}, which the tokenizer encodes as ordinary text")
    elif missing:
        raise UserError(
            f"{template.name} writes {', '.join(missing)}, which the vocabulary does not have; choose another "
            f"--dataloader.chat_template, or add the tokens: --tokenizer.added_tokens {' '.join(map(repr, missing))}"
        )
    elif not ends_by_special:
        logger.warning(
            f"{template.name} writes no special token behind an answer: a model that is trained with it will not stop"
        )


class RowEncoder:
    """Encodes rows of a kind for a `SampleCache`."""

    n_parts: ClassVar[int] = 1
    """Token sequences of a row."""
    has_answers: ClassVar[bool] = False
    """Whether rows may have reference answers."""

    def __init__(self, chat: ChatEncoder):
        self._chat = chat

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest; encoders with the same digest encode equally."""
        return digest_of([type(self).__name__, self._chat.fingerprint])

    def check(self) -> None:
        """Prepare for the first conversation; raises `UserError` if none can be encoded."""
        self._chat.check()

    def encode_batch(self, samples: Sequence[Sample]) -> list[EncodedRow | BrokenSample]:
        """Return each sample encoded, or why it cannot be."""
        return [self._encoded(sample) for sample in samples]

    def encode(self, sample: Sample) -> EncodedRow:
        """Return one encoded sample; raises `BrokenSample` if it cannot be encoded."""
        raise NotImplementedError

    def _encoded(self, sample: Sample) -> EncodedRow | BrokenSample:
        try:
            return self.encode(sample)
        except BrokenSample as error:
            return error
