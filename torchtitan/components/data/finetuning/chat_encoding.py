"""Encoding of conversations and texts as token ids with a training mask."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.chat_template.stops import Stops, special_pattern
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    LossySample,
    Pair,
    Sample,
    Text,
)
from torchtitan.components.data.finetuning.losses import Part, parts_of
from torchtitan.components.data.finetuning.renderings import Turn
from torchtitan.components.data.finetuning.turns import TurnFinder
from torchtitan.components.tokenizer import ArrayEncoder, SpanEncoder, Tokenizer, TokenSpans
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

TrainOn = Literal["all", "assistant", "last_assistant"]
"""All tokens, the assistant's turns, or only the last of them. A row's own settings take
precedence."""

_WINDOW = 256
"""Characters at the end of a prompt in which its last special token is looked for."""

_END_TOKENS = 4
"""Tokens at the end of a prompt without special tokens that are compared first."""

_MOST_ENDINGS = 10_000
"""Ends of prompts whose ids are remembered."""

_LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?s>|<(?:start|end)_of_turn>")
"""Text that can only be a special token, in the forms of most models, DeepSeek (full-width bars)
and Gemma. Excludes `[INST]` and similar markers, which are ordinary text in Llama 2."""

_MARKUP = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Text that looks like a single token; applied only to the end of an answer."""


class Facts(NamedTuple):
    """Counts of what a model learns from the turns of a sample."""

    n_turns: int = 0
    n_stops: int = 0
    """Turns that end with a stop."""
    n_only_stops: int = 0
    """Turns with only the stop trained."""
    options: tuple[str, ...] = ()
    """Options of the template that turns were rendered with, such as `enable_thinking=False`."""
    lost: tuple[str, ...] = ()
    """Parts that the template omits: trained parts whose loss the loader accepts, and parts of
    prompts."""
    unprompted: tuple[str, ...] = ()
    """Why turns are not trained for which the template has no prompt."""

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Facts":
        if not turns:
            return cls()
        options = [f"{name}={value}" for turn in turns for name, value in turn.form.options]
        return cls(
            len(turns),
            sum(bool(turn.stop) for turn in turns),
            sum(turn.is_only_a_stop for turn in turns),
            tuple(dict.fromkeys(options)),
            tuple(dict.fromkeys(part for turn in turns for part in (*turn.lost, *turn.unseen))),
            tuple(reason for turn in turns for reason in turn.unprompted),
        )

    def with_more(self, other: "Facts") -> "Facts":
        """Return the facts of both."""
        if other == _NO_FACTS:
            return self
        return Facts(
            self.n_turns + other.n_turns,
            self.n_stops + other.n_stops,
            self.n_only_stops + other.n_only_stops,
            tuple(dict.fromkeys([*self.options, *other.options])),
            tuple(dict.fromkeys([*self.lost, *other.lost])),
            (*self.unprompted, *other.unprompted),
        )


_NO_FACTS = Facts()


class EncodedSample(NamedTuple):
    """A sample as token ids."""

    ids: np.ndarray
    """Token ids, int64 (n,)."""
    trained: np.ndarray
    """Mask of the tokens that the model learns to predict, bool (n,)."""
    n_special_in_text: int = 0
    """Special tokens written in the text rather than by the template."""
    facts: Facts = _NO_FACTS


class EncodedRow(NamedTuple):
    """A sample of a row; a conversation whose template rewrites earlier turns has several."""

    parts: tuple[EncodedSample, ...]
    """Token sequences; all samples of a kind have the same number."""
    answer: str | None = None
    images: Sequence[Mapping[str, Any]] = ()
    """Images of the sample in order, as JSON-serializable objects."""

    @property
    def ids(self) -> np.ndarray:
        """Concatenated token ids of all parts, int64 (n,)."""
        return _concatenated([part.ids for part in self.parts])

    @property
    def trained(self) -> np.ndarray:
        """Mask of the tokens that the model learns to predict, bool (n,)."""
        return _concatenated([part.trained for part in self.parts])

    @property
    def n_tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    @property
    def n_trained(self) -> int:
        """Predicted tokens: the trained tokens except the first token of each part."""
        return sum(int(np.count_nonzero(part.trained[1:])) for part in self.parts)

    @property
    def n_special_in_text(self) -> int:
        return sum(part.n_special_in_text for part in self.parts)


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class ChatEncoder:
    """Encodes conversations with a chat template.

    Each trained turn of the assistant is encoded as inference sees it: the ids of the conversation
    before it with the generation prompt, and the ids of what the model must write, up to and
    including the stop (see `TurnFinder`). Turns share one sample if its ids begin with theirs; a
    template that rewrites earlier turns makes several samples of a conversation. If tokens would
    merge over the beginning of a turn, prompt and turn are encoded separately. If the template
    marks text by `{% generation %}`, only the marked part of a turn and its stop are trained.

    Args:
        tokenizer: tokenizer of the model.
        template: chat template; None for data without conversations.
        train_on: turns to train on if the row does not specify them.
        accepted: parts of messages that the template may omit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        train_on: TrainOn,
        accepted: Sequence[Part] = (),
    ):
        self._tokenizer = tokenizer
        self._template = template
        self._train_on = train_on
        self._accepted = sorted(accepted)
        self._encoder = SpanEncoder(tokenizer)
        self._special_ids = tokenizer.special_ids
        self._special = special_pattern(tokenizer)
        self._finder = TurnFinder(template, tokenizer, accepted) if template else None
        self._known_endings: dict[str, list[int]] = {}

    @property
    def arrays(self) -> ArrayEncoder:
        """Encoder of rendered conversations; its ids are always the tokenizer's."""
        return self._encoder.arrays

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of tokenizer, template and options, for cache keys."""
        template = [self._template.source, self._template.variables] if self._template else None
        parts = [
            self._tokenizer.fingerprint,
            sorted(self._special_ids),
            template,
            self._train_on,
            self._accepted,
        ]
        return digest_of(parts)

    def check(self) -> None:
        """Raise `UserError` if tokens of the template are missing from the vocabulary (see
        `_check_template_tokens`). Warn if the template's text depends on the date."""
        if self._template and self._finder:
            _check_template_tokens(self._template, self._tokenizer, self._finder.stops)
            if "strftime_now" in self._template.source:
                logger.warning(
                    f"{self._template.name} writes the current date (strftime_now): cached samples "
                    "keep the date of their tokenization"
                )

    def unread_options(self, conversation: Conversation) -> dict[str, str]:
        """Return the options of a conversation that the template does not read, with the reason."""
        template = self._template
        if template is None:
            return {}
        reason = f"{template.name} reads {', '.join(template.option_names) or 'no options'}"
        return {name: reason for name in conversation.options if not template.reads(name)}

    def encode_batch(
        self, samples: Sequence[Conversation | Text]
    ) -> list[list[EncodedSample] | BrokenSample]:
        """Return the samples of each conversation or text, or the error that prevents encoding.
        Raise `UserError` if a template is missing.

        Texts get BOS (if the model has it) and EOS, as by `Tokenizer.encode_documents`; all tokens
        but BOS are trained.
        """
        texts = iter(
            self._encode_texts([sample.text for sample in samples if isinstance(sample, Text)])
        )
        conversations = [sample for sample in samples if not isinstance(sample, Text)]
        chats = iter(self._encode_conversations(conversations, self._train_on))
        return [[next(texts)] if isinstance(sample, Text) else next(chats) for sample in samples]

    def encode_prompt(self, conversation: Conversation) -> np.ndarray:
        """Return the ids, int64 (n,), of a conversation followed by the generation prompt. Raise
        `BrokenSample` if the template does not accept the conversation, `UserError` if there is
        none."""
        text = self._required_finder().prompt(conversation)
        return np.array(self._tokenizer.tokenize([text], allow_special=True)[0], dtype=np.int64)

    def encode_pair(self, pair: Pair) -> tuple[EncodedSample, EncodedSample]:
        """Encode the prompt with each continuation. Only the assistant's turns in the continuations
        are trained. Raise `BrokenSample` if a continuation cannot be encoded as one sequence,
        `UserError` without a template."""
        finder = self._required_finder()
        thinks = finder.has_reasoning([*pair.prompt.messages, *pair.chosen, *pair.rejected])
        conversations = [
            _continued(pair.prompt, messages) for messages in (pair.chosen, pair.rejected)
        ]
        parts = []
        for encoded in self._encode_conversations(conversations, "assistant", thinks):
            if isinstance(encoded, BrokenSample):
                raise encoded
            if len(encoded) > 1:
                raise LossySample(
                    f"{self._template and self._template.name} rewrites earlier turns of an "
                    "answer, so its turns are not one sequence; end chosen and rejected after "
                    "their first turn",
                    "rewritten",
                )
            parts.append(encoded[0])
        return parts[0], parts[1]

    def encode_whole(self, prompt: Conversation, answer: Sequence[dict[str, Any]]) -> EncodedSample:
        """Encode a finished conversation as transformers' `apply_chat_template` does, for models
        that read it instead of continuing its prompt. All tokens from the answer on count as
        trained. Raise `BrokenSample` if the answer cannot be located, `UserError` if there is no
        template."""
        finder = self._required_finder()
        conversation = _continued(prompt, answer)
        whole = finder.whole(conversation)
        first, last = len(prompt.messages), len(conversation.messages)
        answers = [
            number
            for number in range(first, last)
            if conversation.messages[number]["role"] == "assistant"
        ]
        lost = whole.losses(answers)
        start, _ = whole.span(first, whole.text)
        [spans] = self._encoder.encode([whole.text])
        trained = np.zeros(len(spans.ids), bool)
        tokens = _Tokens(whole.text, spans, self._special_ids)
        trained[tokens.touched(start, len(whole.text))] = True
        return EncodedSample(spans.ids, trained, facts=Facts(lost=tuple(lost)))

    def _required_finder(self) -> TurnFinder:
        if self._finder is None:
            raise UserError(
                "the data contains conversations, but the model has no chat template; set "
                f"--dataloader.chat_template to a file or one of: {', '.join(BUILT_IN_TEMPLATES)}"
            )
        return self._finder

    def _encode_texts(self, texts: Sequence[str]) -> Iterator[EncodedSample]:
        for ids in self._tokenizer.encode_documents(texts) if texts else []:
            yield EncodedSample(
                np.array(ids, dtype=np.int64), self._without_bos(ids, np.ones(len(ids), dtype=bool))
            )

    def _encode_conversations(
        self, conversations: Sequence[Conversation], train_on: TrainOn, thinks: bool | None = None
    ) -> list[list[EncodedSample] | BrokenSample]:
        planned = [self._try_plan(conversation, train_on, thinks) for conversation in conversations]
        texts = [
            plan.text for plans in planned if not isinstance(plans, BrokenSample) for plan in plans
        ]
        encoded = iter(self._encoder.encode(texts))
        results: list[list[EncodedSample] | BrokenSample] = []
        for conversation, plans in zip(conversations, planned, strict=True):
            if isinstance(plans, BrokenSample):
                results.append(plans)
                continue
            samples = [sample for plan in plans for sample in self._samples_of(plan, next(encoded))]
            if n_special := self._count_special(conversation):
                samples[0] = samples[0]._replace(n_special_in_text=n_special)
            results.append(samples)
        return results

    def _try_plan(
        self, conversation: Conversation, train_on: TrainOn, thinks: bool | None
    ) -> "list[_Plan] | BrokenSample":
        finder = self._required_finder()
        try:
            return _plans(finder, conversation, train_on, thinks)
        except BrokenSample as error:
            return error

    def _samples_of(self, plan: "_Plan", spans: TokenSpans) -> list[EncodedSample]:
        """Return the sample of a plan, preceded by one sample for each turn whose prompt has other
        ids at inference."""
        tokens = _Tokens(plan.text, spans, self._special_ids)
        trained = np.zeros(len(spans.ids), bool)
        shared: list[Turn] = []
        apart: list[EncodedSample] = []
        for turn in plan.turns:
            start, stop = tokens.bounds(len(turn.prompt)), tokens.bounds(len(turn.text))
            if start is None or stop is None or not self._is_prompt(turn.prompt, tokens, start):
                apart.append(self._split(turn))
                continue
            shared.append(turn)
            if turn.marks is None:
                trained[start:stop] = True
            else:
                for span in _spans(turn):
                    trained[tokens.touched(*span)] = True
        if plan.turns and not shared and not plan.spans:
            return apart
        for first, last, flag in plan.spans:
            trained[tokens.touched(first, last)] = flag
        facts = Facts.of(shared).with_more(plan.more)
        whole = EncodedSample(spans.ids, self._without_bos(spans.ids, trained), facts=facts)
        return [*apart, whole]

    def _is_prompt(self, prompt: str, tokens: "_Tokens", n: int) -> bool:
        """Return whether the first `n` ids of a text are the ids of a prompt. Text after the prompt
        can change only its last tokens, so only the prompt's end is encoded again: from its last
        special token, whose text is the same in most conversations, or from some tokens before."""
        window, ids = prompt[-_WINDOW:], tokens.ids
        starts = [found.start() for found in self._special.finditer(window)]
        if not starts:
            first = max(0, n - _END_TOKENS)
            ending = prompt[tokens.start(first) :] if first < len(ids) else prompt
            if self._ids_of(ending) == ids[first:n].tolist():
                return True
            return self._tokenizer.tokenize([prompt], allow_special=True)[0] == ids[:n].tolist()
        known = self._ids_of(window[starts[-1] :])
        return ids[max(0, n - len(known)) : n].tolist() == known

    def _ids_of(self, ending: str) -> list[int]:
        if ending not in self._known_endings:
            if len(self._known_endings) > _MOST_ENDINGS:
                self._known_endings.clear()
            self._known_endings[ending] = self._tokenizer.tokenize([ending], allow_special=True)[0]
        return self._known_endings[ending]

    def _split(self, turn: Turn) -> EncodedSample:
        """Encode a prompt and a turn separately, as at inference."""
        [prompt] = self._tokenizer.tokenize([turn.prompt], allow_special=True)
        specials = self._special.findall(turn.prompt)
        anchors = ["", *specials[-1:]]
        n_text = len(self._tokenizer.decode(prompt))
        expected = self._tokenizer.decode(
            self._tokenizer.tokenize([turn.text], allow_special=True)[0]
        )
        chosen: list[int] = []
        for anchor in reversed(anchors):
            # Some tokenizers begin a text with a space, but not the text after a special token.
            n_anchor = (
                len(self._tokenizer.tokenize([anchor], allow_special=True)[0]) if anchor else 0
            )
            chosen = self._tokenizer.tokenize([anchor + turn.completion], allow_special=True)[0][
                n_anchor:
            ]
            if self._tokenizer.decode([*prompt, *chosen])[n_text:] == expected[n_text:]:
                break
        trained = np.ones(len(chosen), bool)
        if turn.marks is not None:
            offset = len(turn.prompt)
            [spans] = self._encoder.encode([turn.completion])
            if spans.ids.tolist() == chosen:
                tokens = _Tokens(turn.completion, spans, self._special_ids)
                trained[:] = False
                for start, stop in _spans(turn):
                    trained[tokens.touched(start - offset, stop - offset)] = True
        mask = np.concatenate([np.zeros(len(prompt), bool), trained])
        return EncodedSample(np.array([*prompt, *chosen], np.int64), mask, facts=Facts.of([turn]))

    def _count_special(self, conversation: Conversation) -> int:
        """Count the special tokens that are written in the text of a conversation."""
        texts = chain(_texts(conversation.messages), _texts(conversation.tools))
        return sum(len(self._special.findall(text)) for text in texts)

    def _without_bos(self, ids: Sequence[int] | np.ndarray, trained: np.ndarray) -> np.ndarray:
        if len(ids) and ids[0] == self._tokenizer.bos_id:
            trained[0] = False
        return trained


class _Plan(NamedTuple):
    """Text of a sample."""

    text: str
    turns: list[Turn]
    """Trained turns, from the last to the first; the text of each is a prefix of the text."""
    spans: list[tuple[int, int, bool]] = []
    """Other spans, in characters, with whether they are trained."""
    more: Facts = Facts()
    """Counts of what a model learns from the text besides the turns."""


def _plans(
    finder: TurnFinder, conversation: Conversation, train_on: TrainOn, thinks: bool | None
) -> list[_Plan]:
    messages = conversation.messages
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    default = {"all": range(len(messages)), "assistant": answers, "last_assistant": answers[-1:]}[
        train_on
    ]
    wanted = [n in default if flag is None else flag for n, flag in enumerate(conversation.trained)]
    if train_on == "all":
        return [_whole(finder, conversation, wanted)]
    trained = [number for number in answers if wanted[number]]
    others = [
        number for number, is_wanted in enumerate(wanted) if is_wanted and number not in answers
    ]
    turns = finder.turns(conversation, trained, thinks)
    plans: list[_Plan] = []
    for turn in reversed(turns):
        joined = next((plan for plan in plans if _begins_with(plan, turn)), None)
        if joined:
            joined.turns.append(turn)
        else:
            plans.insert(0, _Plan(turn.text + turn.rest, [turn]))
    if others or not turns:
        return _with_others(finder, conversation, plans, others)
    return plans


def _begins_with(plan: _Plan, turn: Turn) -> bool:
    return plan.turns[0].form.options == turn.form.options and plan.text.startswith(turn.text)


def _whole(finder: TurnFinder, conversation: Conversation, wanted: Sequence[bool]) -> _Plan:
    """Return the whole text, trained except messages that are not wanted. Raise `LossySample` if
    the text lacks a part of the assistant's messages that must be trained."""
    whole = finder.whole(conversation)
    roles = [message["role"] for message in conversation.messages]
    answers = [
        number for number, role in enumerate(roles) if role == "assistant" and wanted[number]
    ]
    lost = whole.losses(answers)
    untrained = [
        (*whole.span(n, whole.text), False) for n, is_wanted in enumerate(wanted) if not is_wanted
    ]
    facts = Facts(
        n_turns=len(answers),
        n_stops=whole.count_stops(answers),
        n_only_stops=sum(not parts_of(conversation.messages[number]) for number in answers),
        lost=tuple(dict.fromkeys(lost)),
    )
    return _Plan(whole.text, [], [(0, len(whole.text), True), *untrained], facts)


def _with_others(
    finder: TurnFinder, conversation: Conversation, plans: list[_Plan], others: Sequence[int]
) -> list[_Plan]:
    """Add the text of messages of other roles to the last plan."""
    last = plans.pop() if plans else _Plan("", [])
    text = last.text
    whole = finder.whole(conversation)
    if whole.text.startswith(text):
        text = whole.text
    found = [whole.span(number, text) for number in others]
    # The whitespace after the token that ends a message belongs to no message.
    spans = [(start, start + len(text[start:end].rstrip()), True) for start, end in found]
    return [*plans, _Plan(text, last.turns, spans)]


def _spans(turn: Turn) -> list[tuple[int, int]]:
    """Return the marked spans of a turn, and its stop."""
    end = len(turn.text)
    begin = len(turn.prompt)
    inside = [
        (max(first, begin), min(last, end))
        for first, last in turn.marks or ()
        if first < end and last >= begin
    ]
    is_marked = any(last >= end for _, last in inside) or not inside
    return inside if is_marked else [*inside, (end - len(turn.stop), end)]


def _continued(prompt: Conversation, messages: Sequence[dict[str, Any]]) -> Conversation:
    trained: list[bool | None] = [False for _ in prompt.messages]
    trained += [message["role"] == "assistant" for message in messages]
    return Conversation([*prompt.messages, *messages], prompt.tools, trained, prompt.options)


class _Tokens:
    """Tokens of a text, with their spans in characters, in order."""

    def __init__(self, text: str, spans: TokenSpans, special_ids: frozenset[int]):
        self._text = text
        self._special_ids = special_ids
        self.ids, self._starts, self._ends = spans

    def start(self, token: int) -> int:
        """Return the first character of a token."""
        return int(self._starts[token])

    def bounds(self, character: int) -> int | None:
        """Return the number of tokens before a character; None if a token has characters on both
        sides. A special token may absorb the whitespace after it."""
        n = self._n_before(character)
        end = self._ends[n - 1] if n else 0
        if end > character and (
            int(self.ids[n - 1]) not in self._special_ids or self._text[character:end].strip()
        ):
            return None
        return n

    def touched(self, start: int, end: int) -> slice:
        """Return the tokens with a character in [start, end). Excludes a token that begins before
        `start` and absorbs the whitespace after it."""
        first, last = self._n_before(start), self._n_before(end)
        while (
            first
            and self._ends[first - 1] > start
            and self._text[start : self._ends[first - 1]].strip()
        ):
            first -= 1
        return slice(first, last)

    def _n_before(self, character: int) -> int:
        """Return the number of tokens that begin before a character."""
        return int(self._starts.searchsorted(character))


def _texts(value: object) -> Iterator[str]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            pending.extend(value.values() if isinstance(value, dict) else value)


def _check_template_tokens(template: ChatTemplate, tokenizer: Tokenizer, stops: Stops) -> None:
    """Raise `UserError` if the template writes special tokens that are not in the vocabulary.

    They would be learned as ordinary text, and none would end an answer. A model's own template may
    contain such markers (Zephyr's `<|user|>`) if a special token ends its turns. In any other
    template, all markup after an answer must be special tokens.
    """
    found = stops.all()
    ends_with_special = any(stop.token_id is not None for stop in found)
    end = found[0].text if found else ""
    texts = [token for text in template.literals for token in _LOOKS_SPECIAL.findall(text)]
    texts += template.required_tokens
    if not ends_with_special and not template.of_model:
        texts += _MARKUP.findall(end)
    missing = [token for token in dict.fromkeys(texts) if tokenizer.id_of(token) is None]
    if missing and template.of_model and ends_with_special:
        logger.warning(
            f"{template.name} writes {', '.join(missing)}, which the tokenizer encodes as ordinary "
            "text"
        )
    elif missing:
        raise UserError(
            f"{template.name} writes {', '.join(missing)}, which the vocabulary does not contain; "
            "set another --dataloader.chat_template, or add the tokens with "
            "--tokenizer.added_tokens " + " ".join(map(repr, missing))
        )
    elif not ends_with_special:
        logger.warning(
            f"{template.name} writes no special token after an answer: a model trained with it "
            "will not stop"
            + (f" by itself; generation ends at the text {end!r}" if end.strip() else "")
        )


class RowEncoder:
    """Encodes the rows of one kind for a `SampleCache`."""

    n_parts: ClassVar[int] = 1
    """Number of token sequences per row."""
    stored: ClassVar[tuple[str, ...]] = ()
    """Fields of `EncodedRow` besides the token sequences that a cache stores: answer, images."""
    can_fork: ClassVar[bool] = False
    """True if forked processes can use the encoder, unlike one that calls PyTorch, whose threads
    are not forked."""

    def __init__(self, chat: ChatEncoder):
        self._chat = chat

    @property
    def arrays(self) -> ArrayEncoder:
        """Encoder of rendered conversations; its ids are always the tokenizer's."""
        return self._chat.arrays

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest; equal digests mean equal encodings."""
        return digest_of([type(self).__name__, self._chat.fingerprint])

    def check(self) -> None:
        """Raise `UserError` if conversations cannot be encoded; called before the first one."""
        self._chat.check()

    def encode_batch(self, samples: Sequence[Sample]) -> list[list[EncodedRow] | BrokenSample]:
        """Return the encoded samples of each row, at least one, or the error that prevents
        encoding. Raise `DifferentIds` if the caller must encode all rows again."""
        return [self._try_encode(sample) for sample in samples]

    def unread_options(self, sample: Sample) -> dict[str, str]:
        """Return the options of a sample that the template does not read, with the reason."""
        if isinstance(sample, Text):
            return {}
        conversation = sample if isinstance(sample, Conversation) else sample.prompt
        return self._chat.unread_options(conversation)

    def encode(self, sample: Sample) -> EncodedRow:
        """Encode one sample. Raise `BrokenSample` if this is impossible."""
        raise NotImplementedError

    def _try_encode(self, sample: Sample) -> list[EncodedRow] | BrokenSample:
        try:
            return [self.encode(sample)]
        except BrokenSample as error:
            return error
