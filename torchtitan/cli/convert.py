"""`torchtitan convert`: write a checkpoint in another format, tensor by tensor in one process."""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.cli.merge_options import add_merge_options, check_merge, merged_source
from torchtitan.cli.model_options import (
    add_base_option,
    add_module_option,
    import_given_package,
    run_command,
)
from torchtitan.tools import durable
from torchtitan.tools.errors import RunFailure, UserError, require
from torchtitan.tools.logging import logger, presentable
from torchtitan.tools.parser import Parser
from torchtitan.tools.workplace import workplace

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from torchtitan.components.quantization.qat import QAT
    from torchtitan.protocols import ModelSpec

    Writing = tuple[ModelSpec, int, Callable[[Path], None]]

_FORMATS = ("hf", "meta", "dcp")

_QUANTIZED = {"int8dyn_int4w": "hf", "Q8_0": "gguf"}
"""Value of --quantize → its format."""

_OF_QUANTIZE = ("group_size", "exclude")
"""Options of --quantize int8dyn_int4w."""

_DESCRIPTION = """Write the checkpoint in the folder INPUT to the folder OUTPUT, in another format
or another type of numbers: weights, tokenizer, and the file that describes the model. Formats: hf
(Hugging Face: config.json and safetensors), meta (params.json and consolidated.00.pth), dcp (a
step-N folder of a training run; as OUTPUT, a step-N folder without optimizer state, for
--checkpoint.initial_load_path), peft (only the adapter of a run with --model_converters.lora or
qlora: adapter_config.json and adapter_model.safetensors), gguf (model.gguf, for llama.cpp; needs
the package gguf). Memory: about the largest tensor."""


def convert(args: Sequence[str]) -> int:
    """Run `torchtitan convert`. Return 0, 2 for a user's mistake, or 3 if OUTPUT cannot be
    written."""
    parser = Parser(prog="torchtitan convert", description=_DESCRIPTION)
    parser.add_argument(
        "input", metavar="INPUT", type=Path, help="folder of the checkpoint to read"
    )
    parser.add_argument(
        "output", metavar="OUTPUT", type=Path, help="folder to write; must not exist, or be empty"
    )
    add_base_option(parser, "INPUT")
    add_module_option(parser)
    parser.add_argument(
        "--from", dest="source", choices=_FORMATS, help="format of INPUT (default: detected)"
    )
    parser.add_argument(
        "--to", required=True, choices=(*_FORMATS, "peft", "gguf"), help="format of OUTPUT"
    )
    parser.add_argument(
        "--export_dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights in OUTPUT (default: as in INPUT)",
    )
    parser.add_argument(
        "--max_shard_size",
        type=float,
        default=5.0,
        metavar="GIB",
        help="hf: maximum size of a file in GiB (default: 5)",
    )
    parser.add_argument(
        "--quantize",
        choices=tuple(_QUANTIZED),
        help="quantize for inference. int8dyn_int4w (hf): the linear layers between embedding and "
        "output, 4-bit weights, 8-bit activations, as simulated by --model_converters.qat, whose "
        "settings in the run that saved INPUT are the defaults of the options below; needs "
        "torchao. Q8_0 (gguf): all matrices, 8.5 bits each weight",
    )
    parser.add_argument(
        "--group_size",
        type=int,
        metavar="N",
        help="--quantize int8dyn_int4w: adjacent weights that share a scale (default: 32)",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        metavar="PATTERN",
        help="--quantize int8dyn_int4w: regular expressions; layers with a matching name "
        "(layers.0.feed_forward.w2) are not "
        "quantized",
    )
    add_merge_options(parser)
    options = parser.parse_args(args)
    options.output = options.output.absolute()
    return run_command("convert", lambda: _convert(options), checkpoint=options.input)


def _convert(options: argparse.Namespace) -> None:
    try:
        _write(options)
    except OSError as error:
        raise RunFailure(f"converting to {options.output} failed: {error}") from error


def _write(options: argparse.Namespace) -> None:
    import torch

    begun = time.perf_counter()
    family = import_given_package(options)
    options.dtype = getattr(torch, options.export_dtype) if options.export_dtype else None
    _check(options, family)
    spec, n_tensors, write = (_adapter if options.to == "peft" else _model)(options, family)
    durable.make_folder(options.output.parent)
    with workplace(options.output) as folder:
        partial = folder / "checkpoint.partial"
        partial.mkdir()  # the outer folder is private; this one gets the usual permissions
        write(partial)
        _put_in_place(partial, options)
    sizes = [file.stat().st_size for file in options.output.rglob("*") if file.is_file()]
    found = (
        f"wrote {options.output} ({options.to}): {spec.name} {spec.flavor}, {n_tensors} tensors, "
        f"{sum(sizes):,} bytes in {len(sizes)} files, {time.perf_counter() - begun:.1f} s"
    )
    print(presentable(found))


def _model(options: argparse.Namespace, family: "ModuleType | None") -> "Writing":
    """Return the model, its number of tensors, and a function that writes them to a folder."""
    from torchtitan.components.weights.assets import asset_folder
    from torchtitan.models.pretrained import internal_source
    from torchtitan.tools.progress import progress

    spec, source = internal_source(options.input, base=options.base, family=family)
    if options.merge:
        source = merged_source(options, spec, source, family)
    export = _exporter(options)

    def write(folder: Path) -> None:
        n_bytes = sum(tensor_spec.n_bytes for tensor_spec in source.specs.values())
        with progress(f"converting to {options.to}", n_bytes) as advance:
            export(
                folder,
                spec=spec,
                source=source,
                assets=asset_folder(options.input),
                dtype=options.dtype,
                advance=advance,
            )

    return spec, len(source.specs), write


def _exporter(options: argparse.Namespace) -> "Callable[..., None]":
    """Return the function that writes a model in the chosen format."""
    if options.to == "gguf":
        from torchtitan.components.weights.gguf_export import export_gguf

        return functools.partial(export_gguf, quantize=options.quantize is not None)
    max_file_bytes = int(options.max_shard_size * 2**30)
    if options.quantize:
        from torchtitan.components.quantization.quantized_export import export_quantized

        return functools.partial(
            export_quantized, quantization=_quantization(options), max_file_bytes=max_file_bytes
        )
    from torchtitan.components.weights import export_checkpoint

    return functools.partial(export_checkpoint, to=options.to, max_file_bytes=max_file_bytes)


def _adapter(options: argparse.Namespace, family: "ModuleType | None") -> "Writing":
    """Like `_model`, for the adapter only. Raise `UserError` without an adapter, or if other
    parameters were trained."""
    from torchtitan.components.checkpoint.dcp import optimized_names
    from torchtitan.components.checkpoint.formats import format_of
    from torchtitan.components.optim.optimizer import trained_names
    from torchtitan.components.peft import LoRA
    from torchtitan.components.peft.adapter_files import CONFIG, write_adapter
    from torchtitan.components.peft.converter import EXPORTED, check_complete
    from torchtitan.components.weights import open_source
    from torchtitan.components.weights.assets import read_converters
    from torchtitan.models.pretrained import spec_of
    from torchtitan.protocols.conversion import converted_model, converters_from_records
    from torchtitan.protocols.tensor_source import as_type

    checkpoint: Path = options.input
    descriptions = read_converters(checkpoint) if format_of(checkpoint) == "dcp" else []
    converters = converters_from_records(descriptions, str(checkpoint))
    adapters = [converter for converter in converters if isinstance(converter, LoRA)]
    if (checkpoint / EXPORTED / CONFIG).is_file():
        raise UserError(
            f"{checkpoint} is a merged model, which already contains its adapter: "
            f"{checkpoint / EXPORTED}"
        )
    if len(adapters) != 1:
        found = len(adapters) or "none"
        raise UserError(
            f"--to peft writes a single adapter, but {checkpoint} has {found}; use the step-N "
            "folder of a run with either --model_converters.lora or qlora"
        )
    spec, source = spec_of(checkpoint, family), open_source(checkpoint)
    model = converted_model(spec.model, adapters)
    trained = optimized_names(checkpoint).union(
        trained_names(converted_model(spec.model, converters))
    )
    check_complete(model, trained)

    def read(name: str) -> "torch.Tensor":
        return as_type(name, source.read(name), options.dtype or source.specs[name].dtype)

    n_tensors = len(trained_names(model))
    return (
        spec,
        n_tensors,
        lambda folder: write_adapter(folder, adapters[0].config, model, spec, read),
    )


def _quantization(options: argparse.Namespace) -> "QAT.Config":
    """Return the quantization options, with defaults from the run that saved INPUT."""
    from torchtitan.components.quantization.qat import QAT
    from torchtitan.components.weights.assets import read_converters
    from torchtitan.protocols.conversion import converters_from_records

    explicit = {
        name: getattr(options, name) for name in _OF_QUANTIZE if getattr(options, name) is not None
    }
    converters = converters_from_records(
        read_converters(options.input, "simulated"), str(options.input)
    )
    simulated = next(
        (converter.config for converter in converters if isinstance(converter, QAT)), None
    )
    if simulated is None:
        return QAT.Config(**explicit)
    chosen = dataclasses.replace(simulated, **explicit)
    description = ", ".join(
        f"{name} {getattr(simulated, name)}" for name in ("group_size", "include", "exclude")
    )
    if chosen == simulated:
        logger.info("quantized as simulated by the run: %s", description)
    else:
        logger.warning(
            "quantized differently than simulated by the run, which used %s", description
        )
    return chosen


def _check(options: argparse.Namespace, family: "ModuleType | None") -> None:
    from torchtitan.components.weights.pretrained import check_digests
    from torchtitan.models.pretrained import checkpoint_format

    require(options.max_shard_size > 0, "--max_shard_size", options.max_shard_size, "above 0")
    check_merge(options)
    if options.base and options.to == "peft":
        raise UserError("--base cannot be combined with --to peft, which writes only the adapter")
    if options.quantize and options.to != _QUANTIZED[options.quantize]:
        raise UserError(
            f"--quantize {options.quantize} needs --to {_QUANTIZED[options.quantize]}, not --to "
            f"{options.to}"
        )
    if options.quantize == "Q8_0" and options.export_dtype:
        raise UserError("--export_dtype has no effect with --quantize Q8_0")
    for name in _OF_QUANTIZE:
        if getattr(options, name) is not None and options.quantize != "int8dyn_int4w":
            raise UserError(f"--{name} has no effect without --quantize int8dyn_int4w")
    output: Path = options.output
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} already exists; choose a new folder")
    found = checkpoint_format(options.input, family)
    if options.source and options.source != found:
        raise UserError(
            f"{options.input} is a checkpoint in the format {found}, not {options.source}"
        )
    for checkpoint in (options.input, *options.models, *filter(None, [options.origin])):
        check_digests(checkpoint)


def _put_in_place(partial: Path, options: argparse.Namespace) -> None:
    from torchtitan.components.checkpoint import catalog
    from torchtitan.components.checkpoint.formats import format_of

    written = partial
    if options.to == "dcp":
        step = (
            catalog.open_checkpoint(options.input).step if format_of(options.input) == "dcp" else 0
        )
        marker = catalog.Marker(step=step, kind="model_only", world_size=1)
        written = Path(str(catalog.commit(partial, marker)))
    durable.rename(written, options.output)  # fails if the folder is not empty anymore
