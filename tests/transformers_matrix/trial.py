"""Trial of one type of transformers: a tiny random model, through the same functions as a published
one."""

import contextlib
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import torchtitan.models.transformers as any_class
from tests.models.transformers.model_types import decoder_config
from torchtitan.components.checkpoint.dcp import DcpSource, write_dcp
from torchtitan.components.losses.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.weights import export_checkpoint, load_weights
from torchtitan.distributed import initialize_weights
from torchtitan.models.pretrained import huggingface_model
from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.tiny import TEXT_IDS, tiny_config
from torchtitan.models.transformers.weights import class_names
from torchtitan.protocols.tensor_source import TensorSpec
from torchtitan.tools.errors import UserError, summarize_names

TOLERANCE = 1e-5
"""Largest difference in float32, relative to the largest element. Where rounding errors of float32
add up to more, both are compared in float64."""

_ZERO = 1e-3
"""Gradients below this fraction of the largest gradient of the model are compared with this
fraction, since some, such as of key biases, are zero up to rounding."""

_NOISE = 0.02
"""Added to all weights, so that those that start at zero, such as biases, change the result too."""


@dataclass(frozen=True)
class Row:
    """Result of one type."""

    model_type: str
    outcome: str
    """equal; refused; different; or the step that raised an exception."""
    details: str = ""
    """Message of the refusal or the exception, or what differs."""
    class_name: str = ""
    packing: str = ""
    layouts: str = ""
    """Layouts, besides data parallelism, that hold by the class's plan and trials of its clone."""
    head: str = ""
    seconds: float = 0.0


class Different(Exception):
    """A result that differs from the class's."""


def run_trial(model_type: str) -> Row:
    """Run the trial of a type; errors are recorded in the row."""
    start, facts, step = time.monotonic(), dict[str, str](), "not built"
    outcome, details = "equal", ""
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            for step in _steps(model_type, Path(folder), facts):  # noqa: B007
                pass
        except UserError as error:
            outcome, details = "refused", str(error).removeprefix("config.json: ")
        except Different as error:
            outcome, details = "different", str(error)
        except Exception as error:  # one type must not stop the others
            outcome, details = step, f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Row(model_type, outcome, details, seconds=time.monotonic() - start, **facts)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        transformers.logging.set_verbosity(level)


def _steps(model_type: str, folder: Path, facts: dict[str, str]) -> Iterator[str]:
    """Do one step after another; before each, yield the text to report if it fails. Fill `facts`
    for a row."""
    config = tiny_config(decoder_config(model_type))
    document = without_dropout(json.loads(config.to_json_string(use_diff=False)))
    (folder / "config.json").write_text(json.dumps(document))
    spec, _ = huggingface_model(folder, any_class)
    assert isinstance(spec.model, TransformersModel.Config)
    with torch.device("meta"):
        facts["class_name"] = type(build_class(spec.model.transformers_config())).__name__
        model = spec.model.build().train()
    facts["packing"] = model.packing.mode if model.packing.is_exact else f"{model.packing.mode}?"
    facts["layouts"] = ", ".join(_layouts(spec.model))
    facts["head"] = "ours" if model.captured else "own"

    yield "not initialized"
    initialize_weights(model.to_empty(device="cpu"), seed=0)
    _find(
        _tensors(model),
        lambda _, tensor: bool(tensor.isfinite().all()),
        "initial values are not finite",
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_NOISE)

    yield "not trained"
    tokens_BL = torch.randint(TEXT_IDS.start, TEXT_IDS.stop, (2, 24), generator=generator)
    logits_BLV = _our_results(model, tokens_BL)["logits"]

    yield "not resumed"
    checkpoint, exported = folder / "checkpoint", folder / "exported"
    checkpoint.mkdir()
    state = model.state_dict()
    write_dcp(
        checkpoint,
        {name: TensorSpec.of(tensor) for name, tensor in state.items()},
        state.__getitem__,
    )
    saved = DcpSource(checkpoint)
    with torch.device("meta"):
        resumed = spec.model.build()
    initialize_weights(resumed.to_empty(device="cpu"), seed=1, loaded=saved.specs)
    load_weights(saved, [resumed])
    before = _tensors(model)
    _find(
        _tensors(resumed),
        lambda name, tensor: torch.equal(tensor, before[name]),
        "other values when resumed",
    )
    with torch.no_grad():
        if not torch.equal(resumed(tokens_BL), logits_BLV):
            raise Different("other logits when resumed")

    yield "not exported"
    exported.mkdir()
    export_checkpoint(exported, "hf", spec, saved, None)

    yield "not reopened"
    reference, report = getattr(transformers, facts["class_name"]).from_pretrained(
        exported,
        config=transformers.AutoConfig.from_pretrained(exported),
        dtype=torch.float32,
        output_loading_info=True,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise Different(
                f"export has {problem.replace('_', ' ')}: "
                f"{', '.join(map(str, sorted(report[problem])))}"
            )

    yield "not compared"
    _compare(model, reference.train(), tokens_BL)
    yield ""


def _layouts(config: TransformersModel.Config) -> Iterator[str]:
    """Yield the layouts besides data parallelism in which a model trains."""
    unsupported = config.unsupported_parallelisms()
    for name, short in {"tensor": "TP", "context": "CP", "expert": "EP"}.items():
        if f"{name}_parallel_degree" not in unsupported:
            yield short
    with contextlib.suppress(UserError):
        config.pipeline_modules()
        yield "PP"


def without_dropout(values: Any) -> Any:
    """Return a document of a model without random numbers in training."""
    if isinstance(values, list):
        return [without_dropout(value) for value in values]
    if not isinstance(values, dict):
        return values
    is_rate = {
        key
        for key, value in values.items()
        if ("drop" in key or "jitter" in key) and type(value) is float
    }
    return {key: 0.0 if key in is_rate else without_dropout(value) for key, value in values.items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _find(
    tensors: Mapping[str, Tensor], is_right: Callable[[str, Tensor], bool], problem: str
) -> None:
    """Raise `Different` with the names of the tensors that are not right."""
    if names := [name for name, tensor in tensors.items() if not is_right(name, tensor)]:
        raise Different(f"{problem}: {summarize_names(names)}")


def _compare(model: TransformersModel, reference: Any, tokens_BL: Tensor) -> None:
    """Compare the loss, logits and gradients of a model, which has gradients, with the class's."""
    names = class_names(model)
    ours = {names[name]: parameter for name, parameter in model.named_parameters()}
    for dtype in (torch.float32, torch.float64):
        results, expected = (
            _our_results(model.to(dtype), tokens_BL),
            _class_results(reference.to(dtype), tokens_BL),
        )
        theirs = dict(reference.named_parameters(remove_duplicate=False))
        frozen = {
            name: parameter for name, parameter in ours.items() if not parameter.requires_grad
        }
        needed = {name for name, parameter in theirs.items() if _gradient(parameter).any()}
        _find(frozen, lambda name, _: name not in needed, "frozen, but text needs it")  # noqa: B023
        for name in ours.keys() - frozen.keys():
            results[f"gradient of {name}"] = _gradient(ours[name])
            expected[f"gradient of {name}"] = _gradient(theirs[name])
        differences = _differences(results, expected)
        worst = max(
            differences, key=lambda name: (math.isnan(differences[name]), differences[name])
        )
        if differences[worst] <= TOLERANCE:
            return
    raise Different(f"{worst} by {differences[worst]:.1e} in float64")


def _our_results(model: TransformersModel, tokens_BL: Tensor) -> dict[str, Tensor]:
    """Return our logits and loss, and leave the gradients in the parameters."""
    model.zero_grad()
    labels_BL = F.pad(tokens_BL[:, 1:], (0, 1), value=IGNORE_INDEX)
    loss = model(tokens_BL, head=CrossEntropyLoss.Config().build(), labels_BL=labels_BL)
    loss = loss / (labels_BL != IGNORE_INDEX).sum()
    loss.backward()
    with torch.no_grad():
        return {"logits": model(tokens_BL), "loss": loss.detach()}


def _class_results(reference: Any, tokens_BL: Tensor) -> dict[str, Tensor]:
    """Return the class's logits and loss, and leave the gradients in the parameters."""
    reference.zero_grad()
    types = {}
    if reference.config.model_type == "molmo2":
        types = {"mm_token_type_ids": torch.zeros_like(tokens_BL)}
    if reference.config.model_type == "kosmos-2":  # features of no image
        features = torch.zeros(0, 1, reference.config.text_config.embed_dim)
        places = torch.zeros_like(tokens_BL)
        types = {"image_embeds": features, "image_embeds_position_mask": places}
    if reference.config.model_type == "idefics":
        reference.requires_grad_(True)  # the class freezes its text layers by default
        features = torch.zeros(len(tokens_BL), 1, 1, reference.config.vision_config.embed_dim)
        mask = torch.zeros_like(tokens_BL)[..., None]
        types = {"image_encoder_embeddings": features, "image_attention_mask": mask}
    outputs = reference(input_ids=tokens_BL, use_cache=False, **types)
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten())
    # some classes compute no loss, or not the loss of the next tokens
    with contextlib.suppress(Exception):
        own = reference(input_ids=tokens_BL, labels=tokens_BL, use_cache=False)
        if getattr(own, "aux_loss", None) is not None or abs(own.loss - loss) < TOLERANCE:
            loss = own.loss
    loss.backward()
    return {"logits": outputs.logits.detach(), "loss": loss.detach()}


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _differences(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each result, relative to the largest element."""
    largest = {name: tensor.abs().max().item() for name, tensor in expected.items()}
    least = _ZERO * max(value for name, value in largest.items() if name.startswith("gradient"))
    return {
        name: (results[name] - tensor).abs().max().item() / max(largest[name], least)
        for name, tensor in expected.items()
    }
