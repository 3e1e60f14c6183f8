"""Training on images through the class of transformers, against the class called directly on what
its own processor makes of the same conversations."""

import inspect
import io
import itertools
import json
import re
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file

from tests.processes import run_processes
from tests.tiny_vision import (
    ALL_VISION_TYPES,
    IN_ROWS,
    VISION_TYPES,
    in_float32,
    in_projector,
    parts_in,
    reference_inputs,
    reference_tokenizer,
    set_training,
    text_of,
    vision_folder,
    vision_model,
)
from tests.training import ABSENT, killed_in, read_metrics, read_validation, train
from tests.vision_types_leading import LEADING_TYPES, PLACING_TYPES
from tests.vision_types_m_to_v import OF_TORCHVISION
from tests.vision_types_of_timm import TYPES_OF_TIMM, TYPES_OF_TORCHVISION
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

FAST = ("qwen3_vl", "gemma3")
NOT_EQUAL = {
    "hunyuan_vl": pytest.mark.xfail(
        raises=AssertionError,
        reason="the class alone gives a batch other gradients than its rows, by 3e-4",
        strict=True,
    )
}
NEEDS_TORCHVISION = pytest.mark.skipif(
    not find_spec("torchvision"), reason="its processor needs torchvision"
)
NEEDS_TIMM = pytest.mark.skipif(not find_spec("timm"), reason="its vision tower needs timm")
ABSENT_PACKAGES = {
    **dict.fromkeys((*OF_TORCHVISION, *TYPES_OF_TORCHVISION), NEEDS_TORCHVISION),
    **dict.fromkeys(TYPES_OF_TIMM, NEEDS_TIMM),
}
MARKS = (NOT_EQUAL, ABSENT_PACKAGES)
SLOW = [
    pytest.param(name, marks=[pytest.mark.slow, *(m[name] for m in MARKS if name in m)])
    for name in ALL_VISION_TYPES
    if name not in (*FAST, "paligemma")  # tests/models/test_prefix_images.py
]

SIZES = [[(40, 56)], [(64, 48), (30, 70)], [], [(20, 90), (90, 20)]]
"""Sizes of the images of each row."""


def write_rows(
    folder: Path, all_sizes: list[list[tuple[int, int]]] = SIZES
) -> tuple[Path, list[Any], list[list[Image.Image]]]:
    """Write images of these sizes and a file of conversations with them; return the file, the
    conversations as transformers wants them, and the images."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    rows, conversations, images = [], [], []
    for number, sizes in enumerate(all_sizes):
        names, opened = [], []
        for index, (width, height) in enumerate(sizes):
            values = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            names.append(f"{number}-{index}.png")
            opened.append(Image.fromarray(values))
            opened[-1].save(folder / names[-1])
        question = {"type": "text", "text": f"What is number {number}?"}
        answer = {"role": "assistant", "content": "cats and dogs "[: 4 + 3 * number]}
        paths = [{"type": "image", "image": name} for name in names]
        rows.append({"messages": [{"role": "user", "content": [*paths, question]}, answer]})
        places = [{"type": "image"} for _ in names]
        conversations.append([{"role": "user", "content": [*places, question]}, answer])
        images.append(opened)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, conversations, images


def rows_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def options(model: Path, rows: Path, **more: Any) -> dict[str, Any]:
    """Return the options of one step over all rows in float32, each in a row of its own."""
    return {
        "module": "auto",
        "config": "sft_images",
        "hf_assets_path": model,
        "dataloader__dataset": [str(rows)],
        "dataloader__packing": "none",
        **dict.fromkeys(("model__dim", "model__ffn_dim", "model__n_layers"), ABSENT),
        "model__train": parts_in(model),
        "training__steps": 1,
        "training__seq_len": 1024,
        "training__local_batch_size": 4,
        "training__mixed_precision_param": "float32",
        "checkpoint__enable": False,
        "checkpoint__last_save_in_hf": False,
        "checkpoint__export_dtype": None,
        **more,
    }


def class_of_transformers(folder: Path) -> Any:
    """Return the class with the weights of a folder, for training."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    set_training(model)
    return model


def reference(
    model_type: str,
    folder: Path,
    conversations: list[Any],
    images: list[Any],
    with_gradients: bool = True,
    model: Any = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss of the answers, and its gradients, by the class alone: by `model`, or by
    a new one."""
    model = model or class_of_transformers(folder)
    inputs = reference_inputs(model_type, folder, conversations, images)
    tokenizer = reference_tokenizer(folder)
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, messages in enumerate(conversations):
        answer = messages[-1]["content"] + "<|im_end|>"
        assert text_of(folder, messages).endswith(f"assistant\n{answer}\n")
        n_answer = len(tokenizer(answer)["input_ids"])
        n_tokens = int(inputs["attention_mask"][row].sum())
        end = n_tokens - len(tokenizer("\n")["input_ids"])
        labels[row, end - n_answer : end] = inputs["input_ids"][row, end - n_answer : end]
    inputs = in_float32(inputs)
    with torch.set_grad_enabled(with_gradients):
        loss = model(**inputs, labels=labels).loss
    if with_gradients:
        loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.detach()), gradients


def norm(gradients: Any) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in gradients]).norm())


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes the folder of a type once."""
    root = tmp_path_factory.mktemp("vision")
    return lru_cache(lambda model_type: vision_folder(model_type, root / model_type))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_rows(tmp_path_factory.mktemp("rows"))


def check_that_documents_see_themselves_only(model: TransformersModel, batch: Any) -> None:
    """The logits of a packed document depend on the embeddings of all its own tokens, also those of
    images, and on no others."""
    embeddings: list[torch.Tensor] = []

    def keep(module: Any, args: Any, inputs: Any) -> Any:
        embeddings.append(inputs["inputs_embeds"].detach().requires_grad_())
        return args, {**inputs, "inputs_embeds": embeddings[-1]}

    hook = model.model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    boundaries = batch["attention"].cu_seqlens.tolist()
    for first, last in itertools.pairwise(boundaries):
        logits = model(batch["input"], batch["attention"], images=batch["images"])
        logits[0, first:last].square().sum().backward()
        depends = embeddings[-1].grad[0].abs().sum(-1) > 0
        assert depends[first:last].all()
        assert depends.sum() == last - first
    hook.remove()


PACKED = {
    "dataloader__packing": "ffd",
    "training__local_batch_size": 1,
    "training__seq_len": 2048,
}
"""Options for all rows in one window."""


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow), *SLOW]
)
def test_loss_and_gradients_equal_those_of_the_class(
    model_type: str, folders: Any, data: Any, tmp_path: Path
) -> None:
    """With a row for each conversation, and with all of them in one window. The tolerance is that
    of float32 with sums in another order; other pixels change the loss by more."""
    folder = folders(model_type)
    rows, conversations, images = data
    model = class_of_transformers(folder)
    loss, gradients = reference(model_type, folder, conversations, images, model=model)
    inverted = [[ImageOps.invert(image) for image in sample] for sample in images]
    other, _ = reference(
        model_type, folder, conversations, inverted, with_gradients=False, model=model
    )
    assert abs(other / loss - 1) > 1e-4
    for name, packing in (("rows", {}), ("packed", PACKED)):
        chosen = options(folder, rows) | packing
        trainer = train(tmp_path / name, **chosen)
        [(_, ours, grad_norm)] = read_metrics(tmp_path / name, "loss", "grad_norm")
        assert ours == pytest.approx(loss, rel=1e-5)
        assert grad_norm == pytest.approx(norm(gradients.values()), rel=1e-5)
    [model] = trainer.model_parts
    modes = {"mistral_large4": "masks", "dots3_note": "masks", **dict.fromkeys(IN_ROWS, "rows")}
    assert model.packing.mode == modes.get(model_type, "kernel")
    if model.packing.mode != "rows":
        check_that_documents_see_themselves_only(model, next(trainer.dataloader))


def test_codes_of_an_image_do_not_depend_on_others(folders: Any, data: Any) -> None:
    """Emu3's class alone gives an image other codes in a batch with larger ones."""
    from transformers import AutoImageProcessor

    from torchtitan.models.transformers.image_codes import encode_each_image

    folder = folders("emu3")
    model = class_of_transformers(folder)
    process = AutoImageProcessor.from_pretrained(folder)
    images = list(itertools.chain(*data[2]))

    def codes(some: list[Any]) -> list[int]:
        found = model.model.get_image_tokens(**process(some, return_tensors="pt"))
        return list(found.tolist())

    alone = [code for image in images for code in codes([image])]
    n_other = sum(a != b for a, b in zip(alone, codes(images), strict=True))
    assert n_other > 10
    encode_each_image(model)
    assert codes(images) == alone


@NEEDS_TIMM
def test_statistics_of_batches_are_kept(folders: Any, data: Any, tmp_path: Path) -> None:
    """FastVLM's tower has batch normalization, whose averages a step would change."""
    folder = folders("fast_vlm")
    stored = load_file(folder / "model.safetensors")
    [model] = train(tmp_path, **options(folder, data[0])).model_parts
    found = {name: value for name, value in model.named_buffers() if "running" in name}
    assert len(found) == 10
    assert all(torch.equal(value, stored[name[6:]]) for name, value in found.items())


@pytest.mark.slow
def test_parts_of_large_images(folders: Any, tmp_path: Path) -> None:
    """DeepSeek-OCR 2 reads parts of images that are larger than its tiles, besides the whole."""
    folder = folders("deepseek_ocr2")
    rows, conversations, images = write_rows(tmp_path, [[(200, 90)], [(64, 48), (90, 300)]])
    inputs = reference_inputs("deepseek_ocr2", folder, conversations, images)
    assert inputs["num_local_patches"].tolist() == [2, 0, 3]
    loss, gradients = reference("deepseek_ocr2", folder, conversations, images)
    for name, packing in (("rows", {"training__local_batch_size": 2}), ("packed", PACKED)):
        train(tmp_path / name, **options(folder, rows) | packing)
        [(_, ours, grad_norm)] = read_metrics(tmp_path / name, "loss", "grad_norm")
        assert ours == pytest.approx(loss, rel=1e-5)
        assert grad_norm == pytest.approx(norm(gradients.values()), rel=1e-5)


def test_accumulated_loss_is_the_same(folders: Any, data: Any, tmp_path: Path) -> None:
    """One of the micro-batches has no images."""
    folder = folders("qwen3_vl")
    rows, conversations, images = data
    loss, gradients = reference("qwen3_vl", folder, conversations, images)
    accumulated = {"training__local_batch_size": 1, "training__global_batch_size": 4}
    trainer = train(tmp_path, **options(folder, rows) | accumulated)
    [(_, ours, grad_norm)] = read_metrics(tmp_path, "loss", "grad_norm")
    [(_, per_second, fraction, seconds)] = read_metrics(
        tmp_path, "images_per_second", "image_token_fraction", "step_time"
    )
    inputs = reference_inputs("qwen3_vl", folder, conversations, images)
    assert per_second * seconds == pytest.approx(5)
    n_tokens = int(inputs["attention_mask"].sum()) - len(rows_of(rows))
    assert trainer.computed_tokens == n_tokens  # each row ends with its conversation
    n_image_tokens = int(inputs["mm_token_type_ids"].sum())
    assert fraction == pytest.approx(n_image_tokens / n_tokens)
    assert ours == pytest.approx(loss, rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients.values()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*{"granite4_vision", "llama4"} & {*ALL_VISION_TYPES}])
def test_a_batch_without_images_reads_a_blank_one(
    model_type: str, folders: Any, data: Any, tmp_path: Path
) -> None:
    """Of classes that pair features with the numbers of layers, or project them afterwards."""
    folder = folders(model_type)
    rows, conversations, images = data
    loss, gradients = reference(model_type, folder, conversations, images)
    accumulated = {"training__local_batch_size": 1, "training__global_batch_size": 4}
    train(tmp_path, **options(folder, rows) | accumulated)
    [(_, ours, grad_norm)] = read_metrics(tmp_path, "loss", "grad_norm")
    assert ours == pytest.approx(loss, rel=1e-5)
    assert grad_norm == pytest.approx(norm(gradients.values()), rel=1e-5)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[NEEDS_TIMM] if name in TYPES_OF_TIMM else [])
        for name in ALL_VISION_TYPES
    ],
)
def test_parts_of_a_model(model_type: str) -> None:
    from torchtitan.models.transformers.images import parts_of

    model = vision_model(model_type)
    parts = {id(parameter): part for part, ones in parts_of(model).items() for parameter in ones}
    language = filter(None, (model.get_decoder(), model.get_output_embeddings()))
    text = {id(parameter) for part in language for parameter in part.parameters()}
    for name, parameter in model.named_parameters():
        expected = "projector" if in_projector(model_type, name) else "vision"
        in_tower = re.search(r"\.(vqmodel|vision_model|perceiver_resampler)\.", name)
        is_text = id(parameter) in text and not in_tower  # of a decoder with the tower
        assert parts[id(parameter)] == ("language" if is_text else expected), name


def test_a_tower_that_runs_once_per_image_is_refused() -> None:
    """Ranks with other numbers of images would wait for each other's weights forever."""
    from torchtitan.models.transformers.images import running_vision_once, vision_layers

    model = vision_model("qwen3_vl")
    layer = model.get_submodule(vision_layers(model)[0])
    cu_seqlens, rotary = torch.tensor([0, 4]), (torch.zeros(4, 8), torch.zeros(4, 8))
    arguments = {"cu_seqlens": cu_seqlens, "position_embeddings": rotary}
    with running_vision_once(model, layer):
        model.get_input_embeddings()(torch.zeros(1, 2, dtype=torch.long))
        layer(torch.zeros(4, 32), **arguments)
        with pytest.raises(UserError, match="Qwen3VL.*runs its vision tower several times"):
            layer(torch.zeros(4, 32), **arguments)
    layer(torch.zeros(4, 32), **arguments)


@pytest.mark.parametrize(
    "model_type",
    [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in ("smolvlm", "gemma4"))]
    + [
        pytest.param(name, marks=pytest.mark.long)
        for name in VISION_TYPES
        if name not in (*FAST, "smolvlm", "gemma4")
    ],
)
def test_operations_of_images(model_type: str, folders: Any) -> None:
    """Against PyTorch's count of the products that the class itself computes, with attention, for
    images of several sizes."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForImageTextToText

    from torchtitan.components.images.processor import ImageProcessor
    from torchtitan.components.images.reader import ImageReader
    from torchtitan.components.tokenizer import PretrainedTokenizer
    from torchtitan.models.transformers.images import feature_owner, train_parts

    folder = folders(model_type)
    processor = ImageProcessor.from_folder(folder, PretrainedTokenizer.Config().build(path=folder))
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    method = feature_owner(plain).get_image_features
    model = TransformersModel.Config.of(json.loads((folder / "config.json").read_text())).build()
    counts = []
    for sizes in ([(40, 56)], [(64, 48), (30, 70)], [(200, 90), (90, 200), (48, 48)]):
        opened = [Image.new("RGB", size, "white") for size in sizes]
        ids = list(itertools.chain(*processor.expansions(sizes)))
        given = ImageReader(processor).inputs([opened], torch.tensor([ids]))
        accepted = inspect.signature(method).parameters
        tensors = {name: value for name, value in given.tensors.items() if name in accepted}
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            method(**tensors, return_dict=True)
        counts.append(counter.get_total_flops())
        train_parts(model.model, ["language"])
        assert model.image_flops(given) == counts[-1]
        train_parts(model.model, ["vision", "projector"])
        assert model.image_flops(given) == 3 * counts[-1]
    assert len(set(counts)) > 1
    assert model.image_flops(replace(given, tensors={})) == 0
    train_parts(model.model, ["projector"])
    assert counts[-1] <= model.image_flops(given) < 3 * counts[-1]


def train_rank(folder: Path, model: Path, rows: Path, more: dict[str, Any]) -> None:
    train(folder, **options(model, rows, **more))


@pytest.fixture(scope="module")
def on_one_rank(folders: Any, data: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains parts of a type for three steps in this process, once; it
    returns the folder of the run, and the names of its units and of the layers of its tower."""

    @lru_cache
    def trained(model_type: str, *parts: str) -> tuple[Path, set[str], list[str]]:
        dump = tmp_path_factory.mktemp("one")
        chosen = {"training__steps": 3, "model__train": list(parts)}
        [model] = train(dump, **options(folders(model_type), data[0], **chosen)).model_parts
        return dump, set(model.units()), list(model.vision_layers())

    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "replicas", "parts"),
    [
        ("smolvlm", 1, ["language", "projector", "vision"]),
        ("smolvlm", 2, ["language", "projector", "vision"]),
        ("qwen3_vl", 1, ["language", "projector"]),
        ("llava", 1, ["language", "projector", "vision"]),  # its last layer gets no gradients
    ],
)
def test_ranks_may_have_different_numbers_of_images(
    model_type: str,
    replicas: int,
    parts: list[str],
    on_one_rank: Any,
    folders: Any,
    data: Any,
    tmp_path: Path,
) -> None:
    """Each of two ranks gets a row per pass; in one pass, a rank has no images, and runs the vision
    tower, whose layers are units, with a blank one."""
    rows, *_ = data
    one, units, vision_layers = on_one_rank(model_type, *parts)
    assert len(vision_layers) == 2
    assert set(vision_layers) <= units
    more = {
        "model__train": parts,
        "training__steps": 3,
        "training__local_batch_size": 1,
        "training__global_batch_size": 4,
        "parallelism__data_parallel_replicate_degree": replicas,
        "parallelism__data_parallel_shard_degree": 2 // replicas,
    }
    run_processes(train_rank, 2, tmp_path / "two", folders(model_type), rows, more)
    expected = read_metrics(one, "loss", "grad_norm")
    found = read_metrics(tmp_path / "two", "loss", "grad_norm")
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)


IN_TENSOR_PARALLEL = [
    ("smolvlm", 2),
    ("gemma3", 1),  # its tower uses the weights of an output layer without calling it
    ("qwen2_5_vl", 1),
]
"""Types whose class has a plan, and ranks that share the data."""


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "shards"), IN_TENSOR_PARALLEL)
def test_tensor_parallelism_changes_nothing(
    model_type: str, shards: int, on_one_rank: Any, folders: Any, data: Any, tmp_path: Path
) -> None:
    """Two ranks split the language model, and each computes the whole vision tower."""
    rows, *_ = data
    one, *_ = on_one_rank(model_type, "language", "projector", "vision")
    more = {
        "training__steps": 3,
        "parallelism__tensor_parallel_degree": 2,
        "parallelism__data_parallel_shard_degree": shards,
        "training__local_batch_size": 4 // shards,
    }
    run_processes(train_rank, 2 * shards, tmp_path / "split", folders(model_type), rows, more)
    expected = read_metrics(one, "loss", "grad_norm")
    found = read_metrics(tmp_path / "split", "loss", "grad_norm")
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-5)


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_vl",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (
                "smolvlm",
                "gemma3",
                "mllama",
                "granite4_vision",
                *LEADING_TYPES,
                *PLACING_TYPES,
            )
        ),
    ],
)
def test_answers_equal_those_of_transformers(
    model_type: str, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchtitan generate --image`, and the class's own generation."""
    from transformers import AutoModelForImageTextToText

    from torchtitan.cli.generate import generate

    folder = folders(model_type)
    _, _, images = write_rows(tmp_path)
    question = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is it?"}]
    conversation = [{"role": "user", "content": question}]
    inputs = reference_inputs(
        model_type, folder, [conversation], [images[1]], add_generation_prompt=True
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    expected = output[0, inputs["input_ids"].shape[1] :].tolist()
    paths = [word for index in range(2) for word in ("--image", str(tmp_path / f"1-{index}.png"))]
    words = ["--checkpoint", str(folder), *paths, "--prompt", "What is it?", "--json"]
    assert generate([*words, "--max_new_tokens", "8", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected


@pytest.mark.slow
def test_a_killed_run_continues_exactly(folders: Any, data: Any, tmp_path: Path) -> None:
    """With windows of one or two conversations."""
    rows, *_ = data
    more = {
        "dataloader__packing": "ffd",
        "training__seq_len": 200,
        "training__steps": 4,
        "training__local_batch_size": 2,
        "checkpoint__enable": True,
        "checkpoint__interval": 1,
        "validator__enable": True,
        "validator__freq": 2,
        "validator__steps": 1,
        "validator__dataset": str(rows),
    }
    chosen = options(folders("smolvlm"), rows, **more)
    train(tmp_path / "straight", **chosen)
    with killed_in(Trainer, "train_step", 3):
        train(tmp_path / "killed", **chosen)
    train(tmp_path / "killed", **chosen)
    expected = read_metrics(tmp_path / "straight", "loss", "grad_norm")
    assert read_metrics(tmp_path / "killed", "loss", "grad_norm") == expected
    assert read_validation(tmp_path / "killed") == read_validation(tmp_path / "straight")


@pytest.mark.slow
def test_text_trains_with_recomputed_blocks(folders: Any, tmp_path: Path) -> None:
    """The class's forward pass has no argument use_cache, and hands it to its decoder."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "What?", "completion": "Nothing."}) + "\n")
    chosen = options(folders("qwen3_vl"), rows, config="sft", model__train=ABSENT)
    train(tmp_path, **chosen, activation_checkpoint__mode="full")
    [(_, loss)] = read_metrics(tmp_path, "loss")
    assert loss > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "expected"),
    [(ABSENT, {"text_model"}), (["language", "vision"], {"text_model", "vision_model"})],
)
def test_adapters_are_in_the_blocks_of_trained_parts(
    parts: Any, expected: set[str], folders: Any, data: Any, tmp_path: Path
) -> None:
    rows, *_ = data
    more = {"config": "lora_images", "training__steps": 2}
    chosen = options(folders("smolvlm"), rows, **more) | {"model__train": parts}
    trained = {
        name
        for part in train(tmp_path, **chosen).model_parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    }
    assert {name.split(".")[2] for name in trained} == expected
    losses = [loss for _, loss in read_metrics(tmp_path, "loss")]
    assert losses[1] < losses[0]


def test_chat_keeps_images_until_reset(
    folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from torchtitan.cli.generate import chat

    _, _, images = write_rows(tmp_path)
    shown: list[int] = []
    monkeypatch.setattr(TransformersModel, "reading", recording(TransformersModel.reading, shown))
    lines = [
        f"/image {tmp_path / 'none.png'}",
        "/image",
        f"/image {tmp_path / '0-0.png'}",
        "What is it?",
        "And this?",
        "/reset",
        "Hello",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    words = ["--checkpoint", str(folders("qwen3_vl")), "--max_new_tokens", "2", "--device", "cpu"]
    assert chat([*words, "--module", "torchtitan.models.transformers"]) == 0
    printed = capsys.readouterr()
    assert "none.png does not exist" in printed.err
    assert "/image needs the path of an image" in printed.err
    assert len(printed.out.splitlines()) >= 3
    assert shown == [1, 1]


def recording(reading: Any, shown: list[int]) -> Any:
    def read(self: TransformersModel, images: Any) -> Any:
        shown.append(len(images.tensors["image_grid_thw"]))
        return reading(self, images)

    return read


@pytest.mark.parametrize("words", [["--no_cache"], ["--best_of", "2"], ["--reward_model", "x"]])
def test_options_that_exclude_images(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchtitan.cli.generate import generate

    (tmp_path / "config.json").write_text("{}")
    given = ["--checkpoint", str(tmp_path), "--image", "a.png", "--prompt", "What?", *words]
    assert generate(given) == 2
    assert f"{words[0]} cannot be combined with --image" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model_type", [pytest.param(x, marks=pytest.mark.slow) for x in ("gemma3", "qwen3_5", "gemma4")]
)
def test_a_family_gives_text_the_same_loss_as_the_class(
    model_type: str, folders: Any, tmp_path: Path
) -> None:
    """Of the same folder: the family's decoder, the class on text, and the class with images."""
    rows = tmp_path / "rows.jsonl"
    turns = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": "x " * n}]
        for n in range(1, 5)
    ]
    rows.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    found = {}
    for module, config in (("auto", "sft"), ("transformers", "sft"), ("auto", "sft_images")):
        more = {"module": module, "config": config, "model__train": ABSENT}
        trainer = train(
            tmp_path / f"{module}-{config}", **options(folders(model_type), rows, **more)
        )
        [(_, loss)] = read_metrics(tmp_path / f"{module}-{config}", "loss")
        found[module, config] = loss
        is_class = isinstance(trainer.model_parts[0], TransformersModel)
        assert is_class == (config == "sft_images" or module == "transformers")
    assert list(found.values()) == pytest.approx([found["auto", "sft"]] * 3, rel=1e-5)
