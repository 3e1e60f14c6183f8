"""The engine: rows that join and leave, shared prompts, several turns, several processes."""

import asyncio
import copy
import dataclasses
import pkgutil
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.components.generation.test_generation import (
    TINY_PROMPTS,
    mixed_model,
    sharded_model,
    small_model,
)
from tests.models.test_delta_net import MixedModel, small_config
from torchtitan import models
from torchtitan.components.generation import (
    Engine,
    Generation,
    KVCache,
    Sampling,
    Session,
    forward,
    plain_loop,
)
from torchtitan.components.generation import batch as batch_module
from torchtitan.components.generation.kept_texts import KeptTexts
from torchtitan.components.generation.sampling import RandomNumbers, draw
from torchtitan.distributed import initialize_weights
from torchtitan.tools.errors import UserError
from torchtitan.tools.torch_private import tree_map

SAMPLING = Sampling(temperature=1.0)
STOP_IDS = set(range(8))
"""A twelfth of the vocabulary, so that texts end at various lengths."""

# A prompt shared by several texts, also beyond the room in the batch.
PROMPTS = [prompt for prompt in TINY_PROMPTS for _ in range(5)]


def hybrid_model() -> MixedModel:
    """Return a model with a recurrent layer."""
    model = MixedModel(small_config()).double()
    initialize_weights(model, 0)
    return model


ALL = range(len(PROMPTS))


def texts_of(engine: Engine, numbers=ALL):
    return [
        engine.generate(PROMPTS[n], max_new_tokens=12 + n % 7, key=f"text {n}") for n in numbers
    ]


def test_an_engine_without_rows_is_an_error():
    with pytest.raises(UserError, match="max_rows is 0, but must be at least 1"):
        Engine(mixed_model(), sampling=SAMPLING, max_rows=0)


def alone(model) -> list[Generation]:
    """Return the texts, each generated in a batch of its own, without cache."""
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, use_cache=False)
    return [engine.run(texts_of(engine, [n]))[0] for n in range(len(PROMPTS))]


def check_equal(found: list[Generation], expected: list[Generation]) -> None:
    assert [text.ids for text in found] == [text.ids for text in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.finish_reason == other.finish_reason
        # Float32 sums in another order, for logits of about 1.
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling()])
def test_a_token_is_read_from_the_device_once(sampling, monkeypatch):
    """On a GPU, each reading waits for the device. Here, host tensors replace the device's."""
    read, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x.dtype) or tolist(x))
    for name in ("cpu", "item", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda x: pytest.fail("read a tensor"))
    engine = Engine(mixed_model(), sampling=sampling)
    engine.run([engine.generate([1, 2, 3], max_new_tokens=6, key="") for _ in range(2)])
    # Boundaries of documents, which are integers, and random numbers are always on the host.
    assert [dtype for dtype in read if dtype == torch.float32] == 6 * [torch.float32]


@pytest.mark.parametrize(
    ("prompts", "kernel"), [([[1, 2], [3, 4]], "causal"), ([[1, 2], [3]], "dense")]
)
def test_prompts_of_one_length_need_no_mask(prompts, kernel, monkeypatch):
    """Other tests compare the texts."""
    attentions, logits_at = [], batch_module.logits_at
    monkeypatch.setattr(
        batch_module,
        "logits_at",
        lambda *args: attentions.append(args[3]) or logits_at(*args),
    )
    engine = Engine(mixed_model(), sampling=SAMPLING)
    engine.run([engine.generate(prompt, max_new_tokens=3, key="") for prompt in prompts])
    assert [attention.kernel for attention in attentions] == [kernel, "dense", "dense"]
    needs_no_mask = kernel == "causal"
    assert [attention.sees_all for attention in attentions] == [False] + 2 * [needs_no_mask]


@pytest.mark.parametrize("max_rows", [1, 3, 7, None])
@pytest.mark.parametrize("make_model", [mixed_model, hybrid_model])
def test_texts_do_not_depend_on_the_batch(make_model, max_rows):
    """Layers with and without windows, and recurrent layers."""
    model = make_model()
    expected = alone(model)
    assert len({len(text.ids) for text in expected}) > 4
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=max_rows)
    check_equal(engine.run(texts_of(engine)), expected)


def test_a_shared_prompt_is_computed_once_and_finished_rows_make_room():
    model, passes = mixed_model(), []
    model.register_forward_pre_hook(lambda module, args: passes.append(tuple(args[0].shape)))
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=3)
    texts = engine.run(texts_of(engine))
    prompts = [shape for shape in passes if shape[1] > 1 or shape[0] > 3]
    # One pass per prompt; the first prompt has a single token, like each later token of three rows.
    assert prompts == [(1, len(prompt)) for prompt in TINY_PROMPTS[1:]]
    n_tokens = sum(len(text.ids) for text in texts)
    n_passes = len(passes) - len(TINY_PROMPTS)
    # The first token of each text needs no pass of its own. Without new rows, groups of three wait
    # for the longest.
    assert (n_tokens - len(texts)) / 3 <= n_passes < 1.25 * n_tokens / 3


def test_several_turns_keep_sampled_tokens():
    model = mixed_model()
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=2)

    async def converse(number: int) -> list[int]:
        tokens = list(TINY_PROMPTS[number])
        for turn in range(number + 1):
            reply = await engine.generate(tokens, max_new_tokens=5, key=f"{number}/{turn}")
            tokens += [*reply.ids, 50 + turn]
        return tokens

    together = engine.run([converse(number) for number in range(4)])
    assert together == [engine.run([converse(number)])[0] for number in range(4)]


LATER = [50, 51, 52]
"""Tokens between two turns."""


def conversations(model, *, is_continued: bool, max_rows: int | None, monkeypatch) -> Any:
    """Return the texts of conversations with up to four turns, and the number of tokens that passed
    through the model."""
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=max_rows)
    n_computed = []
    logits_at = forward.logits_at

    def count(model, index, tokens_BL, *more):
        n_computed.append(tokens_BL.numel())
        return logits_at(model, index, tokens_BL, *more)

    with monkeypatch.context() as patch:
        patch.setattr(batch_module, "logits_at", count)
        texts = [converse(engine, number, is_continued) for number in range(12)]
        return engine.run(texts), sum(n_computed)


async def converse(
    engine: Engine, number: int, is_continued: bool = True, n_tokens: int = 5
) -> list[Generation]:
    """Return the texts of a conversation of up to four turns."""
    tokens = list(range(10 + number, 60))
    replies = []
    for turn in range(1 + number % 4):
        reply = await engine.generate(
            tokens, max_new_tokens=n_tokens, key=f"{number}/{turn}", is_continued=is_continued
        )
        tokens += [*reply.ids, *LATER[: 1 + number % 3]]
        replies.append(reply)
    return replies


@pytest.mark.parametrize("max_rows", [1, 5, None])
@pytest.mark.parametrize("make_model", [small_model, mixed_model, hybrid_model])
def test_later_turns_start_from_kept_keys(make_model, max_rows, monkeypatch):
    """They give the same texts, and compute fewer tokens, also with layers with a window, which the
    first texts exceed, or a state."""
    model = make_model()
    options = {"max_rows": max_rows, "monkeypatch": monkeypatch}
    expected, n_whole = conversations(model, is_continued=False, **options)
    found, n_rest = conversations(model, is_continued=True, **options)
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other)
    # 12 first prompts of 39 to 50 tokens; each of 18 later turns computes at most 8 new ones
    assert n_rest < 0.65 * n_whole


@pytest.mark.parametrize("make_model", [small_model, hybrid_model])
def test_kept_keys_are_not_those_of_other_tokens(make_model, monkeypatch):
    """The test above can fail: keys or states of another text give other log-probabilities."""
    model = make_model()
    options = {"max_rows": None, "monkeypatch": monkeypatch}
    expected, _ = conversations(model, is_continued=True, **options)
    keep = KeptTexts.keep

    def keep_another(self, tokens, *row):
        keep(self, tokens, *row)
        cache = self._caches[tokens]
        for _, keys, _ in () if cache.states else cache._stored.values():
            keys.mul_(-2)
        tree_map(lambda state: state.mul_(-2), [*cache.states.values()])

    monkeypatch.setattr(KeptTexts, "keep", keep_another)
    found, _ = conversations(model, is_continued=True, **options)
    check_equal(found[0], expected[0])  # a single turn
    assert found[3][1].logprobs != pytest.approx(expected[3][1].logprobs, abs=1e-4)


def recurrent_flavors() -> list[str]:
    """Return family and flavor of each small model with recurrent layers."""
    found = []
    for _, family, is_package in pkgutil.iter_modules(models.__path__):
        module = import_module(f"torchtitan.models.{family}") if is_package else None
        for flavor, config in getattr(module, "FLAVORS", {}).items():
            if flavor.endswith("debugmodel") and hasattr(config, "mixers"):
                found.append(f"{family}:{flavor}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", recurrent_flavors())
def test_later_turns_start_from_kept_states(name):
    """In all families with recurrent layers."""
    family, flavor = name.split(":")
    config = import_module(f"torchtitan.models.{family}").FLAVORS[flavor]
    model = dataclasses.replace(config, vocab_size=97, max_seq_len=96).build()
    if not hasattr(config, "moe"):  # products of experts have no float64
        model = model.double()
    initialize_weights(model, 0)
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=2)
    numbers = (2, 3, 7)
    expected, found = (
        engine.run([converse(engine, number, is_continued) for number in numbers])
        for is_continued in (False, True)
    )
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other)
        assert all(text.n_reused for text in one[1:])


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
@pytest.mark.parametrize("make_model", [small_model, hybrid_model])
def test_a_prompt_that_is_a_kept_text_is_computed(make_model, prompt):
    """The logits after a kept text are not kept, only what its tokens leave in the cache."""
    engine = Engine(make_model(), sampling=SAMPLING)

    async def twice(is_continued: bool) -> Generation:
        await engine.generate(prompt, max_new_tokens=1, key="0", is_continued=is_continued)
        return await engine.generate(prompt, max_new_tokens=3, key="1")

    [expected], [found] = (engine.run([twice(is_continued)]) for is_continued in (False, True))
    check_equal([found], [expected])
    assert found.n_reused == 0


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("make_model", [small_model, mixed_model])
def test_turns_of_split_sequences(make_model, use_cache, monkeypatch):
    """A pass computes an even number of tokens, also after texts that exceed a window, whose earlier
    tokens cannot be computed again."""
    module = import_module("torchtitan.components.generation.engine")
    expected = Engine(make_model(), sampling=SAMPLING, stop_ids=STOP_IDS)
    monkeypatch.setattr(module, "sequence_splits", lambda model: 2)
    engine = Engine(make_model(), sampling=SAMPLING, stop_ids=STOP_IDS, use_cache=use_cache)
    turns = [each.run([converse(each, n) for n in (1, 2, 3)]) for each in (engine, expected)]
    for one, other in zip(*turns, strict=True):
        check_equal(one, other)
        assert all((text.n_reused > 0) == use_cache for text in one[1:])


def test_two_texts_continue_one():
    """The text is computed once, or again if the other has started before."""
    engine = Engine(small_model(), sampling=SAMPLING, max_rows=4)
    prompt = list(range(40))

    async def branch() -> list[Generation]:
        first = await engine.generate(prompt, max_new_tokens=4, key="", is_continued=True)
        tokens = [*prompt, *first.ids]
        ends = [[60], [61, 62], [61, 62]]
        return await asyncio.gather(
            *(engine.generate([*tokens, *end], max_new_tokens=4, key="b") for end in ends)
        )

    found = engine.run([branch()])[0]
    plain = Engine(small_model(), sampling=SAMPLING, use_cache=False)
    first = plain.run([plain.generate(prompt, max_new_tokens=4, key="")])[0]
    tokens = [*prompt, *first.ids]
    texts = [
        plain.generate([*tokens, *end], max_new_tokens=4, key="b")
        for end in ([60], [61, 62], [61, 62])
    ]
    check_equal(found, plain.run(texts))


def test_a_text_that_is_kept_again_is_the_newest():
    model = small_model()
    kept = KeptTexts(model, most=2, degree=1)
    for tokens in ((1, 2), (3, 4), (1, 2), (5, 6)):
        kept.keep(tokens, KVCache(model, 0), 0)
    assert kept.beginning_of((1, 2, 9)) == (1, 2)
    assert kept.beginning_of((3, 4, 9)) is None


def test_the_newest_texts_are_kept():
    model = small_model()
    kept = KeptTexts(model, most=2, degree=1)
    for tokens in ((1, 2), (1, 2, 3), (4, 5)):
        kept.keep(tokens, KVCache(model, 0), 0)
    assert kept.beginning_of((1, 2, 9)) is None
    assert kept.beginning_of((1, 2, 3, 9)) == (1, 2, 3)
    assert kept.beginning_of((4, 5, 6, 7)) == (4, 5)
    assert kept.beginning_of((4, 5, 6, 7, 8)) is None  # less than half of the prompt
    kept.drop([(4, 5)])
    assert kept.beginning_of((4, 5, 6)) is None


def test_an_asyncio_program_runs_the_engine_in_a_thread():
    """A task that awaits a text itself gets an error, where asyncio's own would never return."""
    engine = Engine(mixed_model(), sampling=SAMPLING, stop_ids=STOP_IDS)
    expected = engine.run(texts_of(engine, [0, 5]))

    async def program() -> list[Generation]:
        with pytest.raises(
            UserError, match=r"only in coroutines that the same engine runs.*asyncio\.to_thread"
        ):
            await asyncio.wait_for(texts_of(engine, [0])[0], timeout=60)
        return await asyncio.to_thread(engine.run, texts_of(engine, [0, 5]))

    check_equal(asyncio.run(program()), expected)


async def awaits_another_engine(engine: Engine) -> None:
    other = Engine(mixed_model(), sampling=SAMPLING)
    await other.generate([1], max_new_tokens=1, key="")


async def runs_the_engine(engine: Engine) -> None:
    engine.run(texts_of(engine, [0]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (awaits_another_engine, "only in coroutines that the same engine runs"),
        (runs_the_engine, "already running"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'Engine.generate' was never awaited")
def test_a_wrong_use_of_the_engine_is_an_error(text, message):
    engine = Engine(mixed_model(), sampling=SAMPLING)
    with pytest.raises(UserError, match=message):
        engine.run([text(engine)])
    with pytest.raises(UserError, match="takes a list of coroutines"):
        engine.run([text])
    assert engine.run(texts_of(engine, [0]))  # the engine is still usable


def test_failed_cleanup_leaves_the_engine_usable(caplog):
    """The coroutines that an error ends are all canceled, and the first error is raised."""
    engine = Engine(mixed_model(), sampling=SAMPLING)
    closed = []

    async def fails(error: Exception) -> None:
        raise error

    async def cleans_up(number: int) -> None:
        try:
            await engine.generate(PROMPTS[0], max_new_tokens=90, key="")
        finally:
            with pytest.raises(UserError, match="only in coroutines"):
                await engine.generate(PROMPTS[0], max_new_tokens=1, key="")
            closed.append(number)
            await fails(OSError(f"cleanup {number}"))

    with pytest.raises(ValueError, match="no reward"):
        engine.run([fails(ValueError("no reward")), cleans_up(1), cleans_up(2)])
    assert sorted(closed) == [1, 2]
    assert "cleanup 1" in caplog.text and "cleanup 2" in caplog.text
    assert engine.run(texts_of(engine, [0]))


def test_coroutines_await_anything():
    """Tools in threads and in asyncio, texts at the same time, and one that is given up."""
    model = mixed_model()
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=2)

    async def both() -> list[Generation]:
        await asyncio.sleep(0.01)
        first, second = await asyncio.gather(*texts_of(engine, [0, 7]))
        return [first, await asyncio.to_thread(lambda: second)]

    async def later() -> list[Generation]:
        with pytest.raises(TimeoutError):
            long = engine.generate([50], max_new_tokens=90, key="no stop")
            await asyncio.wait_for(long, timeout=0.001)
        return [await asyncio.create_task(texts_of(engine, [3])[0])]

    found = engine.run([both(), later(), *[asyncio.sleep(0.2, []) for _ in range(1000)]])
    check_equal([*found[0], *found[1]], [alone(model)[n] for n in (0, 7, 3)])


def test_texts_of_a_session_continue_with_new_weights():
    """Between two calls, nothing runs; then all tokens are computed again. The cache of the old
    weights would give other log-probabilities."""
    model = mixed_model()
    engine = Engine(model, sampling=SAMPLING)
    with Session(engine) as session:
        (long,) = session.start([engine.generate([50, 51], max_new_tokens=8, key="long")])
        session.finish(session.start([engine.generate([1, 2], max_new_tokens=3, key="short")]))
        assert not long.done()
        old = logprobs_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        (text,) = session.finish([long])
    tokens = [50, 51, *text.ids]
    assert text.logprobs[:3] == pytest.approx(old(tokens)[:3], abs=1e-5)
    new = logprobs_of(model)(tokens)
    assert text.logprobs[3:] == pytest.approx(new[3:], abs=1e-5)
    assert text.logprobs[:3] != pytest.approx(new[:3], abs=1e-2)


def logprobs_of(model):
    """Return a function that computes the log-probabilities after the first two tokens by one
    forward pass of a copy of a model."""
    model = copy.deepcopy(model).eval()

    def compute(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            rows = model(torch.tensor([tokens]))[0].float().log_softmax(dim=-1)
        return rows[1:-1].gather(1, torch.tensor(tokens[2:])[:, None])[:, 0].tolist()

    return compute


MIXED_SAMPLING = [
    SAMPLING,
    Sampling(),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.5, min_p=0.2),
]


def test_texts_of_a_batch_have_their_own_settings():
    model = mixed_model()

    def texts(engine: Engine, numbers):
        return [
            engine.generate(
                PROMPTS[n],
                max_new_tokens=8 + n % 5,
                key=str(n),
                sampling=MIXED_SAMPLING[n % 4],
                n_top=n % 3,
            )
            for n in numbers
        ]

    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=7)
    together = engine.run(texts(engine, ALL))
    check_equal(together, [engine.run(texts(engine, [n]))[0] for n in ALL])
    for n, text in enumerate(together):
        rows = torch.tensor([[*PROMPTS[n], *text.ids]])
        logprobs = model(rows)[0, len(PROMPTS[n]) - 1 : -1].log_softmax(-1)
        for place, top in enumerate(text.top_logprobs):
            expected = logprobs[place].topk(n % 3)
            assert [token for token, _ in top] == expected.indices.tolist()
            # float32 sums in another order
            found = torch.tensor([logprob for _, logprob in top])
            torch.testing.assert_close(found, expected.values.float(), rtol=1e-5, atol=1e-5)
        assert len(text.top_logprobs) == (len(text.ids) if n % 3 else 0)


@pytest.mark.parametrize(
    ("make_model", "growth"),
    [(mixed_model, 2), (hybrid_model, 2), (small_model, 2), (small_model, 16)],
)
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("max_rows", [4, None])
def test_texts_arrive_between_tokens(make_model, growth, max_rows, use_cache, monkeypatch):
    """The cache grows by a few slots at a time. Without a limit of rows, all are free."""
    monkeypatch.setattr(plain_loop, "_GROWTH", growth)
    model = make_model()
    engine = Engine(
        model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=max_rows, use_cache=use_cache
    )
    waiting = list(enumerate(texts_of(engine)))
    found: dict[int, Generation] = {}
    n_calls = 0

    async def keep(number, text) -> None:
        found[number] = await text

    def arrivals(n_free):
        nonlocal n_calls
        n_calls += 1
        assert n_calls < 1000
        if not waiting and len(found) == len(PROMPTS):
            return None
        n_new = min(n_free, len(waiting), 1 + n_calls % 2)
        return [keep(*waiting.pop(0)) for _ in range(n_new)]

    engine.serve(arrivals)
    check_equal([found[n] for n in ALL], alone(model))


def test_serving_ends_with_an_error():
    engine = Engine(mixed_model(), sampling=SAMPLING)
    closed = []

    async def wait() -> None:
        try:
            await engine.generate([1], max_new_tokens=90, key="")
        finally:
            closed.append(True)

    async def fail() -> None:
        await engine.generate([1], max_new_tokens=2, key="")
        raise ValueError("no more")

    texts = [[wait(), fail()]]
    with pytest.raises(ValueError, match="no more"):
        engine.serve(lambda n_free: texts.pop() if texts else [])
    assert closed == [True]
    assert engine.run(texts_of(engine, [0]))  # the engine is still usable


def test_none_closes_texts_that_are_served():
    engine = Engine(mixed_model(), sampling=SAMPLING)
    ended = []

    async def wait(n_tokens) -> None:
        try:
            await engine.generate([1], max_new_tokens=n_tokens, key="")
            ended.append("finished")
        finally:
            ended.append(n_tokens)

    answers = iter([[wait(2), wait(90)], [], [], None])
    engine.serve(lambda n_free: next(answers))
    assert ended == ["finished", 2, 90]


def test_a_boundary_of_the_distribution_decides():
    """The token is the one at the drawn number in the cumulative distribution."""
    logits_BV = torch.randn(64, 30, generator=torch.Generator().manual_seed(0))
    keys = [str(row) for row in range(64)]
    found = draw(logits_BV, SAMPLING, [RandomNumbers(key) for key in keys])
    for row, key in enumerate(keys):
        generator = torch.Generator().manual_seed(RandomNumbers(key).seed)
        place = torch.rand(1, generator=generator, dtype=torch.float64)
        assert found[row] == int((logits_BV[row].double().softmax(-1).cumsum(-1) <= place).sum())


def test_numbers_drawn_together_are_those_drawn_one_by_one():
    numbers = RandomNumbers("a key")
    generator = torch.Generator().manual_seed(numbers.seed)
    one_by_one = [torch.rand(1, generator=generator, dtype=torch.float64) for _ in range(70)]
    assert [next(numbers) for _ in range(70)] == torch.cat(one_by_one).tolist()


def sharded_texts(layout: str, expected: list[Generation]) -> None:
    rank, model = dist.get_rank(), sharded_model(layout)
    # Under FSDP, rank 1 has fewer texts; then none.
    for mine in (
        ([range(14), range(14, 20)], [range(20), range(0)])
        if layout == "fsdp"
        else [[range(20)] * 2]
    ):
        engine = Engine(
            model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=3, group=dist.group.WORLD
        )
        check_equal(engine.run(texts_of(engine, mine[rank])), [expected[n] for n in mine[rank]])
    if layout == "fsdp":

        async def fail() -> None:
            raise UserError("no reward")

        with pytest.raises(UserError, match="no reward"):  # on both ranks
            engine.run([fail()] if rank else texts_of(engine))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_sharded_models_generate_the_same_texts(workers, layout):
    workers.run(sharded_texts, layout, alone(mixed_model()))


def sharded_conversations(layout: str, make_model: Any, expected: list[list[Generation]]) -> None:
    model = sharded_model(layout, make_model)
    engine = Engine(model, sampling=SAMPLING, stop_ids=STOP_IDS, max_rows=3, group=dist.group.WORLD)
    # Under FSDP, each rank has conversations of other numbers of turns.
    numbers = range(dist.get_rank(), 8, 3) if layout == "fsdp" else range(8)
    extend = batch_module.Batch._extend_texts
    extended = []

    def counted(self, beginnings):
        extended.extend(beginnings)
        return extend(self, beginnings)

    with mock.patch.object(batch_module.Batch, "_extend_texts", counted):
        conversations = engine.run([converse(engine, number) for number in numbers])
    for found, number in zip(conversations, numbers, strict=True):
        check_equal(found, expected[number])
    assert len(extended) == sum(len(expected[number]) - 1 for number in numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "make_model"), [("fsdp", small_model), ("tp", small_model), ("tp", mixed_model)]
)
def test_sharded_models_continue_kept_texts(workers, layout, make_model):
    engine = Engine(make_model(), sampling=SAMPLING, stop_ids=STOP_IDS, use_cache=False)
    expected = [engine.run([converse(engine, number)])[0] for number in range(8)]
    workers.run(sharded_conversations, layout, make_model, expected)


def test_reused_tokens_are_counted():
    """The last token of a kept text has no keys yet. A row with fewer new tokens than another of
    its pass computes some kept ones again."""
    engine = Engine(small_model(), sampling=SAMPLING)
    alone_, *others = engine.run([converse(engine, 1), converse(engine, 2), converse(engine, 3)])
    first, second = alone_
    assert first.n_reused == 0
    n_before = len(range(11, 60)) + len(first.ids) - 1
    n_longest = 1 + len(LATER[:3])  # of the texts that continue in the same pass
    assert n_before - n_longest < second.n_reused <= n_before
    single = Engine(small_model(), sampling=SAMPLING)
    first, second = single.run([converse(single, 1)])[0]
    assert second.n_reused == len(range(11, 60)) + len(first.ids) - 1
    plain = Engine(small_model(), sampling=SAMPLING)
    assert [text.n_reused for text in plain.run([converse(plain, 1, False)])[0]] == [0, 0]
