#!/usr/bin/env bash
# Guess: load_dataset(name, revision="v1") returns revision v1 of a dataset or fails, also without a
#   network.
#
# Truth: datasets 5.2 with HF_HUB_OFFLINE=1 returns the copy that was made last, whatever the revision,
#   without an error. It does the same if the hub does not answer, with a warning.
#
# What a trainer must do: compare the commit of the copy, the name of its folder, with the revision,
#   and refuse a copy that may be of another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 huggingface_hub
cat > "$folder/hub.py" <<'PYTHON'
"""A hub with two revisions of one dataset, of one file."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    def reply(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        revision = "v1" if "v1" in path or COMMITS["v1"] in path else "main"
        content = json.dumps({"text": revision}).encode()
        file = {"type": "file", "path": "train.jsonl", "size": len(content), "oid": revision}
        if "/resolve/" in path and path.endswith("train.jsonl"):
            self.reply(content, ETag=f'"{revision}"', X_Repo_Commit=COMMITS[revision])
        elif "/tree/" in path or "/paths-info/" in path:
            self.reply(json.dumps([file] if "train" not in path else []).encode())
        elif path.startswith("/api/datasets/org/data"):
            info = {"id": "org/data", "sha": COMMITS[revision], "siblings": []}
            self.reply(json.dumps(info | {"private": False, "downloads": 0, "tags": []}).encode())
        else:
            self.reply(b"", 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Hub)
print(server.server_address[1], flush=True)
server.serve_forever()
PYTHON
cat > "$folder/read.py" <<'PYTHON'
import sys

import datasets

for revision in sys.argv[1:]:
    table = datasets.load_dataset("org/data", split="train", revision=revision)
    print(revision, "is read as", table[0]["text"])
PYTHON
coproc hub { "$folder/venv/bin/python" "$folder/hub.py"; }
# shellcheck disable=SC2154  # coproc sets it
trap 'kill "$hub_PID"; rm -rf "$folder"' EXIT
read -r port <&"${hub[0]}"
export HF_ENDPOINT=http://127.0.0.1:$port HF_HOME=$folder/home
"$folder/venv/bin/python" -c 'import datasets; print("datasets", datasets.__version__)'
echo "online:"
"$folder/venv/bin/python" "$folder/read.py" v1 main 2> /dev/null
echo "offline:"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/read.py" v1 main 2> /dev/null | tee "$folder/out"
[ "$(grep -c 'is read as main' "$folder/out")" = 2 ]
echo "as described"
