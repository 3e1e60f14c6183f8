"""`PretrainDataLoader` on local data: order, position, end, workers."""

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.commands import run_command
from tests.components.data.helpers import replace, take, with_positions
from torchtitan.assets.stories import Stories
from torchtitan.components.data import BaseDataLoader, PretrainDataLoader
from torchtitan.components.data.pretraining import windows
from torchtitan.components.data.pretraining.token_cache import open_token_cache
from torchtitan.components.data.pretraining.windows import pack
from torchtitan.components.data.sources.source import resolve_source
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.tools.errors import UserError

SEQ_LEN = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Validation stories: a few hundred documents in about 1,000 windows."""
    folder = tmp_path_factory.mktemp("data")
    with (folder / "a.jsonl").open("w") as file:
        for story in Stories("validation", 60):
            file.write(json.dumps({"text": story}) + "\n")
    return PretrainDataLoader.Config(
        dataset=[str(folder / "a.jsonl")], cache_dir=str(folder / "cache")
    )


def build(config, tokenizer, *, batch=4, **runtime):
    return config.build(
        tokenizer=tokenizer, **{"seq_len": SEQ_LEN, "local_batch_size": batch, **runtime}
    )


def rows(batches):
    """Return samples as comparable tuples, in order."""
    batches = [with_positions(batch) for batch in batches]
    names = sorted(batches[0])
    return [
        tuple(tuple(batch[name][i].tolist()) for name in names)
        for batch in batches
        for i in range(len(batch["input"]))
    ]


def assert_same(batches, others):
    assert len(batches) == len(others) and rows(batches) == rows(others)


def real(samples):
    """Drop the padding samples of the last batch (`documents` sorts first)."""
    return [sample for sample in samples if sample[0] != (-1, -1)]


def test_a_single_dataset_may_be_a_string():
    assert PretrainDataLoader.Config(dataset="my_text.txt").dataset == ["my_text.txt"]


def test_batch(config, tokenizer):
    loader = build(config, tokenizer)
    assert isinstance(loader, BaseDataLoader) and iter(loader) is loader
    batch = with_positions(next(loader))
    shapes = {name: tuple(value.shape) for name, value in batch.items()}
    assert shapes == {
        "input": (4, 16),
        "labels": (4, 16),
        "positions": (4, 16),
        "documents": (4, 2),
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}
    plain = next(build(replace(config, document_mask=False), tokenizer))
    assert (
        set(plain) == {"input", "labels", "documents"} and (plain["input"] == batch["input"]).all()
    )


@pytest.mark.parametrize("document_mask", [True, False])
def test_epoch_predicts_every_token_once(config, tokenizer, document_mask):
    cache = open_token_cache(resolve_source(config.dataset[0]), tokenizer, config.cache_dir)
    loader = build(replace(config, document_mask=document_mask), tokenizer, epochs=1)
    labels = torch.cat([batch["labels"].flatten() for batch in loader])
    tokens = cache.tokens(0, cache.n_tokens)
    unpredicted = cache.starts(0, cache.n_tokens) if document_mask else [0]
    expected = np.delete(tokens, unpredicted)
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == sorted(expected.tolist())


def test_unshuffled_order_is_the_order_of_the_file(config, tokenizer):
    loader = build(replace(config, shuffle=False), tokenizer, epochs=1)
    batches = take(loader)
    tokens = torch.cat([batch["input"].flatten() for batch in batches]).tolist()
    documents = tokenizer.encode_documents(list(Stories("validation", 60)))
    expected = [i for ids in documents for i in ids][:-1]
    assert tokens[: len(expected)] == expected and not any(tokens[len(expected) :])
    assert loader.describe(batches[0]["documents"][0]) == "a.jsonl, document 1"
    lengths = np.cumsum([len(ids) for ids in documents])
    row = next(i for i in range(99) if i * SEQ_LEN < lengths[0] <= i * SEQ_LEN + SEQ_LEN)
    assert loader.describe(batches[row // 4]["documents"][row % 4]) == "a.jsonl, documents 1-2"
    assert loader.document_names(batches[row // 4]["documents"][row % 4]) == [
        "a.jsonl, documents 1-2"
    ]
    assert loader.describe(torch.tensor([-1, -1])) == "no document (padding)"
    assert loader.document_names(torch.tensor([-1, -1])) == []


def test_each_epoch_is_complete_and_shuffled_differently(config, tokenizer):
    n_samples = build(config, tokenizer, epochs=1).n_samples
    loader = build(config, tokenizer, batch=1)
    assert loader.n_samples is None
    epochs = [rows(take(loader, n_samples)) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    in_file_order = rows(take(build(replace(config, shuffle=False), tokenizer, batch=1, epochs=1)))
    assert sorted(in_file_order) == sorted(epochs[0]) and in_file_order != epochs[0]


def test_seed_sets_the_order(config, tokenizer):
    orders = [rows(take(build(config, tokenizer, seed=seed), 20)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    "ranks, batch, workers", [(1, 8, 0), (2, 4, 0), (4, 2, 0), (8, 1, 0), (1, 8, 2), (2, 4, 1)]
)
def test_global_order_is_the_same_for_any_layout(config, tokenizer, ranks, batch, workers):
    loaders = [
        build(
            replace(config, num_workers=workers),
            tokenizer,
            batch=batch,
            dp_rank=r,
            dp_world_size=ranks,
            epochs=1,
        )
        for r in range(ranks)
    ]
    # strict: every rank has the same number of batches
    steps = [rows(step) for step in zip(*loaders, strict=True)]
    reference = build(config, tokenizer, batch=8, epochs=1)
    assert steps == [rows([step]) for step in reference]
    for loader in loaders:
        assert loader.exhausted
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("n_batches", [0, 1, 7])
def test_resume_is_exact_after_the_last_returned_batch(config, tokenizer, workers, n_batches):
    straight = take(build(config, tokenizer), 30)
    loader = build(replace(config, num_workers=workers), tokenizer)
    first = take(loader, n_batches)
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    resumed = build(replace(config, num_workers=2 - workers), tokenizer)
    resumed.load_state_dict(state)
    assert_same(first + take(resumed, 30 - n_batches), straight)
    resumed.load_state_dict(state)  # the same loader can rewind
    assert_same(take(resumed, 5), straight[n_batches : n_batches + 5])
    resumed.close()


def test_resume_with_different_ranks_and_batches_keeps_every_sample(config, tokenizer):
    straight = rows(take(build(config, tokenizer, batch=1), 60))
    two = [build(config, tokenizer, batch=3, dp_rank=r, dp_world_size=2) for r in range(2)]
    first = [
        sample
        for step in zip(*[take(loader, 5) for loader in two], strict=True)
        for sample in rows(step)
    ]
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1]
    five = [build(config, tokenizer, batch=2, dp_rank=r, dp_world_size=5) for r in range(5)]
    for loader in five:
        loader.load_state_dict(states[0])
    rest = [
        sample
        for step in zip(*[take(loader, 3) for loader in five], strict=True)
        for sample in rows(step)
    ]
    assert first + rest == straight


def test_resume_does_not_reread_earlier_windows(config, tokenizer, monkeypatch):
    loader = build(config, tokenizer)
    loader.load_state_dict({**loader.state_dict(), "position": {"position": 10**12, "seed": 0}})
    calls = []
    monkeypatch.setattr(
        windows, "pack", lambda *args, **named: calls.append(1) or pack(*args, **named)
    )
    next(loader)
    assert len(calls) == 4


def test_resume_keeps_the_saved_seed(config, tokenizer):
    straight = take(build(config, tokenizer, seed=1), 8)
    first = build(config, tokenizer, seed=1)
    take(first, 5)
    resumed = build(config, tokenizer, seed=2)
    resumed.load_state_dict(first.state_dict())
    assert_same(take(resumed, 3), straight[5:])


@pytest.mark.parametrize("changed", [{"seq_len": 8}, {"dataset": ["stories"]}, {"shuffle": False}])
def test_position_in_different_data_is_ignored_with_a_warning(config, tokenizer, caplog, changed):
    loader = build(config, tokenizer)
    take(loader, 3)
    fields = {name: value for name, value in changed.items() if name != "seq_len"}
    runtime = {name: value for name, value in changed.items() if name == "seq_len"}
    if "dataset" in fields:
        fields["split"] = "validation"
    fresh, other = (build(replace(config, **fields), tokenizer, **runtime) for _ in range(2))
    with caplog.at_level(logging.WARNING, "torchtitan"):
        other.load_state_dict(loader.state_dict())
    assert (
        "reading starts at the beginning" in caplog.text and loader.config.dataset[0] in caplog.text
    )
    assert_same(take(other, 3), take(fresh, 3))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_last_batch_after_the_epochs_is_padded(config, tokenizer, workers):
    loaders = [
        build(
            replace(config, num_workers=workers),
            tokenizer,
            batch=7,
            dp_rank=r,
            dp_world_size=3,
            epochs=2,
        )
        for r in range(3)
    ]
    batches = [take(loader) for loader in loaders]
    n_samples = loaders[0].n_samples
    n_batches = -(-n_samples // 21)
    assert [len(own) for own in batches] == [n_batches] * 3 and n_samples % 21
    samples = [sample for own in batches for sample in rows(own)]
    assert len(real(samples)) == n_samples
    assert sorted(real(samples)) == sorted(
        2 * rows(take(build(config, tokenizer, batch=1, epochs=1)))
    )
    padding = rows(batches[2][-1:])[-1]
    assert padding[0] == (-1, -1) and set(padding[2]) == {IGNORE_INDEX}
    for loader in loaders:
        assert loader.exhausted and next(loader, None) is None
        loader.close()


@pytest.mark.slow
def test_more_epochs_continue_from_the_end(config, tokenizer):
    n_samples = build(config, tokenizer, epochs=1).n_samples
    # so that the last batch is padded
    batch = next(size for size in (5, 6, 7, 11) if n_samples % size)
    ended = build(config, tokenizer, batch=batch, epochs=1)
    take(ended)
    same = build(config, tokenizer, batch=batch, epochs=1)
    more = build(config, tokenizer, batch=1, epochs=2)
    same.load_state_dict(ended.state_dict())
    more.load_state_dict(ended.state_dict())
    assert take(same) == []
    assert rows(take(more)) == rows(take(build(config, tokenizer, batch=1, epochs=2)))[n_samples:]


def test_data_smaller_than_a_window_or_batch(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("tiny")
    config = PretrainDataLoader.Config(
        dataset=[str(tmp_path / "a.txt")], cache_dir=str(tmp_path / "cache")
    )
    [ids] = tokenizer.encode_documents(["tiny"])
    loaders = [
        build(config, tokenizer, batch=3, dp_rank=r, dp_world_size=2, epochs=1) for r in range(2)
    ]
    [[first], [second]] = [take(loader) for loader in loaders]
    assert loaders[0].n_samples == 1
    assert first["labels"][0, : len(ids) - 1].tolist() == ids[1:]
    assert (first["labels"] != IGNORE_INDEX).sum() == len(ids) - 1
    assert (second["labels"] == IGNORE_INDEX).all()
    endless = take(build(config, tokenizer, batch=3), 4)
    assert all((batch["labels"][:, 0] == ids[1]).all() for batch in endless)


def test_global_random_state_is_unchanged(config, tokenizer):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for workers in (0, 2):
        loader = build(replace(config, num_workers=workers), tokenizer)
        take(loader, 3)
        loader.close()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1] and np.random.get_state()[1].tolist() == states[2]


def test_workers_ignore_signals(config, tokenizer):
    loader = build(replace(config, num_workers=2), tokenizer)
    straight = take(build(config, tokenizer), 12)
    batches = take(loader, 2)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    assert_same(batches + take(loader, 10), straight)
    loader.close()
    loader.close()
    assert not any(worker.is_alive() for worker in workers)


UNCLOSED = """
import sys
from torchtitan.components.data import PretrainDataLoader
from torchtitan.components.tokenizer import PretrainedTokenizer
config = PretrainDataLoader.Config(dataset=[sys.argv[1]], cache_dir=sys.argv[2], num_workers=2)
loader = config.build(tokenizer=PretrainedTokenizer.Config().build(), seq_len=8, local_batch_size=2)
next(loader)
raise RuntimeError("boom")
"""


@pytest.mark.slow
def test_failing_program_exits_without_closing_the_loader(config):
    arguments = [sys.executable, "-c", UNCLOSED, *config.dataset, config.cache_dir]
    result = run_command(arguments, timeout=60)
    assert result.returncode == 1 and result.stderr.strip().endswith("RuntimeError: boom")


def test_prepare_builds_the_cache_and_finds_bad_data(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    config = PretrainDataLoader.Config(dataset=[str(path)], cache_dir=str(tmp_path / "cache"))
    path.write_text('{"text": "good"}\n{"text"\n')
    with pytest.raises(UserError, match="a.jsonl:2: broken JSON"):
        config.prepare(tokenizer=tokenizer)
    path.write_text('{"text": "good"}\n')
    config.prepare(tokenizer=tokenizer)
    [folder] = [
        path for path in (tmp_path / "cache" / "tokens").iterdir() if path.suffix != ".lock"
    ]
    built = (folder / "tokens.bin").stat().st_mtime_ns
    next(build(config, tokenizer))
    assert (folder / "tokens.bin").stat().st_mtime_ns == built


def test_configuration_for_validation(tmp_path):
    datasets = pytest.importorskip("datasets")
    config = PretrainDataLoader.Config(num_workers=2, cache_dir="x", document_mask=False)
    own = config.for_validation("")
    assert (own.dataset, own.split, own.shuffle, own.num_workers) == (
        ["stories"],
        "validation",
        False,
        0,
    )
    assert (own.cache_dir, own.document_mask) == ("x", False)
    assert (config.split, config.shuffle) == ("train", True)
    assert config.for_validation("c4").split == "validation"
    (tmp_path / "a.txt").write_text("some text")
    local = PretrainDataLoader.Config(dataset=[str(tmp_path / "a.txt")])
    assert local.for_validation("") is None
    assert local.for_validation("stories").split == "validation"
    from_file = config.for_validation(str(tmp_path / "a.txt"))
    assert (from_file.dataset, from_file.split, from_file.shuffle) == (
        [str(tmp_path / "a.txt")],
        "train",
        False,
    )
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "saved")
    assert (
        PretrainDataLoader.Config(dataset=[str(tmp_path / "saved")]).for_validation("").split
        == "validation"
    )
    assert BaseDataLoader.Config().for_validation("stories") is None


@pytest.mark.parametrize(
    "runtime, message",
    [
        ({"seq_len": 0}, "seq_len is 0, but must be at least 1"),
        ({"local_batch_size": 0}, "local_batch_size is 0, but must be at least 1"),
        ({"epochs": 0}, "epochs is 0, but must be at least 1"),
    ],
)
def test_arguments_out_of_range(config, tokenizer, runtime, message):
    with pytest.raises(UserError, match=message):
        build(config, tokenizer, **runtime)


def test_options_out_of_range(config, tokenizer):
    for settings, message in (
        ({"num_workers": -1}, "--dataloader.num_workers is -1, but must be at least 0"),
        (
            {"shuffle_buffer": 0},
            "--dataloader.shuffle_buffer is 0, but must be at least 1 document",
        ),
    ):
        wrong = replace(config, **settings)
        for use in (wrong.validate, lambda wrong=wrong: build(wrong, tokenizer)):
            with pytest.raises(UserError, match=message):
                use()
    busy = replace(config, num_workers=10**6)
    busy.validate()  # for a dry run; another host may have the cores
    for use in (lambda: busy.prepare(tokenizer=tokenizer), lambda: build(busy, tokenizer)):
        with pytest.raises(
            UserError, match="num_workers is 1000000, but must be at most .*, 16 per CPU core"
        ):
            use()


def test_custom_loader_may_omit_document_names():
    loader = BaseDataLoader.Config().build()
    assert loader.describe(torch.tensor([7, 9, -1])) == "document 7, document 9"
    assert loader.describe(torch.tensor([-1])) == "no document (padding)"


def test_custom_subclass(config, tokenizer):
    class Reversed(PretrainDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(PretrainDataLoader.Config):
            flip: bool = True

        def __next__(self):
            batch = super().__next__()
            return batch | {"input": batch["input"].flip(0)} if self.config.flip else batch

    own = build(Reversed.Config(dataset=config.dataset, cache_dir=config.cache_dir), tokenizer)
    assert torch.equal(next(own)["input"], next(build(config, tokenizer))["input"].flip(0))


@pytest.mark.slow
def test_import_loads_no_heavy_module():
    heavy = (
        "{'datasets', 'pyarrow', 'pandas', 'transformers', 'tokenizers', 'tiktoken', 'rich', "
        "'zstandard'}"
    )
    code = f"import sys, torchtitan.components.data; print(sorted({heavy} & sys.modules.keys()))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )
