"""A job: one choice of a request, from its prompt to the end of its text."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchtitan.components.generation import Generation, Sampling, TextWriter
from torchtitan.components.serving.errors import RequestError
from torchtitan.components.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


class Entry(NamedTuple):
    """A token with its log-probability at temperature 1."""

    token: int
    logprob: float | None
    """None: nothing precedes the token."""
    top: Sequence[tuple[int, float]]
    """The most probable tokens at its place, in descending order."""


@dataclass(slots=True)
class Update:
    """New text of a choice, its end, or an error."""

    index: int
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    """The new tokens, after the tokens of a scored prompt."""
    n_generated: int = 0
    """Number of new tokens."""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """One choice to generate."""

    index: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    key: str
    """Seed of its random numbers."""
    stop: Sequence[str] = ()
    stop_ids: AbstractSet[int] = frozenset()
    kept: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the text contains."""
    wants_logprobs: bool = False
    """True if updates have entries."""
    n_top: int = 0
    scores_prompt: bool = False
    """True if entries begin with the tokens of the prompt."""
    streams: bool = False
    """True to deliver text as it appears; otherwise, at the end."""
    deliver: Callable[[Update], None] = lambda update: None
    """Called with each update in the engine's thread."""
    is_cancelled: bool = False
    """Set when nobody waits for the text any more."""
    is_done: bool = False
    generation: Generation = field(default_factory=Generation)
    _writer: TextWriter | None = None
    _texts: list[str] = field(default_factory=list)
    _unwritten: list[int] = field(default_factory=list)
    _entries: list[Entry] = field(default_factory=list)
    _n_delivered: int = 0

    def begin(self, tokenizer: Tokenizer) -> None:
        """Prepare for the first token."""
        self._writer = TextWriter(tokenizer, self.prompt, self.stop, self.kept)

    def add_prompt(self, entries: Sequence[Entry]) -> None:
        """Deliver the scores of the prompt."""
        self._entries += entries

    def take(self, token: int) -> bool:
        """Take the newest token of `generation`; return True if the text ends."""
        assert self._writer is not None
        if self.is_cancelled:
            return True
        generation = self.generation
        if self.wants_logprobs:
            top = generation.top_logprobs[-1] if self.n_top else []
            self._entries.append(Entry(token, generation.logprobs[-1], top))
        is_stop = token in self.stop_ids
        if not is_stop:
            self._unwritten.append(token)
            if self.streams or self.stop:
                self._write()
            is_stop = self._writer.stopped
        if is_stop or len(generation.ids) == self.max_new_tokens:
            self.finish("stop" if is_stop else "length")
            return True
        if self.streams and self._texts[-1]:
            self.deliver(self._update())
        return False

    def finish(self, reason: FinishReason) -> None:
        """Deliver the rest of the text, and its end."""
        if self._writer is not None:
            self._write()
            self._texts.append(self._writer.finish())
        self.is_done = True
        update = self._update()
        update.finish_reason = reason
        self.deliver(update)

    def _write(self) -> None:
        """Decode the tokens since the last call: all at once takes a fraction of the time."""
        assert self._writer is not None
        self._texts.append(self._writer.push(*self._unwritten))
        self._unwritten = []

    def fail(self, error: RequestError) -> None:
        """Deliver an error instead of more text."""
        if not self.is_done:
            self.is_done = True
            self.deliver(Update(self.index, error=error))

    def _update(self) -> Update:
        n_tokens = len(self.generation.ids)
        update = Update(
            self.index,
            "".join(self._texts),
            self._entries,
            n_generated=n_tokens - self._n_delivered,
        )
        self._n_delivered = n_tokens
        self._texts = []
        self._entries = []
        return update
