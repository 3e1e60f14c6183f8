"""`torchtitan convert`: exact round trips, files that transformers opens, and bounded memory."""

import functools
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from tests.processes import run_processes
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import ModelState, catalog
from torchtitan.components.checkpoint.dcp import DcpSource
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.weights import (
    HuggingFaceSource,
    TensorSource,
    export_checkpoint,
    format_of,
    load_weights,
)
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3 import Llama3Model, model_spec
from torchtitan.models.pretrained import internal_source
from torchtitan.protocols.state_dict_adapter import model_tensor_specs
from torchtitan.protocols.tensor_source import TensorSpec

transformers = pytest.importorskip("transformers")


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def save_reference(
    folder: Path, *, tied: bool, dtype: torch.dtype, **options
) -> "transformers.PreTrainedModel":
    """Save a random model of transformers in several files."""
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=5,
        eos_token_id=[7, 9],
        **options,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def hf_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_identical(folder: Path, expected: Path) -> None:
    """Every tensor has the same name, type, shape and bytes."""
    ours, theirs = hf_tensors(folder), hf_tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert TensorSpec.of(tensor) == TensorSpec.of(theirs[name]), name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


@torch.no_grad()
def logits_of(folder: Path) -> Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model(torch.arange(40).reshape(2, 20)).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "via", [["hf"], ["dcp"], ["meta"], ["dcp", "meta", "dcp"]], ids=lambda via: "-".join(via)
)
def test_round_trip_keeps_every_byte(tmp_path, via, tied, dtype):
    reference = save_reference(tmp_path / "0", tied=tied, dtype=dtype)
    for number, format in enumerate(via):
        assert convert("--to", format, tmp_path / f"{number}", tmp_path / f"{number + 1}") == 0
        assert format_of(tmp_path / f"{number + 1}") == format
    back = tmp_path / "back"
    assert (
        convert(
            "--to",
            "hf",
            "--from",
            via[-1],
            "--max_shard_size",
            20 / 2**20,
            tmp_path / f"{len(via)}",
            back,
        )
        == 0
    )
    assert (
        len(list((tmp_path / "0").glob("*.safetensors")))
        > 1
        < len(list(back.glob("*.safetensors")))
    )
    assert_identical(back, tmp_path / "0")
    # Same weights, same program: logits are bit-identical.
    assert torch.equal(logits_of(back), logits_of(tmp_path / "0"))
    config = transformers.AutoConfig.from_pretrained(back)
    assert config.dtype == reference.dtype
    assert config.architectures == ["LlamaForCausalLM"]
    document = json.loads((back / "config.json").read_text())
    assert document["torch_dtype"] == document["dtype"] == str(dtype).removeprefix("torch.")
    generation = transformers.GenerationConfig.from_pretrained(back)
    assert (config.bos_token_id, config.eos_token_id) == (5, [7, 9])
    assert (generation.bos_token_id, generation.eos_token_id) == (5, [7, 9])


def test_scaled_rope_survives(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 8192
    save_reference(tmp_path / "hf", tied=False, dtype=torch.float32, rope_parameters=rope)
    assert convert("--to", "meta", tmp_path / "hf", tmp_path / "meta") == 0
    assert convert("--to", "hf", tmp_path / "meta", tmp_path / "back") == 0
    assert torch.equal(logits_of(tmp_path / "back"), logits_of(tmp_path / "hf"))


def test_real_model(stories, tmp_path, capsys):
    assert convert("--to", "dcp", stories, tmp_path / "dcp") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"wrote {tmp_path / 'dcp'} (dcp): llama3 pretrained, 47 tensors")
    assert convert("--to", "meta", tmp_path / "dcp", tmp_path / "meta") == 0
    assert convert("--to", "hf", tmp_path / "meta", tmp_path / "back") == 0
    assert_identical(tmp_path / "back", stories)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (stories / name).read_bytes()
    # Only the tokenizer's files and the first config.json have the ids.
    generation = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    start = torch.tensor([[tokenizer.bos_token_id]])
    text = tokenizer.decode(
        model.generate(start, max_new_tokens=20, do_sample=False)[0], skip_special_tokens=True
    )
    assert text.strip().startswith("Once upon a time")


def test_token_ids_default_to_the_tokenizer(stories, tmp_path):
    shutil.copytree(stories, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in document.items() if not k.endswith("token_id")}))
    assert convert("--to", "hf", tmp_path / "hf", tmp_path / "back") == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_unreadable_tokenizer_is_copied(tmp_path):
    """Such as Llama 2's SentencePiece model."""
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    (tmp_path / "hf/generation_config.json").unlink()
    path = tmp_path / "hf/config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"bos_token_id": None, "eos_token_id": None})
    )
    (tmp_path / "hf/tokenizer.model").write_bytes(b"\x0a\x0e")
    assert convert("--to", "hf", tmp_path / "hf", tmp_path / "back") == 0
    assert (tmp_path / "back/tokenizer.model").read_bytes() == b"\x0a\x0e"
    assert not (tmp_path / "back/generation_config.json").exists()


def test_converted_checkpoint_starts_a_run(tmp_path):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    assert convert("--to", "dcp", tmp_path / "hf", tmp_path / "v1.5") == 0
    info = catalog.open_checkpoint(tmp_path / "v1.5")
    assert (info.step, info.kind, catalog.verify(tmp_path / "v1.5")) == (0, "model_only", [])
    spec, source = internal_source(tmp_path / "v1.5")
    assert dict(source.specs) == model_tensor_specs(spec.model)


@pytest.mark.parametrize("format", ["hf", "meta", "dcp"])
def test_conversion_to_another_dtype(tmp_path, format):
    save_reference(tmp_path / "hf", tied=False, dtype=torch.float32)
    assert (
        convert("--to", format, "--export_dtype", "bfloat16", tmp_path / "hf", tmp_path / "out")
        == 0
    )
    source = internal_source(tmp_path / "out")[1]
    exact = internal_source(tmp_path / "hf")[1]
    assert all(torch.equal(source.read(name), exact.read(name).bfloat16()) for name in exact.specs)
    if format == "hf":
        assert (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype
            == torch.bfloat16
        )


AXES = {
    "wq": 0,
    "wk": 0,
    "wv": 0,
    "wo": 1,
    "w1": 0,
    "w2": 1,
    "w3": 0,
    "output": 0,
    "tok_embeddings": 1,
}


def test_sharded_meta_files(tmp_path):
    save_reference(tmp_path / "hf", tied=False, dtype=torch.bfloat16)
    assert convert("--to", "meta", tmp_path / "hf", tmp_path / "meta") == 0
    whole = torch.load(tmp_path / "meta/consolidated.00.pth")
    for rank in range(2):
        parts = {}
        for name, tensor in whole.items():
            axis = AXES.get(name.split(".")[-2])
            parts[name] = tensor if axis is None else tensor.chunk(2, axis)[rank].clone()
        torch.save(parts, tmp_path / f"meta/consolidated.{rank:02d}.pth")
    assert convert("--to", "hf", tmp_path / "meta", tmp_path / "back") == 0
    assert_identical(tmp_path / "back", tmp_path / "hf")


def reshard_and_export(checkpoint: str, saved: str, exported: str) -> None:
    """Load into a sharded model, save that as a run does, and write Hugging Face files, all
    processes together."""
    ranks = Ranks(dist.group.WORLD)
    spec, source = internal_source(checkpoint)
    with torch.device("meta"):
        model = spec.model.build()
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model).to_empty(device="cpu")
    load_weights(source, [model], dist.group.WORLD)
    dcp.save({"model": ModelState([model]).state_dict()}, checkpoint_id=saved)
    if ranks.rank == 0:
        Path(exported).mkdir()
    dist.barrier()
    sharded = DcpSource(saved)
    export_checkpoint(
        Path(exported), "hf", spec, sharded, Path(checkpoint), max_file_bytes=20_000, ranks=ranks
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_distributed_resharding_and_export(tmp_path, processes):
    save_reference(tmp_path / "hf", tied=processes == 2, dtype=torch.float32)
    assert convert("--to", "dcp", tmp_path / "hf", tmp_path / "dcp") == 0
    run_processes(
        reshard_and_export,
        processes,
        *(str(tmp_path / name) for name in ("dcp", "saved", "exported")),
    )
    saved = [file.name for file in (tmp_path / "saved").glob("*.distcp")]
    assert len(saved) == processes
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > processes
    assert_identical(tmp_path / "exported", tmp_path / "hf")
    assert torch.equal(logits_of(tmp_path / "exported"), logits_of(tmp_path / "hf"))


# Failures


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    (tmp_path / "empty").mkdir()
    assert convert("--to", "meta", tmp_path / "hf", tmp_path / "empty") == 0
    before = listing(tmp_path)
    assert convert("--to", "dcp", tmp_path / "hf", tmp_path / "empty") == 2
    assert f"{tmp_path / 'empty'} already exists" in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_wrong_format_is_reported(tmp_path, capsys):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    assert convert("--from", "meta", "--to", "dcp", tmp_path / "hf", tmp_path / "out") == 2
    assert "is a checkpoint in the format hf, not meta" in capsys.readouterr().err
    assert convert("--to", "dcp", tmp_path / "nowhere", tmp_path / "out") == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert convert("--to", "hf", "--max_shard_size", 0, tmp_path / "hf", tmp_path / "out") == 2
    assert "--max_shard_size is 0.0, but must be above 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_shape_mismatch_names_the_tensor(tmp_path, capsys):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 81}))
    assert convert("--to", "dcp", tmp_path / "hf", tmp_path / "out") == 2
    assert "model.layers.0.mlp.gate_proj.weight" in capsys.readouterr().err
    assert listing(tmp_path) == [name for name in listing(tmp_path) if name.startswith("hf")]


@pytest.mark.parametrize("format", ["hf", "meta", "dcp"])
def test_failed_conversion_leaves_nothing(tmp_path, monkeypatch, capsys, format):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    read = HuggingFaceSource.read

    def fails(self, name, slices=None):
        if "layers.1.mlp" in name:
            raise OSError(28, "No space left on device")
        return read(self, name, slices)

    monkeypatch.setattr(HuggingFaceSource, "read", fails)
    assert convert("--to", format, tmp_path / "hf", tmp_path / "out") == 3
    assert "No space left on device" in capsys.readouterr().err
    assert not [name for name in listing(tmp_path) if not name.startswith("hf")]


@pytest.mark.parametrize("format", ["hf", "meta", "dcp"])
def test_cleanup_removes_only_its_own_files(tmp_path, format):
    """The names of the input and of neighboring folders do not matter."""
    others = [
        tmp_path / name for name in ("out.partial", "out", "checkpoint", "out.partial.partial")
    ]
    save_reference(others[0], tied=True, dtype=torch.float32)
    for folder in others[1:]:
        folder.mkdir()
    (others[3] / "mine").touch()
    before = listing(tmp_path)
    assert convert("--to", format, others[0], others[1]) == 0
    assert [name for name in listing(tmp_path) if not name.startswith("out/")] == before
    assert format_of(others[1]) == format
    assert others[1].stat().st_mode == others[2].stat().st_mode


def test_folder_filled_during_conversion_is_kept(tmp_path, monkeypatch, capsys):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    read = HuggingFaceSource.read

    def fills(self, name, slices=None):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/mine").touch()
        return read(self, name, slices)

    monkeypatch.setattr(HuggingFaceSource, "read", fills)
    assert convert("--to", "dcp", tmp_path / "hf", tmp_path / "out") == 3
    assert "not empty" in capsys.readouterr().err
    assert [name for name in listing(tmp_path) if not name.startswith("hf")] == ["out", "out/mine"]


@pytest.mark.parametrize("format", ["hf", "meta", "dcp"])
def test_dtype_overflow_leaves_nothing(tmp_path, capsys, format):
    model = save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[3] = 1e5
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (
        convert("--to", format, "--export_dtype", "float16", tmp_path / "hf", tmp_path / "out") == 2
    )
    assert (
        "norm.weight has values up to 100000, which float16 cannot hold" in capsys.readouterr().err
    )
    assert not [name for name in listing(tmp_path) if not name.startswith("hf")]


@pytest.mark.parametrize("damage", ["flipped", "unmarked"])
def test_damaged_checkpoint_is_not_converted(tmp_path, capsys, damage):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.float32)
    assert convert("--to", "dcp", tmp_path / "hf", tmp_path / "dcp") == 0
    file = max((tmp_path / "dcp").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "flipped":
        file.write_bytes(content)
    else:
        (tmp_path / "dcp/complete.json").unlink()
    assert convert("--to", "hf", tmp_path / "dcp", tmp_path / "back") == 2
    expected = f"{file.name} is damaged" if damage == "flipped" else "complete.json is missing"
    assert expected in capsys.readouterr().err


# Memory

LARGE = Llama3Model.Config(
    vocab_size=2048,
    dim=1024,
    n_layers=6,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=4096,
    tie_embeddings=True,
    rope=RoPEConfig(),
)
"""184 MiB in bfloat16; the largest tensor has 8 MiB."""


class ConstantSource(TensorSource):
    """Weights of a model, created when they are read."""

    def __init__(self, specs: dict[str, TensorSpec]):
        self.specs = specs

    def read(self, name, slices=None):
        return torch.full(self.specs[name].shape, 0.5, dtype=self.specs[name].dtype)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def print_memory_of(small: str, large: str, format: str) -> None:
    """Print the growth of peak memory from a small conversion to a large one."""
    assert convert("--to", format, small, f"{small}-out") == 0
    before = peak_mib()
    assert convert("--to", format, large, f"{large}-out") == 0
    print("growth", peak_mib() - before)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of the large model in a format, written on first use."""
    folder = tmp_path_factory.mktemp("large")
    spec = model_spec(LARGE, "large")
    specs = {
        name: TensorSpec(tensor_spec.shape, torch.bfloat16)
        for name, tensor_spec in model_tensor_specs(LARGE).items()
    }
    assert sum(tensor_spec.n_bytes for tensor_spec in specs.values()) > 175 * 2**20

    @functools.cache
    def write(format: str) -> Path:
        (folder / f"{format}.partial").mkdir()
        export_checkpoint(folder / f"{format}.partial", format, spec, ConstantSource(specs), folder)
        if format == "dcp":
            catalog.commit(
                folder / "dcp.partial", catalog.Marker(step=0, kind="model_only", world_size=1)
            )
        else:
            (folder / f"{format}.partial").rename(folder / format)
        return folder / format

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("hf", "dcp"),
        ("hf", "meta"),
        ("meta", "hf"),
        ("dcp", "hf"),
    ],
)
def test_memory_does_not_grow_with_the_model(tmp_path, large_model, source, target):
    save_reference(tmp_path / "hf", tied=True, dtype=torch.bfloat16)
    if source != "hf":
        assert convert("--to", source, tmp_path / "hf", tmp_path / source) == 0
    large = tmp_path / "large"
    large.symlink_to(large_model(source))
    code = (
        "from tests.cli.test_convert import print_memory_of; "
        f"print_memory_of({str(tmp_path / source)!r}, {str(large)!r}, {target!r})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    growth = float(result.stdout.split("growth")[1])
    # A few copies of the largest tensor (8 MiB) and memory that the allocator keeps; the model has
    # 184.
    assert growth < 80, f"{growth} MiB"
