"""Weight files, compared with safetensors, torch.save and DCP."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.processes import run_processes
from torchtitan.components.checkpoint.dcp import DcpSource, state_tensor_specs, write_dcp
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.weights import (
    ExternalView,
    InternalView,
    MetaSource,
    TensorSource,
    format_of,
    load_weights,
    open_source,
    write_huggingface,
    write_meta,
)
from torchtitan.components.weights.huggingface import HuggingFaceSource
from torchtitan.components.weights.load import local_slices
from torchtitan.components.weights.torch_files import PickledSource
from torchtitan.protocols.state_dict_adapter import (
    Concatenated,
    KeyMapping,
    Permuted,
    RopePermutation,
    Stacked,
    StateDictAdapter,
)
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools import durable
from torchtitan.tools.errors import UserError

WRITERS = {"hf": write_huggingface, "meta": write_meta, "dcp": write_dcp}


def example() -> dict[str, Tensor]:
    """Return tensors of many types and sizes, including a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(6, 5, generator=generator) for i in range(3)}
    tensors["half"] = torch.randn(7, 3, generator=generator).half()
    tensors["bfloat16"] = torch.randn(3, 5, 2, generator=generator).bfloat16()
    tensors["float8"] = torch.randn(5, generator=generator).to(torch.float8_e4m3fn)
    tensors["float8_wide"] = torch.randn(5, 3, generator=generator).to(torch.float8_e5m2)
    tensors["double"] = torch.randn(2, generator=generator, dtype=torch.float64)
    tensors["flags"] = torch.tensor([True, False, True])
    tensors["scalar"] = torch.tensor(3)
    tensors["empty"] = torch.empty(0, 4)
    return tensors


def specs_of(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def same(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have equal bits and specs."""
    flat = (x.reshape(-1).contiguous().view(torch.uint8) for x in (tensor, expected))
    return TensorSpec.of(tensor) == TensorSpec.of(expected) and torch.equal(*flat)


def save(folder: Path, format: str, tensors: dict[str, Tensor], **options) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    WRITERS[format](folder, specs_of(tensors), tensors.__getitem__, **options)
    if format == "dcp":
        # Sources can read a checkpoint before it is committed.
        assert not (folder / "complete.json").exists()
    return folder


def open_format(folder: Path, format: str) -> TensorSource:
    return DcpSource(folder) if format == "dcp" else open_source(folder)


def reference_hf(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def reference_meta(folder: Path) -> dict[str, Tensor]:
    file = folder / "consolidated.00.pth"
    mapped, read = (torch.load(file, weights_only=True, mmap=mmap) for mmap in (True, False))
    assert all(same(mapped[name], read[name]) for name in read)
    return read


def reference_dcp(folder: Path) -> dict[str, Tensor]:
    saved = {name: torch.empty_like(tensor) for name, tensor in example().items()}
    dcp.load({"model": saved}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return saved


REFERENCES = {"hf": reference_hf, "meta": reference_meta, "dcp": reference_dcp}


@pytest.mark.parametrize("format", WRITERS)
def test_round_trip_and_reference_reader(tmp_path, format):
    tensors = example()
    save(tmp_path, format, tensors)
    assert format_of(tmp_path) == format
    source, reference = open_format(tmp_path, format), REFERENCES[format](tmp_path)
    assert dict(source.specs) == specs_of(tensors) == specs_of(reference)
    for name, tensor in tensors.items():
        assert same(source.read(name), tensor), name
        assert same(reference[name], tensor), name


@pytest.mark.parametrize("format", WRITERS)
def test_slices(tmp_path, format):
    tensors = example()
    source = open_format(save(tmp_path, format, tensors), format)
    parts = [
        ("layers.1.weight", (slice(2, 6), slice(1, 3))),
        ("layers.1.weight", (slice(0, 6), slice(4, 5))),
        ("bfloat16", (slice(1, 2), slice(0, 5), slice(1, 2))),
        ("half", (slice(3, 3), slice(0, 3))),
        ("float8", (slice(4, 5),)),
        ("scalar", ()),
    ]
    for name, slices in parts:
        assert same(source.read(name, slices), tensors[name][slices].clone()), (name, slices)


@pytest.mark.parametrize("format", WRITERS)
def test_writing_reads_each_tensor_once_and_converts_it(tmp_path, format):
    tensors = {name: tensor for name, tensor in example().items() if tensor.dtype == torch.float32}
    specs = {name: TensorSpec(tensor.shape, torch.bfloat16) for name, tensor in tensors.items()}
    read_names = []

    def read_tensor(name: str) -> Tensor:
        read_names.append(name)
        return tensors[name].t().contiguous().t()  # a different memory order

    WRITERS[format](tmp_path, specs, read_tensor)
    assert sorted(read_names) == sorted(tensors)
    source = open_format(tmp_path, format)
    assert all(same(source.read(name), tensor.bfloat16()) for name, tensor in tensors.items())


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("largest", [65_519.0, 65_520.0])  # the second is rounded to infinity
def test_overflow_is_rejected(tmp_path, format, largest):
    tensors = {
        "fits": torch.ones(3),
        "wide": torch.tensor([[1.0, -largest], [float("inf"), float("nan")]]),
    }
    specs = {name: TensorSpec(tensor.shape, torch.float16) for name, tensor in tensors.items()}
    if largest < 65_520:
        WRITERS[format](tmp_path, specs, tensors.__getitem__)
        values = open_format(tmp_path, format).read("wide")
        # infinite values are kept
        assert torch.equal(values[:, 0], torch.tensor([1.0, torch.inf]).half())
        assert values[0, 1] == -65_504
        return
    with pytest.raises(UserError, match="wide has values up to 65520, which float16 cannot hold"):
        WRITERS[format](tmp_path, specs, tensors.__getitem__)
    with pytest.raises(UserError, match="holds no checkpoint"):
        open_source(tmp_path)


def test_files_of_other_writers(tmp_path):
    tensors = example()
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf/model.safetensors")
    (tmp_path / "meta").mkdir()
    # Two tensors that share one storage.
    both = torch.arange(24.0).reshape(6, 4)
    torch.save(
        {**tensors, "first": both[:2], "rest": both[2:]}, tmp_path / "meta/consolidated.00.pth"
    )
    hf, meta = open_source(tmp_path / "hf"), open_source(tmp_path / "meta")
    assert all(
        same(hf.read(name), tensor) and same(meta.read(name), tensor)
        for name, tensor in tensors.items()
    )
    assert same(meta.read("rest", (slice(1, 3), slice(0, 4))), both[3:5].clone())


# Hugging Face


def test_files_of_limited_size_and_index(tmp_path):
    tensors = example()
    save(tmp_path, "hf", tensors, max_file_bytes=200)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    assert names == [
        f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *names,
        "model.safetensors.index.json",
    ]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name in names:
        with safe_open(tmp_path / name, "pt") as file:
            keys = {key for key, in_file in index["weight_map"].items() if in_file == name}
            assert (set(file.keys()), file.metadata()) == (keys, {"format": "pt"})
            assert sum(tensors[key].nbytes for key in keys) <= 200
    source = open_source(tmp_path)
    assert all(same(source.read(name), tensor) for name, tensor in tensors.items())


def test_several_processes_write_different_files(tmp_path):
    tensors = example()
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    save(alone, "hf", tensors, max_file_bytes=200)
    for rank in (1, 0):  # rank 0 writes the index at the end
        ranks = Ranks()
        ranks.rank, ranks.size = rank, 2
        save(shared, "hf", tensors, max_file_bytes=200, ranks=ranks)
        if rank:
            with pytest.raises(UserError):  # incomplete so far
                open_source(shared)
    files = {path.name: path.read_bytes() for path in alone.iterdir()}
    assert {path.name: path.read_bytes() for path in shared.iterdir()} == files


@pytest.mark.parametrize("format", ["hf", "meta"])
def test_an_interrupted_write_cannot_be_opened(tmp_path, format):
    tensors = example()

    def read_tensor(name: str) -> Tensor:
        if name == "half":
            raise KeyboardInterrupt
        return tensors[name]

    options = {"max_file_bytes": 200} if format == "hf" else {}
    with pytest.raises(KeyboardInterrupt):
        WRITERS[format](tmp_path, specs_of(tensors), read_tensor, **options)
    with pytest.raises(UserError, match="holds no checkpoint"):
        open_source(tmp_path)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="holds no checkpoint: it is empty, and has neither"):
        open_source(tmp_path)


def test_a_type_that_safetensors_lacks_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"phase has type torch\.complex64"):
        save(tmp_path, "hf", {"phase": torch.zeros(2, dtype=torch.complex64)})


def test_damaged_hugging_face_folders(tmp_path):
    save(tmp_path, "hf", example(), max_file_bytes=200)
    index = tmp_path / "model.safetensors.index.json"
    first = tmp_path / json.loads(index.read_text())["weight_map"]["layers.0.weight"]
    content = first.read_bytes()
    first.write_bytes(content[:-3])
    with pytest.raises(UserError, match=rf"{first.name} cannot be read"):
        open_source(tmp_path)
    first.unlink()
    with pytest.raises(UserError, match=rf"incomplete.*{first.name}"):
        open_source(tmp_path)
    save_file({"other": torch.zeros(1)}, first)
    with pytest.raises(UserError, match=rf"{first.name} has no tensors layers\.0\.weight"):
        open_source(tmp_path)
    for outside in (str(first), "../model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"layers.0.weight": outside}}))
        with pytest.raises(
            UserError, match=rf"index.json lists files outside its folder: {outside}"
        ):
            open_source(tmp_path)
    index.write_text("{}")
    with pytest.raises(UserError, match="index.json cannot be read"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["a" * 300, "é" * 200, "a\0b", "\ud800", "", ".", "..", "a/", "b/.", "/".join("a" * 2000)],
)
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_a_name_that_no_file_can_have_is_one_line(tmp_path, index, name):
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": name}}))
    make_source = HuggingFaceSource if "safetensors" in index else PickledSource
    with pytest.raises(UserError, match="cannot be the name of a file") as caught:
        make_source(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_folder_without_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"none does not exist"):
        format_of(tmp_path / "none")
    with pytest.raises(
        UserError, match=r"neither \.metadata .* model\.safetensors.*, consolidated.* nor model-"
    ):
        format_of(tmp_path)


# Meta


def split(tensors: dict[str, Tensor], axes: dict[str, int | None], folder: Path, dim: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        parts = {
            name: t if axes[name] is None else t.chunk(2, axes[name])[rank]
            for name, t in tensors.items()
        }
        torch.save(
            {name: part.clone() for name, part in parts.items()},
            folder / f"consolidated.{rank:02d}.pth",
        )
    (folder / "params.json").write_text(json.dumps({"dim": dim}))
    return folder


@pytest.mark.parametrize("embedding_axis", [0, 1])
def test_tensor_parallel_shards_are_joined(tmp_path, embedding_axis):
    """With square weights, the shapes alone do not show the sharded dimension."""
    axes = {"tok_embeddings.weight": embedding_axis, "norm.weight": None, "output.weight": 0}
    axes |= {
        f"layers.0.attention.{name}.weight": axis
        for name, axis in {"wq": 0, "wk": 0, "wv": 0, "wo": 1}.items()
    }
    axes |= {
        f"layers.0.feed_forward.{name}.weight": axis
        for name, axis in {"w1": 0, "w2": 1, "w3": 0}.items()
    }
    tensors = {
        name: torch.randn(8) if axis is None else torch.randn(8, 8) for name, axis in axes.items()
    }
    source = MetaSource(split(tensors, axes, tmp_path, dim=8))
    assert dict(source.specs) == specs_of(tensors)
    for name, tensor in tensors.items():
        assert same(source.read(name), tensor), name
        part = (slice(3, 6), slice(2, 7))[: tensor.ndim]
        assert same(source.read(name, part), tensor[part].clone()), name


def test_damaged_meta_folders(tmp_path):
    tensors = {"output.weight": torch.randn(4, 6), "norm.weight": torch.randn(6)}
    axes = {"output.weight": 0, "norm.weight": None}
    split(tensors, axes, tmp_path, dim=6)
    first, second = tmp_path / "consolidated.00.pth", tmp_path / "consolidated.01.pth"
    whole = torch.load(second)
    torch.save({**whole, "norm.weight": torch.zeros(6)}, second)
    with pytest.raises(UserError, match=r"norm\.weight must be the same in"):
        open_source(tmp_path).read("norm.weight")
    torch.save({"norm.weight": whole["norm.weight"]}, second)
    with pytest.raises(UserError, match=r"contain different tensors: output\.weight"):
        open_source(tmp_path)
    torch.save({**whole, "output.weight": torch.zeros(2, 5)}, second)
    with pytest.raises(UserError, match=r"shapes of output\.weight in the files are inconsistent"):
        open_source(tmp_path)
    second.write_bytes(first.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"consolidated\.01\.pth cannot be read"):
        open_source(tmp_path)
    first.unlink()
    with pytest.raises(UserError, match=r"consolidated\.00\.pth is missing"):
        open_source(tmp_path)


def test_an_unknown_sharded_dimension_is_rejected(tmp_path):
    split({"layers.0.gate.weight": torch.randn(4, 4)}, {"layers.0.gate.weight": 0}, tmp_path, dim=4)
    with pytest.raises(UserError, match=r"sharded dimension of layers\.0\.gate\.weight"):
        open_source(tmp_path)


# DCP


def save_states(folder: str) -> None:
    """Save two states, one of them sharded over the processes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = nn.Linear(5, 7, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.arange(35.0).reshape(7, 5))
    fully_shard(module, mesh=mesh)
    dcp.save({"model": module.state_dict(), "other": {"x": torch.ones(3)}}, checkpoint_id=folder)


def test_a_sharded_checkpoint_with_two_states(tmp_path):
    run_processes(save_states, 2, str(tmp_path / "saved"))
    expected = torch.arange(35.0).reshape(7, 5)
    source = DcpSource(tmp_path / "saved")
    assert same(source.read("weight"), expected)
    assert same(source.read("weight", (slice(2, 6), slice(1, 4))), expected[2:6, 1:4].clone())
    assert same(DcpSource(tmp_path / "saved", state="other").read("x"), torch.ones(3))
    specs = state_tensor_specs(tmp_path / "saved")
    assert specs == {
        "model": {"weight": TensorSpec.of(expected)},
        "other": {"x": TensorSpec.of(torch.ones(3))},
    }
    with pytest.raises(UserError, match="no state 'reference'; its states are model, other"):
        DcpSource(tmp_path / "saved", state="reference")


def test_damaged_dcp_folders(tmp_path):
    tensors = {"weight": torch.randn(64, 64)}
    save(tmp_path, "dcp", tensors)
    source = DcpSource(tmp_path)
    for file in tmp_path.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"cannot be read.*weight"):
        source.read("weight")
    (tmp_path / ".metadata").write_bytes(b"\x80")
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        DcpSource(tmp_path)


@pytest.mark.parametrize("format", WRITERS)
def test_a_full_disk_is_an_os_error(tmp_path, format, monkeypatch):
    """DCP wraps errors and torch.save replaces them, but the writers raise OSError."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    names = ("__0_0.distcp", "__0_1.distcp", "consolidated.00.pth.tmp", "model.safetensors.tmp")

    def full(path: Path) -> tuple[Path, int]:
        return path.with_name(f"{path.name}.tmp"), os.open("/dev/full", os.O_RDONLY)

    monkeypatch.setattr(durable, "_new_file", full)
    for name in names:
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="disk full" if format == "meta" else "No space left"):
        save(tmp_path, format, {"weight": torch.randn(64, 64)})


# Conversion


class CountingSource(TensorSource):
    """Tensors in memory that count the elements read."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors
        self.specs = specs_of(tensors)
        self.elements: dict[str, int] = {}

    def read(self, name, slices=None):
        tensor = self.tensors[name] if slices is None else self.tensors[name][slices]
        self.elements[name] = self.elements.get(name, 0) + tensor.numel()
        return tensor.clone()


ROWS = [
    KeyMapping("embedding", "embed"),
    KeyMapping("layers.*.q", "l.*.q", RopePermutation(4)),
    KeyMapping(("layers.*.gate", "layers.*.up"), "l.*.gate_up", Concatenated(0)),
    KeyMapping("layers.*.experts", tuple(f"l.*.experts.{i}" for i in range(3)), Stacked()),
]


def converted_example() -> tuple[dict[str, Tensor], StateDictAdapter]:
    internal = {"embedding": torch.randn(6, 8)}
    for layer in range(2):
        sizes = {"q": (8, 8), "gate": (5, 8), "up": (3, 8), "experts": (3, 4, 2)}
        internal |= {f"layers.{layer}.{name}": torch.randn(*size) for name, size in sizes.items()}
    return internal, StateDictAdapter(ROWS, n_layers=2)


def test_external_view_and_back():
    internal, adapter = converted_example()
    view = ExternalView(CountingSource(internal), adapter)
    external = CountingSource({name: view.read(name) for name in view.specs})
    assert dict(view.specs) == dict(external.specs)
    assert torch.equal(
        external.tensors["l.0.gate_up"],
        torch.cat([internal["layers.0.gate"], internal["layers.0.up"]]),
    )
    back = InternalView(external, adapter, specs_of(internal))
    assert dict(back.specs) == specs_of(internal)
    for name, tensor in internal.items():
        assert same(back.read(name), tensor), name
        part = (slice(1, 3), *(slice(0, size) for size in tensor.shape[1:]))
        assert same(back.read(name, part), tensor[part].clone()), name


def test_a_mapping_of_several_tensors_is_read_once():
    internal, adapter = converted_example()
    source = CountingSource(internal)
    view = ExternalView(source, adapter)
    for name in view.specs:
        view.read(name)
    assert source.elements == {name: tensor.numel() for name, tensor in internal.items()}


@pytest.mark.parametrize(
    ("mapping", "shape", "read"),
    [
        (
            KeyMapping("w", tuple(f"e.{i}" for i in range(4)), Stacked()),
            (4, 6, 2),
            {"e.1": 12, "e.2": 12},
        ),
        (
            KeyMapping("w", tuple(f"e.{i}.{j}" for i in range(4) for j in "gu"), Stacked(2)),
            (4, 2, 3, 5),
            {"e.1.g": 15, "e.1.u": 15, "e.2.g": 15, "e.2.u": 15},
        ),
        (KeyMapping("w", "fused", Permuted((0, 1, 2, 3), joined=1)), (4, 2, 3, 5), {"fused": 60}),
    ],
)
def test_only_the_experts_of_a_rank_are_read(mapping, shape, read):
    internal = {"w": torch.randn(shape)}
    adapter = StateDictAdapter([mapping], n_layers=0)
    external = ExternalView(CountingSource(internal), adapter)
    source = CountingSource({name: external.read(name) for name in external.specs})
    view = InternalView(source, adapter, specs_of(internal))
    part = (slice(1, 3), *(slice(0, size) for size in shape[1:-1]), slice(1, 2))
    assert same(view.read("w", part), internal["w"][part].clone())
    assert source.elements == read


def test_views_keep_the_types_of_the_files():
    internal, adapter = converted_example()
    halves = {name: tensor.bfloat16() for name, tensor in internal.items()}
    external = ExternalView(CountingSource(halves), adapter)
    assert {
        spec.dtype for spec in InternalView(external, adapter, specs_of(internal)).specs.values()
    } == {torch.bfloat16}


def test_tied_weights_are_compared_in_pieces(monkeypatch):
    import torchtitan.components.weights.views as views

    monkeypatch.setattr(views, "_COMPARED_ELEMENTS", 4)
    adapter = StateDictAdapter(
        [KeyMapping("embedding", "embed")], n_layers=0, tied={"head": "embed"}
    )
    embedding = torch.randn(5, 2)
    tensors = {"embed": embedding, "head": embedding.clone()}
    InternalView(CountingSource(tensors), adapter, {"embedding": TensorSpec.of(embedding)})
    tensors["head"][4, 1] += 1
    with pytest.raises(UserError, match="head differs from embed"):
        InternalView(CountingSource(tensors), adapter, {"embedding": TensorSpec.of(embedding)})


# Loading


class Block(nn.Module):
    """Tensors that cannot be divided evenly over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 14, bias=False)
        self.down = nn.Linear(14, 5, bias=True)
        self.tiny = nn.Parameter(torch.zeros(1, 3))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.register_buffer("buffer", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def block_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(x.shape, generator=generator) for name, x in Block().state_dict().items()
    }


def load_sharded(folder: str, tensor_parallel: int) -> None:
    shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = Block()
    if tensor_parallel > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"], ignored_params={model.scalar})
    expected = block_weights()
    for path in sorted(Path(folder).iterdir()):
        for tensor in model.state_dict().values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(float("nan"))
        source = CountingSource({name: open_source(path).read(name) for name in expected})
        load_weights(source, [model], dist.group.WORLD)
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert same(whole.detach(), expected[name]), (path.name, name)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert source.elements.get(name, 0) == local.numel(), (
                "each process must read only its shard"
            )
            if isinstance(tensor, DTensor):
                assert same(local.detach(), open_source(path).read(name, local_slices(tensor)))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "tensor_parallel"), [(2, 1), (4, 2)])
def test_each_process_reads_its_shard(tmp_path, processes, tensor_parallel):
    """With FSDP, and with FSDP and tensor parallelism, which shard the same dimension."""
    for format in WRITERS:
        save(tmp_path / format, format, block_weights())
    run_processes(load_sharded, processes, str(tmp_path), tensor_parallel)


def test_values_are_converted_to_the_type_of_the_parameter():
    model = Block().to(torch.bfloat16)
    load_weights(CountingSource(block_weights()), [model])
    assert all(same(x, block_weights()[name].bfloat16()) for name, x in model.state_dict().items())


def test_mismatched_weights_are_named():
    weights = block_weights()
    weights["extra"] = weights.pop("up.weight")
    weights["tiny"] = torch.zeros(3, 1)
    with pytest.raises(UserError) as raised:
        load_weights(CountingSource(weights), [Block()])
    for fault in (
        "up.weight missing",
        "extra not in the model",
        "tiny [3, 1] (the model has [1, 3])",
    ):
        assert fault in str(raised.value)


def load_parts(folder: str) -> None:
    """Load one part of the model in each process, like pipeline stages."""
    rank = dist.get_rank()
    source = open_source(folder)
    stage = nn.ModuleDict({str(rank): nn.Linear(2, 2, bias=False)})
    load_weights(source, [stage], dist.group.WORLD)
    assert same(stage[str(rank)].weight.detach(), source.read(f"{rank}.weight"))
    with pytest.raises(UserError, match=r"1\.weight not in the model"):
        load_weights(source, [nn.ModuleDict({"0": nn.Linear(2, 2, bias=False)})], dist.group.WORLD)
    wrong = nn.ModuleDict({str(rank): nn.Linear(2, 2 + rank, bias=False)})
    # on rank 0 too
    with pytest.raises(UserError, match=r"1\.weight \[2, 2\] \(the model has \[3, 2\]\)"):
        load_weights(source, [wrong], dist.group.WORLD)


def test_pipeline_stages_load_their_weights(tmp_path):
    save(tmp_path, "hf", {f"{i}.weight": torch.randn(2, 2) for i in range(2)})
    run_processes(load_parts, 2, str(tmp_path))
