"""A hub that serves folders of this machine: what `datasets` and `huggingface_hub` ask for to read
datasets."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def local_hub(repositories: dict[str, dict[str, Path]]) -> Iterator[str]:
    """Serve repository → revision → folder, and yield the address (`HF_ENDPOINT`). The first
    revision is `main`."""
    names = {
        (repository, revision): hashlib.sha1(f"{repository}{revision}".encode()).hexdigest()
        for repository, revisions in repositories.items()
        for revision in revisions
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            asked = self.rfile.read(length).decode()
            self.answer(asked=asked)

        def send(self, status: int, body: bytes, with_body: bool = True, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def answer(self, with_body: bool = True, asked: str = "") -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "datasets"]:
                repository, rest = "/".join(parts[2:4]), parts[4:]
            elif parts[0] == "datasets":
                repository, rest = "/".join(parts[1:3]), parts[3:]
            else:
                return self.send(404, b"{}")
            kind, revision = (rest + ["", ""])[:2]
            found = self.folder(repository, revision or "main")
            if found is None:
                code = "RepoNotFound" if repository not in repositories else "RevisionNotFound"
                return self.send(404, b"{}", with_body, X_Error_Code=code)
            folder, commit = found
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            if kind in ("tree", "paths-info"):
                everything = sorted(folder.rglob("*"))
                if kind == "paths-info":
                    wanted = parse_qs(asked).get("paths", []) or json.loads(asked)["paths"]
                    everything = [one for one in everything if self.name(one, folder) in wanted]
                else:
                    top = folder / "/".join(rest[2:])
                    is_recursive = "recursive=true" in self.path.lower()
                    everything = [
                        one
                        for one in everything
                        if one.parent == top or is_recursive and top in one.parents
                    ]
                rows = [self.row(path, folder) for path in everything]
                return self.send(200, json.dumps(rows).encode(), with_body)
            if kind == "resolve":
                path = folder / "/".join(rest[2:])
                if not path.is_file():
                    return self.send(404, b"", with_body, X_Error_Code="EntryNotFound")
                content = path.read_bytes()
                headers = {"ETag": f'"{_digest(content)}"', "X_Repo_Commit": commit}
                asked_range = self.headers.get("Range", "")
                if asked_range.startswith("bytes="):
                    first, _, last = asked_range[6:].partition("-")
                    end = min(int(last or len(content)), len(content) - 1)
                    headers["Content_Range"] = f"bytes {first}-{end}/{len(content)}"
                    return self.send(206, content[int(first) : end + 1], with_body, **headers)
                return self.send(200, content, with_body, **headers)
            siblings = [{"rfilename": str(path.relative_to(folder))} for path in files]
            info = {"id": repository, "sha": commit, "siblings": siblings, "private": False}
            info |= {"tags": [], "downloads": 0, "likes": 0, "disabled": False, "gated": False}
            return self.send(200, json.dumps(info).encode(), with_body)

        def folder(self, repository: str, revision: str) -> tuple[Path, str] | None:
            revisions = repositories.get(repository, {})
            first = next(iter(revisions), "")
            revision = first if revision == "main" else revision
            for name, folder in revisions.items():
                commit = names[repository, name]
                if revision in (name, commit):
                    return folder, commit
            return None

        def name(self, path: Path, folder: Path) -> str:
            return str(path.relative_to(folder))

        def row(self, path: Path, folder: Path) -> dict[str, object]:
            name = self.name(path, folder)
            if path.is_dir():
                return {"type": "directory", "path": name, "oid": _digest(name.encode())}
            content = path.read_bytes()
            return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
