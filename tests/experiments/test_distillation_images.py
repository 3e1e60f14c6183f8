"""Distillation with images (`--module distillation --config sft_images`) against the classes of
transformers called directly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.test_preference_images import answer_labels, folders  # noqa: F401
from tests.models.test_images import norm, options, write_rows
from tests.tiny_vision import reference_inputs
from tests.training import read_metrics, train
from torchtitan.tools.errors import UserError

WEIGHT, TEMPERATURE = 0.25, 2.0
NUMBERS = ("loss", "grad_norm", "cross_entropy", "divergence")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_rows(tmp_path_factory.mktemp("rows"))


def distill(
    dump: Path,
    student: Path,
    teacher: Path,
    rows: Path,
    **more: Any,
) -> list[float]:
    chosen = options(student, rows) | {
        "module": "distillation",
        "teacher__path": teacher,
        "loss__cross_entropy_weight": WEIGHT,
        "loss__temperature": TEMPERATURE,
        "metrics__enable_tensorboard": False,
    }
    train(dump, **chosen | more)
    [(_, *numbers)] = read_metrics(dump, *NUMBERS)
    return numbers


def expected(model_type: str, student: Path, teacher: Path, data: Any) -> list[float]:
    """Return the `NUMBERS` by the classes alone, in float64 from their logits on."""
    from transformers import AutoModelForImageTextToText

    _, conversations, images = data
    inputs = reference_inputs(model_type, student, conversations, images)
    labels = answer_labels(student, inputs, conversations)[:, 1:]
    is_valid = labels >= 0
    model, taught = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        for path in (student, teacher)
    )
    with torch.no_grad():
        teaching = taught(**inputs).logits[:, :-1][is_valid].double()
    logits = model.train()(**inputs).logits[:, :-1][is_valid].double()
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels[is_valid])
    p, q = ((x / TEMPERATURE).log_softmax(-1) for x in (teaching, logits))
    divergence = TEMPERATURE**2 * (p.exp() * (p - q)).sum(-1).mean()
    loss = WEIGHT * cross_entropy + (1 - WEIGHT) * divergence
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    values = [float(value.detach()) for value in (loss, cross_entropy, divergence)]
    return [values[0], norm(gradients), *values[1:]]


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_vl",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma3", "kosmos-2", "idefics")),
    ],
)
def test_distillation_equals_that_of_the_classes(
    model_type: str,
    folders: Any,  # noqa: F811
    data: Any,
    tmp_path: Path,
) -> None:
    """The tolerance is that of float32 with sums in another order."""
    student, teacher = folders(model_type)
    found = distill(tmp_path, student, teacher, data[0])
    assert found == pytest.approx(expected(model_type, student, teacher, data), rel=1e-5)


@pytest.mark.slow
def test_a_cached_teacher_has_seen_the_images(
    folders: Any,  # noqa: F811
    data: Any,
    tmp_path: Path,
) -> None:
    """The cache has the whole vocabulary; a teacher of other images would differ by more."""
    student, teacher = folders("smolvlm")
    alone = distill(tmp_path / "alone", student, teacher, data[0])
    cache = {"teacher__cache": tmp_path / "cache", "teacher__top_k": 384}
    assert distill(tmp_path / "cached", student, teacher, data[0], **cache) == pytest.approx(
        alone, rel=1e-4
    )


def test_another_processor_is_refused(
    folders: Any,  # noqa: F811
    data: Any,
    tmp_path: Path,
) -> None:
    student, teacher = folders("smolvlm")
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["image_mean"] = [0.1, 0.1, 0.1]
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="--teacher.path: the processor of images in .*other' diff"):
        distill(tmp_path, student, other, data[0])
    (other / "preprocessor_config.json").unlink()
    (other / "processor_config.json").unlink()
    with pytest.raises(UserError, match="--teacher.path: .*has no processor_config.json or"):
        distill(tmp_path, student, other, data[0])


def test_a_teacher_of_text_is_refused(
    folders: Any,  # noqa: F811
    data: Any,
    stories: Path,
    tmp_path: Path,
) -> None:
    student, _ = folders("smolvlm")
    with pytest.raises(UserError, match="--teacher.path: .*reads no images"):
        distill(tmp_path, student, stories, data[0])
