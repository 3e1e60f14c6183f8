"""Preference and prompt data: inputs and labels, row policies, order, exact resume."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.components.data.helpers import write_jsonl
from torchtitan.components.data.base import NO_DOCUMENT
from torchtitan.components.data.finetuning.encoded import EncodedRow, EncodedSample
from torchtitan.components.data.finetuning.preference import AnswerDataLoader, PreferenceDataLoader
from torchtitan.components.data.finetuning.prompts import PromptDataLoader
from torchtitan.components.data.plan import ShuffleSampler, StepStatistics
from torchtitan.components.losses.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.distributed import initialize_weights
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.errors import UserError

SEQ_LEN = 48
TEMPLATE = (
    "{% for m in messages %}{{ 'A: ' + m.content + eos_token if m.role == 'assistant' else 'Q: ' + "
    "m.content }}"
    "{{ '\n' }}{% endfor %}{{ 'A:' if add_generation_prompt else '' }}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a chat template and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path


def pairs(n):
    return [
        {"prompt": f"Is {i} big?", "chosen": f"No, {i} is not.", "rejected": f"I like {i}."}
        for i in range(n)
    ]


def questions(n):
    return [
        {"question": f"How much is {i} and {i}?", "answer": f"It is {2 * i}."} for i in range(n)
    ]


def build(
    tokenizer,
    cls: Any = PreferenceDataLoader,
    dataset=("data.jsonl",),
    seq_len=SEQ_LEN,
    batch=2,
    **options,
):
    if cls is PreferenceDataLoader:
        options.setdefault("packing", "none")
    runtime = {
        name: options.pop(name)
        for name in ("dp_rank", "dp_world_size", "seed", "epochs")
        if name in options
    }
    config = cls.Config(**{"chat_template": "template.jinja", **options}, dataset=list(dataset))
    return config.build(tokenizer=tokenizer, seq_len=seq_len, local_batch_size=batch, **runtime)


def in_order(**options):
    return {"sampler": ShuffleSampler.Config(shuffle=False), "epochs": 1, **options}


def trained_text(tokenizer, labels):
    return tokenizer.decode(labels[labels != IGNORE_INDEX].tolist(), skip_special_tokens=False)


def sides_of(batch, side, name, n=SEQ_LEN):
    """Return a tensor of the sequences of one side, (B, n), for windows of one pair; the rest is
    padding."""
    padding = IGNORE_INDEX if name == "labels" else 0
    result = torch.full((len(batch["input"]), n), padding)
    for row, values in enumerate(batch[name]):
        lengths = batch["attention"].rows(row, row + 1).lengths
        if len(lengths) > 1:
            start = lengths[0] if side == "rejected" else 0
            stop = start + lengths[side == "rejected"]
            assert (batch["sequences"][row, start:stop] == (side == "rejected")).all()
            result[row, : stop - start] = values[start:stop]
    return result


def assert_same(batch, expected):
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        get = attrgetter("positions_BL") if name.endswith("attention") else lambda tensor: tensor
        assert torch.equal(get(batch[name]), get(value))


def test_both_sides_of_a_pair(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", pairs(3))
    batches = list(build(tokenizer, **in_order()))
    assert [batch["documents"].tolist() for batch in batches] == [[[0], [1]], [[2], [NO_DOCUMENT]]]
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    for batch, row, pair in ((batches[i // 2], i % 2, pair) for i, pair in enumerate(pairs(3))):
        for side in ("chosen", "rejected"):
            inputs, labels = (sides_of(batch, side, name)[row] for name in ("input", "labels"))
            text = f"Q: {pair['prompt']}\nA: {pair[side]}{eos}\n"
            ids = tokenizer.tokenize([text], allow_special=True)[0]
            n = len(ids) - 1
            assert inputs[:n].tolist() == ids[:-1]
            assert batch["attention"].rows(row, row + 1).lengths[side == "rejected"] == n
            assert trained_text(tokenizer, labels) == f" {pair[side]}{eos}"
            trained = labels[:n] != IGNORE_INDEX
            assert torch.equal(labels[:n][trained], torch.tensor(ids[1:])[trained])
            assert (labels[n:] == IGNORE_INDEX).all()


def test_padding_rows_have_no_labels(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", pairs(1))
    loader = build(tokenizer, batch=3, **in_order())
    (batch,) = loader
    for side in ("chosen", "rejected"):
        assert (sides_of(batch, side, "labels")[1:] == IGNORE_INDEX).all()
    assert (batch["sequences"][1:] == 0).all()
    assert loader.n_samples == 1 and loader.exhausted
    assert loader.document_names(batch["documents"][0]) == ["data.jsonl:1"]
    assert loader.document_names(batch["documents"][1]) == []
    assert loader.describe(batch["documents"][1]) == "no document (padding)"


def test_padded_batches_give_the_log_probabilities_of_single_sequences(tokenizer, folder):
    """Compare the log-probability of each answer; tolerance 1e-4, since it is a sum of floats."""
    write_jsonl(folder / "data.jsonl", pairs(4))
    loader = build(tokenizer, batch=4, **in_order())
    (batch,) = loader
    config = model_registry("debugmodel").model
    config.vocab_size = tokenizer.vocab_size
    model = config.build()
    initialize_weights(model, seed=1)

    def log_probability(logits, labels):
        return (
            -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            .view(labels.shape)
            .sum(dim=1)
        )

    with torch.no_grad():
        for i in range(2):
            logits = model(batch["input"], batch["attention"])
            together = log_probability(
                logits, batch["labels"].where(batch["sequences"] == i, IGNORE_INDEX)
            )
            for row in range(4):
                part = loader.samples.sets[0].sample(row).parts[i]
                ids, trained = torch.from_numpy(part.ids), torch.from_numpy(part.trained)
                labels = torch.where(trained, ids, IGNORE_INDEX)
                alone = log_probability(model(ids[None, :-1]), labels[None, 1:])
                torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-4)


def test_packed_pairs_hold_every_pair_once(tokenizer, folder):
    rows = [{**pair, "chosen": pair["chosen"] * (i % 4 + 1)} for i, pair in enumerate(pairs(20))]
    write_jsonl(folder / "data.jsonl", rows)
    loader = build(tokenizer, packing="ffd", batch=1, seq_len=64, epochs=1)
    seen = []
    for batch in loader:
        numbers = [number for number in batch["documents"][0].tolist() if number != NO_DOCUMENT]
        for pair, number in enumerate(numbers):
            for side, part in enumerate(loader.samples.sets[0].sample(number).parts):
                is_own = (batch["sequences"][0] == 2 * pair + side) & (
                    batch["labels"][0] != IGNORE_INDEX
                )
                assert batch["labels"][0][is_own].tolist() == part.ids[part.trained].tolist()
        assert batch["sequences"][0][
            batch["labels"][0] != IGNORE_INDEX
        ].unique().numel() == 2 * len(numbers)
        seen += numbers
    assert sorted(seen) == list(range(20)) and loader.n_samples < 20


def test_single_answers_and_their_mismatched_prompts(tokenizer, folder):
    """Rows with labels and pairs may be mixed; a mismatched answer has the prompt of another
    row."""
    rated = [
        {"prompt": f"Is {i} big?", "completion": f"No, {i} is not.", "label": i % 2 == 0}
        for i in range(4)
    ]
    write_jsonl(folder / "rated.jsonl", rated)
    write_jsonl(folder / "pairs.jsonl", pairs(3))
    for name, n_desirable, n_others in (("rated.jsonl", 2, 2), ("pairs.jsonl", 3, 3)):
        loader = build(tokenizer, AnswerDataLoader, [name], seq_len=128, batch=1, **in_order())
        (batch,) = loader
        answers = batch["sequences"][0][batch["labels"][0] != IGNORE_INDEX].unique() % 2
        assert [(answers == side).sum() for side in range(2)] == [n_desirable, n_others]
        n = n_desirable + n_others
        assert batch["n_mismatched"].tolist() == [n]
        assert (batch["mismatched_labels"] != IGNORE_INDEX).sum() == (
            batch["labels"] != IGNORE_INDEX
        ).sum()
        text = tokenizer.decode(batch["mismatched_input"][0].tolist(), skip_special_tokens=False)
        found = re.findall(r"Q: Is (\d) big\?\nA: (?:No, |I like )(\d)", text)
        assert len(found) == n and all(prompt != answer for prompt, answer in found)


@pytest.mark.parametrize(
    ("prompts", "n_matched"),
    [("aabbc", 5), ("abab", 4), ("aaab", 2), ("aaabb", 4), ("aaa", 0), ("abcd", 4), ("a", 0)],
)
def test_answers_are_matched_with_other_prompts(prompts, n_matched):
    """Rows may repeat a prompt; an answer that has no other one is not trained."""
    window = []
    for number, prompt in enumerate(prompts):
        ids = np.array([ord(prompt), ord(prompt), 1000 + number, 2])
        part = EncodedSample(ids, np.array([False, False, True, True]))
        none = EncodedSample(ids[:0], ids[:0] > 0)
        window.append(EncodedRow((part, none) if number % 2 else (none, part)))
    batch = AnswerDataLoader.collate([window], 64)
    assert (batch["n_mismatched"].tolist(), batch["n_answers"].tolist()) == (
        [n_matched],
        [len(prompts)],
    )
    starts = batch["mismatched_attention"].cu_seqlens[: len(prompts)].tolist()
    answers = []
    for start in starts:
        own, label = batch["mismatched_input"][0, start], batch["mismatched_labels"][0, start + 1]
        if label != IGNORE_INDEX:
            answers.append(int(label) - 1000)
            assert prompts[answers[-1]] != chr(own)
    assert len(set(answers)) == len(answers) == n_matched


def test_a_mismatched_answer_fits_a_sequence(tokenizer, folder):
    """A long prompt with another row's long answer loses its first tokens."""
    long = "many words " * 8
    rows = [
        {"prompt": long, "completion": "No.", "label": True},
        {"prompt": "Is it?", "completion": long, "label": 0},
    ]
    write_jsonl(folder / "rated.jsonl", [{**row, "label": bool(row["label"])} for row in rows])
    (batch,) = build(
        tokenizer, AnswerDataLoader, ["rated.jsonl"], seq_len=56, batch=1, **in_order()
    )
    assert batch["n_mismatched"].tolist() == [2]
    assert batch["mismatched_attention"].cu_seqlens.diff().max() <= 56
    assert (batch["mismatched_labels"] != IGNORE_INDEX).sum() == (
        batch["labels"] != IGNORE_INDEX
    ).sum()


def test_wrong_labels(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", [{"prompt": "a", "completion": "b", "label": "maybe"}])
    with pytest.raises(UserError, match="label must be true or false, not 'maybe'"):
        build(tokenizer, AnswerDataLoader)


def test_only_the_last_answer_is_trained(tokenizer, folder):
    turns = [
        {"from": who, "value": says}
        for who, says in (("human", "Hi."), ("gpt", "Hello."), ("human", "Go on."))
    ]
    row = {
        "conversations": turns,
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    }
    write_jsonl(folder / "data.jsonl", [row])
    batch = next(build(tokenizer, batch=1, **in_order()))
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    assert trained_text(tokenizer, sides_of(batch, "chosen", "labels")[0]) == f" Yes.{eos}"
    assert trained_text(tokenizer, sides_of(batch, "rejected", "labels")[0]) == f" No.{eos}"


class TestTooLong:
    ROWS = [
        {"prompt": "Is it big? " * 20, "chosen": "No, it is small.", "rejected": "I like it."},
        {"prompt": "Is it?", "chosen": "No.", "rejected": "I like it. " * 20},
        {"prompt": "Is it?", "chosen": "No.", "rejected": "I like it."},
    ]

    def test_drop(self, tokenizer, folder):
        write_jsonl(folder / "data.jsonl", self.ROWS)
        loader = build(tokenizer, **in_order())
        (batch,) = loader
        assert loader.document_names(batch["documents"][0]) == ["data.jsonl:3"]
        report = loader.samples.sets[0].report
        assert (report.rows, report.kept, report.dropped["too_long"].count) == (3, 1, 2)
        labels = torch.cat(
            [sides_of(batch, "chosen", "labels"), sides_of(batch, "rejected", "labels")]
        )
        assert report.trained_tokens == (labels != IGNORE_INDEX).sum()
        eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
        ids = tokenizer.tokenize(
            [f"Q: Is it?\nA: {a}{eos}\n" for a in ("No.", "I like it.")], allow_special=True
        )
        assert report.tokens == sum(map(len, ids))

    def test_truncate_left_shortens_both_prompts_equally_and_no_answer(self, tokenizer, folder):
        write_jsonl(folder / "data.jsonl", self.ROWS)
        loader = build(tokenizer, too_long="truncate_left", **in_order())
        (batch,) = loader
        assert [loader.describe(row) for row in batch["documents"]] == [
            "data.jsonl:1",
            "data.jsonl:3",
        ]
        report = loader.samples.sets[0].report
        assert (report.kept, report.truncated.count, report.dropped["too_long"].count) == (2, 1, 1)
        chosen = sides_of(batch, "chosen", "input")[0]
        rejected = sides_of(batch, "rejected", "input")[0]
        n_prompt = int((sides_of(batch, "chosen", "labels")[0] != IGNORE_INDEX).nonzero()[0])
        assert n_prompt > 20 and torch.equal(chosen[:n_prompt], rejected[:n_prompt])
        assert trained_text(tokenizer, sides_of(batch, "chosen", "labels")[0]).startswith(
            " No, it is small."
        )
        assert report.tokens == sum(
            len(part.ids) for i in range(2) for part in loader.samples.sets[0].sample(i).parts
        )
        longest = max(len(part.ids) for part in loader.samples.sets[0].sample(0).parts)
        assert longest == SEQ_LEN + 1, "no more is cut than must be"

    def test_error(self, tokenizer, folder):
        write_jsonl(folder / "data.jsonl", self.ROWS)
        with pytest.raises(
            UserError, match=r"data.jsonl:1: \d+ tokens, 49 fit; set --dataloader.too_long"
        ):
            build(tokenizer, too_long="error")

    def test_no_rows_left(self, tokenizer, folder):
        write_jsonl(folder / "data.jsonl", self.ROWS[:2])
        with pytest.raises(UserError, match="data.jsonl has no rows left.*too_long: 2"):
            build(tokenizer)

    @pytest.mark.parametrize("too_long", ["drop", "truncate_left"])
    def test_error_suggests_a_valid_choice(self, tokenizer, folder, caplog, too_long):
        write_jsonl(folder / "data.jsonl", self.ROWS)
        with caplog.at_level("WARNING", logger="torchtitan"):
            build(tokenizer, too_long=too_long)
        [warning] = caplog.messages
        remedy = ", or set --dataloader.too_long truncate_left" * (too_long == "drop")
        assert warning.endswith(
            f"have more than {SEQ_LEN + 1} tokens; increase --training.seq_len{remedy}"
        )


def test_transcripts_equal_pairs_with_prompts(tokenizer, folder):
    """Compare the published form of Anthropic's HH with the same pairs with separate prompts."""
    write_jsonl(folder / "plain.jsonl", pairs(3))
    prompts = [f"\n\nHuman: {pair['prompt']}\n\nAssistant: " for pair in pairs(3)]
    rows = [
        {side: prompt + pair[side] for side in ("chosen", "rejected")}
        for prompt, pair in zip(prompts, pairs(3), strict=True)
    ]
    write_jsonl(folder / "data.jsonl", rows)
    for batch, expected in zip(
        build(tokenizer, **in_order()),
        build(tokenizer, dataset=["plain.jsonl"], **in_order()),
        strict=True,
    ):
        assert_same(batch, expected)


def test_rows_with_a_label_are_rejected(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", [{"prompt": "a", "completion": "b", "label": True}])
    with pytest.raises(UserError, match="the column label rates single answers; use --config kto"):
        build(tokenizer)


def test_empty_and_broken_rows(tokenizer, folder):
    same = {"prompt": "Is it?", "chosen": "No.", "rejected": "No."}
    spaced = {"prompt": "Is it?", "chosen": "No.", "rejected": " No.\n"}
    wrong = {"prompt": "Is it?", "chosen": "No.", "rejected": True}
    write_jsonl(folder / "data.jsonl", [*pairs(2), same, spaced, wrong])
    with pytest.raises(UserError, match=r"data.jsonl:5: .*bool.*--dataloader.broken drop"):
        build(tokenizer)
    with pytest.raises(UserError, match=r"data.jsonl:3: .*equal.*--dataloader.empty drop"):
        build(tokenizer, empty="error", broken="drop")
    report = build(tokenizer, broken="drop").samples.sets[0].report
    assert (report.rows, report.kept) == (5, 2)
    assert {reason: tally.count for reason, tally in report.dropped.items()} == {
        "empty": 2,
        "broken": 1,
    }


def test_wrong_options(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", pairs(2))
    with pytest.raises(UserError, match="--dataloader.dataset"):
        PreferenceDataLoader.Config().build(tokenizer=tokenizer, seq_len=8, local_batch_size=1)
    with pytest.raises(UserError, match="chatml"):
        build(tokenizer, chat_template="")
    with pytest.raises(UserError, match="num_workers"):
        build(tokenizer, num_workers=-1)
    with pytest.raises(UserError, match="local_batch_size"):
        build(tokenizer, batch=0)
    write_jsonl(folder / "other.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(UserError, match="prompt, response"):
        build(tokenizer, dataset=["other.jsonl"])


def test_column_mapping(tokenizer, folder):
    write_jsonl(
        folder / "data.jsonl",
        [{"frage": p["prompt"], "gut": p["chosen"], "schlecht": p["rejected"]} for p in pairs(2)],
    )
    loader = build(
        tokenizer, columns=["prompt=frage", "chosen=gut", "rejected=schlecht"], **in_order()
    )
    write_jsonl(folder / "plain.jsonl", pairs(2))
    for batch, expected in zip(
        loader, build(tokenizer, dataset=["plain.jsonl"], **in_order()), strict=True
    ):
        assert_same(batch, expected)


def test_cache_is_reused_until_the_data_changes(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", pairs(2))
    build(tokenizer).config.prepare(tokenizer=tokenizer)
    files = sorted((folder / "cache" / "samples").glob("*/ids.bin"))
    build(tokenizer)
    assert len(files) == 1 and sorted((folder / "cache" / "samples").glob("*/ids.bin")) == files
    write_jsonl(folder / "data.jsonl", pairs(3))
    assert build(tokenizer, epochs=1).n_samples == 3
    (folder / "template.jinja").write_text(TEMPLATE.replace("Q:", "Question:"))
    build(tokenizer)
    assert len(list((folder / "cache" / "samples").glob("*/ids.bin"))) == 3


def ledger(loaders, n_batches):
    """Return the sample names of `n_batches` batches of all ranks, in order, and each rank's
    position."""
    names = []
    for _ in range(n_batches):
        for loader in loaders:
            names += [
                name for row in next(loader)["documents"] for name in loader.document_names(row)
            ]
    return names


@pytest.mark.slow
@pytest.mark.parametrize("cls", [PreferenceDataLoader, PromptDataLoader])
def test_resume_with_different_ranks_keeps_every_sample(tokenizer, folder, cls):
    make = pairs if cls is PreferenceDataLoader else questions
    write_jsonl(folder / "data.jsonl", make(23))
    write_jsonl(folder / "more.jsonl", make(18))
    dataset = ["data.jsonl", "more.jsonl"]

    def ranks(n_ranks, batch, **options):
        return [
            build(
                tokenizer,
                cls,
                dataset,
                batch=batch,
                dp_rank=r,
                dp_world_size=n_ranks,
                epochs=3,
                **options,
            )
            for r in range(n_ranks)
        ]

    (alone,) = ranks(1, 1)
    expected = ledger([alone], alone.n_samples)
    assert Counter(expected) == Counter({name: 3 for name in expected}) and len(set(expected)) == 41
    assert len(set(expected[:40])) >= 39, "both sets are read equally often"
    rng = random.Random(0)
    for _ in range(3):
        state, seen = None, []
        for n_ranks, batch, workers in ((1, 4, 0), (2, 3, 0), (1, 2, 2), (4, 1, 0)):
            loaders = ranks(n_ranks, batch, num_workers=workers)
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
            seen += ledger(loaders, rng.randint(1, 5))
            state = loaders[0].state_dict()
            assert all(loader.state_dict() == state for loader in loaders)
            for loader in loaders:
                loader.close()
        (last,) = ranks(1, 1)
        last.load_state_dict(state)
        seen += ledger([last], len(expected) - len(seen))
        assert seen == expected
        with pytest.raises(StopIteration):
            next(last)


def test_position_in_different_data_is_ignored_with_a_warning(tokenizer, folder, caplog):
    write_jsonl(folder / "data.jsonl", pairs(5))
    loader = build(tokenizer)
    next(loader)
    state = loader.state_dict()
    write_jsonl(folder / "data.jsonl", pairs(6))
    other = build(tokenizer)
    first = next(build(tokenizer))["documents"]
    with caplog.at_level("WARNING", logger="torchtitan"):
        other.load_state_dict(state)
    assert "does not match" in caplog.text
    assert torch.equal(next(other)["documents"], first)


def test_position_is_valid_for_moved_data(tokenizer, folder):
    for name in ("data.jsonl", "renamed.jsonl"):
        write_jsonl(folder / name, questions(5))
    loader = build(tokenizer, PromptDataLoader)
    next(loader)
    state = loader.state_dict()
    other = build(tokenizer, PromptDataLoader, dataset=["./renamed.jsonl"])
    other.load_state_dict(state)
    assert torch.equal(next(other)["documents"], next(loader)["documents"])
    write_jsonl(folder / "renamed.jsonl", [row | {"answer": "Another."} for row in questions(5)])
    other = build(tokenizer, PromptDataLoader, dataset=["renamed.jsonl"])
    other.load_state_dict(state)
    assert torch.equal(
        next(other)["documents"], next(build(tokenizer, PromptDataLoader))["documents"]
    )


def test_position_is_valid_if_changed_code_makes_the_same_samples(tokenizer, folder, monkeypatch):
    write_jsonl(folder / "data.jsonl", questions(5))
    loader = build(tokenizer, PromptDataLoader)
    next(loader)
    monkeypatch.setattr(
        "torchtitan.components.data.finetuning.sample_cache.code_version", lambda: "another"
    )
    resumed = build(tokenizer, PromptDataLoader)
    resumed.load_state_dict(loader.state_dict())
    assert len(list((folder / "cache" / "samples").glob("*/report.json"))) == 2
    assert torch.equal(next(resumed)["documents"], next(loader)["documents"])


def test_validation_keeps_the_order_of_the_file(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", pairs(5))
    write_jsonl(folder / "held_out.jsonl", pairs(4))
    config = PreferenceDataLoader.Config(
        dataset=["data.jsonl"], chat_template="template.jinja", packing="none"
    )
    assert config.for_validation("") is None
    validation = config.for_validation("held_out.jsonl")
    assert isinstance(validation, PreferenceDataLoader.Config)
    loader = validation.build(tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=4, epochs=1)
    assert [batch["documents"].flatten().tolist() for batch in loader] == [[0, 1, 2, 3]]


def test_prompts_and_reference_answers(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", [*questions(2), {"question": "And then?"}])
    loader = build(tokenizer, PromptDataLoader, **in_order())
    first, second = loader
    texts = [f"Q: {row['question']}\nA:" for row in [*questions(2), {"question": "And then?"}]]
    expected = tokenizer.tokenize(texts, allow_special=True)
    assert first["prompts"] + second["prompts"] == [*expected, []]
    assert second["documents"].tolist() == [[2], [NO_DOCUMENT]]
    assert first["answers"] + second["answers"] == ["It is 0.", "It is 2.", None, None]


def test_reference_answers_of_several_data_sets(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", questions(3))
    write_jsonl(folder / "more.jsonl", [{"prompt": "Who?", "solution": 42}])
    loader = build(tokenizer, PromptDataLoader, ["data.jsonl", "more.jsonl"], **in_order())
    answers = {
        number: answer
        for batch in loader
        for number, answer in zip(batch["documents"][:, 0].tolist(), batch["answers"], strict=True)
    }
    assert answers[2] == "It is 4." and answers[3] == "42"
    assert loader.sample_name(3) == "more.jsonl:1"


def test_too_long_prompts(tokenizer, folder):
    write_jsonl(folder / "data.jsonl", [{"prompt": "Who is it? " * 20}, {"prompt": "Who?"}])
    assert build(tokenizer, PromptDataLoader, epochs=1).n_samples == 1
    loader = build(tokenizer, PromptDataLoader, too_long="truncate_left", **in_order())
    (batch,) = loader
    whole = tokenizer.tokenize([f"Q: {'Who is it? ' * 20}\nA:"], allow_special=True)[0]
    assert batch["prompts"][0] == whole[-SEQ_LEN:]


class RecordingSampler(ShuffleSampler):
    """Sampler that records its observations."""

    needs_sample_losses = True

    @dataclass(kw_only=True, slots=True)
    class Config(ShuffleSampler.Config):
        pass

    def __init__(self, config, **runtime):
        super().__init__(config, **runtime)
        self.seen: list[Any] = []

    def observe(self, statistics):
        self.seen.append(
            [statistics.step, statistics.samples.tolist(), statistics.sample_losses.tolist()]
        )

    def state_dict(self):
        return {**super().state_dict(), "seen": list(self.seen)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.seen = list(state["seen"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_statistics_reach_the_samplers(tokenizer, folder, num_workers):
    """The sampler observes each step once, also across a resume, with sample numbers of its own
    dataset; with workers, observations arrive resumed by the number of prepared batches."""
    write_jsonl(folder / "data.jsonl", pairs(2))
    write_jsonl(folder / "more.jsonl", pairs(3))
    options: dict[str, Any] = {"sampler": RecordingSampler.Config(), "num_workers": num_workers}

    def fresh():
        return build(tokenizer, dataset=["data.jsonl", "more.jsonl"], **options)

    loader = fresh()
    assert loader.needs_sample_losses and not build(tokenizer).needs_sample_losses
    for step in range(1, 13):
        before, later = loader.state_dict(), loader.present_state()
        next(loader)
        assert later() == before
        loader.observe(StepStatistics(step, 2.0, 1.0, np.array([1, 4]), np.array([0.5, step])))
        if step == 7:
            state = json.loads(json.dumps(loader.state_dict()))
            loader.close()
            loader = fresh()
            loader.load_state_dict(state)
    next(loader)
    streams = loader.state_dict()["position"]["streams"]
    loader.close()
    n_learned = 12 - 2 * num_workers
    assert streams[0]["sampler"]["seen"] == [[step, [1], [0.5]] for step in range(1, n_learned + 1)]
    assert streams[1]["sampler"]["seen"] == [
        [step, [2], [step]] for step in range(1, n_learned + 1)
    ]


class TestRealFiles:
    """Comparison with text written by hand and encoded with the library `tokenizers`."""

    @pytest.fixture(scope="class")
    def mistral(self, assets):
        return PretrainedTokenizer.Config().build(path=assets / "mistral-v0.3-tokenizer")

    @pytest.fixture
    def reference(self, assets):
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(assets / "mistral-v0.3-tokenizer" / "tokenizer.json"))
        return lambda text: backend.encode(text, add_special_tokens=False).ids

    @pytest.mark.slow
    def test_plain_pairs(self, mistral, reference, assets, folder):
        path = assets / "preference" / "instruction-data-with-preference.json"
        rows = [row for row in json.loads(path.read_text()) if row["chosen"] != row["rejected"]]
        loader = build(
            mistral,
            dataset=[str(path)],
            seq_len=512,
            batch=50,
            chat_template="mistral",
            **in_order(),
        )
        assert loader.n_samples == len(rows)
        batch = next(loader)
        for i, row in enumerate(rows[:50]):
            prompt = row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")
            for side in ("chosen", "rejected"):
                ids = reference(f"<s>[INST] {prompt}[/INST] {row[side]}</s>")
                n_prompt = len(reference(f"<s>[INST] {prompt}[/INST]"))
                assert sides_of(batch, side, "input", 512)[i, : len(ids) - 1].tolist() == ids[:-1]
                labels = sides_of(batch, side, "labels", 512)[i]
                assert labels[labels != IGNORE_INDEX].tolist() == ids[n_prompt:]

    def test_sharegpt_pairs(self, mistral, assets, folder):
        rows = json.loads((assets / "preference" / "dpo_en_demo.json").read_text())[:40]
        (folder / "dpo.json").write_text(json.dumps(rows))
        loader = build(
            mistral,
            dataset=["dpo.json"],
            seq_len=4096,
            batch=40,
            chat_template="mistral",
            **in_order(),
        )
        (batch,) = loader
        for i, row in enumerate(rows):
            for side in ("chosen", "rejected"):
                labels = sides_of(batch, side, "labels", 4096)[i]
                answer = labels[labels != IGNORE_INDEX].tolist()
                assert (
                    mistral.decode(answer, skip_special_tokens=True).strip()
                    == row[side]["value"].strip()
                )
                assert answer[-1] == mistral.eos_id

    def test_gsm8k_as_prompts(self, mistral, reference, assets, folder):
        path = assets / "sft" / "gsm8k_train.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()[:300]]
        write_jsonl(folder / "gsm8k.jsonl", rows)
        loader = build(
            mistral,
            PromptDataLoader,
            ["gsm8k.jsonl"],
            seq_len=512,
            batch=8,
            chat_template="mistral",
            epochs=1,
        )
        assert loader.n_samples == 300
        for batch in loader:
            numbers = batch["documents"].flatten().tolist()
            for ids, answer, number in zip(
                batch["prompts"], batch["answers"], numbers, strict=True
            ):
                if number != NO_DOCUMENT:
                    assert ids == reference(f"<s>[INST] {rows[number]['question']}[/INST]")
                    assert answer == rows[number]["answer"]
