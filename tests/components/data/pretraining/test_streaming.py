"""Streaming of registered datasets: batches, position, end."""

import json
import logging
import pickle
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.components.data.helpers import take, with_positions
from torchtitan.assets.stories import Stories
from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.data import HubDataset, PretrainDataLoader, register_dataset
from torchtitan.components.data.base import Layout
from torchtitan.components.data.pretraining.streamed_windows import StreamOrder
from torchtitan.components.data.pretraining.streaming import PackedStream
from torchtitan.components.data.pretraining.token_cache import document_wrapping
from torchtitan.components.data.sources import source
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.tools.digests import digest_of
from torchtitan.tools.errors import RunFailure, UserError

datasets = pytest.importorskip("datasets")

SEQ_LEN = 64
# Short, empty and long texts; the long ones span many windows.
TEXTS = [" ".join(story.split()[: 5 + 2 * i]) for i, story in enumerate(Stories("validation", 75))]
TEXTS[7], TEXTS[20] = "", " ".join(TEXTS[65:75])


def write_folder(folder: Path, kind: str, n_files: int) -> Path:
    """Write the texts to files of unequal length."""
    folder.mkdir()
    bounds = [0, *(len(TEXTS) * (i + 1) ** 2 // n_files**2 for i in range(n_files))]
    for i in range(n_files):
        rows = datasets.Dataset.from_dict(
            {"text": TEXTS[bounds[i] : bounds[i + 1]], "n": range(*bounds[i : i + 2])}
        )
        path = folder / f"train-{i:05d}-of-{n_files:05d}.{kind}"
        rows.to_parquet(path) if kind == "parquet" else rows.to_json(path)
    return folder


@pytest.fixture(scope="module", params=["jsonl-4", "parquet-1"])
def dataset(request, tmp_path_factory):
    """Name of a registered dataset."""
    kind, n_files = request.param.split("-")
    name = f"streaming-test-{request.param}"
    folder = write_folder(tmp_path_factory.mktemp("stream") / "data", kind, int(n_files))
    register_dataset(name, HubDataset(path=str(folder)))
    return name


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    """Name of a registered dataset with one file."""
    folder = write_folder(tmp_path_factory.mktemp("stream") / "data", "jsonl", 1)
    register_dataset("streaming-test-one-file", HubDataset(path=str(folder)))
    return "streaming-test-one-file"


def build(
    name,
    tokenizer,
    *,
    batch=3,
    workers=0,
    shuffle=True,
    block=16,
    document_mask=True,
    text_column=None,
    **runtime,
):
    config = PretrainDataLoader.Config(
        dataset=[name],
        text_column=text_column,
        shuffle=shuffle,
        shuffle_buffer=block,
        num_workers=workers,
        document_mask=document_mask,
    )
    return config.build(
        tokenizer=tokenizer, **{"seq_len": SEQ_LEN, "local_batch_size": batch, **runtime}
    )


def mixture(tmp_path, stream, other):
    """Return the options of two streams and a file, which take turns 2 : 1 : 1."""
    file = tmp_path / "local.jsonl"
    rows = [{"text": f"local {text}"} for text in TEXTS[30:60]]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    names = [stream, other, str(file)]
    return PretrainDataLoader.Config(
        dataset=names, weights=[2, 1, 1], shuffle_buffer=16, cache_dir=str(tmp_path / "c")
    )


def test_a_mixture_has_the_windows_of_each_dataset_in_turn(dataset, one_file, tokenizer, tmp_path):
    config = mixture(tmp_path, dataset, one_file)
    runtime = {"tokenizer": tokenizer, "seq_len": SEQ_LEN, "local_batch_size": 1, "seed": 3}
    loader = config.build(**runtime, epochs=1)
    batches = take(loader)
    turns = [loader.datasets_of(batch)[0, 0].item() for batch in batches]
    for end in range(1, len(turns)):
        shares = [turns[:end].count(number) for number in range(3)]
        expected = [end / 2, end / 4, end / 4]
        assert all(abs(a - b) < 1 for a, b in zip(shares, expected, strict=True))
    has_ended = []
    for number, name in enumerate(config.dataset):
        alone = replace(config, dataset=[name], weights=[]).build(**runtime, epochs=1)
        own = [batch["input"].tolist() for batch in take(alone)]
        found = [
            b["input"].tolist() for b, turn in zip(batches, turns, strict=True) if turn == number
        ]
        assert found == own[: len(found)]
        has_ended.append(len(found) == len(own))
        shown = loader.describe(batches[turns.index(number)]["documents"][0])
        assert shown.startswith(
            f"{name} (train), document" if number < 2 else "local.jsonl, document"
        )
    assert sum(has_ended) == 1


@pytest.mark.parametrize("ranks, workers", [(1, 0), (2, 2)])
def test_a_mixture_resumes_exactly(dataset, one_file, tokenizer, tmp_path, ranks, workers):
    config = replace(mixture(tmp_path, dataset, one_file), num_workers=workers)
    runtime = {"tokenizer": tokenizer, "seq_len": SEQ_LEN, "local_batch_size": 3}
    runtime |= {"dp_rank": ranks - 1, "dp_world_size": ranks}
    loader = config.build(**runtime)
    straight = as_lists(take(loader, 12))
    loader.close()
    state, pieces = None, []
    for _ in range(2):
        loader = config.build(**runtime, seed=len(pieces))
        if state is not None:
            loader.load_state_dict(json.loads(state))
        pieces += as_lists(take(loader, 6))
        state = json.dumps(loader.state_dict())
        loader.close()
    assert pieces == straight


def test_a_mixture_without_weights_is_read_once_per_epoch(one_file, tokenizer, tmp_path):
    """By two ranks together; and a run resumes exactly, also in the second epoch."""
    config = mixture(tmp_path, one_file, one_file)
    config = replace(config, dataset=config.dataset[1:], weights=[])
    runtime = {"tokenizer": tokenizer, "seq_len": SEQ_LEN, "local_batch_size": 1, "epochs": 2}

    def read(config, rank):
        loader = config.build(**runtime, dp_rank=rank, dp_world_size=2)
        batches, states = [], [loader.state_dict()]
        while (batch := next(loader, None)) is not None and not loader.exhausted:
            batches.append(batch)
            states.append(loader.state_dict())
        sets = [loader.datasets_of(batch)[0, 0].item() for batch in batches]
        return batches, sets, json.dumps(states)

    def windows(batches):
        rows = [tuple(batch["input"][0].tolist()) for batch in batches]
        labels = [batch["labels"] for batch in batches]
        return Counter(row for row, own in zip(rows, labels, strict=True) if (own >= 0).any())

    found = [read(config, rank) for rank in range(2)]
    for number, name in enumerate(config.dataset):
        alone = [read(replace(config, dataset=[name]), rank)[0] for rank in range(2)]
        mixed = [
            batch
            for batches, sets, _ in found
            for batch, one in zip(batches, sets, strict=True)
            if one == number
        ]
        assert windows(mixed) == windows([batch for batches in alone for batch in batches])
    batches, sets, states = found[1]
    assert {*sets[: len(sets) // 4]} == {0, 1}  # they take turns from the beginning
    for place in (len(batches) // 3, 2 * len(batches) // 3):
        resumed = config.build(**runtime, dp_rank=1, dp_world_size=2, seed=7)
        resumed.load_state_dict(json.loads(states)[place])
        assert as_lists(take(resumed, 8)) == as_lists(batches[place : place + 8])


def test_weights_are_the_remedy_for_an_unknown_size(tmp_path, one_file, tokenizer):
    """A registered dataset is streamed with any `--dataloader.stream`."""
    register_dataset("no-size", HubDataset(path=str(tmp_path)))
    config = PretrainDataLoader.Config(dataset=["no-size", str(one_file)], cache_dir=str(tmp_path))
    loader = config.build(tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=1)
    with pytest.raises(UserError, match="unknown: .* each dataset [(]--dataloader.weights"):
        next(loader)


def test_all_ranks_read_the_commit_that_rank_0_finds(tokenizer, monkeypatch):
    """A push may come between the hub's answers to two ranks."""

    class Rank1(Ranks):
        def broadcast_from_rank0(self, function):
            return ["0" * 40]

    monkeypatch.setattr(source, "commit_of", lambda *_: "1" * 40)
    commits = []
    for ranks in (Ranks(), Rank1()):
        monkeypatch.setattr(Ranks, "of_run", lambda ranks=ranks: ranks)
        [commit] = build("c4", tokenizer).state_dict()["position"]["commits"]
        commits.append(commit)
    assert commits == ["1" * 40, "0" * 40]


def test_a_mixture_that_cannot_be_read(one_file, tokenizer, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    datasets.Dataset.from_dict({"text": ["a short text"]}).to_json(folder / "train.jsonl")
    register_dataset("streaming-test-single", HubDataset(path=str(folder)))
    config = mixture(tmp_path, "streaming-test-single", one_file)
    runtime = {"tokenizer": tokenizer, "seq_len": SEQ_LEN, "local_batch_size": 1}
    loader = config.build(**runtime, dp_rank=1, dp_world_size=2)
    with pytest.raises(UserError, match=r"single' has fewer documents than the run has ranks"):
        next(loader)
    ended = config.build(**runtime, epochs=1)
    take(ended)
    with pytest.raises(UserError, match=r"read to its end, after 1 epochs"):
        config.build(**runtime, epochs=2).load_state_dict(ended.state_dict())


def as_lists(batches, loader=None):
    """Return the values of batches as lists, with the numbers in the names of documents if the
    loader is given."""
    lists = [
        {name: value.tolist() for name, value in with_positions(batch).items()} for batch in batches
    ]
    if loader:
        for batch, values in zip(batches, lists, strict=True):
            names = [loader.describe(row) for row in batch["documents"]]
            values["documents"] = [
                re.search(r"no document|documents? [\d,-]+", name).group() for name in names
            ]
    return lists


def token_stream(batches, node=0, n_nodes=1):
    """Rebuild the token stream of one rank from its samples; the last label follows the last
    input."""
    tokens = []
    for batch in batches:
        for inputs, labels, (first, _) in zip(
            batch["input"], batch["labels"], batch["documents"].tolist(), strict=True
        ):
            if first >= 0 and first % n_nodes == node:
                n_inputs = max((labels != IGNORE_INDEX).nonzero().flatten().tolist()) + 1
                tokens += inputs[:n_inputs].tolist()
                last = labels[n_inputs - 1].item()
    return [*tokens, last] if tokens else []


def documents_in(stream, tokenizer):
    """Return the documents of a token stream, in order."""
    begins = [i for i, token in enumerate(stream) if token == tokenizer.bos_id]
    assert not begins or begins[0] == 0
    return [tuple(stream[i:j]) for i, j in zip(begins, [*begins[1:], len(stream)], strict=True)]


def expected_documents(tokenizer, epochs=1):
    return sorted(
        epochs
        * [tuple(ids) for ids in tokenizer.encode_documents([text for text in TEXTS if text])]
    )


@pytest.mark.parametrize("document_mask", [True, False])
def test_unshuffled_stream_equals_local_data(dataset, tokenizer, tmp_path, document_mask):
    with (tmp_path / "local.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    config = PretrainDataLoader.Config(
        dataset=[str(tmp_path / "local.jsonl")],
        shuffle=False,
        document_mask=document_mask,
        cache_dir=str(tmp_path / "c"),
    )
    local = config.build(tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=3, epochs=1)
    stream = build(dataset, tokenizer, shuffle=False, document_mask=document_mask, epochs=1)
    assert as_lists(take(stream), stream) == as_lists(take(local), local)
    assert stream.n_samples is None


@pytest.mark.parametrize("ranks, workers", [(1, 0), (1, 2), (2, 0), (2, 2), (5, 0)])
def test_every_document_once_per_epoch(dataset, tokenizer, ranks, workers):
    documents, n_nodes = [], ranks * max(1, workers)
    for rank in range(ranks):
        loader = build(
            dataset,
            tokenizer,
            workers=workers,
            dp_rank=rank,
            dp_world_size=ranks,
            epochs=1,
            document_mask=False,
        )
        batches = []
        while not loader.exhausted:
            batch = next(loader, None)
            batches += [] if batch is None else [batch]
        for node in range(rank * max(1, workers), (rank + 1) * max(1, workers)):
            documents += documents_in(token_stream(batches, node, n_nodes), tokenizer)
        loader.close()
    assert sorted(documents) == expected_documents(tokenizer)


def test_each_epoch_is_shuffled_differently(dataset, tokenizer):
    loader = build(dataset, tokenizer, batch=1, document_mask=False)
    epochs, batches = [], []
    while len(epochs) < 3:
        batches.append(next(loader))
        if (batches[-1]["labels"] == IGNORE_INDEX).any():  # the last window of an epoch
            epochs.append(documents_in(token_stream(batches), tokenizer))
            batches = []
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [sorted(epoch) for epoch in epochs] == [expected_documents(tokenizer)] * 3


def test_files_are_shuffled_from_the_second_epoch(tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", "jsonl", 6)
    register_dataset("streaming-test-files", HubDataset(path=str(folder)))
    loader = build(
        "streaming-test-files", tokenizer, batch=1, block=1, epochs=2, document_mask=False
    )
    batches = take(loader)
    end = next(i for i, batch in enumerate(batches, 1) if (batch["labels"] == IGNORE_INDEX).any())
    epochs = [
        documents_in(token_stream(part), tokenizer) for part in (batches[:end], batches[end:])
    ]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])


def test_closing_keeps_the_position(one_file, tokenizer):
    straight = as_lists(take(build(one_file, tokenizer), 6))
    for workers in (0, 2):
        loader = build(one_file, tokenizer, workers=workers)
        first = as_lists(take(loader, 3))
        loader.close()
        state = loader.state_dict()
        again = as_lists(take(loader, 3))
        loader.close()
        resumed = build(one_file, tokenizer, workers=workers)
        resumed.load_state_dict(state)
        assert as_lists(take(resumed, 3)) == again
        resumed.close()
        assert workers or first + again == straight


@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_saved_before_mixtures_is_read(one_file, tokenizer, workers):
    """As the versions saved it that streamed one dataset only: without turns, under another
    name."""
    loader = build(one_file, tokenizer, workers=workers, epochs=2, seed=5)
    batches = take(loader)
    earlier = build(one_file, tokenizer, workers=workers, epochs=2, seed=5)
    take(earlier, 3)
    state, found = without_turns(json.loads(json.dumps(earlier.state_dict())))
    assert found == 1
    source = resolve_source(one_file, None, "train")
    data = [source.dataset.path, source.dataset.name, source.split, source.text_column]
    encoding = [tokenizer.fingerprint, document_wrapping(tokenizer)]
    state["data"] = digest_of(["stream", data, encoding, [SEQ_LEN, True, 16]])
    resumed = build(one_file, tokenizer, workers=workers, epochs=2, seed=5)
    resumed.load_state_dict(state)
    assert as_lists(take(resumed)) == as_lists(batches[3:])


def without_turns(state):
    """Return a state with the position of its only stream instead of turns, and their number."""
    if not isinstance(state, dict):
        return state, 0
    if state.keys() == {"turn", "weights", "positions"}:
        (position,) = state["positions"]
        return position, 1
    parts = {key: without_turns(value) for key, value in state.items()}
    return {key: part for key, (part, _) in parts.items()}, sum(n for _, n in parts.values())


def test_stream_can_be_pickled(one_file, tokenizer):
    source = resolve_source(one_file)
    layout = Layout(
        seq_len=SEQ_LEN,
        local_batch_size=2,
        dp_rank=0,
        dp_world_size=1,
        num_workers=0,
        document_mask=True,
    )
    order = StreamOrder(shuffle=True, block_size=16, seed=0)
    stream = PackedStream([source], [], [], tokenizer, layout, order)
    copy = pickle.loads(pickle.dumps(stream))
    assert as_lists(take(iter(copy), 3)) == as_lists(take(iter(stream), 3))


def test_seeds_shuffle_differently(one_file, tokenizer):
    orders = [as_lists(take(build(one_file, tokenizer, seed=seed), 5)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def run_through(loader):
    """Return all batches as lists."""
    batches = []
    while not loader.exhausted and (batch := next(loader, None)) is not None:
        batches.append(batch)
    loader.close()
    return as_lists(batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, workers, hop",
    [
        (1, 0, 5),
        (2, 2, 19),
        (1, 0, 1),
        (1, 2, 9),
        (2, 2, 7),
    ],
)
def test_repeated_resume_is_exact(dataset, tokenizer, ranks, workers, hop):
    # Over two epochs, the stops include places in a block, between blocks, in a long document and
    # between epochs.
    runtime = {"workers": workers, "dp_rank": ranks - 1, "dp_world_size": ranks, "epochs": 2}
    straight = run_through(build(dataset, tokenizer, **runtime))
    state, pieces = None, []
    while sum(map(len, pieces)) < len(straight):
        # only the first seed counts
        loader = build(dataset, tokenizer, seed=len(pieces), **runtime)
        if state is not None:
            loader.load_state_dict(json.loads(state))
        pieces.append(as_lists(take(loader, hop)))
        state = json.dumps(loader.state_dict())
        assert len(state) < 5000
        loader.close()
    n_fillers = sum(map(len, pieces)) - len(straight)
    assert [batch for piece in pieces for batch in piece][: len(straight)] == straight
    assert n_fillers < hop


def test_state_before_the_first_batch_starts_no_worker(one_file, tokenizer):
    loader = build(one_file, tokenizer, workers=2)
    state = loader.state_dict()
    assert state["position"]["workers"] is None
    first = take(loader, 2)
    loader.load_state_dict(state)  # rewind
    assert as_lists(take(loader, 2)) == as_lists(first)
    loader.close()


@pytest.mark.parametrize("changed", [{"workers": 1}, {"dp_world_size": 2}])
def test_changed_layout_restarts_with_a_warning(one_file, tokenizer, caplog, changed):
    loader = build(one_file, tokenizer)
    take(loader, 4)
    fresh, other = build(one_file, tokenizer, **changed), build(one_file, tokenizer, **changed)
    with caplog.at_level(logging.WARNING, "torchtitan"):
        other.load_state_dict(loader.state_dict())
    assert (
        "saved with 1 rank and 0 workers per rank" in caplog.text
        and "starts from its beginning" in caplog.text
    )
    restarted = as_lists(take(other, 4))
    assert restarted != as_lists(take(fresh, 4))
    again = build(one_file, tokenizer, **changed)
    again.load_state_dict(loader.state_dict())
    take(again, 2)
    resumed = build(one_file, tokenizer, **changed)
    caplog.clear()
    resumed.load_state_dict(again.state_dict())
    assert as_lists(take(resumed, 2)) == restarted[2:] and not caplog.text
    for each in (fresh, other, again, resumed):
        each.close()


@pytest.mark.parametrize("changed", [{"block": 8}, {"seq_len": 32}, {"shuffle": False}])
def test_position_in_a_different_order_is_rejected(one_file, tokenizer, caplog, changed):
    loader = build(one_file, tokenizer)
    take(loader, 4)
    other = build(one_file, tokenizer, **changed)
    with caplog.at_level(logging.WARNING, "torchtitan"):
        other.load_state_dict(loader.state_dict())
    assert "reading starts at the beginning" in caplog.text
    assert as_lists(take(other, 2)) == as_lists(take(build(one_file, tokenizer, **changed), 2))


def test_end_with_one_rank(one_file, tokenizer):
    for workers in (0, 2):
        loader = build(one_file, tokenizer, workers=workers, epochs=1)
        assert not loader.exhausted
        take(loader)
        assert loader.exhausted and next(loader, None) is None
        loader.close()


def test_all_ranks_end_together_with_unequal_shares(tmp_path, tokenizer):
    (tmp_path / "data").mkdir()
    for i, n_texts in enumerate((2, 40)):
        datasets.Dataset.from_dict({"text": TEXTS[30 : 30 + n_texts]}).to_json(
            tmp_path / f"data/train-{i}.jsonl"
        )
    register_dataset("streaming-test-unequal", HubDataset(path=str(tmp_path / "data")))
    loaders = [
        build("streaming-test-unequal", tokenizer, dp_rank=r, dp_world_size=2, epochs=1)
        for r in range(2)
    ]
    steps, n_exhausted = 0, []
    while True:
        batches = [next(loader) for loader in loaders]  # never StopIteration
        if all(loader.exhausted for loader in loaders):
            break
        for loader, batch in zip(loaders, batches, strict=True):
            assert bool((batch["labels"] == IGNORE_INDEX).all()) == loader.exhausted
            assert batch["input"].shape == (3, SEQ_LEN)
        n_exhausted.append(sum(loader.exhausted for loader in loaders))
        steps += 1
    assert set(n_exhausted) == {0, 1}


def test_ended_stream_stays_ended_and_continues_with_more_epochs(one_file, tokenizer):
    ended = build(one_file, tokenizer, epochs=1)
    n_batches = len(take(ended))
    state = json.loads(json.dumps(ended.state_dict()))
    same = build(one_file, tokenizer, epochs=1)
    same.load_state_dict(state)
    assert same.exhausted and take(same) == []
    state = same.state_dict()
    more = build(one_file, tokenizer, epochs=2)
    more.load_state_dict(state)
    second = take(more)
    assert len(second) == n_batches
    documents = documents_in(
        token_stream(take(build(one_file, tokenizer, epochs=1, document_mask=False))), tokenizer
    )
    assert sorted(documents) == expected_documents(tokenizer)
    straight = build(one_file, tokenizer, batch=1, epochs=2)
    windows = [window for batch in as_lists(take(straight)) for window in batch["input"]]
    resumed = [window for batch in as_lists(second) for window in batch["input"]]
    assert [w for w in resumed if any(w)] == windows[-len([w for w in resumed if any(w)]) :]


def test_workers_without_documents(tmp_path, tokenizer):
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"text": ["one short text"]}).to_json(tmp_path / "data/train.jsonl")
    register_dataset("streaming-test-tiny", HubDataset(path=str(tmp_path / "data")))
    loader = build("streaming-test-tiny", tokenizer, workers=2, batch=2)
    [ids] = tokenizer.encode_documents(["one short text"])
    for batch in take(loader, 5):
        assert batch["labels"][:, : len(ids) - 1].tolist() == [ids[1:]] * 2
    loader.close()


def test_global_random_state_is_unchanged(one_file, tokenizer):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(build(one_file, tokenizer), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_document_names(one_file, tokenizer):
    loader = build(one_file, tokenizer, shuffle=False, workers=2, dp_rank=1, dp_world_size=2)
    first, second = take(loader, 2)
    assert loader.describe(first["documents"][0]).startswith(f"{one_file} (train), documents 1-")
    assert loader.describe(first["documents"][0]).endswith(" as read by worker 0 of rank 1")
    assert loader.describe(second["documents"][0]).endswith(" as read by worker 1 of rank 1")
    assert loader.describe(torch.tensor([-1, -1])) == "no document (padding)"
    loader.close()


def test_the_ledger_names_the_epoch(one_file, tokenizer):
    """A document has another place in each epoch among the documents of its reader."""
    batches = list(build(one_file, tokenizer, epochs=2))
    loader = build(one_file, tokenizer)
    names = [
        name
        for batch in batches
        for row in batch["documents"]
        for name in loader.document_names(row)
    ]
    of_epoch = [
        [name for name in names if ("of epoch 2" in name) is second] for second in (False, True)
    ]
    assert len(of_epoch[0]) == len(of_epoch[1]) > 5
    assert "documents 1-" in of_epoch[0][0] and "documents 1-" in of_epoch[1][0]
    assert not set(of_epoch[0]) & set(of_epoch[1])


def test_validation_split(tmp_path, tokenizer):
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"body": ["training text"]}).to_json(tmp_path / "data/train.jsonl")
    datasets.Dataset.from_dict({"body": ["validation text"]}).to_json(
        tmp_path / "data/validation.jsonl"
    )
    register_dataset(
        "streaming-test-splits",
        HubDataset(path=str(tmp_path / "data"), splits=("train", "validation"), text_column="body"),
    )
    config = PretrainDataLoader.Config(dataset=["streaming-test-splits"]).for_validation("")
    [batch] = config.build(tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=1, epochs=1)
    assert tokenizer.decode(batch["input"][0].tolist(), skip_special_tokens=True).startswith(
        "validation text"
    )


def test_prepare_finds_wrong_options(tmp_path, one_file, tokenizer):
    def prepare(name, **fields):
        PretrainDataLoader.Config(dataset=[name], **fields).prepare(tokenizer=tokenizer)

    prepare(one_file)
    with pytest.raises(
        UserError, match=f"dataset '{one_file}': no column 'body'; set --dataloader.text_column to"
    ):
        prepare(one_file, text_column="body")
    with pytest.raises(UserError, match="column 'n' contains an int, not text"):
        prepare(one_file, text_column="n")
    register_dataset("streaming-test-missing", HubDataset(path=str(tmp_path / "nowhere")))
    with pytest.raises(
        UserError, match=r"'streaming-test-missing' \(.*nowhere, split 'train'\) cannot be read: "
    ):
        prepare("streaming-test-missing")
    with pytest.raises(UserError, match="has no split 'test'; use one of: train"):
        prepare(one_file, split="test")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.jsonl").write_text("")
    register_dataset("streaming-test-empty", HubDataset(path=str(tmp_path / "empty")))
    with pytest.raises(UserError, match="'streaming-test-empty'"):
        prepare("streaming-test-empty")


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_text_in_a_worker_is_a_user_error(one_file, tokenizer, workers):
    loader = build(one_file, tokenizer, workers=workers, text_column="n")
    with pytest.raises(
        UserError, match=f"^dataset '{one_file}': column 'n' contains an int, not text$"
    ):
        next(loader)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_failure_while_reading_is_no_user_error(tmp_path, tokenizer, workers):
    folder = write_folder(tmp_path / "data", "jsonl", 4)
    with (folder / "train-00003-of-00004.jsonl").open("a") as file:
        file.write('{"text": "cut sho')
    name = f"streaming-test-failing-{workers}"
    register_dataset(name, HubDataset(path=str(folder)))
    loader = build(name, tokenizer, workers=workers, shuffle=False, block=1, epochs=1)
    loader.config.prepare(tokenizer=tokenizer)
    next(loader)
    with pytest.raises(RunFailure) as raised:
        take(loader)
    message = str(raised.value)
    assert message.startswith(f"dataset '{name}' ({folder}, split 'train') cannot be read: ")
    assert (
        message.endswith("; check the network, and resume from the last checkpoint")
        and "\n" not in message
    )
    loader.close()


def test_failure_to_open_during_a_run_is_no_user_error(tmp_path, tokenizer):
    register_dataset("streaming-test-gone", HubDataset(path=str(tmp_path / "gone")))
    with pytest.raises(RunFailure, match="'streaming-test-gone' .* cannot be read: "):
        next(build("streaming-test-gone", tokenizer))


def test_error_without_network_names_the_dataset(tokenizer, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = (
        r"^dataset 'c4' \(allenai/c4, en, split 'train'\) cannot be read: .*; check the "
        r"network, "
        r"or use a local "
    )
    with pytest.raises(UserError, match=message):
        PretrainDataLoader.Config(dataset=["c4"]).prepare(tokenizer=tokenizer)
