"""Validation on several datasets; bits per byte."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.processes import run_processes
from tests.training import read_validation, run, tiny_config, train
from torchtitan.components.data.base import BaseDataLoader
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.evaluation.validate import Validator, count_bytes
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config import Configurable
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

UNTRAINED = {"validator__enable": True, "training__steps": 1, "optimizer__lr": 0.0}


@pytest.fixture
def texts(tmp_path) -> dict[str, Path]:
    """Three datasets of different sizes; the last has multi-byte characters."""
    contents = {
        "short": "the cat sat on the mat. " * 5,
        "long": "one day, a little girl found a red ball in the park. " * 30,
        "accents": "où est passé l'été? ça, je ne sais pas. " * 10,
    }
    paths = {name: tmp_path / f"{name}.txt" for name in contents}
    for name, path in paths.items():
        path.write_text(contents[name])
    return paths


def validation_lines(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "validation_loss" in line]


class TestBytes:
    def test_each_byte_of_a_file_is_counted_once(self, tmp_path, texts, tokenizer):
        """All text of the file counts once, regardless of windows and padding. Without BOS, nothing
        predicts the first token. The text is ASCII, so that no window cuts a character."""
        text = texts["long"].read_text()
        loader = PretrainDataLoader.Config(
            dataset=[str(texts["long"])], cache_dir=str(tmp_path)
        ).build(tokenizer=tokenizer, seq_len=32, local_batch_size=3, epochs=1)
        first = tokenizer.encode(text)[:1]
        unpredicted = len(tokenizer.decode(first, skip_special_tokens=True).encode())
        assert (
            sum(count_bytes(batch, tokenizer) for batch in loader)
            == len(text.encode()) - unpredicted
        )

    def test_only_valid_labels_count(self, tokenizer):
        """Mask every second group of three tokens, and count the bytes of the other tokens one by
        one."""
        ids = tokenizer.encode(
            "the little dog ran to the park and found a big red ball", add_bos=True, add_eos=True
        )
        inputs, labels = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
        texts = [tokenizer.decode([i], skip_special_tokens=True) for i in ids]
        # a byte-level vocabulary
        assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=True)
        masked = (torch.arange(len(ids) - 1) // 3) % 2 == 1
        labels[0, masked] = IGNORE_INDEX
        expected = sum(
            len(text.encode())
            for text, is_masked in zip(texts[1:], masked.tolist(), strict=True)
            if not is_masked
        )
        assert count_bytes({"input": inputs, "labels": labels}, tokenizer) == expected > 0

    def test_documents_are_decoded_separately(self, tokenizer):
        """Two documents in one window count the same as in separate windows. Padding counts
        nothing."""
        rows = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in ("a cat", "é à ü")]
        separate = sum(
            count_bytes(
                {"input": torch.tensor([ids[:-1]]), "labels": torch.tensor([ids[1:]])}, tokenizer
            )
            for ids in rows
        )
        inputs = torch.tensor([[i for ids in rows for i in ids[:-1]] + [0, 0]])
        labels = torch.tensor([[i for ids in rows for i in ids[1:]] + [IGNORE_INDEX] * 2])
        positions = torch.tensor([[*range(len(rows[0]) - 1), *range(len(rows[1]) - 1), 0, 1]])
        packed = {
            "input": inputs,
            "labels": labels,
            "attention": AttentionMetadata.from_positions(positions),
        }
        assert count_bytes(packed, tokenizer) == separate == len("a cat") + len("é à ü".encode())

    def test_the_space_after_masked_text_counts(self, assets):
        """SentencePiece decoding drops a leading space. The space between two words still counts if
        the text before it is masked."""
        tokenizer = PretrainedTokenizer.Config().build(path=assets / "mistral-v0.3-tokenizer")
        ids = tokenizer.encode("once upon a time", add_bos=True, add_eos=False)
        labels = torch.tensor([ids[1:]])
        words = [tokenizer.decode(ids[: i + 1], skip_special_tokens=True) for i in range(len(ids))]
        cut = next(i for i, text in enumerate(words) if text == "once upon")
        labels[0, :cut] = IGNORE_INDEX
        assert count_bytes({"input": torch.tensor([ids[:-1]]), "labels": labels}, tokenizer) == len(
            " a time"
        )


class TestSets:
    def test_several_datasets_have_separate_numbers_and_a_mean(self, tmp_path, texts):
        """Each dataset has the numbers of a run with this dataset only; the total is a mean over
        tokens or bytes."""
        alone = {}
        for name, path in texts.items():
            train(tmp_path / name, **UNTRAINED, validator__dataset=path)
            (alone[name],) = validation_lines(tmp_path / name)
            assert not any("/" in key for key in alone[name])
        named = [f"first={texts['short']}", str(texts["long"]), f"third={texts['accents']}"]
        train(tmp_path / "together", **UNTRAINED, validator__dataset=named)
        (line,) = validation_lines(tmp_path / "together")
        nats, tokens, n_bytes = [], [], []
        for name, source in (("first", "short"), ("long.txt", "long"), ("third", "accents")):
            loss, bits = line[f"validation_loss/{name}"], line[f"validation_bits_per_byte/{name}"]
            assert (loss, bits) == (
                alone[source]["validation_loss"],
                alone[source]["validation_bits_per_byte"],
            )
            # Derive the valid tokens from their rate and time, and the bytes from the definition of
            # bits per byte.
            seconds, rate = (
                alone[source]["validation_time"],
                alone[source]["validation_tokens_per_second"],
            )
            tokens.append(round(seconds * rate))
            nats.append(loss * tokens[-1])
            n_bytes.append(round(nats[-1] / math.log(2) / bits))
        # Float64 rounding.
        assert line["validation_loss"] == pytest.approx(sum(nats) / sum(tokens), rel=1e-12)
        assert line["validation_bits_per_byte"] == pytest.approx(
            sum(nats) / math.log(2) / sum(n_bytes), rel=1e-12
        )

    def test_the_validation_split_is_the_default(self, tmp_path):
        train(tmp_path, **UNTRAINED, validator__steps=2)
        (line,) = validation_lines(tmp_path)
        keys = {
            "validation_loss",
            "validation_bits_per_byte",
            "validation_time",
            "validation_tokens_per_second",
        }
        assert set(line) == {"step", *keys}
        # The untrained model predicts 2048 tokens of three to four bytes with about equal
        # probability.
        assert line["validation_loss"] == pytest.approx(math.log(2048), abs=0.3)
        assert 2 < line["validation_bits_per_byte"] < 5

    def test_a_single_dataset_can_be_named(self, tmp_path, texts):
        train(tmp_path / "run", **UNTRAINED, validator__dataset=f"mine={texts['short']}")
        (line,) = validation_lines(tmp_path / "run")
        assert line["validation_loss/mine"] == line["validation_loss"]

    def test_validation_repeats_exactly(self, tmp_path, texts):
        """The bytes are counted once, and the data is read again each time."""
        options = {**UNTRAINED, "training__steps": 4, "validator__freq": 2, "validator__steps": 1}
        train(tmp_path / "run", **options, validator__dataset=[texts["short"], texts["long"]])
        first, second = validation_lines(tmp_path / "run")
        same = [key for key in first if key.startswith(("validation_loss", "validation_bits"))]
        assert len(same) == 6 and [first[key] for key in same] == [second[key] for key in same]

    @pytest.mark.parametrize(
        ("datasets", "named"),
        [
            ([], {"": ""}),
            (["c4"], {"": "c4"}),
            (["web=c4"], {"web": "c4"}),
            (
                ["a/b/val.jsonl", "other=x=1.txt"],
                {"val.jsonl": "a/b/val.jsonl", "other": "x=1.txt"},
            ),
            (["data/x=1/a.txt", "b"], {"a.txt": "data/x=1/a.txt", "b": "b"}),
        ],
    )
    def test_names(self, datasets, named):
        assert Validator.Config(dataset=datasets).named_datasets() == named

    def test_duplicate_names_are_rejected(self, tmp_path):
        config = tiny_config(
            tmp_path, validator__enable=True, validator__dataset=["a/val.txt", "b/val.txt"]
        )
        with pytest.raises(
            UserError, match=r"--validator\.dataset has 2 sets named 'val.txt'.*val.txt2="
        ):
            config.check(world_size=1)

    def test_a_dataset_that_the_loader_cannot_read_is_rejected(self, tmp_path):
        config = tiny_config(tmp_path, validator__enable=True, validator__dataset="a.txt")
        config.dataloader = BaseDataLoader.Config()
        with pytest.raises(UserError, match="--validator.dataset 'a.txt': BaseDataLoader"):
            config.validation_dataloaders()


@pytest.mark.slow
def test_validation_at_start(tmp_path, texts):
    """Validate the untrained model before the first step. Training is bitwise unchanged, and a
    resumed run does not validate at its start."""
    options = {"validator__enable": True, "validator__dataset": texts["long"], "validator__freq": 2}
    options |= {"checkpoint__enable": True, "checkpoint__interval": 2}
    train(tmp_path / "start", **options, validator__at_start=True)
    train(tmp_path / "plain", **options)
    train(tmp_path / "untrained", **UNTRAINED, validator__dataset=texts["long"])
    start, plain, untrained = (
        read_validation(tmp_path / name) for name in ("start", "plain", "untrained")
    )
    assert [step for step, _ in start] == [0, 2, 4]
    assert start[1:] == plain and start[0][1] == untrained[0][1]
    train(tmp_path / "start", **{**options, "training__steps": 6}, validator__at_start=True)
    assert [step for step, _ in read_validation(tmp_path / "start")] == [0, 2, 4, 6]


class Twice(CrossEntropyLoss):
    """Overrides the loss of logits."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return 2 * super().from_logits(logits_NV, labels_N)


class TwiceOutside(CrossEntropyLoss):
    """Overrides the loss of hidden states."""

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        return 2 * super().__call__(*inputs, **options)


class Focal(CrossEntropyLoss):
    """Focal loss (arXiv:1708.02002, equation 4) plus the squared normalizer of logits, with
    smoothed labels."""

    def from_logits(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        is_valid = labels_N != IGNORE_INDEX
        smoothing = 0.0 if isinstance(logits_NV, DTensor) else 0.1
        losses = F.cross_entropy(logits_NV, labels_N, reduction="none", label_smoothing=smoothing)
        losses = losses + torch.where(is_valid, torch.logsumexp(logits_NV, dim=-1) ** 2, 0.0)
        return (losses * (1 - torch.exp(-losses)) ** 2).sum()


class AlsoElsewhere(CrossEntropyLoss):
    """Computes the cross entropy of each token twice."""

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        return super().__call__(*inputs, **options) + super().__call__(*inputs, **options)


class NoBase(Configurable):
    """Does not derive from cross entropy."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor) -> Tensor:
        logits = (hidden_BLD @ weight_VD.T).float().flatten(0, 1)
        return F.cross_entropy(logits, labels_BL.flatten(), reduction="sum")


def validate_with(folder: Path, loss: Any = None, **options: Any) -> dict[str, float]:
    config = tiny_config(folder, **UNTRAINED, validator__steps=2, **options)
    config.loss = loss
    run(config)
    lines = validation_lines(folder) if int(os.environ.get("RANK", 0)) == 0 else [{}]
    return lines[-1]


class TestBitsPerByteOfOtherLosses:
    @pytest.mark.parametrize("loss_class", [Twice, TwiceOutside, Focal])
    def test_they_are_those_of_plain_cross_entropy(self, tmp_path, loss_class):
        plain = validate_with(tmp_path / "plain")
        other = validate_with(tmp_path / "other", loss_class.Config())
        assert other["validation_loss"] > 1.5 * plain["validation_loss"]
        # float32 sums over tokens in another order.
        assert other["validation_bits_per_byte"] == pytest.approx(
            plain["validation_bits_per_byte"], rel=1e-6
        )

    @pytest.mark.parametrize("loss_class", [AlsoElsewhere, NoBase])
    def test_they_are_left_out_if_they_are_unknown(self, tmp_path, caplog, loss_class):
        line = validate_with(tmp_path, loss_class.Config())
        assert line["validation_loss"] > 0 and "validation_bits_per_byte" not in line
        assert caplog.text.count(f"no validation_bits_per_byte: {loss_class.__name__}") == 1

    @pytest.mark.slow
    def test_they_do_not_depend_on_the_layout(self, tmp_path):
        plain = validate_with(tmp_path / "plain")
        run_processes(validate_layouts, 2, tmp_path)
        for name in LAYOUTS:
            (*_, line) = validation_lines(tmp_path / name)
            assert line["validation_bits_per_byte"] == pytest.approx(
                plain["validation_bits_per_byte"], rel=1e-6
            ), name


LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"parallelism__tensor_parallel_degree": 2},
    "context": {"parallelism__context_parallel_degree": 2},
    "pipeline": {
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__pipeline_parallel_microbatch_size": 1,
    },
    "data": {"training__local_batch_size": 1},
}


def validate_layouts(folder: Path) -> None:
    for name, layout in LAYOUTS.items():
        validate_with(folder / name, Focal.Config(), **layout)
