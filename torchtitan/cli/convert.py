"""`torchtitan convert`: a checkpoint in another format, tensor by tensor in one process."""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.tools.errors import UserError
from torchtitan.tools.logging import init_logger

if TYPE_CHECKING:
    from torchtitan.protocols import ModelSpec

_EXPORT_DTYPES = ("float32", "bfloat16", "float16")
_FORMATS = ("hf", "meta", "dcp")

_DESCRIPTION = """Write the checkpoint in the folder INPUT to the folder OUTPUT, in another format or another type of
numbers: weights, tokenizer, and the file that describes the model. Formats: hf (Hugging Face: config.json and
safetensors), meta (params.json and consolidated.00.pth), dcp (a step-N folder of a training run; OUTPUT then is such a
folder, of a model without optimizer, to be named as --checkpoint.initial_load_path).
Memory: about the largest tensor."""


def convert(args: Sequence[str]) -> int:
    """Convert what the command line says; 0 when OUTPUT is complete, 2 for a user's mistake, 3 where it cannot be
    written. OUTPUT exists only when it is complete."""
    init_logger()
    options = _parse(args)
    options.output = options.output.absolute()
    try:
        _convert(options)
    except UserError as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(f"converting to {options.output} failed: {error}", 3)
    return 0


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchtitan convert", description=_DESCRIPTION)
    parser.add_argument("input", metavar="INPUT", type=Path, help="folder of the checkpoint to read")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument("--from", dest="source", choices=_FORMATS, help="format of INPUT (default: found by its files)")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="format of OUTPUT")
    parser.add_argument(
        "--export_dtype", choices=_EXPORT_DTYPES, help="type of the weights in OUTPUT (default: as in INPUT)"
    )
    parser.add_argument(
        "--max_shard_size",
        type=float,
        default=5.0,
        metavar="GIB",
        help="hf: begin a new file where one would be larger, in GiB (default: 5)",
    )
    return parser.parse_args(args)


def _convert(options: argparse.Namespace) -> None:
    import torch

    from torchtitan.components.checkpoint.assets import asset_folder
    from torchtitan.components.checkpoint.formats import export_checkpoint
    from torchtitan.components.data.progress import progress
    from torchtitan.models.pretrained import native_source

    begun = time.perf_counter()
    _check(options)
    spec, source = native_source(options.input)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    # Beside OUTPUT, so that renaming puts it in place, and under a name that nothing else has.
    workplace = Path(tempfile.mkdtemp(prefix=f"{options.output.name}.", suffix=".partial", dir=options.output.parent))
    try:
        partial = workplace / "checkpoint.partial"
        partial.mkdir()  # its permissions are the usual ones, and those of the other are not
        with progress(f"converting to {options.to}", sum(form.n_bytes for form in source.forms.values())) as advance:
            export_checkpoint(
                partial,
                options.to,
                spec,
                source,
                asset_folder(options.input),
                dtype=getattr(torch, options.export_dtype) if options.export_dtype else None,
                max_file_bytes=int(options.max_shard_size * 2**30),
                advance=advance,
            )
        _put_in_place(partial, options)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    _report(options, spec, len(source.forms), time.perf_counter() - begun)


def _check(options: argparse.Namespace) -> None:
    """Find mistakes before anything is read or written."""
    from torchtitan.components.checkpoint.formats import format_of
    from torchtitan.components.checkpoint.pretrained import check_digests

    if options.max_shard_size <= 0:
        raise UserError(f"--max_shard_size is {options.max_shard_size}, and must be above 0")
    output: Path = options.output
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"{output} exists already, and is left as it is; name a new folder")
    found = format_of(options.input)
    if options.source and options.source != found:
        raise UserError(f"{options.input} is a checkpoint in the format {found}, and not {options.source}")
    check_digests(options.input)


def _put_in_place(partial: Path, options: argparse.Namespace) -> None:
    from torchtitan.components.checkpoint import folders
    from torchtitan.components.checkpoint.formats import format_of

    written = partial
    if options.to == "dcp":
        step = folders.open_checkpoint(options.input).step if format_of(options.input) == "dcp" else 0
        marker = folders.Marker(step=step, kind="model_only", world_size=1)
        written = Path(str(folders.commit(partial, marker)))
    written.rename(options.output)  # the system refuses a folder that is no longer empty


def _report(options: argparse.Namespace, spec: "ModelSpec", n_tensors: int, seconds: float) -> None:
    sizes = [file.stat().st_size for file in options.output.rglob("*") if file.is_file()]
    print(
        f"wrote {options.output} ({options.to}): {spec.name} {spec.flavor}, {n_tensors} tensors, "
        f"{sum(sizes):,} bytes in {len(sizes)} files, {seconds:.1f} s"
    )


def _fail(message: str, code: int) -> int:
    print(f"torchtitan convert: {message}", file=sys.stderr)
    return code
