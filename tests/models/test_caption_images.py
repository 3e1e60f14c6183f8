"""Types that read one image before each text: against the class called directly on what its
processor makes of the same images and texts."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tests.experiments.test_distillation_images import TEMPERATURE, WEIGHT, distill
from tests.experiments.test_reward_classes import Scores
from tests.experiments.test_rl_images import CapturingGRPO, config_of
from tests.models.test_images import PACKED, norm, options, train_rank
from tests.models.test_images_adapters import round_layers
from tests.processes import run_processes
from tests.tiny_vision import (
    documented_template,
    parts_in,
    reference_processor,
    set_training,
    vision_folder,
    vision_model,
    write_scores,
)
from tests.training import ABSENT, killed_in, read_metrics, run, train
from tests.vision_types_of_captions import CAPTION_TYPES
from torchtitan.components.images.files import ImageOpener
from torchtitan.experiments.reward.rating import RewardModel
from torchtitan.models.transformers.captions import blank_image
from torchtitan.models.transformers.image_flops import ImageFlops
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

PROMPTS = ["What is it?", "Question: which are they? Answer:", "a photo of"]
ANSWERS = ["a cat and a dog", "x", "two herons."]
END = "<|im_end|>"
SIZES = [(40, 56), (64, 48), (20, 90)]
FAST = ("blip-2", "instructblip")
TYPES = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CAPTION_TYPES
]
ONE_FAST = [
    pytest.param(name, marks=[] if name == "instructblip" else pytest.mark.slow)
    for name in CAPTION_TYPES
]
"""Types, of which default tests have one: it has the parts of BLIP-2, and a Q-Former that reads."""


def write_model(model_type: str, folder: Path, **text: Any) -> Path:
    """Write the folder of a type, whose tokenizer begins a text as a published one does; `text` as
    for `vision_folder`."""
    vision_folder(model_type, folder, **text)
    is_bert = "cls" in CAPTION_TYPES[model_type].tokens
    begin, named = "<bos>", {"bos_token": "<bos>"}
    if is_bert:
        begin, named = "[CLS]", {"cls_token": "[CLS]", "mask_token": "[MASK]", "sep_token": END}
    write_wrapping(folder, named, [begin, END] if is_bert else [begin])
    (folder / "chat_template.jinja").write_text(documented_template("mask_token"))
    return folder


def write_wrapping(folder: Path, named: dict[str, str], around: list[str]) -> None:
    """Let the tokenizer in a folder write the first token of `around` before each text, and the
    second one, if any, after it; with these `named` tokens."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | named
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    path.write_text(json.dumps(settings))
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    parts: list[Any] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in around]
    parts.insert(1, {"Sequence": {"id": "A", "type_id": 0}})
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [],
        "special_tokens": {
            token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in around
        },
    }
    path.write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the folder of a type once."""
    root = tmp_path_factory.mktemp("models")
    return lru_cache(lambda model_type: write_model(model_type, root / model_type))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Image.Image]]:
    """Return a folder of images, and the images."""
    root = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    opened = []
    for row, (width, height) in enumerate(SIZES):
        values = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        opened.append(Image.fromarray(values))
        opened[-1].save(root / f"{row}.png")
    return root, opened


def inputs_of(
    model_type: str, folder: Path, prompts: list[str], answers: list[str], images: Any
) -> dict[str, Any]:
    """Return what the processor makes of images, and of prompts with their answers, with labels."""
    processor = reference_processor(model_type, folder)
    texts = [f"{p} {a}{END}" if p else f"{a}{END}" for p, a in zip(prompts, answers, strict=True)]
    ends = processor.tokenizer("x")["input_ids"][-1] == processor.tokenizer.sep_token_id
    inputs = dict(
        processor(
            images=images,
            text=[text.removesuffix(END) if ends else text for text in texts],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
    )
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        n_tokens = int(inputs["attention_mask"][row].sum())
        first = n_tokens - n_tokens_of(processor, text) + n_tokens_of(processor, prompt)
        labels[row, first:n_tokens] = inputs["input_ids"][row, first:n_tokens]
    return inputs | {"labels": labels} | prompt_inputs(model_type, folder, prompts)


def prompt_inputs(model_type: str, folder: Path, prompts: list[str]) -> dict[str, Any]:
    """Return what the processor makes of prompts for a Q-Former that reads them with images."""
    if model_type != "instructblip":
        return {}
    made = reference_processor(model_type, folder)(text=prompts, padding=True, return_tensors="pt")
    return {name: value for name, value in made.items() if name.startswith("qformer_")}


def n_tokens_of(processor: Any, text: str) -> int:
    return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def class_of(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    set_training(model)
    return model


def parts_of(number: int, prompts: Sequence[str] = PROMPTS) -> list[dict[str, str]]:
    """Return the content of a question."""
    text = {"type": "text", "text": prompts[number]}
    return [{"type": "image", "image": f"{number}.png"}, text]


def write_rows(
    root: Path,
    prompts: list[str] | None,
    name: str = "rows.jsonl",
    answers: Sequence[str] = ANSWERS,
) -> Path:
    rows: list[dict[str, Any]] = []
    for number, answer in enumerate(answers):
        image = f"{number}.png"
        if prompts is None:
            rows.append({"text": answer, "image": image})
            continue
        question = {"role": "user", "content": parts_of(number, prompts)}
        rows.append({"messages": [question, {"role": "assistant", "content": answer}]})
    return written(root / name, rows)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("prompts", [PROMPTS, None], ids=["answers", "captions"])
def test_loss_and_gradients_equal_those_of_the_class(
    model_type: str,
    prompts: list[str] | None,
    folders: Callable[[str], Path],
    images: Any,
    tmp_path: Path,
) -> None:
    """Of one sample, of all in rows, where a row of the batch has no sample, and of all in one
    window. The tolerance is that of float32 with sums in another order."""
    folder = folders(model_type)
    root, opened = images
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
        texts = (prompts or [""] * n)[:n]
        loss = model(**inputs_of(model_type, folder, texts, ANSWERS[:n], opened[:n])).loss
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        train(tmp_path / name, **options(folder, file) | more)
        [(_, ours, grad_norm)] = read_metrics(tmp_path / name, "loss", "grad_norm")
        assert ours == pytest.approx(float(loss.detach()), rel=1e-5)
        assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)


def class_logits(model: Any, ids: list[int], images: dict[str, Any]) -> torch.Tensor:
    """Return the logits of tokens after an image, without those of other places."""
    logits = model(input_ids=torch.tensor([ids]), **images).logits
    return logits[0, -len(ids) :]


def prompt_of(model_type: str, folder: Path, prompt: str, image: Any) -> dict[str, Any]:
    """Return what the processor makes of an image and a prompt, without an end."""
    inputs = inputs_of(model_type, folder, [""], [prompt], [image])
    ids = inputs["input_ids"][0, :-1].tolist()
    seen = {"pixel_values": inputs["pixel_values"], **prompt_inputs(model_type, folder, [prompt])}
    return {"ids": ids, "images": seen}


def greedy(model: Any, ids: list[int], images: dict[str, Any], n_new: int) -> list[int]:
    """Return the most probable tokens after a prompt, by the class alone."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(n_new):
            found.append(int(class_logits(model, found, images)[-1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("model_type", ONE_FAST)
def test_answers_equal_those_of_the_class(
    model_type: str,
    folders: Callable[[str], Path],
    images: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of `torchtitan generate --image`, and of `eval`, which asks all at once; the last reference,
    and that of an empty answer, is wrong."""
    from torchtitan.cli.evaluate import evaluate
    from torchtitan.cli.generate import generate

    folder = folders(model_type)
    root, opened = images
    model = class_of(folder).eval()
    numbers = [0, 1, 1 if model_type == "instructblip" else 2]  # each prompt shows another image
    asked_of = [opened[number] for number in numbers]
    prompts = [prompt_of(model_type, folder, *one) for one in zip(PROMPTS, asked_of, strict=True)]
    answers = [greedy(model, n_new=8, **prompt) for prompt in prompts]
    words = ["--checkpoint", str(folder), "--device", "cpu", "--max_new_tokens", "8"]
    asked = ["--image", str(root / "1.png"), "--prompt", PROMPTS[1], "--json"]
    assert generate([*words, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == answers[1]
    tokenizer = reference_processor(model_type, folder).tokenizer
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    assert len(set(texts)) == 3
    expected = [text if text.strip() else "no" for text in [*texts[:2], "no"]]
    rows = [
        {"query": prompt, "answer": text, "image": str(root / f"{number}.png")}
        for number, prompt, text in zip(numbers, PROMPTS, expected, strict=True)
    ]
    questions = written(root / "questions.jsonl", rows)
    assert evaluate([*words, "--tasks", str(questions), "--batch_size", "3"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"].values()
    n_right = 3 - expected.count("no")
    assert n_right > 0
    assert result["exact_match"] == pytest.approx(n_right / 3)


@pytest.mark.parametrize("model_type", ONE_FAST)
def test_sampled_answers_have_the_probabilities_of_the_class(
    model_type: str, folders: Callable[[str], Path], images: Any, tmp_path: Path
) -> None:
    """When GRPO samples them in batches, and when it trains. The tolerance is that of float32."""
    folder = folders(model_type)
    root, opened = images
    rows = [
        {"messages": [{"role": "user", "content": parts_of(number)}], "answer": "1"}
        for number in range(3)
    ]
    source = tmp_path / "prompts"
    shutil.copytree(root, source)
    written(source / "prompts.jsonl", rows)
    more = {"training__local_batch_size": 3, "model__train": parts_in(folder)}
    trainer: Any = run(config_of(folder, source, tmp_path / "run", **more), CapturingGRPO)
    model = class_of(folder)
    prompts = [prompt_of(model_type, folder, *one) for one in zip(PROMPTS, opened, strict=True)]
    n_images = CAPTION_TYPES[model_type].n_virtual
    trajectories = [trajectory for group in trainer.groups for trajectory in group]
    seen = set()
    for number, trajectory in enumerate(trajectories):
        start = trajectory.loss_mask.index(True)
        tokens = trajectory.tokens[n_images:]
        asked = [prompt["ids"] for prompt in prompts].index(tokens[: start - n_images])
        seen.add(asked)
        logits = class_logits(model, tokens[:-1], prompts[asked]["images"])
        new = torch.tensor(trajectory.tokens[start:])
        expected = logits[start - n_images - 1 :].log_softmax(-1).gather(1, new[:, None])[:, 0]
        assert trajectory.logprobs[start:] == pytest.approx(expected.tolist(), abs=2e-5)
        assert trainer.old[number] == pytest.approx(expected.tolist(), abs=2e-5)
    assert seen == {0, 1, 2}


def changed(folder: Path, other: Path) -> Any:
    """Write a model with other weights, and return it."""
    shutil.copytree(folder, other)
    model = class_of(folder)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * parameter.std()
    model.save_pretrained(other)
    return model


@pytest.mark.parametrize("model_type", ONE_FAST)
def test_dpo_equals_that_of_the_class(
    model_type: str, folders: Callable[[str], Path], images: Any, tmp_path: Path
) -> None:
    """With a reference of other weights; log-probabilities by the class alone, in float64."""
    folder = folders(model_type)
    root, opened = images
    numbered = enumerate(zip(PROMPTS, ANSWERS, strict=True))
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "chosen": answer, "rejected": "No.", "image": f"{number}.png"}
        for number, (prompt, answer) in numbered
    ]
    other = tmp_path / "reference"
    models = [class_of(folder), changed(folder, other)]
    sides = []
    for answers in (ANSWERS, ["No."] * len(ANSWERS)):
        inputs = inputs_of(model_type, folder, PROMPTS, answers, opened)
        targets = inputs.pop("labels")[:, 1:]
        found = []
        for model in models:
            n_tokens = targets.shape[1]  # without hidden states of images before the tokens
            logits = model(**inputs).logits[:, -n_tokens - 1 : -1].double()
            chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            found.append(chosen.where(targets >= 0, 0).sum(-1))
        sides.append(0.3 * (found[0] - found[1].detach()))
    expected = -F.logsigmoid(sides[0] - sides[1]).mean()
    expected.backward()
    gradients = [p.grad for p in models[0].parameters() if p.grad is not None]
    more = {"module": "preference", "config": "dpo_images", "training__max_norm": "inf"}
    more |= {"training__local_batch_size": 3, "loss__beta": 0.3, "reference__path": other}
    train(tmp_path / "run", **options(folder, written(root / "pairs.jsonl", rows)) | more)
    [(_, loss, grad_norm)] = read_metrics(tmp_path / "run", "loss", "grad_norm")
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-5)


@pytest.mark.parametrize("model_type", ONE_FAST)
def test_distillation_equals_that_of_the_class(
    model_type: str, folders: Callable[[str], Path], images: Any, tmp_path: Path
) -> None:
    """From logits of the classes alone, in float64."""
    folder = folders(model_type)
    root, opened = images
    teacher = changed(folder, tmp_path / "teacher")
    inputs = inputs_of(model_type, folder, PROMPTS, ANSWERS, opened)
    labels = inputs.pop("labels")[:, 1:]
    is_valid = labels >= 0
    places = slice(-labels.shape[1] - 1, -1)  # without hidden states of images before the tokens
    model = class_of(folder)
    logits = model(**inputs).logits[:, places][is_valid].double()
    with torch.no_grad():
        teaching = teacher(**inputs).logits[:, places][is_valid].double()
    cross_entropy = F.cross_entropy(logits, labels[is_valid])
    p, q = ((x / TEMPERATURE).log_softmax(-1) for x in (teaching, logits))
    divergence = TEMPERATURE**2 * (p.exp() * (p - q)).sum(-1).mean()
    loss = WEIGHT * cross_entropy + (1 - WEIGHT) * divergence
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    rows, more = write_rows(root, PROMPTS), {"training__local_batch_size": 3}
    found = distill(tmp_path / "run", folder, tmp_path / "teacher", rows, **more)
    expected = [float(loss.detach()), norm(gradients), float(cross_entropy), float(divergence)]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model_type", FAST)
def test_rewards_equal_those_of_the_class(
    model_type: str, folders: Callable[[str], Path], images: Any, tmp_path: Path
) -> None:
    """Of a run from a random score, and the rewards of its export."""
    folder = write_scores(shutil.copytree(folders(model_type), tmp_path / model_type))
    root, opened = images
    numbered = enumerate(zip(PROMPTS, ANSWERS, strict=True))
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "chosen": answer, "rejected": "No.", "image": f"{number}.png"}
        for number, (prompt, answer) in numbered
    ]
    from transformers import AutoModelForImageTextToText

    model = Scores(folder, AutoModelForImageTextToText).train()
    sides = []
    for answers in (ANSWERS, ["No."] * len(ANSWERS)):
        inputs = inputs_of(model_type, folder, PROMPTS, answers, opened)
        del inputs["labels"]
        sides.append(model(**inputs).logits[:, 0].double())
    expected = -F.logsigmoid(sides[0] - sides[1]).mean()
    expected.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    more = {"module": "reward", "config": "bradley_terry_images", "training__max_norm": "inf"}
    more |= {"training__local_batch_size": 3, "metrics__enable_tensorboard": False}
    train(tmp_path / "run", **options(folder, written(root / "pairs.jsonl", rows)) | more)
    [(_, loss, grad_norm)] = read_metrics(tmp_path / "run", "loss", "grad_norm")
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-4)
    rated = RewardModel(str(folder), with_images=True)(
        PROMPTS, ANSWERS, rows, [[ImageOpener(root).open(row["image"])] for row in rows]
    )
    assert rated == pytest.approx(sides[0].tolist(), rel=1e-5, abs=1e-5)


def test_only_the_language_model_has_4_bits(images: Any, tmp_path: Path) -> None:
    """The first loss equals the loss of the class with rounded layers in the decoder's blocks."""
    sizes = {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}
    folder = write_model("blip-2", tmp_path / "blip-2", **sizes)
    root, opened = images
    rounded = class_of(folder)
    inputs = inputs_of("blip-2", folder, PROMPTS, ANSWERS, opened)
    with torch.no_grad():
        exact = float(rounded(**inputs).loss)
        round_layers(rounded)
        expected = float(rounded(**inputs).loss)
    more = {"config": "qlora_images", "model__train": ABSENT, "training__local_batch_size": 3}
    [model] = train(
        tmp_path / "run", **options(folder, write_rows(root, PROMPTS)) | more
    ).model_parts
    [(_, loss)] = read_metrics(tmp_path / "run", "loss")
    assert loss == pytest.approx(expected, rel=1e-5)
    assert abs(exact / expected - 1) > 1e-3
    packed = [name for name, value in model.named_parameters() if not value.is_floating_point()]
    assert packed and all(".language_model." in name for name in packed)


@pytest.mark.parametrize("model_type", ONE_FAST)
def test_exports_open_with_the_same_logits(
    model_type: str, folders: Callable[[str], Path], images: Any, tmp_path: Path
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
    chosen = options(folder, write_rows(root, PROMPTS)) | {"config": "lora_images"} | more
    [model] = train(tmp_path / "straight", **chosen).model_parts
    with killed_in(Trainer, "train_step", 3):
        train(tmp_path / "killed", **chosen)
    train(tmp_path / "killed", **chosen)
    assert read_metrics(tmp_path / "killed", "loss", "grad_norm") == read_metrics(
        tmp_path / "straight", "loss", "grad_norm"
    )
    export = tmp_path / "straight/checkpoint/step-3"
    ours = AutoProcessor.from_pretrained(folder)
    theirs = AutoProcessor.from_pretrained(export)
    inputs, same = (
        dict(each(images=opened[1], text=PROMPTS[1], return_tensors="pt"))
        for each in (ours, theirs)
    )
    assert inputs.keys() == same.keys()
    assert all(torch.equal(inputs[name], same[name]) for name in inputs)
    base = class_of(folder).eval()
    merged = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
    inputs = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    with torch.no_grad():
        plain, of_export = base(**inputs).logits, merged(**inputs).logits
        # without peft's forward, which gives BLIP's class arguments that its tower does not take
        opened_in_peft = PeftModel.from_pretrained(base, export / "adapter").eval()
        adapted = opened_in_peft.get_base_model()(**inputs).logits
    assert not torch.allclose(plain, of_export, atol=1e-2)
    torch.testing.assert_close(adapted, of_export, rtol=1e-4, atol=1e-5)


def test_a_prompt_changes_what_the_model_sees(folders: Callable[[str], Path], images: Any) -> None:
    """The tests above would see a Q-Former that reads no prompt, the answer too, or padding before
    a prompt: the loss changes by more than their tolerance."""
    folder = folders("instructblip")
    model = class_of(folder)
    given = inputs_of("instructblip", folder, PROMPTS, ANSWERS, images[1])
    losses = [float(model(**given).loss.detach())]
    whole = [f"{prompt} {answer}" for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    for read in ([""] * 3, whole):
        prompts = prompt_inputs("instructblip", folder, read)
        losses.append(float(model(**given | prompts).loss.detach()))
    order = given["qformer_attention_mask"].argsort(stable=True)
    rolled = {
        name: value.gather(1, order) for name, value in given.items() if name.startswith("qformer_")
    }
    losses.append(float(model(**given | rolled).loss.detach()))
    assert all(abs(other / losses[0] - 1) > 3e-5 for other in losses[1:])


@pytest.mark.parametrize(
    ("question", "answers", "message"),
    [
        ("Which?", ["x", "y"], "together with one prompt, and the conversation has 2 answers"),
        ("Which? " * 11, ["x"], "its prompt has 68 tokens for the Q-Former, which reads 64 at"),
    ],
)
def test_prompts_that_a_q_former_cannot_read_are_refused(
    question: str,
    answers: list[str],
    message: str,
    folders: Callable[[str], Path],
    images: Any,
    tmp_path: Path,
) -> None:
    parts = [{"type": "image", "image": "0.png"}, {"type": "text", "text": question}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    messages += [{"role": "assistant", "content": answer} for answer in answers]
    rows = written(images[0] / "prompts.jsonl", [{"messages": messages}])
    template = tmp_path / "template.jinja"
    template.write_text(documented_template("mask_token").replace("messages | length > 2", "false"))
    more = {"dataloader__broken": "error", "dataloader__chat_template": str(template)}
    with pytest.raises(UserError, match=message):
        train(tmp_path, **options(folders("instructblip"), rows) | more)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CAPTION_TYPES)
def test_two_ranks_change_nothing(
    model_type: str, folders: Callable[[str], Path], images: Any, tmp_path: Path
) -> None:
    """Of three rows, the second rank has one, and a row without a sample; both share the layers of
    the vision tower."""
    folder = folders(model_type)
    rows = write_rows(images[0], PROMPTS)
    more = {"training__local_batch_size": 1, "training__global_batch_size": 4}
    more |= {"training__epochs": 2, "training__steps": ABSENT}
    one = train(tmp_path / "one", **options(folder, rows) | more)
    [model] = one.model_parts
    assert len(model.vision_layers()) == 2
    more |= {"parallelism__data_parallel_shard_degree": 2}
    run_processes(train_rank, 2, tmp_path / "two", folder, rows, more)
    expected = read_metrics(tmp_path / "one", "loss", "grad_norm")
    found = read_metrics(tmp_path / "two", "loss", "grad_norm")
    assert len(found) == 2
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("images_of_row", "message"),
    [([], "this one has no image"), (["0.png", "1.png"], "this one has 2 images, at the tokens")],
)
def test_other_numbers_of_images_are_refused(
    images_of_row: list[str],
    message: str,
    folders: Callable[[str], Path],
    images: Any,
    tmp_path: Path,
) -> None:
    parts = [{"type": "image", "image": name} for name in images_of_row]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
    row = {"messages": [question, {"role": "assistant", "content": "x"}]}
    rows = written(images[0] / "other.jsonl", [row])
    with pytest.raises(UserError, match=f"reads one image before each text, and {message}"):
        train(tmp_path, **options(folders("blip-2"), rows), dataloader__broken="error")


def test_text_alone_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The run ends before the model is built."""
    rows = written(tmp_path / "text.jsonl", [{"prompt": "What?", "completion": "x"}])
    more = {"config": "sft", "model__train": ABSENT}
    with (
        mock.patch.object(TransformersModel, "__init__", side_effect=AssertionError),
        pytest.raises(
            UserError, match="blip-2 does not compute text alone here: its class needs an"
        ),
    ):
        train(tmp_path / "run", **options(folders("blip-2"), rows) | more)


def test_text_is_not_generated_without_an_image(
    folders: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.cli.generate import generate

    words = ["--checkpoint", str(folders("blip-2")), "--device", "cpu", "--prompt", "What?"]
    assert generate(words) == 2
    assert "blip-2 does not compute text alone here" in capsys.readouterr().err


def test_operations_are_counted_once_for_prompts_of_a_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the whole batch, whatever shorter prompts it has."""
    document = json.loads(vision_model("instructblip").config.to_json_string(use_diff=False))
    model = TransformersModel.Config.of(document).build()
    given = {name: x.expand(2, *x.shape[1:]) for name, x in blank_image(model.model).items()}
    counted, count = [], ImageFlops._count
    monkeypatch.setattr(
        ImageFlops, "_count", lambda self, tensors: counted.append(1) or count(self, tensors)
    )
    flops = []
    for n_tokens, n_padding in ((5, 0), (5, 2), (8, 2)):
        mask = torch.ones(2, n_tokens, dtype=torch.long)
        mask[1, n_tokens - n_padding :] = 0
        prompts = {"qformer_input_ids": 4 * mask, "qformer_attention_mask": mask}
        images = ImageInputs(tensors=given | prompts, token_types_BL=torch.ones(2, 4))
        flops.append(model.image_flops(images))
    assert 0 < flops[0] == flops[1] < flops[2]
    assert len(counted) == 2


@pytest.mark.parametrize("model_type", CAPTION_TYPES)
def test_layouts_that_split_a_text_are_refused(model_type: str) -> None:
    document = json.loads(vision_model(model_type).config.to_json_string(use_diff=False))
    config = TransformersModel.Config.of(document)
    config.reads_images = True
    reasons = config.unsupported_parallelisms()
    assert reasons["context_parallel_degree"] == "it reads images"
    assert "has no plan" in reasons["tensor_parallel_degree"]
    with pytest.raises(UserError, match="pipeline_parallel_degree above 1 does not divide .*image"):
        config.pipeline_modules()


def test_an_encoder_decoder_is_refused() -> None:
    document = json.loads(vision_model("blip-2").config.to_json_string(use_diff=False))
    document["text_config"] = {"model_type": "t5"}
    with pytest.raises(UserError, match="blip-2 is an encoder-decoder; only decoders train here"):
        TransformersModel.Config.of(document)
