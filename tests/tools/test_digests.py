"""Digests of files: they cover all content, and are remembered only as long as the content cannot
have changed."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xxhash

from tests.replacements import REPLACEMENTS
from torchtitan.tools import digests
from torchtitan.tools.digests import file_digest, file_status, file_version, remembered
from torchtitan.tools.errors import UserError

AGE_NS = 30_000_000
"""Age of files whose digests are remembered in these tests: several ticks of the kernel's clock."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember digests of files after a short time."""
    monkeypatch.setattr(digests, "_RECENT_NS", AGE_NS)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read to compute a digest."""
    read: list[Path] = []
    compute = digests.hash_file
    monkeypatch.setattr(digests, "hash_file", lambda path: read.append(path) or compute(path))
    return read


def wait() -> None:
    time.sleep(2 * AGE_NS / 1e9)


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_replaced_file_is_read_again(tmp_path, soon, reads, replacement):
    path, root = tmp_path / "data" / "a.jsonl", tmp_path / "cache"
    path.parent.mkdir()
    path.write_bytes(b"before" * 1000)
    os.utime(path, (1e9, 1e9))
    replace = replacement(path)
    wait()
    former = file_digest(root, path)
    assert file_digest(root, path) == former and len(reads) == 1, (
        "an unchanged file is not read again"
    )
    replace(b"behind" * 1000)
    assert path.read_bytes() == b"behind" * 1000 and path.stat().st_size == 6000
    wait()
    assert file_digest(root, path) != former and len(reads) == 2
    assert file_digest(root, path) == file_digest(tmp_path / "other", path)


def test_the_time_of_modification_is_as_before(tmp_path):
    """So that these tests would find a memory without the time of the status."""
    for number, replacement in enumerate(REPLACEMENTS):
        path = tmp_path / str(number) / "a"
        path.parent.mkdir()
        path.write_bytes(b"before")
        os.utime(path, (1e9, 1e9))
        replace = replacement(path)
        before = path.stat().st_mtime_ns
        replace(b"behind")
        is_open_map = replacement.__name__ == "still_mapped"
        assert is_open_map or path.stat().st_mtime_ns == before, replacement.__name__
        assert path.read_bytes() == b"behind"


def test_a_young_file_is_not_remembered(tmp_path, reads):
    """Another write could have the same time."""
    path = tmp_path / "a"
    path.write_text("x")
    os.utime(path, (1e9, 1e9))
    for _ in range(2):
        file_digest(tmp_path / "cache", path)
    assert len(reads) == 2


@pytest.mark.slow
def test_an_old_file_is_remembered(tmp_path, reads):
    """Without changes to the library."""
    path = tmp_path / "a"
    path.write_text("x")
    time.sleep(2.1)
    for _ in range(2):
        file_digest(tmp_path / "cache", path)
    assert len(reads) == 1


def test_file_systems_that_do_not_see_writes_of_maps(soon, reads, tmp_path):
    shared = Path("/dev/shm")
    if not shared.is_dir() or digests._kind_of_device(shared.stat().st_dev) != "tmpfs":
        pytest.skip("no tmpfs")
    path = shared / f"torchtitan-{os.getpid()}"
    try:
        path.write_bytes(b"before")
        (replace,) = (other(path) for other in REPLACEMENTS if other.__name__ == "still_mapped")
        wait()
        former, version = file_digest(tmp_path, path), file_version(path)
        replace(b"behind")
        assert file_digest(tmp_path, path) != former and file_version(path) != version
    finally:
        path.unlink()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_each_byte_counts(tmp_path, monkeypatch, size):
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 64)
    content = os.urandom(size)
    found = set()
    path = tmp_path / "a"
    variants = [content, content + b"\0", *(_flipped(content, place) for place in range(size))]
    for variant in variants:
        path.write_bytes(variant)
        found.add(digests.hash_file(path))
    assert len(found) == len(variants)


def _flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def test_digest_is_that_of_the_blocks(tmp_path, monkeypatch):
    """With one thread or many."""
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 64)
    content = os.urandom(64 * 100 + 7)
    (tmp_path / "a").write_bytes(content)
    blocks = [
        xxhash.xxh3_128(content[start : start + 64]).digest()
        for start in range(0, len(content), 64)
    ]
    expected = xxhash.xxh3_128(f"{len(content)} bytes in blocks of 64".encode() + b"".join(blocks))
    assert digests.hash_file(tmp_path / "a") == expected.hexdigest()


def test_change_while_reading(tmp_path, soon):
    path = tmp_path / "a"
    path.write_text("x")
    wait()
    with pytest.raises(UserError, match="a changed while it was being read; restart"):
        remembered(tmp_path / "cache", "test", [path], lambda: path.write_text("y") and "result")
    assert not (tmp_path / "cache").exists()


def test_cache_folder_that_cannot_be_written(tmp_path, soon, caplog):
    (tmp_path / "file").touch()
    path = tmp_path / "a"
    path.write_text("x")
    wait()
    assert file_digest(tmp_path / "file" / "cache", path) == file_digest(tmp_path / "cache", path)
    assert "digests cannot be kept in" in caplog.text and "Not a directory" in caplog.text


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_other_things_than_files_are_refused(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"{kind} is not a regular file"):
        file_digest(tmp_path / "cache", tmp_path / kind)


def test_one_process_reads_large_files(tmp_path, soon, monkeypatch, log):
    """The others wait for it, and read what it has remembered."""
    monkeypatch.setattr(digests, "_LARGE", 1)
    path, root = tmp_path / "a", tmp_path / "cache"
    path.write_text("x")
    wait()
    command = "\n".join(
        [
            "import sys, time",
            "from pathlib import Path",
            "from torchtitan.tools import digests",
            "digests._LARGE = 1",
            "def compute():",
            "    print('reading', flush=True)",
            "    sys.stdin.readline()",
            "    return 'of the first'",
            "print(digests.remembered(Path(sys.argv[1]), 'test', [Path(sys.argv[2])], compute))",
        ]
    )
    words = [sys.executable, "-c", command, str(root), str(path)]
    found: list[str] = []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin and first.stdout and first.stdout.readline() == "reading\n"
        second = threading.Thread(
            target=lambda: found.append(remembered(root, "test", [path], lambda: "of another"))
        )
        second.start()
        deadline = time.monotonic() + 20
        while "waiting for another process" not in log.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first.stdin.write("\n")
        first.stdin.close()
        second.join(20)
    assert found == ["of the first"]


def test_status_of_a_link_is_that_of_the_file(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to("a")
    assert file_status(tmp_path / "link") == file_status(tmp_path / "a")
