"""Untrusted weights: no code in a checkpoint runs, and malformed or damaged files give a one-line
error."""

import dataclasses
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tests.cli.test_inspect_checkpoint import FORMS, TENSORS, facts, inspect, save_step
from tests.processes import run_processes
from tests.training import train
from torchtitan.cli.main import main
from torchtitan.components.chat_template import load_chat_template
from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint import dcp as states_in_dcp
from torchtitan.components.checkpoint.filesystem import LocalFolder, folder_at
from torchtitan.components.checkpoint.manifest import marker_content
from torchtitan.components.checkpoint.metadata import read_metadata
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.weights import format_of, open_source, write_huggingface, write_meta
from torchtitan.tools.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


class Canary:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def canary(tmp_path: Path) -> Any:
    """An object that must not be unpickled during the test."""
    yield Canary(tmp_path / "executed")
    assert not (tmp_path / "executed").exists(), "code in the checkpoint was executed"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, checkpoint__enable=True, checkpoint__interval=1, training__steps=2)
    return folder


def change_metadata(step: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def forge(step: Path) -> None:
    """Give a modified checkpoint a matching manifest and marker."""
    marker = catalog.open_checkpoint(step).marker
    assert marker
    for name in ("complete.json", "manifest.json"):
        (step / name).unlink()
    catalog.commit(step.rename(step.with_name(f"{step.name}.partial")), marker)


def put_bytes(step: Path, name: str, payload: object) -> None:
    """Replace the content of an entry that is not a tensor."""
    file = step / "__0_0.distcp"
    begin = file.stat().st_size
    with open(file, "ab") as opened:
        torch.save(payload, opened)

    def change(metadata: Metadata) -> None:
        place = metadata.storage_data[MetadataIndex(name)]
        place.relative_path, place.offset, place.length = (
            file.name,
            begin,
            file.stat().st_size - begin,
        )

    change_metadata(step, change)


def text_entry(step: Path, state: str) -> str:
    """Return the name of the non-tensor entry of a state."""
    saved = read_metadata(folder_at(step)).state_dict_metadata
    return next(key for key in saved if key.startswith(f"{state}.json-"))


def run_command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Run a command; return its exit code and last message."""
    code = main([str(word) for word in words])
    return code, capsys.readouterr().err.strip().split("\n")[-1]


class TestNothingIsExecuted:
    def test_metadata_next_to_safetensors(self, tmp_path, capsys, canary, assets):
        folder = Path(shutil.copytree(assets / "stories260K/hf-converted", tmp_path / "model"))
        (folder / "assets").mkdir()
        (folder / "assets/model.json").write_text(
            '{"module": "torchtitan.models.llama3", "flavor": "a", "config": {}}'
        )
        (folder / ".metadata").write_bytes(pickle.dumps(canary))
        for words in (
            ("inspect", folder),
            ("generate", "--checkpoint", folder),
            ("convert", "--to", "meta", folder, tmp_path / "out"),
        ):
            code, message = run_command(capsys, *words)
            assert code == 2
            assert "DCP (.metadata) and Hugging Face (model.safetensors)" in message
        with pytest.raises(UserError, match="2 formats"):
            train(
                tmp_path / "run",
                checkpoint__initial_load_path=folder,
                checkpoint__initial_load_in_hf=True,
            )
        with pytest.raises(UserError, match="is a model's folder, and no checkpoint of a run"):
            train(tmp_path / "run", checkpoint__initial_load_path=folder)

    def test_metadata_with_a_forged_manifest(self, tmp_path, capsys, canary, trained):
        shutil.copytree(trained, tmp_path / "run")
        step = tmp_path / "run/checkpoint/step-2"
        (step / ".metadata").write_bytes(pickle.dumps(canary))
        forge(step)
        reason = r"\.metadata refers to posix\.mkdir, which could run code, and is not loaded"
        code, _, error = inspect(capsys, step)
        assert code == 3 and "refers to posix.mkdir" in error and len(error.splitlines()) == 1
        assert run_command(capsys, "generate", "--checkpoint", step, "--prompt", "a")[0] == 2
        assert run_command(capsys, "convert", "--to", "hf", step, tmp_path / "out")[0] == 2
        assert run_command(capsys, "convert", "--to", "peft", step, tmp_path / "out")[0] == 2
        with pytest.raises(UserError, match=reason):
            train(tmp_path / "run", checkpoint__enable=True, training__steps=3)
        with pytest.raises(UserError, match=reason):
            train(tmp_path / "new", checkpoint__initial_load_path=step)

    def test_text_entry(self, tmp_path, canary, trained):
        shutil.copytree(trained, tmp_path / "run")
        step = tmp_path / "run/checkpoint/step-2"
        put_bytes(step, text_entry(step, "trainer"), canary)
        forge(step)
        with pytest.raises(
            UserError, match="step-2 cannot be read .*; load another checkpoint"
        ) as caught:
            train(tmp_path / "run", checkpoint__enable=True, training__steps=3)
        assert "\n" not in str(caught.value)

    def test_tensor_entry(self, tmp_path, canary):
        step = save_step(tmp_path, 7)

        def change(metadata: Metadata) -> None:
            place = next(
                metadata.storage_data[i] for i in metadata.storage_data if i.fqn == "model.b.weight"
            )
            torch.save({"a": canary, "b": torch.zeros(99)}, step / place.relative_path)
            place.offset, place.length = 0, (step / place.relative_path).stat().st_size

        change_metadata(step, change)
        for slices in (None, (slice(0, 2), slice(0, 2))):
            with pytest.raises(UserError, match="b.weight: UnpicklingError"):
                open_source(step).read("b.weight", slices)

    @pytest.mark.parametrize(
        "content", ["7", "{", "[" * 100_000, {"a": 1}], ids=["7", "{", "[[[", "not text"]
    )
    def test_invalid_text_entry(self, tmp_path, trained, content):
        shutil.copytree(trained, tmp_path / "run")
        step = tmp_path / "run/checkpoint/step-2"
        put_bytes(step, text_entry(step, "trainer"), content)
        forge(step)
        with pytest.raises(UserError, match="step-2 cannot be read"):
            train(tmp_path / "run", checkpoint__enable=True, training__steps=3)


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def names(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


METADATA = "torch.distributed.checkpoint.metadata"

PICKLES = {
    "empty": b"",
    "garbage": bytes(range(256)),
    "truncated": b"\x80\x04",
    "another object": pickle.dumps({"a": 1}),
    "a class in place of an object": opcodes(names(METADATA, "Metadata")),
    "memo bomb": opcodes(b"N", b"r" + struct.pack("<I", 2**32 - 1), b"0N"),
    "a string of 2**62 bytes": opcodes(b"\x8d" + struct.pack("<Q", 2**62)),
    "an integer of 2**31 bytes": opcodes(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "very long integers": opcodes(
        b"\x8a\xff" + b"\x7f" * 255, b"(" * 100, b"N\x8a\x01\x01" * 20_000
    ),
    "nested lists": opcodes(b"]" * 100_000, b"a" * 99_999),
    "nested tuples as a key": opcodes(b"})", b"\x85" * 200_000, b"Ns"),
    "an unhashable key": opcodes(b"}]Ns"),
    "setattr on a class": opcodes(names(METADATA, "Metadata"), b"N}\x8c\x08__init__Ns\x86b"),
    "setattr on a type": opcodes(names("torch", "Size"), b"N}\x8c\x08__init__Ns\x86b"),
    "import of another module": opcodes(names("torchtitan.cli.main", "main"), b")R"),
    "a name within a class": opcodes(b"\x8c\x05torch\x8c\x0dSize.__init__\x93"),
    "terminal escape sequence": opcodes(names("os", "\x1b[2Jsystem")),
    "a function of torch": opcodes(names("torch", "load"), b"\x8c\x01a\x85R"),
    "persistent id": opcodes(b"Pabc\n"),
    "extension": opcodes(b"\x82\x01"),
    "one long tuple, repeated": opcodes(
        names("torch", "Size"), b"q\x000(", b"N" * 200_000, b"tq\x010]", b"h\x00h\x01Ra" * 200_000
    ),
}


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_malformed_pickles(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(
        UserError, match=r"/\.metadata (cannot be read, it is|refers to .* it is) damaged"
    ) as caught:
        open_source(tmp_path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def tensor(metadata: Metadata) -> TensorStorageMetadata:
    return metadata.state_dict_metadata["model.b.weight"]


def place(metadata: Metadata) -> Any:
    return next(
        metadata.storage_data[index]
        for index in metadata.storage_data
        if index.fqn == "model.b.weight"
    )


def set_to(get: Callable[[Metadata], object], **values: object) -> Callable[[Metadata], object]:
    return lambda metadata: [setattr(get(metadata), key, value) for key, value in values.items()]


def itself(metadata: Metadata) -> Metadata:
    return metadata


CHANGES: dict[str, Callable[[Metadata], object]] = {
    "no places": set_to(itself, storage_data=None),
    "no names": set_to(itself, planner_data=None),
    "wrong names": lambda metadata: metadata.planner_data.update({"model.b.weight": ("a", "b", 3)}),
    "names in a list": lambda metadata: metadata.planner_data.update(
        {"model.b.weight": ["a", "b"]}
    ),
    "a field is missing": lambda metadata: metadata.__dict__.pop("storage_data"),
    "specs are a list": set_to(itself, state_dict_metadata=[1, 2]),
    "an entry is a number": lambda metadata: metadata.state_dict_metadata.update(
        {"model.b.weight": 7}
    ),
    "text in place of a tensor": lambda metadata: metadata.state_dict_metadata.update(
        {"model.b.weight": BytesStorageMetadata()}
    ),
    "no place": lambda metadata: metadata.storage_data.clear(),
    "outside, relative": set_to(place, relative_path="../../x"),
    "outside, absolute": set_to(place, relative_path="/etc/passwd"),
    "the folder": set_to(place, relative_path="."),
    "a pipe": set_to(place, relative_path="pipe"),
    "a zero byte": set_to(place, relative_path="a\0b"),
    "negative offset": set_to(place, offset=-1),
    "offset beyond the file": set_to(place, offset=2**40),
    "length beyond the file": set_to(place, length=2**40),
    "length is a string": set_to(place, length="7"),
    "a filter": set_to(place, transform_descriptors=["zstd"]),
    "huge": set_to(tensor, size=torch.Size([2**40, 2**20]), chunks=[]),
    "overflowing": set_to(tensor, size=torch.Size([2**40] * 5)),
    "huge without values": set_to(tensor, size=torch.Size([0, 2**62]), chunks=[]),
    "many dimensions": set_to(tensor, size=torch.Size([1] * 100)),
    "negative size": set_to(tensor, size=torch.Size([-4, -6])),
    "a size that is a list": set_to(tensor, size=[4, 6]),
    "huge pieces": set_to(
        tensor,
        size=torch.Size([2**30]),
        chunks=[ChunkStorageMetadata(torch.Size([0]), torch.Size([2**30]))],
    ),
    "a piece outside": set_to(
        tensor, chunks=[ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([4, 6]))]
    ),
    "a piece of other dimensions": set_to(
        tensor, chunks=[ChunkStorageMetadata(torch.Size([0]), torch.Size([24]))]
    ),
    "no pieces": set_to(tensor, chunks=[]),
    "too many pieces": lambda metadata: tensor(metadata).chunks.extend(
        tensor(metadata).chunks * 100_000
    ),
    "no type": lambda metadata: setattr(tensor(metadata).properties, "dtype", "float32"),
    "a key that is a number": lambda metadata: metadata.storage_data.update(
        {MetadataIndex(7): place(metadata)}
    ),
    "a very long name": lambda metadata: metadata.storage_data.update(
        {MetadataIndex("a" * 10**6): place(metadata)}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_inconsistent_metadata(tmp_path, capsys, change):
    step = save_step(tmp_path, 7)
    os.mkfifo(step / "pipe")
    change_metadata(step, change)
    with pytest.raises(UserError, match="cannot be read, it is damaged or was cut short") as caught:
        open_source(step)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500
    code, _, error = inspect(capsys, "--no_verify", step)
    assert code == 3 and str(caught.value) in error


def test_overlapping_tensors(tmp_path):
    """Tensors that share bytes would take more memory than the size of the files."""
    torch.manual_seed(0)
    tensors = {f"w{index}": torch.randn(1000) for index in range(3)}
    dcp.save({"model": tensors}, checkpoint_id=tmp_path)

    def change(metadata: Metadata) -> None:
        first, *others = metadata.storage_data.values()
        for other in others:
            other.offset, other.length = first.offset, first.length + 1500

    change_metadata(tmp_path, change)
    with pytest.raises(UserError, match=r"__0_0\.distcp cannot be read.*, but [\d,]+ are needed"):
        open_source(tmp_path)


def test_randomly_damaged_metadata(tmp_path):
    step = save_step(tmp_path, 7)
    content, rng = (step / ".metadata").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (step / ".metadata").write_bytes(
            damaged[: rng.choice((len(content), rng.randrange(len(content))))]
        )
        try:
            source = open_source(step)
            for name in source.specs:
                source.read(name)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 100


def test_tensor_that_differs_from_metadata(tmp_path):
    step = save_step(tmp_path, 7)
    change_metadata(
        step, lambda metadata: setattr(tensor(metadata).properties, "dtype", torch.int32)
    )
    with pytest.raises(UserError, match="does not match .metadata"):
        open_source(step).read("b.weight")


@pytest.mark.slow
def test_malicious_metadata_falls_back_to_the_previous_checkpoint(tmp_path, canary, trained):
    shutil.copytree(trained, tmp_path / "run")
    newest = tmp_path / "run/checkpoint/step-2"
    (newest / ".metadata").write_bytes(pickle.dumps(canary))
    message = rf"{newest} is damaged: \.metadata .*; load another checkpoint"
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", checkpoint__enable=True, checkpoint__load_step=2, training__steps=3)
    with pytest.raises(UserError, match=message):
        train(tmp_path / "new", checkpoint__initial_load_path=newest)
    trainer = train(tmp_path / "run", checkpoint__enable=True, training__steps=3)
    assert trainer.step == 3 and trainer.checkpointer._resumed_step == 1


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"files": {"a": 7}}', b"[" * 100_000])
def test_forged_marker_of_an_invalid_manifest(tmp_path, content):
    step = save_step(tmp_path, 7)
    marker = catalog.open_checkpoint(step).marker
    assert marker
    (step / "manifest.json").write_bytes(content)
    forged = dataclasses.replace(marker, manifest=hashlib.sha256(content).hexdigest())
    (step / "complete.json").write_bytes(marker_content(forged))
    assert catalog.verify(step) == ["manifest.json is damaged (it lists no files)"]


class TestTwoFormats:
    def test_are_rejected(self, tmp_path, capsys):
        writers = {
            "DCP (.metadata)": lambda: shutil.copytree(
                save_step(tmp_path / "run", 7), folder, dirs_exist_ok=True
            ),
            "Hugging Face (model.safetensors)": lambda: write_huggingface(
                folder, FORMS, TENSORS.__getitem__
            ),
            "Meta (consolidated.00.pth)": lambda: write_meta(folder, FORMS, TENSORS.__getitem__),
        }
        for left_out in writers:
            folder = tmp_path / f"without {left_out}"
            folder.mkdir()
            (folder / "config.json").write_text("{}")
            for name, write in writers.items():
                if name != left_out:
                    write()
            both = " and ".join(name for name in writers if name != left_out)
            with pytest.raises(UserError) as caught:
                format_of(folder)
            assert both in str(caught.value) and "move the other" in str(caught.value)
            code, message = run_command(capsys, "convert", "--to", "hf", folder, tmp_path / "out")
            assert (code, str(caught.value) in message) == (2, True)

    def test_torch_and_safetensors_count_as_one(self, tmp_path):
        """Like many models on the Hub, some with Meta weights in a subfolder."""
        write_huggingface(tmp_path, FORMS, TENSORS.__getitem__)
        torch.save({"x": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
        (tmp_path / "original").mkdir()
        write_meta(tmp_path / "original", FORMS, TENSORS.__getitem__)
        assert open_source(tmp_path).specs.keys() == FORMS.keys()
        assert format_of(tmp_path / "original") == "meta"


class TestLinks:
    @pytest.fixture
    def model(self, tmp_path, assets) -> Path:
        return Path(shutil.copytree(assets / "stories260K/hf-converted", tmp_path / "model"))

    @pytest.fixture
    def secret(self, tmp_path) -> Path:
        (tmp_path / "private").mkdir()
        (tmp_path / "private/key").write_text("secret")
        return tmp_path / "private/key"

    @pytest.mark.parametrize("to", ["hf", "meta", "dcp"])
    def test_to_other_folders_are_not_copied(self, tmp_path, capsys, model, secret, to):
        (model / "merges.txt").symlink_to(secret)
        code, message = run_command(capsys, "convert", "--to", to, model, tmp_path / "out")
        assert (code, f"{model / 'merges.txt'} is a link to {secret}" in message) == (2, True)
        assert not (tmp_path / "out").exists()

    def test_to_other_folders_are_not_saved_by_a_run(self, tmp_path, model, secret):
        (model / "merges.txt").symlink_to("../private/key")
        options = {"hf_assets_path": model, "training__steps": 1}
        with pytest.raises(UserError, match="merges.txt is a link to"):
            train(tmp_path / "saving", **options, checkpoint__enable=True)
        train(tmp_path / "not_saving", **options)

    def test_in_subfolders_are_not_copied(self, model, secret):
        (model / "chat_template.jinja").write_text("{{ messages }}")
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates/tool_use.jinja").symlink_to(secret)
        with pytest.raises(UserError, match="tool_use.jinja is a link to"):
            load_chat_template(model)

    def test_in_place_of_assets_are_not_copied(self, tmp_path, capsys, trained):
        shutil.copytree(trained / "checkpoint/step-2", tmp_path / "step")
        shutil.move(tmp_path / "step/assets", tmp_path / "elsewhere")
        forge(tmp_path / "step")
        (tmp_path / "step/assets").symlink_to(tmp_path / "elsewhere")
        code, message = run_command(
            capsys, "convert", "--to", "hf", tmp_path / "step", tmp_path / "out"
        )
        assert (code, "assets is a link to" in message) == (2, True)

    def test_within_the_folder_and_to_it_are_followed(self, tmp_path, capsys, model):
        shutil.move(model / "tokenizer.json", model / "other.json")
        (model / "tokenizer.json").symlink_to("other.json")
        (tmp_path / "alias").symlink_to(model)
        assert (
            run_command(capsys, "convert", "--to", "hf", tmp_path / "alias", tmp_path / "out")[0]
            == 0
        )
        assert (tmp_path / "out/tokenizer.json").read_bytes() == (model / "other.json").read_bytes()
        assert not (tmp_path / "out/tokenizer.json").is_symlink()

    def test_in_the_hub_cache_are_followed(self, tmp_path, capsys, model, secret):
        cache = tmp_path / "models--user--stories"
        snapshot = cache / "snapshots/0123abcd"
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir()
        for number, file in enumerate(sorted(file for file in model.iterdir() if file.is_file())):
            shutil.copy(file, cache / f"blobs/{number}")
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        assert run_command(capsys, "convert", "--to", "meta", snapshot, tmp_path / "out")[0] == 0
        assert (tmp_path / "out/tokenizer.json").read_bytes() == (
            model / "tokenizer.json"
        ).read_bytes()
        (snapshot / "merges.txt").symlink_to("../../../private/key")
        assert run_command(capsys, "convert", "--to", "meta", snapshot, tmp_path / "again")[0] == 2

    def test_to_weights_elsewhere_are_followed(self, tmp_path, capsys, model):
        shutil.move(model / "model.safetensors", tmp_path / "large")
        (model / "model.safetensors").symlink_to(tmp_path / "large")
        assert run_command(capsys, "convert", "--to", "hf", model, tmp_path / "out")[0] == 0

    def test_in_a_cycle_are_not_followed(self, tmp_path, capsys):
        step = save_step(tmp_path, 7)
        (step / "folder").mkdir()
        files = folder_at(step).files()
        (step / "folder/round").symlink_to(step)
        (step / "away").symlink_to("/")
        code, output, _ = inspect(capsys, step)
        assert code == 0 and facts(output)["size"].endswith(f" in {len(files)} files")
        assert folder_at(step).files() == files


class TestGitLfsPointers:
    ADVICE = "is a Git LFS pointer in place of the file itself: fetch the file with `git lfs pull`"

    @pytest.mark.parametrize(
        "name", ["model.safetensors", "pytorch_model.bin", "consolidated.00.pth", ".metadata"]
    )
    def test_in_place_of_weights(self, tmp_path, capsys, name):
        (tmp_path / name).write_text(LFS)
        with pytest.raises(UserError, match=f"/{name} {self.ADVICE}"):
            open_source(tmp_path)

    def test_in_place_of_a_shard(self, tmp_path):
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "part.safetensors"}})
        )
        (tmp_path / "part.safetensors").write_text(LFS)
        with pytest.raises(UserError, match=f"/part.safetensors {self.ADVICE}"):
            open_source(tmp_path)
        step = save_step(tmp_path, 7)
        part = max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)
        part.write_text(LFS)
        with pytest.raises(UserError, match=f"/{part.name} {self.ADVICE}"):
            open_source(step)

    def test_in_place_of_config_json(self, tmp_path, capsys):
        save_file(TENSORS, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(LFS)
        code, message = run_command(capsys, "generate", "--checkpoint", tmp_path)
        assert (code, f"config.json {self.ADVICE}" in message) == (2, True)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
    def test_in_place_of_a_tokenizer(self, tmp_path, name):
        (tmp_path / name).write_text(LFS)
        with pytest.raises(UserError, match=f"{name} {self.ADVICE}"):
            train(tmp_path / "run", hf_assets_path=tmp_path)


class Note:
    """A state that differs between ranks."""

    text = ""

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.text = state_dict["text"]


def load_notes(folder: Path) -> None:
    ranks, note = Ranks(dist.group.WORLD), Note()
    for name, message in {
        "bad": "bad cannot be read .JSONDecodeError",
        "lacking": "lacking has no state 'note'",
        "damaged": "damaged/.metadata cannot be read, it is damaged",
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            states_in_dcp.load(folder_at(folder / name), {}, {"note": note}, ranks.rank, ranks)
        assert len(set(ranks.gather(str(caught.value)))) == 1
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(LocalFolder, "read", None)  # rank 0 reads .metadata for all ranks
        states_in_dcp.load(folder_at(folder / "good"), {}, {"note": note}, ranks.rank, ranks)
    assert note.text == f"of rank {ranks.rank}"


@pytest.mark.slow
def test_all_ranks_report_the_same_error(tmp_path):
    notes = {
        f"note.rank{rank}": states_in_dcp.encode("note", {"text": f"of rank {rank}"})
        for rank in range(2)
    }
    for name, second_note in {
        "good": notes["note.rank1"],
        "bad": {"json-0": "{"},
        "lacking": {},
        "damaged": {},
    }.items():
        dcp.save({**notes, "note.rank1": second_note}, checkpoint_id=tmp_path / name)
    (tmp_path / "damaged/.metadata").write_bytes(b"")
    run_processes(load_notes, 2, tmp_path)


def compressed(content: bytes, after_pickle: bytes = b"") -> bytes:
    """Return a zip file with compressed records, and extra bytes after its pickle."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for record in old.namelist():
            new.writestr(record, old.read(record) + after_pickle * record.endswith(".pkl"))
    return out.getvalue()


class TestDamagedTorchFiles:
    @pytest.fixture
    def saved(self, tmp_path) -> bytes:
        torch.save(
            {"a": torch.arange(100.0), "b": torch.arange(60).reshape(6, 10)}, tmp_path / "saved"
        )
        return (tmp_path / "saved").read_bytes()

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
    def test_give_a_one_line_error(self, tmp_path, saved, name):
        rng = random.Random(1)
        contents = [
            b"",
            b"\0" * 1000,
            b"PK",
            saved[:-1],
            saved[: len(saved) // 2],
            saved[100:],
            b"<html></html>",
        ]
        for _ in range(40):
            damaged = bytearray(saved)
            for _ in range(3):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            contents.append(bytes(damaged))
        refused = 0
        for content in contents:
            (tmp_path / name).write_bytes(content)
            try:
                source = open_source(tmp_path)
                for tensor_name in source.specs:
                    source.read(tensor_name)
            except UserError as error:
                refused += 1
                assert "\n" not in str(error)
        assert refused >= 7

    def test_a_tensor_larger_than_the_file(self, tmp_path):
        class Claim:
            def __reduce__(self) -> Any:
                return torch._utils._rebuild_tensor_v2, (storage, 0, (2**40,), (1,), False, {})

        storage = torch.zeros(4)._typed_storage()
        torch.save({"a": Claim()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(UserError, match="a is outside the file"):
            open_source(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
    def test_compressed_records_are_rejected(self, tmp_path, saved, name):
        (tmp_path / name).write_bytes(compressed(saved))
        with pytest.raises(
            UserError, match=f"{name} has compressed records, unlike files of torch.save; load it"
        ):
            open_source(tmp_path)

    def test_compressed_records_in_dcp_are_rejected(self, tmp_path):
        step = save_step(tmp_path, 7)

        def change(metadata: Metadata) -> None:
            found = place(metadata)
            file = step / found.relative_path
            content = file.read_bytes()[found.offset : found.offset + found.length]
            file.write_bytes(compressed(content, after_pickle=bytes(10**6)))
            found.offset, found.length = 0, file.stat().st_size

        change_metadata(step, change)
        for slices in (None, (slice(0, 2), slice(0, 2))):
            with pytest.raises(UserError, match=r"b\.weight: \S+\.distcp has compressed records"):
                open_source(step).read("b.weight", slices)

    def test_an_error_without_message_is_named(self, tmp_path):
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(UserError, match="cut short: EOFError;"):
            open_source(tmp_path)

    def test_a_pipe_in_place_of_a_file(self, tmp_path, capsys):
        for name in (
            "consolidated.00.pth",
            "model.safetensors",
            ".metadata",
            "complete.json",
            "config.json",
        ):
            os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match="is not a regular file"):
            open_source(tmp_path)
        assert run_command(capsys, "inspect", tmp_path)[0] == 2
        shutil.copy(save_step(tmp_path / "run", 7) / "complete.json", tmp_path / "other.json")
        (tmp_path / "complete.json").unlink()
        (tmp_path / "other.json").rename(tmp_path / "complete.json")
        os.mkfifo(tmp_path / "manifest.json")
        assert run_command(capsys, "inspect", tmp_path)[0] == 3
