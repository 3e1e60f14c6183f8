"""Sample cache: content, reuse, dropped rows, report."""

import ast
import errno
import json
import logging
import os
import pickle
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from torchtitan import components
from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Text,
)
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample, Facts
from torchtitan.components.data.finetuning.filters import FilterConfig, repetition
from torchtitan.components.data.finetuning.row_formats import RowFormat, function_format
from torchtitan.components.data.finetuning.sample_cache import (
    SOURCES,
    first_columns,
    open_sample_cache,
)
from torchtitan.components.data.finetuning.samples import LengthFilteredDataset, LengthLimit
from torchtitan.components.data.finetuning.sft import parse_token_range
from torchtitan.components.data.report import Report
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.data.sources.source import Source
from torchtitan.components.tokenizer import ArrayEncoder, DifferentIds, PretrainedTokenizer
from torchtitan.tools import digests
from torchtitan.tools.digests import file_digest
from torchtitan.tools.errors import UserError


class Texts(Source):
    """Rows of text in memory; None is an unreadable row."""

    name = "a.jsonl"

    def __init__(self, *texts):
        self.texts = list(texts)

    def identity(self, digest):
        return ["texts", *map(str, self.texts)]

    def size(self):
        return len(self.texts)

    def rows(self, on_read):
        for number, text in enumerate(self.texts, 1):
            values = None if text is None else {"text": text}
            yield Row(f"{self.name}:{number}", values, "broken JSON" if text is None else "")
            on_read(1)


class Characters:
    """Encoder with one token per character: capitals are trained, "#" counts as a special token,
    "!" is an error."""

    n_parts, stored, can_fork = 1, (), False

    def __init__(self, fingerprint="characters"):
        self.fingerprint = fingerprint
        self.arrays = ArrayEncoder(PretrainedTokenizer.Config().build())
        self.batches = []
        self.checks = 0

    def check(self):
        self.checks += 1

    def unread_options(self, sample):
        return {} if isinstance(sample, Text) else dict.fromkeys(sample.options, "why")

    def encode_batch(self, samples):
        self.batches.append(len(samples))
        encoded = (
            self.encode(sample.text if isinstance(sample, Text) else "Turn") for sample in samples
        )
        return [result if isinstance(result, BrokenSample) else [result] for result in encoded]

    def encode(self, text):
        if "!" in text:
            return BrokenSample("a text with '!'")
        trained = np.array([character.isupper() for character in text], bool)
        ids = np.array([ord(character) for character in text], np.int64)
        facts = Facts(unprompted=("it is first",)) if text == "Turn" else Facts()
        return EncodedRow((EncodedSample(ids, trained, text.count("#"), facts),))


def convert(row):
    text = row["text"]
    if text == "":
        raise EmptySample("no text")
    if text == "?":
        raise BrokenSample("a question")
    if text == "turns":
        return Conversation([{"role": "user", "content": "x"}], options={"enable_thnking": True})
    return None if text == "-" else Text(text)


FORMAT = RowFormat(
    name="plain", kind="sft", required=("text",), convert=convert, fingerprint="plain"
)
LENIENT = FilterConfig(broken="drop")


def open_cache(source, root, rules=LENIENT, encoder=None, row_format=FORMAT):
    return open_sample_cache(source, row_format, encoder or Characters(), rules, str(root))


def texts_of(cache):
    return ["".join(map(chr, cache.sample(i).ids)) for i in range(cache.n_samples)]


def cache_folders(root):
    return sorted(path.name for path in (root / "samples").iterdir() if path.suffix != ".lock")


def test_content(tmp_path):
    texts = ["aBc", "", "DEF", None, "?", "gH\N{GRINNING FACE}", "x!", "-", "nothing trained", "Aa"]
    cache = open_cache(Texts(*texts), tmp_path)
    assert texts_of(cache) == ["aBc", "DEF", "gH\N{GRINNING FACE}"]
    assert cache.lengths.tolist() == [3, 3, 3] and [
        cache.sample(i).n_trained for i in range(3)
    ] == [1, 2, 1]
    assert (
        cache.sample(0).trained.tolist() == [False, True, False]
        and cache.sample(0).ids.dtype == np.int64
    )
    assert [cache.describe(i) for i in range(3)] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:6"]
    copy = pickle.loads(pickle.dumps(cache))
    assert len(pickle.dumps(cache)) < 500 and texts_of(copy) == texts_of(cache)


class Answered(Characters):
    """Encoder of two sequences separated by "|", and an optional answer after a second "|"."""

    n_parts, stored = 2, ("answer",)

    def encode(self, text):
        first, second, *answer = text.split("|")
        return EncodedRow(super().encode(first).parts + super().encode(second).parts, *answer)


def test_several_sequences_and_answers(tmp_path):
    texts = ["aB|cdE|It is \N{GRINNING FACE}.", "a|b", "FgH|i", "jK|lMnO|"]
    cache = open_cache(Texts(*texts), tmp_path, encoder=Answered())
    for kept in (cache, pickle.loads(pickle.dumps(cache))):
        rows = [kept.sample(i) for i in range(kept.n_samples)]
        assert [["".join(map(chr, part.ids)) for part in row.parts] for row in rows] == [
            ["aB", "cdE"],
            ["FgH", "i"],
            ["jK", "lMnO"],
        ]
        assert [row.answer for row in rows] == ["It is \N{GRINNING FACE}.", None, ""]
        assert [kept.describe(i) for i in range(3)] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4"]
    assert cache.lengths.tolist() == [3, 3, 4] and [row.n_trained for row in rows] == [2, 1, 3]
    assert (cache.report.tokens, cache.report.trained_tokens) == (15, 6)
    assert len(pickle.dumps(cache)) < 500
    others = [
        open_cache(Texts(*texts[:3], last), tmp_path, encoder=Answered())
        for last in ("jK|lMnO", "jKl|MnO|")
    ]
    assert len({cache.fingerprint, *(other.fingerprint for other in others)}) == 3


def test_truncation_shortens_compared_sequences_equally(tmp_path):
    """Both sequences of a sample lose the same number of tokens; they keep all predicted tokens and
    the one before."""
    texts = ["abcDE|abcF", "aBcde|abcF", "abcdE|aF", "abC|abD"]
    cache = open_cache(Texts(*texts), tmp_path, encoder=Answered())
    fitted = LengthFilteredDataset(cache, LengthLimit(4, "truncate_left", None), "a.jsonl")
    assert [["".join(map(chr, part.ids)) for part in fitted.sample(i).parts] for i in range(2)] == [
        ["bcDE", "bcF"],
        ["abC", "abD"],
    ]
    assert fitted.lengths.tolist() == [4, 3] and fitted.n_samples == 2
    assert (fitted.report.kept, fitted.report.tokens, fitted.report.trained_tokens) == (2, 13, 5)
    why = "5 tokens, 4 fit, and its answers alone are too long"
    assert fitted.report.dropped["too_long"].examples == [("a.jsonl:2", why), ("a.jsonl:3", why)]


def test_report_accounts_for_every_row(tmp_path):
    texts = ["aBc", "", "DEF", None, "?", "gH##", "x!", "-", "nothing trained", "Aa"]
    report = open_cache(Texts(*texts), tmp_path).report
    assert (report.rows, report.kept, report.tokens, report.trained_tokens) == (10, 3, 10, 4)
    assert {reason: tally.count for reason, tally in report.dropped.items()} == {
        "empty": 1,
        "broken": 3,
        "left_out": 1,
        "untrained": 2,  # includes "Aa": a first token has no prediction
    }
    assert report.kept + report.n_dropped == report.rows
    broken = [
        ("a.jsonl:4", "broken JSON"),
        ("a.jsonl:5", "a question"),
        ("a.jsonl:7", "a text with '!'"),
    ]
    assert report.dropped["broken"].examples == broken
    assert report.special_in_text.examples == [("a.jsonl:6", "2 tokens")]
    assert Report.from_dict(json.loads(json.dumps(asdict(report)))) == report
    lines = "\n".join(report.lines())
    assert "3 of 10 rows kept (plain), 10 tokens, 4 trained (40%)" in lines
    assert "dropped, broken: 3 (a.jsonl:4: broken JSON; a.jsonl:5: a question" in lines
    assert "special tokens written in the text: 1 (a.jsonl:6" in lines


def test_report_counts_options_without_effect_and_turns_without_prompt(tmp_path):
    rules = FilterConfig(untrained=None)
    report = open_cache(Texts("turns", "Ab", "turns"), tmp_path, rules).report
    assert report.unread_options["enable_thnking"].count == 2
    told = "with the option enable_thnking, which has no effect: 2 (a.jsonl:1, a.jsonl:3: why)"
    assert told in report.lines()
    untrained = "turns without a prompt, not trained: 2 (a.jsonl:1, a.jsonl:3: it is first)"
    assert untrained in report.lines()
    assert Report.from_dict(json.loads(json.dumps(asdict(report)))) == report
    assert Report.total([report, report]).unread_options["enable_thnking"].count == 4


def test_deeply_nested_rows_are_broken(tmp_path):
    def convert_deep(row):
        return convert_deep(row) if row["text"] == "deep" else convert(row)

    row_format = RowFormat(
        name="plain", kind="sft", required=("text",), convert=convert_deep, fingerprint="deep"
    )
    report = open_cache(Texts("aB", "deep"), tmp_path, row_format=row_format).report
    assert report.dropped["broken"].examples == [("a.jsonl:2", "it is nested too deeply")]


def test_report_lists_only_the_first_examples(tmp_path):
    report = open_cache(Texts(*[""] * 7, "aB"), tmp_path).report
    assert report.dropped["empty"].count == 7
    assert [where for where, _ in report.dropped["empty"].examples] == [
        "a.jsonl:1",
        "a.jsonl:2",
        "a.jsonl:3",
    ]
    assert (
        list(report.lines())[1]
        == "dropped, empty: 7 (a.jsonl:1, a.jsonl:2, a.jsonl:3: no text; ...)"
    )


@pytest.mark.parametrize(
    ("text", "rules", "message"),
    [
        ("", {"empty": "error"}, "a.jsonl:2: no text; set --dataloader.empty drop"),
        (
            None,
            {},
            "a.jsonl:2: broken JSON; set --dataloader.broken drop to skip such rows (torchtitan "
            "data inspect",
        ),
        ("?", {}, "a.jsonl:2: a question; set --dataloader.broken drop"),
        ("a!", {}, "a.jsonl:2: a text with '!'; set --dataloader.broken drop"),
        (
            "none",
            {"untrained": "error"},
            "a.jsonl:2: it has no trained tokens; set --dataloader.untrained drop",
        ),
    ],
)
def test_error_policies_give_the_place_of_the_row(tmp_path, text, rules, message):
    with pytest.raises(UserError) as error:
        open_cache(Texts("aB", text), tmp_path, FilterConfig(**rules))
    assert message in str(error.value)
    assert cache_folders(tmp_path) == []


def test_no_rows_left(tmp_path):
    with pytest.raises(
        UserError, match="a.jsonl has no rows left to train on: 0 of 2 rows.*; dropped, empty: 2"
    ):
        open_cache(Texts("", ""), tmp_path)
    assert cache_folders(tmp_path) == []


def test_columns_come_from_the_first_good_row():
    assert first_columns(Texts(None, "a")) == ["text"]
    with pytest.raises(UserError, match="a.jsonl:1: broken JSON"):
        first_columns(Texts(None))
    with pytest.raises(UserError, match="a.jsonl has no rows"):
        first_columns(Texts())


def test_cache_is_found_by_content(tmp_path):
    encoder = Characters()
    folder = open_cache(Texts("aB", "cD"), tmp_path, encoder=encoder).folder
    assert open_cache(Texts("aB", "cD"), tmp_path, encoder=encoder).folder == folder
    assert encoder.batches == [2]
    others = [
        open_cache(Texts("aB", "cE"), tmp_path),
        open_cache(Texts("aB", "cD"), tmp_path, encoder=Characters("others")),
        open_cache(Texts("aB", "cD"), tmp_path, FilterConfig(broken="drop", min_tokens=1)),
        open_cache(
            Texts("aB", "cD"),
            tmp_path,
            row_format=RowFormat(
                name="plain", kind="sft", required=(), convert=convert, fingerprint="2"
            ),
        ),
    ]
    assert (
        len({folder, *(other.folder for other in others)}) == 5
        and len(cache_folders(tmp_path)) == 5
    )


def test_fingerprint_depends_on_the_samples_only(tmp_path):
    caches = [
        open_cache(Texts("aB", "cD"), tmp_path),
        open_cache(Texts("aB", "cD"), tmp_path, encoder=Characters("of the next version")),
        open_cache(Texts("cD", "aB"), tmp_path),
        open_cache(Texts("aBcD"), tmp_path),
        open_cache(Texts("untrained", "cD", "aB"), tmp_path),
        open_cache(Texts("aB", "cD", "eF"), tmp_path),
    ]
    assert len({cache.folder for cache in caches}) == 6
    assert (
        caches[0].fingerprint == caches[1].fingerprint
        and caches[2].fingerprint == caches[4].fingerprint
    )
    assert len({cache.fingerprint for cache in caches}) == 4


def test_key_contains_the_code_that_makes_samples(tmp_path, monkeypatch):
    key = open_cache(Texts("aB"), tmp_path).folder
    monkeypatch.setattr(
        "torchtitan.components.data.finetuning.sample_cache.code_version", lambda: "another"
    )
    assert open_cache(Texts("aB"), tmp_path).folder != key


def test_all_code_that_makes_samples_is_hashed():
    """All directly and indirectly imported modules of the caches are hashed, except these."""
    excluded = {
        "data/disk_cache.py",  # location of caches
        "data/plan/sampler.py",  # type of an array
        "checkpoint/filesystem.py",  # opens stores; the content of files is read as it is
    }
    folder = Path(components.__path__[0])
    known = {file for pattern in SOURCES for file in folder.glob(pattern)}
    assert all(list(folder.glob(pattern)) for pattern in SOURCES)
    waiting = [folder / "data/finetuning/sample_cache.py"]
    seen = {folder / name for name in excluded}
    while waiting:
        file = waiting.pop()
        assert file in known, file
        seen.add(file)
        waiting += [
            found for found in _imported(file) if folder in found.parents and found not in seen
        ]


def _imported(file):
    """Return the modules of this package that a module imports."""
    root = Path(components.__path__[0]).parents[1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan."):
            base = root / node.module.replace(".", "/")
            submodules = [base / f"{alias.name}.py" for alias in node.names]
            yield from [path for path in (base.with_suffix(".py"), *submodules) if path.is_file()]


def test_function_errors_give_the_place_of_the_row(tmp_path):
    row_format = function_format(lambda row: [1] if row["text"] == "b" else row, "sft")
    with pytest.raises(
        UserError,
        match="a.jsonl:2: the function .* returned a list; it must return a dictionary",
    ):
        open_cache(Texts("A", "b"), tmp_path, row_format=row_format)


@pytest.mark.parametrize(
    "left", ["", "[]", "null", "{}", '{"digest": "x"}', "[" * 100_000, "no digest", "cut off"]
)
def test_damaged_digest_files_are_ignored(tmp_path, monkeypatch, left):
    monkeypatch.setattr(digests, "_RECENT_NS", 0)  # the digest of an old file is stored
    data = tmp_path / "a.jsonl"
    data.write_text("{}")
    digest = file_digest(tmp_path, data)
    [note] = (tmp_path / "digests").iterdir()
    noted = note.read_text()
    note.write_text(
        {"no digest": noted.replace(digest, "x"), "cut off": noted[:-2]}.get(left, left)
    )
    assert file_digest(tmp_path, data) == digest and note.read_text() == noted


def test_full_disk_leaves_no_partial_digest_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(digests, "_RECENT_NS", 0)
    data = tmp_path / "a.jsonl"
    data.write_text("{}")
    write = Path.write_text

    def fill_up(path, text):
        write(path, text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", fill_up)
        file_digest(tmp_path, data)
    assert "digests cannot be kept" in caplog.text and "No space left" in caplog.text
    assert list((tmp_path / "digests").iterdir()) == []
    file_digest(tmp_path, data)
    assert len(list((tmp_path / "digests").iterdir())) == 1


def test_file_name_that_is_not_utf_8(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    data = tmp_path / os.fsdecode(b"\xff.jsonl")
    (tmp_path / "a.jsonl").rename(data)
    assert len(file_digest(tmp_path, data)) == 32


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="a.jsonl cannot be read: No such file"):
        file_digest(tmp_path, tmp_path / "a.jsonl")


def test_rows_are_encoded_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("torchtitan.components.data.finetuning.row_batches.BATCH_ROWS", 4)
    encoder = Characters()
    texts = [f"t{letter}" for letter in "ABCDEFGHIJ"]
    cache = open_cache(Texts(*texts[:5], None, *texts[5:]), tmp_path, encoder=encoder)
    assert encoder.batches == [4, 3, 3] and texts_of(cache) == texts


def test_template_is_checked_if_there_are_conversations(tmp_path):
    texts, turns = Characters(), Characters()
    open_cache(Texts("aB"), tmp_path, encoder=texts)
    with pytest.raises(UserError, match="left to train"):
        open_cache(Texts("turns", "turns"), tmp_path, encoder=turns)
    assert (texts.checks, turns.checks) == (0, 1)


def test_change_while_reading_is_an_error(tmp_path):
    class Growing(Texts):
        def rows(self, on_read):
            yield from super().rows(on_read)
            self.texts.append("more")

    with pytest.raises(UserError, match="a.jsonl changed while it was being read"):
        open_cache(Growing("aB"), tmp_path)
    assert cache_folders(tmp_path) == []


@pytest.mark.parametrize(
    "damage", [None, lambda old: b"", lambda old: b"{}", lambda old: bytes(len(old))]
)
def test_damaged_cache_is_renamed_and_rebuilt(tmp_path, caplog, damage):
    folder = open_cache(Texts("aBc"), tmp_path).folder
    written = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(written) == 8
    for path, content in written.items():
        path.unlink() if damage is None else path.write_bytes(damage(content))
        caplog.clear()
        assert texts_of(open_cache(Texts("aBc"), tmp_path)) == ["aBc"]
        [line] = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]
        assert line.startswith(f"the cache {folder} is damaged (") and "\n" not in line
        assert line.endswith(f"); it was renamed to {folder.name}.damaged and is rebuilt")
        assert {path: path.read_bytes() for path in folder.iterdir()} == written
        assert cache_folders(tmp_path) == [folder.name, f"{folder.name}.damaged"]


def fit(cache, seq_len, too_long, untrained="drop"):
    return LengthFilteredDataset(cache, LengthLimit(seq_len + 1, too_long, untrained), "a.jsonl")


@pytest.fixture
def sizes(tmp_path):
    """Samples of 4, 5, 6 and 7 tokens; in the last one, only the second token is trained."""
    return open_cache(Texts("abCD", "abcDE", "abcDEF", "aBcdefg"), tmp_path)


def test_sample_may_have_one_token_more_than_the_window(sizes):
    fitted = fit(sizes, 4, "drop")
    assert texts_of(fitted) == ["abCD", "abcDE"] and fitted.lengths.tolist() == [4, 5]
    assert (fitted.report.kept, fitted.report.tokens, fitted.report.trained_tokens) == (2, 9, 4)
    assert fitted.report.dropped["too_long"].examples == [
        ("a.jsonl:3", "6 tokens, a window holds 5"),
        ("a.jsonl:4", "7 tokens, a window holds 5"),
    ]
    # the report of the cache is unchanged
    assert sizes.report.kept == 4 and not sizes.report.dropped


def test_truncation(sizes):
    left, right = fit(sizes, 4, "truncate_left"), fit(sizes, 4, "truncate_right")
    assert texts_of(left) == ["abCD", "abcDE", "bcDEF"]  # "cdefg" has no trained token
    assert left.report.dropped["untrained"].examples == [
        ("a.jsonl:4", "it has no trained tokens after truncation (7 tokens, a window holds 5)")
    ]
    assert left.report.trained_tokens == 2 + 2 + 3 and left.report.truncated.count == 1
    assert texts_of(right) == ["abCD", "abcDE", "abcDE", "aBcde"]
    assert right.report.trained_tokens == 2 + 2 + 2 + 1 and right.report.truncated.count == 2
    assert [right.describe(i) for i in range(4)] == [f"a.jsonl:{i}" for i in range(1, 5)]
    assert left.sample(2).trained.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("seq_len", "too_long", "is_said"),
    [
        (6, "drop", False),
        (4, "drop", True),
        (4, "truncate_left", True),
        (4, "truncate_right", True),
    ],
)
def test_turns_of_samples_that_are_too_long_are_said_to_be_counted(
    sizes, seq_len, too_long, is_said
):
    sizes.report.turns = sizes.report.stops = 4
    [line] = [line for line in fit(sizes, seq_len, too_long).report.lines() if "turns" in line]
    more = " (counted before --dataloader.too_long)" if is_said else ""
    assert line == f"4 of 4 trained turns teach a stop{more}"


def test_too_long_error_policy(sizes):
    assert fit(sizes, 6, "error").n_samples == 4
    with pytest.raises(
        UserError, match="a.jsonl:4: 7 tokens, a window holds 6; set --dataloader.too_long to "
    ):
        fit(sizes, 5, "error")
    with pytest.raises(UserError, match="a.jsonl:4: it has no trained tokens after truncation"):
        fit(sizes, 4, "truncate_left", untrained="error")
    with pytest.raises(
        UserError, match="a.jsonl has no rows left to train on: .*; dropped, too_long: 4"
    ):
        fit(sizes, 2, "drop")


def test_filters():
    filters = FilterConfig(
        min_tokens=3, max_tokens=6, token_range=(10, 20), max_repetition=0.5, repetition_ngram=2
    )
    outcomes = {
        (10, 11): "min_tokens",
        tuple(range(10, 17)): "max_tokens",
        (10, 11, 21): "token_range",
        (10, 11, 9): "token_range",
        (10, 10, 10, 10): "max_repetition",  # 2 of 3 pairs are repeated
        (10, 11, 10, 11, 12): None,  # 1 of 4
        (20, 15, 10): None,
    }
    for ids, expected in outcomes.items():
        objection = filters.drop_reason(np.array(ids))
        assert (objection[0] if objection else None) == expected, ids
    assert filters.drop_reason(np.array((10, 11, 21))) == (
        "token_range",
        "token 21 is outside 10 to 20",
    )


@pytest.mark.parametrize("n", [1, 2, 5])
def test_repetition_equals_direct_count(n):
    ids = np.random.default_rng(n).integers(0, 4, 60)
    seen, repeated = [], 0
    for i in range(len(ids) - n + 1):
        gram = ids[i : i + n].tolist()
        repeated += gram in seen
        seen.append(gram)
    assert repetition(ids, n) == pytest.approx(repeated / len(seen))
    assert repetition(ids[: n - 1], n) == 0


def test_report_counts_filtered_rows(tmp_path):
    rules = FilterConfig(min_tokens=3, max_repetition=0.5, repetition_ngram=1)
    report = open_cache(Texts("aB", "aaaaaaB", "abcD"), tmp_path, rules).report
    assert report.kept == 1 and sorted(report.dropped) == ["max_repetition", "min_tokens"]
    assert (
        report.dropped["max_repetition"].examples[0][1]
        == "71% of its 1-grams are repetitions, more than 50%"
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_tokens": -1}, "min_tokens is -1, but must be at least 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "max_tokens is 4, but must be at least 5"),
        ({"max_repetition": 1.5}, "--dataloader.max_repetition is 1.5, but must be from 0 to 1"),
        ({"repetition_ngram": 0}, "repetition_ngram is 0, but must be at least 1 token"),
    ],
)
def test_invalid_limits(limits, message):
    with pytest.raises(UserError, match=message):
        FilterConfig(**limits)


def test_token_range():
    assert parse_token_range("") is None and parse_token_range("3-9") == (3, 9)
    for text in ("9-3", "5", "a-b", "-4", "3-"):
        with pytest.raises(UserError, match=f"LOW-HIGH, such as 0-31999, not '{text}'"):
            parse_token_range(text)


def test_amount_of_data_is_logged_after_building(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "torchtitan"):
        folder = open_cache(Texts("aB", "abC"), tmp_path).folder
        open_cache(Texts("aB", "abC"), tmp_path)
    [message] = [record.message for record in caplog.records]
    assert message.startswith("prepared a.jsonl: 2 samples, 5 tokens in ") and message.endswith(
        f"cached in {folder}"
    )


class OtherIds(Characters):
    """Encoder whose first batch has other ids than the tokenizer."""

    def encode_batch(self, samples):
        if not self.batches:
            self.batches.append(0)
            raise DifferentIds("other ids for 'aB'")
        return super().encode_batch(samples)


def test_all_samples_are_encoded_again_after_other_ids(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "torchtitan"):
        cache = open_cache(Texts("aB", "cD"), tmp_path, encoder=OtherIds())
    assert cache.n_samples == 2
    assert cache.report.rows == 2
    assert "other ids for 'aB'" in caplog.text
    assert "a.jsonl is tokenized again" in caplog.text
