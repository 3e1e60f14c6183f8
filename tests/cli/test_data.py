"""`torchtitan data` shows exactly the training data."""

import errno
import io
import json
import os
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text

from tests.browser import Browser
from tests.training import TINY, flags
from torchtitan.cli.data_report import histogram, print_samples
from torchtitan.cli.data_samples import samples_of, token_texts
from torchtitan.cli.main import main
from torchtitan.components.data.base import BaseDataLoader
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config.manager import ConfigManager
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools import durable

SEQ_LEN = 128
SFT = ["--config", "debugmodel_sft"]
NASTY = '<script>alert(1)</script>"><img src=x onerror=alert(2)> &lt; \x1b]0;title\x07 \u202e'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    for name in ("NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def chats(folder) -> Path:
    """Sixty conversations with one or two questions and about 30 to 90 tokens; one is too long for
    a window."""
    rows = []
    for i in range(60):
        turns = [
            ("user", f"How much is {i} plus {i}?"),
            ("assistant", f"It is {2 * i}. " + "Well done! " * (i % 4)),
        ]
        rows.append(
            {"messages": [{"role": role, "content": text} for role, text in turns * (1 + i % 2)]}
        )
    rows[7]["messages"][1]["content"] = "A very long answer. " * 40
    return write(folder / "chats.jsonl", rows)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def options(**more) -> list[str]:
    tiny = {**TINY, "training.seq_len": SEQ_LEN, "dump_folder": "run"}
    return flags({**tiny, **{key.replace("__", "."): value for key, value in more.items()}})


def chat_options(chats: Path, **more) -> list[str]:
    return [*SFT, *options(dataloader__dataset=[chats.name], dataloader__too_long="drop", **more)]


class Page(HTMLParser):
    """Tokens of a page by sample, and its tags."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.tokens: list[list[tuple[int, int, bool]]] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags[tag] += 1
        self.attributes |= set(attributes)
        if attributes.get("class") == "sample":
            self.tokens.append([])
        if found := re.fullmatch(r"id (\d+), position (\d+)", attributes.get("title") or ""):
            self.tokens[-1].append((int(found[1]), int(found[2]), tag == "mark"))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.cells[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        self.text += data
        if self._in_cell:
            self.cells[-1][-1] += data

    def row(self, first: str) -> list[str]:
        """Return the first table line that begins with a cell."""
        return next(cells for cells in self.cells if cells[0] == first)


def inspect(*words: str) -> Page:
    assert main(["data", "inspect", "--html", "page.html", *words]) == 0
    return Page(Path("page.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_tables_of_a_page_show_that_they_scroll(chats, tmp_path):
    """By a shadow at the side of the columns that a narrow screen hides."""
    inspect(*chat_options(chats))
    with Browser(tmp_path / "browser") as browser:
        browser.open(Path("page.html").absolute().as_uri(), width=360)
        assert browser.run("document.documentElement.scrollWidth") <= 360
        tables = "[...document.querySelectorAll('.wide')]"
        assert browser.run(f"{tables}.some(one => one.scrollWidth > one.clientWidth)")
        shadow = "getComputedStyle(one).backgroundImage.split('linear-gradient').length"
        assert browser.run(f"{tables}.every(one => {shadow} === 5)")
        assert browser.problems == []


def build_loader(words: list[str], batch: int) -> tuple[BaseDataLoader, PretrainedTokenizer]:
    """Return the loader of a configuration for a rank with `batch` windows per batch."""
    config = ConfigManager().parse_args(words).config
    tokenizer = config.tokenizer.build(path=config.hf_assets_path)
    loader = config.dataloader.build(
        tokenizer=tokenizer,
        seq_len=config.training.seq_len,
        local_batch_size=batch,
        seed=config.debug.seed,
        epochs=config.training.epochs,
    )
    return loader, tokenizer


def failure(capsys, *words: str) -> str:
    """Return the single error line of a wrong command."""
    capsys.readouterr()
    assert main(["data", *words]) == 2
    [line] = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not re.search(" (INFO|WARNING) ", line)
    ]
    return line


# --- masks
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
def test_marked_text_is_the_trained_text(chats, train_on, capsys):
    words = chat_options(chats, dataloader__train_on=train_on)
    page = inspect(*words, "--samples", "3")
    loader, tokenizer = build_loader(words, 3)
    batch = next(loader)
    assert len(page.tokens) == 3
    texts = []
    for shown, labels in zip(page.tokens, batch["labels"], strict=True):
        predicted = labels[labels != -100]
        assert [token for token, _, marked in shown if marked] == predicted.tolist()
        assert any(not marked for _, _, marked in shown)
        texts.append(tokenizer.decode(predicted.tolist()))
    # The terminal shows the same, in brackets if it has no colors.
    printed = capsys.readouterr().out.partition("\nWindows:")[2]
    marked = "".join(re.findall(r"⟦(.*?)⟧", printed.partition("\n")[2], re.DOTALL))
    assert marked == "".join(texts)


def test_colors_match_the_marks(chats, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    loader, tokenizer = build_loader(chat_options(chats), 1)
    batch = next(loader)
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=True, color_system="standard", markup=False, highlight=False
    )
    print_samples(console, samples_of(batch, loader, tokenizer))
    text = Text.from_ansi(written.getvalue())
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    trained = "".join(
        part for part, style in spans if style.color is not None and style.color.number == 2
    )
    labels = batch["labels"][batch["labels"] != -100].tolist()
    assert trained == "trained" + tokenizer.decode(labels)  # the first one is the color key
    special = "".join(part for part, style in spans if style.reverse)
    assert special.startswith("special<|begin_of_text|><|im_start|><|im_end|>")
    assert "⟦" not in text.plain


def test_documents_are_complete_and_named(chats):
    loader, tokenizer = build_loader(chat_options(chats), 4)
    batch = next(loader)
    for sample, numbers in zip(
        samples_of(batch, loader, tokenizer), batch["documents"], strict=True
    ):
        [row] = sample.rows
        taken = 0
        for document, number in zip(row.documents, numbers[numbers >= 0].tolist(), strict=True):
            encoded = loader.samples.sample(number)
            # tokens that are neither input nor label are absent
            n_shown = len(encoded.ids) - (not encoded.trained[-1])
            assert [token.id for token in document.tokens] == encoded.ids[:n_shown].tolist()
            assert [token.trained for token in document.tokens] == encoded.trained[
                :n_shown
            ].tolist()
            assert [token.position for token in document.tokens] == list(range(n_shown))
            line = int(document.name.removeprefix("chats.jsonl:"))
            question = json.loads(chats.read_text().splitlines()[line - 1])["messages"][0][
                "content"
            ]
            assert question in "".join(token.text for token in document.tokens)
            taken += len(encoded.ids) - 1
        assert row.n_positions == SEQ_LEN == taken + row.n_padding


def test_pretraining_text(folder):
    (folder / "a.txt").write_text("Once upon a time there was a lion. " * 30)
    words = [*options(dataloader__dataset="a.txt")]
    page = inspect(*words, "--samples", "2")
    loader, _ = build_loader(words, 2)
    labels = next(loader)["labels"]
    assert [[token for token, _, marked in shown if marked] for shown in page.tokens] == [
        row[row != -100].tolist() for row in labels
    ]
    assert page.row("a.txt")[1:4] == ["text", "1", "1"]


def test_mixture_with_weights(folder):
    """An epoch is over when the first dataset has been read, and the shares are the run's."""
    for name, n_lines in (("a", 500), ("b", 600), ("c", 9000)):
        (folder / f"{name}.txt").write_text("Once upon a time there was a lion.\n" * n_lines)
    words = options(dataloader__dataset=["a.txt", "b.txt", "c.txt"], dataloader__weights=[7, 2, 1])
    page = inspect(*words, *options(training__epochs=1, training__global_batch_size=2))
    loader, _ = build_loader([*words, "--training.epochs", "1"], 1)
    n_windows = len(list(loader))
    assert page.row("windows per epoch")[1] == str(n_windows)
    assert page.row("steps per epoch")[1] == str(-(-n_windows // 2))
    assert page.row("the run")[1].startswith(f"{-(-n_windows // 2)} steps, 2 windows ")
    shares = [float(page.row(f"{name}.txt")[11].removesuffix("%")) for name in "abc"]
    assert shares == pytest.approx([70, 20, 10], abs=1)  # the last window of a set is not full
    assert page.row("a.txt")[9] == "1.00" and 0 < float(page.row("c.txt")[9]) < 0.1


def test_characters_split_across_tokens(assets):
    text = "Grüße, 世界! 🦊🦊 ﷽ \ufffd end 👨‍👩‍👧"
    folders = [
        "",
        assets / "gpt2-tokenizer",
        assets / "mistral-v0.3-tokenizer",
        assets / "llama3-tokenizer",
    ]
    for path in folders:
        tokenizer = PretrainedTokenizer.Config().build(path=str(path))
        ids = tokenizer.encode(text)
        texts = token_texts(ids, tokenizer)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids)
        assert "🦊" in "".join(texts)
        # A character of several tokens is shown whole at one of them.
        assert all(part.count("\ufffd") == 0 or "\ufffd" in text for part in texts)
        assert "".join(texts).count("\ufffd") == 1


def test_invalid_utf8_bytes(assets):
    tokenizer = PretrainedTokenizer.Config().build(path=str(assets / "gpt2-tokenizer"))
    fox = tokenizer.encode("🦊")
    assert len(fox) > 1
    ids = [*tokenizer.encode("a"), fox[0], *tokenizer.encode("b")]
    assert token_texts(ids, tokenizer) == ["a", "\ufffd", "b"]


# --- hostile data
# --------------------------------------------------------------------------------------------------


def test_data_is_escaped(folder, capsys):
    rows = [
        {
            "messages": [
                {"role": "user", "content": NASTY},
                {"role": "assistant", "content": f"[bold]{NASTY}"},
            ]
        }
    ] * 3
    rows.append({"messages": [{"role": "<b>boss</b>", "content": "x"}]})
    write(folder / "<i>.jsonl", rows)
    page = inspect(
        *SFT,
        *options(
            dataloader__dataset=["<i>.jsonl"], dataloader__broken="drop", training__seq_len=512
        ),
    )
    assert set(page.tags) <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "h1",
            "h2",
            "h3",
            "p",
            "table",
            "tr",
            "th",
            "td",
            "div",
        ),
        *("span", "mark"),
    }
    assert page.attributes <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "class",
        "style",
        "title",
        "name",
    }
    assert "<script>alert(1)</script>" in page.text
    assert "&lt; ␛]0;title␇ \\u202e" in page.text
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\x07" not in printed and "\u202e" not in printed
    assert "[bold]<script>" in printed


@pytest.mark.slow
def test_page_fits_a_phone(folder):
    """Wide content wraps, or scrolls in its own box. Checked by eye in a browser at 390 px."""
    inspect(*SFT)
    page = Path("page.html").read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    tables_of_columns = page.count("<table><tr>\n<th>")
    assert tables_of_columns >= 1
    assert page.count('<div class="wide"><table><tr>\n<th>') == tables_of_columns
    widths = re.findall(r'style="width:([^"]*)"', page)
    assert widths and all(width.endswith("%") and 0 <= float(width[:-1]) <= 100 for width in widths)


@pytest.mark.parametrize("with_documents", [True, False])
def test_padding_is_counted(with_documents):
    tokenizer = PretrainedTokenizer.Config().build(path="")
    inputs = torch.tensor([[300, 301, 302, 0, 0, 0], [0] * 6, [300, 301, 302, 303, 304, 305]])
    labels = torch.full_like(inputs, -100)
    labels[0, 1], labels[2, :5] = 302, inputs[2, 1:]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
    attention = {"attention": AttentionMetadata.from_positions(positions)} if with_documents else {}
    batch = {"input": inputs, "labels": labels, **attention}
    loader = BaseDataLoader(BaseDataLoader.Config())
    rows = [sample.rows[0] for sample in samples_of(batch, loader, tokenizer)]
    assert [row.n_padding for row in rows] == [3, 6, 0]
    assert [
        [token.id for document in row.documents for token in document.tokens] for row in rows
    ] == [
        [300, 301, 302],
        [],
        list(range(300, 306)),
    ]


# --- counts
# --------------------------------------------------------------------------------------------------


def test_report(folder):
    good = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A lion."}]
    long = [good[0], {"role": "assistant", "content": "A lion. " * 200}]
    rows = (
        [{"messages": good}] * 20
        + [{"messages": long}] * 2
        + [{"messages": []}]
        + [{"messages": "?"}]
    )
    write(folder / "rows.jsonl", rows)
    page = inspect(
        *SFT,
        *options(dataloader__dataset=["rows.jsonl"], dataloader__broken="drop", training__steps=1),
    )
    loader, _ = build_loader(
        [*SFT, *options(dataloader__dataset=["rows.jsonl"], dataloader__broken="drop")], 1
    )
    n_tokens = sum(len(loader.samples.sample(i).ids) for i in range(20))
    n_trained = sum(int(loader.samples.sample(i).trained.sum()) for i in range(20))
    name, form, read, kept, cut, dropped, tokens, trained, share, _, allowed, of_run = page.row(
        "rows.jsonl"
    )
    assert (form, read, kept, cut, dropped, allowed) == (
        "messages",
        "24",
        "20",
        "0",
        "4",
        "no limit",
    )
    assert (int(tokens), int(trained)) == (n_tokens, n_trained)
    assert (share, of_run) == (f"{n_trained / n_tokens:.1%}", "100.0%")
    events = {
        cells[1]: cells[2:] for cells in page.cells if cells[0] == "rows.jsonl" and len(cells) == 4
    }
    assert {event: count for event, (count, _) in events.items()} == {
        "dropped: too_long": "2",
        "dropped: empty": "1",
        "dropped: broken": "1",
    }
    assert "rows.jsonl:21, rows.jsonl:22: " in events["dropped: too_long"][1]
    assert page.row("the run")[1] == f"1 step, 2 windows of {SEQ_LEN} tokens in each"


def test_unused_columns_are_reported(folder, capsys):
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A lion."}]
    write(
        folder / "rows.jsonl",
        [{"messages": turns, "score": 1}, {"messages": turns, "images": ["x.png"]}],
    )
    page = inspect(
        *SFT,
        *options(
            dataloader__dataset=["rows.jsonl"], training__steps=2, training__local_batch_size=1
        ),
    )
    assert page.row("the run")[1] == f"2 steps, 1 window of {SEQ_LEN} tokens in each"
    for number, column in enumerate(("score", "images"), 1):
        name = f"with the column {column}, which is not read"
        assert ["rows.jsonl", name, "1", f"rows.jsonl:{number}: it has content"] in page.cells
    warning = "the columns score (rows: 1), images (rows: 1) are ignored (format "
    assert capsys.readouterr().err.count(warning) == 1


def test_messages_in_other_spellings_are_shown_as_they_are_read(folder):
    """A row in the normal form, with a null of a table, is not shown."""
    plain = [
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "Ho!"},
    ]
    other = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "<think>Hm.</think>Ho!"}]
    write(folder / "plain.jsonl", [{"messages": plain}])
    write(folder / "other.jsonl", [{"conversations": other}] * 2)
    words = options(dataloader__dataset=["plain.jsonl", "other.jsonl"], training__steps=1)
    page = inspect(*SFT, *words, "--dataloader.on_loss_of_reasoning", "train")
    shown = [cells for cells in page.cells if len(cells) == 4 and cells[:2] == ["other.jsonl", "2"]]
    assert [cells[2] for cells in shown] == ["other.jsonl:1", "other.jsonl:2"]
    assert all(
        '"reasoning_content": "Hm."' in cells[3] and '"role": "user"' in cells[3] for cells in shown
    )


def test_histogram_adds_up(chats):
    page = inspect(*chat_options(chats))
    counts = [
        int(cells[1].replace(",", ""))
        for cells in page.cells
        if re.fullmatch(r"[\d,]+(-[\d,]+)?", cells[0])
    ]
    assert sum(counts) == 60  # including the one that is too long
    assert counts[-1] == 1
    assert f"{1 / 60:.1%} have more than the {SEQ_LEN + 1} tokens" in page.text


@pytest.mark.parametrize("seed", range(20))
def test_each_length_is_in_its_bin(seed):
    random = np.random.default_rng(seed)
    lengths = random.lognormal(random.uniform(0, 8), 1.5, 500).astype(np.int64) + 1
    max_length = int(random.choice([1, 16, 65, int(np.median(lengths)), 10**6]))
    bins = histogram(lengths, max_length)
    assert [length_bin.n_samples for length_bin in bins] == [
        int(((length_bin.low <= lengths) & (lengths <= length_bin.high)).sum())
        for length_bin in bins
    ]
    assert sum(length_bin.n_samples for length_bin in bins) == 500
    assert (
        sum(length_bin.n_samples for length_bin in bins if length_bin.beyond)
        == (lengths > max_length).sum()
    )


def test_windows_steps_and_epochs(chats):
    words = chat_options(chats, training__steps=7, training__global_batch_size=4)
    page = inspect(*words)
    loader, _ = build_loader([*words, "--training.epochs", "1"], 1)
    windows = int(page.row("windows per epoch")[1])
    assert windows == loader.n_samples
    assert page.row("steps per epoch")[1] == str(-(-windows // 4))
    filled = sum(len(loader.samples.sample(i).ids) - 1 for i in range(59)) / (windows * SEQ_LEN)
    assert page.row("packing efficiency")[1].startswith(f"{filled:.1%} ")
    assert float(page.row("chats.jsonl")[9]) == pytest.approx(28 / windows, abs=1 / windows + 0.005)


def test_invalid_training_options_are_rejected(chats, folder, capsys):
    write(folder / "few.jsonl", [json.loads(chats.read_text().splitlines()[0])])
    words = [
        *SFT,
        *options(dataloader__dataset=["chats.jsonl", "few.jsonl"], dataloader__weights=[1, 1]),
    ]
    page = inspect(*words, "--training.steps", "50")
    assert "Training would be refused: few.jsonl would be read" in page.text
    assert float(page.row("few.jsonl")[9]) > 1


@pytest.mark.slow
def test_skipped_steps_are_included(chats):
    """Skipped steps add data to a run of N steps, and shorten a run of N epochs."""
    words = chat_options(chats, training__steps=4, training__global_batch_size=2)
    skipping = [*words, "--training.skip_data", "2-3", "5", "900"]
    straight, longer = inspect(*words, "--training.steps", "7"), inspect(*skipping)
    assert longer.row("chats.jsonl")[9] == straight.row("chats.jsonl")[9]
    steps = [
        int(inspect(*of, "--training.epochs", "1").row("the run")[1].split()[0])
        for of in (words, skipping)
    ]
    assert steps[1] == steps[0] - 3


# --- other loaders
# --------------------------------------------------------------------------------------------------


_OWN_MODULE = """
import dataclasses
from dataclasses import dataclass

import torch

from torchtitan.components.data.base import BaseDataLoader
from torchtitan.components.data.finetuning.preference import PreferenceDataLoader
from torchtitan.components.data.finetuning.prompts import PromptDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel_sft


class Counting(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        "Numbers."

    def __init__(self, config, *, seq_len, local_batch_size, **others):
        super().__init__(config)
        self.shape = local_batch_size, seq_len

    def __next__(self):
        tokens = torch.arange(300, 300 + self.shape[1] + 1).expand(self.shape[0], -1)
        labels = tokens[:, 1:].clone()
        labels[:, :10] = -100
        return {"input": tokens[:, :-1], "labels": labels}


def pairs():
    loader = PreferenceDataLoader.Config(dataset=["pairs.jsonl"], chat_template="chatml")
    return dataclasses.replace(llama3_debugmodel_sft(), dataloader=loader)


def prompts():
    loader = PromptDataLoader.Config(dataset=["prompts.jsonl"], chat_template="chatml")
    return dataclasses.replace(llama3_debugmodel_sft(), dataloader=loader)


def counting():
    return dataclasses.replace(llama3_debugmodel_sft(), dataloader=Counting.Config())
"""


@pytest.fixture
def module(folder) -> list[str]:
    """Select a module with configurations of other loaders."""
    name = f"own_{folder.name}".replace("-", "_")
    (folder / name).mkdir()
    (folder / name / "config_registry.py").write_text(_OWN_MODULE)
    return ["--module", f"./{name}"]


def test_pairs_side_by_side(module, folder, capsys):
    rows = [
        {"prompt": f"Question {i}?", "chosen": f"Good {i}.", "rejected": f"Bad {i}, bad."}
        for i in range(5)
    ]
    write(folder / "pairs.jsonl", rows)
    words = [*module, "--config", "pairs", *options()]
    page = inspect(*words, "--samples", "2")
    loader, _ = build_loader(words, 2)
    batch = next(loader)
    for index, shown in enumerate(page.tokens):
        labels = batch["labels"][index].tolist()
        assert [token for token, _, marked in shown if marked] == [
            label for label in labels if label >= 0
        ]
    # in the table of turns, and above each
    assert page.text.count("chosen") == page.text.count("rejected") == 10
    printed = capsys.readouterr().out
    assert (
        "chosen" in printed and re.search(r"⟦Good \d", printed) and re.search(r"⟦Bad \d", printed)
    )
    assert main(["data", "show", "--step", "1", *words]) == 0
    assert "pairs.jsonl:" in capsys.readouterr().out


ANSWER = "Number {}, <b>by</b> \x1b[1m token 0123456789abcdef0123"
"""A reference answer with markup, a control character, and what looks like a credential."""


def test_prompts_with_their_answers(module, folder, capsys):
    write(
        folder / "prompts.jsonl",
        [{"question": f"Which number is {i}?", "answer": ANSWER.format(i)} for i in range(5)],
    )
    words = [*module, "--config", "prompts", *options()]
    page = inspect(*words, "--samples", "5")
    assert len(page.tokens) == 5
    assert not any(marked for shown in page.tokens for _, _, marked in shown)
    capsys.readouterr()
    assert main(["data", "inspect", *words, "--samples", "5"]) == 0
    for text in (page.text, capsys.readouterr().out):
        assert all(ANSWER.format(i).replace("\x1b", "␛") in text for i in range(5))
    assert page.tags["b"] == 0


def test_loader_without_statistics(module, capsys):
    page = inspect(*module, "--config", "counting", *options(), "--samples", "1")
    [shown] = page.tokens
    assert [token for token, _, _ in shown] == list(range(300, 300 + SEQ_LEN + 1))
    assert [marked for _, _, marked in shown] == [False] * 11 + [True] * (SEQ_LEN - 10)
    message = failure(capsys, "show", *module, "--config", "counting", *options(), "--step", "2")
    assert "--debug.ledger" in message


# --- a step's documents
# ----------------------------------------------------------------------------------------------


def shown_step(capsys, step: int, words: list[str]) -> tuple[str, list[str]]:
    """Return the source of the documents, and the documents with their marks, in order."""
    capsys.readouterr()
    assert main(["data", "show", "--step", str(step), *words]) == 0
    printed = capsys.readouterr().out
    documents = re.findall(
        r"^── (chats\.jsonl:\d+\n.*?)(?=^──|\Z)", printed, re.DOTALL | re.MULTILINE
    )
    return printed.strip().splitlines()[0], [text.strip() for text in documents]


def train_here(words: list[str]) -> None:
    trainer = ConfigManager().parse_args(words).config.build()
    try:
        trainer.train()
    finally:
        trainer.close()


@pytest.mark.slow
def test_step_from_ledger_equals_plan(chats, capsys):
    words = chat_options(
        chats, training__steps=4, training__global_batch_size=4, training__skip_data=["2", "4-5"]
    )
    planned = [shown_step(capsys, step, words) for step in (1, 2, 3, 4)]
    assert shown_step(capsys, 4, [*words, "--dataloader.num_workers", "2"]) == planned[3]
    train_here([*words, "--debug.ledger"])
    named = [shown_step(capsys, step, words) for step in (1, 2, 3, 4)]
    assert [documents for _, documents in named] == [documents for _, documents in planned]
    assert all("according to the configuration and its seed" in line for line, _ in planned)
    assert all("according to run/ledger.jsonl" in line for line, _ in named)
    lines = [json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines()]
    names = [[text.splitlines()[0] for text in documents] for _, documents in named]
    assert names == [line["documents"] for line in lines]
    assert [line["data_step"] for line in lines] == [1, 3, 6, 7]
    assert "⟦" in named[0][1][0]
    capsys.readouterr()
    assert main(["data", "show", "--step", "4", *words]) == 0
    printed = capsys.readouterr().out
    assert "Documents: " in printed and not re.search("windows|padding", printed, re.IGNORECASE)
    assert re.search(rf"documents +{len(names[3])}\n +tokens +\d+\n +trained +\d+", printed)


@pytest.mark.parametrize(
    "damage",
    [
        "null",
        "5",
        "{}",
        "[" * 100_000,
        '{"step": 2}',
        '{"step": 2, "data_step": "x", "documents": []}',
        "\udcff",
    ]
    + [
        f'{{"step": 2, "data_step": {data_step}, "documents": {names}}}'
        for data_step, names in ((0, []), (1, [5]))
    ],
)
def test_damaged_ledger(chats, capsys, damage):
    Path("run").mkdir()
    lines = [json.dumps({"step": step, "data_step": step, "documents": []}) for step in (1, 3)]
    content = "\n".join([lines[0], damage, lines[1]])
    Path("run/ledger.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    expected = (
        "there is no step 2: 'run/ledger.jsonl' has the steps 1 to 3, and line 2 of it is damaged"
    )
    assert expected in failure(capsys, "show", "--step", "2", *chat_options(chats))


def test_pretraining_step_from_ledger(folder, capsys):
    (folder / "a.txt").write_text("Once upon a time there was a lion. " * 60)
    words = [*options(dataloader__dataset="a.txt", training__steps=2)]
    assert main(["data", "show", "--step", "2", *words]) == 0
    planned = capsys.readouterr().out.partition("\n")[2]
    train_here([*words, "--debug.ledger"])
    capsys.readouterr()
    assert main(["data", "show", "--step", "2", *words]) == 0
    first, _, named = capsys.readouterr().out.partition("\n")
    assert first.endswith("step 2, according to run/ledger.jsonl:")
    # Only the names are known, since the configuration has other data.
    Path("run/ledger.jsonl").write_text(
        json.dumps({"step": 2, "data_step": 2, "documents": ["b.txt, document 3"]})
    )
    assert main(["data", "show", "--step", "2", *words]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["b.txt, document 3"]
    assert named == planned


def test_order_decided_in_training_needs_the_ledger(chats, capsys):
    words = chat_options(chats, training__steps=3)[2:]
    words = ["--module", "loss_sampling", "--config", "loss_sampling_debugmodel", *words]
    assert "the documents of step 2 depend on training; run with --debug.ledger" in failure(
        capsys, "show", "--step", "2", *words
    )
    train_here([*words, "--debug.ledger"])
    _, documents = shown_step(capsys, 3, words)
    line = json.loads(Path("run/ledger.jsonl").read_text().splitlines()[2])
    assert [text.splitlines()[0] for text in documents] == line["documents"]


def test_ledger_of_other_data(chats, folder, capsys):
    (folder / "run").mkdir()
    line = {"step": 1, "data_step": 1, "documents": ["other.jsonl:3"]}
    (folder / "run" / "ledger.jsonl").write_text(json.dumps(line))
    assert "'other.jsonl:3' is not a sample of this data" in failure(
        capsys, "show", "--step", "1", *chat_options(chats)
    )
    assert "has the steps 1 to 1" in failure(capsys, "show", "--step", "9", *chat_options(chats))


def test_run_is_selected_by_its_configuration_file(chats, capsys):
    words = chat_options(chats)
    Path("run").mkdir()
    ConfigManager().parse_args(words).save(Path("run/config.yaml"))
    assert shown_step(capsys, 2, ["--config_file", "run/config.yaml"]) == shown_step(
        capsys, 2, words
    )


def test_page_is_written_atomically(chats, capsys, monkeypatch):
    Path("page.html").write_text("the page before")

    written = durable.new_file

    def fill_up(path):
        if path.name.startswith("page.html"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path)

    with monkeypatch.context() as patched:
        patched.setattr(durable, "new_file", fill_up)
        error = failure(capsys, "inspect", "--html", "page.html", *chat_options(chats))
    assert error.endswith("--html page.html cannot be written: No space left on device")
    assert Path("page.html").read_text() == "the page before" and not list(
        Path().glob("page.html?*")
    )


# --- mistakes
# --------------------------------------------------------------------------------------------------


def test_mistakes_are_one_line(chats, capsys):
    words = chat_options(chats)
    assert "the run has 4" in failure(capsys, "show", "--step", "5", *words)
    assert "set --step to the number of a step" in failure(capsys, "show", *words)
    assert "--step is 0, but must be the number of a step, from 1" in failure(
        capsys, "show", "--step", "0", *words
    )
    assert "--samples is 0, but must be at least 1" in failure(
        capsys, "inspect", "--samples", "0", *words
    )
    assert "there is no folder" in failure(
        capsys, "inspect", "--html", "no/where/page.html", *words
    )
    os.mkfifo("pipe")
    assert "pipe is not a regular file" in failure(capsys, "inspect", "--html", "pipe", *words)
    assert "nothing.jsonl" in failure(
        capsys, "inspect", *SFT, "--dataloader.dataset", "nothing.jsonl"
    )
    assert "unknown command 'shw'" in failure(capsys, "shw")


def test_unknown_options_are_rejected(capsys):
    message = failure(capsys, "inspect", "--dataloader.datset", "x")  # codespell:ignore
    assert "did you mean '--dataloader.dataset'" in message


@pytest.mark.parametrize("command", ["inspect", "show"])
def test_help_has_both_kinds_of_options(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", command, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert {"inspect": "--html FILE", "show": "--step N"}[command] in printed
    assert "--dataloader.dataset" in printed


@pytest.mark.slow
def test_order_follows_the_seed(chats):
    first, again, other = (
        inspect(*chat_options(chats), "--debug.seed", seed, "--samples", "2").tokens
        for seed in ("1", "1", "2")
    )
    assert first == again != other
