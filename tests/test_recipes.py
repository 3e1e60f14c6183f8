"""The recipes: files as the table says, of options that exist, for cards that hold them."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from tests.components.peft.test_kept_bits import load, write_mxfp4
from tests.recipes import FOLDER, FORMS, PAGE, configuration, files, least_gib, page, sampling_gib
from torchtitan.cli.main import main
from torchtitan.cli.recipes import METHODS, MODELS, RECIPES, cards_of, recipe_text
from torchtitan.components.peft import QLoRA
from torchtitan.dry_run.fitting import USABLE
from torchtitan.foresight.devices import DEVICES

SAMPLE = [
    *("gpt-oss-20b/lora", "llama-3.2-3b/full", "phi-4/qlora", "qwen3-4b/dpo", "qwen3-8b/grpo"),
]
"""One recipe of each method."""


def test_files_and_page_are_those_of_the_table():
    expected = files()
    assert {path: path.read_text() for path in FOLDER.glob("*/*.yaml")} == expected
    assert PAGE.read_text() == page()


def test_models_and_methods():
    assert len(MODELS) >= 12
    assert {method for model in MODELS.values() for method in model.cards} == set(METHODS)
    assert {cards_of(recipe)[1] for recipe in RECIPES} <= DEVICES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_recipes_are_configurations(name: str, tmp_path: Path):
    """Every option exists, the model is one of a family, and the run would be accepted."""
    for method in MODELS[name].cards:
        config = configuration(f"{name}/{method}", tmp_path)
        config.validate()
        assert config.model_spec.name == MODELS[name].family
        assert config.training.seq_len <= config.model_spec.model.max_seq_len
        has_adapters = [type(one)._owner.__name__ for one in config.model_converters]
        assert has_adapters == {"full": [], "qlora": ["QLoRA"]}.get(method, ["LoRA"])


@pytest.mark.parametrize("name", MODELS)
def test_answers_fit_into_windows(name: str):
    """Models that reason first get more tokens, and their files say how rows turn it off."""
    text = recipe_text(f"{name}/grpo", "recipe.yaml")
    document = yaml.safe_load(text)
    is_reasoning = name.startswith(("qwen3", "smollm3", "gpt-oss"))
    n_tokens = document["rollout"]["max_new_tokens"]
    assert n_tokens == (1536 if is_reasoning else 512) < document["training"]["seq_len"]
    assert ("chat_template_kwargs" in text) == is_reasoning


@pytest.mark.parametrize("name", MODELS)
def test_large_models_and_experts_take_smaller_steps(name: str, tmp_path: Path):
    model = configuration(f"{name}/full", tmp_path).model_spec.model
    with torch.device("meta"):
        n_parameters = sum(weight.numel() for weight in model.build().parameters())
    rate = yaml.safe_load(recipe_text(f"{name}/full", "recipe.yaml"))["optimizer"]["lr"]
    is_large = n_parameters > 11e9 or getattr(model, "moe", None) is not None
    assert rate == (1.0e-5 if is_large else 2.0e-5)


def check_memory(recipe: str, folder: Path) -> None:
    """A dry run cannot sample answers: an update of GRPO needs the memory of LoRA, and the answers
    before it have keys, values and logits besides the weights."""
    (name, method), (number, kind) = recipe.split("/"), cards_of(recipe)
    updates = f"{name}/lora" if method == "grpo" else recipe
    needed = least_gib(configuration(updates, folder), number)
    needed += sampling_gib(configuration(recipe, folder)) if method == "grpo" else 0.0
    most = USABLE * DEVICES[kind].memory_gib
    assert needed <= most, f"{recipe}: {needed:.1f} GiB of {most:.1f}"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SAMPLE)
def test_cards_hold_a_sample_of_recipes(recipe: str, tmp_path: Path):
    check_memory(recipe, tmp_path)


def test_published_bits_are_those_of_a_run(tmp_path: Path):
    """gpt-oss in MXFP4, in a small size."""
    _, converter, _ = load(write_mxfp4(tmp_path), QLoRA.Config(rank=4))
    assert isinstance(converter, QLoRA.Config) and sorted(converter.forms) == FORMS["gpt_oss"]


def test_memory_of_answers(tmp_path: Path):
    """32 answers of Qwen3 8B: keys and values of 36 layers with 8 heads of 128, in bfloat16, and
    logits of 151,936 tokens, in float32."""
    keys_and_values = 32 * 2048 * 36 * 2 * 8 * 128 * 2
    logits = 3 * 32 * 151_936 * 4
    found = sampling_gib(configuration("qwen3-8b/grpo", tmp_path))
    assert found == pytest.approx((keys_and_values + logits) / 2**30)


def test_too_small_a_card_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MODELS["qwen3-0.6b"].cards, "lora", "1 tiny")  # type: ignore[index]
    tiny = dataclasses.replace(DEVICES["rtx4090"], memory_gib=2.0)
    monkeypatch.setitem(DEVICES, "tiny", tiny)
    with pytest.raises(AssertionError, match=r"qwen3-0.6b/lora: .* GiB of 1\.9"):
        check_memory("qwen3-0.6b/lora", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [one for one in RECIPES if one not in SAMPLE])
def test_cards_hold_recipes(recipe: str, tmp_path: Path):
    check_memory(recipe, tmp_path)


@pytest.mark.usefixtures("empty_folder")
def test_new_writes_a_recipe(capsys: pytest.CaptureFixture[str]):
    assert main(["new", "--recipe", "qwen3-8b/lora", "runs/mine.yaml"]) == 0
    text = Path("runs/mine.yaml").read_text()
    assert "torchtitan train --config_file runs/mine.yaml" in text
    assert yaml.safe_load(text) == yaml.safe_load((FOLDER / "qwen3-8b/lora.yaml").read_text())
    assert main(["new", "--recipe", "qwen3-8b/lora", "runs/mine.yaml"]) == 2
    assert main(["new", "--recipe", "qwen3-8b/loraa", "other.yaml"]) == 2
    messages = capsys.readouterr().err
    assert "'runs/mine.yaml' already exists" in messages
    assert "unknown recipe 'qwen3-8b/loraa'; did you mean 'qwen3-8b/lora'?" in messages
    assert main(["new", "--recipe", "Qwen3-8B/LoRA", "runs/my own.yaml"]) == 0
    text = Path("runs/my own.yaml").read_text()
    assert "--config_file 'runs/my own.yaml'\n" in text
    assert main(["new", "--recipe", "qwen3-8b", "other.yaml"]) == 2
    assert main(["new", "--recipe", "qwen3-8b/lora", "a\nhf_assets_path: other"]) == 2
    messages = capsys.readouterr().err
    assert "needs a method: qwen3-8b/METHOD, one of full, lora, qlora, dpo, grpo" in messages
    assert "characters that cannot be printed" in messages
    assert main(["new", "--recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == RECIPES
