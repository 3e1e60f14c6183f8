"""The files to damage and the commands that read them: the rows of the table."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.hostile_inputs.mutators import (
    DAMAGING,
    DESTROYING,
    Mutator,
    changed_header,
    changed_json,
    changed_line,
    changed_yaml,
    hostile_archive,
    hostile_pickle,
    hostile_template,
    hostile_yaml,
)
from tests.hostile_inputs.world import (
    Command,
    adapter_run,
    chat_run,
    preference_run,
    recipe,
    resume,
    show,
    train,
)


@dataclass(frozen=True)
class Subject:
    """One kind of file.

    Args:
        name: name in the table.
        files: patterns relative to the world; a case damages one file.
        commands: a case runs one of these.
        mutators: mutators for this kind; all kinds also get `DAMAGING` and `REPLACEMENTS`.
        noticed: whether a destroyed file must be reported.
        result: a metrics.jsonl whose last loss must be the undamaged world's in all successful
            cases, since torchtitan has digests of the file or rebuilds it; empty if other content
            is another valid input.
        forged: the checkpoint whose manifest and marker are made to agree with the hostile file.
    """

    name: str
    files: Sequence[str]
    commands: Sequence[Command]
    mutators: Sequence[Mutator] = ()
    noticed: bool = True
    result: str = ""
    forged: str = ""


def _generate(folder: str) -> Command:
    return ["generate", "--checkpoint", folder, "--prompt", "a b", "--max_new_tokens", "2"]


def _convert(folder: str, to: str) -> Command:
    return ["convert", folder, "converted", "--to", to]


def _step(data: str) -> Command:
    return train("out", data, training__steps=1)


_ADAPTER = "adapted/checkpoint/step-1/adapter"
_INSPECT = ("inspect", "--tensors")
_NEWEST = "run/checkpoint/step-2"
_RESUMED = "run/metrics.jsonl"
_WEIGHTS = (_generate("hf"), _convert("hf", "meta"), [*_INSPECT, "hf"])
_DCP = (f"{_NEWEST}/.metadata", f"{_NEWEST}/__0_0.distcp")
_READ = ([*_INSPECT, _NEWEST], _generate(_NEWEST), _convert(_NEWEST, "hf"))
_ANY_JSON = (changed_json,) * 6
_REPORTS = (["report", "run", "--output", "run.html"], ["report", "--text", "run"])

SUBJECTS = (
    Subject("config.json", ["hf/config.json"], [_generate("hf"), _convert("hf", "dcp")], _ANY_JSON),
    Subject(
        "generation_config.json",
        ["hf/generation_config.json"],
        [_generate("hf"), _convert("hf", "meta")],
        _ANY_JSON,
    ),
    Subject(
        "tokenizer.json", ["hf/tokenizer.json"], [_generate("hf"), _convert("hf", "hf")], _ANY_JSON
    ),
    Subject(
        "tokenizer_config.json",
        ["hf/tokenizer_config.json"],
        [_generate("hf"), _convert("hf", "hf")],
        _ANY_JSON,
    ),
    Subject(
        "chat template",
        ["hf/chat_template.jinja"],
        [["chat", "--checkpoint", "hf", "--max_new_tokens", "2"]],
        (hostile_template,) * 16,
        noticed=False,
    ),
    Subject("safetensors", ["hf/model.safetensors"], _WEIGHTS, (changed_header,) * 6),
    Subject(
        "index of safetensors",
        ["sharded/model.safetensors.index.json"],
        [_generate("sharded"), _convert("sharded", "meta"), [*_INSPECT, "sharded"]],
        _ANY_JSON,
    ),
    Subject(
        "pytorch_model.bin",
        ["bin/pytorch_model.bin"],
        [_generate("bin"), _convert("bin", "hf"), [*_INSPECT, "bin"]],
        (hostile_archive, hostile_archive, hostile_pickle),
    ),
    Subject(
        "Meta's .pth",
        ["meta/consolidated.00.pth"],
        [_generate("meta"), _convert("meta", "hf"), [*_INSPECT, "meta"]],
        (hostile_archive, hostile_archive, hostile_pickle),
    ),
    Subject(
        "params.json", ["meta/params.json"], [_generate("meta"), _convert("meta", "hf")], _ANY_JSON
    ),
    Subject(
        "DCP, resumed",
        _DCP,
        [resume()],
        (hostile_pickle, hostile_pickle, hostile_archive),
        result=_RESUMED,
    ),
    Subject(
        "DCP, read",
        _DCP,
        _READ,
        (hostile_pickle, hostile_pickle, hostile_archive),
    ),
    Subject(
        "DCP, read, forged",
        _DCP,
        _READ[1:],
        (hostile_pickle, hostile_pickle, hostile_archive),
        forged=_NEWEST,
    ),
    Subject(
        "DCP, loaded, forged",
        _DCP,
        [
            resume(),
            train("out", "rows.jsonl", training__steps=1, checkpoint__initial_load_path=_NEWEST),
            _READ[0],
        ],
        (hostile_pickle, hostile_pickle, hostile_archive),
        noticed=False,
        forged=_NEWEST,
    ),
    Subject(
        "marker and manifest",
        [f"{_NEWEST}/complete.json", f"{_NEWEST}/manifest.json"],
        [resume()],
        _ANY_JSON,
        result=_RESUMED,
    ),
    Subject(
        "assets of a checkpoint",
        [f"{_NEWEST}/assets/model.json", f"{_NEWEST}/assets/tokenizer.json"],
        [resume()],
        _ANY_JSON,
        result=_RESUMED,
    ),
    Subject(
        "assets/model.json, read",
        [f"{_NEWEST}/assets/model.json"],
        [_generate(_NEWEST)],
        _ANY_JSON,
        noticed=False,
    ),
    Subject(
        "records of a run",
        ["run/metrics.jsonl", "run/ledger.jsonl"],
        [resume()],
        (changed_line,) * 6,
        noticed=False,
    ),
    Subject(
        "events of a run",
        ["run/events.jsonl"],
        [*_REPORTS, resume()],
        (changed_line,) * 12,
        noticed=False,
    ),
    Subject(
        "records of a run, reported",
        ["run/metrics.jsonl", "run/completions.jsonl"],
        _REPORTS,
        (changed_line,) * 12,
        noticed=False,
    ),
    Subject("ledger, shown", ["run/ledger.jsonl"], [show()], (changed_line,) * 12, noticed=False),
    Subject(
        "foresight, reported", ["run/foresight.json"], _REPORTS, (changed_json,) * 12, noticed=False
    ),
    Subject(
        "configuration, reported",
        ["run/config.yaml"],
        _REPORTS,
        (hostile_yaml, changed_yaml) * 6,
        noticed=False,
    ),
    Subject(
        "marker, reported",
        [f"{_NEWEST}/complete.json"],
        _REPORTS,
        (changed_json,) * 12,
        noticed=False,
    ),
    Subject("finished stage", ["stages/first/finished.json"], [recipe()], (changed_json,) * 12),
    Subject("recipe", ["recipe.yaml"], [recipe()], (hostile_yaml,) * 8 + (changed_yaml,) * 8),
    Subject("rows of text", ["rows.jsonl"], [_step("rows.jsonl")], (changed_line,) * 6),
    Subject("conversations", ["chats.jsonl"], [chat_run("out")], (changed_line,) * 6),
    Subject("parquet", ["rows.parquet"], [_step("rows.parquet")]),
    Subject("other rows", ["rows.csv"], [_step("rows.csv")], noticed=False),
    Subject("compressed rows", ["rows.txt.gz"], [_step("rows.txt.gz")]),
    Subject(
        "saved dataset", ["saved/*.json", "saved/train/*"], [_step("saved")], (changed_json,) * 4
    ),
    Subject(
        "questions",
        ["questions.jsonl"],
        [["eval", "--checkpoint", "hf", "--tasks", "questions.jsonl"]],
        (changed_line,) * 6,
    ),
    Subject(
        "tokenizer.model",
        ["tiktoken/tokenizer.model"],
        [
            [
                *_step("rows.jsonl"),
                "--hf_assets_path",
                "tiktoken",
                "--tokenizer.split_pattern",
                r"\s?\S+|\s+",
            ]
        ],
    ),
    Subject(
        "SentencePiece model",
        ["pieces/tokenizer.model"],
        [[*_step("rows.jsonl"), "--hf_assets_path", "pieces"]],
    ),
    Subject(
        "tekken.json",
        ["tekken/tekken.json"],
        [[*_step("rows.jsonl"), "--hf_assets_path", "tekken"]],
        _ANY_JSON,
    ),
    Subject(
        "adapter's configuration",
        [f"{_ADAPTER}/adapter_config.json"],
        [adapter_run("out", _ADAPTER)],
        _ANY_JSON,
    ),
    Subject(
        "adapter",
        [f"{_ADAPTER}/adapter_model.safetensors"],
        [adapter_run("out", _ADAPTER)],
        (changed_header,) * 6,
    ),
    Subject(
        "configuration (YAML)",
        ["run.yaml"],
        [["train", "--config_file", "run.yaml", "--dump_folder", "out", "--training.steps", "1"]],
        (hostile_yaml,) * 8 + (changed_yaml,) * 4,
    ),
    Subject(
        "token cache",
        ["cache/tokens/*/*"],
        [_step("rows.jsonl")],
        _ANY_JSON[:1],
        result="out/metrics.jsonl",
    ),
    Subject(
        "sample cache", ["cache/samples/*/*"], [chat_run("out")], (), result="out/metrics.jsonl"
    ),
    Subject(
        "cache of a reference",
        ["cache/reference/*/*.safetensors", "cache/reference/*.complete"],
        [preference_run("out")],
        (changed_header,) * 2,
        result="out/metrics.jsonl",
    ),
)

ALWAYS: tuple[Mutator, ...] = DAMAGING
DESTRUCTIVE = frozenset(mutator.__name__ for mutator in DESTROYING)
