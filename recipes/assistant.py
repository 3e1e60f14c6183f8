"""Data of `assistant.yaml`, and a test of the models that it trains: sums, and stories on demand.

`python recipes/assistant.py data DIR` writes all files, the same ones each time. `python
recipes/assistant.py answers DIR --checkpoint MODEL` asks a model for sums of pairs that were in its
data, and for sums of pairs that were not.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.assets.chats import Chats
from torchtitan.assets.stories import CHILDREN, Stories
from torchtitan.components.generation import Sampling, generate
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.pretrained import load_model

LARGEST = 30
"""Numbers of a sum, at most."""
N_SUMS, N_TALES, N_CHATS, N_PAIRS, N_PROMPTS, N_QUESTIONS = 30_000, 3_000, 2_000, 6_000, 4_000, 200
"""Rows of each file."""

NAMES = {name for name, _ in CHILDREN}

Row = dict[str, Any]


class Sum(NamedTuple):
    """An addition or subtraction in words."""

    question: str
    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    def answer(self, result: int) -> str:
        """Return an answer with a result, right or wrong."""
        return f"{self.left} {self.sign} {self.right} is {result}."

    def wrong(self, draw: random.Random) -> int:
        """Return a result that is close, and wrong."""
        near = [self.result + step for step in (-10, -2, -1, 1, 2, 10)]
        return draw.choice([number for number in near if number >= 0])


QUESTIONS = {
    "+": [
        "What is {a} + {b}?",
        "How much is {a} plus {b}?",
        "Nina has {a} apples and finds {b} more. How many apples does she have?",
        "Tom had {a} toys. Then he got {b} new toys. How many toys are there now?",
    ],
    "-": [
        "What is {a} - {b}?",
        "How much is {a} minus {b}?",
        "Nina has {a} apples and eats {b} of them. How many apples are left?",
        "Tom had {a} toys. He gave {b} toys to a friend. How many toys are left?",
    ],
}


def is_held_out(left: int, sign: str, right: int) -> bool:
    """Return whether a pair of numbers, in either order of a sum, is only for questions of tests: 1
    in 10."""
    pair = sorted((left, right)) if sign == "+" else (left, right)
    return random.Random(f"{pair} {sign}").random() < 0.1


def sums(seed: int, *, held_out: bool = False) -> Iterator[Sum]:
    """Yield sums without end, of pairs that are held out or of the others."""
    draw = random.Random(seed)
    while True:
        sign, left, right = draw.choice("+-"), draw.randint(0, LARGEST), draw.randint(0, LARGEST)
        if sign == "-" and right > left:
            continue
        if is_held_out(left, sign, right) == held_out:
            yield Sum(draw.choice(QUESTIONS[sign]).format(a=left, b=right), left, sign, right)


def conversation(question: str, answer: str) -> Row:
    roles = ("user", "assistant")
    texts = (question, answer)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]}


def as_text(question: str, answer: str) -> Row:
    """Return a document that looks as `tiny_assistant.jinja` renders the conversation."""
    return {"text": f"Question: {question} Answer: {answer}"}


def tales() -> Iterator[tuple[str, str]]:
    """Yield demands for a story, and the first two paragraphs of one."""
    for story in Stories("train", N_TALES):
        hero = next(word for word in re.findall(r"\w+", story) if word in NAMES)
        yield f"Tell me a story about {hero}.", " ".join(story.split("\n\n")[:2])


def taken(n: int, sums_: Iterator[Sum], row: Callable[[Sum], Row]) -> list[Row]:
    return [row(one) for one, _ in zip(sums_, range(n), strict=False)]


def preference(draw: random.Random) -> Callable[[Sum], Row]:
    def pair(one: Sum) -> Row:
        chosen, rejected = one.answer(one.result), one.answer(one.wrong(draw))
        return {"prompt": one.question, "chosen": chosen, "rejected": rejected}

    return pair


def choices(draw: random.Random) -> Callable[[Sum], Row]:
    """Return a function that makes a question with four answers."""

    def question(one: Sum) -> Row:
        results = {one.result}
        while len(results) < 4:
            results.add(one.wrong(draw))
        shown = sorted(results)
        return {
            "query": f"Question: {one.question} Answer:",
            "choices": [one.answer(result) for result in shown],
            "gold": shown.index(one.result),
        }

    return question


def prompt(one: Sum) -> Row:
    return {"prompt": one.question, "answer": str(one.result)}


def right_text(one: Sum) -> Row:
    return as_text(one.question, one.answer(one.result))


def right_turns(one: Sum) -> Row:
    return conversation(one.question, one.answer(one.result))


def write_data(folder: Path) -> None:
    """Write the files of all stages; the stages draw their sums with seeds of their own."""
    told = list(tales())
    files = {
        "sums": taken(N_SUMS, sums(1), right_text),
        "tales": [as_text(*tale) for tale in told],
        "conversations": [
            *taken(N_SUMS // 3, sums(2), right_turns),
            *(conversation(*tale) for tale in told),
            *({"messages": messages} for messages in Chats("train", N_CHATS)),
        ],
        "pairs": taken(N_PAIRS, sums(3), preference(random.Random(3))),
        "prompts": taken(N_PROMPTS, sums(4), prompt),
        "choices": taken(N_QUESTIONS, sums(5, held_out=True), choices(random.Random(5))),
        "seen": taken(N_QUESTIONS, sums(6), prompt),
        "unseen": taken(N_QUESTIONS, sums(7, held_out=True), prompt),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
        print(f"{name}.jsonl: {len(rows):,} rows")
    (folder / "stories.txt").write_text("\n\n".join(Stories("validation", 100)))


def answers(folder: Path, checkpoint: Path) -> None:
    """Print the fraction of sums that a model gets right with its likeliest answer."""
    loaded = load_model(checkpoint, device="cpu")
    tokenizer = PretrainedTokenizer.Config().build(path=loaded.tokenizer_path)
    for name in ("seen", "unseen"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").open()]
        asked = [tokenizer.encode(f"Question: {row['prompt']} Answer:") for row in rows]
        written = generate(
            loaded.model,
            asked,
            max_new_tokens=24,
            sampling=Sampling(temperature=0.0),
            stop_ids={tokenizer.eos_id},
        )
        right = 0
        for row, one in zip(rows, written, strict=True):
            found = re.search(r" is (\d+)\.", tokenizer.decode(one.ids))
            right += found is not None and found[1] == row["answer"]
        print(f"{name} sums: {right} of {len(rows)} right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("data", "answers"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    if options.command == "data":
        write_data(options.folder)
    else:
        answers(options.folder, options.checkpoint)


if __name__ == "__main__":
    main()
