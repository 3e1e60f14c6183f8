"""Reading a configuration file or command line of another library, and finding out whose it is."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.config.migration.outcome import as_list, flat, plain
from torchtitan.config.migration.torchtitan_files import values_in_python
from torchtitan.config.migration.trl import method_of_command
from torchtitan.config.yaml_files import read_config_file
from torchtitan.tools.errors import UserError, os_errors_as
from torchtitan.tools.files import regular_file

KINDS = ("torchtune", "torchtitan", "axolotl", "llama_factory", "trl", "transformers", "litgpt")

_MOST_BYTES = 2**20

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "torch.distributed.run")
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
_HOSTS = ("nnodes", "num_nodes")

_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")
"""A value in the command line of torchtune, such as optimizer.lr=1e-4."""

_BEFORE_OPERATOR = re.compile(
    r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\$\([^)]*\)|`[^`]*`|\\.|[^'"`\\|;&<>])*""", re.DOTALL
)
"""Words up to an operator of the shell outside of quotes."""


_TRAINING_SCRIPT = re.compile(r"^(?:from|import) (unsloth|trl|transformers|peft)\b", re.MULTILINE)


class ForeignConfig(NamedTuple):
    """A configuration of another library."""

    kind: str
    values: dict[str, Any]
    """Dotted key → value."""
    command: str
    """Words before the arguments of a command line, in lower case; "" for other files."""

    devices: int = 1
    """Processes that the command starts."""


def read_foreign(path: Path, kind: str = "", name: str = "") -> ForeignConfig:
    """Read a file: YAML, JSON, TOML, Python (`name`: the function), or a shell script with one
    command.

    Raises:
        UserError: if it cannot be read, or its kind is not found and not given.
    """
    suffix = path.suffix.lower()
    if suffix in (".toml", ".py", ".json", ".sh", ".bash", ".txt"):
        text = _text(path)
        if suffix == ".toml":
            return ForeignConfig(kind or "torchtitan", flat(_parsed_toml(text, path)), "")
        if suffix == ".py":
            if found := _TRAINING_SCRIPT.search(text):
                raise UserError(
                    f"{path} is a script with {found[1]}, which is not run here; write the "
                    "arguments of its trainer to a YAML file, such as learning_rate: 2e-4, with "
                    "model_name_or_path and dataset_name"
                )
            return ForeignConfig(kind or "torchtitan", values_in_python(text, name, str(path)), "")
        if suffix != ".json":
            return read_command(_words(text, path), kind)
        document = _parsed_json(text, path)
    else:
        document = read_config_file(path, str(path))
    values = flat(document)
    return ForeignConfig(kind or kind_of(values, str(path)), values, "")


def read_command(words: Sequence[str], kind: str = "") -> ForeignConfig:
    """Read a command line. A YAML file that it names (`--config`, or the only word) is read
    first."""
    words, launcher = _without_launcher(words)
    start = _first_option(words)
    command = " ".join(words[:start])
    if program := _program_of(words[:start]):
        raise _other_file("the command", program)
    assigned: dict[str, object] = {}
    toml = ""
    for word in words[:start]:
        name, is_variable, value = word.partition("=")
        if is_variable and name == "CONFIG_FILE":
            toml = value
        elif is_variable and name in ("MODULE", "CONFIG"):
            words = [*words, f"--{name.lower()}", value]
        elif is_variable and name in ("NGPU", "NPROC_PER_NODE"):
            launcher["nproc_per_node"] = plain(value)
        elif is_variable and not name.isupper():
            assigned[name] = plain(value)  # as LLaMA-Factory's command line has them
    arguments = words[start:]
    if words[:1] == ["tune"]:  # whose values follow the options
        found = [word for word in arguments if _ASSIGNMENT.match(word)]
        assigned |= {name: plain(value) for name, _, value in (one.partition("=") for one in found)}
        arguments = [word for word in arguments if word not in found]
    given = {**assigned, **_arguments(arguments)}
    if words[:1] == ["tune"]:
        # The name of the recipe follows the options of torchrun.
        of_torchrun = [key for key in (*_PROCESSES, *_HOSTS) if key in given]
        launcher |= {key: plain(as_list(given.pop(key))[0]) for key in of_torchrun}
    command = command.lower()
    if words[:1] == ["litgpt"] and len(words[:start]) > 2:
        name = "model_name" if words[1] == "pretrain" else "checkpoint_dir"
        given.setdefault(name, words[2])
    if _runs_trl(command) and "num_processes" in given:
        launcher["num_processes"] = given.pop("num_processes")
    devices = _devices(launcher)
    files = [word for word in words[:start] if word.endswith((".yaml", ".yml", ".json"))]
    if str(given.get("config", "")).endswith((".yaml", ".yml")):
        files.append(str(given.pop("config")))
    kind = kind or _kind_of_command(command)
    files += [file for file in (str(given.pop("job.config_file", "")), toml) if file][:1]
    for file in files:
        base = read_foreign(Path(file), kind)
        return ForeignConfig(kind or base.kind, {**base.values, **given}, command, devices)
    return ForeignConfig(kind or kind_of(given, "the command"), given, command, devices)


def _first_option(words: Sequence[str]) -> int:
    return next((place for place, word in enumerate(words) if word.startswith("--")), len(words))


def _without_launcher(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words from the script or module on that a launcher such as torchrun starts, and
    the launcher's own arguments."""
    before = [word.rpartition("/")[2] for word in words[: _first_option(words)]]
    if not set(before) & set(_LAUNCHERS):
        return list(words), {}
    for place, word in enumerate(words):
        is_module = word in ("-m", "--module") and words[place + 1 : place + 2] not in (
            ["torch.distributed.run"],
            ["accelerate.commands.launch"],
            [],
        )
        if word.endswith(".py") or is_module:
            return list(words[place + is_module :]), _arguments(words[:place])
    return list(words), {}


def _devices(launcher: Mapping[str, Any]) -> int:
    """Return the processes that a launcher starts, on all hosts. accelerate counts all of them."""
    processes = {key: launcher[key] for key in _PROCESSES if key in launcher}
    hosts = {key: launcher[key] for key in _HOSTS if key in launcher}
    if "num_processes" in processes:
        hosts = {}
    for key, number in {**processes, **hosts}.items():
        if type(number) is not int or number < 1:
            raise UserError(f"--{key} {number}: write a number, which multiplies the batch")
    return max([1, *processes.values()]) * max([1, *hosts.values()])


def kind_of(values: Mapping[str, object], name: str) -> str:
    """Return the library whose names a file has. Raise `UserError` if none has them, or another
    program."""
    sections = {key.partition(".")[0] for key in values}
    for program, keys in _OTHER_FILES.items():
        if keys <= sections:
            raise _other_file(name, program)
    if any(key.endswith("_component_") for key in values):
        return "torchtune"
    if "base_model" in values:
        return "axolotl"
    of_factory = {"stage", "finetuning_type", "export_dir"}
    if of_factory & sections and "model_name_or_path" in values:
        return "llama_factory"
    if {"checkpoint_dir", "model_name", "out_dir"} & sections and "train" in sections:
        return "litgpt"
    if {"job", "training", "model"} <= sections or {"training", "parallelism"} <= sections:
        return "torchtitan"
    if _TRL_NAMES & sections:
        return "trl"
    trainer = {"per_device_train_batch_size", "num_train_epochs", "learning_rate", "max_steps"}
    if "model_name_or_path" in values or len(trainer & sections) > 1:
        return "transformers"
    raise UserError(
        f"{name} has the names of none of {', '.join(KINDS)}; name its library with --from"
    )


_BESIDE = ("DeepSpeed", "accelerate")
_OTHER_FILES: Mapping[str, set[str]] = {
    "DeepSpeed": {"zero_optimization"},
    "accelerate": {"distributed_type"},
    "verl": {"actor_rollout_ref"},
    "NeMo": {"exp_manager"},
    "ms-swift": {"model", "train_type"},
}
"""Program whose files are not rewritten → sections that only its files have."""

_OTHER_COMMANDS = {"verl": "verl", "openrlhf": "OpenRLHF", "swift": "ms-swift", "nemo": "NeMo"}
"""First part of a word of a command → such a program."""


def _other_file(name: str, program: str) -> UserError:
    if program in _BESIDE:
        advice = (
            "which says how processes share the work; migrate the file of the training, with "
            "--devices N, the number of its processes"
        )
    else:
        advice = (
            "which torchtitan migrate does not read; torchtitan train answers the names of its "
            "options with ours"
        )
    return UserError(f"{name} belongs to {program}, {advice}")


def _program_of(command: Sequence[str]) -> str:
    """Return the program of `_OTHER_COMMANDS` that a command starts, "" for none."""
    firsts = [re.split("[./]", word.lower())[0] for word in command]
    return next((_OTHER_COMMANDS[first] for first in firsts if first in _OTHER_COMMANDS), "")


_TRL_NAMES = {
    *("use_peft", "load_in_4bit", "dataset_mixture", "dataset_mixer", "max_length"),
    *("assistant_only_loss", "completion_only_loss", "packing", "dataset_text_field"),
    *("beta", "loss_type", "num_generations", "reward_funcs", "reward_model_path"),
    *("max_completion_length", "max_prompt_length", "max_seq_length", "chat_template_path"),
}
"""Arguments of TRL that transformers lacks."""


def _runs_trl(command: str) -> bool:
    """Return whether a command starts TRL, or a script that is named after a method of TRL."""
    scripts = " ".join(word for word in command.split() if word.endswith(".py"))
    return re.search(r"\btrl\b", command) is not None or method_of_command(scripts) != ""


def _kind_of_command(command: str) -> str:
    marks = {
        "llamafactory": "llama_factory",
        "axolotl": "axolotl",
        "litgpt": "litgpt",
        "run_train.sh": "torchtitan",
        "torchtitan": "torchtitan",
    }
    found = next((kind for mark, kind in marks.items() if mark in command), "")
    return found or ("trl" if _runs_trl(command) else "")


def _arguments(words: Sequence[str]) -> dict[str, object]:
    """Return the values of `--key value ...`, `--key=value`, `--switch` and `--no_switch`."""
    values: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            name, is_assigned, value = word[2:].partition("=")
            key = name.replace("-", "_")
            values[key] = [value] if is_assigned else []
        elif key:
            values[key].append(word)
    single = {key: found[0] for key, found in values.items() if len(found) == 1}
    switches = [key for key, found in values.items() if not found]
    on = {key: True for key in switches if not key.startswith("no_")}
    off = {key.removeprefix("no_"): False for key in switches if key.startswith("no_")}
    several = {key: found for key, found in values.items() if len(found) > 1}
    return flat({**several, **single, **off, **on})


def _text(path: Path) -> str:
    regular_file(path, str(path))
    with os_errors_as(f"{path} cannot be read"):
        if (n_bytes := path.stat().st_size) > _MOST_BYTES:
            raise UserError(f"{path} has {n_bytes:,} bytes; the limit is {_MOST_BYTES:,}")
        return path.read_text(encoding="utf-8")


def _parsed_toml(text: str, path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _parsed_json(text: str, path: Path) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} must map names to values")
    return document


def _words(text: str, path: Path) -> list[str]:
    """Return the words of the first command with arguments."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    commands = [command for line in lines for command in _commands(line)]
    command = next((one for one in commands if " --" in one), "")
    command = command or next((one for one in commands if re.search(r"\.ya?ml\b", one)), "")
    started = command.partition(" --")[0] or text
    if program := _program_of(started.split()):
        raise _other_file(f"the command in {path}", program)
    if not command:
        raise UserError(f"{path} has no command with arguments such as --learning_rate 1e-4")
    try:
        return shlex.split(command, comments=True)
    except ValueError as error:
        raise UserError(f"{path}: the command is not closed: {error}") from error


def _commands(line: str) -> list[str]:
    """Return the commands between the operators of a line, such as | or 2>&1."""
    found, place = [], 0
    while place < len(line):
        match = _BEFORE_OPERATOR.match(line, place)
        end = match.end() if match else place
        if line[end : end + 1] in ("'", '"', "`"):
            end = len(line)  # a quote that is not closed
        is_redirection = line[end : end + 1] in ("<", ">")
        command = line[place:end]
        found.append(re.sub(r"\s\d$", "", command) if is_redirection else command)
        place = end + 1
    return found
