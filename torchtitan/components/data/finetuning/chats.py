"""`Chats`: the embedded chat set, conversations of a child with a helper that a small grammar writes.

A conversation is made of one to three scenes: questions about a tale that the child tells, a tale that the helper tells
and questions about it, sums that go on from turn to turn, questions about animals and things. All answers follow from
what was said before or from tables that are small enough to be learned. A system message, where there is one, says
whether answers are short. The tables are in `chat_tables`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

from torchtitan.components.data import story_grammar
from torchtitan.components.data.finetuning import chat_tables as tables
from torchtitan.tools.errors import UserError

T = TypeVar("T")

N_CHATS = {"train": 2_000, "validation": 200}
"""Default number of conversations of each split."""

_FILES = (__file__, tables.__file__, story_grammar.__file__)
VERSION = hashlib.sha256(b"".join(Path(path).read_bytes() for path in _FILES)).hexdigest()[:16]
"""Digest of this source and its tables, for the key of a cache: equal versions write equal conversations."""


class Chats:
    """The conversations of one split, by index.

    Conversation `i` is a function of the split and `i` alone, on every machine and in every version of Python. A pair
    of children belongs to one split, so no conversation is in both.

    Raises:
        UserError: when `n_chats` is below 1.
    """

    def __init__(self, split: Literal["train", "validation"], n_chats: int | None = None):
        if n_chats is not None and n_chats < 1:
            raise UserError(f"n_chats must be at least 1, not {n_chats}")
        self.split = split
        self.n_chats = N_CHATS[split] if n_chats is None else n_chats

    def __len__(self) -> int:
        return self.n_chats

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return (self[i] for i in range(self.n_chats))

    def __getitem__(self, i: int) -> list[dict[str, str]]:
        """The messages (`role`, `content`) of conversation `i`; raises `IndexError` outside [0, len)."""
        if not 0 <= i < self.n_chats:
            raise IndexError(f"chat {i} of {self.n_chats}")
        held_out = self.split == "validation"
        return _Chat(2 * i + held_out, held_out=held_out).messages


class _Names(dict[str, str]):
    """Values of the names in a frame; a name with a capital first letter has its value with one."""

    def __missing__(self, name: str) -> str:
        assert name[0].isupper(), f"no table has {name!r}"
        return _capital(self[name[0].lower() + name[1:]])


class _Chat:
    """One conversation, written when it is made."""

    def __init__(self, seed: int, *, held_out: bool):
        # Of `random.Random`, only `random()` promises the same numbers in every version of Python.
        self.uniform = Random(seed).random
        self.messages: list[dict[str, str]] = []
        self.names = self._children(held_out)
        self.short = False
        self.facts = [(fact, pair) for fact in tables.FACTS for pair in fact[3].split("/")]
        if self.uniform() < 0.4:
            self.short = self.uniform() < 0.5
            self._say("system", self.draw(tables.SHORT if self.short else tables.FULL))
        scenes: list[Callable[[], None]] = [self._told_tale, self._asked_tale, self._sums, self._facts]
        for _ in range(self.draw((1, 1, 1, 1, 1, 1, 2, 2, 3))):
            self.draw(scenes)()

    def draw(self, values: Sequence[T]) -> T:
        return values[int(self.uniform() * len(values))]

    def _children(self, held_out: bool) -> _Names:
        """A hero and a friend that the other split never has together: about one pair in 20 is held out."""
        children = range(len(story_grammar.CHILDREN))
        while True:
            hero, friend = self.draw(children), self.draw(children)
            if hero != friend and ((hero + friend) % 20 == 0) == held_out:
                break
        name, kind = story_grammar.CHILDREN[hero]
        pronouns = zip(("he", "him", "his"), story_grammar.PRONOUNS[kind], strict=True)
        return _Names(hero=name, friend=story_grammar.CHILDREN[friend][0], **dict(pronouns))

    def _say(self, role: str, frame: str) -> None:
        self.messages.append({"role": role, "content": _capital(frame.format_map(self.names))})

    def _ask(self, question: str, short: str, full: str) -> None:
        self._say("user", question)
        self._answer(short, full)

    def _answer(self, short: str, full: str) -> None:
        self._say("assistant", f"{short}." if self.short else full)

    def _tale(self) -> tuple[str, list[tuple[str, str, str]]]:
        """A new tale, and the questions that it answers, shuffled."""
        self.names |= {name: self.draw(values) for name, values in tables.DRAWN.items()}
        article = "an" if self.names["color"][0] in "aeiou" else "a"
        self.names["a_thing"] = f"{article} {self.names['color']} {self.names['thing']}"
        sentences, questions = [self.draw(tables.OPENING)], list(tables.FIRST_QUESTIONS)
        for ways, answered in tables.EVENTS:
            if self.uniform() < 0.6:
                sentences.append(self.draw(ways))
                questions += answered
        sentences.append(self.draw(tables.ENDINGS))
        return " ".join(sentences), [questions.pop(int(self.uniform() * len(questions))) for _ in questions[:]]

    def _told_tale(self) -> None:
        tale, questions = self._tale()
        question, short, full = questions[0]
        self._say("user", self.draw(tables.ASK_ABOUT).format(tale=tale, question=question))
        self._answer(short, full)
        self._ask_on(questions[1:])

    def _asked_tale(self) -> None:
        tale, questions = self._tale()
        self._say("user", self.draw(tables.ASK_FOR))
        self._say("assistant", tale)
        self._ask_on(questions)

    def _ask_on(self, questions: Sequence[tuple[str, str, str]]) -> None:
        for question in questions[: self.draw((0, 0, 1, 1, 2, 3, 5))]:
            self._ask(*question)

    def _sums(self) -> None:
        n = self.draw(range(2, 13))
        self.names |= {"things": self.draw(tables.COUNTED), "n": str(n)}
        begin = self.draw(tables.HAVE) + " "
        for _ in range(self.draw((1, 1, 2, 3, 4))):
            gets = n < 4 or self.uniform() < 0.6
            k = self.draw(range(1, 9 if gets else n - 1))  # two are left, so that they are "2 apples"
            total = n + k if gets else n - k
            self.names |= {"k": str(k), "sum": f"{n} {'plus' if gets else 'minus'} {k} is {total}"}
            change = self.draw(tables.GET if gets else tables.LOSE)
            self._ask(
                f"{begin}{change} {self.draw(tables.HOW_MANY)}",
                str(total),
                f"{{sum}}, so there are {total} {{things}}.",
            )
            begin, n = "", total

    def _facts(self) -> None:
        greets = not any(message["role"] == "user" for message in self.messages)
        if greets:
            hello, reply = self.draw(tables.HELLO)
            self._say("user", hello)
            self._say("assistant", reply)
        for _ in range(self.draw((1, 1, 2, 3, 4, 6))):
            (questions, short, full, _), pair = self.facts.pop(int(self.uniform() * len(self.facts)))
            self.names["a"], self.names["b"] = pair.split(" ")
            self._ask(self.draw(questions), short, full)
        if greets and self.uniform() < 0.4:
            self._ask(*self.draw(tables.GOODBYE))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
