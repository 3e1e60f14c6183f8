"""CUDA graphs of decoding, without a GPU: a stand-in on the CPU records operations and repeats them
on the same memory, and the meta device, which has no values, shows what a step exchanges with the
host."""

import contextlib
import inspect
import itertools
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from tests.components.generation.test_engine import (
    SAMPLING,
    STOP_IDS,
    alone,
    check_equal,
    converse,
    hybrid_model,
    texts_of,
)
from tests.components.generation.test_generation import (
    TINY_PROMPTS,
    ids_of,
    mixed_model,
    reference_ids,
)
from tests.components.peft.test_lora import adapted_model, initialized, plain_model, randomize
from tests.models.family_cases import CASES, family_of, random_reference, to_ours
from tests.models.test_llama3 import VARIANTS, reference_of, small_model, windowed_model
from tests.models.test_phi3 import tiny
from torchtitan.components.generation import Engine, Generation, KVCache, decode_graph, generate
from torchtitan.components.generation.decode_graph import DEVICES, DecodeGraph, Device
from torchtitan.components.generation.forward import logits_at
from torchtitan.components.peft import QLoRA
from torchtitan.components.peft.lora import LoRALinear, adapters_off
from torchtitan.components.weights.few_bits import FewBits, tables_of
from torchtitan.config import ActivationCheckpointConfig
from torchtitan.distributed.activation_checkpoint import apply_activation_checkpointing
from torchtitan.distributed.mixed_precision import MixedPrecision
from torchtitan.protocols.conversion import convert_model
from torchtitan.protocols.recurrence import Recurrence
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import storage_key, written_arguments


def tensors_of(value) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, Tensor)]


def key_of(x: Tensor) -> int:
    return storage_key(x.untyped_storage())


class Operations(TorchDispatchMode):
    """Operations with their arguments and results. Like a CUDA graph, a recording has no effects by
    itself."""

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
        """Return the operations with shapes, numbers and places in memory: of each tensor, its
        outer storage, or the call that made it."""
        made: dict[int, int] = {}

        def describe(x: Tensor) -> tuple:
            return made.get(key_of(x), key_of(x)), x.shape, x.stride(), x.storage_offset(), x.dtype

        lines = []
        for number, (operation, args, kwargs, result, new) in enumerate(self.calls):
            made |= {
                key_of(x): number
                for x, is_new in zip(tensors_of(result), new, strict=True)
                if is_new
            }
            lines.append(
                (str(operation), str(tree_map_only(Tensor, describe, (args, kwargs, result))))
            )
        return lines


class Graphs:
    """A stand-in for `_capture_on_cuda`, which counts."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step, memory, device):
        with Operations() as recorded:
            result = step()

        def replay() -> Tensor:
            recorded.repeat()
            return result

        return self.counted(replay)

    def counted(self, replay):
        self.captures += 1

        def counting_replay() -> Tensor:
            self.replays += 1
            return replay()

        return counting_replay


@pytest.fixture
def graphs(monkeypatch) -> Graphs:
    """Record steps on the CPU, after 2 steps of a batch, with buckets of 16 slots."""
    graphs = Graphs()
    record_on_cpu(monkeypatch, graphs)
    return graphs


def record_on_cpu(monkeypatch, capture, *, keeps: bool = False) -> None:
    monkeypatch.setitem(DEVICES, "cpu", Device(capture, bucket=16, patience=2, keeps=keeps))


def with_and_without_cache(model, prompts) -> list[list[Generation]]:
    return [
        generate(model, prompts, max_new_tokens=24, use_cache=use_cache)
        for use_cache in (True, False)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_texts_equal_transformers(graphs, variant):
    model = small_model(**VARIANTS[variant])
    reference, _ = reference_of(model)
    expected = reference_ids(reference, TINY_PROMPTS, 40)
    assert ids_of(generate(model, TINY_PROMPTS, max_new_tokens=40)) == expected
    # The first token follows the prompts. The other steps end at 21 to 59 slots, in buckets of 32,
    # 48 and 62 slots, of which each has a step that is not recorded, after the first two steps.
    assert (graphs.captures, graphs.replays) == (3, 39 - 2 - 3)


@pytest.mark.parametrize("max_rows", [3, 7, None])
def test_rows_finish_and_join(graphs, max_rows):
    """Sampled texts of various lengths equal the texts of batches of one without cache."""
    model = small_model()
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=max_rows)
    check_equal(engine.run(texts_of(engine)), alone(model))
    assert graphs.replays > graphs.captures > 1


def test_a_graph_is_not_destroyed_while_it_runs(graphs, monkeypatch):
    """The device is done with a graph when the host has read the tokens."""
    events, tolist, counted = [], Tensor.tolist, graphs.counted

    def recorded(replay):
        def recording_replay() -> Tensor:
            events.append("replay")
            return replay()

        weakref.finalize(recording_replay, events.append, "destroyed")
        return counted(recording_replay)

    def read(x: Tensor) -> Any:
        if x.is_floating_point():
            events.append("read")
        return tolist(x)

    monkeypatch.setattr(graphs, "counted", recorded)
    monkeypatch.setattr(Tensor, "tolist", read)
    engine = Engine(small_model(), sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=3)
    engine.run(texts_of(engine))
    pairs = set(itertools.pairwise(events))
    assert ("read", "destroyed") in pairs and ("replay", "read") in pairs
    assert ("replay", "destroyed") not in pairs


@pytest.mark.parametrize("kind", ["before", "after", "after every module"])
def test_hooks_are_called_for_each_token(graphs, kind):
    """Hooks of users, which may keep the activations of all tokens."""
    model, calls = small_model(), []
    layer = model.layers["1"]
    handle = {
        "before": layer.register_forward_pre_hook,
        "after": layer.register_forward_hook,
        "after every module": torch.nn.modules.module.register_module_forward_hook,
    }[kind](lambda module, *_: calls.append(module) if module is layer else None)
    try:
        generate(model, [[5]], max_new_tokens=20)
    finally:
        handle.remove()
    assert len(calls) == 20
    generate(model, [[5]], max_new_tokens=20)
    assert graphs.captures > 0


def test_a_batch_that_changes_often_is_not_recorded(graphs):
    engine = Engine(small_model(), sampling=SAMPLING, max_rows=2)
    engine.run([engine.generate([1, 2], max_new_tokens=2 + n % 3, key=str(n)) for n in range(9)])
    assert graphs.captures == 0


def test_a_step_repeats_the_same_operations_on_the_same_memory(graphs, monkeypatch):
    recorded, steps = [], []

    def capture(step, memory, device):
        with Operations() as first:
            step()
        recorded.append(first.signature())

        def replay() -> Tensor:
            with Operations() as again:
                step()
            assert again.signature() == recorded[-1]
            steps.append(step)
            return step()

        return replay

    record_on_cpu(monkeypatch, capture)
    generate(small_model(), TINY_PROMPTS, max_new_tokens=40)
    assert len(recorded) == 3 and len(steps) == 39 - 2 - 3
    assert recorded[0] != recorded[1]  # the next bucket has more keys


def test_a_slot_from_the_host_would_be_noticed(graphs, monkeypatch):
    model, original = small_model(), KVCache.static_attention

    def with_constant(cache, positions_B1, slot_1, n_keys):
        return original(cache, positions_B1, torch.tensor([cache.n_slots]), n_keys)

    monkeypatch.setattr(KVCache, "static_attention", with_constant)
    with pytest.raises(AssertionError):
        check_equal(*with_and_without_cache(model, TINY_PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_family_generates_the_same(graphs, name):
    """With and without graphs; those that have one take nothing from the host in it."""
    model, _ = to_ours(family_of(name), random_reference(name, 0))
    check_equal(*with_and_without_cache(model, TINY_PROMPTS[1:]))
    has_windows = any(
        map(getattr(model, "window_of_layer", lambda index: None), map(int, model.layers))
    )
    is_recurrent = any(isinstance(module, Recurrence) for module in model.modules())
    is_possible = decode_graph.graphs_for(model, partial(logits_at, model, 0)) is not None
    has_graph = is_possible and not has_windows and not is_recurrent
    assert bool(graphs.captures) == has_graph
    if has_graph:
        assert host_copies(model) == 0


def long_rope() -> Any:
    return tiny(sliding_window=None)[0]


def checkpointed() -> Any:
    model = small_model()
    apply_activation_checkpointing(model, ActivationCheckpointConfig(mode="full"))
    return model


def packed() -> Any:
    model = plain_model(dim=64, ffn_dim=128)
    convert_model(model, [QLoRA.Config(rank=4).build()])
    return initialized(model)


def experts() -> Any:
    return to_ours(family_of("qwen2_moe"), random_reference("qwen2_moe", 0))[0]


@pytest.mark.parametrize(
    "make",
    [
        windowed_model,
        mixed_model,
        hybrid_model,
        long_rope,
        checkpointed,
        packed,
        experts,
        small_model,
    ],
)
def test_models_without_graph(graphs, make, monkeypatch):
    if make is small_model:
        monkeypatch.setenv(decode_graph.SWITCH, "0")
    check_equal(*with_and_without_cache(make(), [[5], [9, 8, 7]]))
    assert graphs.captures == 0


def test_later_turns_from_kept_keys(graphs, monkeypatch):
    """Conversations of two turns, of which the second joins a batch with the keys of the first."""

    def conversations() -> list[list[Generation]]:
        engine = Engine(small_model(), sampling=SAMPLING, max_rows=2)
        return engine.run([converse(engine, number, n_tokens=12) for number in (33, 37)])

    found = conversations()
    assert graphs.replays > graphs.captures > 1
    monkeypatch.setenv(decode_graph.SWITCH, "0")
    for one, other in zip(found, conversations(), strict=True):
        assert len(one) == 2
        check_equal(one, other)


def test_weights_and_adapters_may_change_between_runs(graphs):
    model = adapted_model()
    randomize(model)
    engine, expected = (
        Engine(model, sampling=SAMPLING, use_cache=use_cache) for use_cache in (True, False)
    )
    texts = []
    for change in (1.0, 2.0, 0.0):
        for layer in model.modules():
            if isinstance(layer, LoRALinear):
                layer.lora_B.data *= change
        n_captures = graphs.captures
        texts.append(engine.run(texts_of(engine, [5])))
        check_equal(texts[-1], expected.run(texts_of(expected, [5])))
        assert graphs.captures > n_captures
    with adapters_off([model]):
        check_equal(engine.run(texts_of(engine, [5])), texts[-1])
    assert len({tuple(text.ids) for [text] in texts}) == 3


@pytest.mark.parametrize("in_context", [True, False])
def test_bfloat16(graphs, monkeypatch, in_context):
    """Weights, or their copies in mixed precision."""
    model = small_model()
    with (
        MixedPrecision(torch.bfloat16).of(model)
        if in_context
        else contextlib.nullcontext(model.bfloat16())
    ):
        found = generate(model, TINY_PROMPTS, max_new_tokens=20)
        assert graphs.captures > 0
        monkeypatch.setenv(decode_graph.SWITCH, "0")
        expected = generate(model, TINY_PROMPTS, max_new_tokens=20)
    for one, other in zip(found, expected, strict=True):
        # bfloat16 has 8 bits, and masked keys change the order of sums: logits of about 1 differ by
        # about 2^-8.
        assert one.logprobs[:3] == pytest.approx(other.logprobs[:3], abs=0.05)
        assert one.ids[:3] == other.ids[:3]


def test_compiled_blocks(graphs):
    """They run uncompiled."""
    model = small_model()
    expected = generate(model, TINY_PROMPTS, max_new_tokens=12, use_cache=False)
    for block in model.blocks().values():
        block.compile(backend="eager")
    check_equal(generate(model, TINY_PROMPTS, max_new_tokens=12), expected)
    assert graphs.captures > 0


@pytest.mark.parametrize("makes_zeros", [True, False])
def test_unused_slots_are_finite(graphs, monkeypatch, makes_zeros):
    """PyTorch fills new memory without values with NaN here, which masked keys must not have."""
    if not makes_zeros:
        monkeypatch.setattr(Tensor, "new_zeros", Tensor.new_empty)
    torch.use_deterministic_algorithms(True)
    try:
        with (
            contextlib.nullcontext()
            if makes_zeros
            else pytest.raises(UserError, match="not finite")
        ):
            generate(small_model(), TINY_PROMPTS, max_new_tokens=20)
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads_record_one_after_another(monkeypatch):
    """A server has an engine's thread for each model."""
    both = threading.Barrier(2)
    n_alone = 0

    def capture(step, memory, device):
        nonlocal n_alone
        try:
            both.wait(0.2)
        except threading.BrokenBarrierError:
            n_alone += 1
        return step

    record_on_cpu(monkeypatch, capture)
    monkeypatch.setattr(DecodeGraph, "_memory", lambda graph: [])

    def record():
        shared = decode_graph.Graphs(None, lambda *_: None, torch.device("cpu"))
        DecodeGraph(shared, None)._record()

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert n_alone == 2


def test_a_failed_recording_names_the_remedy(monkeypatch):
    def capture(step, memory, device):
        try:
            raise RuntimeError("operation not permitted")
        finally:  # as `torch.cuda.graph` does
            raise RuntimeError("previous error")

    record_on_cpu(monkeypatch, capture)
    monkeypatch.setattr(decode_graph, "_failures", {})
    message = (
        "operation not permitted.*memory of this process may be in an unknown.*again with "
        "TORCHTITAN_CUDA_GRAPHS=0"
    )
    with pytest.raises(UserError, match=message):
        generate(small_model(), [[1]], max_new_tokens=20)
    # Nothing is computed on the memory that the recording left, with or without graphs.
    monkeypatch.setenv(decode_graph.SWITCH, "0")
    for n_tokens in (1, 20):
        with pytest.raises(UserError, match=message):
            generate(small_model(), [[1]], max_new_tokens=n_tokens)


def test_a_failure_on_a_gpu_leaves_the_cpu(monkeypatch):
    monkeypatch.setattr(decode_graph, "_failures", {"cuda": "operation not permitted"})
    (found,) = generate(small_model(), [[1]], max_new_tokens=20)
    assert len(found.ids) == 20


class FromLists(TorchFunctionMode):
    """Counts tensors made from numbers of the host on the device, here meta, which makes no
    copies."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_made = function in (torch.tensor, torch.as_tensor, Tensor.new_tensor)
        self.count += is_made and result.device.type == "meta"
        return result


class HostCopies(TorchDispatchMode):
    """Counts copies between host and device, here meta."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        devices = {
            x.device.type
            for x in tensors_of((args, kwargs, result))
            if x.ndim or x.device.type == "meta"
        }
        self.count += len(devices) > 1
        return result


@torch.no_grad()
def host_copies(model: Any) -> int:
    """Return the number of copies between host and device in a step. Reading values from the meta
    device raises."""
    meta, copies, tensors = torch.device("meta"), HostCopies(), FromLists()

    def capture(step, memory, device):
        with copies, tensors:
            result = step()
        return lambda: result

    model = model.to("meta")
    with KVCache(model, 64) as cache:
        for n in (5, 1):
            positions_BL = torch.arange(n, device="meta").expand(2, n)
            logits_at(model, n - 1, positions_BL, cache.attention(positions_BL))
            cache.advance(n)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(DEVICES, "meta", Device(capture, bucket=16, patience=2))
            shared = decode_graph.Graphs(model, partial(logits_at, model, 0), meta)
            graph = DecodeGraph(shared, cache)
        shapes = []
        for _ in range(4):
            logits_BV = graph.logits(torch.tensor([[1], [2]]), torch.tensor([[6], [6]]))
            shapes.append(None if logits_BV is None else logits_BV.shape[0])
    assert shapes == [None, None, 2, 2]
    return copies.count + tensors.count


def test_a_step_takes_nothing_from_the_host(graphs):
    assert host_copies(small_model()) == 0
    # Models that are refused for this do.
    assert host_copies(long_rope()) > 0
    # Packed weights send the tables of their codes; `unpack` computes nothing on the meta device.
    with HostCopies() as copies:
        tables_of(FewBits("nf4", 64, "linear", "bfloat16"), torch.device("meta"))
    assert copies.count > 0


def test_calls_of_cuda(monkeypatch):
    """PyTorch without CUDA can only check names of arguments and the order of calls."""
    calls = []
    accepts = inspect.signature(torch.cuda.graph).bind

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def entered(name):
        calls.append(name)
        yield
        calls.append(f"end of {name}")

    def graph(*args, **options):
        accepts(*args, **options)
        return entered("graph")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    decode_graph._stream.cache_clear()
    replay = DEVICES["cuda"].capture(
        lambda: calls.append("step") or torch.ones(1), [], torch.device("cuda", 1)
    )
    decode_graph._stream.cache_clear()
    assert replay() is replay()
    outer = "stream of cuda:1"
    assert calls == [outer, "graph", "step", "end of graph", f"end of {outer}", "replay", "replay"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_on_cuda(monkeypatch, dtype):
    graphs, (capture, _, patience) = Graphs(), DEVICES["cuda"]
    counted = Device(lambda *args: graphs.counted(capture(*args)), 32, patience)
    monkeypatch.setitem(DEVICES, "cuda", counted)
    model = small_model().to("cuda", dtype)
    found = generate(model, TINY_PROMPTS, max_new_tokens=40)
    # The steps end at 21 to 59 slots, in buckets of 32 and 62.
    assert (graphs.captures, graphs.replays) == (2, 39 - patience - 2)
    monkeypatch.setenv(decode_graph.SWITCH, "0")
    expected = generate(model, TINY_PROMPTS, max_new_tokens=40)
    for one, other in zip(found, expected, strict=True):
        # bfloat16 has 8 bits; float32 sums in another order. Logits are about 1.
        n, tolerance = (40, 1e-4) if dtype == torch.float32 else (12, 0.05)
        assert one.ids[:n] == other.ids[:n]
        assert one.logprobs[:n] == pytest.approx(other.logprobs[:n], abs=tolerance)
