"""Initial weights: distributions and independence of the layout."""

import hashlib
import math

import numpy
import pytest
import torch
from torch import nn

from tests.processes import run_processes
from tests.training import llama_config
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.initialize import canonical_name, uniform_numbers
from torchtitan.models.llama3 import SHARDING
from torchtitan.protocols.initializer import Constant, TruncatedNormal, with_initializers

STORED = [
    "-0x1.8a365e0000000p-6",
    "-0x1.2678b00000000p-8",
    "0x1.791d640000000p-8",
    "0x1.78a81c0000000p-6",
    "0x1.d056820000000p-10",
    "-0x1.80a5320000000p-7",
    "-0x1.7df95c0000000p-8",
    "-0x1.cb82680000000p-6",
]


def model_config(dim: int = 64, n_layers: int = 2):
    return llama_config(dim=dim, n_layers=n_layers, ffn_dim=2 * dim)


def initial_weights(seed: int, **sizes) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = model_config(**sizes).build()
    model.to_empty(device="cpu")
    initialize_weights(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_values_depend_only_on_seed_and_name():
    first, again, other = initial_weights(1), initial_weights(1), initial_weights(2)
    deeper = initial_weights(1, n_layers=3)
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, deeper[name]), name
        assert "norm" in name or not torch.equal(weight, other[name])
    assert not torch.equal(
        first["layers.0.attention.wq.weight"], first["layers.1.attention.wq.weight"]
    )


@pytest.mark.parametrize("threads", [2, 4])
def test_values_do_not_depend_on_the_number_of_threads(threads):
    one = initial_weights(1, dim=256)  # 32,768 numbers at a time, of 65,536 or more in a matrix
    torch.set_num_threads(threads)
    try:
        several = initial_weights(1, dim=256)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(weight, several[name]) for name, weight in one.items())


def test_the_value_of_an_element_does_not_depend_on_the_size():
    small, large = (
        with_initializers(nn.Embedding(rows, 96), weight=TruncatedNormal(1.0))
        for rows in (1000, 1001)
    )
    for layer in (small, large):
        initialize_weights(layer, 3)
    assert torch.equal(large.weight[:1000], small.weight)
    assert not torch.equal(large.weight[1000], large.weight[999])


def test_stored_values():
    """Values that stay the same in all versions of PyTorch, NumPy and torchtitan: a run with the
    same seed starts from the same weights. Computed by `uniform_number` and, in
    tests/protocols/test_initializer.py, `exact_quantile`."""
    layer = with_initializers(nn.Linear(8, 2, bias=False), weight=TruncatedNormal(0.02))
    initialize_weights(layer, 42)
    assert [each.hex() for each in layer.weight[0].tolist()] == STORED


def test_excluded_tensors_are_left():
    layer = with_initializers(nn.Linear(8, 2), weight=TruncatedNormal(0.02), bias=Constant(1.0))
    block = nn.ModuleDict({"_checkpoint_wrapped_module": layer})
    before = layer.weight.detach().clone()
    initialize_weights(block, 0, loaded={"weight"})
    assert torch.equal(layer.weight, before)
    assert torch.equal(layer.bias, torch.ones(2))


def philox(counter: int, key: int) -> list[int]:
    """Four numbers of 64 bits by Philox 4x64-10, from the paper (Salmon et al. 2011)."""
    mask = 2**64 - 1
    c, k = [counter >> 64 * i & mask for i in range(4)], [key & mask, key >> 64]
    for _ in range(10):
        product, other = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [other >> 64 ^ c[1] ^ k[0], other & mask, product >> 64 ^ c[3] ^ k[1], product & mask]
        k = [k[0] + 0x9E3779B97F4A7C15 & mask, k[1] + 0xBB67AE8584CAA73B & mask]
    return c


def uniform_number(name: str, index: int) -> float:
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")
    word = philox(index // 8 + 1, key)[index % 8 // 2] >> index % 2 * 32 & 2**32 - 1
    signed = word - (word >> 31 << 32)
    return (2 * (signed >> 8) + 1) / 2**24


def test_philox_has_the_published_values():
    """The first known answer for philox4x64-10 of Random123, the authors' library."""
    words = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox(0, 0) == words


@pytest.mark.parametrize("start", [0, 3, 8, 2**15 + 5, 2**40 + 1])
def test_uniform_numbers(start):
    numbers = uniform_numbers("7/tok_embeddings.weight", start, 21)
    expected = [uniform_number("7/tok_embeddings.weight", start + index) for index in range(21)]
    assert numbers.dtype == numpy.float32
    assert numbers.tolist() == expected


def test_distributions():
    weights = initial_weights(0, dim=256)
    expected = {
        "tok_embeddings.weight": 1.0,
        "head.output.weight": 256**-0.5 / 4,
        "layers.0.attention.wq.weight": 0.02,
        "layers.0.attention.wo.weight": 0.02 / math.sqrt(2),
        "layers.1.feed_forward.w2.weight": 0.02 / math.sqrt(4),
    }
    for name, std in expected.items():
        # Truncation at three deviations reduces the std to 0.987; 2 % covers the sampling error of
        # 25,000 values.
        assert weights[name].std().item() == pytest.approx(0.987 * std, rel=0.02), name
        assert weights[name].abs().max() <= 3 * std
    assert torch.equal(weights["head.norm.weight"], torch.ones(256))


def test_a_parameter_larger_than_a_chunk_has_no_repeated_rows():
    layer = with_initializers(nn.Linear(2048, 5000, bias=False), weight=TruncatedNormal(1.0))
    initialize_weights(layer, 0)
    rows = layer.weight.detach()
    assert len(torch.unique(rows[:, 0])) > 4990
    assert rows.std().item() == pytest.approx(0.987, rel=0.01)


def test_a_parameter_without_an_initializer_is_rejected():
    with pytest.raises(LookupError, match="bias"):
        initialize_weights(with_initializers(nn.Linear(2, 2), weight=TruncatedNormal(1.0)), 0)


def test_buffers_are_initialized():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.empty(3))

    with torch.device("meta"):
        scaled, bare = with_initializers(Scaled(), scale=Constant(2.0)), Scaled()
    for module in (scaled, bare):
        module.to_empty(device="cpu")
    initialize_weights(scaled, 0)
    assert torch.equal(scaled.scale, torch.full((3,), 2.0))
    with pytest.raises(LookupError, match="scale"):
        initialize_weights(bare, 0)


def test_canonical_name():
    assert (
        canonical_name("layers.0._orig_mod._checkpoint_wrapped_module.wq.weight")
        == "layers.0.wq.weight"
    )


def shard_and_compare(dp_replicate: int, dp_shard: int, tp: int, uneven_dim: int) -> None:
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.parallelize import parallelize_model

    expected = initial_weights(7, dim=uneven_dim)
    world_size = dp_replicate * dp_shard * tp
    dims = ParallelDims(world_size=world_size, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    with torch.device("meta"):
        model = model_config(dim=uneven_dim).build()
    mesh = dims.build_mesh("cpu")
    parallelize_model(
        model, parallel_dims=dims, mesh=mesh, sharding=SHARDING, training=TrainingConfig()
    )
    model.to_empty(device="cpu")
    initialize_weights(model, 7)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name


def check_dtypes_in_a_block() -> None:
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.parallelize import free_gathered_weights, parallelize_model

    model = model_config().build()
    initialize_weights(model, 0)
    dims = ParallelDims(world_size=2, dp_shard=2)
    training = TrainingConfig(mixed_precision_param="bfloat16")
    parallelize_model(
        model, parallel_dims=dims, mesh=dims.build_mesh("cpu"), sharding=SHARDING, training=training
    )
    seen = []
    model.layers["1"].register_forward_pre_hook(
        lambda _, args: seen.append((args[0].dtype, args[1][0].dtype))
    )
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.long))
    assert seen == [(torch.bfloat16, torch.float32)]
    assert any(not hasattr(parameter, "full_tensor") for parameter in model.parameters())
    free_gathered_weights(model)
    assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def test_rope_angles_are_float32_and_gathered_weights_can_be_freed():
    run_processes(check_dtypes_in_a_block, 2)


@pytest.mark.parametrize(
    ("dp_replicate", "dp_shard", "tp"),
    [(1, 2, 1), (2, 1, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2)],
)
def test_every_layout_has_the_same_weights(dp_replicate, dp_shard, tp):
    # 99 rows of vocabulary over 2 or 4 ranks: uneven shards. Tensor parallelism also splits
    # columns.
    run_processes(shard_and_compare, dp_replicate * dp_shard * tp, dp_replicate, dp_shard, tp, 64)
