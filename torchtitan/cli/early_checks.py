"""Checks of a run's options that depend on this host, without importing torch."""

import glob
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from torchtitan.cli.launch import environment_number
from torchtitan.config.degrees import check_training, resolve_degrees
from torchtitan.config.option_table import KnownConfiguration
from torchtitan.config.sections import TrainingConfig
from torchtitan.tools.errors import errors_of
from torchtitan.tools.files import check_output_folder, is_url, missing_folder_error

_WITHOUT_TORCH = "torchtitan.components.data."
"""Package of the loaders whose configurations need no torch."""

_FORMAT = "dataloader.format"
"""Option that may name a function for the rows of the data."""

_FUNCTIONS = {
    _FORMAT: "",
    "rewards": "--rewards",
    "rollout.function": "--rollout.function",
}
"""Options that name users' functions, with the beginning of their messages."""

_ACCELERATORS = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd")
"""Devices of GPUs on Linux: of NVIDIA's drivers, also of its small boards, of Windows' subsystem,
and of AMD's driver."""


def check_degrees(known: KnownConfiguration, given: Mapping[str, object]) -> None:
    """Raise `UserError` if the degrees of parallelism and the options of training that are set do
    not fit the number of processes, as far as it is known, or each other."""
    is_set = any(key.startswith(("parallelism.", "training.")) for key in given)
    processes = known_processes()
    if is_set and processes and not (config := known.parallelism(given)).auto:
        training = TrainingConfig(**known.section("training", given))
        check_training(training, config, resolve_degrees(config, processes))


def known_processes() -> int | None:
    """Return the number of processes of the run; None if only torch knows the GPUs. Raise
    `UserError` for a wrong environment variable."""
    if "NGPU" not in os.environ and may_have_gpus():
        return None
    return environment_number("NNODES") * environment_number("NGPU")


def may_have_gpus(devices: Path = Path("/dev")) -> bool:
    """Return False if this host certainly has no GPU that torch can use."""
    return sys.platform != "linux" or any(
        next(devices.glob(name), None) is not None for name in _ACCELERATORS
    )


def check_files(known: KnownConfiguration, given: Mapping[str, object]) -> None:
    """Raise `UserError` for a folder of model files, or a file or folder of data, that is set and
    does not exist."""
    assets = str(given.get("hf_assets_path") or "")
    if assets and not is_url(assets) and not os.path.isdir(os.path.expanduser(assets)):
        raise missing_folder_error(assets)
    check_output_folder(str(known.value("dump_folder", given)), assets)
    if not _reads_data(known, given):
        return
    for key in ("dataloader.dataset", "validator.dataset"):
        is_read = key == "dataloader.dataset" or known.value("validator.enable", given)
        if is_read and key in given:
            _check_datasets(known, known.value(key, given))


def check_data(known: KnownConfiguration, given: Mapping[str, object]) -> None:
    """Raise `UserError` for options of the loader, for data whose first rows cannot be used, and
    for a missing file of a user's function. Loaders that need torch are left to the run."""
    reads_data = _reads_data(known, given)
    for key in filter(given.__contains__, _FUNCTIONS):
        if reads_data or key != _FORMAT:
            _check_functions(key, known.value(key, given))
    is_set = any(key.startswith("dataloader.") for key in given)
    is_light = known.module_of("dataloader").startswith(_WITHOUT_TORCH)
    if not (is_set and is_light and known.is_current):
        return
    config = known.component("dataloader", given)
    config.validate()
    if reads_data:
        config.check_first_rows()


def _check_functions(key: str, value: str | Sequence[str]) -> None:
    """Raise `UserError` for a missing file with a function, with the message of the run."""
    from torchtitan.components.data.finetuning.functions import check_function_file

    with errors_of(subject) if (subject := _FUNCTIONS[key]) else nullcontext():
        for reference in [value] if isinstance(value, str) else value:
            if "=" not in reference:  # as in a built-in reward, pattern=REGEX
                check_function_file(reference)


def _reads_data(known: KnownConfiguration, given: Mapping[str, object]) -> bool:
    """Return whether the run certainly reads data: a dry run and a complete run do not."""
    return not os.environ.get("COMM_MODE") and not _may_be_complete(known, given)


def _may_be_complete(known: KnownConfiguration, given: Mapping[str, object]) -> bool:
    """Return whether the run may have checkpoints, which only torch can read."""
    dump_folder, folder = (known.value(f, given) for f in ("dump_folder", "checkpoint.folder"))
    is_enabled = known.value("checkpoint.enable", given)
    return is_enabled and (is_url(folder) or os.path.exists(os.path.join(dump_folder, folder)))


def _check_datasets(known: KnownConfiguration, datasets: Sequence[str]) -> None:
    if (names := _known_datasets(known)) is not None:
        for dataset in datasets:
            _check_dataset(dataset, names)


def _known_datasets(known: KnownConfiguration) -> Sequence[str] | None:
    """Return the names of datasets that a configuration's loader has; None for other loaders."""
    from torchtitan.components.data.sources.source import CHAT_DATASETS, DOCUMENTS

    if "dataloader.document_mask" in known.fields:  # pre-training
        return DOCUMENTS.names()
    return CHAT_DATASETS.names() if "dataloader.chat_template" in known.fields else None


def _check_dataset(dataset: str, names: Sequence[str]) -> None:
    from torchtitan.components.data.sources.hub_names import hub_name, reject_page
    from torchtitan.components.data.sources.paths import local_files

    reject_page(dataset)
    path = os.path.expanduser(dataset)
    is_other = not dataset or dataset in names or is_url(dataset) or hub_name(dataset)
    # Token files may have a path without its ending, and a name may precede a validation dataset.
    is_part = glob.has_magic(dataset) or "=" in dataset or glob.glob(f"{path}.*")
    if not (is_other or is_part or os.path.exists(path)):
        local_files(dataset, names)  # raises
