"""Divided experts of classes: what a trial shows and refuses, and what a rank reads and holds."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.equivalence.workers import Workers  # noqa: E402
from tests.models.transformers.model_types import tiny_model  # noqa: E402
from tests.models.transformers.test_weights import make_random, open_weights  # noqa: E402
from torchtitan.components.peft import LoRA  # noqa: E402
from torchtitan.components.quantization.narrow import MXFP8  # noqa: E402
from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.expert_parallel import apply_expert_parallel  # noqa: E402
from torchtitan.models.transformers import experts  # noqa: E402
from torchtitan.models.transformers.model import TransformersModel  # noqa: E402
from torchtitan.protocols.conversion import convert_model  # noqa: E402
from torchtitan.tools.errors import UserError  # noqa: E402


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v3", "lfm2_moe", "step3p7"],
)
def test_a_trial_shows_that_experts_can_be_divided(model_type: str) -> None:
    config = tiny_model(model_type)
    assert config.expert_parallel_sizes == {"num_experts": 4}
    assert "expert_parallel_degree" not in config.unsupported_parallelisms()


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("llama", "its class has no fused experts"),
        ("jetmoe", "its class has no fused experts"),
        ("muse_spark", "MuseSparkExperts has weights for all experts"),
    ],
)
def test_other_experts_are_refused(model_type: str, reason: str) -> None:
    dims = ParallelDims.from_config(ParallelismConfig(expert_parallel_degree=2), 2)
    with pytest.raises(UserError, match=f"expert_parallel_degree 2 must be 1 .*{reason}"):
        dims.check_fits(tiny_model(model_type), 64)


def test_the_number_of_experts_must_be_divisible() -> None:
    dims = ParallelDims.from_config(ParallelismConfig(expert_parallel_degree=3), 3)
    with pytest.raises(UserError, match="expert_parallel_degree 3 does not divide .*experts 4"):
        dims.check_fits(tiny_model("mixtral"), 63)


def test_products_of_transposed_experts_stay_wide() -> None:
    with torch.device("meta"):
        model = tiny_model("gpt_oss").build()
    model.stacked_experts()
    selected = MXFP8.Config(emulate=True, min_features=0).build().select(model)
    assert selected and not any("experts" in name for name in selected)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_frozen_experts_have_the_type_of_products(model_type: str) -> None:
    """As frozen linear layers do; the classes of gpt-oss and Llama 4 store experts transposed."""
    with torch.device("meta"):
        model = tiny_model(model_type).build()
    lora = LoRA.Config(rank=2, include=["q_proj"])
    convert_model(model, [lora.build()], frozen_dtype=torch.bfloat16)
    found = {
        name.rpartition(".")[2]: parameter.dtype
        for name, parameter in model.named_parameters()
        if ".experts." in name and "bias" not in name
    }
    assert found == {"gate_up_proj": torch.bfloat16, "down_proj": torch.bfloat16}


def test_a_mistake_in_the_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_experts(self: Any, rows: Any, weights: Any, counts_E: Any, compute: Any) -> Any:
        plain: torch.Tensor = divide(self, rows, weights, counts_E.flip(0), compute)
        return plain

    divide = experts._InTwo.__call__
    monkeypatch.setattr(experts._InTwo, "__call__", other_experts)
    config = tiny_model("qwen3_moe", max_position_embeddings=130)  # not in the cache of trials
    assert "dividing its experts changed its logits" in experts.class_experts(config.document)[1]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_rank_without_tokens_has_gradients(model_type: str) -> None:
    with torch.device("cpu"):
        model = tiny_model(model_type).build()
    layer = model.stacked_experts()[0]
    rows = torch.zeros(0, 64, requires_grad=True)
    result = layer._compute(rows, torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.long))
    result.sum().backward()
    assert result.shape == (0, 64)
    assert all(not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_rank_reads_its_experts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_random(model_type).save_pretrained(tmp_path)
    _, source = open_weights(tmp_path)
    files, read = source._source, set[str]()
    plain = type(files).read

    def count(self: Any, name: str, slices: Any = None) -> torch.Tensor:
        tensor = plain(self, name, slices)
        read.update([name] if slices is None else [f"{name} {tuple(tensor.shape)}"])
        return tensor

    name = "model.model.layers.0.mlp.experts.{}"
    whole = {each: source.read(name.format(each)) for each in ("gate_up_proj", "down_proj")}
    monkeypatch.setattr(type(files), "read", count)
    for each, expected in whole.items():
        rows = (slice(1, 3), *(slice(0, size) for size in expected.shape[1:]))
        assert torch.equal(source.read(name.format(each), rows), expected[1:3])
    if model_type == "gpt_oss":  # stacked in files too
        assert all(" (2, " in one for one in read) and len(read) == 2
    else:
        numbers = {one.split("experts.")[1].split(".")[0] for one in read}
        assert numbers == {"1", "2"} and len(read) == 6


def hold_own_experts(document: dict[str, Any]) -> None:
    dims = ParallelDims.from_config(ParallelismConfig(expert_parallel_degree=2), 2)
    mesh = dims.build_mesh("cpu")
    with torch.device("meta"):
        model = TransformersModel.Config.of(document).build()
    layers = model.stacked_experts()
    assert layers
    apply_expert_parallel(layers, dims.expert_mesh(mesh), dims.shards)
    for layer in layers:
        assert all(parameter.to_local().shape[0] == 2 for parameter in layer.parameters())


@pytest.mark.slow
def test_a_rank_holds_its_experts(workers: Workers) -> None:
    workers.run(hold_own_experts, tiny_model("gpt_oss").document)
