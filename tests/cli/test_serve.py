"""The command `serve`; `tests/components/serving` tests its answers."""

import argparse
import gc
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import RunningCommand
from tests.training import train

pytest.importorskip("starlette", reason="pip install 'torchtitan[serve]'")

from torchtitan.cli.model_options import add_model_options  # noqa: E402
from torchtitan.cli.serve import (  # noqa: E402
    KEY_VARIABLE,
    _following,
    _lasting_objects,
    _limits,
    reads_images,
    serve,
)
from torchtitan.components.generation import generate  # noqa: E402
from torchtitan.components.serving.weights import share_weights  # noqa: E402
from torchtitan.models.pretrained import load_model  # noqa: E402
from torchtitan.tools.errors import RunFailure  # noqa: E402


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from other machines; set --api_key"),
        (["--host", "192.168.1.5"], "is reachable from other machines"),
        (["--host", "::"], "is reachable from other machines"),
        (["--port", "70000"], "--port is 70000, but must be 0 to 65535"),
        (["--max_rows", "0"], "--max_rows is 0"),
        (["--max_queue", "0"], "--max_queue is 0"),
        (["--api_key", "a b"], "no HTTP header can carry"),
        (["--api_key", "ä"], "no HTTP header can carry"),
        (["--adapters", "other"], "--adapters other must be NAME=PATH"),
        (["--adapters", "a=x", "a=y"], "with a new NAME"),
        (["--adapters", "a=gone"], "gone does not exist; use the folder"),
        (["--host", "203.0.113.7", "--insecure"], "cannot be used"),
        (["--chat_template", "none"], "--chat_template none is neither"),
    ],
)
def test_mistakes_are_named(stories, capsys, monkeypatch, options, words):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert serve(["--checkpoint", str(stories), "--device", "cpu", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"vision_config": {}}}, True),
        ({"config.json": {"model_type": "llama"}}, False),
        ({"config.json": {}, "preprocessor_config.json": {}}, True),
        ({"tokenizer.json": {}}, False),
    ],
)
def test_a_model_that_reads_images_is_known_by_its_files(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert reads_images(tmp_path) == expected


def changed_copy(stories, folder):
    """Copy the model, with other weights of one layer."""
    shutil.copytree(stories, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("layers.4.mlp.down_proj.weight"))
    torch.manual_seed(0)
    weights[name] = torch.randn_like(weights[name])
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_equal_weights_share_memory(stories, tmp_path):
    one = load_model(stories, device="cpu").model
    other = load_model(changed_copy(stories, tmp_path / "other"), device="cpu").model
    before = generate(other, [[1, 5]], max_new_tokens=20)
    share = share_weights(one, other)
    own = {parameter.data_ptr() for parameter in one.parameters()}
    different = [name for name, x in other.named_parameters() if x.data_ptr() not in own]
    assert different == ["layers.4.feed_forward.w2.weight"]
    assert 0.9 < share < 1
    assert generate(other, [[1, 5]], max_new_tokens=20) == before


@pytest.mark.slow
def test_models_are_served_until_ctrl_c(stories, tmp_path):
    other = changed_copy(stories, tmp_path / "other")
    words = ["-m", "torchtitan", "serve", "--checkpoint", stories, "--port", "0"]
    words += ["--adapters", f"other={other}", "--model_name", "base", "--device", "cpu"]
    with RunningCommand([sys.executable, *words], stderr=subprocess.PIPE, text=True) as command:
        lines = iter(command.stderr.readline, "")
        line = next(line for line in lines if "serving " in line)
        assert "serving base, other at http://127.0.0.1:" in line
        url = line.partition(" at ")[2].partition(" ")[0]

        def text_of(model):
            body = {"model": model, "prompt": [1, 5], "max_tokens": 20, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/completions",
                json.dumps(body | {"logprobs": 0, "return_tokens_as_token_ids": True}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                [choice] = json.load(answer)["choices"]
            return [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]

        found = [text_of(name) for name in ("base", "other")]
        command.send_signal(signal.SIGINT)
        rest = command.stderr.read()
        assert command.wait(60) == 0
    assert "the server has ended" in rest and "Traceback" not in rest
    for folder, ids in zip((stories, other), found, strict=True):
        [expected] = generate(load_model(folder, device="cpu").model, [[1, 5]], max_new_tokens=20)
        assert ids == expected.ids
    assert found[0] != found[1]


@pytest.mark.slow
def test_a_run_is_followed(tmp_path, monkeypatch, log):
    train(
        tmp_path,
        training__steps=3,
        checkpoint__enable=True,
        checkpoint__interval=1,
        checkpoint__keep_latest_k=0,
    )
    folder = tmp_path / "checkpoint"
    for step in (2, 3):
        (folder / f"step-{step}").rename(tmp_path / f"step-{step}")
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    options = parser.parse_args(["--checkpoint", str(folder / "step-1"), "--device", "cpu"])
    loaded = []

    def replace(model, on_use):
        loaded.append((model, dict(served.description)))
        on_use()

    scheduler = types.SimpleNamespace(replace=replace)
    served = types.SimpleNamespace(
        name="run", scheduler=scheduler, description={"checkpoint": "step-1"}
    )
    monkeypatch.setattr("torchtitan.cli.serve.FOLLOWING_SECONDS", 0.01)
    with _following(tmp_path, options, served):
        for step in (2, 3):
            (tmp_path / f"step-{step}").rename(folder / f"step-{step}")
        deadline = time.monotonic() + 60
        while served.description != {"checkpoint": "step-3"} and time.monotonic() < deadline:
            time.sleep(0.01)
    model, shown_before = loaded[-1]
    assert shown_before != served.description
    expected = load_model(folder / "step-3", device="cpu").model.state_dict()
    assert served.description == {"checkpoint": "step-3"}
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name])


def test_following_goes_on_after_any_error(tmp_path, monkeypatch, log):
    """A load in progress is not waited for."""
    ends = threading.Event()
    steps = ["step-1", OSError("it is gone"), OSError("it is gone"), "step-2", "step-3", "step-4"]
    errors = {"step-2": RunFailure("its weights differ"), "step-3": torch.OutOfMemoryError("full")}

    def newest(run):
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        if isinstance(step, Exception):
            raise step
        return run / step

    def load(options):
        if options.checkpoint.name in errors:
            raise errors[options.checkpoint.name]
        is_loading.set()
        ends.wait(60)
        return types.SimpleNamespace(model=None)

    is_loading = threading.Event()
    monkeypatch.setattr("torchtitan.cli.serve.FOLLOWING_SECONDS", 0.001)
    monkeypatch.setattr("torchtitan.cli.serve._CLOSING_SECONDS", 0.001)
    monkeypatch.setattr("torchtitan.cli.serve._newest", newest)
    monkeypatch.setattr("torchtitan.cli.serve.open_model", load)
    served = types.SimpleNamespace(name="run", scheduler=None, description={})
    options = argparse.Namespace(checkpoint=tmp_path / "step-1")
    with _following(tmp_path, options, served):
        assert is_loading.wait(60)
    ends.set()
    assert log.text.count("is not loaded: OSError: it is gone") == 1
    for words in ("RunFailure: its weights differ", "OutOfMemoryError: full"):
        assert f"is not loaded: {words}" in log.text


@pytest.mark.parametrize(("host", "name"), [("127.0.0.2", "127.0.0.2"), ("0::1", "[0::1]")])
def test_the_given_host_is_answered(monkeypatch, host, name):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    limits = _limits(argparse.Namespace(host=host, api_key=""))
    assert {name, "localhost"} < {*limits.hosts}
    assert not _limits(argparse.Namespace(host=host, api_key="secret")).hosts


def test_garbage_is_not_sought_in_lasting_objects():
    kept = [object()]
    assert any(one is kept for one in gc.get_objects())
    with _lasting_objects():
        assert not any(one is kept for one in gc.get_objects())
    assert any(one is kept for one in gc.get_objects())


def test_only_a_run_can_be_followed(stories, capsys):
    for more, words in (([], "not the folder of a run"), (["--adapters", "a=b"], "combined")):
        assert serve(["--checkpoint", str(stories), "--follow", *more]) == 2
        assert words in capsys.readouterr().err
