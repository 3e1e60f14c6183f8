"""PaliGemma, whose processor divides a text into a prompt, whose tokens see each other both ways,
and its answer: against the class called directly on what its processor makes of the same rows."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.experiments.test_rl_images import train as train_by_rewards
from tests.models.test_images import (
    PACKED,
    check_that_documents_see_themselves_only,
    norm,
    options,
)
from tests.tiny_vision import documented_template, reference_processor, vision_folder
from tests.training import ABSENT, read_metrics, train
from torchtitan.components.data.finetuning.conversation import BrokenSample
from torchtitan.components.images.forms.prefix import PrefixText as PrefixForm
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.tools.errors import UserError

PROMPTS = ["What is it?", "Which are they?", "caption en"]
ANSWERS = ["A cat\nand a dog", "x", "Two herons."]
SIZES = [[(40, 56)], [(64, 48), (30, 70)], [(20, 90)]]
FORM = PrefixForm(image_id=9, begin_id=2, end_id=3, eos_id=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = vision_folder("paligemma", tmp_path_factory.mktemp("model") / "paligemma")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = json.dumps(settings | {"bos_token": "<bos>"})
    (folder / "tokenizer_config.json").write_text(settings)
    (folder / "chat_template.jinja").write_text(documented_template("PaliGemma"))
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Image.Image]]]:
    """Return a folder of images, and the images of each row."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    opened = []
    for row, sizes in enumerate(SIZES):
        shapes = ((height, width, 3) for width, height in sizes)
        opened.append(
            [Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]
        )
        for index, image in enumerate(opened[-1]):
            image.save(root / f"{row}-{index}.png")
    return root, opened


def inputs_of(folder: Path, prompts: list[str], answers: list[str], images: Any) -> dict[str, Any]:
    """Return what the processor makes of prompts with images and their answers."""
    texts = ["<image>" * len(some) + text for some, text in zip(images, prompts, strict=True)]
    return dict(
        reference_processor("paligemma", folder)(
            images=images,
            text=texts,
            suffix=answers,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
    )


def reference(folder: Path, prompts: list[str], images: Any) -> tuple[float, float]:
    """Return the mean loss of the answers, and the norm of its gradients, by the class alone."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    loss = model(**inputs_of(folder, prompts, ANSWERS, images)).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), norm(gradients)


def rows_of(prompts: list[str] | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, (sizes, answer) in enumerate(zip(SIZES, ANSWERS, strict=True)):
        names = [f"{number}-{index}.png" for index in range(len(sizes))]
        if prompts is None:
            rows.append({"text": "<image>" * len(names) + answer, "images": names})
            continue
        parts = [{"type": "image", "image": name} for name in names]
        question = {"role": "user", "content": [*parts, {"type": "text", "text": prompts[number]}]}
        rows.append({"messages": [question, {"role": "assistant", "content": answer}]})
    return rows


def written(root: Path, rows: list[dict[str, Any]], name: str) -> Path:
    path = root / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "prompts", [PROMPTS, pytest.param(None, marks=pytest.mark.slow)], ids=["answers", "captions"]
)
def test_loss_and_gradients_equal_those_of_the_class(
    prompts: list[str] | None, folder: Path, images: Any, tmp_path: Path
) -> None:
    """With a row for each conversation, and packed. The tolerance is that of float32 with sums in
    another order."""
    root, opened = images
    loss, expected = reference(folder, prompts or [""] * len(SIZES), opened)
    rows = written(root, rows_of(prompts), "rows.jsonl")
    for name, packing in (("rows", {"training__local_batch_size": 3}), ("packed", PACKED)):
        trainer = train(tmp_path / name, **options(folder, rows) | packing)
        [(_, ours, grad_norm)] = read_metrics(tmp_path / name, "loss", "grad_norm")
        assert ours == pytest.approx(loss, rel=1e-5)
        assert grad_norm == pytest.approx(expected, rel=1e-5)
    [model] = trainer.model_parts
    assert model.packing.mode == "kernel"
    check_that_documents_see_themselves_only(model, next(trainer.dataloader))


def test_a_prompt_of_two_lines_is_refused(folder: Path, images: Any, tmp_path: Path) -> None:
    """Its second line would see no later tokens, other than in the class's own processor."""
    rows = written(images[0], rows_of(["One\ntwo", *PROMPTS[1:]]), "lines.jsonl")
    with pytest.raises(UserError, match="write the prompt without line breaks"):
        train(tmp_path, **options(folder, rows), dataloader__broken="error")


def test_types_of_tokens() -> None:
    """Of two texts in a row: images, BOS, a prompt, its line break, the answer, which may have
    line breaks; and of one without a BOS yet."""
    ids = np.array([[9, 9, 2, 5, 3, 6, 3, 7, 9, 2, 3, 8], [9, 9, 2, 5, 5, 3, 6, 0, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert FORM.token_types(ids).tolist() == expected
    assert FORM.token_types(np.array([9, 9, 9])).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("ids", "answer"),
    [
        ([2, 9, 5, 3, 6], 4),  # BOS before the image
        ([9, 2, 5, 9, 3, 6], 5),  # an image in the prompt
        ([9, 2, 5, 6], 3),  # no line break
        ([9, 2, 5, 3, 5, 3, 6], 6),  # a prompt of two lines
        ([9, 2, 5, 3, 6], 3),  # the line break is trained
    ],
)
def test_other_forms_are_refused(ids: list[int], answer: int) -> None:
    FORM.check(np.array([9, 2, 5, 3, 6]), np.arange(5) >= 4)
    FORM.check(np.array([9, 2, 5, 3]), None)
    with pytest.raises(BrokenSample, match="this model reads"):
        FORM.check(np.array(ids), np.arange(len(ids)) >= answer)


def test_a_second_question_is_refused() -> None:
    """Its tokens would not see each other both ways, other than those of the first."""
    ids = np.array([9, 2, 5, 3, 6, 4, 5, 3, 6, 4])
    FORM.check(ids, np.isin(np.arange(len(ids)), [4]))  # the rest of the answer may be untrained
    with pytest.raises(BrokenSample, match="write a row for each question"):
        FORM.check(ids, np.isin(np.arange(len(ids)), [4, 5, 8, 9]))


@pytest.mark.slow
def test_dpo_equals_that_of_the_class(folder: Path, images: Any, tmp_path: Path) -> None:
    """With a reference of other weights; log-probabilities by the class alone, in float64."""
    from transformers import AutoModelForImageTextToText

    root, opened = images
    names = [[f"{row}-{index}.png" for index in range(len(some))] for row, some in enumerate(SIZES)]
    pairs = zip(PROMPTS, ANSWERS, names, strict=True)
    rows = [
        {"prompt": prompt, "chosen": answer, "rejected": "No.", "images": some}
        for prompt, answer, some in pairs
    ]
    other = tmp_path / "reference"
    shutil.copytree(folder, other)
    models = [
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32) for _ in range(2)
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in models[1].parameters():
            parameter += 0.1 * torch.randn_like(parameter) * parameter.std()
    models[1].save_pretrained(other)
    sides = []
    for answers in (ANSWERS, ["No."] * len(ANSWERS)):
        inputs = inputs_of(folder, PROMPTS, answers, opened)
        targets = inputs.pop("labels")[:, 1:]
        found = []
        for model in models:
            logits = model(**inputs).logits[:, :-1].double()
            chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            found.append(chosen.where(targets >= 0, 0).sum(-1))
        sides.append(0.3 * (found[0] - found[1].detach()))
    expected = -F.logsigmoid(sides[0] - sides[1]).mean()
    expected.backward()
    gradients = [p.grad for p in models[0].parameters() if p.grad is not None]
    more = {"module": "preference", "config": "dpo_images", "training__max_norm": "inf"}
    more |= {"training__local_batch_size": 3, "loss__beta": 0.3, "reference__path": other}
    path = written(root, rows, "pairs.jsonl")
    train(tmp_path / "run", **options(folder, path) | more)
    [(_, loss, grad_norm)] = read_metrics(tmp_path / "run", "loss", "grad_norm")
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)


@pytest.mark.parametrize("cut", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_answers_equal_those_of_the_class(
    cut: int, folder: Path, images: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchtitan generate --image` and the class's own generation: the prompt sees both ways, and
    the cached answer does not."""
    from transformers import AutoModelForImageTextToText

    from torchtitan.cli.generate import generate

    root, opened = images
    call = reference_processor("paligemma", folder)
    shown = opened[cut]
    text = "<image>" * len(shown) + PROMPTS[cut]
    inputs = call(images=[shown], text=[text], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    expected = output[0, inputs["input_ids"].shape[1] :].tolist()
    paths = [f"{root}/{cut}-{index}.png" for index in range(len(shown))]
    words = ["--checkpoint", str(folder), *(w for path in paths for w in ("--image", path))]
    words += ["--prompt", PROMPTS[cut], "--max_new_tokens", "8", "--device", "cpu", "--json"]
    assert generate(words) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected
    causal = {**inputs, "token_type_ids": torch.ones_like(inputs["token_type_ids"])}
    with torch.no_grad():
        change = model(**causal).logits[:, -1] - model(**inputs).logits[:, -1]
    assert change.abs().max() > 1e-3


@pytest.mark.slow
def test_rows_without_images_equal_the_class(folder: Path, images: Any, tmp_path: Path) -> None:
    """The processor reads no text alone, and the class does: with the types of tokens."""
    from transformers import AutoModelForImageTextToText

    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Nothing."}]
    rows = written(images[0], [{"messages": messages}], "text.jsonl")
    train(tmp_path / "run", **options(folder, rows) | {"training__local_batch_size": 1})
    [(_, ours, grad_norm)] = read_metrics(tmp_path / "run", "loss", "grad_norm")
    tokenizer = reference_processor("paligemma", folder).tokenizer
    prompt, answer = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("<bos>What?\n", f"Nothing.{tokenizer.eos_token}")
    )
    ids = torch.tensor([prompt + answer])
    types = torch.tensor([[0] * len(prompt) + [1] * len(answer)])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    loss = model(input_ids=ids, token_type_ids=types, labels=ids.where(types == 1, -100)).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)


def test_training_on_text_alone_is_refused(folder: Path, images: Any, tmp_path: Path) -> None:
    """Its prompts would not see both ways. The run ends before the model is built."""
    rows = written(images[0], [{"prompt": "What?", "completion": "Nothing."}], "plain.jsonl")
    chosen = options(folder, rows, config="sft", model__train=ABSENT)
    with (
        mock.patch.object(TransformersModel, "__init__", side_effect=AssertionError),
        pytest.raises(UserError, match="prompts of model_type 'paligemma' see both ways"),
    ):
        train(tmp_path, **chosen)


@pytest.mark.slow
def test_rewards_train_what_was_sampled(folder: Path, images: Any, tmp_path: Path) -> None:
    """Prompts have one, two, or no images; the cached answers have the probabilities of training."""
    root, _ = images
    rows = [{"messages": row["messages"][:1]} for row in rows_of(PROMPTS)]
    rows.append({"messages": [{"role": "user", "content": "What?"}]})
    data = tmp_path / "data"
    shutil.copytree(root, data)
    written(data, rows, "prompts.jsonl")
    train_by_rewards(folder, data, tmp_path / "run", policy__beta=0.0)
    [(_, weight, length)] = read_metrics(tmp_path / "run", "importance_weight", "length")
    assert weight == pytest.approx(1, abs=1e-5)
    assert length > 1
