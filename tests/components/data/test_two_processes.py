"""Data of a run on two processes: the ledger, skipped steps, validation datasets."""

import json
from pathlib import Path

import pytest

from tests.training import launch, train


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of the same run on one process, and on two with two micro-batches each."""
    folder = tmp_path_factory.mktemp("runs")
    short, accents, many = folder / "short.txt", folder / "accents.txt", folder / "many.jsonl"
    short.write_text("the cat sat on the mat. " * 5)
    accents.write_text("où est passé l'été? ça, je ne sais pas. " * 10)
    texts = [f"document {i} " + "has some words " * (3 + i % 7) for i in range(50)]
    many.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    options = {
        "dataloader__dataset": many,
        "debug__ledger": True,
        "training__global_batch_size": 8,
        "training__skip_data": ["2", "4"],
        "training__mixed_precision_param": "float32",
        "optimizer__lr": 0.0,
        "validator__enable": True,
        "validator__dataset": [short, f"french={accents}"],
    }
    train(folder / "one", **options, training__local_batch_size=8)
    launch(folder / "two", 2, **options)
    return folder / "one", folder / "two"


def test_ledger_has_documents_of_both_ranks(runs):
    """Documents are in the global order, written by rank 0; excluded steps are excluded on both
    ranks."""
    one, two = (lines_of(folder / "ledger.jsonl") for folder in runs)
    assert two == one
    assert [line["data_step"] for line in two] == [1, 3, 5, 6]


def test_validation_losses_match_one_process(runs):
    one, two = (
        [line for line in lines_of(folder / "metrics.jsonl") if "validation_loss" in line]
        for folder in runs
    )
    keys = [key for key in one[-1] if key.startswith(("validation_loss", "validation_bits"))]
    # Float32 sums over batches of different sizes. (No window here splits a character.)
    expected = [pytest.approx(one[-1][key], rel=1e-6) for key in keys]
    assert len(keys) == 6 and [two[-1][key] for key in keys] == expected
