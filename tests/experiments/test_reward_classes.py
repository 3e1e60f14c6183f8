"""Reward models through classes of transformers, on text and on images, against the classes called
directly."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.conftest import PROJECT
from tests.experiments.test_preference import pair_of
from tests.experiments.test_preference import write_rows as write_pairs
from tests.experiments.test_preference_images import ANSWERS
from tests.experiments.test_reward import (
    MEASURES,
    NUMBERS,
    TEMPLATE,
    TOKEN_IDS,
    losses_of_transformers,
    read_validation,
    train_reward,
    trained,
)
from tests.models.test_images import norm, options, write_rows
from tests.processes import run_processes
from tests.tiny_vision import reference_inputs, vision_folder, write_scores
from tests.training import killed_in, read_metrics, train
from torchtitan.components.images.files import ImageOpener
from torchtitan.components.images.rows_loader import processor_of
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.experiments.reward.rating import RewardModel
from torchtitan.experiments.reward.trainer import RewardTrainer
from torchtitan.tools.errors import UserError

transformers = pytest.importorskip("transformers")

from tests.models.transformers.model_types import decoder_config, tiny_model  # noqa: E402
from torchtitan.models.transformers.scores import reason_against_scores  # noqa: E402
from torchtitan.models.transformers.tiny import tiny_config  # noqa: E402

TOLERANCE = {"rel": 1e-5, "abs": 1e-5}
"""Float32 sums in another order; the rewards are differences of sums near 1."""


class Scores(torch.nn.Module):
    """Score of the last token by a class's hidden states, in place of a class with one label."""

    def __init__(self, folder: Path, auto: Any):
        super().__init__()
        self.model = auto.from_pretrained(folder, dtype=torch.float32)
        output = self.model.get_output_embeddings()
        [name] = [name for name, module in self.model.named_modules() if module is output]
        self.model.set_submodule(name, torch.nn.Identity())  # its input are the last states
        score = load_file(folder / "model.safetensors")["score.weight"]
        self.score = torch.nn.Parameter(score.float())

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **inputs).logits
        mask = inputs.get("attention_mask", torch.ones_like(input_ids))
        last = hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
        return transformers.modeling_outputs.SequenceClassifierOutput(
            logits=F.linear(last, self.score.type_as(last))
        )


# with output layers of other names, tied, or without a class with one label
TEXT = [
    "gpt_neox",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "gpt2", "jamba")),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("bloom", "falcon", "opt")),
]


LAYERS = {
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Type → one layer of each kind, if a tiny model has more: transformers computes Mamba token by
token."""


def write_model(model_type: str, folder: Path) -> None:
    """Save a tiny random model of a type without a family here, with a tokenizer."""
    config = tiny_config(decoder_config(model_type))
    config.vocab_size = 2048
    dropouts = [key for key in config.to_dict() if "drop" in key]
    changes = {**TOKEN_IDS, **dict.fromkeys(dropouts, 0.0), **LAYERS.get(model_type, {})}
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in (PROJECT / "torchtitan/assets/tokenizer").glob("*.json"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def classifier(folder: Path) -> Any:
    """Return transformers' class for an exported reward model."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if type(config) in transformers.AutoModelForSequenceClassification._model_mapping:
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32
        )
    return Scores(folder, transformers.AutoModelForCausalLM)


@pytest.mark.parametrize("model_type", TEXT)
def test_text_equals_the_class_for_scores(model_type: str, tmp_path: Path) -> None:
    """The export of a run from a language model has the scores of the run's validation; a run from
    the export has the loss and the gradients of the class."""
    write_model(model_type, tmp_path / "model")
    pairs = [pair_of(i) | ({"margin": 0.5 * i} if i % 2 else {}) for i in range(7)]
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    validation = {"validator__enable": True, "validator__freq": 3, "optimizer__lr": 1e-2}
    validation |= {"validator__dataset": [tmp_path / "pairs.jsonl"]}
    train_reward(tmp_path, tmp_path / "run", **validation)
    model = classifier(trained(tmp_path))
    model = model if model_type == "jamba" else model.double()  # its experts know no float64
    expected = losses_of_transformers(model, tmp_path)
    _, *measured = read_validation(tmp_path / "run")[-1].values()
    assert measured == pytest.approx([value.item() for value in expected.values()], **TOLERANCE)
    assert abs(expected["rewards/margins"]) > 1e-2

    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(trained(tmp_path), again / "model")
    shutil.copy(tmp_path / "pairs.jsonl", again)
    whole = {"training__steps": 1, "training__local_batch_size": 8, "training__epochs": 1}
    whole |= {"training__global_batch_size": 8, "dataloader__packing": "none"}
    train_reward(again, again / "run", **whole)
    expected["loss"].backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    ((_, loss, grad_norm, *measures),) = read_metrics(again / "run", *NUMBERS)
    assert [loss, *measures] == pytest.approx(
        [value.item() for value in expected.values()], **TOLERANCE
    )
    assert grad_norm == pytest.approx(norm(gradients), rel=1e-4)  # squares double the error


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bert", "BertForSequenceClassification has other weights, such as bert.pooler"),
        ("minicpm3", "MiniCPM3ForSequenceClassification computes other scores"),
        ("chameleon", "ChameleonForConditionalGeneration computes its logits itself"),
    ],
)
def test_a_class_whose_scores_transformers_would_not_open_is_refused(
    model_type: str, message: str
) -> None:
    config = tiny_model(model_type)
    config.scores = True
    with pytest.raises(UserError, match=f"--module reward: {message}"):
        config.validate()


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3_vl", "qwen3_5", "mistral4"])
def test_a_class_of_the_same_scores_is_taken(model_type: str) -> None:
    assert reason_against_scores(tiny_model(model_type).document) == ""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    """Return a file of pairs with margins, the conversations of chosen and rejected answers, and
    the images of each."""
    folder = tmp_path_factory.mktemp("pairs")
    _, conversations, images = write_rows(folder)
    rows, sides = [], []
    for number, (messages, opened) in enumerate(zip(conversations, images, strict=True)):
        answers = [{"role": "assistant", "content": text} for text in ANSWERS[number]]
        sides += [[messages[0], answer] for answer in answers]
        chosen, rejected = ([answer] for answer in answers)
        rows.append({"prompt": messages[:1], "chosen": chosen, "rejected": rejected})
        rows[-1] |= {"images": [f"{number}-{index}.png" for index in range(len(opened))]}
        rows[-1] |= {"margin": 0.25 * number}
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, sides, [opened for opened in images for _ in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a random reward model of a type once, in the form of
    transformers' classes with one label."""
    root = tmp_path_factory.mktemp("vision")

    @lru_cache
    def write(model_type: str) -> Path:
        return write_scores(vision_folder(model_type, root / model_type))

    return write


SCORED = ("gemma3", "qwen3_5", "internvl")


def image_options(folder: Path, rows: Path, **more: Any) -> dict[str, Any]:
    return options(folder, rows) | {
        "module": "reward",
        "config": "bradley_terry_images",
        "training__max_norm": "inf",
        "metrics__enable_tensorboard": False,
        **more,
    }


PACKED = {"dataloader__packing": "ffd", "training__local_batch_size": 1}


def rated(model_type: str, folder: Path, model: Any, data: Any) -> dict[str, torch.Tensor]:
    """Return the loss and the measures of all pairs by the class alone."""
    _, sides, images = data
    rewards = model(**reference_inputs(model_type, folder, sides, images)).logits[:, 0].double()
    chosen, rejected = rewards[::2], rewards[1::2]
    margins = 0.25 * torch.arange(len(chosen))
    values = chosen, rejected, chosen - rejected, (chosen > rejected).double()
    loss = torch.log1p(torch.exp(-(chosen - rejected - margins))).mean()
    return {"loss": loss} | {
        name: value.mean() for name, value in zip(MEASURES, values, strict=True)
    }


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_vl",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma3", "qwen3_5", "kosmos-2")),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("smolvlm", "internvl", "idefics")),
    ],
)
def test_images_equal_the_class(model_type: str, folders: Any, data: Any, tmp_path: Path) -> None:
    """In rows and packed. Rows have one, two or no images. The export has the rewards of the
    run."""
    folder = folders(model_type)
    model = Scores(folder, transformers.AutoModelForImageTextToText).train()
    expected = rated(model_type, folder, model, data)
    expected["loss"].backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    numbers = [float(value.detach()) for value in expected.values()]
    export = {
        "training__steps": 1,
        "checkpoint__enable": True,
        "checkpoint__last_save_in_hf": True,
        "validator__enable": True,
        "validator__freq": 1,
        "validator__dataset": [str(data[0])],
        "optimizer__lr": 1e-2,
        "lr_scheduler__warmup_steps": 0,
    }
    for name, more in (("rows", export), ("packed", PACKED)):
        train(tmp_path / name, **image_options(folder, data[0], **more))
        [(_, loss, grad_norm, *measures)] = read_metrics(tmp_path / name, *NUMBERS)
        assert [loss, *measures] == pytest.approx(numbers, **TOLERANCE)
        assert grad_norm == pytest.approx(norm(gradients), rel=1e-4)
    saved = tmp_path / "rows/checkpoint/step-1"
    assert (saved / "preprocessor_config.json").exists()
    again = rated(model_type, saved, Scores(saved, transformers.AutoModelForImageTextToText), data)
    _, *measured = read_validation(tmp_path / "rows")[-1].values()
    assert measured == pytest.approx([float(value) for value in again.values()], **TOLERANCE)
    assert abs(measured[1] - numbers[1]) > 1e-3  # it has learned


def test_transformers_opens_the_scores_of_images(folders: Any, data: Any) -> None:
    """The class with one label of Gemma 3 reads the folder of the other tests, with images."""
    folder = folders("gemma3")
    other = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        ours = rated(
            "gemma3", folder, Scores(folder, transformers.AutoModelForImageTextToText), data
        )
        theirs = rated("gemma3", folder, other, data)
    assert [float(x) for x in theirs.values()] == pytest.approx(
        [float(x) for x in ours.values()], **TOLERANCE
    )


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", *(pytest.param(x, marks=pytest.mark.slow) for x in SCORED)]
)
def test_answers_about_images_are_rated_as_by_the_class(
    model_type: str, folders: Any, data: Any
) -> None:
    """Whether rows name their images or have had their content."""
    folder, (path, sides, opened) = folders(model_type), data
    model = Scores(folder, transformers.AutoModelForImageTextToText)
    with torch.no_grad():
        inputs = reference_inputs(model_type, folder, sides, opened)
        expected = model(**inputs).logits[:, 0].tolist()
    rows = [json.loads(line) for line in path.read_text().splitlines() for _ in range(2)]
    opener = ImageOpener(path.parent)
    images = [[opener.open(name) for name in row["images"]] for row in rows]
    completions = [conversation[-1]["content"] for conversation in sides]
    stripped = [
        row | {"images": [{"bytes": None, "path": None}] * len(row["images"])} for row in rows
    ]
    rate = RewardModel(str(folder), batch_size=3, with_images=True)
    for prompts in (rows, stripped):
        rows = [{"prompt": row["prompt"], "images": row["images"]} for row in prompts]
        rated = rate([""] * len(rows), completions, rows, images)
        assert rated == pytest.approx(expected, **TOLERANCE)
    token = processor_of(PretrainedTokenizer.Config().build(path=folder)).token
    assert rate([""], [f"It is {token}."], rows[:1], images[:1]) == [None]
    with pytest.raises(UserError, match=f"reward_model={folder}: .*more images than the 0 given"):
        rate([""], ["It is."], rows[:1], [[]])


@pytest.mark.slow
def test_adapters_of_images_train_the_score(folders: Any, data: Any, tmp_path: Path) -> None:
    folder = vision_folder("qwen3_vl", tmp_path / "model")
    more = {"config": "reward_lora_images", "training__steps": 2, "checkpoint__enable": True}
    more |= {
        "checkpoint__last_save_in_hf": True,
        "optimizer__lr": 1e-2,
        "model__train": ["language"],
    }
    more |= {"validator__enable": True, "validator__freq": 2, "validator__dataset": [str(data[0])]}
    trainer = train(tmp_path / "run", **image_options(folder, data[0], **more))
    names = [name for name, p in trainer.model_parts[0].named_parameters() if p.requires_grad]
    assert any(name.startswith("head.output") for name in names)
    assert all("lora" in name for name in names)
    saved = tmp_path / "run/checkpoint/step-2"
    model = Scores(saved, transformers.AutoModelForImageTextToText)
    again = rated("qwen3_vl", saved, model, data)
    _, *measured = read_validation(tmp_path / "run")[-1].values()
    assert measured == pytest.approx([float(value) for value in again.values()], **TOLERANCE)
    adapter = load_file(saved / "adapter/adapter_model.safetensors")
    assert "base_model.model.score.lora_A.weight" in adapter


def rewards_on_ranks(folder: Path, model: Path, rows: Path) -> None:
    train(folder, **image_options(model, rows, training__local_batch_size=2, training__steps=2))


@pytest.mark.long
def test_ranks_and_resumed_runs_compute_the_same(folders: Any, data: Any, tmp_path: Path) -> None:
    """The tolerance of 1e-4 is that of two steps of Adam after sums in another order."""
    folder, numbers = folders("qwen3_vl"), ("loss", "grad_norm", *MEASURES)
    more = {"training__steps": 2, "checkpoint__enable": True, "checkpoint__interval": 1}
    train(tmp_path / "one", **image_options(folder, data[0], **more))
    with killed_in(RewardTrainer, "train_step", 2):
        train(tmp_path / "killed", **image_options(folder, data[0], **more))
    train(tmp_path / "killed", **image_options(folder, data[0], **more))
    expected = read_metrics(tmp_path / "one", *numbers)
    assert read_metrics(tmp_path / "killed", *numbers) == expected
    run_processes(rewards_on_ranks, 2, tmp_path / "two", folder, data[0])
    for row, one in zip(read_metrics(tmp_path / "two", *numbers), expected, strict=True):
        assert row == pytest.approx(one, rel=1e-4, abs=1e-5)
