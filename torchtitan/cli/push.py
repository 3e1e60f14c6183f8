"""`torchtitan push`: upload a model to the Hugging Face Hub, with a card about its run."""

import argparse
import contextlib
import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtitan.cli.hub import unreachable
from torchtitan.cli.model_options import run_command
from torchtitan.components.checkpoint.formats import LIBRARIES, library_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import file_to_copy, missing_folder_error, read_object, read_regular
from torchtitan.tools.logging import presentable, print_error
from torchtitan.tools.parser import Parser
from torchtitan.tools.redact import redact

if TYPE_CHECKING:
    from huggingface_hub import HfApi


_DESCRIPTION = """Upload the model in the folder SOURCE to the repository OWNER/NAME on the Hugging
Face Hub, in one commit: weights in Hugging Face or GGUF format or an adapter, configuration,
tokenizer, and README.md, a card with data, method, numbers and command of the run. SOURCE may be
the dump folder of a run, whose newest checkpoint in Hugging Face format is uploaded. Optimizer
states and other files are skipped. A new repository is private unless --public. Log in with
`hf auth login`, or set the environment variable HF_TOKEN."""

_CARD = "README.md"

_WEIGHTS = ("*.safetensors", "*.gguf")
_INDEX = "*.safetensors.index.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_BASE = "base_model_name_or_path"
"""The base of an adapter in its configuration."""

_HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")

_DESCRIBING = ("config.json", "*.safetensors.index.json", "LICENSE*", _CARD)
_TOKENIZER = ("tekken.json", "*.tiktoken", "tiktoken.model", "additional_chat_templates/*.jinja")

_READ_BY_PEOPLE = (".json", ".jinja", ".md")
"""Endings of files that are searched for credentials, except vocabularies, whose tokens may look
like some."""

_VOCABULARIES = ("tokenizer.json", "vocab.json", "tekken.json", "*.index.json")

_TASKS = {
    **dict.fromkeys(("ForCausalLM", "LMHeadModel"), "text-generation"),
    "ForSequenceClassification": "text-classification",
}
"""End of the name of a class in transformers → the Hub's name of what it does."""

IMAGES_AND_TEXT = "image-text-to-text"
"""The Hub's name of what models that read images do."""

_OF_IMAGES = "dataloader.image_root"
"""Option that only loaders of images have."""

_SCORE = re.compile(r"\bscore\b")
"""The layer of a reward model that gives the score."""

_TASKS_OF_PEFT = {"CAUSAL_LM": "text-generation", "SEQ_CLS": "text-classification"}


class Upload(NamedTuple):
    """Files of a model, and its card."""

    folder: Path
    names: Sequence[str]
    """Within the folder, without the card."""
    replaced: Mapping[str, bytes]
    """Name → content to upload instead of the file in the folder."""
    n_left_out: int
    card: bytes


def push(args: Sequence[str]) -> int:
    """Upload a model. Return 0, 2 for a user's mistake or a refusal of the Hub, or 3 if the files
    cannot be read."""
    parser = Parser(prog="torchtitan push", description=_DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", type=Path, help="folder of a model or a run")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="name of the repository")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="dump folder of the run that trained the model, for the card (default: the run that "
        "SOURCE is in)",
    )
    parser.add_argument(
        "--base_model",
        metavar="OWNER/NAME",
        help="repository of the model that training started from, for the card and the adapter "
        "(default: the adapter's, if it names one)",
    )
    parser.add_argument(
        "--license", help="license of the model, for the card, such as apache-2.0 (default: unsaid)"
    )
    parser.add_argument("--public", action="store_true", help="create a public repository")
    parser.add_argument(
        "--update", action="store_true", help="add a commit to a repository that exists"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="list the files with their sizes, and the card"
    )
    options = parser.parse_args(args)
    return run_command("push", lambda: _push(options))


def _push(options: argparse.Namespace) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    with _refusals(api, options.repo_id):
        _check_name(options.repo_id)
        upload = _prepare(options)
        if options.dry_run:
            _list(upload, options.repo_id)
            return
        address = _send(api, upload, options)
    print(presentable(f"pushed {len(upload.names) + 1} files to {address}"))


def _check_name(repo_id: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise UserError(f"'{repo_id}' has no owner: name the repository OWNER/NAME")


def _prepare(options: argparse.Namespace) -> Upload:
    """Return the files to upload. Raise `UserError` if the folder has no model, the model is
    damaged, or a file has a credential."""
    if options.public and options.update:
        raise UserError(
            "--public has no effect with --update, which keeps who can see the repository"
        )
    from torchtitan.components.checkpoint import catalog

    folder, run = _model_and_run(options.source, options.run)
    names, n_left_out = _files_of(folder)
    if not any(fnmatch.fnmatch(name, pattern) for name in names for pattern in _WEIGHTS):
        raise UserError(
            f"{folder} has no model in Hugging Face or GGUF format; write one with torchtitan "
            f"convert --to hf {folder} my_model"
        )
    _check_credentials(folder, names)
    step = None
    if catalog.has_marker(folder):
        catalog.raise_if_damaged(folder)
        step = catalog.open_checkpoint(folder).step
    if _CARD in names:
        _check_options_of_card(folder, names, options)
        card = read_regular(folder / _CARD)
    else:
        card = _card(folder, names, run, step, options)
    replaced = _published_configs(folder, names, options.base_model)
    return Upload(folder, [name for name in names if name != _CARD], replaced, n_left_out, card)


def _check_credentials(folder: Path, names: Sequence[str]) -> None:
    for name in map(Path, names):
        is_vocabulary = any(fnmatch.fnmatch(name.name, pattern) for pattern in _VOCABULARIES)
        if name.suffix in _READ_BY_PEOPLE and not is_vocabulary:
            text = read_regular(folder / name).decode(errors="replace")
            if redact(text) != text:
                raise UserError(f"{folder / name} has a credential; remove it, then push again")


def _check_options_of_card(folder: Path, names: Sequence[str], options: argparse.Namespace) -> None:
    is_adapter = any(Path(name).name == _ADAPTER[0] for name in names)  # which names its base
    for name in ("run", "license", *(() if is_adapter else ("base_model",))):
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name} has no effect, since {folder / _CARD} is the card; remove the option or "
                "the file"
            )


def _published_configs(
    folder: Path, names: Sequence[str], base_model: str | None
) -> dict[str, bytes]:
    """Return the content of each adapter_config.json that names another base than it should on the
    Hub: `base_model`, otherwise its own, or null for a folder of this machine."""
    replaced: dict[str, bytes] = {}
    for name in names:
        if Path(name).name != _ADAPTER[0]:
            continue
        config = read_object(folder / name)
        own = config.get(_BASE)
        base = base_model or (own if _is_hub_name(own) else None)
        if base != own:
            replaced[name] = (json.dumps({**config, _BASE: base}, indent=2) + "\n").encode()
            found = f" instead of {own}" if own else ""
            advice = "" if base else "; name its repository with --base_model"
            print(presentable(f"{name} will name {base or 'no base'}{found}{advice}"))
    return replaced


def _is_hub_name(name: object) -> bool:
    """Return whether a text may be the name of a model on the Hub. Names of old models have no
    owner."""
    return isinstance(name, str) and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _model_and_run(source: Path, run: Path | None) -> tuple[Path, Path | None]:
    """Return the folder of the model in `source`, and of the run that trained it, if known."""
    from torchtitan.cli.report import METRICS, RunRecord

    if not source.is_dir():
        raise missing_folder_error(source)
    if (source / METRICS).is_file():
        saved = RunRecord(source).checkpoints
        found = [Path(str(info.path)) for info in saved if info.is_complete]
        models = [path for path in found if (path / "config.json").is_file()]
        if not models:
            newest = found[-1] if found else source / "checkpoint" / "step-N"
            raise UserError(
                f"the run in {source} has no checkpoint in Hugging Face format; write one with "
                f"torchtitan convert --to hf {newest} my_model, then torchtitan push my_model "
                f"OWNER/NAME --run {source}"
            )
        return models[-1], run or source
    outer = source.absolute().parent.parent
    return source, run or (outer if (outer / METRICS).is_file() else None)


def _files_of(folder: Path) -> tuple[list[str], int]:
    """Return the names of the files to upload, and the number of others. Raise `UserError` if one
    is a link to a file outside the folder."""
    from torchtitan.components.peft.converter import EXPORTED
    from torchtitan.components.weights.assets import FILES

    patterns = [*_WEIGHTS, *_ADAPTER, *_DESCRIBING, *_TOKENIZER, *FILES]
    patterns += [f"{EXPORTED}/{name}" for name in _ADAPTER]
    names = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )
    wanted = [
        name
        for name in names
        if any(
            fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/")
            for pattern in patterns
        )
    ]
    for name in wanted:
        file_to_copy(folder, name)
    return wanted, len(names) - len(wanted)


def _card(
    folder: Path,
    names: Sequence[str],
    run: Path | None,
    step: int | None,
    options: argparse.Namespace,
) -> bytes:
    from torchtitan.cli.model_card import base_folder, is_repository, model_card
    from torchtitan.cli.report import RunRecord

    library, task = _library_and_task(folder, names)
    base = options.base_model
    if library == "peft":
        said = read_object(folder / _ADAPTER[0]).get(_BASE)
        base = base or (said if is_repository(said) else None)
    record = RunRecord(run) if run else None
    has_images = record is not None and _OF_IMAGES in record.config
    if library == "peft" and has_images and task == "text-generation":
        task = IMAGES_AND_TEXT  # as PEFT has no type of its own for them
    if record and not base and (name := base_folder(record)):
        advice = "name its repository with --base_model"
        print(presentable(f"the card names the folder {name} as the base of the model; {advice}"))
    title = options.repo_id.rpartition("/")[2]
    origin = {"run": record, "step": step, "base_model": base}
    return model_card(title, library, task=task, license=options.license, **origin).encode()


def _library_and_task(folder: Path, names: Sequence[str]) -> tuple[str, str | None]:
    """Return the library that opens the files, and the Hub's name of what the model does, if it is
    known."""
    if _ADAPTER[0] in names:
        return "peft", _task_of_adapter(read_object(folder / _ADAPTER[0]))
    if "config.json" not in names:
        return "gguf", None
    config = read_object(folder / "config.json")
    library = library_of(config)
    if not LIBRARIES[library].has_text:
        return library, None
    classes = config.get("architectures")
    name = str(*classes[:1]) if isinstance(classes, list) else ""
    if name.endswith("ForConditionalGeneration") and "vision_config" in config:
        return library, IMAGES_AND_TEXT
    return library, next((t for end, t in _TASKS.items() if name.endswith(end)), None)


def _task_of_adapter(config: Mapping[str, Any]) -> str | None:
    """Return the task of an adapter; a model whose score it adapts is a reward model."""
    targets = config.get("target_modules")
    names = targets if isinstance(targets, list) else [targets]
    if any(_SCORE.search(str(name)) for name in names):
        return "text-classification"
    return _TASKS_OF_PEFT.get(str(config.get("task_type")))


def _list(upload: Upload, repo_id: str) -> None:
    sizes = {name: (upload.folder / name).stat().st_size for name in upload.names}
    sizes |= {name: len(content) for name, content in upload.replaced.items()}
    sizes[_CARD] = len(upload.card)
    lines = [f"{size:>15,}  {name}" for name, size in sizes.items()]
    total = f"{sum(sizes.values()):,} bytes in {len(sizes)} files of {upload.folder}"
    left = f"; {upload.n_left_out} other files are left out"
    print(presentable("\n".join([*lines, f"{total} would go to {repo_id}{left}"])))
    print(presentable("\n" + upload.card.decode()))


def _send(api: "HfApi", upload: Upload, options: argparse.Namespace) -> str:
    """Create the repository and the commit. Return its address."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token

    if get_token() is None:
        raise UserError(
            "not logged in to the Hugging Face Hub; run `hf auth login`, or set HF_TOKEN to a "
            "token that may write"
        )
    api.create_repo(options.repo_id, private=not options.public, exist_ok=options.update)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(
            path_in_repo=name, path_or_fileobj=upload.replaced.get(name, upload.folder / name)
        )
        for name in upload.names
    ]
    operations.append(CommitOperationAdd(path_in_repo=_CARD, path_or_fileobj=upload.card))
    if options.update:
        # Readers would take old weights in a file of another name, or more shards than there are.
        old = sorted(
            name
            for name in {*api.list_repo_files(options.repo_id)} - {*upload.names}
            if any(fnmatch.fnmatch(name, pattern) for pattern in (*_WEIGHTS, _INDEX))
        )
        operations += [CommitOperationDelete(path_in_repo=name) for name in old]
        for name in old:
            print(
                presentable(f"{name} of the repository is deleted, since it is not in the folder")
            )
    try:
        api.create_commit(
            options.repo_id, operations=operations, commit_message="Upload a model with torchtitan"
        )
    except BaseException:
        if not options.update:
            print_error(
                "push",
                f"{options.repo_id} was created, and is empty; repeat the command with --update"
                f"{' and without --public' if options.public else ''}, or delete the repository",
            )
        raise
    return f"{api.endpoint}/{options.repo_id}"


@contextlib.contextmanager
def _refusals(api: "HfApi", repo_id: str) -> Iterator[None]:
    """Turn answers of the Hub, and a missing network, into `UserError`."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    owner = repo_id.partition("/")[0]
    reasons = {
        401: "it does not know the token; run `hf auth login` again, or set HF_TOKEN",
        403: f"the token may not write to {owner}; create one with the right to write",
        409: f"{repo_id} exists already; add a commit to it with --update, or choose another name",
    }
    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is not the name of a repository (OWNER/NAME)") from error
    except ValueError as error:
        if not str(error).startswith("Invalid metadata"):  # what the Hub says about the card
            raise
        found = str(error).strip().split("\n")[-1].lstrip("- ")
        raise UserError(f"{api.endpoint} refuses the card: {found}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        cause = reasons.get(status) or redact(str(error).strip().split("\n")[0])
        raise UserError(f"{api.endpoint} refuses to take the model: {cause}") from error
    except (HTTPError, ConnectionError, OfflineModeIsEnabled) as error:
        raise unreachable(api.endpoint, error) from error
