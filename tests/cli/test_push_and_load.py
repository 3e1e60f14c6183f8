"""Models that read or generate images, pushed by `torchtitan push` and loaded from the hub by the
libraries that their cards name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.experiments.test_flow_matching import EXPORTED, images  # noqa: F401
from tests.experiments.test_flow_matching import train as train_flow
from tests.model_hub import model_hub
from tests.models.test_images import options, write_rows
from tests.tiny_vision import reference_inputs, vision_folder
from tests.training import train
from torchtitan.cli.main import main

LAST_IN_HF = {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True}


def write_config(run: Path, module: str, config: str, **options: object) -> None:
    """Write config.yaml, as the command line does."""
    (run / "config.yaml").write_text(
        yaml.safe_dump({"module": module, "config": config, **options})
    )


def pushed(hub: dict[str, dict[str, bytes]], folder: Path) -> tuple[dict[str, Any], str]:
    """Push a run, and return the header and the text of its card."""
    assert main(["push", str(folder), "me/tiny"]) == 0
    _, header, text = hub["me/tiny"]["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(header), text


def assert_equal(loaded: torch.nn.Module, local: torch.nn.Module) -> None:
    weights = dict(local.state_dict())
    assert weights
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, weights.pop(name)), name
    assert not weights


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "smolvlm"])
def test_a_model_that_reads_images(model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    source = vision_folder(model_type, tmp_path / "model")
    rows, conversations, opened = write_rows(tmp_path / "rows")
    train(tmp_path / "run", **options(source, rows, **LAST_IN_HF))
    write_config(tmp_path / "run", "auto", "sft_images", model={"train": ["language"]})
    kind = transformers.AutoModelForImageTextToText
    cache = {"cache_dir": tmp_path / "cache"}
    with model_hub() as hub:
        header, text = pushed(hub, tmp_path / "run")
        loaded = kind.from_pretrained("me/tiny", **cache)
    arrived = tmp_path / "arrived"
    for name, content in hub["me/tiny"].items():
        (arrived / name).parent.mkdir(exist_ok=True, parents=True)
        (arrived / name).write_bytes(content)
    step = tmp_path / "run/checkpoint/step-1"
    assert_equal(loaded, kind.from_pretrained(step))
    inputs = reference_inputs(model_type, arrived, conversations[:1], opened[:1])
    with torch.no_grad():
        logits = [model.eval()(**inputs).logits for model in (loaded, kind.from_pretrained(step))]
    assert torch.equal(*logits)
    assert (header["library_name"], header["pipeline_tag"]) == (
        "transformers",
        "image-text-to-text",
    )
    for row in (
        "| configuration | sft_images |",
        "| model.train |",
        "| step of these weights | 1 |",
    ):
        assert row in text
    assert str(tmp_path / "model") not in text


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_generates_images(images, adapted, tmp_path):  # noqa: F811
    """And its adapters, which PEFT loads on it."""
    diffusers = pytest.importorskip("diffusers")
    run, kind = tmp_path / "run", diffusers.DiTTransformer2DModel
    cache = {"cache_dir": tmp_path / "cache"}
    train_flow(images, run, **EXPORTED)
    if adapted:
        base = run / "checkpoint/step-4"
        run = tmp_path / "adapted"
        more = {"checkpoint__initial_load_path": base}
        train_flow(images, run, "dit_lora", **EXPORTED, **more)
    name = "dit_lora" if adapted else "dit_debugmodel"
    write_config(run, "flow_matching", name)
    with model_hub() as hub:
        header, text = pushed(hub, run)
        loaded = kind.from_pretrained("me/tiny", **cache)
        if adapted:
            peft = pytest.importorskip("peft")
            onto = kind.from_pretrained(base)
            adapter = peft.PeftModel.from_pretrained(onto, "me/tiny", subfolder="adapter", **cache)
    assert_equal(loaded, kind.from_pretrained(run / "checkpoint/step-4"))
    if adapted:
        merged = adapter.merge_and_unload().state_dict()
        for key, value in loaded.state_dict().items():
            assert torch.allclose(value, merged[key], atol=1e-6), key  # rounding of the product
    assert header["library_name"] == "diffusers" and "pipeline_tag" not in header
    assert f"| configuration | {name} |" in text and "| step of these weights | 4 |" in text
