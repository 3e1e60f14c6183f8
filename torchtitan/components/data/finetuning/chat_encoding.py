"""Encoding of conversations and texts as token ids with a training mask."""

from collections.abc import Iterator, Sequence

import numpy as np

from torchtitan.components.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from torchtitan.components.chat_template.stops import special_pattern
from torchtitan.components.data.finetuning.attempts import Turn
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    LossySample,
    Pair,
    Text,
)
from torchtitan.components.data.finetuning.encoded import EncodedSample, Facts
from torchtitan.components.data.finetuning.losses import Part
from torchtitan.components.data.finetuning.sample_texts import Plan, TrainOn, marked_spans, plans_of
from torchtitan.components.data.finetuning.template_tokens import check_template_tokens
from torchtitan.components.data.finetuning.token_places import Tokens
from torchtitan.components.data.finetuning.turns import TurnFinder
from torchtitan.components.tokenizer import ArrayEncoder, SpanEncoder, Tokenizer, TokenSpans
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

_WINDOW = 256
"""Characters at the end of a prompt in which its last special token is looked for."""

_END_TOKENS = 4
"""Tokens at the end of a prompt without special tokens that are compared first."""

_MOST_ENDINGS = 10_000
"""Ends of prompts whose ids are remembered."""


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
        `check_template_tokens`). Warn if the template's text depends on the date."""
        if self._template and self._finder:
            check_template_tokens(self._template, self._tokenizer, self._finder.stops)
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

    def encode_whole(
        self, prompt: Conversation, answer: Sequence[dict[str, object]]
    ) -> EncodedSample:
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
        tokens = Tokens(whole.text, spans, self._special_ids)
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
    ) -> "list[Plan] | BrokenSample":
        finder = self._required_finder()
        try:
            return plans_of(finder, conversation, train_on, thinks)
        except BrokenSample as error:
            return error

    def _samples_of(self, plan: "Plan", spans: TokenSpans) -> list[EncodedSample]:
        """Return the sample of a plan, preceded by one sample for each turn whose prompt has other
        ids at inference."""
        tokens = Tokens(plan.text, spans, self._special_ids)
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
                for span in marked_spans(turn):
                    trained[tokens.touched(*span)] = True
        if plan.turns and not shared and not plan.spans:
            return apart
        for first, last, flag in plan.spans:
            trained[tokens.touched(first, last)] = flag
        facts = Facts.of(shared) if shared else plan.facts
        whole = EncodedSample(spans.ids, self._without_bos(spans.ids, trained), facts=facts)
        return [*apart, whole]

    def _is_prompt(self, prompt: str, tokens: "Tokens", n: int) -> bool:
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
                tokens = Tokens(turn.completion, spans, self._special_ids)
                trained[:] = False
                for start, stop in marked_spans(turn):
                    trained[tokens.touched(start - offset, stop - offset)] = True
        mask = np.concatenate([np.zeros(len(prompt), bool), trained])
        return EncodedSample(np.array([*prompt, *chosen], np.int64), mask, facts=Facts.of([turn]))

    def _count_special(self, conversation: Conversation) -> int:
        """Count the special tokens that are written in the text of a conversation."""
        texts = [*_texts(conversation.messages), *_texts(conversation.tools)]
        if not self._special.search("\0".join(texts)):  # as in most conversations
            return 0
        return sum(len(self._special.findall(text)) for text in texts)

    def _without_bos(self, ids: Sequence[int] | np.ndarray, trained: np.ndarray) -> np.ndarray:
        if len(ids) and ids[0] == self._tokenizer.bos_id:
            trained[0] = False
        return trained


def _continued(prompt: Conversation, messages: Sequence[dict[str, object]]) -> Conversation:
    trained: list[bool | None] = [False for _ in prompt.messages]
    trained += [message["role"] == "assistant" for message in messages]
    return Conversation([*prompt.messages, *messages], prompt.tools, trained, prompt.options)


def _texts(value: object) -> list[str]:
    """Return the texts in a value."""
    found: list[str] = []
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            for inside in value.values() if isinstance(value, dict) else value:
                (found if isinstance(inside, str) else pending).append(inside)
        elif isinstance(value, str):
            found.append(value)
    return found
