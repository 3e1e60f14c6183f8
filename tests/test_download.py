"""`torchtitan download`: which files are asked for, and what is said when the hub does not give them."""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from torchtitan.cli.main import main

FILES = [
    *("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"),
    *("original/consolidated.00.pth", "original/params.json", "onnx/config.json", "pytorch_model.bin"),
]
SMALL = [name for name in FILES if name.startswith(("config", "generation", "tokenizer", "chat"))]


@pytest.fixture
def hub(monkeypatch):
    """A hub with one repository; remembers what was asked of it."""
    asked = SimpleNamespace(error=None, download=None, files=FILES)

    def model_info(self, repo_id, revision=None):
        if asked.error:
            raise asked.error
        return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=name) for name in asked.files])

    def snapshot_download(self, repo_id, **options):
        asked.download = (repo_id, options)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.HfApi, "snapshot_download", snapshot_download)
    return asked


def http_error(kind: type, message: str = "Client Error\nmore") -> Exception:
    response = SimpleNamespace(headers={}, request=None, status_code=401)
    return kind(message, response=response)


@pytest.mark.parametrize(
    ("flag", "files"),
    [
        ([], {*SMALL, *(name for name in FILES if name.startswith("model"))}),
        (["--tokenizer_only"], {*SMALL}),
        (["--original"], {*SMALL, "original/consolidated.00.pth", "original/params.json"}),
    ],
)
def test_the_files_that_are_needed(hub, capsys, flag, files):
    assert main(["download", "someone/Model-8B", "--revision", "v2", *flag]) == 0
    repo_id, options = hub.download
    assert repo_id == "someone/Model-8B"
    assert set(options["allow_patterns"]) == files
    assert (str(options["local_dir"]), options["revision"]) == ("assets/hf/Model-8B", "abc")
    assert capsys.readouterr().out == "downloaded someone/Model-8B to assets/hf/Model-8B\n"


def test_pickled_weights_where_there_are_no_others(hub):
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
    for files in (["pytorch_model.bin"], shards):
        hub.files = [*SMALL, *files, "training_args.bin", "README.md"]
        for flag, expected in (([], {*SMALL, *files}), (["--tokenizer_only"], {*SMALL})):
            assert main(["download", "someone/Model-8B", *flag]) == 0
            assert set(hub.download[1]["allow_patterns"]) == expected


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError), "a/b is gated: accept its licence on {hub}/a/b, and set HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError), "there is no model 'a/b' on the hub, or it is private"),
        (http_error(errors.RevisionNotFoundError), "a/b has no revision 'x'"),
        (http_error(errors.HfHubHTTPError, "503 Server Error\nmore"), "cannot be reached (503 Server Error); check"),
        (errors.OfflineModeIsEnabled("offline mode"), "cannot be reached (offline mode); check the network"),
        (errors.HFValidationError("bad"), "'a/b' is not the name of a repository (OWNER/NAME)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_refuses_is_one_line(hub, capsys, error, message):
    hub.error = error
    assert main(["download", "a/b", "--revision", "x"]) == 2
    output = capsys.readouterr().err
    assert message.format(hub=huggingface_hub.HfApi().endpoint) in output
    assert output.startswith("torchtitan download: ")
    assert output.count("\n") == 1


def test_without_a_network_a_folder_with_files_is_not_taken_for_the_model(monkeypatch, tmp_path, capsys):
    """A closed port stands for the hub."""
    (tmp_path / "some.file").touch()
    api = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api(endpoint="http://127.0.0.1:9"))
    assert main(["download", "a/b", "--dest", str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert "http://127.0.0.1:9 cannot be reached" in output
    assert "check the network" in output


def test_a_folder_that_cannot_be_written(hub, monkeypatch, tmp_path, capsys):
    def fails(self, repo_id, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(huggingface_hub.HfApi, "snapshot_download", fails)
    assert main(["download", "a/b", "--dest", str(tmp_path)]) == 3
    assert f"{tmp_path} cannot be written: Permission denied" in capsys.readouterr().err
