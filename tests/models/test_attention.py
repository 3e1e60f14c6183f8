"""Every kernel of attention against explicit products and softmax, the choice of the kernel, and
its metadata."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention, varlen
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_llama3 import small_model
from torchtitan.models.common import attention as kernels
from torchtitan.models.common.attention import Attention, Sinks, choose_kernel, with_kernel
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata, Kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PACKED = ([3, 9], [12], [7, 1, 4])
WHOLE = ([12], [12], [12])
WINDOWS = (None, 1, 3, 7, 12, 20)
"""None; smaller than, equal to and larger than documents and rows."""


def positions_of(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def metadata_of(rows: Sequence[Sequence[int]], window: int | None = None) -> AttentionMetadata:
    return replace(AttentionMetadata.from_positions(positions_of(rows)), window=window)


def random_inputs(
    rows: int, length: int, dtype: torch.dtype = torch.float64, head_dim: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, length, heads, head_dim) for heads in (4, 2, 2)]
    return [
        torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes
    ]


def seen_tokens(rows: Sequence[Sequence[int]], window: int | None) -> Tensor:
    """Return whether token q sees token k, (B, Q, K), from the definition."""
    documents = [[number for number, n in enumerate(lengths) for _ in range(n)] for lengths in rows]
    length, reach = len(documents[0]), window or math.inf
    return torch.tensor(
        [
            [
                [row[q] == row[k] and 0 <= q - k < reach for k in range(length)]
                for q in range(length)
            ]
            for row in documents
        ]
    )


def expected_output(q: Tensor, k: Tensor, v: Tensor, seen_BQK: Tensor) -> Tensor:
    heads_first = [x.transpose(1, 2).repeat_interleave(4 // x.shape[2], dim=1) for x in (q, k, v)]
    scores = heads_first[0] @ heads_first[1].mT / 8**0.5
    return (
        scores.masked_fill(~seen_BQK[:, None], -torch.inf).softmax(-1) @ heads_first[2]
    ).transpose(1, 2)


def assert_equals_definition(metadata: AttentionMetadata, rows: Sequence[Sequence[int]]) -> None:
    """Compare output and gradients in float64, so that only the order of sums differs."""
    inputs = random_inputs(len(rows), 12)
    copies = [x.detach().requires_grad_() for x in inputs]
    out = Attention()(*inputs, metadata)
    expected = expected_output(*copies, seen_tokens(rows, metadata.window))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    torch.testing.assert_close(
        gradients, torch.autograd.grad((expected * weight).sum(), copies), rtol=1e-10, atol=1e-10
    )


# --- kernels
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [PACKED, WHOLE], ids=["packed", "whole"])
def test_kernels_of_the_cpu_equal_the_definition(rows, static, window):
    metadata = with_kernel(
        metadata_of(rows, window), device=CPU, dtype=torch.float64, head_dim=8, static=static
    )
    assert metadata.kernel == ("dense" if static else "causal" if rows is WHOLE else "documents")
    assert_equals_definition(metadata, rows)


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen_BQK: Tensor) -> Tensor:
    """Return the output from the definition: a further column of the softmax, which has no
    value."""
    heads_first = [x.transpose(1, 2).repeat_interleave(4 // x.shape[2], dim=1) for x in (q, k, v)]
    scores = (heads_first[0] @ heads_first[1].mT / 8**0.5).masked_fill(
        ~seen_BQK[:, None], -torch.inf
    )
    scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    return (scores.softmax(-1)[..., :-1] @ heads_first[2]).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [PACKED, WHOLE], ids=["packed", "whole"])
def test_sinks_equal_the_definition(rows, static, window):
    metadata = metadata_of(rows, window)
    metadata = with_kernel(
        metadata, device=CPU, dtype=torch.float64, head_dim=8, static=static, capped=True
    )
    (q, k, v), sinks = random_inputs(3, 12), Sinks(4).double()
    torch.nn.init.normal_(sinks.scores, generator=torch.Generator().manual_seed(1))
    out = Attention(has_sinks=True)(sinks(q), k, v, metadata)
    expected = attend_with_sinks(q, k, v, sinks.scores, seen_tokens(rows, window))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight, inputs = torch.randn_like(out), (q, k, v, sinks.scores)
    results, references = (torch.autograd.grad((y * weight).sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(results, references, rtol=1e-10, atol=1e-10)


LONG = ([200, 90, 10], [300])
"""Documents of several blocks."""


def attend_with_cap(q: Tensor, k: Tensor, v: Tensor, softcap: float, seen_BQK: Tensor) -> Tensor:
    heads_first = [x.transpose(1, 2).repeat_interleave(4 // x.shape[2], dim=1) for x in (q, k, v)]
    scores = softcap * torch.tanh(heads_first[0] @ heads_first[1].mT / 8**0.5 / softcap)
    weights = scores.masked_fill(~seen_BQK[:, None], -torch.inf).softmax(-1)
    return (weights @ heads_first[2]).transpose(1, 2)


@pytest.mark.parametrize("kind", ["plain", "capped", "with sinks"])
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("rows", [LONG, ([300], [300])], ids=["packed", "whole"])
def test_blocks_equal_the_definition(rows, window, kind):
    metadata = with_kernel(
        metadata_of(rows, window), device=CPU, dtype=torch.float64, head_dim=8, static=False
    )
    (q, k, v), sinks = random_inputs(2, 300), Sinks(4).double()
    torch.nn.init.normal_(sinks.scores, generator=torch.Generator().manual_seed(1))
    seen_BQK, inputs = seen_tokens(rows, window), [q, k, v]
    if kind == "plain":
        out, expected = Attention()(q, k, v, metadata), expected_output(q, k, v, seen_BQK)
    elif kind == "capped":
        out = Attention(softcap=0.7)(q, k, v, metadata)
        expected = attend_with_cap(q, k, v, 0.7, seen_BQK)
    else:
        inputs.append(sinks.scores)
        out = Attention(has_sinks=True)(sinks(q), k, v, metadata)
        expected = attend_with_sinks(q, k, v, sinks.scores, seen_BQK)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out)
    results, references = (torch.autograd.grad((y * weight).sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(results, references, rtol=1e-10, atol=1e-10)


class LargestTensor(TorchDispatchMode):
    """Keeps the largest number of elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("kind", ["plain", "capped", "with sinks"])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("lengths", [[128] * 8, [1024]], ids=["packed", "whole"])
def test_memory_does_not_grow_with_the_square_of_the_length(kind, window, lengths):
    inputs = random_inputs(1, 1024)
    attend = Attention(softcap=0.7 if kind == "capped" else None, has_sinks=kind == "with sinks")
    metadata = with_kernel(
        metadata_of([lengths], window), device=CPU, dtype=torch.float64, head_dim=8, static=False
    )
    q, k, v = inputs
    with LargestTensor() as largest:
        attend(F.pad(q, (0, 1)) if attend.has_sinks else q, k, v, metadata).sum().backward()
    # A block of 128 tokens has scores for 4 heads; each token has 4 heads of 8 elements, and scores
    # of all pairs would have 4 * 1024**2.
    assert largest.elements <= 4 * 128 * 1024


def test_sinks_of_flex_attention_equal_the_definition(monkeypatch):
    monkeypatch.setattr(kernels, "_compiled", lambda name: getattr(flex_attention, name))
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: "flex")
    rows = ([100, 156], [30, 1, 225])
    metadata = with_kernel(
        metadata_of(rows), device=CPU, dtype=torch.float32, head_dim=8, static=False, capped=True
    )
    q, k, v = (x.detach() for x in random_inputs(2, 256, torch.float32))
    sinks = Sinks(4).requires_grad_(False)
    torch.nn.init.normal_(sinks.scores, generator=torch.Generator().manual_seed(1))
    out = Attention(has_sinks=True)(sinks(q), k, v, metadata)
    expected = attend_with_sinks(q, k, v, sinks.scores, seen_tokens(rows, None))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("length", [1, 3, 5, 12, 20])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "rows", [PACKED, WHOLE, None], ids=["packed", "whole", "without positions"]
)
def test_chunks_are_documents(rows, static, length):
    documents = [
        [min(length, n - start) for n in row for start in range(0, n, length)]
        for row in rows or WHOLE
    ]
    metadata = metadata_of(rows) if rows else AttentionMetadata.of_rows(3, 12)
    metadata = metadata.with_chunks(length, positions_of(rows or WHOLE))
    metadata = with_kernel(metadata, device=CPU, dtype=torch.float64, head_dim=8, static=static)
    assert_equals_definition(metadata, documents)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [PACKED, WHOLE], ids=["packed", "whole"])
def test_values_may_be_narrower_than_keys(rows, static):
    metadata = with_kernel(
        metadata_of(rows), device=CPU, dtype=torch.float64, head_dim=8, static=static
    )
    q, k, v = random_inputs(3, 12)
    expected = expected_output(q, k, v[..., :5], seen_tokens(rows, None))
    torch.testing.assert_close(
        Attention()(q, k, v[..., :5], metadata), expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("static", [False, True])
def test_rows_without_positions_equal_the_definition(static, window):
    metadata = replace(AttentionMetadata.of_rows(3, 12), window=window)
    metadata = with_kernel(metadata, device=CPU, dtype=torch.float64, head_dim=8, static=static)
    assert metadata.kernel == ("dense" if static and window else "causal")
    assert_equals_definition(metadata, WHOLE)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("packed", [True, False])
def test_block_mask_equals_the_definition(monkeypatch, window, packed):
    """FlexAttention's forward pass runs on a CPU too, uncompiled; its backward pass does not (torch
    2.13)."""
    monkeypatch.setattr(kernels, "_compiled", lambda name: getattr(flex_attention, name))
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: "flex")
    rows = ([100, 156], [30, 1, 225]) if packed else ([256], [256])
    metadata = (
        metadata_of(rows, window)
        if packed
        else replace(AttentionMetadata.of_rows(2, 256), window=window)
    )
    metadata = with_kernel(metadata, device=CPU, dtype=torch.float32, head_dim=8, static=False)
    q, k, v = (x.detach() for x in random_inputs(2, 256, torch.float32))
    seen_BQK = seen_tokens(rows, window)
    # Float32 sums in another order.
    torch.testing.assert_close(
        Attention()(q, k, v, metadata), expected_output(q, k, v, seen_BQK), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_varlen_gets_the_documents_and_the_window(monkeypatch, window):
    """PyTorch's kernel needs CUDA. A stand-in follows the documentation of its arguments."""

    def varlen_attn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ends_q: Tensor,
        ends_k: Tensor,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> Tensor:
        assert (
            ends_q is ends_k
            and ends_q.dtype == torch.int32
            and max_q == max_k == int(ends_q.diff().max())
        )
        (before, after), enable_gqa = options.pop("window_size"), options.pop("enable_gqa")
        assert enable_gqa and after == 0 and options == {"scale": None}
        document = torch.bucketize(torch.arange(len(q)), ends_q[1:], right=True)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = (
            (document[:, None] == document)
            & (distance >= 0)
            & ((before == -1) | (distance <= before))
        )
        return expected_output(q[None], k[None], v[None], seen[None])[0]

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: "varlen")
    metadata = with_kernel(
        metadata_of(PACKED, window), device=CPU, dtype=torch.float64, head_dim=8, static=False
    )
    assert_equals_definition(metadata, PACKED)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("device", ["cuda:0"])
def test_kernels_of_cuda_equal_the_definition(device, window):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    for dtype, static, kernel in (
        (torch.bfloat16, False, "varlen"),
        (torch.float32, False, "flex"),
    ):
        inputs = [
            x.detach().to(device, dtype).requires_grad_() for x in random_inputs(3, 12, head_dim=16)
        ]
        metadata = metadata_of(PACKED, window).to(device)
        metadata = with_kernel(
            metadata, device=torch.device(device), dtype=dtype, head_dim=16, static=static
        )
        assert metadata.kernel == kernel
        expected = expected_output(
            *(x.double() for x in inputs), seen_tokens(PACKED, window).to(device)
        )
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        out = Attention()(*inputs, metadata).double()
        results, references = ((y, *torch.autograd.grad(y.sum(), inputs)) for y in (out, expected))
        torch.testing.assert_close(results, references, rtol=tolerance, atol=tolerance)


# --- choice
# --------------------------------------------------------------------------------------------------

SHARD = {"query_places_L": torch.arange(6), "key_places_S": torch.arange(12)}
CHOICES: list[
    tuple[torch.device, torch.dtype, int, bool, dict[str, Any], Sequence[Sequence[int]], Kernel]
] = [
    (CPU, torch.bfloat16, 64, False, {}, PACKED, "documents"),
    (CPU, torch.bfloat16, 64, True, {}, PACKED, "dense"),
    # the choice does not depend on the documents
    (CPU, torch.bfloat16, 64, True, {}, WHOLE, "dense"),
    (CPU, torch.bfloat16, 64, False, SHARD, WHOLE, "dense"),
    (CUDA, torch.bfloat16, 64, False, {}, WHOLE, "causal"),
    (CUDA, torch.bfloat16, 64, False, {"window": 12}, WHOLE, "causal"),
    (CUDA, torch.bfloat16, 64, False, {"window": 11}, WHOLE, "varlen"),
    (CUDA, torch.bfloat16, 64, False, {}, PACKED, "varlen"),
    (CUDA, torch.float16, 256, False, {"window": 3}, PACKED, "varlen"),
    (CUDA, torch.float32, 64, False, {}, PACKED, "flex"),
    (CUDA, torch.bfloat16, 260, False, {}, PACKED, "flex"),
    (CUDA, torch.bfloat16, 512, False, {}, PACKED, "flex"),
    (CUDA, torch.bfloat16, 64, True, {}, PACKED, "flex"),
    (CUDA, torch.bfloat16, 64, True, {}, WHOLE, "flex"),
    (CUDA, torch.bfloat16, 64, False, SHARD, WHOLE, "flex"),
    (CUDA, torch.bfloat16, 64, False, {"kernel": "dense", **SHARD}, WHOLE, "dense"),
]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "static", "fields", "rows", "kernel"), CHOICES
)
def test_choice_of_the_kernel(monkeypatch, device, dtype, head_dim, static, fields, rows, kernel):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    metadata = replace(metadata_of(rows), **fields)
    assert (
        choose_kernel(metadata, device=device, dtype=dtype, head_dim=head_dim, static=static)
        == kernel
    )


def test_old_gpus_have_no_varlen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    options = {"device": CUDA, "dtype": torch.float16, "head_dim": 64, "static": False}
    assert choose_kernel(metadata_of(PACKED), **options) == "flex"


# --- metadata
# --------------------------------------------------------------------------------------------------


def test_documents_of_positions():
    metadata = metadata_of(PACKED)
    assert metadata.cu_seqlens.tolist() == [0, 3, 12, 24, 31, 32, 36]
    assert metadata.cu_seqlens.dtype == torch.int32
    assert metadata.lengths == [3, 9, 12, 7, 1, 4]
    assert (metadata.max_seqlen, metadata.n_rows) == (12, 3)
    with pytest.raises(AssertionError, match="wait"):
        AttentionMetadata.from_positions(torch.zeros(1, 2, device="meta"))


def test_lengths_of_documents():
    """Every token has its document's length, also if a rank holds only some tokens of the
    document."""
    metadata = metadata_of(PACKED)
    expected = [[3] * 3 + [9] * 9, [12] * 12, [7] * 7 + [1] + [4] * 4]
    assert metadata.document_lengths_BL(CPU).tolist() == expected
    assert metadata.rows(1, 3).document_lengths_BL(CPU).tolist() == expected[1:]
    places = torch.tensor([0, 1, 2, 9, 10, 11])
    shard = metadata.shard(places, torch.arange(12))
    assert shard.document_lengths_BL(CPU).tolist() == torch.tensor(expected)[:, places].tolist()
    assert shard.rows(2, 3).document_lengths_BL(CPU).tolist() == [[7, 7, 7, 4, 4, 4]]
    whole = AttentionMetadata.of_rows(3, 12)
    assert whole.document_lengths_BL(CPU).tolist() == [[12]]
    assert whole.shard(places, torch.arange(12)).document_lengths_BL(CPU).tolist() == [[12] * 6] * 3
    # no value of the device is read
    assert metadata.to("meta").document_lengths_BL(torch.device("meta")).is_meta


@pytest.mark.parametrize("window", [None, 3])
def test_rows_have_their_documents(window):
    metadata = metadata_of(PACKED, window)
    for start, stop in ((0, 1), (1, 3), (0, 3), (2, 3)):
        part, expected = metadata.rows(start, stop), metadata_of(PACKED[start:stop], window)
        assert part.lengths == expected.lengths and part.max_seqlen == expected.max_seqlen
        assert part.window == window and torch.equal(part.positions_BL, expected.positions_BL)
    part = AttentionMetadata.of_rows(6, 5).rows(2, 4)
    assert (part.lengths, part.n_rows, part.max_seqlen) == ([5, 5], 2, 5)


@pytest.mark.parametrize("kernel", ["documents", "dense", "varlen"])
def test_no_kernel_reads_the_device(monkeypatch, kernel):
    """A meta tensor has no values, so an operation that reads them raises an exception."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: kernel)
    metadata = metadata_of(PACKED, window=4).to("meta", non_blocking=True)
    assert (
        metadata.positions_BL is not None
        and metadata.positions_BL.is_meta
        and not metadata.cu_seqlens.is_meta
    )
    inputs = [x.detach().to("meta").requires_grad_() for x in random_inputs(3, 12)]
    metadata = with_kernel(
        metadata, device=torch.device("meta"), dtype=torch.float64, head_dim=8, static=False
    )
    Attention()(*inputs, metadata).sum().backward()
    assert all(x.grad is not None for x in inputs)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        metadata.positions_BL.nonzero()


class WindowedModel(Llama3Model):
    """Every second layer has a window, as in Gemma 2."""

    def window_of_layer(self, index: int) -> int | None:
        return None if index % 2 else 5


@pytest.mark.parametrize("compiled", [False, True])
def test_one_metadata_serves_layers_with_and_without_window(compiled):
    model = WindowedModel(small_model().config)
    model.load_state_dict(small_model().state_dict())
    model.is_compiled = compiled
    used: list[AttentionMetadata] = []
    for block in model.layers.values():
        block.attention.attend.register_forward_pre_hook(lambda _, args: used.append(args[3]))
    metadata = metadata_of(PACKED)
    model(torch.arange(36).view(3, 12), metadata)
    assert [metadata.window for metadata in used] == [5, None, 5]
    assert used[0] is used[2]  # a mask is computed once per window
