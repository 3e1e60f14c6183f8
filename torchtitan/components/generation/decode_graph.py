"""Recorded steps of decoding, since Python takes more time to call the operations of a small batch
than they take: CUDA graphs, which one call launches, and recordings on the CPU."""

import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchtitan.components.generation.kv_cache import KVCache, SlotMemory
from torchtitan.components.generation.recording import NotRecordable, Recording
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.experts import StackedExperts
from torchtitan.protocols.model import BaseModel
from torchtitan.tools.device import send
from torchtitan.tools.errors import UserError, in_words
from torchtitan.tools.logging import logger
from torchtitan.tools.torch_private import CheckpointWrapper, forward_hooks, storage_key

SWITCH = "TORCHTITAN_CUDA_GRAPHS"
"""Environment variable; 0: decode without graphs, also on the CPU."""

Compute = Callable[[Tensor, AttentionMetadata], Tensor]
"""Returns the logits (B, V) of tokens (B, 1) on the device, with their attention."""

Step = Callable[[], Tensor]
Capture = Callable[[Step, Sequence[Tensor], torch.device], Step]
"""Records the operations of a step, which returns logits. Recording has no effects that repeating
does not have. The returned function repeats them, on the same memory. The sequence has all tensors
from outside that a step may read. Raises `NotRecordable` if each step must be computed."""


class Device(NamedTuple):
    """Settings for recording steps on a type of device."""

    capture: Capture
    bucket: int
    """A graph attends to the next multiple of this number of slots, and serves until they are
    full."""
    patience: int
    """Steps of an unchanged batch before a graph is made, which costs some steps; batches that
    change often get no graph."""
    loads_kernels: bool = True
    """Compute the first step with a number of keys without recording, which loads its kernels."""
    n_unused: int = 0
    """A bucket has at least this number of slots of all rows together: few rows attend to unused
    ones in less time than a graph takes to make."""
    keeps: bool = False
    """Keep recordings, with the memory that they read, for later batches (`Shapes`)."""


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for recording, always the same, since cuBLAS keeps memory for each
    stream."""
    return torch.cuda.Stream(device)


def _capture_on_cuda(step: Step, memory: Sequence[Tensor], device: torch.device) -> Step:
    graph, stream = torch.cuda.CUDAGraph(), _stream(device)
    # The outer context also leaves the stream if the inner one fails. By default, other threads
    # must not allocate memory meanwhile, which a data loader's threads do.
    with (
        torch.cuda.stream(stream),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _capture_on_cpu(step: Step, memory: Sequence[Tensor], device: torch.device) -> Step:
    try:
        return Recording(step, memory)
    except (RuntimeError, TypeError) as error:  # PyTorch raises both for unknown arguments
        raise NotRecordable(in_words(error)) from error


_COMMON = 3
"""Batches of a shape after which its recordings attend to fewer unused slots."""
_FINER = 4  # parts of a bucket then

_recording = threading.Lock()
"""Held while a step is recorded: engines of several models run in threads of their own, and record
on one stream."""

_failures: dict[str, str] = {}
"""Type of device → reason why a recording failed on it in this process."""

DEVICES = {
    "cuda": Device(_capture_on_cuda, bucket=256, patience=8),
    "cpu": Device(
        _capture_on_cpu, bucket=64, patience=8, loads_kernels=False, n_unused=1024, keeps=True
    ),
}
"""By type. On other devices, steps are not recorded."""


def graphs_for(model: BaseModel, compute: Compute) -> "Graphs | None":
    """Return what the graphs of batches share. None if the device has no
    graphs, or if the host takes part in a step: weights that are sharded, offloaded or packed,
    experts (some of whose products read their sizes), blocks with activation checkpointing (which
    reads the state of random numbers), LongRoPE (whose factors it sends), hooks of other code
    (which a repeated step would not call). Raise `UserError` if a recording has failed on such a
    device in this process."""
    weights = list(model.parameters())
    device = weights[0].device
    _check_failure(device)
    is_plain = all(
        type(x) in (Tensor, nn.Parameter) and x.is_floating_point() and x.device == device
        for x in weights
    )
    has_host_work = any(
        isinstance(module, StackedExperts | CheckpointWrapper) for module in model.modules()
    ) or any(
        not str(getattr(hook, "__module__", "")).startswith("torchtitan.")
        for module in (None, *model.modules())
        for hook in forward_hooks(module)
    )
    is_possible = (
        device.type in DEVICES and is_plain and not has_host_work and not model.cache_boundaries()
    )
    if not is_possible or os.environ.get(SWITCH) == "0":
        return None
    return Graphs(model, compute, device)


@dataclass(slots=True, eq=False)
class Graphs:
    """What the graphs of a model share."""

    model: BaseModel
    compute: Compute
    device: torch.device
    is_possible: bool = True
    """False once a step was not recordable."""

    @property
    def keeps(self) -> bool:
        """True if recordings are kept with their memory."""
        return DEVICES[self.device.type].keeps


@dataclass(slots=True, eq=False, weakref_slot=True)
class Recorded:
    """Recorded steps of equally many rows, which read the same memory."""

    inputs_3B: Tensor | None = None
    by_keys: dict[int, Step] = field(default_factory=dict)
    """By the number of slots that they attend to."""
    memory: Sequence[object] = ()
    """Identity of the memory that they read."""
    graph: "weakref.ref[DecodeGraph] | None" = None
    """The graph in use, whose step is the recorded one."""

    def step(self) -> Tensor:
        """Compute the step of the graph in use."""
        assert self.graph is not None
        graph = self.graph()
        assert graph is not None, "a recording is checked while its batch exists"
        return graph.step()

    def free_results(self) -> None:
        """Give the memory of results back until the next use."""
        for step in self.by_keys.values():
            if isinstance(step, Recording):
                step.free_results()


@dataclass(slots=True, eq=False)
class Shape:
    """Memory of a cache, with the recordings that read it."""

    memory: SlotMemory
    recorded: Recorded = field(default_factory=Recorded)
    n_batches: int = 0
    """Batches that had this shape."""

    @property
    def is_common(self) -> bool:
        """True if it has come back so often that more recordings are worth their time."""
        return self.n_batches >= _COMMON

    def free(self) -> None:
        """Give all memory back until the next use."""
        self.memory.free()
        self.recorded.free_results()


class Shapes:
    """Memory and recordings of batches with different numbers of rows and slots, the `most` that
    were used last: a recording takes the time of several steps. One of them has memory at a time;
    `free` gives it back."""

    def __init__(self, most: int = 16):
        self._most = most
        self._by_size: OrderedDict[tuple[int, int], Shape] = OrderedDict()

    def shape(self, n_rows: int, n_slots: int) -> Shape:
        """Return the shape with these numbers."""
        size = n_rows, n_slots
        found = self._by_size.pop(size, None) or Shape(SlotMemory(*size))
        self._by_size[size] = found
        if len(self._by_size) > self._most:
            self._by_size.popitem(last=False)
        return found

    def free(self) -> None:
        """Give all memory back until the next use."""
        for shape in self._by_size.values():
            shape.free()

    def clear(self) -> None:
        """Forget all."""
        self._by_size.clear()


class DecodeGraph:
    """Decoding of a batch whose rows stay the same, or are replaced at their places, as long as all
    layers keep all tokens and have no states. The recorded steps of a `Shape`, whose memory is the
    cache's, are used again."""

    def __init__(self, graphs: Graphs, cache: KVCache, shape: Shape | None = None):
        self._graphs = graphs
        self._device = DEVICES[graphs.device.type]
        self._patience = self._device.patience
        self._cache = cache
        self._keeps = shape is not None
        self._parts = _FINER if shape and shape.is_common else 1
        self._n_keys = 0
        self._recorded = shape.recorded if shape else Recorded()
        self._recorded.graph = weakref.ref(self)
        if shape:
            shape.n_batches += 1
            memory = list(map(_identity, self._outer_memory()))
            if memory != self._recorded.memory:
                self._recorded.by_keys.clear()
                self._recorded.memory = memory

    def logits(self, tokens_B1: Tensor, positions_B1: Tensor) -> Tensor | None:
        """Return the logits (B, V) of the next tokens, given on the host, in memory that the next
        call overwrites, and advance the cache. None: compute this step in another way. Raise
        `UserError` if recording fails."""
        self._patience -= 1
        n_slots = self._cache.n_slots
        if not (self._graphs.is_possible and self._cache.is_static):
            return None
        bucket = max(self._device.bucket, self._device.n_unused // len(tokens_B1)) // self._parts
        n_keys = min((n_slots // bucket + 1) * bucket, self._cache.max_slots)
        recorded = self._recorded
        if self._patience >= 0 and n_keys not in recorded.by_keys:
            return None
        inputs_B1 = (tokens_B1, positions_B1, torch.full_like(tokens_B1, n_slots))
        inputs_3B = send(torch.cat(inputs_B1, dim=1).T.contiguous(), self._graphs.device)
        old_3B = recorded.inputs_3B
        recorded.inputs_3B = inputs_3B if old_3B is None else old_3B.copy_(inputs_3B)
        try:
            logits_BV = self._logits(n_keys)
        except NotRecordable as error:
            logger.debug("decoding is not recorded: %s", error)
            self._graphs.is_possible = False
            recorded.by_keys.clear()
            return None
        self._cache.advance(1)
        return logits_BV

    def _logits(self, n_keys: int) -> Tensor:
        recorded = self._recorded
        if n_keys != self._n_keys:
            self._n_keys = n_keys
            if self._keeps:
                recorded.free_results()
            else:
                recorded.by_keys.clear()
            if self._device.loads_kernels:
                return self.step()
        if n_keys not in recorded.by_keys:
            recorded.by_keys[n_keys] = self._record()
        return recorded.by_keys[n_keys]()

    def step(self) -> Tensor:
        """Compute the logits of the inputs."""
        assert self._recorded.inputs_3B is not None
        tokens_B, positions_B, slots_B = self._recorded.inputs_3B
        attention = self._cache.static_attention(positions_B[:, None], slots_B[:1], self._n_keys)
        return self._graphs.compute(tokens_B[:, None], attention)

    def _record(self) -> Step:
        device = self._graphs.device
        # A recording keeps its step; it must not keep this object, and with it the cache's memory.
        recorded = weakref.proxy(self._recorded)
        with _recording:
            _check_failure(device)
            try:
                return self._device.capture(lambda: recorded.step(), self._memory(), device)
            except RuntimeError as error:
                # The end of a failed capture fails too.
                _failures[device.type] = in_words(error.__context__ or error)
                _check_failure(device)
                raise

    def _memory(self) -> list[Tensor]:
        """Return all tensors from outside that a step reads."""
        assert self._recorded.inputs_3B is not None
        return [*self._outer_memory(), self._recorded.inputs_3B]

    def _outer_memory(self) -> list[Tensor]:
        """Return the weights and the cache. The weights may be other tensors than before, such as
        copies in another type."""
        model = self._graphs.model
        return [*model.parameters(), *model.buffers(), *self._cache.memory()]


def _identity(x: Tensor) -> object:
    return storage_key(x.untyped_storage()), x.dtype, x.shape, x.stride(), x.storage_offset()


def _check_failure(device: torch.device) -> None:
    """Raise `UserError` if a recording has failed on such a device: PyTorch's allocator may keep
    the state of a failed recording, and no public function resets it."""
    if reason := _failures.get(device.type):
        raise UserError(
            f"a step of decoding cannot be recorded as a CUDA graph ({reason}), and the GPU memory "
            f"of this process may be in an unknown state; start it again with {SWITCH}=0 to "
            "generate without graphs"
        )
