"""`Chats`: determinism, splits, well-formed turns, correct answers, and learnability."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from torchtitan.assets.chats import TABLES, VERSION, Chats
from torchtitan.assets.stories import CHILDREN
from torchtitan.components.data.finetuning.conversation import normalize
from torchtitan.tools.errors import UserError

Chat = list[dict[str, str]]


@pytest.fixture(scope="module")
def train() -> list[Chat]:
    return list(Chats("train"))


@pytest.fixture(scope="module")
def validation() -> list[Chat]:
    return list(Chats("validation"))


def exchanges(chat: Chat) -> list[tuple[str, str, str]]:
    """Each question and answer, with all text before the answer."""
    turns = [message["content"] for message in chat]
    return [
        (turns[i - 1], turns[i], " ".join(turns[:i]))
        for i in range(len(chat))
        if chat[i]["role"] == "assistant"
    ]


def is_short(chat: Chat) -> bool:
    return chat[0]["content"] in TABLES["short"]


def test_default_sizes(train, validation):
    assert len(train) == len(Chats("train")) == 2_000
    assert len(validation) == len(Chats("validation")) == 200


def test_chats_are_distinct_across_splits(train, validation):
    assert len(set(map(str, train)) | set(map(str, validation))) == len(train) + len(validation)


def test_pair_of_children_is_in_one_split(train, validation):
    names = {name for name, _ in CHILDREN}

    def pairs(chats: list[Chat]) -> set[frozenset[str]]:
        spoken = [
            names & set(re.findall(r"\w+", " ".join(message["content"] for message in chat)))
            for chat in chats
        ]
        assert all(len(pair) in (1, 2) for pair in spoken)
        return {frozenset(pair) for pair in spoken if len(pair) == 2}

    assert not pairs(train) & pairs(validation)


def test_chat_depends_only_on_split_and_index(train):
    chats = Chats("train", n=100_000)
    assert [chats[i] for i in (1_999, 7, 0)] == [train[i] for i in (1_999, 7, 0)]
    assert Chats("validation")[7] != train[7]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_chat_is_the_same_in_every_process(hash_seed, train):
    program = "from torchtitan.assets.chats import *; print(VERSION); print(Chats('train')[123])"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    output = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert output == f"{VERSION}\n{train[123]}\n"


def test_index_and_size_are_checked():
    for i in (10, -1):
        with pytest.raises(IndexError):
            Chats("train", 10)[i]
    with pytest.raises(UserError, match="Chats: n must be at least 1, not 0"):
        Chats("train", 0)


def test_turns_are_well_formed(train, validation):
    for chat in train + validation:
        assert normalize(chat).messages == chat
        roles = [message["role"] for message in chat]
        first = int(roles[0] == "system")
        assert (
            roles[first:] == ["user", "assistant"] * (len(roles[first:]) // 2)
            and len(roles) > first
        )
        for message in chat:
            text = message["content"]
            assert re.fullmatch(r"[A-Z0-9].*[.!?]", text, re.DOTALL), text
            assert not re.search(
                r"[{}/]|[.?]\w|  |\ba [aeiou]|\ban [^aeiou]|\b1 (?!is)[a-z]+s\b|\b([a-z]+) \1\b",
                text,
            ), text


def test_lengths_vary(train):
    words = sorted(sum(len(message["content"].split()) for message in chat) for chat in train)
    turns = sorted(len(exchanges(chat)) for chat in train)
    assert words[len(words) * 9 // 10] > 3 * words[len(words) // 10]
    assert turns[0] == 1 and turns[-1] >= 10 and turns.count(1) > 200
    assert 0.3 < sum(chat[0]["role"] == "system" for chat in train) / len(train) < 0.5


def test_sums_are_correct(train, validation):
    n_sums = 0
    for chat in train + validation:
        total = None
        for question, answer, _ in exchanges(chat):
            if "How many" not in question or "legs" in question:
                continue
            numbers = [int(number) for number in re.findall(r"\d+", question)]
            assert len(numbers) in (1, 2)
            start, change = numbers if len(numbers) == 2 else (total, numbers[0])
            assert start is not None, question
            total = (
                start - change
                if re.search("gives .* of them|loses|takes", question)
                else start + change
            )
            assert total >= 2
            assert re.search(r"(?:are )?(\d+)[^\d]*$", answer)[1] == str(total), (question, answer)
            n_sums += 1
    assert n_sums > 500


def test_answers_follow_from_the_tale(train, validation):
    """Each word of such an answer appears before it, except words that all answers to the question
    share."""
    asked = [
        *TABLES["first_questions"],
        *(question for event in TABLES["events"] for question in event["questions"]),
    ]
    patterns = [
        (re.sub(r"\\\{\w+\\\}", ".+", re.escape(question)), full) for question, _, full in asked
    ]
    n_checked: Counter[str] = Counter()
    for chat in train + validation:
        for question, answer, before in exchanges(chat):
            for pattern, full in patterns:
                if re.search(pattern, question) and answer not in question:
                    said = set(re.findall(r"\w+", f"a an {full} {before}".lower()))
                    assert set(re.findall(r"\w+", answer.lower())) <= said, (question, answer)
                    n_checked[full] += 1
    assert len(n_checked) == len(asked) and min(n_checked.values()) > 50


def test_facts_match_the_table(train):
    """Statements about an animal match the table, in the length that the system message asks
    for."""
    answers: dict[str, dict[bool, set[str]]] = {}
    for chat in train:
        for question, answer, _ in exchanges(chat):
            answers.setdefault(question, {True: set(), False: set()})[is_short(chat)].add(answer)
    for fact in TABLES["facts"]:
        short, full = fact["short"], fact["full"]
        for a, b in fact["pairs"].items():
            for question in fact["questions"]:
                found = answers.get(question.format(a=a), {True: set(), False: set()})
                assert {text.lower() for text in found[True]} <= {f"{short}.".format(b=b)}
                assert {text.lower() for text in found[False]} <= {full.format(a=a, b=b).lower()}
    assert answers["What does a dog say?"] == {True: {"Woof."}, False: {"A dog says woof."}}


def test_requested_short_answers_are_short(train):
    def mean(chats: list[Chat]) -> float:
        answers = [
            answer
            for chat in chats
            for question, answer, _ in exchanges(chat)
            if question.endswith("?") and "ell me about" not in question
        ]
        return sum(len(answer.split()) for answer in answers) / len(answers)

    short, full = ([chat for chat in train if is_short(chat) == flag] for flag in (True, False))
    assert len(short) > 300
    assert mean(short) < 2.5 < 5 < mean(full)


def test_text_is_learnable_but_not_certain(train, validation):
    """A model of word triples, trained on the answers of one split, predicts the answers of the
    other far better than by frequency, but not exactly. The bounds are wide: a language model that
    reads the question does better."""

    def words(chats: list[Chat]) -> list[list[str]]:
        return [
            re.findall(r"\w+|[^\w\s]", f"{question} {answer} .")
            for c in chats
            for question, answer, _ in exchanges(c)
        ]

    singles = Counter(word for text in words(train) for word in text)
    triples = Counter(
        triple for text in words(train) for triple in zip(text, text[1:], text[2:], strict=False)
    )
    contexts = Counter(pair for text in words(train) for pair in pairwise(text))
    total = sum(singles.values())
    single_loss = triple_loss = n = 0.0
    for text in words(validation):
        for first, second, third in zip(text, text[1:], text[2:], strict=False):
            frequency = (singles[third] + 1) / (total + len(singles))
            single_loss -= math.log(frequency)
            triple_loss -= math.log(
                (triples[first, second, third] + frequency) / (contexts[first, second] + 1)
            )
            n += 1
    assert triple_loss < single_loss / 3
    assert triple_loss / n > 0.3
