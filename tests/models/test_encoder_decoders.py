"""Types whose encoder reads an image: against the class called directly, which shifts the labels by
itself, on what its processor makes of the same images and texts."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor, T5Tokenizer

from tests.experiments.test_distillation_images import TEMPERATURE, WEIGHT, distill
from tests.experiments.test_reward_classes import Scores
from tests.experiments.test_rl_images import CapturingGRPO, config_of
from tests.models.test_caption_images import (
    ANSWERS,
    END,
    SIZES,
    changed,
    class_of,
    images,
    parts_of,
    write_rows,
    write_wrapping,
    written,
)
from tests.models.test_images import PACKED, norm, options, train_rank
from tests.processes import run_processes
from tests.tiny_vision import (
    documented_template,
    parts_in,
    reference_processor,
    vision_folder,
    vision_model,
    write_scores,
)
from tests.training import ABSENT, killed_in, read_metrics, run, train
from tests.vision_types_of_decoders import DECODER_TYPES
from torchtitan.components.images.files import ImageOpener
from torchtitan.components.images.forms.decoder import DecoderForm
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.experiments.reward.rating import RewardModel
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

__all__ = ["images"]

PROMPTS = {
    "trocr": ["read", "what is it?", "x"],
    "donut": ["<s_task>", "<s_task>which?", "<s_task>what is it?"],
    "florence2": ["<CAPTION>", "read", "what is it?"],
    "pix2struct": ["a", "a photo", "x"],
    "t5gemma2": ["read", "what is it?", "x"],
}
READS_TEXT = ("florence2", "t5gemma2")
"""Types whose encoder reads the prompt."""
FAST = ("trocr",)


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


TYPES = [name if name in FAST else slow(name) for name in DECODER_TYPES]


def begins(model_type: str) -> str:
    """Return what an answer begins with."""
    return "<s>" if model_type in ("trocr", "florence2") else ""


def write_model(model_type: str, folder: Path) -> Path:
    """Write the folder of a type, with the documented chat template."""
    vision_folder(model_type, folder)
    named = {"bos_token": "<s>", "mask_token": "<mask>"}
    if model_type == "pix2struct":  # as T5's
        named = {}
    around = {"pix2struct": [], "t5gemma2": ["<s>"]}
    write_wrapping(folder, named, around.get(model_type, ["<s>", END]))
    template = documented_template("this decoder writes")
    if not begins(model_type):
        template = template.replace('(bos_token or "") + ', "")
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
    """Return what the processor makes of images, with the labels of the decoder, of which the class
    makes its tokens, or with its tokens if they begin with prompts."""
    processor = reference_processor(model_type, folder)
    if model_type in READS_TEXT:
        texts = prompts or [""] * len(answers)
        if model_type == "t5gemma2":
            texts = [f"<start_of_image>{text}" for text in texts]
        nested = [[image] for image in opened]
        read = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
        pixels = dict(processor(images=nested, text=texts, **read))
        pixels = {name: pixels[name] for name in ("input_ids", "attention_mask", "pixel_values")}
        prompts = None
    else:
        pixels = dict(processor.image_processor(opened, return_tensors="pt"))
    texts = [f"{begins(model_type)}{answer}{END}" for answer in answers]
    labels = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if prompts is None:
        return pixels | {"labels": padded(labels, -100)}
    asked = [processor.tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    if model_type != "donut":
        asked = [[start_of(model_type, folder), *ids] for ids in asked]
    both = list(zip(asked, labels, strict=True))
    tokens = [[*before, *after[:-1]] for before, after in both]
    targets = [[-100] * (len(before) - 1) + after for before, after in both]
    return pixels | {"decoder_input_ids": padded(tokens, 0), "labels": padded(targets, -100)}


def start_of(model_type: str, folder: Path) -> int:
    """Return the token that starts the decoder."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if model_type == "t5gemma2":
        return int(config.decoder.bos_token_id)
    return int((config.text_config if model_type == "florence2" else config).decoder_start_token_id)


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


@pytest.fixture
def questions(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of a Pix2Struct for questions, which writes prompts in the font of Pillow here."""
    from transformers.models.pix2struct import image_processing_pil_pix2struct as module

    def drawn(text: str, **_: Any) -> Image.Image:
        picture = Image.new("RGB", (60, 16), "white")
        ImageDraw.Draw(picture).text((0, 0), text, fill="black")
        return picture

    monkeypatch.setattr(module, "render_text", drawn)
    folder = shutil.copytree(folders("pix2struct"), tmp_path / "pix2struct")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_vqa": True}))
    return folder


def loss_of_questions(
    folder: Path, opened: list[Image.Image], prompts: list[str], labels: torch.Tensor
) -> float:
    """Return the loss of the class with prompts above the images."""
    call = AutoImageProcessor.from_pretrained(folder)
    inputs = dict(call(opened, header_text=prompts, return_tensors="pt"))
    return float(class_of(folder)(**inputs, labels=labels).loss.detach())


def test_a_prompt_is_drawn_above_the_image(
    questions: Path,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    root, opened = images
    prompts = ["which?", "what is it?", "x"]
    labels = inputs_of("pix2struct", folders("pix2struct"), None, ANSWERS, opened)["labels"]
    losses = [
        loss_of_questions(questions, opened, headers, labels)
        for headers in (prompts, prompts[::-1])
    ]
    more = {"training__local_batch_size": 3}
    train(tmp_path / "run", **options(questions, write_rows(root, prompts)) | more)
    [(_, ours)] = read_metrics(tmp_path / "run", "loss")
    assert ours == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[1] / losses[0] - 1) > 1e-3


def write_t5_tokenizer(folder: Path) -> Any:
    """Give a folder a tokenizer of T5's class, and return it."""
    words = ["?", "?Yes", "Yes", *(f"▁{word}" for word in ("", "Yes", "a", "is", "it", "what"))]
    known = [*words, *"abcdefghijklmnopqrstuvwxyz"]
    scores = [(word, -2.0 if len(word) > 1 else -4.0) for word in known]
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    tokenizer = T5Tokenizer(vocab=special + scores, extra_ids=0)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config["text_config"]):
        part["decoder_start_token_id"] = tokenizer.pad_token_id
    path.write_text(json.dumps(config))
    return tokenizer


def test_answers_have_the_same_tokens_after_any_prompt(
    questions: Path, images: tuple[Path, list[Image.Image]], tmp_path: Path
) -> None:
    """T5's tokenizer begins a text with a space, and writes `?Yes` as one token: the answer after a
    prompt would have other tokens without EOS between both."""
    tokenizer = write_t5_tokenizer(questions)
    root, opened = images
    prompts, answers = ["what?", "what is it", "x"], ["Yes", "Yes a", "what is it"]
    labels = [tokenizer(answer)["input_ids"] for answer in answers]
    assert labels[0] == tokenizer.convert_tokens_to_ids(["▁Yes", "</s>"])
    assert labels[0][0] not in tokenizer(prompts[1] + answers[1])["input_ids"]
    expected = loss_of_questions(questions, opened, prompts, padded(labels, -100))
    rows = write_rows(root, prompts, "t5.jsonl", answers)
    train(tmp_path / "run", **options(questions, rows) | {"training__local_batch_size": 3})
    [(_, ours)] = read_metrics(tmp_path / "run", "loss")
    assert ours == pytest.approx(expected, rel=1e-5)


def test_prompts_that_cannot_be_drawn_are_refused(
    questions: Path, images: tuple[Path, list[Image.Image]], tmp_path: Path
) -> None:
    """Of characters that T5's tokenizer does not know, such as braces."""
    write_t5_tokenizer(questions)
    rows = write_rows(images[0], ["what {is} it?"], "braces.jsonl", ["x"])
    with pytest.raises(UserError, match="tokenizer does not know: 'what <unk>is<unk> it"):
        train(tmp_path / "run", **options(questions, rows), dataloader__broken="error")


@pytest.mark.parametrize(
    ("model_type", "prompt", "message"),
    [
        (
            "florence2",
            "which? " * 9,
            "its image and its prompt have 82 tokens for the encoder, which reads 64",
        ),
        (
            "florence2",
            "<OD> and more",
            "refuses its prompt '<OD> and more': ValueError: Task token <OD>",
        ),
        ("t5gemma2", "is <start_of_image> one?", "its prompt has <start_of_image>, which the"),
        ("t5gemma2", "<image_soft_token>", "its prompt has <image_soft_token>, which the"),
    ],
)
def test_prompts_that_an_encoder_cannot_read_are_refused(
    model_type: str,
    prompt: str,
    message: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    rows = write_rows(images[0], [prompt], "refused.jsonl", ["x"])
    with pytest.raises(UserError, match=message):
        train(tmp_path, **options(folders(model_type), rows), dataloader__broken="error")


def test_a_folder_may_name_no_processor(
    folders: Callable[[str], Path], images: tuple[Path, list[Image.Image]], tmp_path: Path
) -> None:
    """Transformers has none for the type: any image processor with any tokenizer. A padding token
    that ends answers cannot stand for an image, too."""
    folder = shutil.copytree(folders("trocr"), tmp_path / "trocr")
    (folder / "processor_config.json").unlink()
    tokenizer = PretrainedTokenizer.Config().build(path=str(folder))
    form = ImageProcessor.from_folder(folder, tokenizer).form
    assert isinstance(form, DecoderForm) and form.opened.name == "TrOCRProcessor"
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"pad_token": END}
    del settings["mask_token"]
    path.write_text(json.dumps(settings))
    tokenizer = PretrainedTokenizer.Config().build(path=str(folder))
    with pytest.raises(UserError, match="'<.im_end.>' marks an image here and ends answers"):
        ImageProcessor.from_folder(folder, tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.pop("decoder_start_token_id"), "has no decoder_start_token_id"),
        (lambda config: config.update(encoder="x"), "cannot be built here: .* field 'encoder'"),
        (dict.clear, "has no config.json, which names decoder_start_token_id"),
    ],
)
def test_a_start_is_needed(
    change: Callable[[Any], Any], message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders("trocr"), tmp_path / "trocr")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config)) if config else path.unlink()
    tokenizer = PretrainedTokenizer.Config().build(path=str(folder))
    with pytest.raises(UserError, match=message):
        ImageProcessor.from_folder(folder, tokenizer)


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


def test_answers_may_have_special_tokens(
    folders: Callable[[str], Path], images: tuple[Path, list[Image.Image]], tmp_path: Path
) -> None:
    """Such as those of Donut's fields."""
    folder = folders("donut")
    root, opened = images
    prompts, answers = ["<s_task>"] * 2, ["<s_task>a cat<s_task>", "x"]
    rows = write_rows(root, prompts, "fields.jsonl", answers)
    loss = class_of(folder)(**inputs_of("donut", folder, prompts, answers, opened[:2])).loss
    train(tmp_path, **options(folder, rows) | {"training__local_batch_size": 2})
    [(_, ours)] = read_metrics(tmp_path, "loss")
    assert ours == pytest.approx(float(loss.detach()), rel=1e-5)


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
        ids = inputs.pop("decoder_input_ids", torch.tensor([[start_of(model_type, folder)]]))
        ids = ids[0, : -1 if len(ids[0]) > 1 and begins(model_type) else None].tolist()
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


@pytest.mark.parametrize("model_type", ["trocr", *map(slow, ("donut", "florence2"))])
def test_texts_of_images_are_generated_without_a_prompt(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """As they are trained from rows of texts, by models that have no chat template."""
    from torchtitan.cli.generate import generate

    folder = folders(model_type)
    root, opened = images
    inputs = inputs_of(model_type, folder, None, ["x"], opened[1:2])
    del inputs["labels"]
    start = [start_of(model_type, folder)]
    expected = greedy(class_of(folder).eval(), inputs, start, n_new=8)
    words = ["--checkpoint", str(folder), "--device", "cpu", "--max_new_tokens", "8", "--json"]
    assert generate([*words, "--image", str(root / "1.png"), "--prompt", ""]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected
    assert generate([*words, "--image", str(root / "1.png")]) == 2
    assert "--image needs a question or instruction" in capsys.readouterr().err
    bare = shutil.copytree(folder, tmp_path / "bare")
    template = (bare / "chat_template.jinja").rename(tmp_path / "template.jinja")
    words[1] = str(bare)
    assert generate([*words, "--image", str(root / "1.png"), "--prompt", ""]) == 2
    assert "set --chat_template to a file" in capsys.readouterr().err
    words += ["--chat_template", str(template), "--prompt", ""]
    assert generate([*words, "--image", str(root / "1.png")]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected
    assert generate(words) == 2
    assert "--chat_template is for prompts about an --image" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["trocr", *map(slow, ("florence2", "pix2struct"))])
def test_choices_are_scored_as_answers(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The decoder reads BOS before an answer of TrOCR and Florence-2."""
    from torchtitan.cli.evaluate import evaluate
    from torchtitan.components.evaluation import image_questions

    folder = folders(model_type)
    root, opened = images
    prompt, choices = PROMPTS[model_type][1], ["Yes", "a dog"]
    found: list[Any] = []
    score = image_questions.ImageQuestionScorer.score

    def keep(*args: Any) -> Any:
        found.extend(score(*args))
        return found

    monkeypatch.setattr(image_questions.ImageQuestionScorer, "score", keep)
    row = {"query": prompt, "choices": choices, "gold": 0, "image": "1.png"}
    questions = written(root / "choices.jsonl", [row])
    assert (
        evaluate(["--checkpoint", str(folder), "--tasks", str(questions), "--device", "cpu"]) == 0
    )
    expected = []
    for choice in choices:
        inputs = inputs_of(model_type, folder, [prompt], [choice], opened[1:2])
        labels = inputs["labels"][0]
        with torch.no_grad():
            logprobs = class_of(folder).eval()(**inputs).logits[0].log_softmax(-1)
        of_answer = logprobs.gather(1, labels.clamp(min=0)[:, None])[labels >= 0, 0]
        expected.append(float(of_answer[len(begins(model_type)) > 0 : -1].sum()))  # without EOS
    assert [one.logprob for one in found] == pytest.approx(expected, abs=5e-5)


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
    pixels = dict(processor.image_processor(opened, return_tensors="pt"))
    [name] = pixels.keys() & {"pixel_values", "flattened_patches"}
    assert torch.equal(torch.as_tensor(pixels[name]), torch.as_tensor(inputs[name]))
    expected = reference_processor(model_type, folder).tokenizer("what?")["input_ids"]
    assert processor.tokenizer("what?")["input_ids"] == expected
    base = class_of(folder).eval()
    merged = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    if "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = inputs["labels"].clamp(min=0)
    del inputs["labels"]
    with torch.no_grad():
        plain, of_export = base(**inputs).logits, merged(**inputs).logits
        adapted = PeftModel.from_pretrained(base, export / "adapter").eval()(**inputs).logits
    assert not torch.allclose(plain, of_export, atol=1e-2)
    torch.testing.assert_close(adapted, of_export, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
def test_sampled_answers_have_the_probabilities_of_the_class(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    """When GRPO samples them in batches, and when it trains. The tolerance is that of float32."""
    folder = folders(model_type)
    root, opened = images
    prompts = PROMPTS[model_type]
    rows = [
        {"messages": [{"role": "user", "content": parts_of(number, prompts)}], "answer": "1"}
        for number in range(3)
    ]
    source = shutil.copytree(root, tmp_path / "prompts")
    written(source / "prompts.jsonl", rows)
    more = {"training__local_batch_size": 3, "model__train": parts_in(folder)}
    trainer: Any = run(config_of(folder, source, tmp_path / "run", **more), CapturingGRPO)
    model = class_of(folder)
    seen = set()
    trajectories = [trajectory for group in trainer.groups for trajectory in group]
    for number, trajectory in enumerate(trajectories):
        asked = int(Path(trajectory.images[0].path).stem)
        seen.add(asked)
        inputs = inputs_of(model_type, folder, [prompts[asked]], ["x"], opened[asked : asked + 1])
        del inputs["labels"]
        inputs["decoder_input_ids"] = torch.tensor([trajectory.tokens[:-1]])
        start = trajectory.loss_mask.index(True)
        with torch.no_grad():
            logprobs = model(**inputs).logits[0, start - 1 :].log_softmax(-1)
        new = torch.tensor(trajectory.tokens[start:])
        expected = logprobs.gather(1, new[:, None])[:, 0].tolist()
        assert trajectory.logprobs[start:] == pytest.approx(expected, abs=2e-5)
        assert trainer.old[number] == pytest.approx(expected, abs=2e-5)
    assert seen == {0, 1, 2}


def pairs_of(prompts: Sequence[str], answers: Sequence[str], root: Path) -> Path:
    """Write pairs of answers, of which the second is the same."""
    numbered = enumerate(zip(prompts, answers, strict=True))
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "chosen": answer, "rejected": "No.", "image": f"{number}.png"}
        for number, (prompt, answer) in numbered
    ]
    return written(root / "pairs.jsonl", rows)


@pytest.mark.parametrize("model_type", TYPES)
def test_preferences_equal_those_of_the_class(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    """DPO, with a reference of other weights; log-probabilities by the class alone, in float64."""
    folder = folders(model_type)
    root, opened = images
    models = [class_of(folder), changed(folder, tmp_path / "reference")]
    sides = []
    for answers in (ANSWERS, ["No."] * len(ANSWERS)):
        inputs = inputs_of(model_type, folder, PROMPTS[model_type], answers, opened)
        labels = inputs["labels"]
        found = []
        for model in models:
            logprobs = model(**inputs).logits.double().log_softmax(-1)
            chosen = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            found.append(chosen.where(labels >= 0, 0).sum(-1))
        sides.append(0.3 * (found[0] - found[1].detach()))
    expected = -F.logsigmoid(sides[0] - sides[1]).mean()
    expected.backward()
    gradients = [p.grad for p in models[0].parameters() if p.grad is not None]
    more = {"module": "preference", "config": "dpo_images", "training__max_norm": "inf"}
    more |= {"training__local_batch_size": 3, "loss__beta": 0.3}
    more |= {"reference__path": tmp_path / "reference"}
    train(tmp_path / "run", **options(folder, pairs_of(PROMPTS[model_type], ANSWERS, root)) | more)
    [(_, loss, grad_norm)] = read_metrics(tmp_path / "run", "loss", "grad_norm")
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
def test_distillation_equals_that_of_the_class(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    """From logits of the classes alone, in float64."""
    folder = folders(model_type)
    root, opened = images
    teacher = changed(folder, tmp_path / "teacher")
    inputs = inputs_of(model_type, folder, PROMPTS[model_type], ANSWERS, opened)
    is_valid = inputs["labels"] >= 0
    model = class_of(folder)
    logits = model(**inputs).logits[is_valid].double()
    with torch.no_grad():
        teaching = teacher(**inputs).logits[is_valid].double()
    cross_entropy = F.cross_entropy(logits, inputs["labels"][is_valid])
    p, q = ((x / TEMPERATURE).log_softmax(-1) for x in (teaching, logits))
    divergence = TEMPERATURE**2 * (p.exp() * (p - q)).sum(-1).mean()
    loss = WEIGHT * cross_entropy + (1 - WEIGHT) * divergence
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    rows = write_rows(root, PROMPTS[model_type])
    more = {"training__local_batch_size": 3}
    found = distill(tmp_path / "run", folder, tmp_path / "teacher", rows, **more)
    expected = [float(loss.detach()), norm(gradients), float(cross_entropy), float(divergence)]
    assert found == pytest.approx(expected, rel=1e-5)


def test_text_alone_is_refused(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.cli.generate import generate

    rows = written(tmp_path / "text.jsonl", [{"prompt": "What?", "completion": "x"}])
    more = {"config": "sft", "model__train": ABSENT}
    message = "decoder does not compute text alone here: its encoder"
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", **options(folders("trocr"), rows) | more)
    words = ["--checkpoint", str(folders("trocr")), "--device", "cpu", "--prompt", "What?"]
    assert generate(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["decoder_layerdrop", "encoder_layerdrop"])
def test_ranks_that_drop_other_layers_are_refused(name: str) -> None:
    document = json.loads(vision_model("florence2").config.to_json_string(use_diff=False))
    document["text_config"][name] = 0.1
    with pytest.raises(UserError, match=f"{name} is above 0, but each rank would drop other"):
        TransformersModel.Config.of(document).validate()


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
    blocks = set(model.blocks().values())
    assert set(model.vision_layers()) < blocks <= set(model.units())
    more |= {"parallelism__data_parallel_shard_degree": 2}
    run_processes(train_rank, 2, tmp_path / "two", folder, rows, more)
    expected = read_metrics(tmp_path / "one", "loss", "grad_norm")
    found = read_metrics(tmp_path / "two", "loss", "grad_norm")
    assert len(found) == 2
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)


@pytest.mark.parametrize("model_type", ["trocr", *map(slow, ("donut", "florence2"))])
def test_rewards_equal_those_of_the_class(
    model_type: str,
    folders: Callable[[str], Path],
    images: tuple[Path, list[Image.Image]],
    tmp_path: Path,
) -> None:
    """Of a run from a random score, and the rewards of that. Several line breaks are one token of
    the tokenizer, but not those of a prompt and its answer."""
    from transformers import AutoModelForImageTextToText

    folder = write_scores(shutil.copytree(folders(model_type), tmp_path / model_type))
    root, opened = images
    prompts, answers = list(PROMPTS[model_type]), [*ANSWERS[:2], "\n\n b"]
    prompts[2] += "\n"
    model = Scores(folder, AutoModelForImageTextToText).train()

    def score(number: int, answer: str) -> torch.Tensor:
        given = slice(number, number + 1)
        inputs = inputs_of(model_type, folder, prompts[given], [answer], opened[given])
        labels = inputs.pop("labels")
        start = torch.tensor([[start_of(model_type, folder)]])
        ids = inputs.pop("decoder_input_ids", torch.cat((start, labels[:, :-1]), dim=1))
        inputs["decoder_input_ids"] = torch.cat((ids, labels[:, -1:]), dim=1)
        return F.linear(model.model(**inputs).logits[0, -1], model.score)[0].double()

    pairs = [(score(n, answer), score(n, "No.")) for n, answer in enumerate(answers)]
    expected = -torch.stack([F.logsigmoid(chosen - other) for chosen, other in pairs]).mean()
    expected.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    more = {"module": "reward", "config": "bradley_terry_images", "training__max_norm": "inf"}
    more |= {"training__local_batch_size": 3, "metrics__enable_tensorboard": False}
    rows = pairs_of(prompts, answers, root)
    train(tmp_path / "run", **options(folder, rows) | more)
    [(_, loss, grad_norm)] = read_metrics(tmp_path / "run", "loss", "grad_norm")
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-4)
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    rated = RewardModel(str(folder), with_images=True)(
        prompts, answers, given, [[ImageOpener(root).open(row["image"])] for row in given]
    )
    assert rated == pytest.approx([float(chosen) for chosen, _ in pairs], rel=1e-5, abs=1e-5)
