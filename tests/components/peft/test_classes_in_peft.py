"""LoRA on every class of transformers: it trains a step, and peft opens the adapter with the same
logits, or a line says why not."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

import torchtitan.models.transformers as any_class  # noqa: E402
from tests.components.peft.test_adapter_files import adapted, open_adapter, write  # noqa: E402
from tests.models.transformers.model_types import CAUSAL, IMAGE_TEXT, decoder_config  # noqa: E402
from tests.transformers_matrix.trial import quiet, without_dropout  # noqa: E402
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss  # noqa: E402
from torchtitan.components.peft import LoRA, QLoRA  # noqa: E402
from torchtitan.distributed import initialize_weights  # noqa: E402
from torchtitan.models.pretrained import huggingface_model  # noqa: E402
from torchtitan.models.transformers.description import build_class  # noqa: E402
from torchtitan.models.transformers.model import TransformersModel  # noqa: E402
from torchtitan.models.transformers.tiny import TEXT_IDS, text_inputs, tiny_config  # noqa: E402
from torchtitan.models.transformers.weights import class_names  # noqa: E402
from torchtitan.protocols import ModelSpec  # noqa: E402
from torchtitan.protocols.conversion import converted_model  # noqa: E402
from torchtitan.tools.errors import UserError  # noqa: E402

TYPES = sorted({*CAUSAL, *IMAGE_TEXT})

TOLERANCE = 1e-4
"""Relative to the largest logit: some classes magnify the rounding of float32 tenfold."""

KINDS: dict[str, dict[str, Any]] = {"LoRA": {}, "DoRA": {"dora": True}}

# Layers whose parent initializes them; dense and shared layers named like experts; both.
FAST = ["nemotron_h", "glm4_moe_lite"]

EXCLUDED = ["out_proj", "router", "shared_expert_gate", r"gate\.wg", "o_a_proj", "weight_proj"]
"""Layers that are refused by name, of some classes."""


def spec_of(model_type: str, folder: Path) -> ModelSpec:
    """Return a tiny model. Raise an exception if the class cannot be built, or predicts no text."""
    document = json.loads(tiny_config(decoder_config(model_type)).to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps(without_dropout(document)))
    spec, _ = huggingface_model(folder, any_class)
    with torch.device("meta"):
        spec.model.build()
    return spec


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Return initial values with noise, since some weights start at zero and hide others."""
    model = spec.model.build()
    initialize_weights(model, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.state_dict()


def train_step(model: nn.Module, tokens_BL: Tensor) -> None:
    labels_BL = F.pad(tokens_BL[:, 1:], (0, 1), value=IGNORE_INDEX)
    model(tokens_BL, head=CrossEntropyLoss.Config().build(), labels_BL=labels_BL).backward()
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert trained
    torch.optim.SGD(trained, lr=1e-3).step()


@torch.no_grad()
def difference_in_peft(
    model: nn.Module, spec: ModelSpec, plain: dict[str, Tensor], tokens: Tensor, folder: Path
) -> Any:
    """Return the largest difference of peft's logits from ours, and from those without the adapter,
    relative to the largest, and peft's warnings."""
    assert isinstance(spec.model, TransformersModel.Config)
    reference = build_class(spec.model.transformers_config())
    with torch.device("meta"):
        names = class_names(spec.model.build())
    reference.load_state_dict({names[name]: tensor for name, tensor in plain.items()}, strict=False)
    reference.save_pretrained(folder / "base")
    config = transformers.AutoConfig.from_pretrained(folder / "base")
    base = (
        type(reference).from_pretrained(folder / "base", config=config, dtype=torch.float32).eval()
    )
    inputs = text_inputs(base, tokens)
    before = base(**inputs).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = open_adapter(base, folder / "adapter").eval()
    expected = theirs(**inputs).logits
    # chameleon forbids tokens of images by the smallest number.
    is_possible = expected > torch.finfo(torch.float32).min
    others = [logits[is_possible] for logits in (model.eval()(tokens), before)]
    expected = expected[is_possible]
    difference, effect = (
        ((other - expected).abs().max() / expected.abs().max()).item() for other in others
    )
    return (
        difference,
        effect,
        [str(w.message) for w in caught if "is_gradient_checkpointing" not in str(w.message)],
    )


def try_class(model_type: str, folder: Path, **options: Any) -> str:
    """Train and compare a class; return the refusal, if any."""
    spec = spec_of(model_type, folder)
    config = LoRA.Config(rank=2, alpha=3.0, **options)
    plain = random_weights(spec)
    try:
        model = adapted(spec, config, plain, seed=1)
    except UserError as error:
        return str(error)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (2, 24), generator=generator)
    train_step(model, tokens)
    try:
        write(folder / "adapter", config, model, spec)
    except UserError as error:
        return str(error)
    difference, effect, messages = difference_in_peft(model, spec, plain, tokens, folder)
    assert not messages
    assert difference < TOLERANCE < effect
    return ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAST)
def test_kinds_of_classes(model_type: str, kind: str, tmp_path: Path) -> None:
    exclude = ["out_proj"] if model_type == "nemotron_h" else []
    with quiet():
        refusal = try_class(model_type, tmp_path, exclude=exclude, **KINDS[kind])
    if kind == "DoRA" and model_type == "glm4_moe_lite":
        assert (
            "no DoRA of layers that it adapts as parameters: model.layers.0.mlp.down_proj"
            in refusal
        )
    else:
        assert refusal == ""


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("nemotron_h", r"PEFT does not open adapters of model\.layers\.\d\.mixer\.out_proj"),
        (
            "deepseek_ocr2",
            r"PEFT does not open adapters of model\.language_model\.layers\.0\.mlp\.down_proj",
        ),
        (
            "falcon",
            "query_key_value cannot be converted: it is a FalconLinear, which computes otherwise "
            "than Linear",
        ),
    ],
)
def test_refusals_name_layers(model_type: str, message: str, tmp_path: Path) -> None:
    with quiet(), pytest.raises(UserError, match=message):
        raise UserError(try_class(model_type, tmp_path))


def test_weights_that_parents_initialize_are_quantized(tmp_path: Path) -> None:
    """QLoRA's frozen weights, and DoRA's magnitudes, are those of the plain model's initial
    values."""
    with quiet():
        spec = spec_of("nemotron_h", tmp_path)
        plain = spec.model.build()
        initialize_weights(plain, seed=7)
        include = [r"mixer\.in_proj$", r"mixer\.q_proj$"]
        model = converted_model(
            spec.model, [QLoRA.Config(rank=2, dora=True, include=include).build()]
        )
        initialize_weights(model.to_empty(device="cpu"), seed=7)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "packed")}
    assert any("in_proj" in name for name in layers)
    for name, layer in layers.items():
        weight = plain.get_parameter(f"{name}.weight")
        # A value of NF4 is at most 15 % of its block's largest from the weight.
        torch.testing.assert_close(
            layer.base_weight(), weight, rtol=0, atol=0.16 * weight.abs().max().item()
        )
        torch.testing.assert_close(
            layer.magnitude, layer.base_weight().norm(dim=1), rtol=1e-5, atol=0
        )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", TYPES)
def test_all_classes(model_type: str, kind: str, tmp_path: Path) -> None:
    """A refusal names a layer to exclude; without such layers, the class is not refused."""
    with quiet():
        try:
            spec_of(model_type, tmp_path)
        except Exception:
            pytest.skip("the class cannot be built, or predicts no text")
        refusal = try_class(model_type, tmp_path, **KINDS[kind])
        assert "\n" not in refusal
        if "exclude" in refusal:
            others = f"^(?!.*({'|'.join(EXCLUDED)})).*layers?\\.\\d+\\."
            refusal = try_class(model_type, tmp_path, **{**KINDS[kind], "include": [others]})
    if refusal:
        pytest.skip(refusal)
