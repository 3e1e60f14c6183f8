"""The dry run of a model that reads images, against a pass of its class over the same images."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.models.test_caption_images import write_model
from tests.models.test_encoder_decoders import write_model as write_encoder_decoder
from tests.tiny_vision import vision_folder
from torchtitan.components.images.loader import ImageDataLoader
from torchtitan.components.images.processor import ImageProcessor
from torchtitan.components.images.rows_loader import white_images
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run.report import RankReport, reports_of
from torchtitan.models.transformers.images import feature_owner, parts_of
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.protocols.images import ImageInputs
from torchtitan.tools.torch_private import storage_key

SEQ_LEN = 256


def read(model: Any, images: ImageInputs) -> Tensor:
    """Return the features of images, by a class of transformers that makes equally many of each."""
    method = feature_owner(model).get_image_features
    accepted = inspect.signature(method).parameters
    inputs = {name: value for name, value in images.tensors.items() if name in accepted}
    return torch.stack(list(method(**inputs, return_dict=True).pooler_output))


def kept_bytes(model: Any, images: ImageInputs) -> int:
    """Return the bytes that the backward pass needs, without parameters."""
    parameters = {storage_key(one.untyped_storage()) for one in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage_key(storage)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = read(model, images)
    assert features.requires_grad
    return sum(n for key, n in kept.items() if key not in parameters)


def report(folder: Path, dump: Path, tensor_parallel: int = 1, **more: str) -> RankReport:
    options = {
        "module": "auto",
        "config": "sft_images",
        "hf_assets_path": folder,
        "dataloader.dataset": "none.jsonl",
        "training.seq_len": SEQ_LEN,
        "training.local_batch_size": 2,
        "training.global_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
        "parallelism.tensor_parallel_degree": tensor_parallel,
        "dump_folder": dump,
    }
    options |= {name.replace("__", "."): value for name, value in more.items()}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--model.train", "language", "projector", "vision"]
    found, *_ = reports_of(ConfigManager().parse_args(words).config, tensor_parallel)
    return found


@pytest.mark.slow
def test_images_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations and gradients equal the class's; memory may differ by results of the forward
    pass that no backward pass needs."""
    from transformers import AutoModelForImageTextToText

    folder = vision_folder("smolvlm", tmp_path / "model")
    whole = report(folder, tmp_path)
    monkeypatch.setattr(ImageDataLoader.Config, "blank_images", lambda *_: None)
    text = report(folder, tmp_path)
    tokenizer = PretrainedTokenizer.Config().build(path=str(folder))
    images = white_images(ImageProcessor.from_folder(folder, tokenizer), 2 * SEQ_LEN)
    assert images.n_images > 1 and 480 < images.token_types_BL.numel() <= 2 * SEQ_LEN
    classes = {
        name: AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=name).train()
        for name in ("eager", "sdpa")
    }
    counts = []
    with FlopCounterMode(display=False) as counter:
        features = read(classes["eager"], images)
        counts.append(counter.get_total_flops())
        features.sum().backward()
        counts.append(counter.get_total_flops())
    n_batches = 2
    assert whole.executed_flops - text.executed_flops == n_batches * counts[1]
    assert whole.model_flops - text.model_flops == n_batches * 3 * counts[0]
    parts = parts_of(classes["eager"])
    of_readers = sum(one.nbytes for one in (*parts["vision"], *parts["projector"]))
    assert whole.gradient_bytes - text.gradient_bytes == of_readers
    kept = kept_bytes(classes["sdpa"], images)
    assert whole.saved_bytes - text.saved_bytes == pytest.approx(kept, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["blip-2", "instructblip"])
def test_classes_that_need_an_image_are_counted(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their language model computes a step by itself, and layers with masks are recomputed."""
    from transformers import AutoModelForImageTextToText

    folder = write_model(model_type, tmp_path / model_type)
    recomputed = report(folder, tmp_path, activation_checkpoint__mode="full")
    whole = report(folder, tmp_path)
    monkeypatch.setattr(ImageDataLoader.Config, "blank_images", lambda *_: None)
    text = report(folder, tmp_path)
    tokenizer = PretrainedTokenizer.Config().build(path=str(folder))
    images = white_images(ImageProcessor.from_folder(folder, tokenizer), 2 * SEQ_LEN)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        read(model.train(), images).sum().backward()
    n_batches = 2
    expected = n_batches * counter.get_total_flops()
    assert whole.executed_flops - text.executed_flops == expected
    assert recomputed.executed_flops > whole.executed_flops
    assert recomputed.saved_bytes < whole.saved_bytes


@pytest.mark.slow
def test_images_of_an_encoder_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each 64 tokens, since it has no tokens of its own."""
    from transformers import AutoModelForImageTextToText

    folder = write_encoder_decoder("trocr", tmp_path / "trocr")
    whole = report(folder, tmp_path)
    monkeypatch.setattr(ImageDataLoader.Config, "blank_images", lambda *_: None)
    text = report(folder, tmp_path)
    tokenizer = PretrainedTokenizer.Config().build(path=str(folder))
    images = white_images(ImageProcessor.from_folder(folder, tokenizer), 2 * SEQ_LEN)
    assert images.n_images == 2 * SEQ_LEN // 64
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        states = model.train().encoder(**images.tensors).last_hidden_state
        model.enc_to_dec_proj(states).sum().backward()
    n_batches = 2
    assert whole.executed_flops - text.executed_flops == n_batches * counter.get_total_flops()


@pytest.mark.slow
def test_tensor_parallel_ranks_share_the_operations_of_images(tmp_path: Path) -> None:
    """As a run counts them: the same images once."""
    folder = vision_folder("smolvlm", tmp_path / "model")
    one, two = (report(folder, tmp_path, degree) for degree in (1, 2))
    assert two.model_flops == pytest.approx(one.model_flops / 2)


@pytest.mark.slow
def test_images_of_a_class_that_reads_values_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what the class computes before it reads."""
    folder, trace = vision_folder("smolvlm", tmp_path / "model"), TransformersModel.trace_images

    def fail(model: TransformersModel, images: ImageInputs) -> None:
        trace(model, images)
        raise RuntimeError("a value is read\nmore")

    monkeypatch.setattr(TransformersModel, "trace_images", fail)
    found = report(folder, tmp_path)
    assert "images are not counted: a value is read" in caplog.text
    monkeypatch.setattr(ImageDataLoader.Config, "blank_images", lambda *_: None)
    text = report(folder, tmp_path)
    assert found.executed_flops == text.executed_flops and found.saved_bytes == text.saved_bytes
