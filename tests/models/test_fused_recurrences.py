"""Kernels of other packages for recurrences: their arguments, with functions of the same meaning,
the choice among them, and the packages' own kernels, by Triton's interpreter."""

import json
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_attention import metadata_of
from torchtitan.distributed import initialize_weights
from torchtitan.models.common import delta_net, fused_recurrences, mamba
from torchtitan.models.common.delta_net import GatedDeltaNet
from torchtitan.models.common.fused_recurrences import KERNELS, fused_recurrence, is_fusable
from torchtitan.models.common.kimi_delta import KimiDeltaNet
from torchtitan.models.common.mamba import Mamba2, MambaConfig
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.recurrence import Recurrence, document_numbers

PROJECT = Path(__file__).parents[2]
PYTEST = {"package": "pytest", "release": version("pytest").partition(".")[0]}
"""An installed package in place of those with kernels."""
DIM = 24
SHARED = {"dim": DIM, "init_std": 0.3, "out_init_std": 0.3, "norm_eps": 1e-6}
MIXERS: dict[str, Callable[[], Recurrence]] = {
    "gated delta rule": lambda: GatedDeltaNet(
        num_key_heads=2,
        num_value_heads=4,
        key_head_dim=16,
        value_head_dim=20,
        conv_kernel_dim=3,
        **SHARED,
    ),
    "Kimi delta attention": lambda: KimiDeltaNet(
        n_heads=2, head_dim=16, conv_kernel_dim=3, **SHARED
    ),
    "selective scan of Mamba 2": lambda: Mamba2(
        MambaConfig(n_heads=4, head_dim=16, n_groups=2, state_dim=20, conv_width=3), **SHARED
    ),
}
CASES = [(name, place) for name, kernels in KERNELS.items() for place in range(len(kernels))]
BATCHES = {
    "packed": metadata_of([[5, 1, 1, 9, 14], [16, 14]]),
    "rows": AttentionMetadata.of_rows(2, 30),
}


@pytest.fixture(autouse=True)
def logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    """The log of a process that has chosen no kernel yet."""
    load_kernel = fused_recurrences.load_kernel
    load_kernel.cache_clear()
    monkeypatch.setattr(fused_recurrences.logger, "propagate", True)
    with caplog.at_level(logging.INFO, fused_recurrences.logger.name):
        yield caplog
    load_kernel.cache_clear()


def chosen(monkeypatch: pytest.MonkeyPatch, name: str, *widths: int) -> Any:
    """Return the kernel that is chosen with CUDA."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return fused_recurrence(name, *widths)


def offer(monkeypatch: pytest.MonkeyPatch, name: str, *kernels: Any) -> None:
    monkeypatch.setattr(fused_recurrences, "KERNELS", {**KERNELS, name: kernels})


def results(mixer: Recurrence, attention: AttentionMetadata, call: Any = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weights = (
        torch.randn(2, 30, DIM, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    out = (mixer if call is None else call)(x.requires_grad_(), None, attention)
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *mixer.parameters()])]


# --- the layers call them
# --------------------------------------------------------------------------------------------------


def with_and_without_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str, place: int, batch: str, compile: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients of a layer with a function by definition, called with the
    arguments of the package's kernel, and of the same layer in chunks."""
    module = "tests.models.reference_recurrences"
    offer(monkeypatch, name, replace(KERNELS[name][place], **PYTEST, module=module))
    kernel, calls = chosen(monkeypatch, name, 16, 20), []

    def counted(*arguments: Any) -> Tensor:
        calls.append(name)
        return kernel(*arguments)

    mixer: Any = MIXERS[name]()
    initialize_weights(mixer.double(), 0)
    mixer.fused = None
    expected = results(mixer, BATCHES[batch])
    mixer.fused = torch.compiler.disable(counted)
    for where in (delta_net, mamba):
        monkeypatch.setattr(where, "is_fusable", lambda x, attention: True)
    call = torch.compile(mixer, backend="aot_eager") if compile else None
    found = results(mixer, BATCHES[batch], call)
    assert calls == [name]
    return found, expected


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_layer_is_equal_with_the_kernel(monkeypatch, name, place, batch):
    found, expected = with_and_without_kernel(monkeypatch, name, place, batch)
    # Float64 sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated delta rule", "selective scan of Mamba 2"])
def test_a_compiled_layer_is_equal_with_the_kernel(monkeypatch, name):
    """The kernel is not traced."""
    found, expected = with_and_without_kernel(monkeypatch, name, 0, "packed", compile=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_looks_for_its_kernel_when_it_is_built(monkeypatch, name):
    found: Any = object()
    asked: list[str] = []
    monkeypatch.setattr(
        fused_recurrences, "load_kernel", lambda name: [asked.append(name), found][1]
    )
    assert MIXERS[name]().fused is found and asked == [name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MIXERS)
def test_without_cuda_layers_have_no_kernel(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert MIXERS[name]().fused is None  # type: ignore[attr-defined]


def test_boundaries_of_a_context_parallel_rank_are_of_whole_rows():
    """A rank's recurrence gets all tokens of the rows, so it passes the boundaries of all."""
    whole = BATCHES["packed"]
    places = torch.arange(30).view(2, 15)
    for place in places:
        shard = whole.shard(place, torch.arange(30))
        numbers_BL = document_numbers(torch.empty(2, 30), shard)
        lengths = [n for row in numbers_BL for n in row.unique(return_counts=True)[1].tolist()]
        assert lengths == shard.lengths == [5, 1, 1, 9, 14, 16, 14]


# --- the choice
# --------------------------------------------------------------------------------------------------


def test_kernels_are_for_training_on_cuda_in_few_bits(monkeypatch):
    def fusable(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> bool:
        x: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
        return is_fusable(x, replace(BATCHES["rows"], **changes))

    assert fusable() and fusable(dtype=torch.float16)
    assert not fusable("cpu") and not fusable(dtype=torch.float32) and not fusable(states={})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not fusable()


def test_the_first_installed_kernel_is_chosen_and_logged_once(monkeypatch, logged):
    module = "tests.models.reference_recurrences"
    kernel = replace(KERNELS["Kimi delta attention"][0], **PYTEST, module=module)
    absent = replace(kernel, package="absent-package", module="absent_package.ops")
    broken = replace(kernel, module="tests.models.absent_module")
    offer(monkeypatch, "a", absent, broken, kernel)
    found = [chosen(monkeypatch, "a", *widths) for widths in ((16, 256), (128,))]
    assert found[0] is found[1] is not None
    warning, choice = [record.getMessage() for record in logged.records]
    assert warning.startswith("a: pytest cannot be imported: No module named")
    assert choice.startswith(f"a: in bfloat16 and float16, computed by pytest {version('pytest')} ")
    assert choice.endswith(" (chunk_kda)")
    # widths that the kernels do not support
    assert [chosen(monkeypatch, "a", *widths) for widths in ((8, 16), (16, 257))] == [None, None]


def test_other_releases_are_named_and_not_used(monkeypatch, logged):
    """Also of a package whose modules another one brought."""
    module = "tests.models.reference_recurrences"
    kernel = replace(KERNELS["Kimi delta attention"][0], **PYTEST, module=module)
    older, unknown = replace(kernel, release="0.1"), replace(kernel, package="absent-package")
    offer(monkeypatch, "a", older, unknown)
    assert chosen(monkeypatch, "a", 16) is None
    first, second, last = [record.getMessage() for record in logged.records]
    assert (
        first == f"a: pytest is installed in version {version('pytest')}, and not used; install 0.1"
    )
    assert "absent-package is installed in version unknown, and not used" in second
    assert "install pytest 0.1 or absent-package" in last


def test_the_extra_installs_the_release_of_the_kernels():
    metadata = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    releases = {
        each.release
        for kernels in KERNELS.values()
        for each in kernels
        if each.package == "fla-core"
    }
    assert releases == {"0.6"}
    assert metadata["project"]["optional-dependencies"]["fla"] == ["fla-core>=0.6,<0.7"]


def test_without_a_package_the_log_names_it(monkeypatch, logged):
    kernels = KERNELS["selective scan of Mamba 2"]
    offer(monkeypatch, "a", *(replace(each, module="absent_package.ops") for each in kernels))
    assert [chosen(monkeypatch, "a", 64) for _ in range(2)] == [None, None]
    (line,) = [record.getMessage() for record in logged.records]
    assert line == (
        "a: computed in chunks by PyTorch; install mamba-ssm 2.3 or fla-core 0.6 for a kernel"
    )


# --- the kernels of the packages
# --------------------------------------------------------------------------------------------------

MISSING = [name for name in ("fla", "triton") if find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs fla-core and triton; not installed: {MISSING}")
def test_interpreted_kernels_equal_ours():
    """A minute. Every installed kernel, forward and backward, in float32, where it can be
    compared closely: packed documents and whole rows."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.models.interpreted_kernels"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    names = {line["recurrence"] for line in lines}
    assert names == {*KERNELS}
    for line in lines:
        # sums of up to 70 terms in float32, in another order
        assert max(*line["packed"], *line["rows"]) <= 1e-5, line
