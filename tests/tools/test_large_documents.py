"""Files of JSON that are larger than the memory: holes of 5 GiB, which take no space on the
disk."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import memory_limit
from torchtitan.components.checkpoint.filesystem import LocalFolder
from torchtitan.components.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    MarkerError,
    find_faults,
    read_marker,
)
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data.disk_cache import BLOCKS_FILE, check_blocks
from torchtitan.components.data.prepare.prepared import Prepared
from torchtitan.components.weights.assets import DESCRIPTION, read_converters
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import json_lines, read_regular

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not limit the address space"
)


def hole(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 5 << 30)
    return path


def test_a_line_of_a_record(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b'{"a": 1}\n')
    broken: list[int] = []
    with memory_limit(1 << 30):
        assert [*json_lines(hole(tmp_path / "lines"), bool, broken)] == [{"a": 1}]
    assert broken == [2]


def test_markers_and_manifests(tmp_path: Path) -> None:
    for name in (MARKER, MANIFEST, DESCRIPTION, "manifest.json", BLOCKS_FILE):
        hole(tmp_path / name)
    folder = LocalFolder(tmp_path)
    with memory_limit(3 << 30):
        with pytest.raises(MarkerError, match="is damaged .*has more than 268,435,456 bytes"):
            read_marker(folder)
        (damage,) = find_faults(folder, "", Ranks(None)).damage
        assert "manifest.json is damaged (" in damage and "has more than" in damage
        with pytest.raises(UserError, match="has more than"):
            read_converters(tmp_path)
        with pytest.raises(UserError, match="has more than"):
            Prepared(str(tmp_path))
        with pytest.raises(ValueError, match="blocks.json has 5,368,709,120 bytes"):
            check_blocks(folder, verify_all=False)


def test_a_large_limit_takes_no_memory(tmp_path: Path) -> None:
    """A file of a few bytes is read although its limit is larger than the memory."""
    path = tmp_path / "results"
    path.write_bytes(b"few")
    assert read_regular(path, most=2**50) == b"few"
