"""`Chats`: the embedded chat set, conversations of a child with a helper that a small grammar writes.

A conversation is made of one to three scenes: questions about a tale that the child tells, a tale that the helper tells
and questions about it, sums that go on from turn to turn, questions about animals and things. All answers follow from
what was said before or from tables that are small enough to be learned. A system message, where there is one, says
whether answers are short.

The tables are in `chats.json`. In a sentence, `{hero}`, `{friend}` are two children and `{he}`, `{him}`, `{his}` the
hero's pronouns; a capital first letter (`{He}`) begins a sentence. All other names are drawn once for a tale.
"""

from collections.abc import Callable, Sequence

from torchtitan.assets.generated import Draw, Generated, capitalized, draw_pair, read_tables, version_of
from torchtitan.assets.stories import CHILDREN, MOTIVES, PRONOUNS

N_CHATS = {"train": 2_000, "validation": 200}
"""Default number of conversations of each split."""

VERSION = version_of("chats.py", "chats.json", "stories.py", "stories.json")

TABLES = read_tables("chats.json")
"""`events` may happen after the `opening`, in this order; questions come with the short answer and with a sentence."""


class Chats(Generated[list[dict[str, str]]]):
    """The conversations of one split, by index: the messages (`role`, `content`) of each. A pair of children belongs to
    one split, so no conversation is in both."""

    n_default = N_CHATS

    def write(self, draw: Draw, *, held_out: bool) -> list[dict[str, str]]:
        """The messages of a conversation."""
        return _Chat(draw, held_out=held_out).messages


class _Names(dict[str, str]):
    """Values of the names in a frame; a name with a capital first letter has its value with one."""

    def __missing__(self, name: str) -> str:
        assert name[0].isupper(), f"no table has {name!r}"
        return capitalized(self[name[0].lower() + name[1:]])


class _Chat:
    """One conversation, written when it is made."""

    def __init__(self, draw: Draw, *, held_out: bool):
        self.draw, self.uniform = draw, draw.uniform
        self.messages: list[dict[str, str]] = []
        self.names = self._children(held_out)
        self.short = False
        self.facts = [(fact, *pair) for fact in TABLES["facts"] for pair in fact["pairs"].items()]
        if self.uniform() < 0.4:
            self.short = self.uniform() < 0.5
            self._say("system", self.draw(TABLES["short" if self.short else "full"]))
        scenes: list[Callable[[], None]] = [self._told_tale, self._asked_tale, self._sums, self._facts]
        for _ in range(self.draw((1, 1, 1, 1, 1, 1, 2, 2, 3))):
            self.draw(scenes)()

    def _children(self, held_out: bool) -> _Names:
        """A hero and a friend that the other split never has together."""
        hero, friend = draw_pair(self.draw, len(CHILDREN), held_out=held_out)
        name, kind = CHILDREN[hero]
        pronouns = zip(("he", "him", "his"), PRONOUNS[kind], strict=True)
        return _Names(hero=name, friend=CHILDREN[friend][0], **dict(pronouns))

    def _say(self, role: str, frame: str) -> None:
        self.messages.append({"role": role, "content": capitalized(frame.format_map(self.names))})

    def _ask(self, question: str, short: str, full: str) -> None:
        self._say("user", question)
        self._answer(short, full)

    def _answer(self, short: str, full: str) -> None:
        self._say("assistant", f"{short}." if self.short else full)

    def _tale(self) -> tuple[str, list[tuple[str, str, str]]]:
        """A new tale, and the questions that it answers, shuffled."""
        self.names |= {name: self.draw(MOTIVES[name]) for name in TABLES["drawn"]}
        article = "an" if self.names["color"][0] in "aeiou" else "a"
        self.names["a_thing"] = f"{article} {self.names['color']} {self.names['thing']}"
        sentences, questions = [self.draw(TABLES["opening"])], list(TABLES["first_questions"])
        for event in TABLES["events"]:
            if self.uniform() < 0.6:
                sentences.append(self.draw(event["ways"]))
                questions += event["questions"]
        sentences.append(self.draw(TABLES["endings"]))
        return " ".join(sentences), [questions.pop(int(self.uniform() * len(questions))) for _ in questions[:]]

    def _told_tale(self) -> None:
        tale, questions = self._tale()
        question, short, full = questions[0]
        self._say("user", self.draw(TABLES["ask_about"]).format(tale=tale, question=question))
        self._answer(short, full)
        self._ask_on(questions[1:])

    def _asked_tale(self) -> None:
        tale, questions = self._tale()
        self._say("user", self.draw(TABLES["ask_for"]))
        self._say("assistant", tale)
        self._ask_on(questions)

    def _ask_on(self, questions: Sequence[tuple[str, str, str]]) -> None:
        for question in questions[: self.draw((0, 0, 1, 1, 2, 3, 5))]:
            self._ask(*question)

    def _sums(self) -> None:
        n = self.draw(range(2, 13))
        self.names |= {"things": self.draw(TABLES["counted"]), "n": str(n)}
        begin = self.draw(TABLES["have"]) + " "
        for _ in range(self.draw((1, 1, 2, 3, 4))):
            gets = n < 4 or self.uniform() < 0.6
            k = self.draw(range(1, 9 if gets else n - 1))  # two are left, so that they are "2 apples"
            total = n + k if gets else n - k
            self.names |= {"k": str(k), "sum": f"{n} {'plus' if gets else 'minus'} {k} is {total}"}
            change = self.draw(TABLES["get" if gets else "lose"])
            how_many = self.draw(TABLES["how_many"])
            self._ask(
                f"{begin}{change} {how_many}",
                str(total),
                f"{{sum}}, so there are {total} {{things}}.",
            )
            begin, n = "", total

    def _facts(self) -> None:
        greets = not any(message["role"] == "user" for message in self.messages)
        if greets:
            hello, reply = self.draw(TABLES["hello"])
            self._say("user", hello)
            self._say("assistant", reply)
        for _ in range(self.draw((1, 1, 2, 3, 4, 6))):
            fact, self.names["a"], self.names["b"] = self.facts.pop(int(self.uniform() * len(self.facts)))
            self._ask(self.draw(fact["questions"]), fact["short"], fact["full"])
        if greets and self.uniform() < 0.4:
            self._ask(*self.draw(TABLES["goodbye"]))
