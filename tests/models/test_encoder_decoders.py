"""Types whose encoder reads an image: against the class called directly, which shifts the labels by
itself, on what its processor makes of the same images and texts."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.models.test_caption_images import (
    ANSWERS,
    END,
    SIZES,
    class_of,
    images,
    write_rows,
    write_wrapping,
    written,
)
from tests.models.test_images import PACKED, norm, options, train_rank
from tests.processes import run_processes
from tests.tiny_vision import documented_template, reference_processor, vision_folder, vision_model
from tests.training import ABSENT, killed_in, read_metrics, train
from tests.vision_types_of_decoders import DECODER_TYPES
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

__all__ = ["images"]

PROMPTS = {
    "trocr": ["read", "what is it?", "x"],
    "donut": ["<s_task>", "<s_task>which?", "<s_task>what is it?"],
}
FAST = ("trocr",)
TYPES = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in DECODER_TYPES
]


def begins(model_type: str) -> str:
    """Return what an answer begins with."""
    return "" if model_type == "donut" else "<s>"


def write_model(model_type: str, folder: Path) -> Path:
    """Write the folder of a type, with the documented chat template."""
    vision_folder(model_type, folder)
    named = {"bos_token": "<s>", "mask_token": "<mask>", "sep_token": END, "cls_token": "<s>"}
    write_wrapping(folder, named, ["<s>", END])
    template = documented_template("this decoder writes")
    if not begins(model_type):
        template = template.replace("bos_token + ", "")
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the folder of a type once."""
    root = tmp_path_factory.mktemp("models")
    return lru_cache(lambda model_type: write_model(model_type, root / model_type))


def inputs_of(
    model_type: str, folder: Path, prompts: list[str] | None, answers: list[str], opened: Any
) -> dict[str, Any]:
    """Return what the processor makes of images, with the tokens and labels of the decoder. Without
    prompts, the class makes its tokens of the labels."""
    processor = reference_processor(model_type, folder)
    pixels = dict(processor.image_processor(opened, return_tensors="pt"))
    texts = [f"{begins(model_type)}{answer}{END}" for answer in answers]
    labels = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if prompts is None:
        return pixels | {"labels": padded(labels, -100)}
    config = json.loads((folder / "config.json").read_text())
    asked = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    if model_type != "donut":
        asked = [[config["decoder_start_token_id"], *ids] for ids in asked]
    both = list(zip(asked, labels, strict=True))
    tokens = [[*before, *after[:-1]] for before, after in both]
    targets = [[-100] * (len(before) - 1) + after for before, after in both]
    return pixels | {"decoder_input_ids": padded(tokens, 0), "labels": padded(targets, -100)}


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("with_prompts", [True, False], ids=["answers", "texts"])
def test_loss_and_gradients_equal_those_of_the_class(
    model_type: str,
    with_prompts: bool,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    """Of one sample, of all in rows, where a row of the batch has no sample, and of all in one
    window. The tolerance is that of float32 with sums in another order."""
    folder = folders(model_type)
    root, opened = images
    prompts = PROMPTS[model_type] if with_prompts else None
    rows = write_rows(root, prompts)
    first = tmp_path / "first.jsonl"
    first.write_text(rows.read_text().splitlines()[0].replace("0.png", str(root / "0.png")) + "\n")
    given = {"dataloader__image_root": str(root)}
    for name, file, n, more in (
        ("one", first, 1, given | {"training__local_batch_size": 1}),
        ("rows", rows, 3, {"training__local_batch_size": 4, "training__epochs": 1}),
        ("packed", rows, 3, PACKED),
    ):
        model = class_of(folder)
        asked = prompts and prompts[:n]
        loss = model(**inputs_of(model_type, folder, asked, ANSWERS[:n], opened[:n])).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        train(tmp_path / name, **options(folder, file) | more)
        [(_, ours, grad_norm)] = read_metrics(tmp_path / name, "loss", "grad_norm")
        assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
        assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)
    assert len({Image.open(root / f"{n}.png").size for n in range(3)}) == len(SIZES)


def test_texts_of_one_token_have_their_image() -> None:
    """Such as sampled answers of EOS alone, in a batch with a row without text."""
    document = json.loads(vision_model("trocr").config.to_json_string(use_diff=False))
    config = TransformersModel.Config.of(document)
    config.reads_images = True
    model = config.build().eval()
    tokens_BL = torch.tensor([[0, 0, 0], [5, 0, 0], [5, 6, 7]])
    pixels = torch.randn(2, 3, 32, 32)
    images = ImageInputs(
        tensors={"pixel_values": pixels}, token_types_BL=torch.zeros_like(tokens_BL)
    )
    n_tokens_B = torch.tensor([0, 1, 3])
    positions_BL = torch.arange(3).expand(3, -1)
    with torch.no_grad():
        for attention in (
            AttentionMetadata.of_rows(3, 3, n_tokens_B),
            AttentionMetadata.from_positions(positions_BL, n_tokens_B),
        ):
            logits = model(tokens_BL, attention, images=images)
            for row in (1, 2):
                alone = AttentionMetadata.of_rows(1, row * 2 - 1)
                given = replace(images, tensors={"pixel_values": pixels[row - 1 : row]})
                expected = model(tokens_BL[row : row + 1, : row * 2 - 1], alone, images=given)
                torch.testing.assert_close(logits[row : row + 1, : row * 2 - 1], expected)


def greedy(model: Any, pixels: Any, ids: list[int], n_new: int) -> list[int]:
    """Return the most probable tokens after a prompt, by the class alone."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(n_new):
            logits = model(**pixels, decoder_input_ids=torch.tensor([found])).logits
            found.append(int(logits[0, -1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("model_type", TYPES)
def test_answers_equal_those_of_the_class(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of `torchtitan generate --image`, and of `eval`, which asks all at once, with prompts of
    several lengths; the last reference is wrong."""
    from torchtitan.cli.evaluate import evaluate
    from torchtitan.cli.generate import generate

    folder = folders(model_type)
    root, opened = images
    model = class_of(folder).eval()
    prompts = PROMPTS[model_type]
    answers = []
    for prompt, image in zip(prompts, opened, strict=True):
        inputs = inputs_of(model_type, folder, [prompt], [""], [image])
        ids = inputs.pop("decoder_input_ids")[0].tolist()
        if begins(model_type):
            ids.pop()  # which the answer begins with
        del inputs["labels"]
        answers.append(greedy(model, inputs, ids, n_new=8))
    words = ["--checkpoint", str(folder), "--device", "cpu", "--max_new_tokens", "8"]
    asked = ["--image", str(root / "1.png"), "--prompt", prompts[1], "--json"]
    assert generate([*words, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == answers[1]
    tokenizer = reference_processor(model_type, folder).tokenizer
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    expected = [text if text.strip() else "no" for text in [*texts[:2], "no"]]
    rows = [
        {"query": prompt, "answer": text, "image": str(root / f"{number}.png")}
        for number, (prompt, text) in enumerate(zip(prompts, expected, strict=True))
    ]
    questions = written(root / "questions.jsonl", rows)
    assert evaluate([*words, "--tasks", str(questions), "--batch_size", "3"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"].values()
    n_right = 3 - expected.count("no")
    assert n_right > 0
    assert result["exact_match"] == pytest.approx(n_right / 3)


@pytest.mark.parametrize("model_type", TYPES)
def test_exports_open_with_the_same_logits(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    """Of a killed run that continues exactly; with the processor of the folder. Adapters open in
    peft."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = folders(model_type)
    root, opened = images
    more = {"training__steps": 3, "optimizer__lr": 1e-2, "lr_scheduler__warmup_steps": 0}
    more |= {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True}
    more |= {"checkpoint__export_dtype": "float32", "checkpoint__interval": 1}
    chosen = options(folder, write_rows(root, PROMPTS[model_type]))
    chosen |= {"config": "lora_images"} | more
    train(tmp_path / "straight", **chosen)
    with killed_in(Trainer, "train_step", 3):
        train(tmp_path / "killed", **chosen)
    train(tmp_path / "killed", **chosen)
    assert read_metrics(tmp_path / "killed", "loss", "grad_norm") == read_metrics(
        tmp_path / "straight", "loss", "grad_norm"
    )
    export = tmp_path / "straight/checkpoint/step-3"
    inputs = inputs_of(model_type, folder, PROMPTS[model_type], ANSWERS, opened)
    processor = AutoProcessor.from_pretrained(export)
    pixels = processor(images=opened, return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.as_tensor(pixels), torch.as_tensor(inputs["pixel_values"]))
    base = class_of(folder).eval()
    merged = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    del inputs["labels"]
    with torch.no_grad():
        plain, of_export = base(**inputs).logits, merged(**inputs).logits
        adapted = PeftModel.from_pretrained(base, export / "adapter").eval()(**inputs).logits
    assert not torch.allclose(plain, of_export, atol=1e-2)
    torch.testing.assert_close(adapted, of_export, rtol=1e-4, atol=1e-5)


def test_text_alone_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    rows = written(tmp_path / "text.jsonl", [{"prompt": "What?", "completion": "x"}])
    more = {"config": "sft", "model__train": ABSENT}
    with pytest.raises(UserError, match="encoder-decoder does not compute text alone: its class"):
        train(tmp_path / "run", **options(folders("trocr"), rows) | more)


def test_a_trained_prompt_is_refused(
    folders: Callable[[str], Path], images: tuple[Path, list[Image.Image]], tmp_path: Path
) -> None:
    """The first token of the answer would be predicted from the start."""
    rows = write_rows(images[0], PROMPTS["trocr"])
    more = {"dataloader__broken": "error", "dataloader__train_on": "all"}
    with pytest.raises(UserError, match="trained on an answer after its whole prompt"):
        train(tmp_path, **options(folders("trocr"), rows) | more)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DECODER_TYPES)
def test_two_ranks_change_nothing(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    """Of three rows, the second rank has one, and a row without a sample; both share the layers of
    the encoder."""
    folder = folders(model_type)
    rows = write_rows(images[0], PROMPTS[model_type])
    more = {"training__local_batch_size": 1, "training__global_batch_size": 4}
    more |= {"training__epochs": 2, "training__steps": ABSENT}
    [model] = train(tmp_path / "one", **options(folder, rows) | more).model_parts
    assert len(model.vision_layers()) == 2
    more |= {"parallelism__data_parallel_shard_degree": 2}
    run_processes(train_rank, 2, tmp_path / "two", folder, rows, more)
    expected = read_metrics(tmp_path / "one", "loss", "grad_norm")
    found = read_metrics(tmp_path / "two", "loss", "grad_norm")
    assert len(found) == 2
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)
