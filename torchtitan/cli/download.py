"""`torchtitan download`: fetch a model's files from the Hugging Face Hub."""

import argparse
import contextlib
import fnmatch
import glob
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan.cli.hub import unreachable
from torchtitan.cli.model_options import run_command
from torchtitan.tools import durable
from torchtitan.tools.errors import RunFailure, UserError
from torchtitan.tools.files import DOWNLOADS, is_lfs_pointer
from torchtitan.tools.logging import presentable
from torchtitan.tools.parser import Parser

if TYPE_CHECKING:
    from huggingface_hub.hf_api import HfApi, RepoSibling

_DESCRIPTION = """Fetch the model REPO_ID, for example meta-llama/Llama-3.1-8B, from the Hugging
Face Hub: weights (as safetensors, or else as pytorch_model.bin), configuration, tokenizer, and what
prepares images. Use the folder as --hf_assets_path. The files appear in it once all have the
digests that the Hub lists (SHA-256; for small files, git's SHA-1). Existing files are not
downloaded again. For private repositories, or ones that require accepting a license, set the
environment variable HF_TOKEN."""

_TOKENIZER = (
    *(
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "*.jinja",
    ),
    *("tekken.json", "tiktoken.model", "*.tiktoken"),
    *("added_tokens.json", "vocab.json", "merges.txt", "config.json", "generation_config.json"),
    *("chat_template.json", "additional_chat_templates/*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("qformer_tokenizer/*.json", "qformer_tokenizer/vocab.txt"),
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
"""Files fetched if a repository has none of `_WEIGHTS`."""
_ORIGINAL = "original/*"

_ARRIVING = ".download"
"""Subfolder for files that have not been verified yet."""

_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]|/(/|$)|^(/|[A-Za-z]:|$)|(^|/)\.{1,2}(/|$)")
"""Matches names that would leave the folder on any operating system, or control a terminal."""


def download(args: Sequence[str]) -> int:
    """Download the named model. Return 0, 2 if the Hub does not provide all files, or 3 if they
    cannot be written."""
    parser = Parser(prog="torchtitan download", description=_DESCRIPTION)
    parser.add_argument("repo_id", metavar="REPO_ID", help="name of the repository: OWNER/NAME")
    parser.add_argument(
        "--revision", help="branch, tag or commit (default: the newest of the main branch)"
    )
    parser.add_argument(
        "--dest", type=Path, help="folder to write into (default: ./assets/hf/NAME)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--tokenizer_only", action="store_true", help="tokenizer and configuration, no weights"
    )
    what.add_argument(
        "--original",
        action="store_true",
        help="weights in Meta's format (the folder original), instead of safetensors",
    )
    options = parser.parse_args(args)
    folder = options.dest or DOWNLOADS / options.repo_id.rpartition("/")[2]
    return run_command("download", lambda: _download(options, folder))


def _download(options: argparse.Namespace, folder: Path) -> None:
    """Fetch the files. Every failure of the Hub or the network raises a one-line `UserError`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id

    repo_id, api = options.repo_id, HfApi()
    page = f"{api.endpoint}/{repo_id}"
    # the first match counts: a gated repository is also "not found"
    refusals: dict[type[Exception], str] = {
        GatedRepoError: f"{repo_id} is gated: accept its license on {page}, and set HF_TOKEN to a "
        "token of that "
        "account",
        RevisionNotFoundError: f"{repo_id} has no revision '{options.revision}'; see {page}",
        RepositoryNotFoundError: f"there is no model '{repo_id}' on the Hub, or it is private; "
        "check the name, or set "
        "HF_TOKEN",
        HFValidationError: f"{repo_id!r} is not the name of a repository (OWNER/NAME)",
    }
    try:
        validate_repo_id(repo_id)
        # Ask first: if the Hub does not answer, the library accepts any non-empty folder as the
        # repository.
        with _answer_of(api):
            info = api.model_info(repo_id, revision=options.revision, files_metadata=True)
            files = {file.rfilename: file for file in info.siblings or []}
            unsafe = [name for name in files if _UNSAFE.search(name)]
        if unsafe:
            raise UserError(
                f"{repo_id} has a file called {unsafe[0]!r}, which may lead out of the folder: not "
                "fetched"
            )
        names = _wanted(list(files), options)
        if not names:
            raise UserError(f"{repo_id} has none of the requested files")
        _fetch(api, repo_id, info.sha, [files[name] for name in names], folder)
        print(presentable(f"downloaded {repo_id} to {folder}"))
    except tuple(refusals) as error:
        raise UserError(
            next(text for kind, text in refusals.items() if isinstance(error, kind))
        ) from error
    except (HTTPError, LocalEntryNotFoundError, ConnectionError) as error:
        raise unreachable(api.endpoint, error) from error
    except OSError as error:
        if error.errno is not None:
            cause = error.strerror or str(error)
            raise RunFailure(f"{folder} cannot be written: {cause}") from error
        # raised by the library if a file does not have the announced size
        cause = str(error).split("\n")[0]
        raise UserError(f"{repo_id} did not arrive whole ({cause}); run this again") from error


def _fetch(
    api: "HfApi", repo_id: str, revision: str | None, files: "Sequence[RepoSibling]", folder: Path
) -> None:
    """Put files into `folder` after all match the Hub's digests; `_ARRIVING` keeps them after an
    interruption."""
    from filelock import FileLock, Timeout

    def is_there(file: "RepoSibling") -> bool:
        path = folder / file.rfilename
        return path.is_file() and _digest(path, file) == _expected(file)

    missing = {file.rfilename: file for file in files if not is_there(file)}
    if not missing:
        return
    arriving = folder / _ARRIVING
    durable.make_folder(arriving)
    try:
        with FileLock(arriving / "lock", timeout=0):
            for torn in arriving.rglob("*.incomplete"):  # the library never resumes one
                torn.unlink()
            patterns = [glob.escape(name) for name in missing]
            with _answer_of(api):
                api.snapshot_download(
                    repo_id, revision=revision, local_dir=arriving, allow_patterns=patterns
                )
            for name, file in missing.items():
                _check(arriving / name, file, f"{name} of {repo_id}")
            for name in missing:
                durable.make_folder((folder / name).parent)
                durable.replace(arriving / name, folder / name)
            shutil.rmtree(arriving)
    except Timeout as error:
        raise UserError(
            f"another `torchtitan download` writes to {folder}: wait until that ends"
        ) from error


@contextlib.contextmanager
def _answer_of(api: "HfApi") -> Iterator[None]:
    """Convert Python errors caused by malformed answers, which the library does not validate, to
    `UserError`."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except (
        AssertionError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, (HFValidationError, HTTPError, OSError)):
            raise
        cause = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(
            f"{api.endpoint} does not answer like the Hugging Face Hub ({cause})"
        ) from error


def _check(path: Path, file: "RepoSibling", name: str) -> None:
    """Compare a file with the Hub's digest, not only its size; remove it and raise `UserError` if
    they differ."""
    if not path.is_file():  # the library only warns if the Hub stops answering
        raise UserError(f"{name} did not arrive; check the network, then run this again")
    if is_lfs_pointer(path):
        fault = "arrived as a Git LFS pointer, a few lines instead of the file itself"
    elif (expected := _expected(file)) is None:
        fault = "has no digest on the Hub to compare it with"
    elif (found := _digest(path, file)) != expected:
        fault = f"is damaged: its digest is {found}, and the Hub's is {expected}"
    else:
        return
    path.unlink()
    raise UserError(
        f"{name} {fault}; nothing of it is kept. Run this again, or look at the file on the Hub"
    )


def _expected(file: "RepoSibling") -> str | None:
    """Return the Hub's digest of a file: SHA-256 for LFS files, else git's SHA-1."""
    return file.lfs.sha256 if file.lfs else file.blob_id


def _digest(path: Path, file: "RepoSibling") -> str:
    with path.open("rb") as opened:
        if file.lfs:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        git = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        return hashlib.file_digest(opened, lambda: git).hexdigest()


def _wanted(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    wanted = _matching(names, _TOKENIZER)
    if options.original:
        return wanted + [name for name in names if fnmatch.fnmatch(name, _ORIGINAL)]
    if options.tokenizer_only:
        return wanted
    return wanted + (_matching(names, _WEIGHTS) or _matching(names, _PICKLED))


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        if any(
            fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/")
            for pattern in patterns
        )
    ]
