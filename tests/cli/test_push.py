"""`torchtitan push`: the files that arrive on a hub on this machine, the card, and refusals."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from torchtitan.cli.main import main
from torchtitan.cli.model_card import model_card
from torchtitan.cli.report import RunRecord
from torchtitan.components.checkpoint import catalog

TOKEN = "hf_" + "a" * 34
COMMAND = "torchtitan train --module auto --config lora --dataloader.dataset org/data"


@pytest.fixture
def hub(monkeypatch):
    """A hub that takes repositories and commits of small files, and remembers them."""
    taken = SimpleNamespace(created=[], files={}, status=200, existing=set(), deleted=[])

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            assert self.path.startswith("/api/models/me/tiny/tree/main")
            names = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
            names += ["model.safetensors", "notes.txt"]
            self.send(
                200, [{"type": "file", "path": name, "oid": "0", "size": 1} for name in names]
            )

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            assert self.headers["Authorization"] == f"Bearer {TOKEN}"
            if taken.status != 200:
                return self.send(taken.status, {"error": "no"})
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                if name in taken.existing:
                    return self.send(409, {"error": "exists", "url": f"{address}/{name}"})
                taken.created.append(
                    (name, asked["visibility"] if "visibility" in asked else asked["private"])
                )
                return self.send(200, {"url": f"{address}/{name}"})
            if "/preupload/" in self.path:
                files = json.loads(body)["files"]
                return self.send(
                    200,
                    {
                        "files": [
                            {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                            for f in files
                        ]
                    },
                )
            if self.path == "/api/validate-yaml":
                is_wrong = "license: wrong" in json.loads(body)["content"]
                found = [{"message": "license must be one of"}] if is_wrong else []
                return self.send(400 if found else 200, {"errors": found, "warnings": []})
            assert "/commit/main" in self.path
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "deletedFile":
                    taken.deleted.append(line["value"]["path"])
                if line["key"] == "file":
                    taken.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.send(
                200, {"commitUrl": f"{address}/me/tiny/commit/c", "commitOid": "c", "success": True}
            )

        def send(self, status: int, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use_endpoint(monkeypatch, address)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: TOKEN)
    yield taken
    server.shutdown()
    server.server_close()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The library reads HF_ENDPOINT when it is imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)


def started(command: str) -> dict[str, object]:
    """Return the first event of a run."""
    begun = {"time": 1.0, "begun": 0.5, "step": 0, "seconds": {}}
    known = {"command": command, "parameters": 7, "layout": "one", "hub": ["org/data"]}
    return {"event": "start", **begun, **known}


@pytest.fixture
def run(tmp_path):
    """The dump folder of a run with two checkpoints, only the first one in Hugging Face format."""
    folder = tmp_path / "outputs"
    model = folder / "checkpoint" / "step-4.partial"
    (model / "assets").mkdir(parents=True)
    (folder / "checkpoint" / "step-5").mkdir()
    (model / "adapter").mkdir()
    for name, text in {
        "config.json": '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
        "model.safetensors": "weights",
        "tokenizer.json": "{}",
        "assets/model.json": "{}",
        "adapter/adapter_config.json": "{}",
        "adapter/adapter_model.safetensors": "adapter",
        "optimizer.pt": "momentum",
        "__0_0.distcp": "states",
    }.items():
        (model / name).write_text(text)
    catalog.commit(model, catalog.Marker(step=4, kind="huggingface", world_size=1))
    (folder / "metrics.jsonl").write_text(
        '{"step": 4, "loss": 2.5}\n{"step": 5, "loss": 2.25, "step_time": 0.5, "mfu": 9}\n'
    )
    start = started(COMMAND)
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    config = {
        "module": "auto",
        "config": "lora",
        "dataloader": {"dataset": ["org/data:en@main", str(tmp_path / "mine.jsonl")]},
        "optimizer": {"lr": 0.001},
        "training": {"local_batch_size": 8, "global_batch_size": -1},
        "model_converters": {"lora": {"rank": 8}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


WANTED = {
    "README.md",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
}


def push(*words: object) -> int:
    return main(["push", *map(str, words)])


def test_the_model_and_a_card_arrive(hub, run, capsys):
    assert push(run, "me/tiny", "--license", "mit", "--base_model", "org/base") == 0
    assert hub.files.keys() == WANTED
    assert hub.files["model.safetensors"] == b"weights"
    ((name, privacy),) = hub.created
    assert name == "me/tiny" and privacy in (True, "private")
    _, header, body = hub.files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "transformers",
        "tags": ["torchtitan"],
        "pipeline_tag": "text-generation",
        "license": "mit",
        "base_model": "org/base",
        "datasets": ["org/data"],
    }
    for said in ("| optimizer.lr | 0.001 |", "| last loss | 2.25 |", COMMAND, "lora.rank | 8 |"):
        assert said in body
    assert "| last step_time (s) | 0.5 |" in body and "last mfu" not in body
    assert "local_batch_size | 8 |" in body and "global_batch_size" not in body
    assert "| step of these weights | 4 |\n| step of the last numbers | 5 |" in body
    assert "pushed 6 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/me/assets/hf/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/home/me/out/text/checkpoint/step-9", "text/checkpoint/step-9"),
        ("../base", "base"),
    ],
)
def test_the_card_names_the_folder_of_the_base(path, name, run, capsys):
    """By its last name: the path is of a machine."""
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["checkpoint"] = {"initial_load_path": path}
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    assert push(run, "me/tiny", "--dry_run") == 0
    out = capsys.readouterr().out
    assert f"Trained from the model in the folder `{name}` with torchtitan." in out
    assert "name its repository with --base_model" in out and "/home" not in out
    assert push(run, "me/tiny", "--dry_run", "--base_model", "org/base") == 0
    out = capsys.readouterr().out
    assert "folder" not in out.partition("## Method")[0].partition("# tiny")[2]


def test_a_card_tells_the_options_that_had_effect(run, capsys):
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["training"] |= {"epochs": 3, "steps": 1000}
    saved["lr_scheduler"] = {"warmup_ratio": None, "warmup_steps": 10}
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    start = started(f"{COMMAND} --training.steps 1000 --training.epochs 3")
    (run / "events.jsonl").write_text(json.dumps(start) + "\n")
    assert push(run, "me/tiny", "--dry_run") == 0
    out = capsys.readouterr().out
    assert "| training.epochs | 3 |" in out and "| training.steps |" not in out
    assert "`--training.steps` had no effect: `training.epochs` was 3." in out
    assert "| lr_scheduler.warmup_steps | 10 |" in out
    saved["training"]["epochs"], saved["lr_scheduler"]["warmup_ratio"] = None, 0.1
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    assert push(run, "me/tiny", "--dry_run") == 0
    out = capsys.readouterr().out
    assert "| training.steps | 1000 |" in out and "had no effect" not in out
    assert "| lr_scheduler.warmup_ratio | 0.1 |" in out and "warmup_steps" not in out


def test_public_repositories_are_asked_for(hub, run):
    assert push(run / "checkpoint" / "step-4", "me/tiny", "--public") == 0
    assert hub.created[0][1] in (False, "public")
    assert COMMAND in hub.files["README.md"].decode()  # the run that the folder is in


def test_dry_run_sends_nothing(hub, run, capsys):
    assert push(run, "me/tiny", "--dry_run") == 0
    out = capsys.readouterr().out
    assert not hub.created and not hub.files
    assert "              7  model.safetensors" in out
    assert "5 other files are left out" in out and COMMAND in out


def test_existing_repositories(hub, run, capsys):
    hub.existing.add("me/tiny")
    assert push(run, "me/tiny") == 2
    assert "me/tiny exists already; add a commit to it with --update" in capsys.readouterr().err
    assert not hub.files
    assert push(run, "me/tiny", "--update", "--public") == 2
    assert "--public has no effect with --update" in capsys.readouterr().err
    assert push(run, "me/tiny", "--update") == 0
    assert hub.files.keys() == WANTED
    old = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(hub.deleted) == old
    assert f"{old[0]} of the repository is deleted" in capsys.readouterr().out


def test_a_card_of_ones_own_is_kept(hub, run):
    (run / "checkpoint" / "step-4" / "README.md").write_text("mine")
    assert push(run, "me/tiny") == 0
    assert hub.files["README.md"] == b"mine"


@pytest.mark.parametrize("option", ["--license", "--base_model", "--run"])
def test_options_of_the_card_need_one(option, run, tmp_path, capsys):
    for name in ("README.md", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    assert push(tmp_path, "me/tiny", option, run, "--dry_run") == 2
    assert f"{option} has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config, header",
    [
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            {"library_name": "transformers", "pipeline_tag": "text-classification"},
        ),
        ({"_class_name": "DiTTransformer2DModel"}, {"library_name": "diffusers"}),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
            {"library_name": "transformers", "pipeline_tag": "image-text-to-text"},
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            {"library_name": "transformers"},
        ),
        ({"model_type": "llama"}, {"library_name": "transformers"}),
    ],
    ids=["reward", "diffusers", "images", "sequences", "unsaid"],
)
def test_only_language_models_generate_text(config, header, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_text("weights")
    assert push(tmp_path, "me/tiny", "--dry_run") == 0
    card = capsys.readouterr().out.split("---\n")[1]
    assert yaml.safe_load(card) == {**header, "tags": ["torchtitan"]}


@pytest.mark.parametrize(
    "config, task",
    [
        ({"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}, "text-generation"),
        ({"task_type": "SEQ_CLS", "target_modules": "all-linear"}, "text-classification"),
        ({"task_type": None, "target_modules": ["model.q_proj", "score"]}, "text-classification"),
        ({"target_modules": ["scores", "q_proj"]}, None),
    ],
)
def test_tasks_of_adapters(config, task, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_text("adapter")
    assert push(tmp_path, "me/adapter", "--dry_run") == 0
    card = yaml.safe_load(capsys.readouterr().out.split("---\n")[1])
    assert card.get("pipeline_tag") == task


@pytest.mark.parametrize(
    ("loader", "task"), [({"image_root": ""}, "image-text-to-text"), ({}, "text-generation")]
)
def test_tasks_of_adapters_for_images(loader, task, run, capsys):
    """By the loader, whatever the configuration is called."""
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["dataloader"] |= loader
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    folder = run / "checkpoint" / "step-6"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}')
    (folder / "adapter_model.safetensors").write_text("adapter")
    assert push(folder, "me/adapter", "--dry_run") == 0
    card = yaml.safe_load(capsys.readouterr().out.split("---\n")[1])
    assert card["pipeline_tag"] == task


def test_a_failed_upload_says_how_to_repeat_it(hub, run, monkeypatch, capsys):
    def fail(*_: object, **options: object) -> None:
        raise ConnectionError("cut")

    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.HfApi.create_commit", fail)
        assert push(run, "me/tiny") == 2
        shown = capsys.readouterr().err
        assert "me/tiny was created, and is empty; repeat the command with --update" in shown
        assert "cannot be reached" in shown
        assert push(run, "me/tiny", "--update") == 2
        assert "was created" not in capsys.readouterr().err
    assert push(run, "me/tiny", "--update") == 0


def test_datasets_are_those_that_the_run_found_on_the_hub(run, capsys):
    start = {**started(COMMAND), "hub": []}  # the same name was a folder there
    (run / "events.jsonl").write_text(json.dumps(start) + "\n")
    assert push(run, "me/tiny", "--dry_run") == 0
    assert "datasets:" not in capsys.readouterr().out


def test_adapters_name_their_base(hub, tmp_path):
    adapter = {"base_model_name_or_path": "org/base", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").write_text("adapter")
    assert push(tmp_path, "me/adapter") == 0
    card = hub.files["README.md"].decode()
    assert "library_name: peft" in card and "base_model: org/base" in card


@pytest.mark.parametrize(
    "base, option, uploaded",
    [
        ("{here}/base", None, None),
        ("{here}/base", "org/base", "org/base"),
        ("../models/base", None, None),
        ("org/base", None, "org/base"),
        ("org/base", "org/other", "org/other"),
        ("gpt2", None, "gpt2"),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("place", [".", "adapter"])
def test_paths_of_this_machine_are_not_published(
    base, option, uploaded, place, hub, run, tmp_path, capsys
):
    """Neither in adapters, whose own files stay as they are, nor in the card."""
    folder = run / "checkpoint" / "step-6"
    file = folder / place / "adapter_config.json"
    file.parent.mkdir(parents=True)
    (file.parent / "adapter_model.safetensors").write_text("adapter")
    if place == ".":
        (folder / "README.md").write_text("mine")
    else:
        (folder / "model.safetensors").write_text("weights")
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["model_converters"]["lora"]["adapter_path"] = str(tmp_path / "first")
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    base = base and base.format(here=tmp_path)
    document = {"base_model_name_or_path": base, "r": 8}
    file.write_text(json.dumps(document))
    words = ["--base_model", option] if option else []
    assert push(folder, "me/tiny", *words) == 0
    sent = hub.files[file.relative_to(folder).as_posix()]
    assert json.loads(sent) == {**document, "base_model_name_or_path": uploaded}
    assert json.loads(file.read_text()) == document
    assert not any(
        str(tmp_path / name) in hub.files["README.md"].decode() for name in ("base", "first")
    )
    said = f"will name {uploaded or 'no base'} instead of {base}"
    assert (said in capsys.readouterr().out) is (base != uploaded)


def test_a_card_that_the_hub_refuses(hub, run, capsys):
    assert push(run, "me/tiny", "--license", "wrong") == 2
    assert "refuses the card: license must be one of" in capsys.readouterr().err
    assert not hub.files


@pytest.mark.parametrize(
    "status, message",
    [(401, "it does not know the token"), (403, "the token may not write to me"), (418, "418")],
)
def test_refusals_of_the_hub(hub, run, status, message, capsys):
    hub.status = status
    assert push(run, "me/tiny") == 2
    assert message in capsys.readouterr().err


def test_without_a_token(run, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert push(run, "me/tiny") == 2
    assert "not logged in" in capsys.readouterr().err


def test_without_a_network(run, monkeypatch, capsys):
    use_endpoint(monkeypatch, "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    assert push(run, "me/tiny") == 2
    assert "http://127.0.0.1:1 cannot be reached" in capsys.readouterr().err


def test_mistakes(run, tmp_path, capsys):
    for words, message in (
        ((tmp_path / "none", "me/tiny"), "none"),
        ((run, "tiny"), "'tiny' has no owner"),
        ((run, "me/ti ny"), "is not the name of a repository"),
        ((run / "checkpoint" / "step-4" / "assets", "me/tiny"), "convert --to hf"),
    ):
        assert push(*words, "--dry_run") == 2
        assert message in capsys.readouterr().err
    (run / "checkpoint" / "step-4" / "config.json").unlink()
    assert push(run, "me/tiny", "--dry_run") == 2
    assert f"--run {run}" in capsys.readouterr().err


def test_credentials_stay(run, capsys):
    folder = run / "checkpoint" / "step-4"
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    for path in (
        *(folder / name for name in ("generation_config.json", "chat_template.jinja", "README.md")),
        *(folder / "config.json", templates / "tool.jinja", folder / "adapter/adapter_config.json"),
    ):
        kept = path.read_text() if path.exists() else ""
        path.write_text(json.dumps({"url": f"https://x/?token={TOKEN}"}))
        assert push(run, "me/tiny", "--dry_run") == 2
        assert f"{path} has a credential" in capsys.readouterr().err
        path.write_text(kept)
    (folder / "vocab.json").write_text(json.dumps({TOKEN: 0}))
    assert push(run, "me/tiny", "--dry_run") == 0
    start = started(f"HF_TOKEN={TOKEN} {COMMAND}")
    (run / "events.jsonl").write_text(json.dumps(start) + "\n")
    card = model_card("tiny", "transformers", run=RunRecord(run))
    assert COMMAND in card and TOKEN not in card


def test_links_out_of_the_folder_are_refused(run, tmp_path, capsys):
    (tmp_path / "secret").write_text("secret")
    link = run / "checkpoint" / "step-4" / "generation_config.json"
    Path(link).symlink_to(tmp_path / "secret")
    assert push(run, "me/tiny", "--dry_run") == 2
    assert "generation_config.json" in capsys.readouterr().err
