"""The ledger: the documents of each training step."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from tests.training import tiny_config, train
from torchtitan.tools.errors import RunFailure
from torchtitan.trainer import Trainer
from torchtitan.trainer.ledger import Ledger, shortened


@pytest.fixture
def data(tmp_path) -> Path:
    """Fifty documents, each of a few windows."""
    path = tmp_path / "many.jsonl"
    texts = [f"document {i} " + "has some words " * (3 + i % 7) for i in range(50)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def expected(data: Path, n_samples: int) -> list[str]:
    """Names of the first samples in the global order, from a loader with one rank and batch size
    1."""
    config = tiny_config(data.parent, dataloader__dataset=data).dataloader
    from torchtitan.components.tokenizer import PretrainedTokenizer

    tokenizer = PretrainedTokenizer.Config().build(path="")
    loader = config.build(tokenizer=tokenizer, seq_len=32, local_batch_size=1)
    return [loader.describe(next(loader)["documents"][0]) for _ in range(n_samples)]


def test_documents_of_every_step_in_order(tmp_path, data):
    train(
        tmp_path / "run",
        dataloader__dataset=data,
        debug__ledger=True,
        training__global_batch_size=4,
    )
    lines = read(tmp_path / "run")
    assert [(line["step"], line["data_step"]) for line in lines] == [
        (step, step) for step in range(1, 5)
    ]
    assert [name for line in lines for name in line["documents"]] == expected(data, 16)
    assert all("many.jsonl, document" in name for line in lines for name in line["documents"])


def test_no_ledger_by_default(tmp_path):
    train(tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


class Killed(Exception):
    """Simulates a kill between two steps."""


class KilledAfterStepThree(Trainer):
    def complete_step(self, outcome):
        super().complete_step(outcome)
        if self.step == 3:
            raise Killed

    def save_last_step(self, error):
        """A kill saves nothing."""


def test_resumed_run_drops_repeated_steps(tmp_path, data):
    options = {"dataloader__dataset": data, "debug__ledger": True, "training__steps": 5}
    options |= {"checkpoint__enable": True, "checkpoint__interval": 2}
    train(tmp_path / "straight", **options)
    with pytest.raises(Killed):
        train(tmp_path / "resumed", trainer_class=KilledAfterStepThree, **options)
    assert [line["step"] for line in read(tmp_path / "resumed")] == [1, 2, 3]
    with open(tmp_path / "resumed" / "ledger.jsonl", "a") as torn:
        torn.write('{"step": 2, "docu')
    train(tmp_path / "resumed", **options)
    assert read(tmp_path / "resumed") == read(tmp_path / "straight")


def test_epoch_has_every_sample_once(tmp_path, data):
    """The padding of the last batch has no name."""
    trainer = train(
        tmp_path / "run",
        dataloader__dataset=data,
        debug__ledger=True,
        training__epochs=2,
        training__local_batch_size=5,
    )
    counts = Counter(name for line in read(tmp_path / "run") for name in line["documents"])
    n_samples = trainer.dataloader.n_samples
    assert n_samples % 5 != 0 and trainer.step == math.ceil(n_samples / 5)
    assert sum(counts.values()) == n_samples
    assert all(count % 2 == 0 for count in counts.values())


@pytest.mark.slow
def test_larger_batch_after_resume_reads_the_rest(tmp_path, data):
    options = {"dataloader__dataset": data, "debug__ledger": True, "training__epochs": 1}
    options |= {
        "checkpoint__enable": True,
        "checkpoint__interval": 3,
        "lr_scheduler__min_lr_factor": 0.0,
    }
    with pytest.raises(Killed):
        train(tmp_path, trainer_class=KilledAfterStepThree, **options)
    trainer = train(tmp_path, **options, training__global_batch_size=8)
    n_samples = trainer.dataloader.n_samples
    assert trainer.step == 3 + math.ceil((n_samples - 3 * 2) / 8)
    documents = [name for line in read(tmp_path) for name in line["documents"]]
    assert len(documents) == len(set(documents)) == n_samples
    assert trainer.metrics.total_steps == trainer.lr_scheduler.total_steps == trainer.step
    assert trainer.lr_scheduler.lr == 0


def test_skipped_step_has_its_reason(tmp_path, data):
    class Overflowing(Trainer):
        def read_result(self, *arguments):
            outcome = super().read_result(*arguments)
            return dataclasses.replace(outcome, loss=math.inf) if self.step == 1 else outcome

    train(
        tmp_path,
        trainer_class=Overflowing,
        dataloader__dataset=data,
        debug__ledger=True,
        training__on_nonfinite="skip",
    )
    lines = read(tmp_path)
    assert [(line["step"], line["data_step"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [
        line["step"]
        for line in lines
        if line.get("skipped", "").startswith("loss inf, gradient norm")
    ] == [2]


def test_line_is_written_before_the_checkpoint(tmp_path, data):
    class Looking(Trainer):
        def use_result(self, outcome, *step, **progress):
            assert read(tmp_path)[-1]["step"] == self.step
            super().use_result(outcome, *step, **progress)

    train(tmp_path, trainer_class=Looking, dataloader__dataset=data, debug__ledger=True)


def test_full_disk_ends_the_run(tmp_path, data, monkeypatch):
    class FullAfterOneStep(Trainer):
        def complete_step(self, outcome):
            super().complete_step(outcome)
            (ledger,) = (callback for callback in self.callbacks if isinstance(callback, Ledger))

            def full(document):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(ledger.file, "append", full)

    with pytest.raises(RunFailure, match=r"ledger\.jsonl' cannot be written: No space left"):
        train(
            tmp_path, trainer_class=FullAfterOneStep, dataloader__dataset=data, debug__ledger=True
        )
    assert [line["step"] for line in read(tmp_path)] == [1]


def test_long_lists_are_shortened():
    assert shortened([]) == "unknown"
    assert shortened(["a", "b"]) == "a; b"
    assert shortened([str(i) for i in range(11)], shown=3) == "0; 1; 2 and 8 more"
