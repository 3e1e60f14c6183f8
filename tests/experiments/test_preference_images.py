"""DPO with images (`--module preference --config dpo_images`) against the class of transformers
called directly, with its own processor and the losses' formulas in float64."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.models.test_images import MARKS, norm, options, write_rows
from tests.processes import run_processes
from tests.tiny_vision import (
    ALL_VISION_TYPES,
    in_float32,
    reference_inputs,
    set_training,
    vision_folder,
)
from tests.training import ABSENT, killed_in, read_metrics, read_validation, train
from torchtitan.experiments.preference.trainer import PreferenceTrainer
from torchtitan.tools.errors import UserError

BETA = 0.3
NUMBERS = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected")
ANSWERS = [(" cats", " dogs and birds"), (" a", " b c"), (" yes, it is", " no"), (" x y z", " w")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    """Return a file of pairs, the conversations of chosen and rejected answers, and the images of
    each."""
    folder = tmp_path_factory.mktemp("pairs")
    _, conversations, images = write_rows(folder)
    rows, sides = [], []
    for number, (messages, opened) in enumerate(zip(conversations, images, strict=True)):
        answers = [{"role": "assistant", "content": text} for text in ANSWERS[number]]
        sides += [[messages[0], answer] for answer in answers]
        names = [f"{number}-{index}.png" for index in range(len(opened))]
        chosen, rejected = ([answer] for answer in answers)
        rows.append({"prompt": messages[:1], "chosen": chosen, "rejected": rejected})
        rows[-1] |= {"images": names}
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, sides, [opened for opened in images for _ in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes the folder of a type, and of a reference with other weights,
    once."""
    from transformers import AutoModelForImageTextToText

    root = tmp_path_factory.mktemp("vision")

    @lru_cache
    def write(model_type: str) -> tuple[Path, Path]:
        folder = vision_folder(model_type, root / model_type)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            for parameter in model.parameters():
                # a single number, such as a gate, has no deviation
                parameter += 0.1 * torch.randn_like(parameter) * parameter.std(unbiased=False)
        other = vision_folder(model_type, root / f"{model_type} reference")
        model.save_pretrained(other)
        return folder, other

    return write


def chosen_options(folder: Path, rows: Path, **more: Any) -> dict[str, Any]:
    return options(folder, rows) | {
        "module": "preference",
        "config": "dpo_images",
        "dataloader__packing": "none",
        "loss__beta": BETA,
        "training__max_norm": "inf",
        "metrics__enable_tensorboard": False,
        **more,
    }


def answer_log_probs(model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each answer by the class alone, in float64."""
    logits = model(**inputs).logits[:, :-1].double()
    targets = labels[:, 1:]
    found = F.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return found.where(targets >= 0, 0).sum(-1)


def answer_labels(folder: Path, inputs: dict[str, Any], sides: list[Any]) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = torch.full_like(inputs["input_ids"], -100)
    n_newline = len(tokenizer("\n")["input_ids"])
    for row, messages in enumerate(sides):
        n_answer = len(tokenizer(messages[-1]["content"] + "<|im_end|>")["input_ids"])
        end = int(inputs["attention_mask"][row].sum()) - n_newline
        labels[row, end - n_answer : end] = inputs["input_ids"][row, end - n_answer : end]
    return labels


def expected(model_type: str, folder: Path, other: Path, data: Any) -> list[float]:
    """Return the `NUMBERS` of DPO by the class alone."""
    from transformers import AutoModelForImageTextToText

    _, sides, images = data
    inputs = in_float32(reference_inputs(model_type, folder, sides, images))
    labels = answer_labels(folder, inputs, sides)
    model, reference = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        for path in (folder, other)
    )
    with torch.no_grad():
        by_reference = answer_log_probs(reference, inputs, labels)
    set_training(model)
    rewards = BETA * (answer_log_probs(model, inputs, labels) - by_reference)
    chosen, rejected = rewards[::2], rewards[1::2]
    loss = -F.logsigmoid(chosen - rejected).mean()
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    means = (float(side.mean().detach()) for side in (chosen, rejected))
    return [float(loss.detach()), norm(gradients), *means]


SLOW = ("gemma3", "smolvlm", "internvl")
LONG = [
    pytest.param(name, marks=[pytest.mark.long, *(m[name] for m in MARKS if name in m)])
    for name in ALL_VISION_TYPES
    if name not in ("qwen3_vl", *SLOW, "paligemma")
]


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW), *LONG]
)
def test_dpo_equals_that_of_the_class(
    model_type: str, folders: Any, data: Any, tmp_path: Path
) -> None:
    """Rows have one, two or no images. The tolerance is that of float32 with sums in another
    order; rewards are differences of log-probabilities of whole answers, up to a hundred."""
    folder, other = folders(model_type)
    chosen = chosen_options(folder, data[0], reference__path=other)
    train(tmp_path, **chosen)
    [(_, *found)] = read_metrics(tmp_path, *NUMBERS)
    assert found == pytest.approx(expected(model_type, folder, other, data), rel=1e-5, abs=5e-6)


EQUAL = {
    "packed": {"dataloader__packing": "ffd", "training__local_batch_size": 1},
    "accumulated": {"training__local_batch_size": 1, "training__global_batch_size": 4},
    "cached": {"reference__kind": "cached"},
}


@pytest.mark.parametrize(
    "name",
    [name if name == "cached" else pytest.param(name, marks=pytest.mark.slow) for name in EQUAL],
)
def test_the_layout_changes_nothing(name: str, folders: Any, data: Any, tmp_path: Path) -> None:
    """Pairs share a window, have a micro-batch each, or their reference is in a cache."""
    folder, other = folders("smolvlm")
    chosen = chosen_options(folder, data[0], reference__path=other)
    train(tmp_path / "rows", **chosen)
    train(tmp_path / "other", **chosen | {"dataloader__cache_dir": tmp_path} | EQUAL[name])
    [found], [same] = (read_metrics(tmp_path / run, *NUMBERS) for run in ("other", "rows"))
    assert found == pytest.approx(same, rel=1e-5)


def test_cached_results_belong_to_their_images(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with the same text have images of one size."""
    from PIL import Image

    folder, other = folders("smolvlm")
    row = {"prompt": "What?", "chosen": "a", "rejected": "b"}
    for color in ("red", "white"):
        Image.new("RGB", (40, 56), color).save(tmp_path / f"{color}.png")
        rows = tmp_path / f"{color}.jsonl"
        rows.write_text(json.dumps(row | {"image": f"{color}.png"}) + "\n")
        chosen = chosen_options(folder, rows, reference__path=other, training__local_batch_size=1)
        for kind in ("model", "cached"):
            train(
                tmp_path / f"{kind} {color}",
                **chosen | {"reference__kind": kind, "dataloader__cache_dir": tmp_path},
            )
    found = {run: read_metrics(tmp_path / run, *NUMBERS) for run in ("cached red", "cached white")}
    for run, numbers in found.items():
        [same] = read_metrics(tmp_path / run.replace("cached", "model"), *NUMBERS)
        assert numbers[0] == pytest.approx(same, rel=1e-5)
    assert found["cached red"] != found["cached white"]
    assert len([*tmp_path.glob("reference/*/*.safetensors")]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["cdpo", "robust", "hinge", "ipo", "dpo_normalized", "simpo", "orpo", "cpo"]
)
def test_every_loss_trains(kind: str, folders: Any, data: Any, tmp_path: Path) -> None:
    smoothing = {"loss__label_smoothing": 0.1} if kind in ("cdpo", "robust") else {}
    fast = {"training__steps": 3, "optimizer__lr": 1e-3, "lr_scheduler__warmup_steps": 0}
    chosen = chosen_options(folders("smolvlm")[0], data[0], loss__kind=kind, **fast, **smoothing)
    train(tmp_path, **chosen)
    first, *_, last = (loss for _, loss in read_metrics(tmp_path, "loss"))
    assert last < first


def test_the_reference_of_adapters_sees_the_images(folders: Any, data: Any, tmp_path: Path) -> None:
    """The first loss is that of equal models, and the next one is lower."""
    more = {
        "config": "dpo_lora_images",
        "model__train": ABSENT,
        "training__steps": 2,
        "optimizer__lr": 1e-2,
        "lr_scheduler__warmup_steps": 0,
    }
    train(tmp_path, **chosen_options(folders("smolvlm")[0], data[0], **more))
    (_, first, margin), (_, second, _) = read_metrics(tmp_path, "loss", "rewards/margins")
    assert (first, margin) == (pytest.approx(0.6931472, rel=1e-6), pytest.approx(0, abs=1e-6))
    assert second < first


def test_adapters_learn_from_answers_with_labels(folders: Any, data: Any, tmp_path: Path) -> None:
    """Without a divergence between equal models, the first loss is 1 / 2."""
    more = {
        "config": "kto_lora_images",
        "model__train": ABSENT,
        "dataloader__packing": "ffd",
        "training__steps": 2,
        "optimizer__lr": 1e-2,
        "lr_scheduler__warmup_steps": 0,
    }
    train(tmp_path, **chosen_options(folders("smolvlm")[0], data[0], **more))
    (_, first, kl), (_, second, _) = read_metrics(tmp_path, "loss", "kl")
    assert (first, kl) == (pytest.approx(0.5, rel=1e-6), pytest.approx(0, abs=1e-6))
    assert second < first


def kto_log_ratios(
    folder: Path, other: Path, sides: list[Any], images: list[Any]
) -> tuple[torch.Tensor, Any]:
    """Return the log-ratios of answers by the class alone, and the model that has them."""
    from transformers import AutoModelForImageTextToText

    inputs = reference_inputs("qwen3_vl", folder, sides, images)
    labels = answer_labels(folder, inputs, sides)
    model, reference = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        for path in (folder, other)
    )
    with torch.no_grad():
        by_reference = answer_log_probs(reference, inputs, labels)
    return answer_log_probs(model.train(), inputs, labels) - by_reference, model


@pytest.mark.slow
def test_kto_equals_that_of_the_class(folders: Any, data: Any, tmp_path: Path) -> None:
    """Two answers with labels in one window: the prompt of each, with its images, has the answer of
    the other in the estimate of the divergence."""
    path, sides, images = data
    rows = [json.loads(line) for line in path.read_text().splitlines()[:2]]
    for row, (side, label) in zip(rows, (("chosen", True), ("rejected", False)), strict=True):
        row |= {"completion": row[side], "label": label}
        del row["chosen"], row["rejected"]
    labeled = path.with_name("labeled.jsonl")
    labeled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sides, images = [sides[0], sides[3]], [images[0], images[3]]
    crossed = [[sides[0][0], sides[1][1]], [sides[1][0], sides[0][1]]]

    folder, other = folders("qwen3_vl")
    mismatched, _ = kto_log_ratios(folder, other, crossed, images)
    if mismatched.mean() < 0:  # an estimate below 0 counts as 0
        folder, other = other, folder
        mismatched, _ = kto_log_ratios(folder, other, crossed, images)
    z = float(mismatched.detach().mean())
    assert z > 0.01
    log_ratios, model = kto_log_ratios(folder, other, sides, images)
    rewards = BETA * (log_ratios - z) * torch.tensor([1, -1])
    loss = (1 - rewards.sigmoid()).mean()
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]

    chosen = chosen_options(folder, labeled, config="kto_images", reference__path=other)
    chosen |= {"dataloader__packing": "ffd", "training__local_batch_size": 1}
    train(tmp_path, **chosen)
    [(_, *found)] = read_metrics(tmp_path, "loss", "grad_norm", "kl")
    expected = [float(loss.detach()), norm(gradients), z]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("module", "config", "message"),
    [
        ("reward", "bradley_terry", "trains on text; .* bradley_terry_images for reward models"),
        ("preference", "ipo", "names images .*, and this configuration trains on text"),
    ],
)
def test_methods_of_text_are_refused(
    module: str, config: str, message: str, folders: Any, data: Any, tmp_path: Path
) -> None:
    chosen = chosen_options(folders("smolvlm")[0], data[0], module=module, config=config)
    chosen |= {"model__train": ABSENT, "dataloader__packing": "ffd"}
    chosen |= {"dataloader__columns": "images=images"}
    if module == "reward":
        chosen |= {"loss__beta": ABSENT}
    with pytest.raises(UserError, match=message):
        train(tmp_path, **chosen)


def dpo_on_ranks(folder: Path, model: Path, rows: Path, more: dict[str, Any]) -> None:
    train(folder, **chosen_options(model, rows, **more))


@pytest.mark.slow
def test_ranks_may_have_different_numbers_of_images(
    folders: Any, data: Any, tmp_path: Path
) -> None:
    """Each of two ranks gets a pair per pass; in one pass, a rank has no images."""
    folder, other = folders("smolvlm")
    more = {"reference__path": other, "training__steps": 2}
    train(tmp_path / "one", **chosen_options(folder, data[0], **more))
    more |= {"training__local_batch_size": 1, "training__global_batch_size": 4}
    more |= {"parallelism__data_parallel_shard_degree": 2}
    run_processes(dpo_on_ranks, 2, tmp_path / "two", folder, data[0], more)
    expected = read_metrics(tmp_path / "one", *NUMBERS)
    assert np.array(read_metrics(tmp_path / "two", *NUMBERS)) == pytest.approx(
        np.array(expected), rel=1e-5
    )


@pytest.mark.slow
def test_a_killed_run_continues_exactly(folders: Any, data: Any, tmp_path: Path) -> None:
    rows, *_ = data
    more = {
        "training__steps": 4,
        "training__local_batch_size": 2,
        "optimizer__lr": 1e-3,
        "checkpoint__enable": True,
        "checkpoint__interval": 1,
        "validator__enable": True,
        "validator__freq": 2,
        "validator__steps": 1,
        "validator__dataset": str(rows),
    }
    chosen = chosen_options(folders("smolvlm")[0], rows, **more)
    train(tmp_path / "straight", **chosen)
    with killed_in(PreferenceTrainer, "train_step", 3):
        train(tmp_path / "killed", **chosen)
    train(tmp_path / "killed", **chosen)
    assert read_metrics(tmp_path / "killed", *NUMBERS) == read_metrics(
        tmp_path / "straight", *NUMBERS
    )
    assert read_validation(tmp_path / "killed") == read_validation(tmp_path / "straight")
