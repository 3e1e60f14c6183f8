"""Complete files survive a power failure: content is synced before the rename, the folder after
it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.components.data.finetuning.test_sample_cache import Texts
from tests.components.data.finetuning.test_sample_cache import open_cache as open_samples
from tests.training import flags, train
from torchtitan.cli.main import main
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.observe.metric_sinks import JsonLines
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools import durable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass
class Disk:
    """A file layer that tracks synced data, and so knows what a power failure would lose."""

    synced: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Inode of a file or folder → its size and modification time at the last sync."""

    on_rename: list[Callable[[Path], object]] = field(default_factory=list)
    """Called with the new name before a rename."""

    def sync(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        self.synced[stat.st_ino] = (stat.st_size, stat.st_mtime_ns)

    def loses(self, path: Path) -> bool:
        """Return whether a file's content or a folder's entries are not on the disk."""
        stat = path.stat()
        return self.synced.get(stat.st_ino) != (stat.st_size, stat.st_mtime_ns)

    def lost(self, folder: Path) -> list[str]:
        """Files and folders inside a folder that would be lost; "." is the folder itself."""
        return [
            str(path.relative_to(folder))
            for path in (folder, *sorted(folder.rglob("*")))
            if self.loses(path)
        ]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk, fsync = Disk(), os.fsync

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        disk.sync(descriptor)

    def watched(rename: Callable[..., None]) -> Callable[..., None]:
        def change(source: str, target: str) -> None:
            for look in disk.on_rename:
                look(Path(source), Path(target))
            rename(source, target)

        return change

    monkeypatch.setattr(os, "fsync", sync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    return disk


def synced_when_renamed(disk: Disk, matches: Callable[[Path], bool]) -> list[Path]:
    """Check that every rename to a name that `matches` is of synced data; return these names, as
    they are added."""
    seen: list[Path] = []

    def look(source: Path, target: Path) -> None:
        if matches(target):
            lost = (
                disk.lost(source)
                if source.is_dir()
                else [source.name]
                if disk.loses(source)
                else []
            )
            assert lost == [], f"{target} would be lost"
            seen.append(target)

    disk.on_rename.append(look)
    return seen


def test_simulated_disk_loses_unsynced_data(tmp_path: Path, disk: Disk) -> None:
    file = tmp_path / "a"
    file.write_text("a")
    assert disk.lost(tmp_path) == [".", "a"]
    durable.sync_tree(tmp_path)
    assert disk.lost(tmp_path) == []
    with file.open("a") as more:
        more.write("b")
    assert disk.lost(tmp_path) == ["a"]
    synced_when_renamed(disk, lambda target: target.name == "b")
    with pytest.raises(AssertionError, match="b would be lost"):
        file.rename(tmp_path / "b")


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable.write(tmp_path / "a", "before")

    def full(path: Path) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(durable, "sync", full)
    with pytest.raises(OSError, match="full"):
        durable.write(tmp_path / "a", "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]


def test_the_temporary_name_is_new_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "a.tmp").symlink_to("secret")
    names = set()
    for _ in range(2):
        with durable.in_place_of(tmp_path / "a") as unfinished:
            assert not unfinished.is_symlink() and unfinished.read_bytes() == b""
            names.add(unfinished.name)
            unfinished.write_text("x")
    assert len(names) == 2 and (tmp_path / "secret").read_text() == "mine"
    (tmp_path / "b").symlink_to("secret")
    durable.write(tmp_path / "b", "y")
    assert (tmp_path / "secret").read_text() == "mine" and not (tmp_path / "b").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.tmp", "b", "secret"]


def test_an_occupied_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable.secrets, "token_hex", lambda n_bytes: "00" * n_bytes)
    (tmp_path / "secret").write_text("mine")
    (tmp_path / f"a.{'00' * 8}.tmp").symlink_to("secret")
    with pytest.raises(FileExistsError):
        durable.write(tmp_path / "a", "x")
    assert (tmp_path / "secret").read_text() == "mine"


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal; from pathlib import Path; from torchtitan.tools import durable\n"
        "with durable.in_place_of(Path(sys.argv[1])):\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a")])
    (left,) = tmp_path.iterdir()
    with durable.in_place_of(tmp_path / "a") as unfinished:
        assert [*tmp_path.iterdir()] == [unfinished] != [left]
        durable.write(tmp_path / "a", "of another writer, which leaves the first one's file")
        assert unfinished.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    durable.write(tmp_path / ("é" * 120 + "[*]"), "a long name")


def test_token_cache(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "a.txt").write_text("some text")
    tokenizer = PretrainedTokenizer.Config().build(path="")
    named = synced_when_renamed(disk, lambda target: target.parent.name == "tokens")
    cache = open_token_cache(
        resolve_source(str(tmp_path / "a.txt")), tokenizer, str(tmp_path / "cache")
    )
    assert named == [cache.folder] and disk.lost(cache.folder.parent) == [f"{cache.key}.lock"]


def test_sample_cache(tmp_path: Path, disk: Disk) -> None:
    named = synced_when_renamed(disk, lambda target: target.parent.name == "samples")
    folder = open_samples(Texts("aB"), tmp_path).folder
    assert named == [folder] and disk.lost(folder.parent) == [f"{folder.name}.lock"]


def test_records_truncated_on_resume(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    named = synced_when_renamed(disk, lambda target: target == path)
    JsonLines(path, 1).close()
    assert named == [path] and disk.lost(tmp_path) == [] and path.read_text() == '{"step": 1}\n'


def test_run_with_records_and_export(tmp_path: Path, disk: Disk) -> None:
    """At each save, all files that the checkpoint relies on are synced; at the end, all files
    are."""
    records = [tmp_path / "run" / name for name in ("ledger.jsonl", "metrics.jsonl")]
    steps: list[int] = []

    def look(source: Path, target: Path) -> None:
        if target.name == "complete.json":
            assert disk.lost(target.parent)[1:] == [], (
                "only the folder itself may be unsynced, since it is synced next"
            )
            assert not any(map(disk.loses, [*records, records[0].parent]))
            steps.append(json.loads(source.read_bytes())["step"])
            assert [json.loads(line)["step"] for line in records[0].read_text().splitlines()][
                -1
            ] == steps[-1]

    disk.on_rename.append(look)
    options = {
        "debug__ledger": True,
        "checkpoint__enable": True,
        "checkpoint__interval": 2,
        "training__steps": 3,
    }
    train(tmp_path / "run", **options, checkpoint__last_save_in_hf=True)
    assert steps == [2, 3] and (tmp_path / "run/checkpoint/step-3/config.json").exists()
    # The temporary folder of the export may reappear; the lock file has no content.
    assert disk.lost(tmp_path / "run") == ["checkpoint", "run.lock"]


def test_run_without_checkpoints(tmp_path: Path, disk: Disk) -> None:
    train(tmp_path / "run", training__steps=1, debug__ledger=True)
    assert disk.lost(tmp_path / "run") == ["run.lock"]


def test_configuration(tmp_path: Path, disk: Disk) -> None:
    from torchtitan.config.manager import ConfigManager

    resolved = ConfigManager().parse_args(flags({"dump_folder": tmp_path}))
    named = synced_when_renamed(disk, lambda target: True)
    resolved.save(tmp_path / "config.yaml")
    assert named == [tmp_path / "config.yaml"] and disk.lost(tmp_path) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, training__steps=1, checkpoint__enable=True)
    return folder / "checkpoint/step-1"


@pytest.mark.parametrize("to", ["hf", "meta", "dcp"])
def test_converted_checkpoint(tmp_path: Path, disk: Disk, checkpoint: Path, to: str) -> None:
    named = synced_when_renamed(disk, lambda target: target == tmp_path / "out")
    assert main(["convert", "--to", to, str(checkpoint), str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").rglob("*"))) >= 4
    # The removal of the temporary folder need not be synced.
    assert named == [tmp_path / "out"] and disk.lost(tmp_path / "out") == []
