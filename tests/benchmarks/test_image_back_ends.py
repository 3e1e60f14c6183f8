"""`benchmarks/image_back_ends.py`: what it computes from the results of two back ends."""

import sys
from typing import Any

import image_back_ends
import numpy as np
import pytest


def processor(steps: int, grid: int = 4) -> Any:
    """Return a processor whose last pixel of 100 is `steps` above 10."""

    def process(image: Any, **options: Any) -> dict[str, Any]:
        values = np.full((1, 100), 10)
        values[0, -1] += steps
        return {"pixel_values": values / 255, "image_grid_thw": [[1, 2, grid]]}

    return process


def test_differences_are_in_steps_of_pixels():
    pair = {"torchvision": processor(0), "pillow": processor(5)}
    numbers = image_back_ends.differences(pair, {"one": None, "other": None})
    assert numbers["largest"] == pytest.approx(5)
    assert numbers["mean"] == pytest.approx(0.05)
    assert numbers["above_one"] == pytest.approx(0.01)
    assert numbers["unequal"] == {}


def test_unequal_grids_are_shown():
    pair = {"torchvision": processor(0), "pillow": processor(0, grid=6)}
    numbers = {"generated": image_back_ends.differences(pair, {"one": None}), "time_ratio": 2.0}
    *_, row, remark = image_back_ends.table({"CLIP": numbers})
    assert "1 images differ | 2.00" in row
    assert remark == "CLIP, one: image_grid_thw [1 2 6] and [1 2 4]"


def test_without_torchvision_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setattr(sys, "argv", ["image_back_ends.py"])
    image_back_ends.run()
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("torchvision cannot be imported, so nothing is measured")
    assert line == image_back_ends.measure()["note"]
