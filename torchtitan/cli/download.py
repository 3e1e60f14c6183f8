"""`torchtitan download`: a model's files from the Hugging Face hub."""

import argparse
import fnmatch
from collections.abc import Sequence
from pathlib import Path

from torchtitan.tools.errors import UserError
from torchtitan.tools.model_folder import DOWNLOADS
from torchtitan.tools.terminal import print_error

_DESCRIPTION = """Fetch the model REPO_ID, for example meta-llama/Llama-3.1-8B, from the Hugging Face hub: weights (as
safetensors, or as pytorch_model.bin where there are none), configuration, tokenizer. The folder serves as
--hf_assets_path. What is there already is not fetched again. For repositories that are private or ask to accept a
license, set the environment variable HF_TOKEN."""

_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "*.jinja"),
    *("added_tokens.json", "vocab.json", "merges.txt", "config.json", "generation_config.json"),
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
"""What is fetched of a repository without any of `_WEIGHTS`."""
_ORIGINAL = "original/*"


def download(args: Sequence[str]) -> int:
    """Download what the command line names; 0 when all of it is there, 2 where the hub does not give it, 3 where it
    cannot be written."""
    options = _parse(args)
    folder = options.dest or DOWNLOADS / options.repo_id.rpartition("/")[2]
    try:
        _download(options, folder)
    except UserError as error:
        return _fail(str(error), 2)
    except OSError as error:
        return _fail(f"{folder} cannot be written: {error.strerror or error}", 3)
    print(f"downloaded {options.repo_id} to {folder}")
    return 0


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchtitan download", description=_DESCRIPTION)
    parser.add_argument("repo_id", metavar="REPO_ID", help="name of the repository: OWNER/NAME")
    parser.add_argument("--revision", help="branch, tag or commit (default: the newest of the main branch)")
    parser.add_argument("--dest", type=Path, help="folder to write into (default: ./assets/hf/NAME)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tokenizer_only", action="store_true", help="tokenizer and configuration, no weights")
    what.add_argument(
        "--original", action="store_true", help="weights in Meta's format (the folder original), instead of safetensors"
    )
    return parser.parse_args(args)


def _download(options: argparse.Namespace, folder: Path) -> None:
    """Fetch the files; every failure of the hub or the network is a `UserError` of one line."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo_id = options.repo_id
    api = HfApi()
    try:
        # Asked first: without an answer, the library takes a folder that has any file in it for the repository's.
        info = api.model_info(repo_id, revision=options.revision)
        names = _wanted([sibling.rfilename for sibling in info.siblings or []], options)
        if not names:
            raise UserError(f"{repo_id} has none of the files that were asked for")
        api.snapshot_download(repo_id, revision=info.sha, local_dir=folder, allow_patterns=names)
    except GatedRepoError as error:
        page = f"{api.endpoint}/{repo_id}"
        raise UserError(
            f"{repo_id} is gated: accept its licence on {page}, and set HF_TOKEN to a token of that account"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{repo_id} has no revision '{options.revision}'; see {api.endpoint}/{repo_id}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"there is no model '{repo_id}' on the hub, or it is private; check the name, or set HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise UserError(f"'{repo_id}' is not the name of a repository (OWNER/NAME)") from error
    except (HTTPError, LocalEntryNotFoundError, ConnectionError) as error:
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{api.endpoint} cannot be reached ({cause}); check the network, then run this again"
        ) from error


def _wanted(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Those of the repository's files that are fetched."""
    wanted = _matching(names, _TOKENIZER)
    if options.original:
        return wanted + [name for name in names if fnmatch.fnmatch(name, _ORIGINAL)]
    if options.tokenizer_only:
        return wanted
    return wanted + (_matching(names, _WEIGHTS) or _matching(names, _PICKLED))


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Those at the top of the repository that a pattern fits."""
    return [name for name in names if "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _fail(message: str, code: int) -> int:
    print_error("download", message)
    return code
