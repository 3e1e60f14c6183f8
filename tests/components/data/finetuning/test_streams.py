"""Streamed rows of fine-tuning: the samples of copied data, exact resumption, and mixtures."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from torchtitan.components.data import PromptDataLoader, SFTDataLoader
from torchtitan.components.data.finetuning.preference import (
    AnswerDataLoader,
    PreferenceDataLoader,
    RewardDataLoader,
)
from torchtitan.components.data.finetuning.prompt_streams import PromptStreamDataLoader
from torchtitan.components.data.finetuning.streams import RowStreamDataLoader
from torchtitan.components.data.plan import ShuffleSampler
from torchtitan.components.data.sources import source
from torchtitan.components.data.sources.source import resolve_rows
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.experiments.loss_sampling.sampler import LossSampler
from torchtitan.tools.errors import UserError

datasets = pytest.importorskip("datasets")

TOKENIZER = PretrainedTokenizer.Config().build()


def sft_row(name: str, number: int) -> dict[str, Any]:
    return {"ask": f"{name} {number}?", "say": "Yes. " * (1 + number % 5)}


def pair_row(name: str, number: int) -> dict[str, Any]:
    return {"prompt": f"{name} {number}?", "chosen": "Yes." * (1 + number % 3), "rejected": "No."}


def write(folder: Path, rows: list[dict[str, Any]], n_files: int = 2) -> None:
    folder.mkdir()
    for number in range(n_files):
        text = "\n".join(map(json.dumps, rows[number::n_files]))
        (folder / f"train-{number:05d}-of-{n_files:05d}.jsonl").write_text(text)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose subfolders `datasets` reads instead of the repositories `hub/NAME`."""
    folder = tmp_path / "repositories"
    folder.mkdir()

    def redirected(call: Any) -> Any:
        def load(path: str, name: str | None = None, **options: Any) -> Any:
            return call(str(folder / path.removeprefix("hub/")), name, **options)

        return load

    for name in ("load_dataset", "load_dataset_builder"):
        monkeypatch.setattr(datasets, name, redirected(getattr(datasets, name)))
    monkeypatch.setattr(source, "commit_of", lambda *_: "")
    for name in ("one", "two"):
        write(folder / name, [sft_row(name, number) for number in range(23)])
    write(folder / "pairs", [pair_row("pairs", number) for number in range(23)])
    return folder


def config_of(kind: Any, names: list[str], folder: Path, **options: Any) -> Any:
    own = {"columns": ["prompt=ask", "completion=say"]} if kind is SFTDataLoader else {}
    values = {"chat_template": "alpaca", "cache_dir": str(folder), **own, **options}
    return kind.Config(dataset=names, **values)


def build(config: Any, **runtime: Any) -> Any:
    return config.build(tokenizer=TOKENIZER, **{"seq_len": 128, "local_batch_size": 2, **runtime})


def plain(batch: Any) -> list[Any]:
    """Return what two equal batches have in common, as lists."""
    return [
        batch[name] if isinstance(batch[name], list) else batch[name].tolist()
        for name in sorted(batch)
        if name != "attention"
    ]


def read_all(loader: Any) -> list[Any]:
    batches = []
    while (batch := next(loader, None)) is not None and not loader.exhausted:
        batches.append(batch)
    loader.close()
    return batches


def samples_in(batches: list[Any]) -> Counter[tuple[Any, ...]]:
    """Return the tokens and labels of all documents, or the prompts, without padding."""
    found: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        if "prompts" in batch:
            found.update(tuple(prompt) for prompt in batch["prompts"] if prompt)
            continue
        bounds = batch["attention"].cu_seqlens.tolist()
        for first, last in zip(bounds, bounds[1:], strict=False):
            labels = tuple(batch.get("labels", batch["input"]).flatten()[first:last].tolist())
            ids = tuple(batch["input"].flatten()[first:last].tolist())
            if any(label != -100 for label in labels) and any(ids):
                found[ids, labels] += 1
    return found


STREAMED = {"stream": "all", "shuffle_buffer": 7}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (SFTDataLoader, "hub/one"),
        (PreferenceDataLoader, "hub/pairs"),
        (AnswerDataLoader, "hub/pairs"),
        (RewardDataLoader, "hub/pairs"),
        (PromptDataLoader, "hub/pairs"),
    ],
)
def test_streams_have_the_samples_of_copies(
    hub: Path, tmp_path: Path, kind: Any, name: str, ranks: int
) -> None:
    copied = samples_in(read_all(build(config_of(kind, [name], tmp_path), epochs=1)))
    config = config_of(kind, [name], tmp_path, **STREAMED)
    batches: list[Any] = []
    for rank in range(ranks):
        loader = build(config, epochs=1, dp_rank=rank, dp_world_size=ranks)
        assert isinstance(loader, RowStreamDataLoader)
        batches += read_all(loader)
    assert samples_in(batches) == copied
    assert copied.total() == (46 if "pairs" in name and kind is not PromptDataLoader else 23)


def check_resumption(config: Any, build: Any = build, plain: Any = plain) -> list[Any]:
    """At the ends, and within and between blocks. Return the batches as by `plain`."""
    whole = build(config, epochs=2)
    batches, states = [], [json.loads(json.dumps(whole.state_dict()))]
    for batch in whole:
        batches.append(plain(batch))
        states.append(json.loads(json.dumps(whole.state_dict())))
    assert len(batches) > 5
    for place in (1, 2, len(batches) // 2, len(batches) - 1, len(batches)):
        again = build(config, epochs=2)
        again.load_state_dict(states[place])
        assert [plain(batch) for batch in again] == batches[place:]
    return batches


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (SFTDataLoader, [2.0, 1.0, 1.0]),
        (SFTDataLoader, []),
        (PreferenceDataLoader, []),
        (PromptDataLoader, []),
    ],
)
def test_resumption_is_exact(hub: Path, tmp_path: Path, kind: Any, weights: list[float]) -> None:
    """In a mixture of two streams and a local file."""
    local = tmp_path / "local.jsonl"
    make = sft_row if kind is SFTDataLoader else pair_row
    local.write_text("\n".join(json.dumps(make("local", number)) for number in range(11)))
    names = ["hub/one" if kind is SFTDataLoader else "hub/pairs", "hub/two", str(local)]
    if kind is not SFTDataLoader:
        write(hub / "others", [pair_row("others", number) for number in range(9)])
        names[1] = "hub/others"
    own = {"weights": weights} if weights else {}
    check_resumption(config_of(kind, names, tmp_path, **STREAMED, **own))


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(SFTDataLoader, 1), (SFTDataLoader, 3), (PreferenceDataLoader, 3), (PromptDataLoader, 1)],
)
def test_each_dataset_is_read_once_per_epoch(
    hub: Path, tmp_path: Path, kind: Any, ranks: int
) -> None:
    """Without weights, as copies are; one of them is too small for three ranks."""
    make = sft_row if kind is SFTDataLoader else pair_row
    write(hub / "small", [make("small", number) for number in range(2)], n_files=1)
    local = tmp_path / "local.jsonl"
    local.write_text("\n".join(json.dumps(make("local", number)) for number in range(11)))
    names = ["hub/one" if kind is SFTDataLoader else "hub/pairs", "hub/small", str(local)]
    copied = samples_in(read_all(build(config_of(kind, names, tmp_path), epochs=2)))
    batches: list[Any] = []
    for rank in range(ranks):
        loader = build(
            config_of(kind, names, tmp_path, **STREAMED),
            **{"epochs": 2, "dp_rank": rank, "dp_world_size": ranks},
        )
        batches += read_all(loader)
    assert samples_in(batches) == copied
    assert copied.total() == 2 * (23 + 2 + 11) * (2 if kind is PreferenceDataLoader else 1)


def test_without_weights_turns_follow_sizes(hub: Path, tmp_path: Path) -> None:
    """The large dataset is four times as large as the small one, and both last for the epoch."""
    for name, count in (("large", 160), ("small", 40)):
        write(hub / name, [{"ask": f"{number:03}?", "say": "Yes."} for number in range(count)])
    options = {**STREAMED, "packing": "none"}
    config = config_of(SFTDataLoader, ["hub/small", "hub/large"], tmp_path, **options)
    loader = build(config, local_batch_size=1, epochs=1)
    sets = [loader.datasets_of(batch)[0, 0].item() for batch in read_all(loader)]
    assert len(sets) == 200
    for end in range(1, 201):
        assert abs(sum(sets[:end]) - 0.8 * end) <= 1


def test_a_run_of_several_epochs_continues_one_that_ended(hub: Path, tmp_path: Path) -> None:
    config = config_of(SFTDataLoader, ["hub/one", "hub/two"], tmp_path, **STREAMED)
    whole = [plain(batch) for batch in build(config, local_batch_size=1, epochs=2)]
    ended = build(config, local_batch_size=1, epochs=1)
    first = [plain(batch) for batch in ended]
    again = build(config, local_batch_size=1, epochs=2)
    again.load_state_dict(json.loads(json.dumps(ended.state_dict())))
    assert first + [plain(batch) for batch in again] == whole


def test_sizes_are_asked_for_once(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run takes turns by those that it began with."""
    config = config_of(SFTDataLoader, ["hub/one", "hub/two"], tmp_path, **STREAMED)
    whole = build(config)
    next(whole)
    state = json.loads(json.dumps(whole.state_dict()))

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    again = build(config)
    again.load_state_dict(state)
    assert plain(next(again)) == plain(next(whole))
    with pytest.raises(UserError, match="size of a stream is unknown: .*--dataloader.stream none"):
        next(build(config))


def test_a_reader_goes_on_without_its_rows_of_one_dataset(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if they were copied; a reader of which all rows are dropped ends the run."""
    long = {"ask": "x " * 400, "say": "Yes."}
    write(hub / "small", [sft_row("small", 0), long], n_files=1)
    write(hub / "long", [long, long], n_files=1)
    places = [{"dp_rank": rank, "dp_world_size": 2, "epochs": 1} for rank in range(2)]
    for names, count in ((["hub/one", "hub/small"], 24), (["hub/one", "hub/long"], 23)):
        config = config_of(SFTDataLoader, names, tmp_path, **STREAMED)
        batches = [batch for place in places for batch in read_all(build(config, **place))]
        assert samples_in(batches).total() == count
        assert "(reader 2 of 2) has no rows left to train on" in caplog.text
    with pytest.raises(UserError, match="hub/long has no rows left to train on"):
        read_all(build(config, epochs=1))  # the only reader
    config = config_of(SFTDataLoader, ["hub/small", "hub/long"], tmp_path, **STREAMED)
    with pytest.raises(UserError, match="no rows left to train on"):
        next(build(config, **places[1]))


def test_a_state_without_a_commit_gets_the_newest(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub did not answer when the run began."""
    config = config_of(SFTDataLoader, ["hub/one"], tmp_path, **STREAMED)
    state = build(config).state_dict()
    assert state["position"]["commits"] == [""]
    monkeypatch.setattr(source, "commit_of", lambda *_: "c" * 40)
    again = build(config)
    again.load_state_dict(state)
    assert again.state_dict()["position"]["commits"] == ["c" * 40]


def test_one_label_alone_is_told_after_the_first_rows(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, label in (("good", True), ("bad", False)):
        rows = [{"prompt": f"{n}?", "completion": "Yes.", "label": label} for n in range(30)]
        write(hub / name, rows)
    for names, said in ((["good"], True), (["bad"], True), (["good", "bad"], False)):
        caplog.clear()
        named = [f"hub/{name}" for name in names]
        next(build(config_of(AnswerDataLoader, named, tmp_path, **STREAMED)))
        assert ("KTO also needs" in caplog.text) == said
        if said:
            found, lacking = ("desirable", "undesirable")[:: 1 if names == ["good"] else -1]
            assert f"needs {lacking} answers, and all are {found} so far" in caplog.text


def test_the_ledger_names_the_restart(hub: Path, tmp_path: Path) -> None:
    """After a restart with other ranks, a row has another place among the rows of its reader."""
    config = config_of(SFTDataLoader, ["hub/one"], tmp_path, **STREAMED)
    saved = build(config)
    again = build(config, dp_world_size=2)
    again.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert saved.sample_name(0) == "hub/one, row 1 as read by worker 0 of rank 0"
    assert again.sample_name(0) == "hub/one, row 1 as read by worker 0 of rank 0 after restart 1"


def test_epochs_and_buffers_are_shuffled_and_packed(hub: Path, tmp_path: Path) -> None:
    config = config_of(SFTDataLoader, ["hub/one"], tmp_path, stream="all")
    batches = read_all(build(config, local_batch_size=1, epochs=2))
    windows = [tuple(batch["input"].flatten().tolist()) for batch in batches]
    n_windows = len(windows) // 2
    copied = build(config_of(SFTDataLoader, ["hub/one"], tmp_path), local_batch_size=1, epochs=1)
    assert n_windows == copied.n_samples  # packed as well as a copy
    assert windows[:n_windows] != windows[n_windows:]
    loader = build(config)
    rows = [row for batch in batches for row in batch["documents"]]
    names = [name for row in rows for name in loader.document_names(row)]
    assert len(set(names)) == 23 and Counter(names).most_common()[-1][1] == 2
    in_order = ShuffleSampler.Config(shuffle=False)
    options = {"packing": "none", "sampler": in_order, "stream": "all", "shuffle_buffer": 4}
    ordered = read_all(build(config_of(SFTDataLoader, ["hub/one"], tmp_path, **options), epochs=1))
    found = [number for batch in ordered for number in batch["documents"].flatten().tolist()]
    assert found == [*range(23), -1]


def test_shares_of_datasets_can_change(hub: Path, tmp_path: Path) -> None:
    names = ["hub/one", "hub/two"]
    config = config_of(SFTDataLoader, names, tmp_path, **STREAMED, weights=[3.0, 1.0])
    loader = build(config, local_batch_size=4)
    first = [loader.datasets_of(next(loader))[:, 0].sum().item() for _ in range(5)]
    assert first == [1] * 5  # of four windows, one is of the second dataset
    loader.set_weights([0.0, 1.0])
    assert loader.datasets_of(next(loader))[:, 0].tolist() == [1] * 4
    pairs = build(config_of(PreferenceDataLoader, ["hub/pairs"], tmp_path, **STREAMED))
    with pytest.raises(UserError, match="has no weights of datasets"):
        pairs.set_weights([1.0])


def test_rows_are_filtered_and_counted(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [sft_row("mixed", number) for number in range(8)]
    rows += [{"ask": "long", "say": "word " * 200}, {"ask": "", "say": ""}]
    write(hub / "mixed", rows, n_files=1)
    for options in ({}, {"too_long": "truncate_right"}, {"min_tokens": 25}):
        copied = build(config_of(SFTDataLoader, ["hub/mixed"], tmp_path, **options), epochs=1)
        samples = samples_in(read_all(copied))
        lines = list(copied.samples.sets[0].report.lines())
        config = config_of(SFTDataLoader, ["hub/mixed"], tmp_path, stream="all", **options)
        caplog.clear()
        with caplog.at_level("INFO"):
            assert samples_in(read_all(build(config, epochs=1))) == samples
        assert lines[0] in caplog.text
    for options, message in (
        ({"too_long": "error"}, "hub/mixed, row 9: .* tokens, a window holds 129; set"),
        ({"empty": "error"}, "hub/mixed, row 10: .*set --dataloader.empty drop"),
        ({"min_tokens": 9000}, "hub/mixed has no rows left to train on: 0 of 10 rows kept"),
    ):
        config = config_of(SFTDataLoader, ["hub/mixed"], tmp_path, stream="all", **options)
        with pytest.raises(UserError, match=message):
            read_all(build(config, epochs=1))


def test_values_of_several_types_are_those_of_copies(hub: Path, tmp_path: Path) -> None:
    """`datasets` gives values of different types the type `Json`, and stores them as JSON text."""
    parts = [{"type": "text", "text": "4?"}]
    rows = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": "Five."}]}
        for ask in ("3?", parts)
    ]
    write(hub / "mixed", rows, n_files=1)
    (hub / "typed").mkdir()
    message = {"role": datasets.Value("string"), "content": datasets.Json()}
    typed = datasets.Dataset.from_list(rows, datasets.Features({"messages": [message]}))
    typed.to_parquet(hub / "typed/train-00000-of-00001.parquet")
    (template := tmp_path / "template.jinja").write_text(
        "{% for m in messages %}{{ m | tojson + eos_token }}{% endfor %}"
    )
    for name in ("hub/mixed", "hub/typed"):
        options = {"columns": [], "chat_template": str(template), "train_on": "all"}
        configs = (
            config_of(SFTDataLoader, [name], tmp_path, **options, **streamed)
            for streamed in ({}, STREAMED)
        )
        copied, samples = (
            samples_in(read_all(build(config, epochs=1, seq_len=512))) for config in configs
        )
        assert samples == copied and samples.total() == 2


def test_rows_with_several_samples_are_counted(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the first row, the second sample is too long; of the second row, both; and the column of
    images is not read."""
    turns = [["1?", "2."], ["word " * 200, "4."]]
    rows = [
        {
            "image": "a.png",
            "messages": [
                {"role": role, "content": text}
                for exchange in exchanges
                for role, text in zip(("user", "assistant"), exchange, strict=True)
            ],
        }
        for exchanges in (turns, turns[::-1])
    ]
    write(hub / "several", rows, n_files=1)
    (template := tmp_path / "template.jinja").write_text(  # marks the last question
        "{% for m in messages %}{{ '!' if loop.revindex0 == 1 or loop.last and m.role == 'user' }}"
        "{{ m.role + ': ' + m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
        "{{ 'assistant: ' if add_generation_prompt }}"
    )
    options = {"columns": [], "chat_template": str(template)}
    copied = build(config_of(SFTDataLoader, ["hub/several"], tmp_path, **options), epochs=1)
    [data] = copied.samples.sets
    expected = [*data.report.lines(), *data.warnings()]
    assert "1 of 2 rows kept" in expected[0] and len(samples_in(read_all(copied))) == 1
    caplog.clear()
    config = config_of(SFTDataLoader, ["hub/several"], tmp_path, stream="all", **options)
    with caplog.at_level("INFO"):
        read_all(build(config, epochs=1))
    found = [line.partition(": ")[2] for line in caplog.messages]
    places = [line.replace("hub/several (train), row", "hub/several, row") for line in expected]
    assert [line for line in found if line in places] == places
    assert any("image (rows: 2) is ignored" in line for line in found)


def test_a_row_keeps_its_number(hub: Path, tmp_path: Path) -> None:
    """In all epochs, since a number tells the prompts of `--replay.size` apart."""
    config = config_of(PromptDataLoader, ["hub/pairs"], tmp_path, **STREAMED)
    loader = build(config, local_batch_size=1, epochs=3)
    prompts: dict[int, set[tuple[int, ...]]] = {}
    for batch in read_all(loader):
        prompts.setdefault(batch["documents"].item(), set()).add(tuple(batch["prompts"][0]))
    assert len(prompts) == 23 and all(len(found) == 1 for found in prompts.values())
    of_ranks = [build(config, dp_world_size=size) for size in (1, 2)]
    assert of_ranks[0].fingerprint != of_ranks[1].fingerprint  # they number other prompts


def test_another_revision_is_other_data(hub: Path, tmp_path: Path) -> None:
    first, second = (
        build(config_of(SFTDataLoader, [name], tmp_path, **STREAMED))
        for name in ("hub/one", "hub/one@v1")
    )
    assert first.state_dict()["data"] != second.state_dict()["data"]
    first.close()


def test_validation_data_is_streamed_in_order(hub: Path, tmp_path: Path) -> None:
    options = {**STREAMED, "weights": [1.0, 2.0]}
    config = config_of(SFTDataLoader, ["hub/one", "hub/two"], tmp_path, **options)
    found = config.for_validation("hub/two[validation]")
    assert (found.stream, found.weights, found.sampler.shuffle) == ("all", [], False)
    [(source, _)] = [(resolve_rows(name, found.split), name) for name in found.dataset]
    assert source.split == "validation"  # type: ignore[union-attr]


def test_what_streams_cannot_do_is_refused(hub: Path, tmp_path: Path) -> None:
    def refused(message: str, names: list[str] | None = None, **options: Any) -> None:
        config = config_of(SFTDataLoader, names or ["hub/one"], tmp_path, stream="all", **options)
        with pytest.raises(UserError, match=message):
            build(config)

    refused("without a sampler that chooses them", sampler=LossSampler.Config())
    refused("pack_chunk 5 cannot be combined with --dataloader.stream all", pack_chunk=5)
    refused("max_epochs", max_epochs=[2.0])
    refused("shuffle_buffer is 0", shuffle_buffer=0)
    assert PromptDataLoader.stream_class() is PromptStreamDataLoader
