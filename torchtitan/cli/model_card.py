"""Model cards: README.md of a repository on the Hub, with data, method, numbers and command of a
run."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtitan.cli.report import RunRecord, sections
from torchtitan.tools.redact import redact

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Name of a repository."""

_OPTIONS = (
    "dataloader.dataset",
    "dataloader.chat_template",
    "training.epochs",
    "training.steps",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.mixed_precision_param",
    "model.train",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.weight_decay",
    "lr_scheduler.warmup_ratio",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.decay_type",
    "loss.beta",
    "rewards",
)
"""Options that a card lists if the run has them, next to the options of all converters. Except
for the dataset, no option is a path that only the machine of the run has."""

_UNSET: tuple[object, ...] = (None, "", [], -1)
"""Values of options that are not set; -1: a global batch of one local batch per device."""

_REPLACED = {
    "training.epochs": "training.steps",
    "lr_scheduler.warmup_ratio": "lr_scheduler.warmup_steps",
}
"""Option → another one, which has no effect if the first is set."""

_PATH = ".adapter_path"
"""The option of a converter that is such a path."""

_FACTS = ("Summary", "Data")
"""Tables of the report in the card."""

_UNTOLD = ("last event", "goodput", "last mfu", "last memory_gib", "last data_loading_fraction")


def is_repository(name: object) -> bool:
    """Return whether a text is a repository's name, OWNER/NAME, and no file here."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not Path(name).exists()


def model_card(
    title: str,
    library: str,
    *,
    task: str | None = None,
    step: int | None = None,
    run: RunRecord | None = None,
    base_model: str | None = None,
    license: str | None = None,
) -> str:
    """Return the text of a card, without credentials.

    Args:
        library: that opens the files: one of `LIBRARIES`, `peft` or `gguf`.
        task: the Hub's name of what the model does; None: unsaid.
        step: training step of the weights; None: unknown.
        run: the run that trained the model; None: unknown.
    """
    header = {"library_name": library, "tags": ["torchtitan"]}
    if task:
        header["pipeline_tag"] = task
    if license:
        header["license"] = license
    if base_model:
        header["base_model"] = base_model
    if run and (datasets := _datasets(run)):
        header["datasets"] = datasets
    parts = [f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n", f"# {title}\n"]
    folder = base_folder(run) if run else ""
    origin = f" from the model in the folder `{folder}`" if folder else ""
    if base_model:
        origin = f" from [{base_model}](https://huggingface.co/{base_model})"
    parts.append(f"Trained{origin} with torchtitan.\n")
    if run:
        parts += _describe(run, step)
    return redact("\n".join(parts))


def base_folder(run: RunRecord) -> str:
    """Return the name of the folder that the run's weights come from, without the path on its
    machine: of a checkpoint, with the folders of its run. "" for initial weights."""
    parts = Path(str(run.config.get("checkpoint.initial_load_path") or "")).parts
    is_checkpoint = bool(parts) and parts[-1].startswith("step-")
    return "/".join(parts[-3:] if is_checkpoint else parts[-1:]).lstrip("/")


def _datasets(run: RunRecord) -> list[str]:
    """Return the repositories that the run read from the Hub, none if it did not record them: the
    same name may be a folder on its machine."""
    recorded = run.start.get("hub")
    names = recorded if isinstance(recorded, list) else []
    return [name for name in names if isinstance(name, str) and _NAME.fullmatch(name)]


def _describe(run: RunRecord, step: int | None) -> Iterator[str]:
    config = run.config
    method = {"module": config.get("module"), "configuration": config.get("config")}
    method = {key: value for key, value in method.items() if value is not None}
    replaced = {other: key for key, other in _REPLACED.items() if config.get(key) not in _UNSET}
    told = [key for key in _OPTIONS if config.get(key) not in _UNSET and key not in replaced]
    method |= {key: config[key] for key in told}
    method |= {
        key: value
        for key, value in config.items()
        if key.startswith("model_converters.")
        and not key.endswith(_PATH)
        and value not in (None, "", [])
    }
    yield _table("Method", method)
    for section in sections([run]):
        if section.title in _FACTS:
            rows = [row for row in section.rows if row[0].partition(" (")[0] not in _UNTOLD]
            facts = {row[0]: row[1] for row in rows}
            if section.title == "Summary":
                facts = _steps(run, step) | facts
            yield _table(section.title, facts)
    if command := run.start.get("command"):
        yield f"## Command\n\n```bash\n{command}\n```\n"
        for key, by in replaced.items():
            if re.search(rf"--{re.escape(key)}\b", command):
                yield f"`--{key}` had no effect: `{by}` was {config[by]}.\n"


def _steps(run: RunRecord, step: int | None) -> dict[str, Any]:
    """Return the steps of the weights and of the last numbers, which may differ."""
    return {
        "step of these weights": "unknown" if step is None else step,
        "step of the last numbers": run.lines[-1]["step"],
    }


def _table(title: str, facts: Mapping[str, object]) -> str:
    rows = [f"| {key} | {_cell(value)} |" for key, value in facts.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *rows, ""])


def _cell(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
