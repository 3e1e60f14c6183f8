"""CUDA graphs of decoding, without a GPU: a stand-in on the CPU records operations and repeats them on the same memory,
and fake tensors on CUDA show what a step does with the host."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tests.components.generation.test_generation import (
    TINY_PROMPTS,
    ids_of,
    mixed_model,
    recurrent_model,
    reference_ids,
)
from tests.models.test_llama3 import VARIANTS, reference_of, small_config, small_model, windowed_model
from torchtitan.components.generation import Engine, KVCache, Sampling, decode_graph, generate
from torchtitan.components.generation.engine import _logits_at
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.tools.torch_private import storage_key, written_arguments


def tensors_of(value) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, Tensor)]


def key_of(x: Tensor) -> int:
    return storage_key(x.untyped_storage())


class Recording(TorchDispatchMode):
    """Operations with their arguments and results. Like a CUDA graph, a recording has no effects by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self._own: set[int] = set()
        self._written: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = tensors_of(written_arguments(operation, args, kwargs))
        self._written += [(x, x.clone()) for x in written if key_of(x) not in self._own]
        known = {key_of(x) for x in tensors_of((args, kwargs))}
        result = operation(*args, **kwargs)
        new = [key_of(x) not in known for x in tensors_of(result)]
        self._own |= {key_of(x) for x in tensors_of(result) if key_of(x) not in known}
        self.calls.append((operation, args, kwargs, result, new))
        return result

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        for x, value in reversed(self._written):
            x.copy_(value)
        for _, _, _, result, new in self.calls:
            for x, is_new in zip(tensors_of(result), new, strict=True):
                if is_new:
                    x.fill_(torch.nan if x.is_floating_point() else 1)

    def repeat(self) -> None:
        for operation, args, kwargs, result, new in self.calls:
            again = tensors_of(operation(*args, **kwargs))
            for x, value, is_new in zip(tensors_of(result), again, new, strict=True):
                if is_new:
                    x.copy_(value)

    def signature(self) -> list:
        """Return the operations with shapes, numbers and places in memory: of each tensor, its outer storage, or the
        call that made it."""
        made: dict[int, int] = {}

        def describe(x: Tensor) -> tuple:
            return made.get(key_of(x), key_of(x)), x.shape, x.stride(), x.storage_offset(), x.dtype

        lines = []
        for number, (operation, args, kwargs, result, new) in enumerate(self.calls):
            made |= {key_of(x): number for x, is_new in zip(tensors_of(result), new, strict=True) if is_new}
            lines.append((str(operation), str(tree_map_only(Tensor, describe, (args, kwargs, result)))))
        return lines


class Graphs:
    """A stand-in for `_capture_on_cuda`, which counts."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step, device):
        self.captures += 1
        with Recording() as recorded:
            result = step()

        def replay() -> Tensor:
            self.replays += 1
            recorded.repeat()
            return result

        return replay


@pytest.fixture
def graphs(monkeypatch) -> Graphs:
    """Record steps on the CPU, after 2 steps of a batch, with buckets of 16 slots."""
    graphs = Graphs()
    monkeypatch.setitem(decode_graph.CAPTURES, "cpu", graphs)
    monkeypatch.setattr(decode_graph, "PATIENCE", 2)
    monkeypatch.setattr(decode_graph, "BUCKET", 16)
    return graphs


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_texts_equal_transformers(graphs, variant):
    model = small_model(**VARIANTS[variant])
    reference, _ = reference_of(model)
    expected = reference_ids(reference, TINY_PROMPTS, 40)
    assert ids_of(generate(model, TINY_PROMPTS, max_new_tokens=40)) == expected
    # The first token follows the prompts; the other steps have 21 to 59 slots: until 32, 48 and 60.
    assert (graphs.captures, graphs.replays) == (3, 39 - 2 - 3)


def test_a_step_repeats_the_same_operations_on_the_same_memory(graphs, monkeypatch):
    recorded, checked = [], []

    def capture(step, device):
        with Recording() as first:
            step()
        recorded.append(first)

        def replay() -> Tensor:
            with Recording() as again:
                step()
            assert again.signature() == first.signature()
            checked.append(again)
            return step()

        return replay

    monkeypatch.setitem(decode_graph.CAPTURES, "cpu", capture)
    generate(small_model(), TINY_PROMPTS, max_new_tokens=40)
    assert len(recorded) == 3 and len(checked) == 39 - 2 - 3
    assert recorded[0].signature() != recorded[1].signature()
