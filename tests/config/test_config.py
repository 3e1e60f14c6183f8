"""`Configurable`, the registry, and configurations from the command line and files."""

import json
import math
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import tyro
import yaml

from torchtitan.config import Configurable
from torchtitan.config.configurable import convert, fits, leaves
from torchtitan.config.manager import ConfigManager, registered_name
from torchtitan.config.registry import (
    built_in_modules,
    list_module,
    load_config_function,
    needs_assets,
)
from torchtitan.config.tyro_options import parse_by_tyro
from torchtitan.config.values import types_by_key
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.errors import UserError


class Scale(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        factor: float = 2.0
        """Factor of the product."""

        def validate(self):
            if self.factor < 0:
                raise UserError(f"factor is {self.factor}")

    def __init__(self, config, *, offset=0.0):
        super().__init__(config)
        self.offset = offset

    def __call__(self, x):
        return self.config.factor * x + self.offset


class TestConfigurable:
    def test_build_constructs_the_owner(self):
        scale = Scale.Config(factor=3.0).build(offset=1.0)
        assert type(scale) is Scale
        assert scale(2.0) == 7.0

    def test_build_validates_before_construction(self, monkeypatch):
        monkeypatch.setattr(Scale, "__init__", lambda *_, **__: pytest.fail("constructed"))
        with pytest.raises(UserError, match=r"factor is -1\.0"):
            Scale.Config(factor=-1.0).build()

    def test_component_copies_its_configuration(self):
        """A change to one configuration, even inside a list, does not affect the other."""

        class Listing(Configurable):
            @dataclass(kw_only=True, slots=True)
            class Config(Configurable.Config):
                names: list[str] = field(default_factory=list)

        config = Listing.Config(names=["one"])
        built = config.build()
        built.config.names.append("two")
        assert config.names == ["one"]
        config.names.append("three")
        assert built.config.names == ["one", "two"]

    def test_unknown_arguments_are_rejected(self):
        class Plain(Configurable):
            pass

        from torchtitan.protocols import BaseModel

        for config in (Plain.Config(), BaseModel.Config(dim=8)):
            assert config.build().config == config
            with pytest.raises(TypeError, match="nonsense"):
                config.build(nonsense=1)

    def test_subclass_without_config_gets_its_own(self):
        class Twice(Scale):
            pass

        assert type(Twice.Config().build()) is Twice
        assert type(Scale.Config().build()) is Scale

    def test_to_dict_is_json_ready(self):
        class Outer(Configurable):
            @dataclass(kw_only=True, slots=True)
            class Config(Configurable.Config):
                inner: Scale.Config = field(default_factory=Scale.Config)
                where: Path = Path("a/b")
                names: tuple[str, ...] = ("x", "y")
                nothing: None = None

        document = Outer.Config().to_dict()
        assert json.loads(json.dumps(document)) == document
        assert document == {
            "inner": {"factor": 2.0},
            "where": "a/b",
            "names": ["x", "y"],
            "nothing": None,
        }

    def test_from_dict_inverts_to_dict(self):
        config = model_registry("1B").model
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"nonsense": 1}, "unknown keys nonsense"),
            ({"rope": {"theta": 1.0, "thta": 2.0}}, r"unknown keys rope\.thta"),  # codespell:ignore
            ({"rope": 3}, "'rope' is 3"),
            ({"dim": None}, "missing keys dim"),  # in this test, None removes the key
        ],
    )
    def test_from_dict_names_the_mismatch(self, change, message):
        config = model_registry("8B").model
        document = {
            key: value
            for key, value in (config.to_dict() | change).items()
            if key not in change or change[key]
        }
        with pytest.raises(UserError, match=message):
            type(config).from_dict(document)

    def test_from_dict_uses_the_default_of_a_new_field(self):
        config = model_registry("8B").model
        document = config.to_dict()
        del document["head_dim"], document["rope"]["scaling"]
        assert type(config).from_dict(document) == config

    @pytest.mark.parametrize(
        ("decorator", "base", "message"),
        [
            (dataclass(kw_only=True, slots=True), object, "inherit"),
            (dataclass(slots=True), Configurable.Config, "kw_only"),
            (dataclass(kw_only=True), Configurable.Config, "slots"),
            (lambda cls: cls, Configurable.Config, "dataclass"),
        ],
    )
    def test_wrong_config_class_is_rejected_at_definition(self, decorator, base, message):
        config = decorator(type("Config", (base,), {"__annotations__": {"x": int}, "x": 1}))
        with pytest.raises(TypeError, match=message):
            type("Broken", (Configurable,), {"Config": config})

    def test_config_must_inherit_from_the_parents(self):
        config = dataclass(kw_only=True, slots=True)(type("Config", (Configurable.Config,), {}))
        with pytest.raises(TypeError, match=r"Scale\.Config"):
            type("Other", (Scale,), {"Config": config})


def parse(*args: str):
    return ConfigManager().parse_args(args)


class TestPrecedence:
    def test_function_then_file_then_command_line(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(
            "training: {steps: 7, seq_len: 32}\noptimizer: {lr: 1e-5}\nmodel: {n_layers: 2}\n"
        )
        args = ["--config_file", str(file), "--training.seq_len", "64", "--model.n_heads=4"]
        config = parse(*args).config
        assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (
            7,
            64,
            1e-5,
        )
        assert (config.model_spec.model.n_layers, config.model_spec.model.n_heads) == (2, 4)
        assert config.training.local_batch_size == 8  # from llama3_debugmodel

    def test_saved_configuration_gives_the_same_run(self, tmp_path):
        args = [
            "--model.dim",
            "128",
            "--training.epochs",
            "2",
            "--checkpoint.enable",
            "--validator.no_enable",
        ]
        args += [
            "--checkpoint.exclude_from_loading",
            "optimizer",
            "dataloader",
            "--loss.chunk_tokens",
            "7",
        ]
        args += ["--optimizer.param_groups.no_decay.lr", "1e-4", "--dataloader.text_column", "None"]
        resolved = parse(*args)
        resolved.save(tmp_path / "config.yaml")
        again = parse("--config_file", str(tmp_path / "config.yaml"))
        assert again.config == resolved.config
        assert (again.module, again.config_name) == (resolved.module, resolved.config_name)
        assert again.config.checkpoint.exclude_from_loading == ["optimizer", "dataloader"]

    def test_saved_vocabulary_follows_another_tokenizer(self, tmp_path):
        def resolve(config, vocab_size):
            return config.resolve(
                SimpleNamespace(vocab_size=vocab_size, n_added=0, added=range(0))
            ).model_spec.model.vocab_size

        # a run saves the size from its tokenizer this way
        resolved = parse("--model.vocab_size", "2048")
        resolved.save(tmp_path / "config.yaml")
        args = ["--config_file", str(tmp_path / "config.yaml"), "--hf_assets_path", "other"]
        with pytest.raises(UserError, match=r"5000 tokens.*2048"):
            resolve(parse(*args).config, 5000)
        assert resolve(parse(*args, "--model.vocab_size", "None").config, 5000) == 5000

    def test_lists_and_none_survive_the_round_trip(self, tmp_path):
        resolved = parse("--checkpoint.exclude_from_loading")
        resolved.save(tmp_path / "config.yaml")
        assert (
            parse(
                "--config_file", str(tmp_path / "config.yaml")
            ).config.checkpoint.exclude_from_loading
            == []
        )

    def test_string_in_file_becomes_a_list(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(
            "checkpoint: {exclude_from_loading: optimizer}\ncompile: {components: loss}\n"
        )
        config = parse("--config_file", str(file)).config
        assert (config.checkpoint.exclude_from_loading, config.compile.components) == (
            ["optimizer"],
            ["loss"],
        )

    def test_list_in_file_replaces_none(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(
            "parallelism: {module_fqns_per_model_part: ['tok_embeddings,layers.0', "
            "'layers.1,head']}\n"
        )
        parts = parse("--config_file", str(file)).config.parallelism.module_fqns_per_model_part
        assert parts == ["tok_embeddings,layers.0", "layers.1,head"]

    def test_numbers_in_file_may_be_quoted(self, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(
            "training: {steps: '7', max_norm: 2, epochs: None}\noptimizer: {lr: 1e-5}\n"
        )
        config = parse("--config_file", str(file)).config
        assert (config.training.steps, config.training.max_norm, config.training.epochs) == (
            7,
            2.0,
            None,
        )
        assert config.optimizer.lr == 1e-5  # a string in YAML

    @pytest.mark.parametrize("text", ["training: {epochs: 3}", "training.epochs: 3"])
    def test_steps_on_the_command_line_replace_epochs_of_a_file(self, text, tmp_path):
        file = tmp_path / "run.yaml"
        file.write_text(text)

        def lengths(*words: str) -> tuple[int | None, int]:
            training = parse("--config_file", str(file), *words).config.training
            return training.epochs, training.steps

        assert lengths("--training.seq_len", "64")[0] == 3
        assert lengths("--training.steps", "7") == (None, 7)
        assert lengths("--training.steps=7") == (None, 7)
        assert lengths("--training.steps", "7", "--training.epochs", "2") == (2, 7)

    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            (["--checkpoint.enable"], True),
            (["--checkpoint.enable", "true"], True),
            (["--checkpoint.enable=True"], True),
            (["--checkpoint.enable", "--checkpoint.no_enable"], False),
            (["--checkpoint.enable", "False"], False),
            (["--checkpoint.enable=false"], False),
            (["--checkpoint.no_enable"], False),
        ],
    )
    @pytest.mark.parametrize(
        "others", [[], ["--checkpoint.exclude_from_loading", "true", "optimizer"]]
    )
    def test_switches(self, args, expected, others):
        """A list before or after the switch keeps its words."""
        for words in (args + others, others + args):
            config = parse(*words).config.checkpoint
            assert config.enable is expected
            assert config.exclude_from_loading == others[1:]

    def test_switch_accepts_hyphens(self):
        config = parse(
            "--checkpoint.last-save-in-hf", "true", "--profiling.enable-profiling=true"
        ).config
        assert config.checkpoint.last_save_in_hf and config.profiling.enable_profiling

    def test_every_value_is_checked_for_its_type(self):
        for name, folder in built_in_modules().items():
            for listed in list_module(name, folder).configs:
                function = load_config_function(name, listed)
                if not needs_assets(function):
                    config = function()
                    assert set(leaves(config.to_dict())) <= set(types_by_key(config, type(config)))

    def test_global_state_is_unchanged(self):
        parse("--model.dim", "64")
        assert parse().config.model_spec.model.dim == 256


class TestMistakes:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--module", "lama3"], "unknown module 'lama3'; did you mean 'llama3'"),
            (["--module", "./nowhere/at_all"], "'./nowhere/at_all': the folder does not exist"),
            (["--module", "no.such.package"], "no.such.package"),
            (
                ["--config", "debugmodle"],
                "unknown configuration 'debugmodle'.*did you mean 'debugmodel'",
            ),
            (
                ["--config", "zzz"],
                r"there are: dial, llama3_1b, [^;]*; with --hf_assets_path DIR: lora, [a-z_, ]*\)$",
            ),
            (["--config", "lorra"], "did you mean 'lora'"),
            (["--module", "preference", "--config", "zzz"], r"there are: dpo, [^;]*\)$"),
            (["--config_file", "/no/such.yaml"], "/no/such.yaml"),
        ],
    )
    def test_names(self, args, message):
        with pytest.raises(UserError, match=message):
            parse(*args)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "trainig: {steps: 1}",  # codespell:ignore
                "unknown key 'trainig.steps'.*did you mean 'training.steps'",  # codespell:ignore
            ),
            ("training: {stepz: 1}", "did you mean 'training.steps'"),
            ("training: 3", "'training'.*section"),
            ("- a\n- b", "list"),
            (
                "checkpoint: {enable: 1}",
                "'checkpoint.enable' in .*run.yaml is 1, but must be true or false",
            ),
            (
                "checkpoint: {enable: null}",
                "'checkpoint.enable' in .*run.yaml is None, but must be true or false",
            ),
            (
                "dataloader: {split: [a, b]}",
                r"'dataloader.split' .* is \['a', 'b'\], but must be a string",
            ),
            ("dataloader: {split: off}", "'dataloader.split' .* is False, but must be a string"),
            ("dump_folder:", "'dump_folder' .* is None, but must be a string"),
            ("", "run.yaml is empty"),
            ("# nothing", "run.yaml is empty"),
            (
                "training: {steps: 3}\ntraining: {seq_len: 8}",
                "not valid YAML: training is repeated",
            ),
            (
                "checkpoint: {exclude_from_loading: [optimizer, --dump_folder, /x]}",
                "'checkpoint.exclude_from_loading' .* has the item '--dump_folder'; items must not "
                "begin with '-'",
            ),
            ("training: {epochs: [1]}", "'training.epochs' .* must be a whole number or null"),
            (
                "training: {epochs: 1.5}",
                "'training.epochs' .* is 1.5, but must be a whole number or null",
            ),
            ("training: {steps: true}", "'training.steps' .* is True, but must be a whole number"),
            (
                "training: {steps: often}",
                "'training.steps' .* is 'often', but must be a whole number",
            ),
            ("optimizer: {lr: fast}", "'optimizer.lr' .* is 'fast', but must be a number"),
            (
                "lr_scheduler: {decay_type: cubic}",
                "'lr_scheduler.decay_type' .* must be one of linear, sqrt, cosine, power",
            ),
            ("checkpoint: {exclude_from_loading: null}", r"must be a list \(each item a string\)"),
            (
                "compile: {components: [model, optimizer]}",
                r"must be a list \(each item one of model, loss\)",
            ),
            ("module: [llama3]", "'module' .* must be a string or null"),
            ("a: [", "not valid YAML"),
        ],
    )
    def test_configuration_files(self, tmp_path, text, message):
        (tmp_path / "run.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            parse("--config_file", str(tmp_path / "run.yaml"))

    @pytest.mark.parametrize("value", ["yes", "1", ""])
    def test_switches(self, value):
        with pytest.raises(
            UserError, match=f"--checkpoint.enable is '{value}', but must be true or false"
        ):
            parse(f"--checkpoint.enable={value}")

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--training.step", "3"], ["--training.step", "--training.steps"]),
            (["--training.steps", "many"], ["--training.steps", "many"]),
            (["--lr_scheduler.decay_type", "cubic"], ["cubic", "cosine"]),
            (["--model.dmi", "3"], ["--model.dmi", "--model.dim"]),
        ],
    )
    def test_options(self, capsys, args, words):
        with pytest.raises(UserError) as error:
            parse(*args)
        message = str(error.value)
        assert all(word in message for word in words) and "\n" not in message, message
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--training.steps"], "--training.steps has no value; it must be a whole number"),
            (
                ["--training.steps", "--metrics.log_freq=1"],
                "--training.steps has no value; it must be a whole number",
            ),
            (["--training.steps="], "--training.steps is '', but must be a whole number"),
            (
                ["--training.steps", "-" * 90],
                f"--training.steps is '{'-' * 90}', but must be a whole number",
            ),
            (
                ["--training.steps", "│ ──────── │"],
                "--training.steps is '│ ──────── │', but must be a whole number",
            ),
            (
                ["--training.steps", "/path" * 30],
                f"--training.steps is '{'/path' * 30}', but must be a whole number",
            ),
            (
                ["--training.epochs", "none"],
                "--training.epochs is 'none', but must be a whole number or None",
            ),
            (
                ["--lr-scheduler.decay-type=a--------b"],
                "--lr_scheduler.decay_type is 'a--------b', but must be one of linear, sqrt, "
                "cosine, power",
            ),
            (
                ["--dataloader.weights", "1", "a"],
                "--dataloader.weights is '1 a', but must be a list (each item a number)",
            ),
            (
                ["--lr_scheduler.decay_type=--training.steps"],
                "--lr_scheduler.decay_type is '--training.steps', but must be one of linear, sqrt, "
                "cosine, power",
            ),
            (
                ["--optimizer.lr", "x", "--optimizer.lr", "y"],
                "--optimizer.lr is 'y', but must be a number",
            ),
            (["stray"], "'stray' belongs to no option; see torchtitan train --help"),
            (
                ["--training.steps", "5", "6"],
                "'6' belongs to no option; see torchtitan train --help",
            ),
            (
                ["--no_validator.enable"],
                "unknown option --no_validator.enable; did you mean '--validator.no_enable'?",
            ),
            (["--zzz", "3"], "unknown option --zzz; see torchtitan train --help"),
            (
                ["--steps", "3"],
                "unknown option --steps; did you mean --training.steps or --validator.steps?",
            ),
        ],
    )
    def test_messages_name_value_and_remedy(self, args, message):
        with pytest.raises(UserError) as error:
            parse(*args)
        assert str(error.value) == message

    def test_whole_numbers_in_scientific_notation(self):
        config = parse("--training.steps", "1e3", "--lr_scheduler.total_steps=2.5e3").config
        assert (config.training.steps, config.lr_scheduler.total_steps) == (1000, 2500)
        for word in ("1.5", "1e999", "nan", "1e-3", "many"):
            with pytest.raises(
                UserError, match=rf"--training\.steps is '{word}', but must be a whole number"
            ):
                parse("--training.steps", word)


def write_module(folder: Path, registry: str, **files: str) -> Path:
    folder.mkdir()
    (folder / "config_registry.py").write_text(textwrap.dedent(registry))
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


class TestModules:
    REGISTRY = """
        from torchtitan.models.llama3.config_registry import llama3_debugmodel

        def {name}_tiny():
            return llama3_debugmodel()

        def _private():
            return None
    """

    def test_options_set_further_parameters_of_a_function(self, tmp_path):
        registry = """
            from dataclasses import dataclass

            from torchtitan.models.llama3.config_registry import llama3_debugmodel
            from torchtitan.trainer import Trainer

            class SizedTrainer(Trainer):
                @dataclass(kw_only=True, slots=True)
                class Config(Trainer.Config):
                    size: int = 1
                    unit: str = "rows"

            def sized(
                hf_assets_path: str = "",
                size: int | None = None,
                *,
                unit: str = "rows",
                wide: bool = True,
                either: int | float = 1,
            ):
                assert wide is True and either == 1  # no options set these
                config = SizedTrainer.Config.based_on(llama3_debugmodel(), size=size, unit=unit)
                config.training.steps = 10 * (size or 0)
                return config

            def helper(size: int):
                raise AssertionError

            def annotated() -> "Elsewhere":  # only a type checker imports it
                return llama3_debugmodel()
        """
        module = str(write_module(tmp_path / "sized_by_option", registry))
        config = parse("--module", module, "--config", "sized", "--size", "3", "--unit=x").config
        assert (config.training.steps, config.size, config.unit) == (30, 3, "x")
        assert parse("--module", module, "--config", "annotated").config.training.steps > 0
        with pytest.raises(UserError, match="--size is 'x', but must be a whole number"):
            parse("--module", module, "--config", "sized", "--size", "x")
        with pytest.raises(
            UserError, match=r"unknown configuration 'helper'.*\(there are: annotated, sized\)"
        ):
            parse("--module", module, "--config", "helper")

    def test_folder_on_disk(self, tmp_path):
        folder = write_module(tmp_path / "on_disk", self.REGISTRY.format(name="on_disk"))
        assert parse("--module", str(folder), "--config", "tiny").config.training.steps == 100
        assert list_module("on_disk", folder).configs == ["on_disk_tiny"]
        with pytest.raises(UserError, match="_private"):
            parse("--module", str(folder), "--config", "_private")

    def test_dotted_path(self, tmp_path, monkeypatch):
        write_module(tmp_path / "dotted_outer", "")
        write_module(tmp_path / "dotted_outer" / "inner", self.REGISTRY.format(name="inner"))
        monkeypatch.syspath_prepend(str(tmp_path))
        assert load_config_function("dotted_outer.inner", "tiny").__name__ == "inner_tiny"

    def test_import_error_propagates(self, tmp_path):
        folder = write_module(tmp_path / "broken_import", "import does_not_exist_anywhere")
        with pytest.raises(
            UserError, match="No module named 'does_not_exist_anywhere'.*config_registry.py, line 1"
        ):
            parse("--module", str(folder), "--config", "tiny")

    def test_syntax_error_propagates(self, tmp_path):
        folder = write_module(tmp_path / "broken_syntax", "def f(:")
        with pytest.raises(UserError, match="SyntaxError"):
            parse("--module", str(folder), "--config", "tiny")

    def test_folder_without_registry(self, tmp_path):
        with pytest.raises(UserError, match=r"config_registry\.py"):
            parse("--module", str(tmp_path), "--config", "tiny")

    def test_module_name_conflict(self, tmp_path):
        folder = write_module(tmp_path / "yaml", self.REGISTRY.format(name="yaml"))
        with pytest.raises(
            UserError, match="'yaml' is the name of another package; rename the folder"
        ):
            parse("--module", str(folder), "--config", "tiny")

    def test_values_that_a_configuration_refuses(self, tmp_path):
        """The message is kept, in one line."""
        registry = """
            from dataclasses import dataclass

            from torchtitan.components.optim.optimizer import Optimizer
            from torchtitan.models.llama3.config_registry import llama3_debugmodel


            class Own(Optimizer):
                @dataclass(kw_only=True, slots=True)
                class Config(Optimizer.Config):
                    def __post_init__(self):
                        if self.lr > 1:
                            raise ValueError(f"--optimizer.lr is {self.lr}; choose less")


            def refusing():
                config = llama3_debugmodel()
                config.optimizer = Own.Config()
                return config
        """
        folder = write_module(tmp_path / "refuses_values", registry)
        with pytest.raises(
            UserError, match=r"^[^│─\n]*: --optimizer\.lr is 2\.0; choose less [^│─\n]*$"
        ):
            parse("--module", str(folder), "--config", "refusing", "--optimizer.lr", "2")

    def test_values_that_are_not_options(self, tmp_path):
        """A saved configuration has them, and may be loaded again; a file cannot change them."""
        registry = """
            from dataclasses import dataclass

            from tyro.conf import Fixed, Suppress

            from torchtitan.components.optim.optimizer import Optimizer
            from torchtitan.models.llama3.config_registry import llama3_debugmodel


            class Own(Optimizer):
                @dataclass(kw_only=True, slots=True)
                class Config(Optimizer.Config):
                    hidden: Suppress[dict[str, float]]
                    fixed: Fixed[int] = 3


            def own():
                config = llama3_debugmodel()
                config.optimizer = Own.Config(hidden={"a": 1.0})
                return config
        """
        folder = write_module(tmp_path / "hidden_values", registry)
        words = ["--module", str(folder), "--config", "own"]
        file = tmp_path / "config.yaml"
        resolved = parse(*words, "--loss.chunk_tokens", "7")
        resolved.save(file)
        assert parse(*words, "--config_file", str(file)).config == resolved.config
        for key, value, own in (("hidden.a", 2.0, 1.0), ("fixed", 4, 3)):
            file.write_text(f"optimizer.{key}: {value}")
            problem = f"'optimizer.{key}' in .* is {value}, but no option, .* has {own}; remove it"
            with pytest.raises(UserError, match=problem):
                parse(*words, "--config_file", str(file))
            with pytest.raises(UserError, match=f"^unknown option --optimizer.{key};"):
                parse(*words, f"--optimizer.{key}={value}")

    def test_listing_matches_import(self):
        import importlib

        for name, folder in built_in_modules().items():
            listing = list_module(name, folder)
            registry = importlib.import_module(
                f"torchtitan.{folder.parent.name}.{name}.config_registry"
            )
            assert listing.name == name
            assert listing.configs or listing.flavors  # which an experiment trains
            for function in (getattr(registry, config) for config in listing.configs):
                assert needs_assets(function) or isinstance(function(), Configurable.Config)

    def test_recipe(self):
        """A `published` configuration has the name that it is assigned to, and the family's
        module."""
        assert registered_name(load_config_function("qwen3", "4b")) == "qwen3.qwen3_4b"
        assert (
            registered_name(load_config_function("qwen3", "debugmodel")) == "qwen3.qwen3_debugmodel"
        )


def test_config_file_has_sections(tmp_path):
    parse().save(tmp_path / "config.yaml")
    document = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert document["module"] == "llama3"
    assert document["model"]["dim"] == 256
    assert "model_spec" not in document


class TestFileWithoutFlags:
    """Values of a file go into the dataclasses as they are, with the errors of the command line."""

    def read(self, folder: Path, text: str, *args: str) -> Any:
        (folder / "run.yaml").write_text(text)
        return parse("--config_file", str(folder / "run.yaml"), *args).config

    def test_only_the_command_line_is_parsed(self, tmp_path, monkeypatch):
        seen = []
        own = ConfigManager._parse
        monkeypatch.setattr(
            ConfigManager,
            "_parse",
            lambda self, default, words, known: (
                seen.append(words) or own(self, default, words, known)
            ),
        )
        config = self.read(
            tmp_path, "training: {steps: 7}\ncheckpoint: {enable: true}", "--training.seq_len=64"
        )
        assert seen == [["--training.seq_len=64"]]
        assert (config.training.steps, config.training.seq_len, config.checkpoint.enable) == (
            7,
            64,
            True,
        )

    @pytest.mark.parametrize(
        ("key", "written", "word", "value"),
        [
            ("training.steps", "1e3", "1e3", 1000),
            ("training.steps", "2000.0", "2000.0", 2000),
            ("training.steps", "'12'", "12", 12),
            ("training.max_norm", "2", "2", 2.0),
            ("training.max_norm", ".inf", "inf", math.inf),
            ("training.epochs", "None", "None", None),
            ("training.epochs", "null", "None", None),
            ("dump_folder", "2026-11-28", "2026-11-28", "2026-11-28"),
            ("dump_folder", "12", "12", "12"),
            ("dataloader.weights", "3", "3", [3.0]),
            ("checkpoint.export_dtype", "bfloat16", "bfloat16", "bfloat16"),
            ("optimizer.param_groups.no_decay.lr", "'1e-4'", "1e-4", 1e-4),
        ],
    )
    def test_has_the_type_of_the_option(self, tmp_path, key, written, word, value):
        for config in (self.read(tmp_path, f"{key}: {written}"), parse(f"--{key}", word).config):
            found = leaves(config.to_dict())[key]
            assert found == value and type(found) is type(value)

    def test_refuses_as_the_command_line_does(self, tmp_path):
        with pytest.raises(
            UserError, match=r"'training.steps' in .* is 1.5, but must be a whole number"
        ):
            self.read(tmp_path, "training: {steps: 1.5}")
        with pytest.raises(
            UserError, match=r"--training.steps is '1.5', but must be a whole number"
        ):
            parse("--training.steps", "1.5")

    def test_leaves_the_registered_configuration_alone(self, tmp_path):
        before = parse().config
        self.read(tmp_path, "training: {steps: 7}")
        assert parse().config == before


def test_a_failure_inside_tyro_is_shown_as_tyro_shows_it(monkeypatch, capsys):
    def fail(*args: Any, **options: Any) -> None:
        print("╭─ a box ─╮", file=sys.stderr)
        raise SystemExit(2)

    monkeypatch.setattr(tyro, "cli", fail)
    with pytest.raises(SystemExit, match="2"):
        parse("--help")
    assert capsys.readouterr().err == "╭─ a box ─╮\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("3", 3), (3, 3), (1, 1), (True, None), ("2", None), (3.0, None), (None, None), ([3], None)],
)
def test_choices_among_numbers(given, expected):
    """On the command line they are words, as is `--dataloader.channels 3`; true is not 1."""
    choices = Literal[1, 3]
    assert fits(given, choices) == (expected is not None)
    if expected is not None:
        assert convert(given, choices) is expected
    assert fits("3", choices, quoted=False) is False


@pytest.mark.parametrize("name", ["no_decay", "no-decay", "layers.0", "Head"])
def test_groups_may_have_any_names(name):
    config = parse().config
    config.optimizer.param_groups = {name: config.optimizer.param_groups["no_decay"]}
    known = leaves(config.to_dict())
    words = [f"--optimizer.param_groups.{name}.lr_factor", "0.25"]
    found = ConfigManager()._parse(config, words, known)
    assert (found, []) == parse_by_tyro(config, words, "torchtitan train")
    assert found.optimizer.param_groups[name].lr_factor == 0.25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataloader.dataset", "a.jsonl", "-v"], "unknown option -v"),
        (["--dataloader.dataset", "a.jsonl", "-training.steps", "3"], "write --training.steps"),
        (["--dataloader.dataset", "a.jsonl", "--", "b.jsonl"], "unknown option --;"),
        (["--dump_folder", "-v"], "--dump_folder has no value"),
    ],
)
def test_a_word_with_a_dash_is_no_value(words, message):
    """Except for negative numbers, also -inf."""
    with pytest.raises(UserError, match=message):
        parse(*words)
    config = parse("--callbacks.earlystopping.min_delta", "-inf").config
    assert -float("inf") in [getattr(one, "min_delta", 0) for one in config.callbacks]
