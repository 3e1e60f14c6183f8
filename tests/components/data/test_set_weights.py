"""Weights of datasets that change during a run: shares, layouts and resumption."""

import dataclasses
import json
from dataclasses import dataclass

import pytest

from tests.components.data.helpers import take, with_positions, write_jsonl
from tests.training import read_metrics, run, tiny_config
from torchtitan.components.data import HubDataset, PretrainDataLoader, register_dataset
from torchtitan.components.data.finetuning.prompts import PromptDataLoader
from torchtitan.components.data.finetuning.sft import SFTDataLoader
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Callback

SEQ_LEN = 32
WEIGHTS = [[3, 1], [1, 4], [2, 1]]
"""At the beginning, and after each change."""


def write_texts(folder, name, count=80):
    texts = [f"{name} {number} " + f"{name} said so. " * (number % 7) for number in range(count)]
    return write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in texts])


@pytest.fixture(scope="module", params=["text", "rows", "stream"])
def config(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    names = [write_texts(folder, name) for name in ("dog", "garden")]
    options = {"dataset": names, "weights": WEIGHTS[0], "cache_dir": str(folder / "cache")}
    if request.param == "rows":
        return SFTDataLoader.Config(**options, max_epochs=[100, 100])
    if request.param == "stream":
        pytest.importorskip("datasets")
        (folder / "stream").mkdir()
        write_texts(folder / "stream", "garden", count=1000)
        name = "weights-test"
        register_dataset(name, HubDataset(path=str(folder / "stream")))
        options |= {"dataset": [names[0], name], "shuffle_buffer": 16}
    return PretrainDataLoader.Config(**options)


def build(config, tokenizer, batch=2, **runtime):
    return config.build(tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=batch, **runtime)


def as_lists(batches):
    return [
        {name: values.tolist() for name, values in with_positions(batch).items()}
        for batch in batches
    ]


def read(loader, first, last):
    """Return the batches from `first` to `last`, with changes after the 10th and the 25th."""
    batches = []
    for number in range(first, last):
        if number in (10, 25):
            loader.set_weights(WEIGHTS[1 if number == 10 else 2])
        batches += take(loader, 1)
    return batches


def test_shares_follow_the_changes(config, tokenizer):
    loader = build(config, tokenizer, batch=1)
    batches = read(loader, 0, 40)
    sets = [loader.datasets_of(batch)[0, 0].item() for batch in batches]
    sizes = [int((loader.datasets_of(batch) >= 0).sum()) for batch in batches]
    if not isinstance(loader, SFTDataLoader):
        sizes = [SEQ_LEN] * 40  # text counts windows
    for end in range(1, 41):
        share = 0.0
        for number in range(end):
            a, b = WEIGHTS[(number >= 10) + (number >= 25)]
            share += sizes[number] * a / (a + b)
        found = sum(sizes[number] for number in range(end) if sets[number] == 0)
        # A stretch that begins anew may be ahead or behind by a window, and so may each before it.
        n_windows = 1 if isinstance(loader, SFTDataLoader) else 1 + (end > 10) + (end > 25)
        assert abs(found - share) <= n_windows * SEQ_LEN


@pytest.mark.parametrize("at", [5, 10, 30])
def test_resume_is_exact(config, tokenizer, at):
    straight = as_lists(read(build(config, tokenizer), 0, 35))
    first = build(config, tokenizer)
    begun = as_lists(read(first, 0, at))
    state = json.loads(json.dumps(first.state_dict()))
    second = build(config, tokenizer, seed=9)
    second.load_state_dict(state)
    assert begun + as_lists(read(second, at, 35)) == straight


def test_a_return_to_an_earlier_position_undoes_the_change(config, tokenizer):
    """As a run does that returns to a checkpoint."""
    loader = build(config, tokenizer)
    take(loader, 4)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = as_lists(take(loader, 12))
    loader.set_weights(WEIGHTS[1])
    assert as_lists(take(loader, 12)) != expected
    loader.load_state_dict(state)
    assert as_lists(take(loader, 12)) == expected


def test_no_sample_is_repeated_or_left_out(config, tokenizer):
    """Each dataset is read in its order, whichever weights it has."""

    def windows(batches, loader):
        found = [[], []]
        for batch in batches:
            number = loader.datasets_of(batch)[0, 0].item()
            found[number].append(batch["input"][0].tolist())
        return found

    changed, constant = (build(config, tokenizer, batch=1) for _ in range(2))
    with_changes = windows(read(changed, 0, 40), changed)
    for found, expected in zip(with_changes, windows(take(constant, 120), constant), strict=True):
        n_both = min(len(found), len(expected))
        assert n_both > 10 and found[:n_both] == expected[:n_both]


def test_ranks_and_workers_do_not_matter(config, tokenizer):
    if config.dataset[-1] == "weights-test":
        pytest.skip("the order of a stream depends on ranks and workers")
    one = as_lists(read(build(config, tokenizer), 0, 30))
    loaders = [
        build(config, tokenizer, batch=1, dp_rank=rank, dp_world_size=2) for rank in range(2)
    ]
    two = [as_lists(read(loader, 0, 30)) for loader in loaders]
    for whole, *parts in zip(one, *two, strict=True):
        assert whole["input"] == [part["input"][0] for part in parts]


def test_epochs_in_the_summary_follow_the_changes(config, tokenizer):
    """At the end of a run, as they would be told when it resumes."""
    loader = build(config, tokenizer, batch=1)
    if isinstance(loader, SFTDataLoader) or (whole := loader.summary(0)) is None:
        pytest.skip("the epochs of this loader follow its weights otherwise")
    counts = [0, 0]
    for batch in read(loader, 0, 40):
        counts[loader.datasets_of(batch)[0, 0].item()] += 1
    sizes = [-(-(of.report.tokens - 1) // SEQ_LEN) for of in whole.sets]
    epochs = [of.epochs for of in loader.summary(40).sets]
    assert epochs == pytest.approx([n / size for n, size in zip(counts, sizes, strict=True)])


def test_a_begun_block_is_read_to_its_end(tmp_path, tokenizer):
    """Under a schedule of lengths, a window may end within a block."""
    names = [write_texts(tmp_path, name) for name in ("dog", "garden")]
    config = PretrainDataLoader.Config(
        dataset=names, weights=WEIGHTS[0], cache_dir=str(tmp_path / "cache")
    )

    def shorter():
        loader = build(config, tokenizer, batch=1)
        loader.set_seq_len(SEQ_LEN // 2, SEQ_LEN)
        return loader

    constant, changed, resumed = shorter(), shorter(), shorter()
    expected, found = (as_lists(take(loader, 5)) for loader in (constant, changed))
    changed.set_weights([0, 1])
    changed.set_weights([1, 4])
    resumed.load_state_dict(json.loads(json.dumps(changed.state_dict())))
    assert as_lists(take(changed, 1)) == as_lists(take(constant, 1))
    assert as_lists(take(resumed, 6))[1:] == as_lists(take(changed, 5))
    assert found == expected


@pytest.mark.slow
def test_prefetched_batches_change_too(config, tokenizer):
    prefetching = build(dataclasses.replace(config, num_workers=2), tokenizer)
    batches = read(prefetching, 0, 30)
    prefetching.close()
    if config.dataset[-1] != "weights-test":
        assert as_lists(batches) == as_lists(read(build(config, tokenizer), 0, 30))
    sets = [prefetching.datasets_of(batch)[row, 0].item() for batch in batches for row in range(2)]
    assert sets[:20].count(0) > 12 and sets[20:50].count(0) < 9


def test_refused(config, tokenizer, tmp_path):
    loader = build(config, tokenizer)
    with pytest.raises(UserError, match=r"one value per dataset \(2\), not 3"):
        loader.set_weights([1, 2, 3])
    with pytest.raises(UserError, match=r"not all 0"):
        loader.set_weights([0, 0])
    with pytest.raises(UserError, match=r"the weights \['a', 1\] must be numbers"):
        loader.set_weights(["a", 1])
    with pytest.raises(UserError, match=r"cannot be set with --training.epochs"):
        build(config, tokenizer, epochs=2).set_weights([1, 2])
    alone = type(config)(dataset=config.dataset[:1], cache_dir=config.cache_dir)
    with pytest.raises(UserError, match=r"give the initial ones"):
        build(alone, tokenizer).set_weights([1])


def test_refused_by_other_loaders(tokenizer, tmp_path):
    rows = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    config = PromptDataLoader.Config(
        dataset=[rows], chat_template="alpaca", too_long="truncate_left"
    )
    with pytest.raises(UserError, match="PromptDataLoader has no weights of datasets"):
        build(config, tokenizer).set_weights([1])
    texts = [write_texts(tmp_path, name) for name in ("dog", "garden")]
    options = {"weights": [1, 1], "weight_schedule": ["5: 1 2"]}
    scheduled = SFTDataLoader.Config(dataset=texts, **options)
    with pytest.raises(UserError, match=r"cannot be set under --dataloader.weight_schedule"):
        build(scheduled, tokenizer).set_weights([1, 2])


class MoreOfTheHarder(Callback):
    """After step 2, read less of the first dataset; after step 4, nothing of it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        pass

    def after_step(self, outcome):
        if self.trainer.step in (2, 4):
            self.trainer.dataloader.set_weights([1, 3] if self.trainer.step == 2 else [0, 1])


def test_a_callback_changes_weights(tmp_path):
    """A run that stops at any step resumes as if it had not."""
    data = [write_texts(tmp_path, name) for name in ("dog", "garden")]

    def train(folder, steps, with_changes=True):
        options = {"dataloader__dataset": data, "dataloader__weights": [1, 1]}
        config = tiny_config(
            tmp_path / folder, training__steps=steps, checkpoint__enable=True, **options
        )
        config.lr_scheduler.total_steps = 6
        config.callbacks += [MoreOfTheHarder.Config()] if with_changes else []
        return run(config)

    train("straight", 6)
    for steps in (2, 3, 4, 6):
        train("stopped", steps)
    expected = read_metrics(tmp_path / "straight", "loss", "grad_norm")
    assert read_metrics(tmp_path / "stopped", "loss", "grad_norm") == expected
    train("constant", 6, with_changes=False)
    constant = read_metrics(tmp_path / "constant", "loss", "grad_norm")
    assert constant[:2] == expected[:2] and constant[2:] != expected[2:]
