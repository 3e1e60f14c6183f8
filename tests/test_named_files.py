"""Files that another file names: they are regular, in its folder and bounded, and pipes stop
nothing."""

import ast
import json
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest

from tests.components.data.finetuning.test_sample_cache import Texts
from tests.components.data.finetuning.test_sample_cache import open_cache as open_samples
from tests.components.data.pretraining.test_token_files import write_litdata, write_megatron
from tests.conftest import PROJECT
from torchtitan.cli.main import main
from torchtitan.components.checkpoint.filesystem import LocalFolder
from torchtitan.components.data.disk_cache import map_array
from torchtitan.components.data.pretraining.token_files import find_token_files, open_token_files
from torchtitan.components.data.pretraining.tokens import Tokens
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import named_file, open_regular, read_regular

DOCUMENTS = [np.arange(1, 20), np.arange(3, 30), np.arange(5, 15)]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file of 4,096 bytes outside of the folder `data`."""
    path = tmp_path / "secret.bin"
    path.write_bytes(bytes(range(16)) * 256)
    return path


def open_tokens(place: str | Path) -> Tokens:
    tokenizer = PretrainedTokenizer.Config().build(path="")
    return open_token_files(find_token_files(str(place)), tokenizer)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # since the address is limited to about a hundred bytes
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(before)


REFUSED = "is not a regular file|a link to /dev/zero outside the folder"
ODD: list[Callable[[Path], None]] = [pipe, device, bound_socket, Path.mkdir]


def unless_it_hangs(operation: Callable[[], object]) -> BaseException | None:
    """Return the error of an operation that must end within ten seconds."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            operation()
        except BaseException as error:
            found.append(error)
        else:
            found.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it hangs"
    return found[0]


@pytest.mark.parametrize(
    "name", ["/etc/hostname", "../secret.bin", "a/../../secret.bin", "link", "down/secret.bin"]
)
def test_an_index_names_only_files_in_its_folder(tmp_path, outside, name):
    folder = Path(write_litdata(tmp_path / "data", DOCUMENTS))
    (folder / "link").symlink_to(outside)
    (folder / "down").symlink_to(tmp_path)
    index = json.loads((folder / "index.json").read_text())
    index["chunks"][0]["filename"] = name
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match="not a path inside its folder|outside the folder; replace it with a copy"
    ):
        open_tokens(folder)


@pytest.mark.parametrize(
    "name", [None, 3, "", "x" * 300, "é" * 200, "a\0b", "\ud800", "a/", "x/" * 600 + "x", ["a"]]
)
def test_what_is_no_name_is_refused(tmp_path, name):
    with pytest.raises(
        UserError, match="i.json names the file .*, which is not a path inside its folder"
    ):
        named_file(tmp_path, name, "i.json")


def test_links_inside_and_to_the_folder_itself_are_followed(tmp_path):
    folder = Path(write_litdata(tmp_path / "data", DOCUMENTS))
    chunk = next(folder.glob("*.bin"))
    chunk.rename(folder / "moved")
    chunk.symlink_to("moved")
    (tmp_path / "other").symlink_to(folder)
    assert open_tokens(tmp_path / "other").n_tokens == sum(map(len, DOCUMENTS))


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", ["index.json", "x.bin", "x.npy", "megatron.bin", "chunk"])
def test_pipes_devices_sockets_and_folders_are_named(tmp_path, make, name):
    folder = tmp_path / "data"
    folder.mkdir()
    place, path = folder / name, folder / name
    if name == "index.json":
        place = folder
    elif name == "megatron.bin":
        write_megatron(folder / "megatron", DOCUMENTS)
        path.unlink()
        place = folder / "megatron"
    elif name == "chunk":
        place = Path(write_litdata(folder / "lit", DOCUMENTS))
        path = next(place.glob("*.bin"))
        path.unlink()
    make(path)
    error = unless_it_hangs(lambda: open_tokens(place))
    if make is not Path.mkdir or name == "chunk":
        assert isinstance(error, UserError) and re.search(REFUSED, str(error))
    error = unless_it_hangs(lambda: open_tokens(folder / f"{name[:1]}*{path.suffix}"))
    assert error is not None


@pytest.mark.parametrize("make", ODD)
def test_every_reader_of_named_files(tmp_path, make):
    make(tmp_path / "file")
    readers = [
        open_regular,
        read_regular,
        lambda path: read_config_file(path, "it"),
        LocalFolder(tmp_path).read,
    ]
    for reader in [*readers, lambda path: map_array(path, "uint8", 1)]:
        error = unless_it_hangs(lambda reader=reader: reader(tmp_path / "file"))
        assert isinstance(error, OSError | UserError) and re.search(REFUSED, str(error))


def test_a_pipe_that_appears_after_the_check(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "file")
    monkeypatch.setattr("torchtitan.tools.files.regular_file", lambda path, name: path)
    error = unless_it_hangs(lambda: open_regular(tmp_path / "file"))
    assert "is not a regular file" in str(error)


def test_size_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(UserError, match="has 5 bytes, and may have 4 at most"):
        read_regular(tmp_path / "file", most=4)


def test_prepared_data_stays_in_its_folder(tmp_path, outside):
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 3)
    out = tmp_path / "out"
    assert (
        main(["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(out), "--workers", "1"])
        == 0
    )
    words = [
        "data",
        "inspect",
        "--module",
        "llama3",
        "--config",
        "debugmodel",
        "--dataloader.dataset",
        str(out),
    ]
    tokens = next(out.rglob("tokens.bin"))
    (tmp_path / "moved.bin").write_bytes(tokens.read_bytes())
    tokens.unlink()
    tokens.symlink_to(tmp_path / "moved.bin")
    assert main(words) == 2
    tokens.unlink()
    tokens.write_bytes((tmp_path / "moved.bin").read_bytes())
    tokens.parent.rename(tmp_path / "elsewhere")
    tokens.parent.symlink_to(tmp_path / "elsewhere")
    assert main(words) == 2


def test_caches_and_saved_datasets_stay_in_their_folders(tmp_path, outside):
    folder = open_samples(Texts("aB"), tmp_path).folder
    content = (folder / "ids.bin").read_bytes()
    (folder / "ids.bin").unlink()
    (tmp_path / "copy").write_bytes(content)
    (folder / "ids.bin").symlink_to(tmp_path / "copy")
    with pytest.raises(UserError, match="outside the folder; replace it with a copy"):
        map_array(folder / "ids.bin", "uint32", len(content) // 4)
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    arrow.rename(tmp_path / "secret.arrow")
    arrow.symlink_to(tmp_path / "secret.arrow")
    with pytest.raises(UserError, match="outside the folder; replace it with a copy"):
        list(resolve_source(str(tmp_path / "saved")).rows(lambda n_bytes: None))


CALLS = {"memmap", "fromfile", "load"}
"""Functions of NumPy that open a path."""


def test_token_files_and_caches_open_no_path_themselves():
    """They give NumPy open files, which were checked."""
    for name in ("pretraining/token_files.py", "disk_cache.py"):
        tree = ast.parse((PROJECT / "torchtitan/components/data" / name).read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) in {f"np.{function}" for function in CALLS}:
                assert ast.unparse(call.args[0]) in ("file", "opened"), ast.unparse(call)
