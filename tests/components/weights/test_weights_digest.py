"""The identity of base weights: all values of all tensors, whatever the files."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.replacements import REPLACEMENTS
from torchtitan.components.weights import sources
from torchtitan.components.weights.sources import weights_at
from torchtitan.tools import digests

TENSORS = {
    "matrix": torch.randn(40, 30),
    "half": torch.randn(3, 4, 5).bfloat16(),
    "bytes": torch.arange(6, dtype=torch.uint8),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the remembered digests, which are kept soon."""
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_RECENT_NS", 10**7)
    return tmp_path / "cache"


def write(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def digest(folder: Path) -> str:
    return weights_at(str(folder)).digest()


def test_each_value_name_shape_and_type_counts(tmp_path):
    found = {digest(write(tmp_path / "base"))}
    variants = []
    for name, tensor in TENSORS.items():
        for place in {0, tensor.numel() // 3, tensor.numel() - 1} if tensor.numel() else ():
            changed = tensor.clone()
            changed.view(-1)[place] += 1
            variants.append({**TENSORS, name: changed})
    for row in range(40):  # all rows of a matrix, not a sample
        changed = TENSORS["matrix"].clone()
        changed[row, 7] *= 1.0001
        variants.append({**TENSORS, "matrix": changed})
    variants.append({**TENSORS, "matrix": TENSORS["matrix"].view(30, 40)})
    variants.append({**TENSORS, "bytes": TENSORS["bytes"].view(torch.int8)})
    variants.append(
        {("other" if name == "matrix" else name): tensor for name, tensor in TENSORS.items()}
    )
    for number, tensors in enumerate(variants):
        found.add(digest(write(tmp_path / str(number), tensors)))
    assert len(found) == 1 + len(variants)


def test_equal_tensors_in_other_files_are_equal(tmp_path):
    """One file or several, moved, or written by torch.save."""
    expected = digest(write(tmp_path / "base"))
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    names = list(TENSORS)
    files = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, sharded / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(TENSORS, pickled / "pytorch_model.bin")
    shutil.copytree(tmp_path / "base", tmp_path / "moved")
    assert {digest(folder) for folder in (sharded, pickled, tmp_path / "moved")} == {expected}


def test_the_method_of_quantization_counts(tmp_path):
    write(tmp_path)
    plain = digest(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    assert digest(tmp_path) == plain
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert digest(tmp_path) != plain


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_replaced_weights_are_read_again(tmp_path, monkeypatch, replacement):
    path = write(tmp_path / "base") / "model.safetensors"
    os.utime(path, (1e9, 1e9))
    changed = {**load_file(path), "matrix": TENSORS["matrix"].flip(0)}
    other = write(tmp_path / "other", changed)
    content = (other / "model.safetensors").read_bytes()
    replace = replacement(path)
    time.sleep(0.05)
    before = digest(path.parent)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_tensors_digest", lambda *_: pytest.fail("read again"))
        assert digest(path.parent) == before
    replace(content)
    assert digest(path.parent) == digest(other) != before
