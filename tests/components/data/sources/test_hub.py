"""Datasets by their names on the hub, read from a hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.local_hub import local_hub
from torchtitan.components.data.sources.hub_names import HubName, hub_name
from torchtitan.components.data.sources.source import DOCUMENTS, HubDataset, hub_repositories

pytest.importorskip("datasets")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name", None, None, "train")),
        ("org/name:en", HubName("org/name", "en", None, "train")),
        ("org/name@v1.0", HubName("org/name", None, "v1.0", "train")),
        ("org/name[test_sft]", HubName("org/name", None, None, "test_sft")),
        ("org/name:en@refs/pr/1[test]", HubName("org/name", "en", "refs/pr/1", "test")),
        ("org/name.jsonl", None),
        ("org/a/name", None),
        ("name", None),
        ("./name", None),
        ("../name", None),
        ("/org/name", None),
        ("org/*", None),
        ("s3://org/name", None),
        ("here/name", None),  # a path in a folder that exists
        ("here/part[0-9]", None),
    ],
)
def test_names(text, name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) == name


def test_repositories_among_names(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DOCUMENTS.registered, "my/stories", HubDataset(path="mine"))
    names = ["org/name:a", "org/name:b", "my/stories", "c4", "here/name", "a.jsonl", "x/y@v1"]
    assert hub_repositories(names) == ["org/name", "x/y"]


READ = """\
import json, sys
from torchtitan.components.data import PretrainDataLoader, PromptDataLoader, SFTDataLoader
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.tools.errors import UserError

tokenizer, cache = PretrainedTokenizer.Config().build(), sys.argv[1]

def texts(loader, datasets, **options):
    config = loader.Config(dataset=datasets, cache_dir=cache, **options)
    built = config.build(tokenizer=tokenizer, seq_len=128, local_batch_size=1, epochs=1)
    found = []
    for batch in built:
        rows = batch["prompts"] if "prompts" in batch else batch["input"].tolist()
        found += [tokenizer.decode(list(row)) for row in rows]
    return sorted(found)

sft = {"chat_template": "alpaca", "columns": ["prompt=ask", "completion=say"], "packing": "none"}
out = {
    "sft": texts(SFTDataLoader, ["org/qa", "org/qa@v1[test]"], **sft),
    "sft streams": texts(SFTDataLoader, ["org/qa", "org/qa@v1[test]"], weights=[1, 1],
                         stream="all", **sft),
    "prompts": texts(PromptDataLoader, ["org/qa@v1"], chat_template="alpaca",
                     columns=["prompt=ask"]),
    "stream": texts(PretrainDataLoader, ["org/texts:more"], text_column="body"),
    "mixed": texts(PretrainDataLoader, ["org/texts:more", "org/texts:less"], text_column="body"),
    "streams": texts(PretrainDataLoader, ["org/texts:more", "org/texts:less"], text_column="body",
                     stream="all"),
}
errors = []
for name in ("org/none", "org/qa@v9", "org/qa[dev]"):
    try:
        texts(SFTDataLoader, [name], **sft)
    except UserError as error:
        errors.append(str(error))
print(json.dumps([out, errors]))
"""

RESUME = """\
import json, sys
from pathlib import Path
from torchtitan.components.data import PretrainDataLoader, SFTDataLoader
from torchtitan.components.tokenizer import PretrainedTokenizer

tokenizer, state = PretrainedTokenizer.Config().build(), Path(sys.argv[1])
options = {"dataset": ["org/qa"], "stream": "all"}
sft = {"chat_template": "alpaca", "columns": ["prompt=ask", "completion=say"], "packing": "none"}
configs = [
    SFTDataLoader.Config(**options, **sft),
    PretrainDataLoader.Config(**options, text_column="ask"),
]
found, states = [], json.loads(state.read_text()) if state.exists() else None
for number, config in enumerate(configs):
    loader = config.build(tokenizer=tokenizer, seq_len=128, local_batch_size=1)
    if states:
        loader.load_state_dict(states[number])
    found.append([next(loader), loader.state_dict()])
if not states:
    state.write_text(json.dumps([position for _, position in found]))
print(json.dumps([tokenizer.decode(batch["input"].flatten().tolist()) for batch, _ in found]))
"""

READ_OFFLINE = """\
import sys
from torchtitan.components.data.sources.source import CHAT_DATASETS, resolve_source
from torchtitan.tools.errors import UserError

for name in sys.argv[1:]:
    try:
        source = resolve_source(name, catalog=CHAT_DATASETS)
        print([next(iter(row.values.values())) for row in source.rows(lambda n: None)])
    except UserError as error:
        print(error)
"""


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, dict[str, Path]]:
    top = tmp_path_factory.mktemp("hub")
    for revision in ("main", "v1"):
        for split in ("train", "test"):
            rows = [{"ask": f"{revision} {split} {n}?", "say": "Yes."} for n in range(2)]
            write(top / revision / f"{split}.jsonl", rows)
    for config in ("more", "less"):
        write(top / "texts" / config / "train.jsonl", [{"body": f"A text of {config}."}])
    (top / "texts/README.md").write_text(
        "---\nconfigs:\n- config_name: more\n  data_files: more/*\n"
        "- config_name: less\n  data_files: less/*\n---\n"
    )
    return {
        "org/qa": {"main": top / "main", "v1": top / "v1"},
        "org/texts": {"main": top / "texts"},
    }


@pytest.mark.slow
def test_data_is_read_by_name(repositories, tmp_path):
    """Configurations, revisions, splits, renamed columns, mixtures and streams; wrong names."""
    with local_hub(repositories) as address:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": address}
        words = [sys.executable, "-c", READ, str(tmp_path / "cache")]
        done = subprocess.run(words, env=environment, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found, errors = json.loads(done.stdout.splitlines()[-1])
    questions = ["main train 0?", "main train 1?", "v1 test 0?", "v1 test 1?"]
    assert len(found["sft"]) == 4
    for text, question in zip(found["sft"], questions, strict=True):
        assert f"{question}\n\n### Response:\nYes." in text
    assert found["sft streams"] == found["sft"]
    assert all("v1 train" in text for text in found["prompts"])
    assert len(found["prompts"]) == 2
    assert "A text of more." in found["stream"][0]
    for kind in ("mixed", "streams"):
        mixed = "".join(found[kind])
        assert "A text of more." in mixed and "A text of less." in mixed
    assert [error.partition("'")[2].partition("'")[0] for error in errors] == [
        "org/none",
        "org/qa@v9",
        "org/qa[dev]",
    ]
    assert all("\n" not in error for error in errors)

    # Without the network, datasets reads the copy made last, here v1, whatever the revision.
    environment["HF_HUB_OFFLINE"] = "1"
    last = hashlib.sha1(b"org/qav1").hexdigest()
    names = [f"org/qa@{last}", "org/qa", "org/qa@main", "org/texts:less", "org/new"]
    words = [sys.executable, "-c", READ_OFFLINE, *names]
    done = subprocess.run(words, env=environment, cwd=PROJECT, capture_output=True, text=True)
    copy, newest, branch, only, unknown = done.stdout.splitlines()
    assert copy == "['v1 train 0?', 'v1 train 1?']"
    assert "revision main cannot be asked for" in newest and f"org/qa@{last}" in newest
    assert branch == newest
    assert only == "['A text of less.']"
    assert "'org/new'" in unknown and "check the network, or use a local path" in unknown


@pytest.mark.slow
def test_a_resumed_run_reads_the_commit_it_began_with(repositories, tmp_path):
    """Although the newest one of the branch is another by then."""
    revisions = repositories["org/qa"]
    state, shown = tmp_path / "state.json", []
    for folders in (revisions, dict(reversed(revisions.items()))):
        with local_hub({"org/qa": folders}) as address:
            environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": address}
            words = [sys.executable, "-c", RESUME, str(state)]
            done = subprocess.run(
                words, env=environment, cwd=PROJECT, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr[-2000:]
        shown.append(json.loads(done.stdout.splitlines()[-1]))
        commit = hashlib.sha1(b"org/qamain").hexdigest()
        assert (f"continues to read commit {commit}" in done.stderr + done.stdout) == (
            len(shown) == 2
        )
    for texts in shown:
        assert all("main train" in text and "v1" not in text for text in texts)
