"""Rollouts with vLLM (`--rollout.engine vllm`), against a server that speaks its protocol and
samples with the class of transformers. vLLM itself is not installed, and nothing here ran on a
GPU."""

import asyncio
import base64
import contextlib
import dataclasses
import importlib.util
import io
import json
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.experiments.test_rl import NUMBERS, folder, train_rl  # noqa: F401 (a fixture)
from tests.processes import run_processes
from tests.training import read_metrics
from torchtitan.components.rollout.vllm import VLLMEngine
from torchtitan.experiments.rl.config_registry import rl_debugmodel
from torchtitan.experiments.rl.trainer import RLTrainer
from torchtitan.models.deepseek_v3 import FLAVORS, model_spec
from torchtitan.tools.errors import UserError
from torchtitan.trainer.rollouts import huggingface_weights


class FakeServer:
    """The routes of `vllm serve` that rollouts use, and the trainer's side of the transfer of
    weights."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(1)  # other weights than the trainer's, as with --load-format dummy
        self.model = AutoModelForCausalLM.from_config(
            AutoModelForCausalLM.from_pretrained(path).config
        ).eval()
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.returns_experts = False
        self.change_experts = lambda experts: experts
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                models = {"data": [{"id": "m", "max_model_len": 256}]}
                self.answer({"/v1/models": models, "/get_world_size": {"world_size": 2}}[self.path])

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.calls.append(self.path)
                    self.answer(fake.complete(body) if self.path == "/v1/completions" else None)

            def answer(self, value: Any) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"" if value is None else json.dumps(value).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Use weights with the names of files, which a class may join."""
        kind, config = type(self.model), self.model.config
        self.model = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32
        ).eval()

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        stop_ids = {*body.get("stop_token_ids", ())}
        ids, logprobs = [], []
        while len(ids) < body["max_tokens"] and not {*ids} & stop_ids:
            log_p = (
                self.model(torch.tensor([[*body["prompt"], *ids]])).logits[0, -1].log_softmax(-1)
            )
            ids.append(int(torch.multinomial(log_p.exp(), 1, generator=generator)))
            logprobs.append(log_p[ids[-1]].item())
        reason = "stop" if {*ids} & stop_ids else "length"
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": reason,
        }
        if self.returns_experts:
            choice["routed_experts"] = self.experts([*body["prompt"], *ids[:-1]])
        return {"choices": [choice]}

    def experts(self, tokens: list[int]) -> str:
        """Return the choice of all routers as `--enable-return-routed-experts` does: an array of
        NumPy, (tokens, layers, top_k), in base64."""
        chosen: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda _, args, out: chosen.append(out[-1]))
            for name, module in self.model.named_modules()
            if name.endswith("mlp.gate")
        ]
        self.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        file = io.BytesIO()
        np.save(file, self.change_experts(torch.stack(chosen, dim=1).numpy().astype(np.uint8)))
        return base64.b64encode(file.getvalue()).decode()

    def modules(self, rank: int = 0, url: str = "") -> dict[str, ModuleType]:
        """Return stand-ins for the modules of vLLM, under the names in its documentation, for a
        rank of the trainer and the server at `url`, by default this one."""
        fake, url = self, url or self.url

        class WeightSource:
            pass

        @dataclass
        class ParamMeta:
            name: str
            dtype: torch.dtype
            shape: tuple[int, ...]

        @dataclass
        class NCCLTrainerInitInfo:
            master_address: str
            master_port: int
            world_size: int
            rank: int

        class Transfer:
            def __init__(self, source: Any):
                self.source = source

            def send_weights(self) -> None:
                state = dict(self.source)
                assert [(m.name, m.dtype, m.shape) for m in self.source.metadata()] == [
                    (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()
                ]
                if rank == 0:  # the sender; the others take part in gathering the weights
                    fake.load(state)
                    fake.calls.append("weights")

        class WeightTransferTrainerFactory:
            @staticmethod
            def trainer_init(*, init_info: Any, client: str, source: Any) -> Transfer:
                # two workers, one sender
                assert (init_info.world_size, init_info.rank, client) == (3, rank, url)
                assert isinstance(source, WeightSource)
                return Transfer(source)

        transfer = "vllm.distributed.weight_transfer"
        contents: dict[str, dict[str, Any]] = {
            transfer: {
                "HTTPVLLMWeightSyncClient": lambda url: url,
                "WeightTransferTrainerFactory": WeightTransferTrainerFactory,
            },
            f"{transfer}.base": {"ParamMeta": ParamMeta, "WeightSource": WeightSource},
            f"{transfer}.nccl_engine": {"NCCLTrainerInitInfo": NCCLTrainerInitInfo},
            "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1", "get_open_port": lambda: 1},
            **{name: {} for name in ("vllm", "vllm.distributed", "vllm.utils")},
        }
        modules = {name: ModuleType(name) for name in contents}
        for name, module in modules.items():
            vars(module).update(contents[name])
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        return modules


@pytest.fixture
def server(folder, monkeypatch):  # noqa: F811
    fake = FakeServer(folder / "model")
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


def test_the_server_samples_with_the_current_weights(folder, tmp_path, server):  # noqa: F811
    """It returns log-probabilities by transformers under the weights it got, so importance weights
    of 1 in each step mean that these are the trainer's, also after updates. Float32 rounds to about
    1e-6."""
    options = {
        "rollout__engine": "vllm",
        "rollout__url": server.url,
        "training__steps": 3,
        "optimizer__lr": 1e-2,
    }
    train_rl(folder, tmp_path, **options)
    weights = [row[1] for row in read_metrics(tmp_path, "importance_weight")]
    assert weights == pytest.approx([1.0] * 3, abs=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert (
        server.calls[:2] == ["weights", "/reset_prefix_cache"]
        and server.calls.count("weights") == 3
    )
    assert (
        len(server.requests) == 3 * 4 * 4
        and len({request["seed"] for request in server.requests}) == 48
    )
    sampling = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert sampling.items() <= server.requests[0].items() and server.requests[0]["return_token_ids"]
    prompts = [request["prompt"] for request in server.requests]
    assert all(any(line["tokens"][: len(prompt)] == prompt for prompt in prompts) for line in lines)


def test_weights_are_sent_in_the_type_of_the_computation_and_buffers_in_their_own(tmp_path):
    """The bias that routes tokens of DeepSeek's experts is a buffer, which bfloat16 would round."""
    config = rl_debugmodel()
    config.model_spec = model_spec(
        dataclasses.replace(FLAVORS["debugmodel"], vocab_size=None), "debugmodel"
    )
    config.dump_folder = str(tmp_path)
    config.training = dataclasses.replace(config.training, mixed_precision_param="bfloat16")
    with contextlib.closing(RLTrainer(config)) as trainer:
        specs = huggingface_weights(trainer).specs
    types = {name: spec.dtype for name, spec in specs.items()}
    biases = {name for name in types if name.endswith("e_score_correction_bias")}
    assert biases and all(
        types[name] == (torch.float32 if name in biases else torch.bfloat16) for name in types
    )


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_write_the_same(folder, tmp_path, server):  # noqa: F811
    """Rounding may change a token only at a boundary of its distribution, which does not happen
    here."""
    options = {"rollout__engine": "vllm", "training__steps": 3, "training__local_batch_size": 4}
    train_rl(folder, tmp_path / "one", rollout__url=server.url, **options)
    options |= {"training__local_batch_size": 2, "parallelism__data_parallel_shard_degree": 2}
    run_processes(train_on_ranks, 2, folder, tmp_path / "two", options)
    lines = [
        (tmp_path / name / "completions.jsonl").read_text().splitlines() for name in ("one", "two")
    ]
    assert [json.loads(line)["tokens"] for line in lines[0]] == [
        json.loads(line)["tokens"] for line in lines[1]
    ]
    for row, expected in zip(
        *(read_metrics(tmp_path / name, *NUMBERS) for name in ("two", "one")), strict=True
    ):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def train_on_ranks(folder: Path, dump: Path, options: dict[str, object]) -> None:  # noqa: F811
    fake, urls = FakeServer(folder / "model"), [""] * 2
    torch.distributed.all_gather_object(urls, fake.url)
    sys.modules.update(fake.modules(torch.distributed.get_rank(), urls[0]))
    train_rl(folder, dump, rollout__url=urls[0], **options)


def test_running_in_an_asyncio_loop_says_what_to_do():
    engine = object.__new__(VLLMEngine)

    async def text() -> None:
        raise AssertionError("it must not run")

    async def program() -> None:
        engine.run([text()])

    with pytest.raises(UserError, match=r"use await asyncio\.to_thread\(engine\.run, texts\)"):
        asyncio.run(program())


def test_an_engine_that_is_absent_is_named(folder, tmp_path, monkeypatch):  # noqa: F811
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(
            UserError,
            match=r"--rollout\.engine vllm: No module named 'vllm'; install torchtitan\[vllm",
        ):
            train_rl(folder, tmp_path, rollout__engine="vllm")
    fake = FakeServer(folder / "model")
    fake.http.shutdown()
    fake.http.server_close()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(
        UserError,
        match=rf"--rollout\.url {fake.url}: no answer to /v1/models .*refused.*; start VLLM",
    ):
        train_rl(folder, tmp_path, rollout__engine="vllm", rollout__url=fake.url)
    assert not list(tmp_path.iterdir())  # before training
