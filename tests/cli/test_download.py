"""`torchtitan download`: the requested files, the kept files, and messages for errors of the
Hub."""

import hashlib
import json
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from filelock import FileLock
from huggingface_hub import errors
from huggingface_hub.hf_api import RepoSibling

from torchtitan.cli.main import main
from torchtitan.components.weights import assets

FILES = [
    *(
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ),
    *(
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
    ),
    *(
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/config.json",
        "pytorch_model.bin",
    ),
]
SMALL = [name for name in FILES if name.startswith(("config", "generation", "tokenizer", "chat"))]


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository, whose files contain their names; records the requests."""
    monkeypatch.chdir(tmp_path)
    asked = SimpleNamespace(error=None, download=None, files=FILES)

    def model_info(self, repo_id, revision=None, files_metadata=False):
        assert files_metadata
        if asked.error:
            raise asked.error
        return SimpleNamespace(
            sha="abc",
            siblings=[RepoSibling(name, blob_id=git_digest(name.encode())) for name in asked.files],
        )

    def snapshot_download(self, repo_id, *, local_dir, **options):
        asked.download = (repo_id, options)
        for name in options["allow_patterns"]:
            (local_dir / name).parent.mkdir(exist_ok=True)
            (local_dir / name).write_text(name)

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
def test_only_needed_files_are_downloaded(hub, capsys, flag, files):
    assert main(["download", "someone/Model-8B", "--revision", "v2", *flag]) == 0
    repo_id, options = hub.download
    assert repo_id == "someone/Model-8B"
    assert set(options["allow_patterns"]) == files
    assert options["revision"] == "abc"
    folder = Path("assets/hf/Model-8B")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == files
    assert capsys.readouterr().out == "downloaded someone/Model-8B to assets/hf/Model-8B\n"


def test_what_reads_images_and_tools_is_downloaded(hub):
    """All files that a run or a conversion copies, and templates besides the usual one."""
    templates = ["additional_chat_templates/tool_use.jinja"]
    unused = ["onnx/tokenizer.json", "additional_chat_templates/old/tool_use.jinja"]
    hub.files = [*assets.FILES, *templates, *unused, "model.safetensors"]
    assert main(["download", "someone/Model-8B"]) == 0
    expected = {*assets.FILES, *templates, "model.safetensors"}
    assert set(hub.download[1]["allow_patterns"]) == expected


def test_pickled_weights_as_fallback(hub):
    shards = [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ]
    for files in (["pytorch_model.bin"], shards):
        hub.files = [*SMALL, *files, "training_args.bin", "README.md"]
        for flag, expected in (([], {*SMALL, *files}), (["--tokenizer_only"], {*SMALL})):
            folder = f"{len(files)}{flag}"
            assert main(["download", "someone/Model-8B", "--dest", folder, *flag]) == 0
            assert set(hub.download[1]["allow_patterns"]) == expected


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            http_error(errors.GatedRepoError),
            "a/b is gated: accept its license on {hub}/a/b, and set HF_TOKEN",
        ),
        (
            http_error(errors.RepositoryNotFoundError),
            "there is no model 'a/b' on the Hub, or it is private",
        ),
        (http_error(errors.RevisionNotFoundError), "a/b has no revision 'x'"),
        (
            http_error(errors.HfHubHTTPError, "503 Server Error\nmore"),
            "cannot be reached (503 Server Error); check",
        ),
        (
            errors.OfflineModeIsEnabled("offline mode"),
            "cannot be reached (offline mode); check the network",
        ),
        (errors.HFValidationError("bad"), "'a/b' is not the name of a repository (OWNER/NAME)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_of_the_hub_is_one_line(hub, capsys, error, message):
    hub.error = error
    assert main(["download", "a/b", "--revision", "x"]) == 2
    output = capsys.readouterr().err
    assert message.format(hub=huggingface_hub.HfApi().endpoint) in output
    assert output.startswith("torchtitan download: ")
    assert output.count("\n") == 1


def test_offline_folder_with_files_is_not_accepted_as_the_model(monkeypatch, tmp_path, capsys):
    """A closed port replaces the Hub."""
    (tmp_path / "some.file").touch()
    api = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api(endpoint="http://127.0.0.1:9"))
    assert main(["download", "a/b", "--dest", str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert "http://127.0.0.1:9 cannot be reached" in output
    assert "check the network" in output


def test_unwritable_folder(hub, monkeypatch, tmp_path, capsys):
    def fails(self, repo_id, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(huggingface_hub.HfApi, "snapshot_download", fails)
    assert main(["download", "a/b", "--dest", str(tmp_path)]) == 3
    assert f"{tmp_path} cannot be written: Permission denied" in capsys.readouterr().err


class FakeHub(ThreadingHTTPServer):
    """Serves a repository like the Hugging Face Hub: `model.safetensors` from LFS, other files from
    git."""

    sha = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files = {
            name: name.encode() * 9
            for name in ("config.json", "tokenizer.json", "model.safetensors")
        }
        self.sent: dict[str, bytes] = {}
        """Contents that the server sends instead of the listed ones."""
        self.torn: set[str] = set()
        """Files of which only the first half is sent."""
        self.answers: dict[str, bytes] = {}
        """Part of an address → response to it, with status 200."""
        self.fetched: Counter[str] = Counter()

    @property
    def listed(self) -> list[dict]:
        return [self.entry(name, content) for name, content in self.files.items()]

    def entry(self, name: str, content: bytes) -> dict:
        entry = {"type": "file", "rfilename": name, "path": name, "size": len(content)}
        entry |= {"blobId": git_digest(content), "oid": git_digest(content)}
        if name.endswith("safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {
                "size": len(content),
                "sha256": digest,
                "oid": digest,
                "pointerSize": 130,
            }
        return entry


class FakeHubHandler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := [answer for part, answer in self.server.answers.items() if part in path]:
            self.answer(found[0], {"Content-Type": "application/json"})
            return
        if "/resolve/" not in path:
            answer = self.server.listed if "/tree/" in path else {"id": "a/b", "sha": FakeHub.sha}
            if "/tree/" not in path:
                answer["siblings"] = self.server.listed
            self.answer(json.dumps(answer).encode(), {"Content-Type": "application/json"})
            return
        name = path.partition(f"/resolve/{FakeHub.sha}/")[2]
        content = self.server.sent.get(name, self.server.files[name])
        headers = {"X-Repo-Commit": FakeHub.sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self.server.fetched[name] += self.command == "GET"
        self.answer(content, headers, torn=name in self.server.torn)

    do_HEAD = do_GET

    def answer(self, content: bytes, headers: dict[str, str], *, torn: bool = False) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if torn else content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    api = huggingface_hub.HfApi
    # before the next attempt
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with FakeHub() as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api(endpoint=endpoint))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def visible(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name != ".download"]


def test_download_equals_the_hub_and_is_not_repeated(fake_hub, tmp_path):
    words = ["download", "a/b", "--dest", str(tmp_path / "model")]
    assert main(words) == 0 and main(words) == 0
    assert content_of(tmp_path / "model") == fake_hub.files
    assert set(fake_hub.fetched.values()) == {1}
    (tmp_path / "model/config.json").write_text("damaged later")
    assert main(words) == 0
    assert content_of(tmp_path / "model") == fake_hub.files
    assert fake_hub.fetched == {"config.json": 2, "tokenizer.json": 1, "model.safetensors": 1}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda content: content[:-1] + b"?", "is damaged: its digest is"),
        (lambda _: POINTER, "a Git LFS pointer"),
    ],
    ids=["damaged", "pointer"],
)
def test_corrupt_download_is_deleted(fake_hub, tmp_path, capsys, name, wrong, message):
    """The server's headers match the wrong content, so only the file list shows the error. No file
    is kept, and the next call downloads only that file."""
    fake_hub.sent[name] = wrong(fake_hub.files[name])
    words = ["download", "a/b", "--dest", str(tmp_path / "model")]
    assert main(words) == 2
    output = capsys.readouterr().err.splitlines()[-1]
    assert output.startswith(f"torchtitan download: {name} of a/b ") and message in output
    assert visible(tmp_path / "model") == []
    assert fake_hub.sent[name] not in content_of(tmp_path / "model").values()
    del fake_hub.sent[name]
    assert main(words) == 0
    assert content_of(tmp_path / "model") == fake_hub.files
    assert {fetched for fetched, times in fake_hub.fetched.items() if times == 2} == {name}


def test_interrupted_download_resumes(fake_hub, tmp_path, capsys):
    fake_hub.torn.add("model.safetensors")
    words = ["download", "a/b", "--dest", str(tmp_path / "model")]
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("torchtitan download: ")
    assert visible(tmp_path / "model") == []
    (tmp_path / "model/.download/.cache/huggingface/download/killed.incomplete").write_bytes(
        b"half a model"
    )
    fake_hub.torn.clear()
    assert main(words) == 0
    assert content_of(tmp_path / "model") == fake_hub.files
    assert fake_hub.fetched["config.json"] == 1


def test_two_downloads_into_one_folder(fake_hub, tmp_path, capsys):
    (tmp_path / ".download").mkdir()
    with FileLock(tmp_path / ".download/lock"):
        assert main(["download", "a/b", "--dest", str(tmp_path)]) == 2
    assert "another `torchtitan download` writes to" in capsys.readouterr().err


def test_hub_without_digests(hub, monkeypatch, capsys):
    info = SimpleNamespace(sha="abc", siblings=[RepoSibling("config.json")])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    assert main(["download", "a/b"]) == 2
    assert "config.json of a/b has no digest on the Hub" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../evil.safetensors",
            "original/../../evil",
            "..",
            "/etc/passwd",
            "a\\..\\evil",
            "C:evil",
        ),
        *("a\0b", "a\x1b[2J", "a//b", "./a", "a/", ""),
    ],
)
def test_file_names_outside_the_folder_are_rejected(hub, capsys, name):
    hub.files = [*FILES, name]
    assert main(["download", "a/b", "--original"]) == 2
    assert (
        f"a/b has a file called {name!r}, which may lead out of the folder"
        in capsys.readouterr().err
    )
    assert hub.download is None and os.listdir() == []


@pytest.mark.parametrize("repo_id", ["..", "a/..", "../a", "a/b/../c", "/etc/passwd", "a/b\0"])
def test_repository_names_outside_the_folder_are_rejected(hub, capsys, repo_id):
    assert main(["download", repo_id]) == 2
    assert f"{repo_id!r} is not the name of a repository (OWNER/NAME)" in capsys.readouterr().err
    assert hub.download is None and os.listdir() == []


def test_wildcards_in_file_names_are_literal(fake_hub, tmp_path):
    fake_hub.files = {"model[1].safetensors": b"weights", "model1.safetensors": b"others"}
    assert main(["download", "a/b", "--dest", str(tmp_path / "model")]) == 0
    assert content_of(tmp_path / "model") == fake_hub.files


INFO = b'{"id": "a/b", "siblings": %s}'


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        *(
            ("/api/", answer)
            for answer in (
                b"",
                b"<html>",
                b"null",
                b"[]",
                b'"text"',
                b"{}",
                b"\xff",
                b"[" * 100_000,
            )
        ),
        *(
            ("/api/", INFO % siblings)
            for siblings in (b"[{}]", b"[3]", b'[{"rfilename": 3}]', b"3")
        ),
        ("/api/", INFO % b'[{"rfilename": "config.json", "lfs": {}}]'),
        ("/api/", INFO % b'[{"rfilename": "config.json", "blobId": "3"}]'),  # no sha
        ("/api/", b'{"id": "a/b", "lastModified": "yesterday"}'),
        *(("/tree/", answer) for answer in (b"", b"null", b"[3]")),
    ],
)
def test_invalid_response_is_one_line(fake_hub, tmp_path, capsys, part, answer):
    fake_hub.answers = {part: answer}
    assert main(["download", "a/b", "--dest", str(tmp_path / "model")]) == 2
    output = capsys.readouterr().err
    assert f":{fake_hub.server_port} does not answer like the Hugging Face Hub (" in output
    assert output.startswith("torchtitan download: ") and output.count("\n") == 1
