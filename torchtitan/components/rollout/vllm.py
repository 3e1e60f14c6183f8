"""`VLLMEngine`: rollouts sampled by a server of vLLM, which gets the weights before. It has not run
on a GPU yet."""

import asyncio
import base64
import functools
import io
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch import Tensor

from torchtitan.components.checkpoint.ranks import Ranks
from torchtitan.components.generation import Generation
from torchtitan.components.generation.experts import Experts, ExpertSizes
from torchtitan.components.generation.row import TextCoroutine
from torchtitan.components.generation.sampling import RandomNumbers, Sampling
from torchtitan.components.generation.session import is_in_loop
from torchtitan.protocols.tensor_source import TensorSource
from torchtitan.tools.errors import UserError

_START = (
    'start VLLM_SERVER_DEV_MODE=1 vllm serve DIR --weight-transfer-config \'{"backend": "nccl"}\''
)


def request(url: str, path: str, body: object = None, *, seconds: float = 3600.0) -> Any:
    """Return the JSON that a server answers to GET or, with a body, POST. Raise `UserError` if it
    does not within some seconds, by default an hour, since a continuation may wait for many
    others."""
    data = None if body is None else json.dumps(body).encode()
    try:
        message = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(message, timeout=seconds) as response:
            text = response.read()
        return json.loads(text or "null")
    except (OSError, ValueError) as error:
        raise UserError(f"--rollout.url {url}: no answer to {path} ({error}); {_START}") from error


def check_server(url: str) -> tuple[str, int, int]:
    """Return a server's model, the length of its context, and the number of its processes. Raise
    `UserError` if vLLM is not installed here, or if the server cannot be reached or does not take
    weights."""
    try:
        import vllm.distributed.weight_transfer  # noqa: F401
    except ImportError as error:
        raise UserError(f"--rollout.engine vllm: {error}; install torchtitan[vllm]") from error
    models, workers = (
        request(url, "/v1/models", seconds=10),
        request(url, "/get_world_size", seconds=10),
    )
    try:
        return models["data"][0]["id"], models["data"][0]["max_model_len"], workers["world_size"]
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"--rollout.url {url} is not a vLLM server; {_START}") from error


class VLLMEngine:
    """Samples with the server at `url` (docs.vllm.ai/en/latest/training/weight_transfer), with at
    most `max_rows` requests at a time; `stop_ids` end a text. `weights` have Hugging Face's names,
    and are sent in the types of their specifications; all ranks read them in one order. `sampling`
    has the settings of each text, by default temperature 1. With `experts`, sizes of the model, the
    server also returns the experts of tokens. Raises as `check_server`, `request`,
    `_check_logprobs` and `_experts_in`."""

    def __init__(
        self,
        url: str,
        weights: TensorSource,
        stop_ids: AbstractSet[int],
        max_rows: int,
        ranks: Ranks,
        sampling: Sampling | None = None,
        experts: ExpertSizes | None = None,
    ):
        self._url = url
        self._experts = experts
        self._ranks = ranks
        self._max_rows = max_rows
        self._stop_ids = sorted(stop_ids)
        self._sampling = sampling or Sampling(temperature=1.0)
        self._model, self.context, n_workers = check_server(url)
        if not self._sampling.is_plain:
            _check_logprobs(url, self._model)
        if experts is not None:
            body = {"model": self._model, "prompt": [1], "max_tokens": 1}
            (choice,) = request(url, "/v1/completions", body)["choices"]
            _experts_in(choice, 1, experts, url)
        self._transfer = _transfer(url, weights, ranks.rank, n_workers)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        key: str,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Return a continuation of token ids, at most `context` with the prompt, with random
        numbers that depend on `key`; await it in a coroutine that `run` runs. It ends with the
        first of the texts `stop`. Other settings than the engine's need a server that returns
        log-probabilities after them; see `_check_logprobs`."""
        settings = sampling or self._sampling
        if sampling is not None and not sampling.is_plain:  # others are checked at the start
            await asyncio.to_thread(_check_logprobs, self._url, self._model)
        sampling_fields = _fields_of(settings) | {
            "seed": RandomNumbers(key).seed,
            "max_tokens": max_new_tokens,
        }
        if stop:
            sampling_fields |= {"stop": list(stop), "include_stop_str_in_output": True}
        wanted = {"stop_token_ids": self._stop_ids, "logprobs": 1, "return_token_ids": True}
        body = {"model": self._model, "prompt": list(prompt), **sampling_fields, **wanted}
        answer = await asyncio.to_thread(request, self._url, "/v1/completions", body)
        (choice,) = answer["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        is_stopped = choice["finish_reason"] == "stop"
        generation = Generation(ids, logprobs, "stop" if is_stopped else "length")
        if self._experts is not None:
            n_computed = len(prompt) + len(ids) - 1
            generation.experts = _experts_in(choice, n_computed, self._experts, self._url)
        return generation

    def run(self, texts: Sequence[TextCoroutine[object]]) -> list[Any]:
        """Send the weights, then return the results, in order, of coroutines that await `generate`,
        in an asyncio loop of its own. All processes call this together, and raise the error of any.
        Raise `UserError` in a loop."""
        if is_in_loop():
            for text in texts:
                text.close()
            raise UserError(
                "VLLMEngine.run starts an asyncio loop, and one runs in this thread already; use "
                "await asyncio.to_thread(engine.run, texts)"
            )

        async def together() -> None:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._max_rows))
            results.extend(await asyncio.gather(*texts))

        results: list[object] = []
        self._transfer.send_weights()
        # Its cache of prompts is of the weights before. All ranks wait, since they share the
        # server.
        self._ranks.broadcast_from_rank0(lambda: request(self._url, "/reset_prefix_cache", {}))
        self._ranks.all_ranks_or_raise(lambda: asyncio.run(together()))
        return results


def _fields_of(sampling: Sampling) -> dict[str, object]:
    """Return all settings, since the model's generation_config.json changes the server's
    defaults."""
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": 1.0,
    }


@functools.lru_cache
def _check_logprobs(url: str, model: str) -> None:
    """Raise `UserError` if a server returns log-probabilities before temperature, top_k, top_p and
    min_p: the only token that `top_k` 1 leaves must have the probability 1."""
    settings = _fields_of(Sampling(temperature=1.0, top_k=1))
    body = {"model": model, "prompt": [1], "max_tokens": 1, "logprobs": 1, **settings}
    answer = request(url, "/v1/completions", body)
    (logprob,) = answer["choices"][0]["logprobs"]["token_logprobs"]
    if abs(logprob) > 1e-6:
        raise UserError(
            f"--rollout.url {url}: the server returns log-probabilities of temperature 1, and "
            "these rollouts have other settings; start it with --logprobs-mode processed_logprobs"
        )


def _experts_in(choice: Mapping[str, Any], n_tokens: int, sizes: ExpertSizes, url: str) -> Experts:
    """Return the experts of the `n_tokens` tokens that a server has computed for a text, all but
    its last one: an array of NumPy in base64. Raise `UserError` if the server returns none, or
    others than the model can have."""
    text = choice.get("routed_experts")
    if text is None:
        raise UserError(
            f"--rollout.url {url}: the server does not return the experts of tokens, which "
            "--policy.replay_experts needs; start it with --enable-return-routed-experts"
        )
    try:
        data = io.BytesIO(base64.b64decode(text, validate=True))
        found = np.lib.format.read_array(data, allow_pickle=False)
        shape, is_known = found.shape, bool((0 <= found).all() and (found < sizes.n_experts).all())
    except (TypeError, ValueError, EOFError) as error:
        raise UserError(
            f"--rollout.url {url}: the experts of tokens cannot be read ({error}); use the version "
            "of vLLM that torchtitan[vllm] installs"
        ) from error
    if shape != (n_tokens, sizes.n_layers, sizes.top_k) or not is_known:
        raise UserError(
            f"--rollout.url {url}: the server returns experts of the shape {shape} for {n_tokens} "
            f"tokens of {sizes.n_layers} layers with {sizes.top_k} of {sizes.n_experts} experts; "
            "remove --policy.replay_experts"
        )
    experts: Experts = found.astype(np.int16)
    return experts


def _transfer(url: str, weights: TensorSource, rank: int, n_workers: int) -> Any:
    """Return vLLM's sender of weights. Rank 0 connects the server to it."""
    from vllm.distributed.weight_transfer import (
        HTTPVLLMWeightSyncClient,
        WeightTransferTrainerFactory,
    )
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_ip, get_open_port

    class Source(WeightSource):
        """The model's weights in the order in which all ranks read them."""

        def metadata(self) -> list[object]:
            return [
                ParamMeta(name, spec.dtype, tuple(spec.shape))
                for name, spec in weights.specs.items()
            ]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return (
                (name, weights.read(name).to(spec.dtype)) for name, spec in weights.specs.items()
            )

    meeting = NCCLTrainerInitInfo(get_ip(), get_open_port(), n_workers + 1, rank=rank)
    client = HTTPVLLMWeightSyncClient(url)
    return WeightTransferTrainerFactory.trainer_init(
        init_info=meeting, client=client, source=Source()
    )
