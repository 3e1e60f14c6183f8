"""`Stories`: the embedded corpus, simple English stories that a small grammar writes.

A story has a cast (a hero, a friend, an elder, an animal) and motives (a belonging, a place, a food, ...) that are
drawn once and carried through, and a plot or two whose beats are each told in one of several ways. So names, pronouns,
belongings, causes and their consequences hold together over a whole story, which is what a small model can learn.

The tables are in `stories.json`. In a sentence, `{hero}`, `{he}`, `{him}`, `{his}` are the hero and the hero's
pronouns; `{friend}`, `{he2}` ... the friend's; `{elder}`, `{he3}` ... the elder's. A capital first letter (`{He}`)
begins a sentence.
"""

from collections.abc import Mapping, Sequence

from torchtitan.assets.generated import Draw, Generated, capitalized, draw_pair, read_tables, version_of

N_STORIES = {"train": 12_000, "validation": 500}
"""Default number of stories of each split."""

VERSION = version_of("stories.py", "stories.json")

_TABLES = read_tables("stories.json")


def _people(table: str) -> list[tuple[str, str]]:
    return [(name, kind) for kind, names in _TABLES[table].items() for name in names]


PRONOUNS: Mapping[str, Sequence[str]] = _TABLES["pronouns"]
CHILDREN, ELDERS = _people("children"), _people("elders")
"""Name and kind (`girl` or `boy`) of each person."""
TRAITS: Mapping[str, Sequence[str]] = _TABLES["traits"]
"""What is drawn once for a story."""
MOTIVES: Mapping[str, Sequence[str]] = _TABLES["motives"]
"""What is drawn once for a plot."""
WORDS: Mapping[str, Sequence[str]] = _TABLES["words"]
"""What is drawn at every use."""
BEATS: Mapping[str, Sequence[str]] = _TABLES["beats"]
"""The ways to tell each beat."""
PLOTS: Sequence[Sequence[Sequence[str]]] = _TABLES["plots"]
"""The beats of each plot, by paragraph; one that ends in a question mark is told in half of the stories."""
OPENING: Sequence[str] = _TABLES["opening"]
ENDING: Sequence[str] = _TABLES["ending"]
"""The beats of the first and the last paragraph."""


class Stories(Generated[str]):
    """The stories of one split, by index. A pair of hero and friend belongs to one split, so no story is in both."""

    n_default = N_STORIES

    def write(self, draw: Draw, *, held_out: bool) -> str:
        """A story, its paragraphs separated by an empty line."""
        return _tell(draw, _Cast(draw, held_out=held_out))


class _Cast(dict[str, str]):
    """Values of the names in a sentence: what the story has fixed, else a fresh draw from the words.

    `told` holds the sentences that the story has used, so that it does not repeat itself.
    """

    def __init__(self, draw: Draw, *, held_out: bool):
        self.draw = draw
        self.told: set[str] = set()
        hero, friend = (CHILDREN[i] for i in draw_pair(draw, len(CHILDREN), held_out=held_out))
        self._person("hero", "", hero)
        self._person("friend", "2", friend)
        self._draw_each(TRAITS)

    def begin_plot(self) -> None:
        """Draw what a plot is about: the motives and the elder who plays a part in it."""
        self._person("elder", "3", self.draw(ELDERS))
        self._draw_each(MOTIVES)
        article = "an" if self["color"][0] in "aeiou" else "a"
        self["a_thing"] = f"{article} {self['color']} {self['thing']}"

    def _draw_each(self, table: Mapping[str, Sequence[str]]) -> None:
        for name, values in table.items():
            self[name] = self.draw(values)

    def _person(self, role: str, suffix: str, person: tuple[str, str]) -> None:
        self[role], kind = person
        self["kind" + suffix] = kind
        for name, pronoun in zip(("he", "him", "his"), PRONOUNS[kind], strict=True):
            self[name + suffix] = pronoun

    def __missing__(self, name: str) -> str:
        if name in WORDS:
            return self.draw(WORDS[name]).format_map(self)
        assert name[0].isupper(), f"no table has {name!r}"
        return capitalized(self[name[0].lower() + name[1:]])


def _tell(draw: Draw, cast: _Cast) -> str:
    """An opening, one plot or (in a third of the stories) two, and an ending."""
    cast.begin_plot()
    plot = draw(PLOTS)
    paragraphs = [_paragraph(OPENING, draw, cast), *(_paragraph(beats, draw, cast) for beats in plot)]
    if draw.uniform() < 1 / 3:
        cast.begin_plot()
        paragraphs.append(_paragraph(["next"], draw, cast))
        sequel = draw([other for other in PLOTS if other is not plot])
        paragraphs.extend(_paragraph(beats, draw, cast) for beats in sequel)
    paragraphs.append(_paragraph(ENDING, draw, cast))
    return "\n\n".join(paragraphs)


def _paragraph(beats: Sequence[str], draw: Draw, cast: _Cast) -> str:
    sentences = []
    for beat in beats:
        if beat.endswith("?") and draw.uniform() < 0.5:
            continue
        frame = draw([frame for frame in BEATS[beat.rstrip("?")] if frame not in cast.told])
        cast.told.add(frame)
        sentences.append(frame.format_map(cast))
    return " ".join(sentences)
