"""`SFTDataLoader`: batches, order and position, mixtures, samplers, validation."""

import json
import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.components.data.helpers import replace, take, with_positions, write_jsonl
from torchtitan.components.data.base import NO_DOCUMENT
from torchtitan.components.data.finetuning.encoded import EncodedSample
from torchtitan.components.data.finetuning.samples import SampleSets, pack_samples
from torchtitan.components.data.finetuning.sft import SFTDataLoader, parse_schedule
from torchtitan.components.data.plan import Sampler, ShuffleSampler, StepStatistics
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.distributed import initialize_weights
from torchtitan.models.common.rope import RoPEConfig
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.tools.errors import UserError

SEQ_LEN = 64
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "A:" }}{% generation %}{{ " " + message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- "Q: " + message.content + "\n" }}
    {%- endif %}
{%- endfor %}
"""
WORDS = "the cat saw a small red dog and ran home to sleep in the sun by the old tree".split()


def write_rows(path: Path, n: int, seed: int = 0) -> Path:
    """Write questions and answers of very different lengths."""
    rng = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    rows = [{"prompt": f"{i} {words(8)}", "response": words(20)} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    write_rows(folder / "a.jsonl", 90)
    write_rows(folder / "b.jsonl", 40, seed=1)
    (folder / "short.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return SFTDataLoader.Config(
        dataset=[str(folder / "a.jsonl")],
        chat_template=str(folder / "short.jinja"),
        pack_chunk=30,
        cache_dir=str(folder / "cache"),
    )


@pytest.fixture(scope="module")
def two(config, folder):
    return replace(config, dataset=[str(folder / "a.jsonl"), str(folder / "b.jsonl")])


def build(config, tokenizer, *, batch=2, **runtime):
    return config.build(
        tokenizer=tokenizer, **{"seq_len": SEQ_LEN, "local_batch_size": batch, **runtime}
    )


def windows(batches):
    """Return the samples of each window, without the padding of the last batch."""
    rows = [
        tuple(i for i in row.tolist() if i != NO_DOCUMENT)
        for batch in batches
        for row in batch["documents"]
    ]
    return [row for row in rows if row]


def ledger(batches):
    """Count the occurrences of each sample."""
    return Counter(number for window in windows(batches) for number in window)


def interleaved(loaders, n=10**9):
    """Return up to n batches of each rank in the global order; all ranks have the same number."""
    return [
        batch
        for step in zip(*(take(loader, n) for loader in loaders), strict=True)
        for batch in step
    ]


# --- batches
# --------------------------------------------------------------------------------------------------


def test_window_token_by_token():
    samples = [
        EncodedSample(np.array([5, 6, 7, 8]), np.array([False, False, True, True])),
        EncodedSample(np.array([9, 10, 11]), np.array([True, True, False])),
    ]
    window = pack_samples(samples, 8)
    ignored = IGNORE_INDEX
    assert window["input"].tolist() == [5, 6, 7, 9, 10, 0, 0, 0]
    assert window["labels"].tolist() == [ignored, 7, 8, 10, ignored, ignored, ignored, ignored]
    assert window["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert pack_samples([], 3)["labels"].tolist() == [ignored] * 3
    full = pack_samples(samples, 5)
    assert full["positions"].tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("packing", ["ffd", "multipack", "none"])
def test_batches_contain_the_named_samples(config, tokenizer, packing):
    loader = build(replace(config, packing=packing), tokenizer, epochs=1)
    for batch in loader:
        batch = with_positions(batch)
        assert {
            name: tuple(value.shape) for name, value in batch.items() if name != "documents"
        } == {name: (2, SEQ_LEN) for name in ("input", "labels", "positions")}
        assert {value.dtype for value in batch.values()} == {torch.int64}
        for row, documents in enumerate(batch["documents"].tolist()):
            samples = [
                loader.samples.sample(number).parts[0]
                for number in documents
                if number != NO_DOCUMENT
            ]
            expected = pack_samples(samples, SEQ_LEN)
            del expected["n_tokens"]  # part of the batch's attention
            assert all(batch[name][row].tolist() == expected[name].tolist() for name in expected)
            assert packing != "none" or len(samples) <= 1


def test_only_the_answer_is_trained(config, tokenizer):
    loader = build(replace(config, packing="none"), tokenizer, batch=1, epochs=1)
    rows = [json.loads(line) for line in Path(config.dataset[0]).read_text().splitlines()]
    for batch in take(loader, 20):
        [number] = windows([batch])[0]
        labels = batch["labels"][0]
        trained = labels[labels != IGNORE_INDEX].tolist()
        assert trained[-1] == tokenizer.eos_id
        assert tokenizer.decode(trained[:-1]).strip() == rows[number]["response"]
        assert loader.describe(batch["documents"][0]) == f"a.jsonl:{number + 1}"


def test_packed_and_unpacked_have_the_same_token_losses(config, tokenizer):
    """Tolerance 1e-5: float32 sums in a different order."""
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}
    model = Llama3Model.Config(
        vocab_size=tokenizer.vocab_size, rope=RoPEConfig(theta=10_000.0), **sizes
    ).build()
    initialize_weights(model, seed=1)

    @torch.no_grad()
    def losses(packing):
        loader = build(replace(config, packing=packing), tokenizer, epochs=1)
        sample_losses = {}
        for batch in loader:
            logits = model(batch["input"], batch["attention"])
            losses = F.cross_entropy(
                logits.transpose(1, 2), batch["labels"], ignore_index=IGNORE_INDEX, reduction="none"
            )
            for row, documents in enumerate(batch["documents"].tolist()):
                starts = (
                    batch["attention"].positions_BL[row] == 0
                ).nonzero().flatten().tolist() + [SEQ_LEN]
                present = [number for number in documents if number != NO_DOCUMENT]
                for number, start, stop in zip(present, starts, starts[1:], strict=False):
                    sample_losses[number] = losses[
                        row, start : min(stop, start + len(loader.samples.sample(number).ids) - 1)
                    ]
        return sample_losses

    unpacked = losses("none")
    assert len(unpacked) == 90 and max(map(torch.max, unpacked.values())) > 1
    for packing in ("ffd", "multipack"):
        packed = losses(packing)
        assert packed.keys() == unpacked.keys()
        for number, expected in unpacked.items():
            torch.testing.assert_close(packed[number], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gsm8k_fills_its_windows(config, tokenizer, assets, tmp_path):
    """A question and answer have about 150 tokens, a window 1,024."""
    gpt2 = PretrainedTokenizer.Config().build(path=assets / "gpt2-tokenizer")
    lines = (
        (assets / "sft" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    )
    (tmp_path / "gsm8k.jsonl").write_text("".join(lines[:1500]), encoding="utf-8")
    gsm8k = replace(
        config, dataset=[str(tmp_path / "gsm8k.jsonl")], pack_chunk=8192, cache_dir=str(tmp_path)
    )
    loader = build(gsm8k, gpt2, seq_len=1024)
    assert loader.packing_efficiency >= 0.97
    assert loader.samples.sets[0].report.kept == loader.samples.sets[0].report.rows == 1500


# --- order and position
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["ffd", "multipack", "none"])
def test_every_sample_once_per_epoch(two, tokenizer, packing):
    loader = build(replace(two, packing=packing), tokenizer, epochs=3)
    batches = take(loader)
    assert ledger(batches) == Counter({number: 3 for number in range(130)})
    assert loader.n_samples == len(windows(batches)) and loader.exhausted
    with pytest.raises(StopIteration):
        next(loader)
    third = loader.n_samples // 3
    # each epoch has a different order
    assert windows(batches)[:third] != windows(batches)[third : 2 * third]


def test_without_epochs_there_is_no_end(config, tokenizer):
    loader = build(config, tokenizer, batch=16)
    assert loader.n_samples is None
    assert min(ledger(take(loader, 20)).values()) >= 3


def test_seed_sets_the_order(config, tokenizer):
    orders = [windows(take(build(config, tokenizer, seed=seed), 10)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("ranks, batch, workers", [(1, 4, 0), (2, 2, 0), (4, 1, 0), (1, 4, 2)])
def test_global_order_is_the_same_for_any_layout(two, tokenizer, ranks, batch, workers):
    weighted = replace(two, weights=[0.3, 0.7], max_epochs=[9, 9], num_workers=workers)
    loaders = [
        build(weighted, tokenizer, batch=batch, dp_rank=r, dp_world_size=ranks, epochs=2)
        for r in range(ranks)
    ]
    reference = build(replace(weighted, num_workers=0), tokenizer, batch=4, epochs=2)
    assert windows(interleaved(loaders)) == windows(take(reference))
    for loader in loaders:
        assert loader.exhausted
        loader.close()


@pytest.mark.parametrize("workers, workers_after", [(0, 2), (2, 0)])
def test_resume_with_different_ranks_keeps_every_sample(two, tokenizer, workers, workers_after):
    straight = windows(take(build(two, tokenizer, epochs=2)))
    state, batches, rng = None, [], random.Random(workers)
    for ranks, n_workers in (
        (1, workers),
        (2, workers_after),
        (4, 0),
        (2, workers),
        (1, workers_after),
    ):
        config = replace(two, num_workers=n_workers)
        loaders = [
            build(config, tokenizer, batch=1, dp_rank=r, dp_world_size=ranks, epochs=2)
            for r in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        batches += interleaved(loaders, rng.randint(1, 5))
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
        for loader in loaders:
            loader.close()
    last = build(two, tokenizer, epochs=2)
    last.load_state_dict(state)
    assert windows(batches + take(last)) == straight


def test_resume_keeps_the_saved_seed(config, tokenizer):
    straight = take(build(config, tokenizer, seed=1), 12)
    first = build(config, tokenizer, seed=1)
    take(first, 5)
    resumed = build(config, tokenizer, seed=2)
    resumed.load_state_dict(first.state_dict())
    assert windows(take(resumed, 7)) == windows(straight[5:])


@pytest.mark.parametrize("workers", [0, 2])
def test_closed_loader_continues_from_its_position(config, tokenizer, workers):
    straight = windows(take(build(config, tokenizer), 12))
    loader = build(replace(config, num_workers=workers), tokenizer)
    first = take(loader, 5)
    loader.close()
    loader.close()
    assert windows(first + take(loader, 7)) == straight
    loader.close()


def test_loader_can_rewind(config, tokenizer):
    loader = build(config, tokenizer, epochs=1)
    beginning = loader.state_dict()
    first = windows(take(loader))
    loader.load_state_dict(beginning)
    assert not loader.exhausted and windows(take(loader)) == first


@pytest.mark.parametrize(
    "changed",
    [
        {"packing": "none"},
        {"train_on": "all"},
        {"sampler": ShuffleSampler.Config(shuffle=False)},
        "seq_len",
    ],
)
def test_position_in_different_data_is_ignored_with_a_warning(config, tokenizer, caplog, changed):
    loader = build(config, tokenizer)
    take(loader, 3)
    fields, runtime = ({}, {"seq_len": 60}) if changed == "seq_len" else (changed, {})
    fresh, other = (build(replace(config, **fields), tokenizer, **runtime) for _ in range(2))
    with caplog.at_level(logging.WARNING, "torchtitan"):
        other.load_state_dict(loader.state_dict())
    assert "reading starts at the beginning" in caplog.text and "a.jsonl" in caplog.text
    assert windows(take(other, 3)) == windows(take(fresh, 3))


def test_position_is_valid_if_changed_code_makes_the_same_samples(
    config, tokenizer, caplog, monkeypatch
):
    loader = build(config, tokenizer)
    take(loader, 3)
    state, expected = loader.state_dict(), windows(take(loader, 3))
    monkeypatch.setattr(
        "torchtitan.components.data.finetuning.sample_cache.code_version", lambda: "another"
    )
    later = build(config, tokenizer)
    later.load_state_dict(state)
    assert later.samples.sets[0]._cache.folder != loader.samples.sets[0]._cache.folder
    assert windows(take(later, 3)) == expected and "does not match" not in caplog.text


def test_position_is_valid_for_moved_data(config, tokenizer, folder, tmp_path, caplog):
    loader = build(config, tokenizer)
    take(loader, 3)
    expected = loader.state_dict(), windows(take(loader, 3))
    copy = tmp_path / "renamed.jsonl"
    copy.write_bytes((folder / "a.jsonl").read_bytes())
    for place in (folder / ".." / folder.name / "a.jsonl", copy, tmp_path / "*.jsonl"):
        moved = build(replace(config, dataset=[str(place)]), tokenizer)
        moved.load_state_dict(expected[0])
        assert windows(take(moved, 3)) == expected[1]
    assert loader.sample_name(0) == "a.jsonl:1" and "does not match" not in caplog.text
    renamed = build(replace(config, dataset=[str(copy)]), tokenizer)
    assert renamed.sample_name(0) == "renamed.jsonl:1"


# --- several datasets
# ----------------------------------------------------------------------------------------------


def tokens_by_source(loader, batches):
    """Count the positions with samples of the first and the second dataset."""
    sums = [0, 0]
    for number, times in ledger(batches).items():
        sums[loader.samples.locate(number)[0]] += times * (
            len(loader.samples.sample(number).ids) - 1
        )
    return sums


def test_mixture_is_exact_to_a_window_at_every_batch(two, tokenizer):
    loader = build(replace(two, weights=[1, 3], max_epochs=[99, 99]), tokenizer, batch=1)
    sums = np.zeros(2)
    for _ in range(150):
        sums += tokens_by_source(loader, [next(loader)])
        assert np.abs(sums - sums.sum() * np.array([0.25, 0.75])).max() <= SEQ_LEN


def test_weight_schedule(two, tokenizer):
    weighted = replace(two, weights=[1, 1], weight_schedule=["6: 0 1"], max_epochs=[99, 99])
    loader = build(weighted, tokenizer, batch=2, global_batch_size=4)
    before, after = take(loader, 10), take(loader, 20)
    assert min(tokens_by_source(loader, before)) > 0.4 * sum(tokens_by_source(loader, before))
    # the missing part of the first set's share
    assert tokens_by_source(loader, after)[0] <= SEQ_LEN


def test_data_sets_without_weights_are_read_equally_often(two, tokenizer):
    loader = build(two, tokenizer, epochs=1)
    batches = take(loader)
    assert set(ledger(batches).values()) == {1}
    first, second = tokens_by_source(loader, batches[: len(batches) // 2])
    whole = tokens_by_source(loader, batches)
    assert first / second == pytest.approx(whole[0] / whole[1], rel=0.15)


def test_too_many_repetitions_are_rejected(two, tokenizer):
    loader = build(replace(two, weights=[1, 1]), tokenizer, batch=1)
    with pytest.raises(
        UserError, match=r"b.jsonl would be read .* times .*--dataloader.max_epochs"
    ):
        loader.check_repetitions(1000)
    loader.check_repetitions(5)
    seen = []
    with pytest.raises(UserError, match="b.jsonl would be read"):
        for batch in loader:
            seen.append(batch)
    assert set(ledger(seen).values()) == {1}
    build(replace(two, weights=[1, 1], max_epochs=[1, 99]), tokenizer).check_repetitions(10)
    take(build(replace(two, weights=[1, 1]), tokenizer, epochs=2))  # two epochs were requested


@pytest.mark.parametrize("workers", [0, 2])
def test_prepared_windows_may_exceed_the_limit(two, tokenizer, workers):
    """The run may end before the limit; a loader that reaches it raises, also on the next call."""
    loader = build(replace(two, weights=[1, 1], num_workers=workers), tokenizer)
    allowed = 0
    with pytest.raises(UserError, match="b.jsonl would be read"):
        for allowed in range(100):
            loader.check_repetitions(2 * (allowed + 1))
    assert len(take(loader, allowed)) == allowed > 5
    for _ in range(2):
        with pytest.raises(UserError, match="b.jsonl would be read"):
            next(loader)
    loader.close()


def test_weights_with_epochs_have_no_repetition_limit(two, tokenizer):
    """A sampler that draws some samples twice per epoch yields more or fewer tokens than the data
    has."""
    longest = int(build(two, tokenizer).samples.positions[1].argmax())
    weighted = replace(two, weights=[1, 1], sampler=OneSample.Config(sample=longest))
    loader = build(weighted, tokenizer, epochs=1)
    loader.check_repetitions(10**4)
    ends = build(weighted, tokenizer, epochs=1)
    assert len(take(ends)) > 5 and ends.exhausted
    with pytest.raises(UserError, match="would be read"):
        build(weighted, tokenizer).check_repetitions(10**4)
    with pytest.raises(UserError, match="would be read"):
        build(replace(weighted, max_epochs=[1, 1]), tokenizer, epochs=1)


def test_repetitions_are_logged_unless_epochs_set_them(config, tokenizer, caplog):
    with caplog.at_level(logging.INFO, "torchtitan"):
        build(config, tokenizer, epochs=1).check_repetitions(100)
        assert "the run reads" not in caplog.text
        build(config, tokenizer).check_repetitions(100)
        build(config, tokenizer).check_repetitions(1)
    per_epoch = build(config, tokenizer, epochs=1).n_samples
    assert 10 < per_epoch < 100
    assert (
        f"a.jsonl {100 / per_epoch:.1f} times" in caplog.text
        and f"a.jsonl {1 / per_epoch:.2g} times" in caplog.text
    )


def test_one_data_set_without_weights_has_no_repetition_limit(config, tokenizer):
    loader = build(config, tokenizer)
    loader.check_repetitions(10**4)
    with pytest.raises(UserError, match="a.jsonl would be read"):
        build(replace(config, max_epochs=[1.5]), tokenizer).check_repetitions(10**3)


def test_document_names(config, two, tokenizer, folder):
    loader = build(two, tokenizer)
    names = loader.document_names(torch.tensor([0, 95, NO_DOCUMENT]))
    assert names == [f"{folder / 'a.jsonl'}:1", f"{folder / 'b.jsonl'}:6"]
    assert loader.describe(torch.tensor([0, 95, NO_DOCUMENT])) == ", ".join(names)
    assert loader.document_names(torch.tensor([NO_DOCUMENT])) == []
    assert build(config, tokenizer).describe(torch.tensor([NO_DOCUMENT])) == "no document (padding)"


class FixedPlaces:
    """Data with fixed sample places."""

    def __init__(self, *places):
        self.places, self.n_samples = places, len(places)

    def describe(self, index):
        return self.places[index]


@pytest.mark.parametrize(
    ("name", "place", "shown"),
    [
        ("u2.jsonl", "u2.jsonl:255", "u2.jsonl:255"),
        ("a/u2.jsonl", "u2.jsonl:255", "a/u2.jsonl:255"),
        ("b/u2.json", "u2.json, element 3", "b/u2.json, element 3"),
        ("notes.txt", "notes.txt", "notes.txt"),
        ("chats", "chats (train), row 3", "chats (train), row 3"),
        ("folder", "u2.jsonl:255", "folder: u2.jsonl:255"),
        ("u2", "u2.jsonl:255", "u2: u2.jsonl:255"),  # a folder that contains another u2.jsonl
        ("tickets", "tickets.csv:2", "tickets: tickets.csv:2"),
        ("a/*.jsonl", "a/u2.jsonl:255", "a/*.jsonl: a/u2.jsonl:255"),
    ],
)
def test_names_mention_the_data_set_once(name, place, shown):
    assert SampleSets([name, "other"], [FixedPlaces(place), FixedPlaces("x")]).describe(0) == shown
    assert SampleSets([name], [FixedPlaces(place)]).describe(0) == place


def test_samples_by_name(two, tokenizer):
    loader = build(two, tokenizer)
    batch = next(loader)
    names = loader.document_names(batch["documents"][0])
    found = loader.batch_of(names)
    assert windows([found]) == [(number,) for number in windows([batch])[0]]
    assert loader.document_names(found["documents"][0]) == names[:1]
    with pytest.raises(UserError, match="'nowhere.jsonl:3' is not a sample of this data"):
        loader.batch_of(["nowhere.jsonl:3"])


def test_summary(two, tokenizer):
    loader = build(replace(two, too_long="truncate_left"), tokenizer, seq_len=30, epochs=1)
    summary = loader.summary(loader.n_samples)
    # a different shuffle
    assert summary.windows_per_epoch == pytest.approx(loader.n_samples, abs=3)
    assert (
        [of.name for of in summary.sets] == two.dataset
        and summary.max_length == 31
        and summary.follows_seed
    )
    assert [of.epochs for of in summary.sets] == [1, 1] and [
        of.max_epochs for of in summary.sets
    ] == [None, None]
    assert [len(of.lengths) for of in summary.sets] == [90, 40] and summary.sets[
        0
    ].lengths.max() > 31
    assert summary.sets[0].report.truncated.count == (summary.sets[0].lengths > 31).sum()
    weighted = build(replace(two, weights=[1, 3], max_epochs=[1, 9]), tokenizer)
    first, second = weighted.summary(40).sets
    assert (first.max_epochs, second.max_epochs) == (1, 9) and 3 < second.epochs / first.epochs < 12
    assert not build(replace(two, sampler=Repeating.Config()), tokenizer).summary(0).follows_seed


# --- samplers
# --------------------------------------------------------------------------------------------------


class OneSample(ShuffleSampler):
    """Sampler that always draws the same sample."""

    @dataclass(kw_only=True, slots=True)
    class Config(ShuffleSampler.Config):
        sample: int = 0

    def draw(self, n):
        return np.full_like(super().draw(n), self.config.sample)


class Repeating(Sampler):
    """Sampler that draws the last observed samples first, then random ones."""

    needs_sample_losses = True

    @dataclass(kw_only=True, slots=True)
    class Config(Sampler.Config):
        first: list[int] = field(default_factory=lambda: [0, 1, 2])

    def __init__(self, config, *, n_samples, seed):
        super().__init__(config, n_samples=n_samples, seed=seed)
        self.observed: list[int] = list(config.first)
        self.n_drawn = 0

    @property
    def epoch(self):
        return 0

    def draw(self, n):
        drawn = np.array([self.observed[(self.n_drawn + i) % len(self.observed)] for i in range(n)])
        self.n_drawn += n
        return drawn

    def observe(self, statistics):
        if len(statistics.samples):
            # A lost or repeated observation would change this value.
            shift = int(statistics.loss) + int(self.observed[0])
            self.observed = [int(sample + shift) % self.n_samples for sample in statistics.samples]

    def state_dict(self):
        return {"observed": list(self.observed), "n_drawn": self.n_drawn}

    def load_state_dict(self, state):
        self.observed, self.n_drawn = list(state["observed"]), state["n_drawn"]


def train(loader, steps, first=1):
    """Return batches; after each one, report a step's statistics of its samples."""
    seen = []
    for step in range(first, first + steps):
        batch = next(loader)
        numbers = np.array(sorted(ledger([batch])))
        loader.observe(StepStatistics(step, float(step), 1.0, numbers, np.ones(len(numbers))))
        seen += windows([batch])
    return seen


def test_statistics_reach_each_sampler_with_its_own_sample_numbers(two, tokenizer):
    loader = build(replace(two, sampler=Repeating.Config(), pack_chunk=1), tokenizer, batch=1)
    assert loader.needs_sample_losses and not build(two, tokenizer).needs_sample_losses
    next(loader)
    loader.observe(StepStatistics(1, 2.0, 1.0, np.array([3, 89, 90, 95]), np.ones(4)))
    next(loader)
    observed = [
        stream["sampler"]["observed"] for stream in loader.state_dict()["position"]["streams"]
    ]
    assert observed == [[5, 1], [2, 7]]  # 3 and 89 of 90, and 0 and 5 of 40, moved by 2


@pytest.mark.parametrize("workers", [0, 2])
def test_adaptive_sampler_resumes_exactly(config, tokenizer, workers):
    adaptive = replace(config, sampler=Repeating.Config(), pack_chunk=3, num_workers=workers)
    loader = build(adaptive, tokenizer)
    straight = train(loader, 24)
    loader.close()
    assert len(set(straight)) > 8
    first = build(adaptive, tokenizer)
    seen = train(first, 9)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    resumed = build(adaptive, tokenizer)
    resumed.load_state_dict(state)
    assert seen + train(resumed, 15, first=10) == straight
    resumed.close()


# --- configuration
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": []}, "--dataloader.dataset is empty; set it to a file such as my.jsonl"),
        ({"num_workers": -1}, "num_workers is -1, but must be at least 0"),
        ({"pack_chunk": 0}, "pack_chunk is 0, but must be at least 1 sample"),
        (
            {"weights": [1.0, 2.0]},
            r"--dataloader.weights must have one value per dataset \(1\), not 2",
        ),
        (
            {"max_epochs": [1.0, 2.0]},
            r"--dataloader.max_epochs must have one value per dataset \(1\), not 2",
        ),
        ({"max_epochs": [0.0]}, "max_epochs is 0, but must be above 0"),
        (
            {"weight_schedule": ["5: 1"]},
            "--dataloader.weight_schedule also needs --dataloader.weights",
        ),
        (
            {"weights": [1.0], "weight_schedule": ["5 1"]},
            "entries such as '500: 0.2 0.8', not '5 1'",
        ),
        ({"weights": [1.0], "weight_schedule": ["a: 1"]}, "not 'a: 1'"),
        ({"token_range": "7"}, "--dataloader.token_range must have the form LOW-HIGH"),
        ({"max_repetition": 2.0}, "--dataloader.max_repetition is 2.0, but must be from 0 to 1"),
    ],
)
def test_wrong_options_are_found_before_reading(config, tokenizer, changes, message):
    with pytest.raises(UserError, match=message):
        build(replace(config, **changes), tokenizer)


def test_arguments_out_of_range(config, tokenizer):
    for name in ("seq_len", "local_batch_size", "epochs"):
        with pytest.raises(UserError, match=f"{name} is 0, but must be at least 1"):
            config.build(tokenizer=tokenizer, **{"seq_len": 8, "local_batch_size": 1, name: 0})


def test_schedule():
    assert parse_schedule([]) == [] and parse_schedule(["5: 0.2 0.8", "9:1 0"]) == [
        (5, [0.2, 0.8]),
        (9, [1.0, 0.0]),
    ]


def test_conversations_need_a_template(config, tokenizer):
    with pytest.raises(
        UserError,
        match=r"--dataloader\.chat_template to a file or one of: chatml, llama3, mistral, alpaca",
    ):
        build(replace(config, chat_template=""), tokenizer)


def test_plain_text_needs_no_template(config, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a story of a cat"}\n{"text": "and one of a dog"}\n'
    )
    loader = build(
        replace(config, dataset=[str(tmp_path / "a.jsonl")], chat_template=""),
        tokenizer,
        batch=1,
        epochs=1,
    )
    assert loader.template is None and loader.assets() == {}
    expected = tokenizer.encode_documents(["a story of a cat", "and one of a dog"])
    assert [loader.samples.sample(i).ids.tolist() for i in range(2)] == expected


def test_loader_has_the_template_for_export(config, tokenizer):
    loader = build(config, tokenizer)
    assert loader.assets()["chat_template.jinja"] == loader.template.source == TEMPLATE


def test_prepare_builds_the_cache_of_the_loader(config, tokenizer, tmp_path):
    fresh = replace(config, cache_dir=str(tmp_path))
    fresh.prepare(tokenizer=tokenizer)
    [made] = [path for path in (tmp_path / "samples").iterdir() if path.is_dir()]
    build(fresh, tokenizer)
    build(fresh, tokenizer, seq_len=32)
    assert [path for path in (tmp_path / "samples").iterdir() if path.is_dir()] == [made]


def test_data_summary_is_logged_at_the_start(config, tokenizer, caplog):
    with caplog.at_level(logging.INFO, "torchtitan"):
        loader = build(replace(config, too_long="truncate_right"), tokenizer, seq_len=30)
    assert "90 of 90 rows kept (prompt_response)" in caplog.text and "truncated: " in caplog.text
    positions = sum(len(loader.samples.sample(i).ids) - 1 for i in range(90))
    assert f"{loader.packing_efficiency:.1%} of the windows' 30 positions are filled" in caplog.text
    trained = sum(int(loader.samples.sample(i).trained[1:].sum()) for i in range(90))
    assert loader.samples.trained_fraction == pytest.approx(trained / positions)


def collect_warnings(config, tokenizer, caplog, **runtime):
    """Return the warnings from preparing the data, loading it, and loading it on another rank."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torchtitan"):
        config.prepare(tokenizer=tokenizer)
        assert not caplog.messages
        build(config, tokenizer, **runtime)
    return caplog.messages


@pytest.mark.parametrize(
    ("n_long", "too_long", "warns"),
    [(1, "drop", False), (2, "drop", True), (2, "truncate_right", False)],
)
def test_many_dropped_rows_cause_a_warning(
    config, tokenizer, tmp_path, caplog, n_long, too_long, warns
):
    rows = [{"prompt": "a", "response": "the cat " * (40 if i < n_long else 1)} for i in range(100)]
    changed = replace(config, dataset=[write_jsonl(tmp_path / "c.jsonl", rows)], too_long=too_long)
    remedy = (
        "increase --training.seq_len, or set --dataloader.too_long truncate_left or truncate_right"
    )
    expected = (
        f"{changed.dataset[0]}: 2 of 100 rows (2.0%) are dropped because they have more than 65 "
        f"tokens; {remedy}"
    )
    assert collect_warnings(changed, tokenizer, caplog) == [expected] * warns
    if n_long == 2 and too_long == "drop":
        with pytest.raises(
            UserError, match=f"has no rows left to train on: .*dropped, too_long: 2 .*{remedy}"
        ):
            build(
                replace(changed, dataset=[write_jsonl(tmp_path / "d.jsonl", rows[:2])]), tokenizer
            )


def test_unread_columns_cause_one_warning(two, tokenizer, tmp_path, caplog):
    assert collect_warnings(two, tokenizer, caplog) == []
    rows = [{"prompt": "a", "response": "b", "id": i, "score": None} for i in range(50)]
    rows[20] |= {"weight": 0.5}
    rows[30] |= {"score": 1, "weight": 2}
    changed = replace(two, dataset=[*two.dataset, write_jsonl(tmp_path / "c.jsonl", rows)])
    [warning] = collect_warnings(changed, tokenizer, caplog)
    assert warning.startswith(
        f"{tmp_path}/c.jsonl: the columns weight (rows: 2), score (rows: 1) are ignored (format "
        "prompt_response)"
    )
    assert "images" not in warning
    assert collect_warnings(changed, tokenizer, caplog) == [warning]  # the cache stores them
    function = tmp_path / "own.py"
    function.write_text(
        "def read(row):\n    return {'prompt': row['prompt'], 'response': row['response']}\n"
    )
    assert collect_warnings(replace(changed, format=f"{function}:read"), tokenizer, caplog) == []


def test_images_of_rows_for_text_are_counted(config, tokenizer, tmp_path, caplog):
    rows = [
        {"prompt": "a", "response": "b", "image": f"{i}.png" if i % 2 else ""} for i in range(9)
    ]
    changed = replace(config, dataset=[write_jsonl(tmp_path / "c.jsonl", rows)])
    [warning] = collect_warnings(changed, tokenizer, caplog)
    assert "the column image (rows: 4) is ignored" in warning
    assert "to train on images, use --config sft_images" in warning
    [samples] = build(changed, tokenizer).samples.sets
    assert samples.report.unread["image"].count == 4
    [line] = [line for line in samples.report.lines() if "not read" in line]
    assert line.startswith("with the column image, which is not read: 4 (c.jsonl:2, c.jsonl:4, ")


def test_error_for_a_bad_answer_gives_its_place(config, tokenizer, tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": i != 2} for i in range(4)]
    changed = replace(config, dataset=[write_jsonl(tmp_path / "kto.jsonl", rows)], broken="drop")
    with pytest.raises(UserError, match=r"kto.jsonl:3: its label is False: .* as for KTO"):
        build(changed, tokenizer)
    assert (
        len(
            take(
                build(
                    replace(changed, format="prompt_completion", packing="none"),
                    tokenizer,
                    epochs=1,
                )
            )
        )
        == 2
    )


def test_message_with_loss_weight_0_is_not_trained(config, tokenizer, tmp_path):
    turns = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "ran home", "loss_weight": 0},
        {"role": "user", "content": "the dog"},
        {"role": "assistant", "content": "saw the sun", "loss_weight": 1.0},
    ]
    changed = replace(config, dataset=[write_jsonl(tmp_path / "c.jsonl", [{"messages": turns}])])
    [batch] = take(build(changed, tokenizer, batch=1, epochs=1))
    labels = batch["labels"][batch["labels"] != IGNORE_INDEX].tolist()
    assert tokenizer.decode(labels) == f" saw the sun{tokenizer.decode([tokenizer.eos_id])}"


def test_reported_efficiency_equals_the_efficiency_of_an_epoch(config, tokenizer):
    loader = build(config, tokenizer, batch=1, epochs=1)
    batches = take(loader)
    filled = sum(tokens_by_source(loader, batches))
    # A different shuffle may need one or two more windows out of about 30.
    assert loader.packing_efficiency == pytest.approx(filled / (len(batches) * SEQ_LEN), rel=0.06)


# --- validation
# --------------------------------------------------------------------------------------------------


def test_validation_file_keeps_its_order(config, folder, tokenizer):
    shuffled = replace(config, weights=[1.0], num_workers=2)
    validation = shuffled.for_validation(str(folder / "b.jsonl"))
    assert (validation.dataset, validation.split) == ([str(folder / "b.jsonl")], "train")
    loader = build(replace(validation, packing="none"), tokenizer, epochs=1)
    assert windows(take(loader)) == [(number,) for number in range(40)]
    packed = build(validation, tokenizer, epochs=1)
    assert ledger(take(packed)) == Counter(range(40))


def test_validation_split_of_the_dataset(config):
    assert config.for_validation("") is None
    chats = replace(config, dataset=[*config.dataset, "chats"])
    assert (chats.for_validation("").dataset, chats.for_validation("").split) == (
        ["chats"],
        "validation",
    )
    assert chats.for_validation("chats").split == "validation"


def test_row_options_apply_to_validation_if_they_fit(config, tokenizer, tmp_path):
    rows = [{"q": f"{i} cats?", "response": f"{i} cats."} for i in range(4)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    mapped = replace(config, dataset=[str(tmp_path / "q.jsonl")], columns=["prompt=q"])
    assert mapped.for_validation(str(tmp_path / "q.jsonl")).columns == ["prompt=q"]
    build(mapped.for_validation(str(tmp_path / "held.jsonl")), tokenizer)
    both = replace(mapped, dataset=[*mapped.dataset, str(tmp_path / "held.jsonl")])
    assert [dataset.n_samples for dataset in build(both, tokenizer).samples.sets] == [4, 1]
    named = replace(mapped, format="prompt_response")
    assert named.for_validation(str(tmp_path / "q.jsonl")).format == "prompt_response"
    assert named.for_validation(str(tmp_path / "held.jsonl")).format == "auto"
    with pytest.raises(UserError, match="no column 'frage'"):
        build(replace(both, columns=["prompt=frage"]), tokenizer)


def test_a_token_that_is_changed_in_the_cache_is_named(tokenizer, tmp_path):
    """While the run reads it, not by an IndexError of the model."""
    rows = [{"prompt": "What is it?", "completion": f"It is {number}."} for number in range(5)]
    config = SFTDataLoader.Config(
        dataset=[write_jsonl(tmp_path / "a.jsonl", rows)],
        cache_dir=str(tmp_path / "cache"),
        chat_template="alpaca",
    )
    loader = config.build(tokenizer=tokenizer, seq_len=128, local_batch_size=1, epochs=1)
    [ids] = tmp_path.glob("cache/samples/*/ids.bin")
    with ids.open("r+b") as file:
        file.seek(-4, 2)
        file.write(np.uint32(60_000).tobytes())
    with pytest.raises(
        UserError, match=r"a.jsonl:5, token \d+: token id 60000 is outside the vocabulary of"
    ):
        take(loader)
