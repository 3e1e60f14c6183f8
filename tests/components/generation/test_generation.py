"""Generation, compared with transformers and with definitions."""

import importlib
import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.models.test_llama3 import (
    VARIANTS,
    reference_of,
    small_config,
    small_model,
    windowed_model,
)
from torchtitan.components.generation import (
    KVCache,
    Sampling,
    TextStream,
    generate,
    start_id,
    stop_ids,
)
from torchtitan.components.generation.kv_cache import CachedAttention
from torchtitan.components.generation.sampling import RandomNumbers, draw, restricted_logits
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.distributed.context_parallel import apply_context_parallel
from torchtitan.distributed.mixed_precision import MixedPrecision
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.parallelize import parallelize_model
from torchtitan.models.common.attention import with_kernel
from torchtitan.models.llama3 import SHARDING
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

BOS = 1
TINY_PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3], list(range(20, 40)), [1, 2]]
"""Prompts for models with 97 tokens."""


@pytest.fixture(scope="module")
def story_prompts(stories_tokenizer):
    texts = ["", "Once upon a time", "Lily", "Tom and his dog went to the park. They saw a"]
    return [stories_tokenizer.encode(text) for text in texts]


def ids_of(generations):
    return [generation.ids for generation in generations]


def reference_ids(reference, prompts, new_tokens):
    """Return greedy continuations of transformers, one prompt at a time, without stop tokens."""
    reference.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


# Greedy decoding.


@pytest.mark.parametrize("use_cache", [True, False])
def test_stories_model_generates_the_published_text(
    stories_model, stories_tokenizer, assets, use_cache
):
    """llama2.c counts forward passes, including the pass of BOS: 200 steps are 200 new tokens."""
    stream = TextStream(stories_tokenizer, [BOS])
    [generation] = generate(
        stories_model,
        [[BOS]],
        max_new_tokens=200,
        use_cache=use_cache,
        on_token=lambda _, token: stream.push(token) is None,
    )
    stream.finish()
    assert stream.text == (assets / "stories260K" / "expected_greedy_200steps.txt").read_text()
    assert generation.finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_batch_of_ragged_prompts_equals_transformers(
    stories_model, stories, story_prompts, use_cache
):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    generations = generate(stories_model, story_prompts, max_new_tokens=60, use_cache=use_cache)
    assert ids_of(generations) == reference_ids(reference, story_prompts, 60)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_models_equal_transformers(variant):
    model = small_model(**VARIANTS[variant])
    reference, _ = reference_of(model)
    expected = reference_ids(reference, TINY_PROMPTS, 24)
    assert len({tuple(ids) for ids in expected}) == len(expected)
    for use_cache in (True, False):
        assert (
            ids_of(generate(model, TINY_PROMPTS, max_new_tokens=24, use_cache=use_cache))
            == expected
        )


@pytest.mark.parametrize("make_model", [small_model, windowed_model])
@pytest.mark.parametrize("use_cache", [True, False])
def test_log_probabilities_equal_transformers(use_cache, make_model):
    """Prompts are shorter and longer than the window of 6 tokens."""
    model = make_model()
    reference, _ = reference_of(model)
    sampling = Sampling(temperature=0.7, top_k=20, seed=3)
    generations = generate(
        model, TINY_PROMPTS, max_new_tokens=16, sampling=sampling, use_cache=use_cache
    )
    for prompt, generation in zip(TINY_PROMPTS, generations, strict=True):
        logits = reference(torch.tensor([prompt + generation.ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(16), generation.ids]
        # Float32 sums in another order, for logits of about 1.
        torch.testing.assert_close(
            torch.tensor(generation.logprobs), expected, rtol=1e-5, atol=1e-5
        )


def test_padding_does_not_affect_rows(stories_model, story_prompts):
    together = generate(stories_model, story_prompts, max_new_tokens=40)
    alone = [generate(stories_model, [prompt], max_new_tokens=40)[0] for prompt in story_prompts]
    assert ids_of(together) == ids_of(alone)


# Ends of rows.


def test_rows_end_independently():
    model = small_model()
    free = generate(model, TINY_PROMPTS, max_new_tokens=20)
    stop = free[1].ids[3]
    pushed: dict[int, list[int]] = {row: [] for row in range(4)}

    def on_token(row, token):
        pushed[row].append(token)
        return row == 2 and len(pushed[row]) == 5

    generations = generate(
        model, TINY_PROMPTS, max_new_tokens=20, stop_ids={stop}, on_token=on_token
    )
    for row, (generation, whole) in enumerate(zip(generations, free, strict=True)):
        length = whole.ids.index(stop) + 1 if stop in whole.ids else 20
        by_stop_token = stop in whole.ids
        if row == 2 and length > 5:
            length, by_stop_token = 5, False
        assert generation.ids == whole.ids[:length]
        assert generation.logprobs == pytest.approx(whole.logprobs[:length])
        assert generation.finish_reason == ("stop" if by_stop_token or row == 2 else "length")
        assert pushed[row] == generation.ids[: length - by_stop_token]
    assert len({len(generation.ids) for generation in generations}) > 2


def test_zero_new_tokens():
    assert ids_of(generate(small_model(), [[1], [2]], max_new_tokens=0)) == [[], []]


def test_a_model_that_returns_nan_is_rejected():
    """Its most probable token would be 0. Finished rows may have any logits."""
    model, cold = small_model(), Sampling(temperature=1e-40)
    model.head.output.weight.data[3] = math.inf
    for sampling in (None, Sampling(temperature=1.0)):
        with pytest.raises(UserError, match="not finite"):
            generate(model, [[1]], max_new_tokens=2, sampling=sampling)
    model = small_model()

    def poison_row_0(module, args, output):
        output[0] = math.nan

    def on_token(row, token):
        model.head.norm.register_forward_hook(poison_row_0)
        return row == 0

    for sampling in (None, cold):
        done, other = generate(small_model(), [[1], [2]], max_new_tokens=3, sampling=sampling)
        generations = generate(
            model, [[1], [2]], max_new_tokens=3, on_token=on_token, sampling=sampling
        )
        assert ids_of(generations) == [done.ids[:1], other.ids]
        model = small_model()


def test_pipeline_and_context_parallelism_are_rejected():
    for part in ("tok_embeddings", "head"):
        model = small_model()
        setattr(model, part, None)
        with pytest.raises(UserError, match="pipeline"):
            generate(model, [[1]], max_new_tokens=1)
    model = small_model()
    del model.layers["0"]  # the last stage of a model with a tied embedding
    with pytest.raises(UserError, match="pipeline"):
        generate(model, [[1]], max_new_tokens=1)
    model = small_model()
    apply_context_parallel(model, None, SHARDING)
    with pytest.raises(UserError, match="context parallelism"):
        generate(model, [[1]], max_new_tokens=1)


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "message"),
    [
        ([], 5, "at least one"),
        ([[1], []], 5, "at least one token"),
        ([[1]], -1, "-1"),
        ([[1] * 60], 5, "64"),
        ("hello", 5, "lists of token ids"),
        ([1, 2], 5, "lists of token ids"),
        ([[99999]], 5, "token 99999"),
    ],
)
def test_invalid_requests_are_rejected(prompts, new_tokens, message):
    with pytest.raises(UserError, match=message):
        generate(small_model(max_seq_len=64), prompts, max_new_tokens=new_tokens)


def test_the_whole_context_can_be_used():
    model = small_model(max_seq_len=64)
    [cached] = generate(model, [[1] * 60], max_new_tokens=4)
    assert len(cached.ids) == 4


# State of the model.


def hooks_of(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_restored_after_an_interruption(training):
    model = small_model().train(training)
    tokens = torch.arange(30)[None]
    before = model(tokens)

    def fail(row, token):
        assert not model.training and hooks_of(model) > 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1, 2]], max_new_tokens=5, on_token=fail)
    assert model.training is training and hooks_of(model) == 0
    assert torch.equal(model(tokens), before)


def test_a_model_without_attention_is_rejected():
    with pytest.raises(ValueError, match="attend"):
        KVCache(torch.nn.Linear(2, 2), 5)


@pytest.mark.slow
def test_compiled_and_checkpointed_blocks_generate_the_same():
    """Although the model was traced before, for the same shapes, without the cache."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    prompts = [list(range(10)), list(range(20, 30))]
    expected = ids_of(generate(small_model(), prompts, max_new_tokens=10))
    model = small_model().eval()
    for name, block in list(model.layers.items()):
        model.layers[name] = torch.compile(checkpoint_wrapper(block), backend="eager")
    tokens = torch.tensor(prompts)
    with torch.no_grad():
        before = model(tokens)
        assert ids_of(generate(model, prompts, max_new_tokens=10)) == expected
        assert torch.equal(model(tokens), before)


@pytest.mark.parametrize(
    ("window", "first", "second"),
    [
        (None, [[1, 0, 0], [0, 1, 0], [0, 1, 1]], [0, 1, 1, 1]),
        (2, [[1, 0, 0], [0, 1, 0], [0, 1, 1]], [1, 1]),
    ],
)
def test_padding_mask(window, first, second):
    """A padding token sees itself, so that no softmax row is empty; a real token sees all real
    tokens before it, or in its window, outside of which a layer keeps no tokens."""
    cache = KVCache(small_model(), 4)

    def mask(positions: list[int]) -> list[list[int]]:
        attention = cache.attention(torch.tensor([positions])).with_window(window)
        kernel = with_kernel(
            attention, device=torch.device("cpu"), dtype=torch.float32, head_dim=16, static=False
        )
        return kernel.mask[0, 0].int().tolist()

    assert mask([0, 0, 1]) == first
    cache.advance(3)
    assert mask([2]) == [second]


class MixedModel(Llama3Model):
    """A model with full layers between layers with windows, as in Gemma 2 and 3."""

    def window_of_layer(self, index: int) -> int | None:
        return (6, None, 1)[index]


def mixed_model() -> MixedModel:
    model = MixedModel(small_config())
    model.load_state_dict(small_model().state_dict())
    return model


def widths_of(cache: KVCache, model: Llama3Model) -> list[set[int]]:
    """Return the number of stored slots in each layer."""
    stored = [cache._stored[block.attention.attend][1:] for block in model.layers.values()]
    return [
        {x.shape[1] for x in pair} | {x.untyped_storage().nbytes() // x[:, 0].nbytes for x in pair}
        for pair in stored
    ]


def test_a_layer_with_a_window_keeps_only_its_window():
    """Any number of tokens may follow the cached ones; tokens that `advance` drops leave no trace.
    All logits equal a pass over the whole rows; the first is padded on the left."""
    model = mixed_model()
    tokens_BL = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(0))
    positions_BL = (torch.arange(30) - torch.tensor([[9], [0]])).clamp(min=0)
    expected = model(tokens_BL, AttentionMetadata.from_positions(positions_BL))
    with torch.no_grad(), KVCache(model, 40) as cache:
        place = 0
        for new, kept in ((3, 3), (13, 13), (1, 1), (4, 1), (4, 2), (1, 1), (9, 9)):
            part = slice(place, place + new)
            logits = model(tokens_BL[:, part], cache.attention(positions_BL[:, part]))
            # Float32 sums in another order, for logits of about 1.
            torch.testing.assert_close(logits, expected[:, part], rtol=1e-5, atol=1e-5)
            assert widths_of(cache, model) == [{min(place, 5) + new}, {40}, {new}]
            cache.advance(kept)
            place += kept
        assert place == 30
    assert not cache._stored


def test_a_cache_that_is_cut_too_short_is_caught(monkeypatch):
    original = CachedAttention.with_window

    def one_key_less(self: CachedAttention, window: int | None) -> AttentionMetadata:
        attention = original(self, window)
        n_extra = len(attention.key_places_S) - len(self.query_places_L)
        return (
            replace(attention, key_places_S=attention.key_places_S[1:])
            if window and n_extra
            else attention
        )

    monkeypatch.setattr(CachedAttention, "with_window", one_key_less)
    model = mixed_model()
    wrong, right = (
        generate(model, TINY_PROMPTS, max_new_tokens=16, use_cache=cached)
        for cached in (True, False)
    )
    differences = (
        torch.tensor([a.logprobs, b.logprobs]).diff(dim=0)
        for a, b in zip(wrong, right, strict=True)
    )
    # ten times the tolerance above
    assert max(difference.abs().max().item() for difference in differences) > 1e-4


def largest_difference(reference, generations) -> float:
    """Return the largest difference of log probabilities from transformers' for continuations of
    `TINY_PROMPTS`."""
    differences = []
    for prompt, generation in zip(TINY_PROMPTS, generations, strict=True):
        logits = reference(torch.tensor([prompt + generation.ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(generation.ids)), generation.ids]
        differences.append((torch.tensor(generation.logprobs) - expected).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("use_cache", [True, False])
def test_windows_in_some_layers_equal_transformers(use_cache):
    """Qwen 2 has such layers too, and differs from Llama only by biases, which are 0 here."""
    transformers = pytest.importorskip("transformers")

    class HalfWindowed(Llama3Model):
        def window_of_layer(self, index: int) -> int | None:
            return None if index % 2 else 6

    llama, names = reference_of(small_model())
    config = llama.config.to_dict() | {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
    }
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    reference = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).eval()
    for parameter in reference.parameters():
        parameter.data.zero_()
    reference.load_state_dict(llama.state_dict(), strict=False)
    model = HalfWindowed(small_config())
    model.load_state_dict(small_model().state_dict())
    differences = [
        largest_difference(
            reference, generate(each, TINY_PROMPTS, max_new_tokens=16, use_cache=use_cache)
        )
        for each in (model, windowed_model())
    ]
    # Float32 sums in another order, for logits of about 1; another window differs a hundred times
    # more.
    assert differences[0] < 1e-5 and differences[1] > 1e-3


def test_lengths_of_texts_in_a_cache():
    cache = KVCache(small_model(), 8)
    assert cache.attention(torch.tensor([[0, 0, 1], [0, 1, 2]])).document_lengths_BL(
        torch.device("cpu")
    ).tolist() == [
        [2],
        [3],
    ]
    cache.advance(3)
    assert cache.attention(torch.tensor([[2], [3]])).document_lengths_BL(
        torch.device("cpu")
    ).tolist() == [[3], [4]]


class RunningSum(torch.nn.Module):
    """The least recurrent module: adds the sum of all earlier tokens."""

    def forward(self, x_BLD: torch.Tensor, attention: AttentionMetadata) -> torch.Tensor:
        sums_BLD = x_BLD.cumsum(1)
        if attention.states is not None:
            sums_BLD = sums_BLD + attention.states.get(self, 0)
            attention.states[self] = sums_BLD[:, -1:]
        return sums_BLD


def recurrent_model() -> Llama3Model:
    """Return a model with a recurrent module between its layers."""
    model = small_model()
    model.running_sum = RunningSum()
    model.layers["1"].register_forward_pre_hook(
        lambda _, args: (args[0] + 0.1 * model.running_sum(args[0], args[2]), *args[1:])
    )
    return model


def test_recurrent_states_continue_in_the_cache():
    model = recurrent_model()
    expected = model(torch.arange(7)[None])
    with torch.no_grad(), KVCache(model, 7) as cache:
        for place, new in ((0, 4), (4, 1), (5, 2)):
            positions_BL = torch.arange(place, place + new)[None]
            logits = model(positions_BL, cache.attention(positions_BL))
            torch.testing.assert_close(logits, expected[:, positions_BL[0]], rtol=1e-5, atol=1e-5)
            cache.advance(new)
        assert list(cache.states) == [model.running_sum]
    assert not cache.states


def test_recurrent_states_under_tensor_parallelism_are_refused(monkeypatch):
    module = importlib.import_module("torchtitan.components.generation.engine")
    monkeypatch.setattr(module, "sequence_splits", lambda model: 2)
    generate(small_model(), [[1, 2]], max_new_tokens=2)
    with pytest.raises(UserError, match="tensor parallelism .degree 2. supports no recurrent"):
        generate(recurrent_model(), [[1, 2]], max_new_tokens=2)
    generate(recurrent_model(), [[1, 2]], max_new_tokens=2, use_cache=False)


def test_the_cache_has_the_type_of_mixed_precision():
    model = small_model()
    with MixedPrecision(torch.bfloat16).of(model):
        cached, recomputed = (
            generate(model, TINY_PROMPTS, max_new_tokens=2, use_cache=use_cache)
            for use_cache in (True, False)
        )
        with KVCache(model, 4) as cache:
            model(torch.tensor([[1, 2, 3]]), cache.attention(torch.arange(3)[None]))
            assert {x.dtype for _, *pair in cache._stored.values() for x in pair} == {
                torch.bfloat16
            }
    for one, other in zip(cached, recomputed, strict=True):
        # bfloat16 has 8 bits: logits of about 1 differ by about 2^-8.
        assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.05)


# Sampling.


@pytest.mark.slow
def test_sampled_frequencies_follow_the_softmax():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5]])
    for temperature in (1.0, 0.5):
        sampling, numbers, n = Sampling(temperature=temperature), RandomNumbers("1"), 4000
        counts = torch.bincount(
            torch.cat([draw(logits, sampling, [numbers]) for _ in range(n)]), minlength=5
        )
        expected = n * (logits[0] / temperature).softmax(-1)
        # Pearson's statistic with 4 degrees of freedom exceeds 18.5 for one seed in a thousand.
        assert ((counts - expected) ** 2 / expected).sum() < 18.5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (None, None, None),
        (5, None, None),
        (None, 0.7, None),
        (8, 0.6, None),
        (1, None, None),
        (500, 1.0, 0.0),
        (None, None, 0.2),
        (8, 0.9, 0.1),
        (None, None, 1.0),
    ],
)
def test_restrictions_equal_transformers(temperature, top_k, top_p, min_p):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))
    steps = [transformers.TemperatureLogitsWarper(temperature)]
    steps += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    steps += [transformers.TopPLogitsWarper(top_p)] if top_p and top_p < 1 else []
    steps += [transformers.MinPLogitsWarper(min_p)] if min_p else []
    expected = logits
    for step in steps:
        expected = step(None, expected)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # Logits are defined up to a constant.
    found = restricted_logits(logits, sampling)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1))


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-300])
def test_low_temperature_samples_the_most_probable_token(temperature):
    logits = 50 * torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=temperature, top_k=5, top_p=0.9)
    assert torch.equal(draw(logits, sampling, [RandomNumbers("0")] * 8), logits.argmax(-1))


def test_only_top_k_tokens_are_sampled():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    sampling, numbers = Sampling(temperature=5.0, top_k=2), RandomNumbers("0")
    assert {draw(logits, sampling, [numbers]).item() for _ in range(200)} == {1, 2}


def test_samples_of_a_row_do_not_depend_on_the_batch():
    model, sampling = small_model(), Sampling(temperature=1.5, seed=7)
    together = generate(model, [[5], *TINY_PROMPTS], max_new_tokens=20, sampling=sampling)
    alone = generate(model, [[5]], max_new_tokens=20, sampling=sampling)
    assert together[0].ids == alone[0].ids
    assert together[1].ids != together[0].ids  # the same prompt in another row
    assert ids_of(
        generate(model, [[5]], max_new_tokens=20, sampling=Sampling(temperature=1.5, seed=8))
    ) != ids_of(alone)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"min_p": 1.5},
    ],
)
def test_invalid_sampling_options_are_rejected(options):
    with pytest.raises(UserError, match=next(iter(options))):
        generate(small_model(), [[1]], max_new_tokens=1, sampling=Sampling(**options))


# Text.


@pytest.mark.parametrize(
    "name",
    ["stories260K/hf-converted", "gpt2-tokenizer", "mistral-v0.3-tokenizer", "llama3-tokenizer"],
)
def test_streamed_pieces_equal_the_text(assets, name):
    """Characters of several tokens are held back until they are complete."""
    tokenizer = PretrainedTokenizer.Config().build(path=assets / name)
    prompt = tokenizer.encode("Once upon")
    for text in (" a time, Lily", "🙂 naïve — 東京\n\n  two", "é" * 5, "no space"):
        ids = tokenizer.encode(text, add_bos=False)
        stream = TextStream(tokenizer, prompt)
        pieces = [stream.push(token) for token in ids]
        assert not any("�" in piece for piece in pieces)
        pieces.append(stream.finish())
        whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
        assert "Once upon" + "".join(pieces) == whole
        assert stream.text == "".join(pieces)


CHARACTERS = "ab \n\té¿中東🙂🇨🇭\u200d▁\u0301'#"


@pytest.mark.parametrize(
    ("name", "first_plain"),
    [
        ("stories260K/hf-converted", 259),
        ("gpt2-tokenizer", 0),
        ("mistral-v0.3-tokenizer", 1027),
        ("llama3-tokenizer", 0),
    ],
)
def test_streaming_equals_decoding_at_once(assets, name, first_plain):
    """For random texts and random ids, with special tokens and broken characters, but without byte
    fallback."""
    tokenizer, rng = PretrainedTokenizer.Config().build(path=assets / name), random.Random(0)
    special = [token for token in (tokenizer.bos_id, tokenizer.eos_id) if token is not None]
    for _ in range(60):
        ids = tokenizer.encode("".join(rng.choices(CHARACTERS, k=30)), add_bos=False)
        noise = [rng.randrange(first_plain, tokenizer.vocab_size) for _ in range(40)] + special * 3
        rng.shuffle(noise)
        for prompt, row in (
            ([], ids),
            (special + ids[:3], ids),
            (ids[:1], noise),
            (special, noise),
        ):
            if "�" in tokenizer.decode(prompt):
                prompt = special
            stream = TextStream(tokenizer, prompt)
            pieces = [stream.push(token) for token in row] + [stream.finish()]
            before, whole = (
                tokenizer.decode(x, skip_special_tokens=True) for x in (prompt, prompt + row)
            )
            assert before + "".join(pieces) == whole


def test_invalid_bytes_do_not_change_returned_text(stories_tokenizer):
    """Byte fallback would turn the whole run into U+FFFD, including a newline that was already
    returned."""
    newline, broken = (
        stories_tokenizer.tokenize([text], allow_special=False)[0] for text in ("a\n", "a🙂")
    )
    row = newline[-1:] + broken[-4:-2] + stories_tokenizer.encode("b", add_bos=False)
    stream = TextStream(stories_tokenizer)
    assert "".join(stream.push(token) for token in row) == "\n�� b"
    assert stories_tokenizer.decode(row) == "��� b"


def test_each_push_decodes_few_tokens():
    class Counting(Characters):
        decoded = 0

        def decode(self, ids, **options):
            self.decoded += len(ids)
            return super().decode(ids, **options)

    tokenizer = Counting()
    stream = TextStream(tokenizer, prompt=[65] * 1000)
    for token in range(1000):
        stream.push(66 + token)
    assert tokenizer.decoded < 10 * 1000


def test_an_incomplete_character_is_returned_at_the_end(assets):
    tokenizer = PretrainedTokenizer.Config().build(path=assets / "gpt2-tokenizer")
    stream = TextStream(tokenizer)
    assert "".join(stream.push(token) for token in tokenizer.encode("a🙂")[:-1]) == "a"
    assert stream.finish() == "�"


class Characters:
    """A tokenizer whose tokens are code points."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "stop", "pushed"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four", "o t"], "one tw"),
        ("one two three", ["three", " two"], "one"),
        ("aab", ["ab"], "a"),
        ("aabaabaac", ["aabaac"], "aab"),
        ("unstopped sto", ["stop"], "un"),
        ("never sto", ["stop"], "never sto"),
        ("never", [""], "never"),
    ],
)
def test_stop_strings(text, stop, pushed):
    stream = TextStream(Characters(), stop=stop)
    pieces = []
    for token in map(ord, text):
        pieces.append(stream.push(token))
        assert pushed.startswith("".join(pieces))  # returned text is never taken back
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces) == pushed
    assert stream.stopped is (pushed != text)


def test_the_prompt_is_not_searched_for_stop_strings():
    stream = TextStream(Characters(), prompt=list(map(ord, "stop st")), stop=["stop"])
    assert "".join(stream.push(token) for token in map(ord, "op on")) == "op on"


def test_start_and_stop_ids(stories_tokenizer, tmp_path):
    assert start_id(stories_tokenizer) == BOS
    assert stop_ids(stories_tokenizer, tmp_path) == {2}
    for setting, found in [(7, {2, 7}), ([7, 8], {2, 7, 8}), (None, {2})]:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": setting}))
        assert stop_ids(stories_tokenizer, tmp_path) == found
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [9]}))
    assert stop_ids(stories_tokenizer, tmp_path) == {2, 9}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_ids(stories_tokenizer, tmp_path) == {2, 7}
    for broken in ('{"eos_token_id": "x"}', "[]", "{"):
        (tmp_path / "generation_config.json").write_text(broken)
        with pytest.raises(UserError, match="generation_config"):
            stop_ids(stories_tokenizer, tmp_path)


# Several processes.


def sharded_model(layout: str, make_model=mixed_model) -> Llama3Model:
    degrees = {"fsdp": {"dp_shard": 2}, "tp": {"tp": 2}}[layout]
    dims = ParallelDims(
        **{"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "world_size": 2, **degrees}
    )
    model, training = make_model(), TrainingConfig(mixed_precision_param="float32")
    mesh = dims.build_mesh("cpu")
    parallelize_model(model, parallel_dims=dims, mesh=mesh, sharding=SHARDING, training=training)
    return model


def sharded_generations(layout: str, expected: list[list[int]]) -> None:
    rank, model = dist.get_rank(), sharded_model(layout)
    # With FSDP, each rank has different prompts, and rank 1 ends early.
    rows, length = ([rank], 3 if rank else 12) if layout == "fsdp" else ([0, 1, 2, 3], 12)
    for use_cache in (True, False):
        pushed = itertools.count(1)
        generations = generate(
            model,
            [TINY_PROMPTS[row] for row in rows],
            max_new_tokens=12,
            on_token=lambda row, token, pushed=pushed: next(pushed) == 3 and length == 3,
            use_cache=use_cache,
            group=dist.group.WORLD,
        )
        assert ids_of(generations) == [expected[row][:length] for row in rows], (
            layout,
            rank,
            use_cache,
        )
    if rank == 1:
        model.head.norm.register_forward_hook(lambda module, args, output: output * math.nan)
    with pytest.raises(UserError, match="not finite"):
        generate(model, [[1]], max_new_tokens=2, group=dist.group.WORLD)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_sharded_models_generate_the_same(workers, layout):
    expected = ids_of(generate(mixed_model(), TINY_PROMPTS, max_new_tokens=12))
    workers.run(sharded_generations, layout, expected)
