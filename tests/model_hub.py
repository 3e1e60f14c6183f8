"""A hub of models on this machine: it takes what `huggingface_hub` uploads, in commits and by Git
LFS, and serves it again, as transformers, diffusers and PEFT ask for it."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

_COMMIT = "c" * 40
_TOKEN = "hf_" + "a" * 34

Files = dict[str, bytes]


@contextlib.contextmanager
def model_hub() -> Iterator[dict[str, Files]]:
    """Let `huggingface_hub` use an empty hub, with a token; yield its repositories, name → name of
    a file → content."""
    repositories: dict[str, Files] = {}
    objects: Files = {}  # by SHA-256

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def send(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def send_json(self, content: object) -> None:
            self.send(200, json.dumps(content).encode())

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def words(self) -> list[str]:
            return unquote(urlsplit(self.path).path).strip("/").split("/")

        def do_PUT(self) -> None:
            content, name = self.body(), self.words()[-1]
            assert hashlib.sha256(content).hexdigest() == name
            objects[name] = content
            self.send(200)

        def do_POST(self) -> None:
            body, words = self.body(), self.words()
            assert self.headers["Authorization"] == f"Bearer {_TOKEN}"
            if words == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                repositories[name] = {}
                self.send_json({"url": f"{address}/{name}"})
            elif words == ["api", "validate-yaml"]:
                self.send_json({"errors": [], "warnings": []})
            elif words[-1] == "batch":
                self.send_json({"objects": [*map(_place, json.loads(body)["objects"])]})
            elif words[4] == "preupload":
                self.send_json({"files": [*map(_mode, json.loads(body)["files"])]})
            else:
                assert words[4] == "commit"
                name = "/".join(words[2:4])
                commit(repositories[name], body)
                url = f"{address}/{name}/commit/{_COMMIT}"
                self.send_json({"commitUrl": url, "commitOid": _COMMIT})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            words = self.words()
            of_api = words[0] == "api"
            name = "/".join(words[2:4] if of_api else words[:2])
            files = repositories.get(name)
            if files is None:
                return self.send(404, X_Error_Code="RepoNotFound")
            if of_api and words[4:5] == ["tree"]:
                folder = "/".join([*words[6:], ""])
                found = {path: files[path] for path in files if path.startswith(folder)}
                if not found:
                    return self.send(404, X_Error_Code="EntryNotFound")
                return self.send_json([_entry(path, content) for path, content in found.items()])
            if of_api:
                siblings = [{"rfilename": one} for one in files]
                return self.send_json({"id": name, "sha": _COMMIT, "siblings": siblings})
            content = files.get("/".join(words[4:]))
            if content is None:
                return self.send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=_COMMIT)
            self.send(200, content, ETag=f'"{_digest(content)}"', X_Repo_Commit=_COMMIT)

    def _place(asked: dict[str, Any]) -> dict[str, object]:
        """Return where to upload an object."""
        return {**asked, "actions": {"upload": {"href": f"{address}/objects/{asked['oid']}"}}}

    def commit(files: Files, body: bytes) -> None:
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = objects[value["oid"]]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = "huggingface_hub.constants"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    try:
        with (
            mock.patch(f"{constants}.ENDPOINT", address),
            mock.patch("huggingface_hub.hf_api.api.endpoint", address),
            mock.patch(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template),
            mock.patch(f"{constants}.HF_HUB_DISABLE_XET", True),
            mock.patch("huggingface_hub.get_token", lambda: _TOKEN),
            mock.patch("huggingface_hub.utils._headers.get_token", lambda: _TOKEN),
        ):
            yield repositories
    finally:
        server.shutdown()
        server.server_close()


def _mode(file: dict[str, Any]) -> dict[str, object]:
    mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
