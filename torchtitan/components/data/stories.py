"""`Stories`: the embedded corpus, simple English stories that a small grammar writes.

A story has a cast (a hero, a friend, an elder, an animal) and motives (a belonging, a place, a food, ...) that are
drawn once and carried through, and a plot or two whose beats are each told in one of several ways. So names, pronouns,
belongings, causes and their consequences hold together over a whole story, which is what a small model can learn.
The tables are in `story_grammar`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

from torchtitan.components.data import story_grammar as grammar
from torchtitan.tools.errors import UserError

T = TypeVar("T")

N_STORIES = {"train": 12_000, "validation": 500}
"""Default number of stories of each split."""

VERSION = hashlib.sha256(b"".join(Path(path).read_bytes() for path in (__file__, grammar.__file__))).hexdigest()[:16]
"""Digest of this source and its tables, for the key of a cache: equal versions write equal stories."""


class Stories:
    """The stories of one split, by index.

    Story `i` is a function of the split and `i` alone, on every machine and in every version of Python. A pair of hero
    and friend belongs to one split, so no story is in both.

    Raises:
        UserError: when `n_stories` is below 1.
    """

    def __init__(self, split: Literal["train", "validation"], n_stories: int | None = None):
        if n_stories is not None and n_stories < 1:
            raise UserError(f"n_stories must be at least 1, not {n_stories}")
        self.split = split
        self.n_stories = N_STORIES[split] if n_stories is None else n_stories

    def __len__(self) -> int:
        return self.n_stories

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(self.n_stories))

    def __getitem__(self, i: int) -> str:
        """Story `i`, its paragraphs separated by an empty line; raises `IndexError` outside [0, len)."""
        if not 0 <= i < self.n_stories:
            raise IndexError(f"story {i} of {self.n_stories}")
        held_out = self.split == "validation"
        draw = _Draw(2 * i + held_out)
        return _tell(draw, _Cast(draw, held_out=held_out))


class _Draw:
    """Draws from tables; of `random.Random`, only `random()` promises the same numbers in every version of Python."""

    def __init__(self, seed: int):
        self.uniform = Random(seed).random

    def __call__(self, values: Sequence[T]) -> T:
        return values[int(self.uniform() * len(values))]


class _Cast(dict[str, str]):
    """Values of the names in a sentence frame: what the story has fixed, else a fresh draw from the words.

    `told` holds the frames that the story has used, so that it does not repeat itself.
    """

    def __init__(self, draw: _Draw, *, held_out: bool):
        self.draw = draw
        self.told: set[str] = set()
        hero, friend = _pair(draw, held_out=held_out)
        self._person("hero", "", hero)
        self._person("friend", "2", friend)
        self._draw_each(grammar.TRAITS)

    def begin_plot(self) -> None:
        """Draw what a plot is about: the motives and the elder who plays a part in it."""
        self._person("elder", "3", self.draw(grammar.ELDERS))
        self._draw_each(grammar.MOTIVES)
        article = "an" if self["color"][0] in "aeiou" else "a"
        self["a_thing"] = f"{article} {self['color']} {self['thing']}"

    def _draw_each(self, table: Mapping[str, Sequence[str]]) -> None:
        for name, values in table.items():
            self[name] = self.draw(values)

    def _person(self, role: str, suffix: str, person: tuple[str, str]) -> None:
        self[role], kind = person
        self["kind" + suffix] = kind
        for name, pronoun in zip(("he", "him", "his"), grammar.PRONOUNS[kind], strict=True):
            self[name + suffix] = pronoun

    def __missing__(self, name: str) -> str:
        if name in grammar.WORDS:
            return self.draw(grammar.WORDS[name]).format_map(self)
        assert name[0].isupper(), f"no table has {name!r}"
        value = self[name[0].lower() + name[1:]]
        return value[0].upper() + value[1:]


def _pair(draw: _Draw, *, held_out: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """A hero and a friend that the other split never has together: about one pair in 20 is held out."""
    n = len(grammar.CHILDREN)
    while True:
        hero, friend = draw(range(n)), draw(range(n))
        if hero != friend and ((hero + friend) % 20 == 0) == held_out:
            return grammar.CHILDREN[hero], grammar.CHILDREN[friend]


def _tell(draw: _Draw, cast: _Cast) -> str:
    """An opening, one plot or (in a third of the stories) two, and an ending."""
    cast.begin_plot()
    plot = draw(grammar.PLOTS)
    paragraphs = [_paragraph(grammar.OPENING, draw, cast), *(_paragraph(beats, draw, cast) for beats in plot)]
    if draw.uniform() < 1 / 3:
        cast.begin_plot()
        paragraphs.append(_paragraph(["next"], draw, cast))
        sequel = draw([other for other in grammar.PLOTS if other is not plot])
        paragraphs.extend(_paragraph(beats, draw, cast) for beats in sequel)
    paragraphs.append(_paragraph(grammar.ENDING, draw, cast))
    return "\n\n".join(paragraphs)


def _paragraph(beats: Sequence[str], draw: _Draw, cast: _Cast) -> str:
    sentences = []
    for beat in beats:
        if beat.endswith("?") and draw.uniform() < 0.5:
            continue
        frame = draw([frame for frame in grammar.BEATS[beat.rstrip("?")] if frame not in cast.told])
        cast.told.add(frame)
        sentences.append(frame.format_map(cast))
    return " ".join(sentences)
