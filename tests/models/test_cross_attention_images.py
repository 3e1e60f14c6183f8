"""Classes whose decoder reads images in layers of their own, which they skip without images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.test_images import data, folders, norm, options, reference, train_rank
from tests.processes import run_processes
from tests.training import read_metrics, train

__all__ = ["data", "folders"]

ROW_BY_ROW = {"training__local_batch_size": 1, "training__global_batch_size": 4}
"""Options for a pass for each row, one of which has no images."""


@pytest.mark.slow
def test_rows_by_themselves_equal_those_of_the_class(
    folders: Any, data: Any, tmp_path: Path
) -> None:
    """In a batch, the class lets text before images depend on how many the other rows have:
    findings/transformers_mllama_text_reads_later_images.sh."""
    folder = folders("mllama")
    rows, conversations, images = data
    results = [
        reference("mllama", folder, [conversation], [shown])
        for conversation, shown in zip(conversations, images, strict=True)
    ]
    n_labels = [len(messages[-1]["content"]) + 1 for messages in conversations]
    total = sum(n_labels)
    loss = sum(n * loss for n, (loss, _) in zip(n_labels, results, strict=True)) / total
    gradients: dict[str, Any] = {}
    for n, (_, own) in zip(n_labels, results, strict=True):
        for name, gradient in own.items():
            gradients[name] = gradients.get(name, 0) + n / total * gradient
    train(tmp_path, **options(folder, rows) | ROW_BY_ROW)
    [(_, ours, grad_norm)] = read_metrics(tmp_path, "loss", "grad_norm")
    assert ours == pytest.approx(loss, rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients.values()), rel=1e-5)


@pytest.mark.slow
def test_ranks_without_images_skip_layers(folders: Any, data: Any, tmp_path: Path) -> None:
    """Each of two ranks gets a row per pass; in one pass, a rank has no images."""
    rows, *_ = data
    more = {**ROW_BY_ROW, "training__steps": 3}
    train(tmp_path / "one", **options(folders("mllama"), rows) | more)
    run_processes(train_rank, 2, tmp_path / "two", folders("mllama"), rows, more)
    expected = read_metrics(tmp_path / "one", "loss", "grad_norm")
    found = read_metrics(tmp_path / "two", "loss", "grad_norm")
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)
