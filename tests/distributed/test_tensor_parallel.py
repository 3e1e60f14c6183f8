"""Tensor parallelism: the vocabulary-sharded loss, whole models, and errors in a sharding plan."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.distributed import initialize_weights
from torchtitan.distributed.tensor_parallel import apply_tensor_parallel, check_parts
from torchtitan.models.common.decoder import DENSE_SHARDING, Decoder
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.output_head import UNCHANGED, LogitTransform
from torchtitan.tools.errors import UserError

BATCH, LENGTH, DIM = 2, 6, 16
PROCESSES = 2


class ZLoss(CrossEntropyLoss):
    """Custom loss that adds the squared logarithm of the softmax normalizer (PaLM,
    arXiv:2204.02311, section 5), with operations for which PyTorch has no vocabulary-sharded
    version."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        valid = labels_N != IGNORE_INDEX
        penalty = torch.logsumexp(logits_NV.float(), dim=-1) ** 2
        return super().from_logits(logits_NV, labels_N) + 0.1 * (penalty * valid).sum()


def whole_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    with_z: bool,
    transform: LogitTransform = UNCHANGED,
) -> Tensor:
    logits = transform(F.linear(hidden, weight).flatten(0, 1))
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
    if with_z:
        valid = labels.flatten() != -100
        loss = loss + 0.1 * logits[valid].logsumexp(-1).square().sum()
    return loss


def make_tensors(vocabulary: int, valid: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, output weights, and labels from both halves of the vocabulary, some of
    them ignored."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(BATCH, LENGTH, DIM, generator=generator)
    weight = torch.randn(vocabulary, DIM, generator=generator)
    labels = torch.randint(0, vocabulary, (BATCH, LENGTH), generator=generator)
    labels[0, :3], labels[1, 0], labels[1, -1] = -100, vocabulary - 1, 0
    return hidden, weight, labels if valid else torch.full_like(labels, -100)


def value_and_gradients(
    loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, *args: Any
) -> list[Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    value = loss(hidden, weight, *args)
    # A factor after the loss, like the division by the number of tokens.
    (value * 0.37).backward()
    return [value.detach(), hidden.grad, weight.grad]


def assert_equal(results: list[Tensor], expected: list[Tensor]) -> None:
    """Compare up to float32 rounding: sums over the vocabulary and chunks have a different
    order."""
    for result, reference in zip(results, expected, strict=True):
        whole = result.full_tensor() if isinstance(result, DTensor) else result
        torch.testing.assert_close(whole, reference, rtol=1e-5, atol=1e-5)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("tp",))


def compare_losses(folder: Path) -> None:
    """Compare losses with and without chunks, on even and uneven shards of the vocabulary."""
    mesh = make_mesh()
    for vocabulary in (40, 41):
        for kind in (CrossEntropyLoss, ZLoss):
            for chunk_tokens, placement in ((0, Shard(1)), (5, Shard(1)), (5, Replicate())):
                for transform in (UNCHANGED, LogitTransform(multiplier=0.5, softcap=2.0)):
                    loss = kind.Config(chunk_tokens=chunk_tokens).build()
                    compare_loss(mesh, vocabulary, loss, placement, transform)
    (folder / str(dist.get_rank())).touch()


def compare_loss(
    mesh: DeviceMesh,
    vocabulary: int,
    loss: CrossEntropyLoss,
    placement: Any,
    transform: LogitTransform,
) -> None:
    with_transform = functools.partial(loss, transform=transform)
    for valid in (True, False):
        hidden, weight, labels = make_tensors(vocabulary, valid)
        expected = value_and_gradients(
            whole_loss, hidden, weight, labels, isinstance(loss, ZLoss), transform
        )
        sharded_hidden = distribute_tensor(hidden, mesh, [placement])
        sharded_weight = distribute_tensor(weight, mesh, [Shard(0)])
        results = value_and_gradients(with_transform, sharded_hidden, sharded_weight, labels)
        assert results[1].placements == (placement,)
        assert results[2].placements == (Shard(0),)
        assert_equal(results, expected)
        with torch.no_grad():
            assert_equal([with_transform(sharded_hidden, sharded_weight, labels)], expected[:1])


def test_the_sharded_loss_and_its_gradients_match_whole_logits(workers, tmp_path):
    workers.run(compare_losses, tmp_path)
    assert len(list(tmp_path.iterdir())) == PROCESSES


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns; for a DTensor,
    of its shard."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # called again with the local tensors
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            # DTensor propagates shapes with fake tensors of the whole size, which have no memory.
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                self.elements = max(self.elements, value.numel())
        return result


def measure_tensors(folder: Path) -> None:
    mesh = make_mesh()
    vocabulary = 4000
    hidden, weight, labels = make_tensors(vocabulary)
    tokens = BATCH * LENGTH

    def largest(loss: CrossEntropyLoss, disable_loss_parallel: bool = False) -> int:
        tensors = [
            distribute_tensor(hidden, mesh, [Shard(1)]),
            distribute_tensor(weight, mesh, [Shard(0)]),
        ]
        if disable_loss_parallel:
            tensors = [tensor.full_tensor() for tensor in tensors]
        with LargestTensor() as mode:
            value_and_gradients(loss, *tensors, labels)
        return mode.elements

    weight_shard = weight.numel() // PROCESSES
    logits_shard = tokens * vocabulary // PROCESSES
    assert logits_shard < weight_shard < tokens * vocabulary
    assert largest(CrossEntropyLoss.Config(chunk_tokens=0).build()) == weight_shard
    assert largest(CrossEntropyLoss.Config(chunk_tokens=5).build()) == weight_shard
    assert (
        largest(CrossEntropyLoss.Config(chunk_tokens=0).build(), disable_loss_parallel=True)
        >= tokens * vocabulary
    )
    (folder / str(dist.get_rank())).touch()


def test_logits_of_the_whole_vocabulary_are_never_allocated(workers, tmp_path):
    """Weights are not gathered either: no tensor is larger than the weight shard of a rank. With
    `disable_loss_parallel`, the measurement detects both."""
    workers.run(measure_tensors, tmp_path)
    assert len(list(tmp_path.iterdir())) == PROCESSES


# --- models
# --------------------------------------------------------------------------------------------------


def make_model(kind: type[Decoder] = Llama3Model, **options: Any) -> Decoder:
    sizes = {
        "vocab_size": 41,
        "dim": DIM,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 24,
    }
    return kind.Config(rope=RoPEConfig(), **sizes, **options).build()


def compare_models(folder: Path, kind: type[Decoder], tied: bool) -> None:
    mesh = make_mesh()
    tokens = torch.randint(0, 41, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    expected = make_model(kind, tie_embeddings=tied)
    initialize_weights(expected, 0)
    loss = CrossEntropyLoss.Config(chunk_tokens=5).build()
    expected(tokens, head=loss, labels_BL=tokens).backward()
    for disable_loss_parallel in (False, True):
        model = make_model(kind, tie_embeddings=tied)
        apply_tensor_parallel(
            model, mesh, DENSE_SHARDING, disable_loss_parallel=disable_loss_parallel
        )
        initialize_weights(model, 0)
        model(tokens, head=loss, labels_BL=tokens).backward()
        named = dict(model.named_parameters())
        assert isinstance(named["layers.0.attention.wq.weight"], DTensor)
        assert named["layers.0.attention.wq.weight"].placements == (Shard(0),)
        assert named["layers.1.attention.wo.weight"].placements == (Shard(1),)
        for name, parameter in expected.named_parameters():
            gradient = named[name].grad.full_tensor()
            assert (gradient - parameter.grad).norm() < 1e-5 * parameter.grad.norm(), name
    (folder / str(dist.get_rank())).touch()


@pytest.mark.parametrize(
    ("kind", "tied"), [(Llama3Model, False), (Llama3Model, True), (Qwen3Model, False)]
)
def test_gradients_of_a_model_match_a_single_process(workers, tmp_path, kind, tied):
    workers.run(compare_models, tmp_path, kind, tied)
    assert len(list(tmp_path.iterdir())) == PROCESSES


def omit_an_entry(folder: Path) -> None:
    tensor = {
        name: style for name, style in DENSE_SHARDING.tensor.items() if not name.endswith("k_norm")
    }
    plan = dataclasses.replace(DENSE_SHARDING, tensor=tensor)
    message = (
        "the sharding plan has no entry for layers.0.attention.k_norm.weight, "
        "layers.1.attention.k_norm"
    )
    with pytest.raises(UserError, match=message):
        apply_tensor_parallel(
            make_model(Qwen3Model), make_mesh(), plan, disable_loss_parallel=False
        )
    (folder / str(dist.get_rank())).touch()


def test_a_parameter_without_an_entry_is_rejected(workers, tmp_path):
    workers.run(omit_an_entry, tmp_path)
    assert len(list(tmp_path.iterdir())) == PROCESSES


@pytest.mark.parametrize(
    ("name", "style", "message"),
    [
        ("layers.*.attention.q_nrom", "heads", "names no module of the model"),
        ("layers.*.mlp.*", "columns", "names no module of the model"),
        ("outptu", "columns", "names no module of the model"),  # codespell:ignore
        (
            "layers.*.attention.q_norm",
            "head",
            "is not one of vocabulary, sequence, final norm, heads, ",
        ),
        (
            "layers.*.attention.q_norm",
            "rows",
            "is for Linear, and layers.0.attention.q_norm is RMSNorm",
        ),
        ("head.output", "vocabulary", "is for Embedding, and head.output is Linear"),
    ],
)
def test_an_invalid_entry_of_the_plan_is_rejected(name, style, message):
    model = make_model(Qwen3Model)
    check_parts(model, DENSE_SHARDING, 2)
    plan = dataclasses.replace(DENSE_SHARDING, tensor={**DENSE_SHARDING.tensor, name: style})
    entry = f"the sharding plan's entry '{name}': '{style}' {message}"
    with pytest.raises(UserError, match=re.escape(entry)):
        check_parts(model, plan, 2)


def test_an_entry_may_name_an_absent_module():
    """Absent modules are norms that Llama lacks, a tied head, and modules of other pipeline
    stages."""
    model = make_model(tie_embeddings=True)
    check_parts(model, DENSE_SHARDING, 2)
    model.tok_embeddings, model.layers = None, nn.ModuleDict()
    check_parts(model, DENSE_SHARDING, 2)
