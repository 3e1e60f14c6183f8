"""Export to GGUF, the format of llama.cpp: weights, metadata, tokenizer and chat template in one
file (github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from torchtitan.components.chat_template.template import load_chat_template
from torchtitan.components.tokenizer import PretrainedTokenizer, tokenizer_file
from torchtitan.components.tokenizer.gguf_vocabulary import gguf_vocabulary
from torchtitan.components.weights.assets import token_ids
from torchtitan.components.weights.export import format_for
from torchtitan.components.weights.views import ExternalView
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.tensor_source import TensorSource, TensorSpec, as_type
from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import logger

if TYPE_CHECKING:
    import numpy
    from gguf import GGUFWriter

FILE = "model.gguf"

Kind = Literal["F32", "F16", "BF16", "Q8_0"]
"""Type of a tensor's numbers, as the format names it. Q8_0: 32 neighbors in a row are bytes times a
scale in float16, 8.5 bits each."""

_KINDS: dict[torch.dtype, Kind] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
_BLOCK = 32
_QUANTIZED_ROWS = 4096

_REPLACED = {
    "153280e3ff55d19da1398bdb3914ee2a51b80429bfaedde11d7d216c39db80f3",  # ChatML
    "7e995b379ec01747807246483647cd99030abf331653f1119e16d7ac041a3495",  # Mistral 7B Instruct
    "26a59556925c987317ce5291811ba3b7f32ec4c647c400c6cc7e3a9993007ba7",  # Mixtral 8x7B Instruct
    "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122",  # Llama 3 Instruct
}
"""SHA-256 of the templates that llama-cpp-python 0.3.36 replaces
(findings/llama_cpp_python_replaces_templates.sh). Each begins with a brace, so that a comment
before it changes nothing."""

_UNQUANTIZED = (
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "shortconv.conv.weight"),
    *("ssm_conv1d.weight", *(f"ssm_conv1d_{name}.weight" for name in "qkv")),
    *("ssm_a", "ssm_d", "ssm_norm.weight"),
)
"""Ends of names of matrices that stay in float32: llama.cpp also chooses experts in float32, and
has convolutions, and vectors of recurrences that are stored as matrices, in no other type."""


def export_gguf(
    folder: Path,
    spec: ModelSpec,
    source: TensorSource,
    assets: Path | None,
    *,
    dtype: torch.dtype | None = None,
    quantize: bool = False,
    advance: Callable[[int], None] = lambda n_bytes: None,
) -> None:
    """Write a model into `folder/model.gguf`, one tensor at a time. Parameters are as in
    `export_checkpoint`; vectors and routers are float32.

    Args:
        dtype: type of the matrices; None: as in `source`.
        quantize: write matrices in Q8_0 instead, unless their rows are not multiples of 32.

    Raises:
        UserError: if the package gguf is missing, llama.cpp does not compute the model or split
            text like its tokenizer, or a value overflows.
        OSError: if the file cannot be written.
    """
    gguf = _import_gguf()
    format = format_for(spec, "gguf")
    metadata = format.to_external(spec.model)
    view = ExternalView(source, format.adapter(spec.model))
    kinds = {name: _kind(name, given, dtype, quantize) for name, given in view.specs.items()}
    writer = gguf.GGUFWriter(folder / FILE, metadata["general.architecture"])
    writer.add_type("model")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    matrices = [kind for name, kind in kinds.items() if len(view.specs[name].shape) > 1]
    prevailing = "Q8_0" if quantize else max(set(matrices), key=matrices.count)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[prevailing]])
    for key, value in _all_metadata(metadata, spec, assets).items():
        _add(gguf, writer, key, value)
    for name, kind in kinds.items():
        _declare(gguf, writer, name, view.specs[name], kind)
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, kind in kinds.items():
            writer.write_tensor_data(_checked(_encoded(gguf, name, view.read(name), kind)))
            advance(view.specs[name].n_bytes)


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UserError(
            "--to gguf needs the package gguf: pip install 'torchtitan[gguf]'"
        ) from error
    return gguf


def _kind(name: str, given: TensorSpec, dtype: torch.dtype | None, quantize: bool) -> Kind:
    if len(given.shape) < 2 or name.endswith((*_UNQUANTIZED, ".bias")):
        return "F32"
    if quantize:
        if given.shape[-1] % _BLOCK == 0:
            return "Q8_0"
        logger.warning("%s is in F16, since its rows are not multiples of %d", name, _BLOCK)
        return "F16"
    return _KINDS[dtype or given.dtype]


def _all_metadata(
    metadata: Mapping[str, object], spec: ModelSpec, assets: Path | None
) -> dict[str, object]:
    architecture = metadata["general.architecture"]
    keys = {
        f"{architecture}.{key}": value
        for key, value in metadata.items()
        if key != "general.architecture"
    }
    if assets is None or tokenizer_file(assets) is None:
        raise UserError(
            "GGUF needs the model's tokenizer, which is missing; copy its files (tokenizer.json, "
            "tokenizer_config.json) into the folder of the model"
        )
    return keys | _tokenizer_metadata(assets, spec.model.vocab_size or 0)


def _tokenizer_metadata(assets: Path, n_rows: int) -> dict[str, object]:
    tokenizer: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=assets)
    keys = gguf_vocabulary(tokenizer, n_rows)
    ids = token_ids(assets, assets / "config.json")
    stops = ids.get("eos_token_id", [])
    others = [
        stop for stop in (stops if isinstance(stops, list) else [stops]) if stop != tokenizer.eos_id
    ]
    places = dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))
    places["padding_token_id"] = ids.get("pad_token_id")
    if tokenizer.bos_id is None:
        # llama.cpp has a default for a missing one. Nothing writes this: `add_bos_token` is off.
        named = ids.get("bos_token_id")
        bos = named if named in range(n_rows) else tokenizer.eos_id
        places["bos_token_id"] = bos
        logger.info("GGUF: the tokenizer has no BOS; the file names the token %s for it", bos)
    for key, index in places.items():
        if type(index) is int and index in range(n_rows):
            keys[f"tokenizer.ggml.{key}"] = index
        elif index is not None:
            logger.warning("GGUF has no %s: the model has no token %s", key, index)
    if len(others) > 2:
        logger.warning("GGUF has places for three end tokens, not for the ids %s", others[2:])
    template = load_chat_template(assets)
    if template is not None:
        source = template.source
        if tokenizer.bos_id is None and "bos_token" in source:
            source = '{% set bos_token = "" %}' + source
        keys["tokenizer.chat_template"] = _rendered_as_it_is(source)
    return keys


def _rendered_as_it_is(template: str) -> str:
    """Return a template that llama-cpp-python renders: of four published ones it does not, but
    writes prompts by functions of its own, which differ. A comment makes it another text."""
    digest = hashlib.sha256(template.encode()).hexdigest()
    return "{# #}" + template if digest in _REPLACED else template


def _add(gguf: ModuleType, writer: "GGUFWriter", key: str, value: object) -> None:
    """Add a value, with the type that llama.cpp expects: numbers are 32 bits, whole ones
    unsigned."""
    types = gguf.GGUFValueType
    scalars = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING}
    if isinstance(value, list):
        items = {**scalars, int: types.INT32}
        writer.add_key_value(key, value, types.ARRAY, sub_type=items[type(value[0])])
    else:
        writer.add_key_value(key, value, scalars[type(value)])


def _declare(
    gguf: ModuleType, writer: "GGUFWriter", name: str, given: TensorSpec, kind: Kind
) -> None:
    import numpy

    raw = gguf.GGMLQuantizationType[kind]
    shape = gguf.quant_shape_to_byte_shape(given.shape, raw)
    n_bytes = int(numpy.prod(shape))
    writer.add_tensor_info(name, shape, numpy.dtype(numpy.uint8), n_bytes, raw_dtype=raw)


def _encoded(gguf: ModuleType, name: str, tensor: Tensor, kind: Kind) -> "numpy.ndarray":
    """Return the bytes of a tensor, as an array."""
    import numpy

    if kind != "Q8_0":
        return as_type(name, tensor, _DTYPES[kind]).contiguous().view(torch.uint8).numpy()
    quantized = gguf.GGMLQuantizationType.Q8_0
    rows = tensor.reshape(-1, tensor.shape[-1])
    parts = [gguf.quantize(part.float().numpy(), quantized) for part in rows.split(_QUANTIZED_ROWS)]
    return numpy.concatenate(parts)


def _checked(array: "numpy.ndarray") -> "numpy.ndarray":
    """Return a view of an array whose `tofile`, by which the package gguf writes it, raises
    `OSError` with its cause if the disk is full. NumPy's names no cause, and raises nothing if only
    the last bytes of an array are refused."""
    import numpy

    class Checked(numpy.ndarray):
        """Writes itself as bytes."""

        def tofile(self, file: Any, sep: str = "", format: str = "%s") -> None:
            file.write(numpy.ascontiguousarray(self).data)

    return array.view(Checked)
