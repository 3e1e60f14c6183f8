"""Export of quantized weights as a Hugging Face folder, which transformers loads with torchao.

Each quantized matrix is three tensors: 4-bit values, one per byte (torchao's only layout of this
scheme for safetensors), the scales of its groups, and their zero points, all 0. The metadata of the
files link these tensors, and `quantization_config` in config.json lists the layers that are not
quantized.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from torchtitan.components.quantization.qat import QAT, inference_config
from torchtitan.components.weights.assets import files_in
from torchtitan.components.weights.export import (
    config_json,
    format_for,
    prevailing_dtype,
    write_hf_description,
)
from torchtitan.components.weights.huggingface import (
    MAX_FILE_BYTES,
    assign_to_files,
    write_file,
    write_index,
)
from torchtitan.components.weights.views import ExternalView
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.tensor_source import MakeTensor, TensorSource, TensorSpec, as_type
from torchtitan.tools.torchao import import_torchao


def export_quantized(
    folder: Path,
    spec: ModelSpec,
    source: TensorSource,
    assets: Path | None,
    *,
    quantization: QAT.Config,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    advance: Callable[[int], None] = lambda n_bytes: None,
) -> None:
    """Write a model into `folder` for inference, quantized as simulated by `QAT`. Other parameters
    are as in `export_checkpoint`.

    Args:
        quantization: layers and granularity.
        dtype: dtype of the scales, the unquantized weights and the computation; None: the weights'
            dtype.
        max_file_bytes: maximum size of a weights file; each file is built in memory.

    Raises:
        UserError: if torchao is missing, the layers cannot be quantized this way, or a value
            overflows in `dtype`.
        OSError: if a file cannot be written.
    """
    adapter = format_for(spec, "hf").adapter(spec.model)
    view = ExternalView(source, adapter)
    specs = {
        name: TensorSpec(tensor_spec.shape, dtype or tensor_spec.dtype)
        for name, tensor_spec in view.specs.items()
    }
    quantized = _weights_to_quantize(spec, adapter, quantization)

    def maybe_quantize(name: str, tensor: Tensor) -> Tensor:
        return _quantize(tensor, quantization.group_size) if name in quantized else tensor

    def make(name: str) -> Tensor:
        tensor = as_type(name, view.read(name), specs[name].dtype)
        advance(view.specs[name].n_bytes)
        return maybe_quantize(name, tensor)

    # The format of transformers' `TorchAoConfig`.
    config_to_dict = import_torchao("torchao.core.config").config_to_dict
    plain = [name for name in (*specs, *adapter.tied) if name not in quantized]
    entry = {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(inference_config(quantization.group_size))},
        "modules_to_not_convert": [name.removesuffix(".weight") for name in plain],
    }
    dtype = prevailing_dtype(specs)
    write_hf_description(
        folder,
        files_in(assets),
        assets,
        lambda ids: {**config_json(spec, ids, dtype), "quantization_config": entry},
    )
    meta_tensors = {name: maybe_quantize(name, f.on_meta()) for name, f in specs.items()}
    _write_weights(folder, meta_tensors, make, max_file_bytes)


def _weights_to_quantize(
    spec: ModelSpec, adapter: StateDictAdapter, quantization: QAT.Config
) -> set[str]:
    """Return the Hugging Face tensor names that consist of the selected layers' weights."""
    with torch.device("meta"):
        layers = quantization.build().select(spec.model.build())
    weights = {f"{name}.weight" for name in layers}
    steps = [step for step in adapter.steps if weights.issuperset(step.internal)]
    return {name for step in steps for name in step.external}


def _quantize(matrix: Tensor, group_size: int) -> Tensor:
    n_outputs, n_inputs = matrix.shape
    layer = nn.Linear(n_inputs, n_outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(matrix, requires_grad=False)
    import_torchao("torchao.quantization").quantize_(layer, inference_config(group_size))
    return layer.weight.detach()


def _write_weights(
    folder: Path, meta_tensors: Mapping[str, Tensor], make: MakeTensor, max_file_bytes: int
) -> None:
    """Write the weights from `make`, with metadata from `meta_tensors`, and an index if there is
    more than one file."""
    flatten_tensor_state_dict = import_torchao(
        "torchao.prototype.safetensors.safetensors_support"
    ).flatten_tensor_state_dict
    # every file has the metadata of all weights
    _, metadata = flatten_tensor_state_dict(meta_tensors)
    parts = {
        name: _specs(flatten_tensor_state_dict({name: tensor})[0])
        for name, tensor in meta_tensors.items()
    }
    n_bytes = {
        name: sum(tensor_spec.n_bytes for tensor_spec in specs.values())
        for name, specs in parts.items()
    }
    written: dict[str, dict[str, TensorSpec]] = {}
    for file, names in assign_to_files(n_bytes, max_file_bytes).items():
        tensors, _ = flatten_tensor_state_dict({name: make(name) for name in names})
        written[file] = _specs(tensors)
        write_file(folder / file, written[file], tensors.__getitem__, metadata)
    write_index(folder, written)


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
