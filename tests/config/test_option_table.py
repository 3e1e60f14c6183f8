"""Mistakes found, and help printed, without importing torch: the same as from the configuration
itself."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.test_config import parse
from tests.config.test_options import own_fields, places_in_configurations
from tests.options_table import as_text, configurations, table
from torchtitan.config import manager, option_table, registry
from torchtitan.config.configurable import describe, fits, leaves
from torchtitan.config.manager import ConfigManager
from torchtitan.config.option_table import (
    declaring_parts,
    files_of_declarations,
    known_configuration,
    source_digest,
)
from torchtitan.config.ranges import RANGES, check_range
from torchtitan.config.registry import (
    built_in_modules,
    is_written_for_folder,
    list_module,
    load_config_function,
    needs_assets,
)
from torchtitan.config.tyro_options import parse_by_tyro
from torchtitan.config.values import is_hidden, option_names, types_by_key
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingPlan
from torchtitan.tools.errors import UserError

VALUES = ["", "abc", "1", "-1", "1.5", "1e3", "nan", "true", "None", "none", "a,b"]


def test_table_is_current():
    assert json.loads(option_table.TABLE.read_text())["source"] == source_digest(), (
        "run python -m tests.options_table"
    )


@pytest.mark.slow
def test_table_has_the_options_of_every_configuration():
    assert option_table.TABLE.read_text() == as_text(table()), "run python -m tests.options_table"
    for module, name, config in configurations():
        known = known_configuration(module, name)
        for key, declared in types_by_key(config, type(config)).items():
            if key in known.fields and not is_hidden(declared):
                listed = known.types[key]
                assert describe(listed) == describe(declared)
                assert [fits(word, listed) for word in VALUES] == [
                    fits(word, declared) for word in VALUES
                ]
        for part in ("dataloader", "tokenizer"):
            if known.has([part]):
                built, own = known.component(part, {}), getattr(config, part)
                assert type(built) is type(own) and built == own


def test_digest_covers_what_declares_an_option(tmp_path, monkeypatch):
    file = tmp_path / "loss.py"
    monkeypatch.setattr(option_table, "_PACKAGE", tmp_path)
    monkeypatch.setattr(option_table, "built_in_modules", dict)
    source = (
        'Kind = Literal[\n    "a",\n]\n\n\nclass Loss:\n    class Config(\n        Base,\n    ):\n'
        '        weight: int = 1\n        """Weight."""\n\n        def check(self):\n'
        "            pass\n\n    def compute(self):\n        pass\n"
    )
    file.write_text(source)
    digest = source_digest()
    for part in ('"a"', "weight: int", "= 1", "Weight."):
        file.write_text(source.replace(part, f"{part} or another"))
        assert source_digest() != digest
    for part in ("            pass", "compute"):
        file.write_text(source.replace(part, f"{part}_2"))
        assert source_digest() == digest


def test_digest_covers_every_configuration_class():
    for cls in places_in_configurations().keys() - {ModelSpec, ShardingPlan}:  # have no options
        file = Path(inspect.getfile(cls))
        declared = "\n".join(declaring_parts(file, files_of_declarations()))
        for name in own_fields(cls):
            assert re.search(rf"^ +{name}: ", declared, re.MULTILINE), f"{cls}.{name}"


@pytest.mark.parametrize("module", built_in_modules())
def test_unknown_configurations_have_one_message(module, monkeypatch):
    with pytest.raises(UserError, match="^unknown configuration 'nowhere'") as early:
        load_config_function(module, "nowhere")
    monkeypatch.setattr(registry, "_check_is_written", lambda module, config: None)
    with pytest.raises(UserError) as late:
        load_config_function(module, "nowhere")
    assert str(early.value) == str(late.value)


def test_configurations_for_folders_are_known_by_their_source():
    for module, folder in built_in_modules().items():
        for name in list_module(module, folder).configs:
            needs = needs_assets(load_config_function(module, name))
            assert is_written_for_folder(module, name) == needs
    assert is_written_for_folder("llama3", "sft") and not is_written_for_folder("llama3", "x")


@pytest.mark.parametrize(
    "words",
    [
        ["--training.stepz", "3"],
        ["--training.stepz=3"],
        ["--trainingz.steps", "3"],
        ["--steps", "3"],
        ["--stepz"],
        ["--validator.no_enablez"],
        ["--no-enablez"],
        ["--no_checkpoint.enable"],
        ["--training.steps", "3", "--optimizer.lrz", "--loss.x"],
        ["stray"],
        ["--training.steps", "3", "4"],
        ["--training.steps=3", "4"],
        ["--training.steps", "3", "4", "--optimizer.lrz", "5"],
        ["--checkpoint.enable", "true", "4"],
        ["--training.steps", "abc"],
        ["--training.steps=1.5"],
        ["--training.steps"],
        ["--training.steps", "--optimizer.lr"],
        ["--optimizer.name", "adam"],
        ["--optimizer.lr", "fast"],
        ["--checkpoint.enable=maybe"],
        ["--dataloader.weights", "1", "x"],
        ["--model.n_layers", "None"],
        ["--optimizer.name", "adam", "--training.steps", "abc", "--x"],
        ["--config_file", "wrong_key.yaml"],
        ["--config_file", "wrong_value.yaml"],
        ["--config_file", "right.yaml", "--training.steps", "abc"],
    ],
    ids=" ".join,
)
def test_mistakes_have_one_message(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_key.yaml").write_text("training: {stepz: 3}")
    (tmp_path / "wrong_value.yaml").write_text("training: {steps: abc}")
    (tmp_path / "right.yaml").write_text("training: {steps: 3}")
    with monkeypatch.context() as without_import:
        without_import.delattr(manager, "load_config_function")
        with pytest.raises(UserError) as early:
            parse(*words)
    monkeypatch.setattr(manager, "known_configuration", lambda *names: None)
    with pytest.raises(UserError) as late:
        parse(*words)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--training.steps", "1e3", "--checkpoint.no_enable", "--training.max-norm", "inf"],
        [
            "--training.batch_schedule",
            "10:16",
            "20:32",
            "--training.global_batch_size=-1",
            "--optimizer.lr=1e-3",
        ],
        ["--training.epochs", "None", "--validator.enable", "false", "--training.batch_schedule"],
    ],
    ids=" ".join,
)
def test_right_words_are_no_mistakes(words, monkeypatch):
    early = parse(*words)
    monkeypatch.setattr(manager, "known_configuration", lambda *names: None)
    assert early == parse(*words)


def test_sections_are_checked_as_by_the_configuration():
    """The defaults of all configurations are right, and a wrong value has the same message."""
    table = json.loads(option_table.TABLE.read_text())
    n_checked = 0
    for module, configs in table["configurations"].items():
        for config in configs:
            known = option_table.known_configuration(module, config)
            for key in ("training.gc_freq", "comm.init_timeout_seconds", "debug.seed"):
                option_table.check_sections(known, {key: known.fields[key].default})
                with pytest.raises(UserError, match=rf"--{key} is -5, but must be "):
                    option_table.check_sections(known, {key: "-5"})
                n_checked += 1
            for section, options in RANGES.items():
                for name in options:
                    if field := known.fields.get(f"{section}.{name}"):
                        check_range(section, name, field.default)
    assert n_checked > 100
    for key, value in {"training.steps": "0", "activation_checkpoint.memory_budget": "2"}.items():
        with pytest.raises(UserError) as early:
            parse(f"--{key}={value}")
        with pytest.MonkeyPatch.context() as late:
            late.setattr(manager, "known_configuration", lambda *names: None)
            with pytest.raises(UserError) as checked:
                parse(f"--{key}={value}").config.check(world_size=1)
        assert str(early.value) == str(checked.value)


def test_ranges_are_checked_as_by_the_components():
    known, run = known_configuration("llama3", "debugmodel"), parse().config
    for section, options in RANGES.items():
        for name in options:
            key = f"{section}.{name}"
            with pytest.raises(UserError, match=f"^--{key} is -5(.0)?, but must be ") as early:
                option_table.check_sections(known, {key: "-5"})
            value = -5.0 if " is -5.0," in str(early.value) else -5
            wrong = dataclasses.replace(getattr(run, section), **{name: value})
            with pytest.raises(UserError) as late:
                wrong.validate()
            assert str(early.value) == str(late.value)


@pytest.mark.parametrize("module", ["llama3", "deepseek_v3", "gemma4", "lfm2"])
def test_sizes_are_checked_as_by_the_model(module):
    known = known_configuration(module, "debugmodel")
    wrong = {name: 0 for name in ("dim", "n_layers", "ffn_dim", "max_seq_len")}
    wrong |= {"norm_eps": 0.0, "n_heads": 7, "head_dim": 3, "vocab_size": 2**30}
    model = parse("--module", module).config.model_spec.model
    wrong["n_kv_heads"] = model.n_heads + 1
    for name, value in wrong.items():
        with pytest.raises(UserError, match="--model.") as early:
            option_table.check_sections(known, {f"model.{name}": value})
        with pytest.raises(UserError) as late:
            dataclasses.replace(model, **{name: value}).validate()
        assert str(early.value) == str(late.value)
    option_table.check_sections(known, {"model.n_layers": 1})


def test_models_without_heads_of_keys_have_other_sizes():
    known = known_configuration("flow_matching", "dit_debugmodel")
    option_table.check_sections(known, {"model.dim": 0})  # left to the model


@pytest.mark.parametrize("degree", ["tensor_parallel_degree", "pipeline_parallel_microbatch_size"])
def test_degrees_are_checked_as_by_the_configuration(degree, monkeypatch):
    words = [f"--parallelism.{degree}=0"]
    with pytest.raises(UserError, match="is 0, but must be at least 1") as early:
        parse(*words)
    monkeypatch.setattr(manager, "known_configuration", lambda *names: None)
    with pytest.raises(UserError) as late:
        parse(*words).config.check(world_size=1)
    assert str(early.value) == str(late.value)
    assert parse("--parallelism.auto", "--training.steps=3").config.parallelism.auto


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("llama3", "debugmodel"),
        ("deepseek_v3", "debugmodel"),
        ("preference", "dpo_debugmodel"),
        ("ppo", "debugmodel"),
    ],
)
def test_help_is_that_of_the_configuration(module, config, tmp_path, monkeypatch, capsys):
    file = tmp_path / "values.yaml"
    file.write_text("training: {steps: 12345}")

    def printed():
        with pytest.raises(SystemExit) as ended:
            parse("--module", module, "--config", config, "--config_file", str(file), "--help")
        assert ended.value.code == 0
        # Lines may break at other places.
        return re.sub(r"[│╭╮╰╯─|+\s-]", "", capsys.readouterr().out)

    with monkeypatch.context() as without_import:
        without_import.delattr(manager, "load_config_function")
        early = printed()
    monkeypatch.setattr(manager, "known_configuration", lambda *names: None)
    assert early == printed() and "12345" in early


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "nowhere"],
        ["--module", "nowhere"],
        ["--training.stepz", "3"],
        ["--training.steps", "abc"],
        ["--training.steps", "-1"],
        ["--module", "qwen3", "--config", "qwen3_0.6b", "--training.max_norm=0"],
        ["--model.n_heads", "7"],
        ["--module", "gemma4", "--model.n_layers=0"],
        ["--dataloader.dataset", __file__.replace("test_option_table.py", "migration")],
        ["--config", "debugmodel_sft", "--dataloader.format=nowhere.py:rows"],
    ],
)
def test_torch_is_not_imported(words):
    code = (
        "import sys; from torchtitan.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, "train", *words], capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1


@pytest.mark.parametrize("config", ["debugmodel", "debugmodel_sft"])
def test_components_are_those_of_the_configuration(config, tmp_path, monkeypatch):
    names = ("dataloader", "tokenizer", "hf_assets_path")
    words = ["--config", config, "--dataloader.cache_dir", "3", "--dataloader.weights", "1", "2e0"]
    words += ["--dataloader.verify_caches", "--hf_assets_path=a"]
    file = tmp_path / "run.yaml"
    file.write_text("dataloader: {cache_dir: '3'}")
    with monkeypatch.context() as without_import:
        without_import.delattr(manager, "load_config_function")
        early = ConfigManager().parse_components(words, names)
        with pytest.raises(NameError):  # values of a file may need trust
            ConfigManager().parse_components([*words, f"--config_file={file}"], names)
    late = parse(*words).config
    assert early == {name: getattr(late, name) for name in names}
    assert early["dataloader"].weights == [1.0, 2.0] and early["dataloader"].cache_dir == "3"
    assert ConfigManager().parse_components([*words, f"--config_file={file}"], names) == early


def test_values_are_those_of_tyro():
    """Each option of a configuration is set to values of its type in turn; tyro, which prints the
    help, parses the same ones."""
    config, manager_ = parse().config, ConfigManager()
    types = types_by_key(config, type(config))
    options = option_names(leaves(config.to_dict()), types)
    n_set = 0
    for values in (["None", "1"], ["abc", "1e3"], ["", "0.5"]):
        words = []
        for key in options:
            if types[key] is bool:
                words.append(f"--{key}")
            elif fitting := [value for value in values if fits(value, types[key])]:
                words += [f"--{key}", fitting[0]]
        n_set += len(words)
        parsed = manager_._parse(config, words, options)
        assert (parsed, []) == parse_by_tyro(config, words, "torchtitan train")
        assert parsed != config
    assert n_set > 300


def test_default_values_are_not_shared():
    """A process reads the table once, and a configuration may change its lists."""
    changed = known_configuration("llama3", "debugmodel").value("dataloader.dataset", {})
    changed.append("another")
    known = known_configuration("llama3", "debugmodel")
    assert known.value("dataloader.dataset", {}) == ["stories"]
    known.component("dataloader", {}).dataset.append("another")
    assert known.component("dataloader", {}).dataset == ["stories"]


@pytest.mark.parametrize("words", [["--training.steps", "3"], ["--optimizer.name", "SGD"]])
def test_an_older_table_is_not_trusted(words, tmp_path, monkeypatch):
    table = tmp_path / "options.json"
    older = option_table.TABLE.read_text().replace(f'"source": "{source_digest()}"', '"source": ""')
    table.write_text(older.replace("training.steps", "training.stepz").replace("'SGD', ", ""))
    monkeypatch.setattr(option_table, "TABLE", table)
    assert parse(*words).config
