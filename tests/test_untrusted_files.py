"""Untrusted small files that describe a model, tokenizer or run: a malformed one quickly gives a
one-line error."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torchtitan.components.observe.metric_sinks import JsonLines
from torchtitan.components.tokenizer import EMBEDDED_TOKENIZER, PretrainedTokenizer
from torchtitan.components.tokenizer.auto_tokenizer import warn_of_different_ids
from torchtitan.components.tokenizer.tiktoken_model import Tiktoken, read_tiktoken
from torchtitan.components.tokenizer.tokenizer_json import suppress_native_errors
from torchtitan.components.weights.assets import files_in
from torchtitan.config.manager import ConfigManager
from torchtitan.models.llama3 import FLAVORS, FORMATS
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.conversion import converters_from_records
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import parse_json, read_object

# --- JSON
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "is nested more than 100 levels deep"),
        (b'{"a":' * 100_000, "is nested more than 100 levels deep"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "is nested more than 100 levels deep"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
        (b'{"a": "\xff"}', "is not valid JSON: 'utf-8' codec"),
        (b"null", "must contain a JSON object, not NoneType"),
        (b"", "is not valid JSON"),
    ],
)
def test_invalid_json(tmp_path, content, message):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=f"x.json' {message}"):
        read_object(tmp_path / "x.json")


def test_json_size_limit(tmp_path):
    with open(tmp_path / "x.json", "wb") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(
        UserError, match=r"x\.json' has 1,099,511,627,776 bytes, and may have 268,435,456"
    ):
        read_object(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is not a regular file"),
        (lambda path: os.symlink("/dev/zero", path), "is not a regular file"),
        (lambda path: os.symlink("gone", path), "is a link to 'gone', which does not exist"),
        (
            lambda path: os.symlink("x.json", path),
            "cannot be read: Too many levels of symbolic links",
        ),
    ],
)
def test_json_must_be_a_regular_file(tmp_path, make, message):
    assert read_object(tmp_path / "x.json") == {}
    make(tmp_path / "x.json")
    with pytest.raises(UserError, match=f"x.json' {message}"):
        read_object(tmp_path / "x.json")


def test_json_nesting_limit(tmp_path):
    assert parse_json('{"a":' * 100 + "1" + "}" * 100, "x")


# --- sizes
# --------------------------------------------------------------------------------------------------

DEBUG = FLAVORS["debugmodel"]
CONFIG_JSON = {**FORMATS["hf"].to_external(DEBUG), "vocab_size": 2048}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
PARAMS_JSON = {"dim": 256, "n_layers": 4, "n_heads": 8, "vocab_size": 2048}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2001}, "--model.n_layers is 2001, but must be from 1 to 2000"),
        (
            {"hidden_size": 10**18},
            "config.json: hidden_size is 10{18}, but must be a whole number from 1 to",
        ),
        ({"vocab_size": 2**25}, "--model.vocab_size is 33554432, but must be from 1 to 16777216"),
        (
            {"max_position_embeddings": 10**18},
            "config.json: max_position_embeddings is 10{18}, but must be",
        ),
        (
            {"intermediate_size": 2**25},
            "--model.ffn_dim is 33554432, but must be from 1 to 16777216",
        ),
        ({"head_dim": 2**26}, "--model.head_dim is 67108864, but must be from 1 to 16777216"),
        (
            {"hidden_size": 2**20, "num_hidden_layers": 1999, "intermediate_size": 2**24},
            r"--model.dim 1048576, n_layers 1999, .* make a model of .* parameters, and 1.8e\+13 "
            r"are the most",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers is 4.0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (
            {"rope_theta": 1e308},
            r"rope_theta is 1e\+308, but must be a number above 0, from 1e-18 to 1e\+18",
        ),
        ({"rope_theta": int("9" * 4000)}, "rope_theta is 9999"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": {**LLAMA3_ROPE, "factor": 1e308}}, r"factor is 1e\+308"),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": 10**18}},
            "original_max_position_embeddings is 10{18}",
        ),
    ],
)
def test_config_json_sizes(changes, message):
    begun = time.perf_counter()
    with pytest.raises(UserError, match=message):
        FORMATS["hf"].from_external({**CONFIG_JSON, **changes})
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn_dim_multiplier": 1e308}, "ffn_dim_multiplier is"),
        ({"ffn_dim_multiplier": 1e17}, "--model.ffn_dim is 68.*, but must be from 1 to 16777216"),
        ({"dim": int("9" * 4000)}, "dim is 9999"),
        ({"n_layers": 10**9}, "--model.n_layers is 1000000000, but must be from 1 to 2000"),
        ({"torchtitan": {"max_seq_len": 10**18}}, "max_seq_len is 10{18}"),
    ],
)
def test_params_json_sizes(changes, message):
    with pytest.raises(UserError, match=message):
        FORMATS["meta"].from_external({**PARAMS_JSON, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 10**9}, "--model.n_layers is 1000000000, but must be from 1 to 2000"),
        ({"n_heads": 0}, "--model.n_heads is 0, but must be from 1 to 16777216"),
        ({"dim": "256"}, "'dim' is '256', but must be a whole number"),
        ({"dim": 256.0}, "'dim' is 256.0, but must be a whole number"),
        ({"dim": True}, "'dim' is True, but must be a whole number"),
        ({"tie_embeddings": "no"}, "'tie_embeddings' is 'no', but must be true or false"),
        ({"norm_eps": "x"}, "'norm_eps' is 'x', but must be a number"),
        ({"rope": {"theta": None}}, "'rope.theta' is None, but must be a number"),
        (
            {"rope": {"scaling": ["linear"]}},
            "'rope.scaling' is .*, but must be one of llama3, linear",
        ),
        (
            {"rope": {"original_max_seq_len": 0}},
            "--model.rope.original_max_seq_len is 0, but must be from 1",
        ),
    ],
)
def test_model_json_values(changes, message):
    with pytest.raises(UserError, match=message):
        Llama3Model.Config.from_dict({**DEBUG.to_dict(), **changes})
    assert Llama3Model.Config.from_dict(DEBUG.to_dict()) == DEBUG


# --- tokenizers
# --------------------------------------------------------------------------------------------------


def tokenizer_with(
    folder: Path, files: dict[str, Any] | None = None, **changes: Any
) -> PretrainedTokenizer:
    document = json.loads((EMBEDDED_TOKENIZER / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**document, **changes}))
    for name, content in (files or {}).items():
        (folder / name).write_text(json.dumps(content))
    tokenizer: PretrainedTokenizer = PretrainedTokenizer.Config().build(path=folder)
    return tokenizer


TEXT, SPECIAL = (
    {"Sequence": {"id": "A", "type_id": 0}},
    {"SpecialToken": {"id": "<nope>", "type_id": 0}},
)
TEMPLATE: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [TEXT],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"post_processor": {**TEMPLATE, "single": []}},
            "has a post_processor that omits the text",
        ),
        # a panic
        ({"post_processor": {**TEMPLATE, "single": [SPECIAL, TEXT]}}, "is not a valid tokenizer"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "is not a valid tokenizer",
        ),  # a panic
        (
            {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
            "is not a valid tokenizer",
        ),  # one
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}},
            r"cannot encode a text: .*Missing \[UNK\]",
        ),
    ],
)
def test_invalid_tokenizer(tmp_path, changes, message):
    with pytest.raises(UserError, match=f"tokenizer.json' {message}"):
        tokenizer_with(tmp_path, **changes).encode("Häm")


@pytest.mark.parametrize(
    "changes",
    [
        {"post_processor": {**TEMPLATE, "single": [SPECIAL, TEXT]}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
)
def test_panic_prints_only_the_message(tmp_path, capfd, changes):
    with pytest.raises(UserError):
        tokenizer_with(tmp_path, **changes)
    assert capfd.readouterr().err == ""
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"


def test_output_while_reading_a_valid_tokenizer_is_shown(tmp_path, capfd):
    with suppress_native_errors(tmp_path):
        os.write(2, "a wörning\n".encode())
    assert capfd.readouterr().err == "a wörning\n"


def test_panic_while_encoding_names_the_file(tmp_path):
    tokenizer = tokenizer_with(tmp_path, normalizer={"type": "Prepend", "prepend": ""})
    with pytest.raises(UserError, match="tokenizer.json' cannot encode a text: "):
        tokenizer.encode("Hello wörld 🦙")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "tokenizer_config.json",
            {"add_bos_token": "yes"},
            "has add_bos_token 'yes', not true or false",
        ),
        ("generation_config.json", {"bos_token_id": True}, "has bos_token_id True, not an id"),
        (
            "generation_config.json",
            {"bos_token_id": [1e30]},
            r"has bos_token_id \[1e\+30\], not an id",
        ),
        ("config.json", {"bos_token_id": [{}]}, r"has bos_token_id \[\{\}\], not an id"),
    ],
)
def test_files_next_to_a_tokenizer(tmp_path, file, content, message):
    with pytest.raises(UserError, match=f"{file}' {message}"):
        tokenizer_with(tmp_path, {file: content})


@pytest.mark.parametrize(
    "added", [3, {"a": 1}, {"1": {"content": 5}}, {"1": {"content": "x", "special": "yes"}}]
)
def test_malformed_added_tokens(tmp_path, added):
    tokenizer = tokenizer_with(tmp_path, {"tokenizer_config.json": {"added_tokens_decoder": added}})
    with pytest.raises(
        UserError,
        match="tokenizer_config.json' is not a valid tokenizer of the library `tokenizers`",
    ):
        warn_of_different_ids(tokenizer)


def test_ids_outside_a_tiktoken_vocabulary_have_no_text(assets):
    tokenizer = Tiktoken(read_tiktoken(assets / "llama3-tokenizer" / "tokenizer.model"))
    ids = [*tokenizer.tokenize(["Hi"], allow_special=False)[0], tokenizer.vocab_size, 10**9]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Hi"


# --- YAML
# --------------------------------------------------------------------------------------------------


def laughs(first: str, line: str) -> str:
    return f"a0: &a0 {first}\n" + "".join(
        line.format(n=n, of=", ".join([f"*a{n - 1}"] * 10)) for n in range(1, 11)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "is not valid YAML: a value contains itself"),
        ("&a {*a : 1}", "is not valid YAML: a value contains itself"),
        ("a: &a {b: &b {<<: *a}}", "is not valid YAML: a value contains itself"),
        (
            laughs("[x, x]", "a{n}: &a{n} [{of}]\n"),
            "it has more than 100000 values after expanding aliases",
        ),
        (
            laughs("{k: x}", "a{n}: &a{n} {{<<: [{of}]}}\n"),
            "it has more than 100000 values after expanding aliases",
        ),
        ("training: {steps: " + "1" * 5000 + "}", "a number has more than 100 digits"),
        ("training: {steps: 0x" + "f" * 5000 + "}", "a number has more than 100 digits"),
        ("[" * 9000, "is nested too deeply"),  # torch.compile allows 2,000 calls
        ("dump_folder: 2026-99-99", "is not valid YAML: month must be in 1..12"),
        ("training: {steps: 1}\0", "is not valid YAML: unacceptable character"),
        ("[a, b]: 1", "is not valid YAML: a key is a list or a mapping"),
        ("dump_folder: !!binary 'aGk='", "'dump_folder' in .* is b'hi', but must be a string"),
        ("dump_folder: !!set {a}", "'dump_folder' in .* is {'a'}, but must be a string"),
        (
            "a: !!python/object/apply:os.getcwd []",
            "is not valid YAML: could not determine a constructor",
        ),
        (
            "checkpoint: {exclude_from_loading: ['-h']}",
            "has the item '-h'; items must not begin with '-'",
        ),
        ("# " + "x" * 2**20, "has 1,048,578 bytes; the limit is 1,048,576"),
    ],
)
def test_unreadable_configuration_files(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=f"run.yaml .*{message}|^{message}") as raised:
        ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")])
    assert "\n" not in str(raised.value)


def test_yaml_alias_and_value_like_an_option(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "training: {steps: &n 7, seq_len: *n}\ndump_folder: --training.steps=3\n"
    )
    config = ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")]).config
    assert (config.training.steps, config.training.seq_len, config.dump_folder) == (
        7,
        7,
        "--training.steps=3",
    )


# --- code
# --------------------------------------------------------------------------------------------------


def test_configuration_file_runs_no_code(tmp_path):
    module = tmp_path / "stranger"
    module.mkdir()
    for name in ("__init__.py", "config_registry.py"):
        (module / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    (tmp_path / "run.yaml").write_text(f"module: {module}\nconfig: x\n")
    with pytest.raises(
        UserError, match=f"'module' in .* is '{module}', code that is neither .*: --module {module}"
    ):
        ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")])
    assert not (tmp_path / "executed").exists()
    rows = f"dataloader: {{format: '{module}/config_registry.py:f'}}\n"
    (tmp_path / "run.yaml").write_text(f"module: llama3\nconfig: debugmodel_sft\n{rows}")
    with pytest.raises(
        UserError, match=r"'dataloader.format' in .*: --dataloader.format .*config_registry.py:f"
    ):
        ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")])
    tasks = f"callbacks: {{evaluation: {{include_path: '{module}'}}}}\n"
    (tmp_path / "run.yaml").write_text(f"module: llama3\nconfig: debugmodel\n{tasks}")
    with pytest.raises(UserError, match=r"include_path' .* a folder whose code would run"):
        ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")])
    (tmp_path / "run.yaml").write_text(f"module: llama3\nconfig: debugmodel_sft\n{rows}")
    given = f"--dataloader.format={module}/other.py:f"
    config = ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml"), given]).config
    assert config.dataloader.format == f"{module}/other.py:f"


@pytest.mark.parametrize(
    "name",
    [
        "torchtitan.protocols.converter:ModelConverter",
        "torchtitan.protocols.converter:LayerConverter",
        "torchtitan.components.peft:LoRA.Config",
        "torchtitan.components.peft:LoRA.Config.build",
        "os:system",
    ],
)
def test_checkpoint_selects_only_converters(name):
    with pytest.raises(UserError, match="which is not a ModelConverter"):
        converters_from_records([{"class": name, "config": {}}], "step-1")


def test_current_folder_does_not_hide_a_library(tmp_path):
    for name in ("tyro.py", "yaml.py", "llama3.py"):
        (tmp_path / name).write_text("raise SystemExit(99)\n")
    command = [sys.executable, "-m", "torchtitan", "train", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and "--dump_folder" in result.stdout


# --- records on resume
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", [b"null\n", b"[]\n", b"garbage\n", b'{"step": null}\n', b"[" * 100_000 + b"\n"]
)
def test_damaged_lines_are_skipped_and_saved(tmp_path, damage, caplog, monkeypatch):
    monkeypatch.setattr("torchtitan.components.observe.metric_sinks.logger.propagate", True)
    path = tmp_path / "metrics.jsonl"
    whole = [b'{"step": 1}\n', b'{"step": 2}\n', b'{"step": 3}\n']
    path.write_bytes(whole[0] + damage + whole[1] + whole[2])
    before = path.read_bytes()
    JsonLines(path, 2).close()
    assert path.read_bytes() == whole[0] + whole[1]
    assert (tmp_path / "metrics-1.jsonl").read_bytes() == before
    assert "skipped 1 damaged lines; the original is metrics-1.jsonl" in caplog.text


def test_partial_last_line_is_not_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    JsonLines(path, 1).close()
    assert os.listdir(tmp_path) == ["metrics.jsonl"] and path.read_bytes() == b'{"step": 1}\n'


def test_records_must_be_regular_files(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="metrics.jsonl' is not a regular file; remove it"):
        JsonLines(tmp_path / "metrics.jsonl", 2)


def test_configuration_file_must_be_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(
        UserError,
        match="^--config_file .*run.yaml is not a regular file; save its content to a file,",
    ):
        ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")])


def test_damaged_file_is_not_copied_by_convert(tmp_path):
    (tmp_path / "tokenizer_config.json").write_bytes(bytes(100))
    with pytest.raises(UserError, match="tokenizer_config.json' is not valid JSON"):
        files_in(tmp_path)


@pytest.mark.parametrize(
    "module",
    [
        "evil",
        "./evil",
        "evil/",
        "torchtitan.models.x/evil",
        "torchtitan.models./../evil",
        "torchtitan.models.llama3/../evil",
    ],
)
def test_configuration_file_imports_no_module(tmp_path, monkeypatch, module):
    monkeypatch.chdir(tmp_path)
    for folder in (
        "evil",
        "torchtitan.models.x/evil",
        "torchtitan.models.",
        "torchtitan.models.llama3",
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config_registry.py").write_text(
            "open('canary', 'w')\ndef debugmodel(): pass\n"
        )
    (tmp_path / "run.yaml").write_text(f"module: {module}\nconfig: debugmodel\n")
    with pytest.raises(
        UserError, match="'module' in run.yaml is .*, code that is neither built in nor installed"
    ):
        ConfigManager().parse_args(["--config_file", "run.yaml"])
    assert not (tmp_path / "canary").exists()


def test_configuration_file_may_name_a_built_in_module(tmp_path):
    for module in ("llama3", "torchtitan.models.llama3"):
        (tmp_path / "run.yaml").write_text(f"module: {module}\nconfig: debugmodel\n")
        assert (
            ConfigManager().parse_args(["--config_file", str(tmp_path / "run.yaml")]).module
            == module
        )
