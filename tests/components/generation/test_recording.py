"""Recordings of decoding on the CPU, compared with the modules' own operations, bit by bit."""

import contextlib
import gc
import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.components.generation.test_decode_graph import long_rope, record_on_cpu
from tests.components.generation.test_engine import (
    ALL,
    SAMPLING,
    STOP_IDS,
    alone,
    check_equal,
    hybrid_model,
    texts_of,
)
from tests.components.generation.test_generation import TINY_PROMPTS, mixed_model
from tests.components.peft.test_lora import adapted_model, randomize
from tests.models.family_cases import CASES, family_of, random_reference, to_ours
from tests.models.test_llama3 import VARIANTS, small_model, windowed_model
from torchtitan.components.generation import (
    Engine,
    Generation,
    Sampling,
    decode_graph,
    generate,
    recording,
)
from torchtitan.components.generation.decode_graph import DEVICES
from torchtitan.components.generation.kv_cache import KVCache
from torchtitan.components.generation.recording import NotRecordable, Recording
from torchtitan.components.generation.session import Session
from torchtitan.components.peft.lora import LoRALinear
from torchtitan.distributed.mixed_precision import MixedPrecision

CAPTURE = DEVICES["cpu"].capture


class Recordings:
    """Makes recordings, and counts their calls."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.made: list[Recording] = []

    def __call__(self, step, memory, device):
        self.made.append(CAPTURE(step, memory, device))
        return self.made[-1]


@pytest.fixture
def recordings(monkeypatch) -> Recordings:
    """Record steps after 2 steps of a batch, with buckets of 16 slots."""
    recordings = Recordings()
    record_on_cpu(monkeypatch, recordings, keeps=True)
    call = Recording.__call__

    def counting_call(recorded) -> Tensor:
        recordings.n_calls += 1
        return call(recorded)

    monkeypatch.setattr(Recording, "__call__", counting_call)
    return recordings


def both_ways(recordings, monkeypatch, make_texts) -> tuple[list[Generation], list[Generation]]:
    """Return texts with recordings, and with the same steps computed by the modules."""
    recorded = make_texts()
    if recordings.made:
        record_on_cpu(monkeypatch, lambda step, memory, device: step, keeps=True)
    else:
        monkeypatch.setenv(decode_graph.SWITCH, "0")
    return recorded, make_texts()


def check_bits(recorded, computed) -> None:
    assert [text.ids for text in recorded] == [text.ids for text in computed]
    assert [text.logprobs for text in recorded] == [text.logprobs for text in computed]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_recording_gives_the_same_bits(recordings, monkeypatch, variant):
    model = small_model(**VARIANTS[variant])
    check_bits(
        *both_ways(
            recordings, monkeypatch, lambda: generate(model, TINY_PROMPTS, max_new_tokens=40)
        )
    )
    # see `test_decode_graph.test_greedy_texts_equal_transformers`
    assert (len(recordings.made), recordings.n_calls) == (3, 39 - 2 - 3)


def test_sampled_texts_that_join_and_leave(recordings, monkeypatch):
    model = small_model()

    def texts() -> list[Generation]:
        engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=3)
        return engine.run(texts_of(engine))

    check_bits(*both_ways(recordings, monkeypatch, texts))
    assert recordings.n_calls > len(recordings.made) > 1


def serve(engine: Engine, numbers: Sequence[int]) -> list[Generation]:
    """Return texts of which two join the batch at a time."""
    waiting, found = list(numbers), {}

    async def keep(number) -> None:
        found[number] = await texts_of(engine, [number])[0]

    def arrivals(n_free):
        if len(found) == len(numbers):
            return None
        return [keep(waiting.pop(0)) for _ in range(min(2, n_free, len(waiting)))]

    engine.serve(arrivals)
    return [found[n] for n in numbers]


def kept_bytes(engine: Engine) -> int:
    """Return the memory of caches and results that an engine keeps."""
    shapes = list(engine._shapes._by_size.values())
    steps = [step for shape in shapes for step in shape.recorded.by_keys.values()]
    tensors = [
        *(x for shape in shapes for x in shape.memory._tensors.values()),
        *(x for step in steps for x in step._memory),
    ]
    assert tensors and steps
    return sum(x.untyped_storage().nbytes() for x in tensors)


def test_later_batches_repeat_kept_recordings(recordings):
    """Between two batches, nothing has memory."""
    model = small_model()
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=4)
    first = serve(engine, ALL)
    n_made, n_calls = len(recordings.made), recordings.n_calls
    assert n_made and kept_bytes(engine) == 0
    check_bits(serve(engine, ALL), first)
    assert len(recordings.made) == n_made
    # The steps before the first recording are recorded ones now.
    assert recordings.n_calls - n_calls > n_calls
    assert kept_bytes(engine) == 0
    for weight in model.parameters():
        weight.data.mul_(1.25)  # in place, as a trainer changes them
    changed = serve(engine, ALL)
    check_equal(changed, alone(model))
    assert [text.ids for text in changed] != [text.ids for text in first]


def test_a_common_size_gets_more_recordings(recordings, monkeypatch):
    """They attend to fewer unused slots."""
    monkeypatch.setitem(DEVICES, "cpu", DEVICES["cpu"]._replace(bucket=64))
    engine = Engine(small_model(), sampling=Sampling(), max_rows=1)
    texts = []
    for _ in range(decode_graph._COMMON):
        texts += serve(engine, [0])
        assert len(recordings.made) == 1
    texts += serve(engine, [0])
    assert [text.ids for text in texts] == 4 * [texts[0].ids]
    (shape,) = engine._shapes._by_size.values()
    assert sorted(shape.recorded.by_keys) == [16, 64]


def test_a_weight_that_is_replaced_is_read(recordings):
    model = small_model()
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=4)
    serve(engine, ALL)
    n_made = len(recordings.made)
    model.head.output.weight = torch.nn.Parameter(2 * model.head.output.weight)
    check_equal(serve(engine, ALL), alone(model))
    assert len(recordings.made) > n_made


def test_nothing_is_kept_after_an_error(recordings, monkeypatch):
    model = small_model()
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=4)
    serve(engine, ALL)
    replayed = recordings.n_calls
    call = Recording.__call__

    def fail(recorded) -> Tensor:
        if recordings.n_calls > replayed + 2:
            call(recorded).fill_(torch.nan)
            raise MemoryError
        return call(recorded)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Recording, "__call__", fail)
        serve(engine, ALL)
    assert not engine._shapes._by_size
    check_equal(serve(engine, ALL), alone(model))


def test_rows_take_the_places_of_finished_ones(recordings, monkeypatch):
    """Only their own keys are written then."""
    model = small_model()
    assembled, replaced = [], []
    assemble, replace_rows = KVCache.assemble, KVCache.replace_rows
    monkeypatch.setattr(
        KVCache, "assemble", lambda self, *args: assembled.append(1) or assemble(self, *args)
    )
    monkeypatch.setattr(
        KVCache,
        "replace_rows",
        lambda self, places, *args: replaced.append(places) or replace_rows(self, places, *args),
    )
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=4)
    check_equal(serve(engine, ALL), alone(model))
    assert len(replaced) >= 2 and len(assembled) <= len(ALL)


def test_changed_adapters(recordings, monkeypatch):
    model = adapted_model()
    randomize(model)

    def texts() -> list[Generation]:
        return generate(model, TINY_PROMPTS, max_new_tokens=30)

    first = texts()
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            layer.lora_B = torch.nn.Parameter(2 * layer.lora_B)
    recorded, computed = both_ways(recordings, monkeypatch, texts)
    check_bits(recorded, computed)
    assert recordings.n_calls > 20
    assert [text.ids for text in recorded] != [text.ids for text in first]


def test_weights_change_while_a_text_is_written(recordings, monkeypatch):
    model = small_model()

    def texts() -> list[Generation]:
        torch.manual_seed(0)
        seen = []

        def change(row: int, token: int) -> bool:
            seen.append(token)
            if len(seen) == 24:
                for weight in model.parameters():
                    weight.add_(0.02 * torch.randn_like(weight))
            return False

        before = [weight.clone() for weight in model.parameters()]
        found = generate(model, [[5]], max_new_tokens=40, on_token=change)
        for weight, value in zip(model.parameters(), before, strict=True):
            weight.data.copy_(value)
        return found

    unchanged = generate(model, [[5]], max_new_tokens=40)
    recorded, computed = both_ways(recordings, monkeypatch, texts)
    check_bits(recorded, computed)
    assert recordings.n_calls > 20
    assert recorded[0].ids[:24] == unchanged[0].ids[:24]
    assert recorded[0].logprobs[24:] != unchanged[0].logprobs[24:]


@pytest.mark.parametrize("in_context", [True, False])
def test_bfloat16(recordings, monkeypatch, in_context):
    model = small_model()
    with (
        MixedPrecision(torch.bfloat16).of(model)
        if in_context
        else contextlib.nullcontext(model.bfloat16())
    ):
        check_bits(
            *both_ways(
                recordings, monkeypatch, lambda: generate(model, TINY_PROMPTS, max_new_tokens=20)
            )
        )
    assert recordings.made


def test_copies_of_weights_that_come_later(recordings, monkeypatch):
    """In rollouts that run ahead, each step computes with copies."""
    model, precision = small_model(), MixedPrecision(torch.bfloat16)

    def texts() -> list[Generation]:
        engine = Engine(model, sampling=SAMPLING)
        with Session(engine) as session:
            tasks = session.start([engine.generate([5], max_new_tokens=20, key="0")])
            with precision.of(model):
                return session.finish(tasks)

    check_bits(*both_ways(recordings, monkeypatch, texts))
    assert recordings.made


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_family_gives_the_same_bits(recordings, monkeypatch, name):
    """With recordings, and without if a step is not recordable."""
    model, _ = to_ours(family_of(name), random_reference(name, 0))
    check_bits(
        *both_ways(
            recordings, monkeypatch, lambda: generate(model, TINY_PROMPTS[1:], max_new_tokens=24)
        )
    )
    if name in ("llama", "gemma", "olmo2", "granite"):
        assert recordings.n_calls > 10


@pytest.mark.parametrize("make", [windowed_model, mixed_model, hybrid_model, long_rope])
def test_models_that_are_not_recorded(recordings, monkeypatch, make):
    model = make()
    check_bits(
        *both_ways(recordings, monkeypatch, lambda: generate(model, [[5]], max_new_tokens=24))
    )
    assert not recordings.made


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    """A vector and a matrix."""
    torch.manual_seed(0)
    return torch.randn(4), torch.randn(4, 4)


def check_repeated(step, inputs, results: int) -> Recording:
    """Compare a recording with its step for other inputs."""
    recorded = Recording(step, inputs)
    for _ in range(results):
        assert torch.equal(recorded(), step())
        inputs[0].normal_()
    return recorded


@torch.no_grad()
def test_operations_with_several_results_views_and_numbers(inputs):
    x_D, weight_DD = inputs

    def step() -> Tensor:
        ends_D = torch.arange(4).flip(0) * torch.tensor(2)
        totals_D = torch.zeros(4).index_add_(0, ends_D // 2, (x_D[None] @ weight_DD)[0])
        largest, places = totals_D.topk(2)
        first, second = totals_D.split(2)
        mixed_D = torch.cat((first * largest, second + places.float()))
        return (mixed_D[None].T.square().clone() + int(ends_D[0])).to(torch.float64)

    recorded = check_repeated(step, inputs, results=5)
    assert all("arange" not in function.__name__ for function, *_ in recorded._program)


@torch.no_grad()
def test_memory_of_results_is_used_again(inputs):
    x_D, weight_DD = inputs

    def step() -> Tensor:
        y_DD = weight_DD
        for _ in range(100):
            y_DD = torch.tanh(y_DD * x_D)
        return y_DD

    recorded = check_repeated(step, inputs, results=3)
    assert recorded.n_bytes <= 3 * weight_DD.nbytes


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x, _: x * x.sum().item(), "_local_scalar_dense.* tells the host"),
        (lambda x, _: x * float(x[0]), "tells the host"),
        (lambda x, _: x * 2 if x[0] > 0 else x * 3, "tells the host"),
        (lambda x, _: x[x > 0] + 1, "tells the host"),
        (lambda x, _: x.nonzero() + 1, "tells the host"),
        (lambda x, _: x * sum(x.tolist()), "reads values by tolist"),
        (lambda x, _: x * float(x.numpy().sum()), "reads values by numpy"),
        (lambda x, _: x * torch.rand(4), "may depend on more"),
        (lambda x, _: torch.dropout(x, 0.5, True), "may depend on more"),
        (lambda x, y: x + y.add_(1)[0], "changes weights or inputs"),
        (lambda x, y: y[0].copy_(x) + 1, "changes weights or inputs"),
        (lambda x, _: (x + 1).unsqueeze_(0) * 2, "changes the shape"),
        (lambda x, _: x + OTHER, "from outside of the step"),
    ],
)
@torch.no_grad()
def test_steps_that_are_refused(inputs, step, reason):
    before = [x.clone() for x in inputs]
    with pytest.raises(NotRecordable, match=reason):
        Recording(lambda: step(*inputs), inputs)
    for x, value in zip(inputs, before, strict=True):
        assert torch.equal(x, value)


OTHER = torch.ones(4)


@torch.no_grad()
def test_results_that_take_much_memory_are_refused(inputs, monkeypatch):
    monkeypatch.setattr(recording, "MOST_BYTES", 1000)
    with pytest.raises(NotRecordable, match="more than 1,000 bytes"):
        Recording(lambda: torch.tanh(inputs[0].repeat(300)), inputs)


@torch.no_grad()
def test_a_number_that_changes_is_noticed(inputs):
    numbers = itertools.count()
    recorded = Recording(lambda: inputs[0] + next(numbers), inputs)
    recorded()
    with pytest.raises(NotRecordable, match="another result"):
        recorded()


@torch.no_grad()
def test_a_number_that_is_written_is_noticed_at_once(inputs):
    """Repeated operations would find the number that the last ones have left."""
    with pytest.raises(NotRecordable, match="another result"):
        Recording(lambda: torch.tensor(2.0).add_(inputs[0].sum()) * inputs[0], inputs)


@pytest.mark.parametrize("n_equal", [0, 1])
def test_a_text_whose_recording_is_wrong_is_computed(recordings, monkeypatch, n_equal):
    """The recording is compared with its step, and the second call, which has other inputs."""
    model, equal = small_model(), torch.equal
    expected = generate(model, [[5]], max_new_tokens=24, use_cache=False)
    checks = itertools.count()

    def is_equal(one: Tensor, other: Tensor) -> bool:
        return next(checks) < n_equal if one.is_floating_point() else equal(one, other)

    monkeypatch.setattr(torch, "equal", is_equal)
    found = generate(model, [[5]], max_new_tokens=24)
    assert found[0].ids == expected[0].ids
    assert (len(recordings.made), recordings.n_calls) == (n_equal, 2 * n_equal)


def test_a_text_with_a_call_that_cannot_be_repeated_is_computed(recordings, monkeypatch):
    """PyTorch's function does not take the arguments of the operation of the same name."""
    model, function = small_model(), recording._function

    def refuse(*args, **kwargs) -> None:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(
        recording,
        "_function",
        lambda operation: refuse if "embedding" in str(operation) else function(operation),
    )
    expected = generate(model, [[5]], max_new_tokens=24, use_cache=False)
    found = generate(model, [[5]], max_new_tokens=24)
    assert found[0].ids == expected[0].ids
    assert not recordings.made


def test_few_rows_share_a_recording_for_more_slots(monkeypatch):
    made = Recordings()
    monkeypatch.setitem(DEVICES, "cpu", DEVICES["cpu"]._replace(capture=made, n_unused=64))
    model = small_model(max_seq_len=256)
    for n_rows, n_made in ((1, 3), (2, 3), (4, 3)):
        generate(model, n_rows * [[5]], max_new_tokens=150)
        assert len(made.made) == n_made, n_rows
        made.made.clear()
    monkeypatch.setitem(DEVICES, "cpu", DEVICES["cpu"]._replace(n_unused=256))
    generate(model, [[5]], max_new_tokens=150)
    assert len(made.made) == 1


def test_recordings_are_freed_with_their_batch(monkeypatch):
    """Without the garbage collector, since they hold the memory of the cache."""
    made = []

    def capture(step, memory, device):
        recorded = CAPTURE(step, memory, device)
        made.append(weakref.ref(recorded))
        return recorded

    record_on_cpu(monkeypatch, capture, keeps=True)
    gc.disable()
    try:
        generate(small_model(), TINY_PROMPTS, max_new_tokens=40)
        assert len(made) == 3
        assert not any(one() for one in made)
    finally:
        gc.enable()
