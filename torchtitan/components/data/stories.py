"""`Stories`: the embedded corpus, simple English stories that a small grammar writes.

A story has a cast (a hero, a friend, an elder, an animal) and motives (a belonging, a place, a food, ...) that are
drawn once and carried through, and a plot or two whose beats are each told in one of several ways. So names, pronouns,
belongings, causes and their consequences hold together over a whole story, which is what a small model can learn.
The tables are in `story_grammar`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan.components.data import generated
from torchtitan.components.data import story_grammar as grammar
from torchtitan.components.data.generated import Draw, Generated, draw_pair

N_STORIES = {"train": 12_000, "validation": 500}
"""Default number of stories of each split."""

_FILES = (__file__, grammar.__file__, generated.__file__)
VERSION = hashlib.sha256(b"".join(Path(path).read_bytes() for path in _FILES)).hexdigest()[:16]
"""Digest of this source and its tables, for the key of a cache: equal versions write equal stories."""


class Stories(Generated[str]):
    """The stories of one split, by index. A pair of hero and friend belongs to one split, so no story is in both."""

    n_default = N_STORIES

    def write(self, draw: Draw, *, held_out: bool) -> str:
        """A story, its paragraphs separated by an empty line."""
        return _tell(draw, _Cast(draw, held_out=held_out))


class _Cast(dict[str, str]):
    """Values of the names in a sentence frame: what the story has fixed, else a fresh draw from the words.

    `told` holds the frames that the story has used, so that it does not repeat itself.
    """

    def __init__(self, draw: Draw, *, held_out: bool):
        self.draw = draw
        self.told: set[str] = set()
        hero, friend = (grammar.CHILDREN[i] for i in draw_pair(draw, len(grammar.CHILDREN), held_out=held_out))
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


def _tell(draw: Draw, cast: _Cast) -> str:
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


def _paragraph(beats: Sequence[str], draw: Draw, cast: _Cast) -> str:
    sentences = []
    for beat in beats:
        if beat.endswith("?") and draw.uniform() < 0.5:
            continue
        frame = draw([frame for frame in grammar.BEATS[beat.rstrip("?")] if frame not in cast.told])
        cast.told.add(frame)
        sentences.append(frame.format_map(cast))
    return " ".join(sentences)
