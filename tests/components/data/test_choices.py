"""`torchtitan data prepare`: near duplicates, and scores of a classifier trained on examples."""

import json
import random
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest

from tests.components.data.helpers import open_tokens, raises, split_documents, write_jsonl
from tests.components.data.test_prepare import contents
from torchtitan.cli.data_prepare import _tell_cost
from torchtitan.cli.main import main
from torchtitan.components.data.prepare.classifier import train_classifier
from torchtitan.components.data.prepare.near_duplicates import NGRAM, Bands, repeated
from torchtitan.components.data.sources.source import resolve_source

PREPARE = ("--module", "llama3", "--config", "debugmodel", "--workers", "1")


def similarity(a: list[int], b: list[int]) -> float:
    """Jaccard's similarity of the sets of n-grams."""
    sets = [{tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)} for ids in (a, b)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def changed(ids: list[int], n: int, chance: random.Random) -> list[int]:
    """Return a copy with `n` other tokens."""
    copy = [*ids]
    for place in chance.sample(range(len(ids)), n):
        copy[place] = chance.randrange(2000)
    return copy


@pytest.mark.parametrize("wanted", [0.7, 0.8, 0.9])
def test_documents_are_found_with_the_probability_of_their_similarity(wanted):
    """Of pairs with similarities from 0.2 to 1, about as many have an equal band as the formula
    gives (within four standard deviations)."""
    chance, bands = random.Random(0), Bands(wanted)
    assert bands.n_bands * bands.n_rows <= 128
    assert bands.probability(wanted) >= 0.9
    expected, found, variance = 0.0, 0, 0.0
    pairs = []
    for number in range(300):
        ids = [chance.randrange(2000) for _ in range(200)]
        pairs.append((ids, changed(ids, number % 30, chance)))
    documents = [ids for pair in pairs for ids in pair]
    offsets = np.cumsum([0, *map(len, documents)])
    hashes = bands.of(np.concatenate(documents), offsets)
    assert hashes.shape == (bands.n_bands, 600)
    for number, pair in enumerate(pairs):
        of_pair = bands.probability(similarity(*pair))
        expected, variance = expected + of_pair, variance + of_pair * (1 - of_pair)
        found += (hashes[:, 2 * number] == hashes[:, 2 * number + 1]).any()
    assert 30 < expected < 270
    assert abs(found - expected) < 4 * variance**0.5
    others = hashes[:, ::2]
    assert not any((others[:, a] == others[:, b]).any() for a, b in combinations(range(300), 2))


def test_bands_do_not_depend_on_the_other_documents(monkeypatch):
    """Short documents have none; blocks of n-grams may end within a document."""
    chance, bands = random.Random(1), Bands(0.8)
    lengths = [0, 4, 5, 6, 300, 0, 1000, 3, 50]
    documents = [np.array([chance.randrange(100) for _ in range(n)], np.uint16) for n in lengths]
    alone = [bands.of(ids, np.array([0, len(ids)]))[:, 0] for ids in documents]
    monkeypatch.setattr("torchtitan.components.data.prepare.near_duplicates._BLOCK", 17)
    together = bands.of(np.concatenate(documents), np.cumsum([0, *lengths]))
    assert np.array_equal(together.T, alone)
    has_bands = [bool(of_document.all()) for of_document in alone]
    assert has_bands == [n >= NGRAM for n in lengths]
    assert not together[:, [0, 1]].any()


def test_the_first_in_order_is_kept():
    hashes = np.array([7, 0, 3, 7, 0, 7, 3], np.uint64)
    order = np.array([5, 0, 1, 2, 4, 9, 3])
    assert sorted(repeated(hashes, order).tolist()) == [0, 5, 6]


def words(chance: random.Random, kind: str, n: int = 60) -> str:
    own = {"good": "prove theorem lemma integral", "bad": "buy cheap offer click"}[kind].split()
    common = "the a of and to in is that it".split()
    return " ".join(chance.choice(own if chance.random() < 0.2 else common) for _ in range(n))


@pytest.fixture
def corpus(tmp_path) -> dict[str, str]:
    """Examples of two kinds, and documents of both in two files with exact and near copies."""
    chance = random.Random(0)
    for kind in ("good", "bad"):
        rows = [{"text": words(chance, kind)} for _ in range(100)]
        write_jsonl(tmp_path / f"{kind}.jsonl", rows)
    texts = [words(chance, kind, 200) for kind in ("good", "bad") * 30]
    near = texts[4].replace(" the ", " some ", 1)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    copies = [texts[0], near, "", *(words(chance, "good", 200) for _ in range(20))]
    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in copies])
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("a", "b", "good", "bad")}


def prepare(corpus: dict[str, str], out: Path, *options: str) -> int:
    return main(
        ["data", "prepare", corpus["a"], corpus["b"], "--out", str(out), *PREPARE, *options]
    )


@pytest.mark.parametrize(("dataset", "amount"), [("a", "MB"), ("stories", "each MB of text")])
def test_the_cost_is_of_bytes(corpus, caplog, dataset, amount):
    """Rows of tables are no bytes."""
    (part,) = resolve_source(corpus.get(dataset, dataset)).parts
    preparation = SimpleNamespace(parts=[(0, part)], near_duplicates=Bands(0.8))
    with caplog.at_level("INFO"):
        _tell_cost(preparation, None, 1)
    size = f"{part.size() / 1e6:,.1f} " if dataset == "a" else ""
    assert f"processor seconds for {size}{amount}\n" in f"{caplog.messages[0]}\n"


def test_copies_and_low_scores_are_dropped_and_counted(corpus, tokenizer, tmp_path, capsys):
    """The scores are a table of the result; the kept documents are those with the highest."""
    options = ("--classify", corpus["good"], corpus["bad"], "--keep_best", "0.5")
    chosen = (*options, "--near_duplicates", "0.8", "--part_size", "0.02")
    assert prepare(corpus, tmp_path / "out", *chosen) == 0
    told = capsys.readouterr().err
    assert "on 20 examples that it was not trained on, 100.0% right" in told
    assert "scores: about" in told and "near duplicates: about" in told
    assert told.index("near duplicates: about") < told.index("parts written")

    table = pyarrow.parquet.read_table(tmp_path / "out/scores").to_pylist()
    fates = [row["fate"] for row in table]
    assert len(table) == 82 and "empty" not in fates  # of 83 rows, one has no text
    assert fates.count("duplicate") == 1 and fates.count("near_duplicate") == 1
    assert [row["document"] for row in table if row["fate"] == "near_duplicate"] == [2]
    left = [row for row in table if row["fate"] in ("train", "low_score")]
    assert len(left) == 80 and fates.count("train") == 40
    kept = sorted(row["score"] for row in left if row["fate"] == "train")
    assert kept[0] > max(row["score"] for row in left if row["fate"] == "low_score")
    assert kept[0] > 0  # all are of the first kind

    stream = open_tokens(tmp_path / "out", tokenizer, tmp_path)
    trained = [tokenizer.decode(ids[1:-1]) for ids in split_documents(stream)]
    assert len(trained) == 40 and all("theorem" in text for text in trained)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    dropped = [report["dropped"] for _, report in manifest["sources"]["train"]]
    counts = [{reason: counter["count"] for reason, counter in one.items()} for one in dropped]
    assert sum(one.get("low_score", 0) for one in counts) == 40
    assert counts[1]["near_duplicate"] == counts[1]["duplicate"] == counts[1]["empty"] == 1

    several = ("--workers", "2", "--part", "1/2")
    assert prepare(corpus, tmp_path / "shares", *chosen, *several) == 0
    assert prepare(corpus, tmp_path / "shares", *chosen) == 0
    assert contents(tmp_path / "shares") == contents(tmp_path / "out")


def test_scores_are_those_of_scikit_learn_alone(corpus):
    """The same features and weights in one product, in float64."""
    from sklearn.feature_extraction.text import HashingVectorizer

    good, bad, a = (resolve_source(corpus[name]) for name in ("good", "bad", "a"))
    classifier = train_classifier(good, bad)
    again = train_classifier(good, bad)
    assert classifier.identity == again.identity != train_classifier(bad, good).identity
    texts = [json.loads(line)["text"] for line in Path(corpus["a"]).open()]
    features = HashingVectorizer(
        n_features=2**20, ngram_range=(1, 2), token_pattern=r"\w+", alternate_sign=False
    ).transform(texts)
    expected = features @ classifier.weights + classifier.bias
    scores = classifier.scores(a.documents())
    assert scores.dtype == np.float32
    assert np.allclose(scores, expected, rtol=1e-6)  # float32
    assert (scores > 0).tolist() == [True, False] * 30


def test_a_classifier_that_tells_nothing_apart_is_told(corpus, tmp_path, capsys):
    """The same examples as both sources, and examples of which one word tells the source."""
    warning = "do not tell"
    assert prepare(corpus, tmp_path / "same", "--classify", corpus["good"], corpus["good"]) == 0
    assert warning in capsys.readouterr().err
    assert prepare(corpus, tmp_path / "other", "--classify", corpus["good"], corpus["bad"]) == 0
    assert warning not in capsys.readouterr().err


def test_other_examples_or_options_are_another_preparation(corpus, tmp_path, capsys):
    options = ("--classify", corpus["good"], corpus["bad"])
    assert prepare(corpus, tmp_path / "out", *options) == 0
    assert prepare(corpus, tmp_path / "out", "--classify", corpus["bad"], corpus["good"]) == 2
    assert "was begun with other tokenizer, filters, classifier" in capsys.readouterr().err
    assert prepare(corpus, tmp_path / "out", *options, "--keep_best", "0.5") == 2
    assert "was begun with other --keep_best" in capsys.readouterr().err
    table = pyarrow.parquet.read_table(tmp_path / "out/scores").to_pylist()
    assert {row["fate"] for row in table} == {"train", "duplicate"}  # without --keep_best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--near_duplicates", "0.3"], "--near_duplicates is 0.3, but must be at least 0.7"),
        (["--near_duplicates", "0.8", "--keep_duplicates"], "set one of them"),
        (["--keep_best", "0.5"], "--keep_best keeps the highest scores; add --classify"),
        (["--classify", "c4", "c4"], "--classify: c4 is a stream"),
    ],
)
def test_mistakes(options, message, corpus, tmp_path, capsys):
    assert prepare(corpus, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error and not (tmp_path / "out").exists()


def test_too_few_examples(corpus, tmp_path):
    write_jsonl(tmp_path / "few.jsonl", [{"text": "one"}] * 3 + [{"text": " "}] * 30)
    good, few = resolve_source(corpus["good"]), resolve_source(str(tmp_path / "few.jsonl"))
    with raises(f"{few.name} has 3 documents with text"):
        train_classifier(good, few)


def test_conversations_are_refused(corpus, tmp_path, capsys):
    command = ["data", "prepare", "chats", "--out", str(tmp_path / "out"), "--module", "llama3"]
    more = ["--config", "debugmodel_sft", "--near_duplicates", "0.8"]
    assert main([*command, *more]) == 2
    assert "--near_duplicates is for text" in capsys.readouterr().err
