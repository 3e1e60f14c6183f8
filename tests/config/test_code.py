"""No file runs code: every option that names code is marked by its type, and only trusted places
may set it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from tests.config.test_options import places_in_configurations
from tests.conftest import PROJECT
from tests.parsed import tree_of
from torchtitan.cli.main import main
from torchtitan.components.data.finetuning.functions import load_function
from torchtitan.components.rollout.rewards import find_reward
from torchtitan.components.rollout.rollout import RolloutConfig
from torchtitan.config import ConfigManager
from torchtitan.config.code import CacheFolder, CodeReference, NamesCode, RunFolder, untrusted_in
from torchtitan.config.configurable import from_plain
from torchtitan.tools.errors import UserError

RL = {"module": "rl", "config": "debugmodel"}


@pytest.fixture
def code(tmp_path, monkeypatch) -> Path:
    """A folder, made the current one, with a module that leaves the file `ran` when it is
    imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "marker.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "def score(prompt, completion, row): return 1.0\n"
        "async def roll(row, engine): pass\n"
    )
    return tmp_path


def parse(content: dict, *words: str):
    Path("run.yaml").write_text(yaml.safe_dump(content))
    return ConfigManager().parse_args(["--config_file", "run.yaml", *words]).config


# --- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rewards": ["marker.py:score"]}, "--rewards marker.py:score"),
        ({"rewards": "marker:score"}, "--rewards marker:score"),
        ({"rewards": ["number", "./marker.py:score"]}, "--rewards number ./marker.py:score"),
        ({"rewards": ["number=.py:score"]}, "--rewards number=.py:score"),
        ({"rollout": {"function": "marker:roll"}}, "--rollout.function marker:roll"),
        ({"rollout.function": "marker.py:roll"}, "--rollout.function marker.py:roll"),
        ({"dataloader": {"format": "marker.py:score"}}, "--dataloader.format marker.py:score"),
        (
            {"rollout": {"function": "marker:roll"}, "rewards": ["marker:score"]},
            "--rollout.function marker:roll --rewards marker:score",
        ),
    ],
)
def test_a_file_names_no_code_unless_the_command_line_does_too(code, options, words):
    with pytest.raises(
        UserError, match="code that is neither built in nor installed; if you trust it"
    ) as raised:
        parse(RL | options)
    assert str(raised.value).endswith(words)
    assert not (code / "ran").exists()
    config = parse(RL | options, *words.split())
    given = [*config.rewards, config.rollout.function, config.dataloader.format]
    assert {word for word in words.split() if ":" in word} <= set(given)


def test_another_value_on_the_command_line_replaces_the_one_of_the_file(code):
    content = RL | {"rewards": ["marker.py:score"], "rollout": {"function": "marker.py:roll"}}
    assert parse(content, "--rewards", "number", "--rollout.function=").rewards == ["number"]
    with pytest.raises(UserError, match="'rollout.function' in run.yaml"):
        parse(content, "--rewards", "number")
    # Permission covers neither other code nor another option.
    with pytest.raises(UserError, match="'rewards' in run.yaml"):
        parse(RL | {"rewards": ["marker.py:score"]}, "--dataloader.format", "marker.py:score")


def test_built_in_names_are_allowed(code):
    rewards = ["number", "pattern=(?i:yes): no", "length=20", "reward_model=a:b"]
    assert parse(RL | {"rewards": rewards, "dataloader": {"format": "auto"}}).rewards == rewards
    for name in ("pattern.py:score", "length=marker.py:score", "reward_model=marker.py:score"):
        with pytest.raises(UserError):
            find_reward(name)
    assert not (code / "ran").exists()


def test_a_resumed_run_names_its_code_again(code):
    given = ["--module", "rl", "--config", "debugmodel", "--rewards", "marker.py:score", "number"]
    resolved = ConfigManager().parse_args(given)
    resolved.save(code / "config.yaml")
    with pytest.raises(
        UserError, match="'rewards' in config.yaml is .* too: --rewards marker.py:score number$"
    ):
        ConfigManager().parse_args(["--config_file", "config.yaml"])
    again = ConfigManager().parse_args(
        ["--config_file", "config.yaml", "--rewards", "marker.py:score", "number"]
    )
    assert again == resolved and not (code / "ran").exists()


def test_code_of_the_configuration_function_is_trusted(code, monkeypatch):
    package = code / "with_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "config_registry.py").write_text(
        "from torchtitan.experiments.rl.config_registry import rl_debugmodel as base\n"
        "def small():\n"
        "    config = base()\n"
        "    config.rewards = ['marker.py:score']\n"
        "    return config\n"
    )
    chosen = ["--module", str(package), "--config", "small"]
    ConfigManager().parse_args(chosen).save(code / "config.yaml")
    config = ConfigManager().parse_args([*chosen, "--config_file", "config.yaml"]).config
    assert config.rewards == ["marker.py:score"]


def test_python_may_name_code(code):
    assert RolloutConfig(function="marker.py:roll").find_function().__name__ == "roll"
    assert (code / "ran").exists()


def test_records_of_checkpoints_name_no_code():
    with pytest.raises(
        UserError, match="'function' names 'a:b', code that is neither .*, which a file may not"
    ):
        from_plain(RolloutConfig, {"function": "a:b"})
    assert from_plain(RolloutConfig, {"function": ""}).function == ""


def test_what_is_no_reference_loads_nothing(code):
    for name in ("marker", "marker.py", ""):
        assert untrusted_in(name, CodeReference) == {}
        with pytest.raises(UserError, match="must have the form"):
            load_function(name)
    assert list(untrusted_in({"a": ["b", "c:d"]}, dict[str, list[CodeReference]])) == ["c:d"]
    assert untrusted_in(None, CodeReference | None) == {}
    assert NamesCode(built_in=("re=",)).needs_trust("x:re=") and not NamesCode(
        built_in=("re=",)
    ).needs_trust("re=x:y")


def test_a_recipe_shows_all_commands_before_the_first_runs(code, capsys):
    stages = [
        {"name": "one", "run": "generate --wrong"},
        {"name": "two", "run": "train --rewards marker.py:score", "base": "gone/model"},
    ]
    Path("recipe.yaml").write_text(yaml.safe_dump({"stages": stages}))
    assert main(["run", "recipe.yaml"]) == 2
    shown = capsys.readouterr().err
    assert "one: torchtitan generate --wrong" in shown
    assert "two: torchtitan train --rewards marker.py:score (base: gone/model)" in shown
    assert not (code / "ran").exists()


@pytest.mark.parametrize(
    "url", ["reference://x", "memory://a::reference://b", "generic://x", "filecache::file://x"]
)
def test_stores_that_read_what_a_file_names_are_refused(url):
    from torchtitan.components.checkpoint.filesystem import open_store

    if "::" in url and not url.startswith("memory"):
        pytest.skip("no URL, but a path")
    with pytest.raises(UserError, match="names a store that reads other files"):
        open_store(url)


@pytest.mark.parametrize(
    "folder", ["/tmp/x", "../x", "a/../../x", ".", "", "./", "~/x", "s3://bucket/x", "a/.."]
)
def test_folders_outside_of_a_run(folder):
    assert list(untrusted_in(folder, RunFolder)) == [folder]
    assert untrusted_in("inside/../x", RunFolder) == {}


FOLDERS = {
    "checkpoint.folder": "memory://x",
    "metrics.save_tb_folder": "/tmp/x",
    "profiling.save_traces_folder": "../x",
    "profiling.save_memory_snapshot_folder": "a/../../x",
}


def test_folders_of_a_run_stay_in_it(code):
    chosen = {"module": "llama3", "config": "debugmodel"}
    words = [word for key, folder in FOLDERS.items() for word in (f"--{key}", folder)]
    with pytest.raises(
        UserError, match="'metrics.save_tb_folder' in .*, no folder inside the dump folder"
    ) as raised:
        parse(chosen | FOLDERS)
    assert str(raised.value).endswith(f"set it on the command line too: {' '.join(words)}")
    assert parse(chosen | FOLDERS, *words) == parse(chosen, *words)
    assert parse(chosen | dict.fromkeys(FOLDERS, "inside/x")).metrics.save_tb_folder == "inside/x"


def test_caches_stay_in_the_cache(code, monkeypatch):
    monkeypatch.setenv("TORCHTITAN_CACHE", str(code / "cache"))
    (code / "cache").mkdir()
    (code / "cache" / "link").symlink_to("/tmp")
    chosen = {"module": "distillation", "config": "debugmodel"}
    for folder in (
        "/tmp/x",
        "../x",
        "~/x",
        "other",
        "cache/../x",
        "cache/link/x",
        "s3://bucket",
        "a\0b",
    ):
        assert untrusted_in(folder, CacheFolder)
        for key in ("dataloader.cache_dir", "teacher.cache") if "\0" not in folder else ():
            with pytest.raises(
                UserError, match=f"'{key}' in run.yaml .*, no folder inside the cache .*--{key} "
            ):
                parse(chosen | {key: folder})
            given = parse(chosen | {key: folder}, f"--{key}", folder)
            assert folder in (given.dataloader.cache_dir, given.teacher.cache)
    for folder in ("", str(code / "cache"), "cache/mine"):
        assert parse(chosen | {"dataloader": {"cache_dir": folder}}).dataloader.cache_dir == folder


READ_ONLY = {
    "CaptionedImageDataLoader.Config.encoders": "frozen encoders",
    "CheckpointConfig.initial_load_path": "weights to start from",
    "Answers.Config.dataset": "prompts",
    "Evaluation.Config.files": "questions",
    "LoRA.Config.adapter_path": "adapters to start from",
    "PlacedLoader.Config.dataset": "data",
    "RowsDataLoader.Config.chat_template": "a name, or a file of a template",
    "RowsDataLoader.Config.dataset": "data",
    "PretrainDataLoader.Config.dataset": "data",
    "SFTDataLoader.Config.dataset": "data",
    "ReferenceConfig.path": "weights of a frozen model",
    "RunConfig.hf_assets_path": "a model",
    "TeacherConfig.path": "weights of a frozen model",
    "Validator.Config.dataset": "data",
}
"""Options of files and folders that a run reads, and never writes to."""

OF_THE_RUN = {"RunConfig.dump_folder": "the place of all others"}

NO_PATHS = {
    "ActivationCheckpointConfig.selective_option",
    "CaptionedImageDataLoader.Config.buckets",
    "CaptionedImageDataLoader.Config.caption_column",
    "CheckpointConfig.exclude_from_loading",
    "CompileConfig.backend",
    "CheckpointConfig.best_metric",
    "EarlyStopping.Config.metric",
    "Evaluation.Config.tasks",
    "LRScheduler.Config.points",
    "ModelSpec.flavor",
    "ModelSpec.formats",
    "ModelSpec.module",
    "ModelSpec.name",
    "Optimizer.Config.param_groups",
    "ParallelismConfig.module_fqns_per_model_part",
    "ParamGroup.lr_points",
    "ParamGroup.pattern",
    "PlacedLoader.Config.image_column",
    "PlacedLoader.Config.split",
    "RowsDataLoader.Config.columns",
    "PreferenceLoss.Config.mix",
    "PretrainDataLoader.Config.text_column",
    "PretrainedTokenizer.Config.added_tokens",
    "PretrainedTokenizer.Config.split_pattern",
    "RolloutConfig.url",
    "Samples.Config.messages",
    "Samples.Config.prompts",
    "LabeledImageDataLoader.Config.classes",
    "LabeledImageDataLoader.Config.label_column",
    "LayerConverter.Config.exclude",
    "LayerConverter.Config.include",
    "LoRA.Config.alpha_pattern",
    "LoRA.Config.base_path",
    "LoRA.Config.include",
    "LoRA.Config.rank_pattern",
    "QLoRA.Config.dequantized",
    "QLoRA.Config.forms",
    "RunConfig.registered_as",
    "SFTDataLoader.Config.token_range",
    "SFTDataLoader.Config.weight_schedule",
    "ShardingPlan.attention",
    "ShardingPlan.tensor",
    "TokenizingDataLoader.Config.split",
    "TrainingConfig.batch_schedule",
    "TrainingConfig.seq_len_schedule",
    "TrainingConfig.skip_data",
    "ClassConfig.document",
}
"""Options of other texts."""


def test_every_option_of_a_folder_that_is_written_has_its_type():
    """A new option of texts or paths is of such a type, or is listed above."""
    untyped = set()
    for cls in places_in_configurations():
        for key, kind in own_text_options(cls).items():
            if not any(untrusted_in(value, kind) for value in ("/x", "a:b")):
                untyped.add(key)
    assert untyped == READ_ONLY.keys() | OF_THE_RUN | NO_PATHS
    assert untrusted_in("/x", RunFolder) and untrusted_in("/x", CacheFolder)


def own_text_options(cls: type) -> dict[str, object]:
    """Types of a configuration's options that hold texts or paths, by the class that declares them
    and their name."""
    found = {}
    for name, kind in get_type_hints(cls, include_extras=True).items():
        owner = next(
            base for base in cls.__mro__ if name in base.__dict__.get("__annotations__", {})
        )
        if re.search(r"\bstr\b|Path", str(kind)) and name in {field.name for field in fields(cls)}:
            found[f"{owner.__qualname__}.{name}"] = kind
    return found


# --- the source
# --------------------------------------------------------------------------------------------------

LOADERS = {
    "import_module",
    "__import__",
    "exec",
    "eval",
    "compile",
    "spec_from_file_location",
    "exec_module",
    "SourceFileLoader",
    "run_path",
    "run_module",
    "resolve_name",
    "entry_points",
    "load_library",
    "CDLL",
    "load_function",
    "load_config_function",
    "import_package",
    "trusted_module",
    "Popen",
    "system",
    "check_output",
    "simple_evaluate",
    "TaskManager",
    "get_class_from_dynamic_module",
}
"""Functions whose argument names code to run."""

REVIEWED = {
    (
        "components/data/finetuning/functions.py",
        "import_module",
    ): "by load_function, whose calls are traced",
    ("components/data/finetuning/functions.py", "spec_from_file_location"): "by load_function",
    ("components/data/finetuning/functions.py", "exec_module"): "by load_function",
    (
        "config/registry.py",
        "import_module",
    ): "a module of the command line, built in or installed (is_trusted)",
    ("config/registry.py", "entry_points"): "of installed packages",
    ("config/manager.py", "load_config_function"): "--module, of a file only after is_trusted",
    ("cli/model_options.py", "import_package"): "--module of the command line",
    ("cli/main.py", "import_module"): "of the table COMMANDS",
    ("config/option_table.py", "import_module"): "of the package's own table of options",
    ("models/common/fused_recurrences.py", "import_module"): "of the table KERNELS",
    ("tools/deferred.py", "import_module"): "of a table of a package's names",
    ("tools/torch_private.py", "import_module"): "of a table of torch's modules",
    ("tools/torchao.py", "import_module"): "a part of torchao",
    ("components/rollout/math_reward.py", "Popen"): "Python with a file of this package",
    ("tools/process.py", "CDLL"): "the C library of this process",
    (
        "components/evaluation/lm_eval_adapter.py",
        "TaskManager",
    ): "--include_path of the command line, or a CodeFolder",
    ("cli/ls.py", "trusted_module"): "of built-in families",
    (
        "models/families.py",
        "trusted_module",
    ): "imports only what is built in, installed or imported",
    (
        "models/pretrained.py",
        "trusted_module",
    ): "imports only what is built in, installed or imported",
    (
        "protocols/conversion.py",
        "trusted_module",
    ): "imports only what is built in, installed or imported",
    ("cli/child.py", "Popen"): "this program",
    ("cli/launch.py", "Popen"): "this program",
    ("foresight/this_machine.py", "Popen"): "this program",
    (
        "models/transformers/description.py",
        "get_class_from_dynamic_module",
    ): "only with the environment variable",
    ("components/checkpoint/writer_process.py", "Popen"): "this program",
}
"""Calls in a file whose argument is not an option, with the reason."""

Code = dict[str, ast.Module]


def callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def is_loader(call: ast.Call) -> bool:
    """Methods such as `model.eval` and `re.compile` are not the functions of Python."""
    return callee(call) in LOADERS and not (
        isinstance(call.func, ast.Attribute) and callee(call) in ("eval", "exec", "compile")
    )


class Function:
    """A function, method or module: what it assigns, and what it calls."""

    def __init__(self, file: str, name: str, node: ast.AST):
        self.file, self.name, self.node = file, name, node
        arguments = getattr(node, "args", None)
        self.parameters = (
            [each.arg for each in (*arguments.args, *arguments.kwonlyargs)] if arguments else []
        )
        self.assigned: dict[str, list[ast.AST]] = {}
        self.calls: list[ast.Call] = []
        for each in ast.walk(node) if name else outside_functions(node):
            if isinstance(each, ast.Call):
                self.calls.append(each)
            targets = [*getattr(each, "targets", []), getattr(each, "target", None)]
            source = getattr(each, "value", None) or getattr(each, "iter", None)
            for part in (part for target in targets if target for part in ast.walk(target)):
                if isinstance(part, ast.Name) and isinstance(source, ast.AST):
                    self.assigned.setdefault(part.id, []).append(source)


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from outside_functions(child)


def functions_of(code: Code) -> list[Function]:
    """Return all functions by their name (`__init__` by the name of its class), and the modules."""
    found = []
    for file, tree in code.items():
        found.append(Function(file, "", tree))
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    name = child.name
                    if isinstance(node, ast.ClassDef) and name == "__init__":
                        name = node.name
                    found.append(Function(file, name, child))
    return found


def fields_behind(
    value: ast.AST, within: Function, functions: list[Function], seen: set[tuple[int, int]]
) -> set[str]:
    """Return what an expression in a function is computed from: names of attributes, through
    variables and callers."""
    # also a method of an option, as in `config.reward.partition(":")`
    if isinstance(value, ast.Attribute):
        inner = value.value
        return {
            value.attr,
            *(() if isinstance(inner, ast.Name) else fields_behind(inner, within, functions, seen)),
        }
    if (place := (id(value), id(within))) in seen:
        return set()
    seen.add(place)
    if not isinstance(value, ast.Name):
        parts = [
            fields_behind(part, within, functions, seen) for part in ast.iter_child_nodes(value)
        ]
        return set().union(*parts)
    found = set()
    for source in within.assigned.get(value.id, []):
        found |= fields_behind(source, within, functions, seen)
    if value.id in within.parameters and within.name:
        found |= given_by_callers(value.id, within, functions, seen)
    return found


def given_by_callers(
    parameter: str, function: Function, functions: list[Function], seen: set[tuple[int, int]]
) -> set[str]:
    found: set[str] = set()
    parameters = [each for each in function.parameters if each not in ("self", "cls")]
    for caller in functions:
        for call in (call for call in caller.calls if callee(call) == function.name):
            given = dict(zip(parameters, call.args, strict=False)) | {
                word.arg: word.value for word in call.keywords
            }
            if parameter in given:
                found |= fields_behind(given[parameter], caller, functions, seen)
    return found


def strange_calls(code: Code, options: dict[str, list]) -> list[str]:
    """Return the calls that load code which an option, or something else that was not reviewed,
    names. `options` are the types of all options with a name."""
    functions = functions_of(code)
    faults = []
    for function in functions:
        for call in filter(is_loader, function.calls):
            if (function.file, callee(call)) in REVIEWED:
                continue
            place = f"{function.file}: {callee(call)} runs"
            named = (
                fields_behind(ast.Tuple(call.args, ast.Load()), function, functions, set())
                & options.keys()
            )
            wrong = sorted(
                each
                for each in named
                if not all(untrusted_in("a:b", kind) for kind in options[each])
            )
            faults += [f"{place} the code that the option {each} names" for each in wrong]
            if not named and not all(isinstance(argument, ast.Constant) for argument in call.args):
                faults.append(f"{place} code that no option names")
    return faults


def option_types() -> dict[str, list]:
    types: dict[str, list] = {}
    for cls in places_in_configurations():
        hints = get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            if "str" in str(hints[field.name]):
                types.setdefault(field.name, []).append(hints[field.name])
    return types


def sources() -> Code:
    package = PROJECT / "torchtitan"
    paths = [path for path in package.rglob("*.py") if "templates" not in path.parts]
    return {path.relative_to(package).as_posix(): tree_of(path) for path in paths}


def test_options_that_name_code_have_its_type():
    assert strange_calls(sources(), option_types()) == []


MISTAKES = {
    "import_module": "class A:\n    def build(self):\n        import_module(self.config.plugin)",
    "exec": "def run(config):\n    for text in config.plugin:\n        exec(text)",
    "load_function": "def find(name):\n    return load_function(name)\ndef use(config):\n    "
    "find(name=config.plugin)",
    "run_path": "class A:\n    def __init__(self, names):\n        [run_path(name) for name in "
    "names]\n"
    "def use(config):\n    names = list(config.plugin)\n    A(names)",
    "resolve_name": "async def use(config):\n    name, _, rest = config.plugin.partition(':')\n    "
    "resolve_name(name)",
}


@pytest.mark.parametrize(("loader", "source"), MISTAKES.items(), ids=list(MISTAKES))
def test_an_option_of_another_type_is_found(loader, source):
    code = {"new.py": ast.parse(source)}
    fault = f"new.py: {loader} runs the code that the option plugin names"
    assert strange_calls(code, {"plugin": [list[str]]}) == [fault]
    assert strange_calls(code, {"plugin": [list[str] | CodeReference]}) == []
    assert strange_calls(code, {}) == [f"new.py: {loader} runs code that no option names"]
    assert strange_calls({"new.py": ast.parse("def f():\n    import_module('os')")}, {}) == []
