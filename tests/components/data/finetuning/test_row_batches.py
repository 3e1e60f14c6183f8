"""Rows that several processes encode: the same samples, counts, errors and messages as of one."""

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.components.data.finetuning.test_sample_cache import (
    FORMAT,
    Characters,
    Texts,
    open_cache,
    texts_of,
)
from torchtitan.components.data.finetuning import row_batches
from torchtitan.components.data.finetuning.filters import FilterConfig
from torchtitan.components.data.finetuning.preference import PreferenceDataLoader
from torchtitan.components.data.finetuning.row_batches import BatchEncoder, encoded_batches
from torchtitan.components.data.finetuning.row_formats import function_format
from torchtitan.components.data.finetuning.sample_cache import SampleCache, open_sample_cache
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.components.tokenizer import DifferentIds, PretrainedTokenizer, Tokenizer
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.logging import logger

LETTERS = [f"t{chr(65 + number % 26)}{number}" for number in range(40)]


class Forked(Characters):
    """Encoder that may run in other processes, and says in which one a text was encoded."""

    can_fork = True

    def encode_batch(self, samples: Any) -> Any:
        logger.warning(f"batch of {len(samples)}")
        if os.getpid() != self.parent:
            self.in_process([getattr(sample, "text", "") for sample in samples])
        return super().encode_batch(samples)

    def in_process(self, texts: list[str]) -> None:
        """Act in another process than the one that made this encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.parent = os.getpid()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_batches, "BATCH_ROWS", 4)


def forked() -> Any:
    return Forked()


def opened(
    texts: list[Any], root: Path, encoder: Any = None, processes: int = 2, **more: Any
) -> SampleCache:
    filters = more.pop("filters", FilterConfig(broken="drop"))
    return open_sample_cache(
        Texts(*texts),
        more.pop("format", FORMAT),
        encoder or forked(),
        filters,
        str(root),
        processes=processes,
    )


def same(first: SampleCache, second: SampleCache) -> bool:
    names = [
        [first.describe(i), second.describe(i)]
        for i in range(max(first.n_samples, second.n_samples))
    ]
    assert all(a == b for a, b in names)
    return first.fingerprint == second.fingerprint and asdict(first.report) == asdict(second.report)


def test_processes_make_the_same_samples(tmp_path: Path) -> None:
    texts = [*LETTERS, None, "!", "?", "", "-", "a#A", "turns", *LETTERS]
    alone = open_cache(Texts(*texts), tmp_path / "alone")
    for processes in (2, 3):
        assert same(alone, opened(texts, tmp_path / str(processes), processes=processes))
    assert texts_of(alone)[:40] == LETTERS and len(alone.report.dropped) >= 3


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = []
    for number in range(30):
        turns = [{"role": "user", "content": f"How much is {number}?"}]
        turns += [{"role": "assistant", "content": f"It is {number}."}]
        turns += turns if number % 3 else []
        rows.append({"messages": turns})
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_loaders_of_conversations(conversations: Path, tmp_path: Path, train_on: Any) -> None:
    tokenizer = PretrainedTokenizer.Config().build(path="")
    caches = [
        caches_of(SFTDataLoader, conversations, tokenizer, tmp_path, n, train_on=train_on)
        for n in (1, 2)
    ]
    assert same(*caches) and caches[0].report.turns == 50


def test_loaders_of_pairs(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"Q{number}", "chosen": f"good {number}", "rejected": f"bad {number}"}
        for number in range(30)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = PretrainedTokenizer.Config().build(path="")
    caches = [caches_of(PreferenceDataLoader, file, tokenizer, tmp_path, n) for n in (1, 2)]
    assert same(*caches) and caches[0].n_samples == 30


def caches_of(
    loader: Any, file: Path, tokenizer: Tokenizer, root: Path, processes: int, **more: Any
) -> SampleCache:
    config = loader.Config(
        dataset=[str(file)],
        chat_template="alpaca",
        cache_dir=str(root / f"cache{processes}"),
        encoding_processes=processes,
        **more,
    )
    [cache] = config.open_caches(tokenizer, config.find_template(tokenizer))
    assert isinstance(cache, SampleCache)
    return cache


def test_functions_see_all_rows_in_order(tmp_path: Path) -> None:
    """A function that drops repeated rows remembers those before."""
    seen: list[str] = []

    def once(row: dict[str, Any]) -> Any:
        is_new = row["text"] not in seen
        seen.append(row["text"])
        return row if is_new else None

    cache = opened([*LETTERS, *LETTERS], tmp_path, format=function_format(once, "sft"))
    assert texts_of(cache) == LETTERS and seen == [*LETTERS, *LETTERS]


def test_errors_name_the_first_row(tmp_path: Path) -> None:
    texts = [*LETTERS, "a!", *LETTERS, "b!"]
    with pytest.raises(UserError, match=r"^a.jsonl:41: a text with '!'"):
        opened(texts, tmp_path, filters=FilterConfig(broken="error"))

    class Unreadable(Texts):
        def rows(self, on_read: Any) -> Iterator[Any]:
            yield from super().rows(on_read)
            raise UserError("a.jsonl ends too early")

    for texts, message in (
        (["a", "b!", *LETTERS[:3]], "a.jsonl:2: a text"),
        (["a", "b!", *LETTERS[:6], "c!", *LETTERS], "a.jsonl:2: a text"),
        (LETTERS, "too early"),
    ):
        batches = encoded_batches(
            Unreadable(*LETTERS[:4], *texts).rows(lambda n: None),
            BatchEncoder(FORMAT, forked(), FilterConfig()),
            2,
        )
        with pytest.raises(UserError, match=message.replace(":2", ":6")):
            list(batches)


def test_other_ids_of_a_process_end_its_use_everywhere(tmp_path: Path) -> None:
    class Different(Forked):
        def in_process(self, texts: list[str]) -> None:
            if not self.arrays._is_closed:
                raise DifferentIds("other ids for 'a'")

    encoder = Different()
    assert texts_of(opened(LETTERS, tmp_path, encoder)) == LETTERS
    assert encoder.arrays._is_closed


def test_values_that_are_too_deep_to_send_are_encoded_here(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    class Deep(Texts):
        def rows(self, on_read: Any) -> Iterator[Any]:
            for row in super().rows(on_read):
                row.values["more"] = deep if row.values["text"] == LETTERS[20] else None
                yield row

    [*batches] = encoded_batches(
        Deep(*LETTERS).rows(lambda n: None), BatchEncoder(FORMAT, forked(), FilterConfig()), 2
    )
    places = [where for batch in batches for where, _ in batch.samples]
    assert places == [f"a.jsonl:{number}" for number in range(1, 41)]


def test_a_killed_process_ends_the_work(tmp_path: Path) -> None:
    class Killed(Forked):
        def in_process(self, texts: list[str]) -> None:
            if LETTERS[20] in texts:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunFailure, match="lack of memory; set a lower --dataloader.encoding_"):
        opened(LETTERS, tmp_path, Killed())


def test_messages_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchtitan"):
        opened(LETTERS[:39], tmp_path, processes=3)
    told = [record.message for record in caplog.records]
    # once by this process, for its batch, and once by the others
    assert told == ["batch of 4", "batch of 4", "batch of 3"]


def used(encoder: Any, processes: int) -> bool:
    """Return whether other processes encode some of the rows."""
    encoder.in_process = lambda texts: (_ for _ in ()).throw(UserError("in another process"))
    batches = encoded_batches(
        Texts(*LETTERS).rows(lambda n: None),
        BatchEncoder(FORMAT, encoder, FilterConfig()),
        processes,
    )
    try:
        assert len(list(batches)) == 10
    except UserError as error:
        assert str(error) == "in another process"
        return True
    return False


def test_when_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_batches, "usable_cores", lambda: 2)
    assert used(Forked(), 2) and not used(Forked(), 1) and not used(Forked(), 0)
    monkeypatch.setattr(row_batches, "SECONDS_ALONE", 0.0)
    assert used(Forked(), 0)
    unsafe = Forked()
    unsafe.can_fork = False
    assert not used(unsafe, 0) and not used(unsafe, 2)
    with monkeypatch.context() as patched:
        patched.setattr(row_batches, "usable_cores", lambda: 1)
        assert not used(Forked(), 0)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert not used(Forked(), 0)


@pytest.mark.parametrize(("processes", "message"), [(-1, "at least 0"), (10**6, "16 per CPU core")])
def test_numbers_of_processes(processes: int, message: str) -> None:
    config = SFTDataLoader.Config(encoding_processes=processes)
    with pytest.raises(UserError, match=f"--dataloader.encoding_processes is .*{message}"):
        config.validate()
        config.check_host()


def test_processes_that_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    SFTDataLoader.Config(encoding_processes=1).check_host()
    with pytest.raises(UserError, match="outside Linux, where processes cannot be forked"):
        SFTDataLoader.Config(encoding_processes=2).check_host()
