"""`Stories`: determinism, splits, grammar and learnability."""

import math
import os
import re
import string
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from torchtitan.assets import stories as grammar
from torchtitan.assets.stories import VERSION, Stories
from torchtitan.tools.errors import UserError


@pytest.fixture(scope="module")
def train() -> list[str]:
    return list(Stories("train"))


@pytest.fixture(scope="module")
def validation() -> list[str]:
    return list(Stories("validation"))


@pytest.mark.slow
def test_default_sizes(train: list[str], validation: list[str]) -> None:
    assert len(train) == len(Stories("train")) == 12_000
    assert len(validation) == len(Stories("validation")) == 500


@pytest.mark.slow
def test_stories_are_distinct_across_splits(train: list[str], validation: list[str]) -> None:
    assert len(set(train) | set(validation)) == len(train) + len(validation)


@pytest.mark.slow
def test_pair_of_hero_and_friend_is_in_one_split(train: list[str], validation: list[str]) -> None:
    assert not set(map(_pair, train)) & set(map(_pair, validation))


def test_story_depends_only_on_split_and_index(train: list[str]) -> None:
    stories = Stories("train", n=100_000)
    assert [stories[i] for i in (11_999, 7, 0)] == [train[i] for i in (11_999, 7, 0)]
    assert Stories("validation")[7] != train[7]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_story_is_the_same_in_every_process(hash_seed: str, train: list[str]) -> None:
    program = (
        "from torchtitan.assets.stories import *; print(VERSION); print(Stories('train')[123])"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    output = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert output == f"{VERSION}\n{train[123]}\n"


def test_index_and_size_are_checked() -> None:
    with pytest.raises(IndexError):
        Stories("train", 10)[10]
    with pytest.raises(IndexError):
        Stories("train", 10)[-1]
    with pytest.raises(UserError, match="Stories: n must be at least 1, not 0"):
        Stories("train", 0)


def test_lengths_vary(train: list[str]) -> None:
    words = sorted(len(story.split()) for story in train)
    assert words[0] >= 60 and words[-1] <= 300
    assert words[len(words) * 9 // 10] > 1.5 * words[len(words) // 10]


def test_characters_are_consistent(train: list[str]) -> None:
    """Two children in each story, and "she" or "he" only where one of the people is a girl or a
    boy."""
    kinds = dict(grammar.CHILDREN)
    elders = dict(grammar.ELDERS)
    for story in train[:2000]:
        pair = _pair(story)
        assert len(pair) == 2, story
        people = {kinds[name] for name in pair} | {
            kind for name, kind in elders.items() if re.search(name, story, re.IGNORECASE)
        }
        for kind, pronouns in (("girl", r"\b(she|her)\b"), ("boy", r"\b(he|him|his)\b")):
            assert kind in people or not re.search(pronouns, story, re.IGNORECASE), story


@pytest.mark.slow
def test_sentences_are_well_formed(train: list[str], validation: list[str]) -> None:
    for story in train + validation:
        assert not re.search(r"[{}/]|[.?]\w|  |\b(\w+) \1\b", story), story
        assert not re.search(r"\ba [aeiou]|\ban (?!hour|honest)[^aeiou]", story, re.IGNORECASE), (
            story
        )
        for paragraph in story.split("\n\n"):
            assert re.fullmatch(r'["A-Z].*[.!?]"?', paragraph), story


def test_tables_are_consistent() -> None:
    """Every name in a frame has a value, and every word and beat is used."""
    beats = {
        beat.rstrip("?")
        for plot in [*grammar.PLOTS, [grammar.OPENING, grammar.ENDING]]
        for p in plot
        for beat in p
    }
    assert beats | {"next"} == set(grammar.BEATS)
    frames = [frame for frames in grammar.BEATS.values() for frame in frames] + sum(
        grammar.WORDS.values(), []
    )
    used = {
        name[0].lower() + name[1:]
        for frame in frames
        for _, name, _, _ in string.Formatter().parse(frame)
        if name
    }
    people = {"hero", "friend", "elder", "a_thing", "kind", "kind2"}
    people |= {pronoun + suffix for pronoun in ("he", "him", "his") for suffix in ("", "2", "3")}
    tables = {*grammar.TRAITS, *grammar.MOTIVES, *grammar.WORDS}
    assert used <= people | tables
    assert tables <= used


@pytest.mark.slow
def test_text_is_learnable_but_not_certain(train: list[str], validation: list[str]) -> None:
    """A model of word triples, trained on one split, predicts the other far better than by
    frequency, not exactly.

    The bounds are wide: a language model knows more than a word triple, such as the hero.
    """
    words = [re.findall(r"\w+|[^\w\s]", story) for story in train]
    held_out = [re.findall(r"\w+|[^\w\s]", story) for story in validation]
    singles = Counter(word for story in words for word in story)
    triples = Counter(
        triple for story in words for triple in zip(story, story[1:], story[2:], strict=False)
    )
    contexts = Counter(pair for story in words for pair in pairwise(story))
    total = sum(singles.values())
    single_loss = triple_loss = n = 0.0
    for story in held_out:
        for first, second, third in zip(story, story[1:], story[2:], strict=False):
            frequency = (singles[third] + 1) / (total + len(singles))
            known = contexts[first, second]
            single_loss -= math.log(frequency)
            triple_loss -= math.log((triples[first, second, third] + frequency) / (known + 1))
            n += 1
    assert triple_loss < single_loss / 3
    assert triple_loss / n > 0.5


def _pair(story: str) -> frozenset[str]:
    names = {name for name, _ in grammar.CHILDREN}
    return frozenset(names & set(re.findall(r"\w+", story)))
