"""Adapter for lm-eval, EleutherAI's evaluation harness
(https://github.com/EleutherAI/lm-evaluation-harness). Importing this module requires the package
`lm_eval`."""

import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from torchtitan.components.evaluation.scoring import Request, Scorer
from torchtitan.components.evaluation.tasks import encode_pairs
from torchtitan.components.generation import Sampling, TextStream, generate, start_id
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError

_MAX_NEW_TOKENS = 256  # lm-eval's default


class TorchtitanLM(LM):
    """lm-eval's interface to the model of `scorer`. `stop_ids` end generated text."""

    def __init__(
        self, scorer: Scorer, tokenizer: Tokenizer, stop_ids: AbstractSet[int] = frozenset()
    ):
        super().__init__()
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        pairs = encode_pairs(self.tokenizer, [request.args for request in requests])
        return [(score.logprob, score.is_greedy) for score in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        start, size = start_id(self.tokenizer), self.scorer.max_seq_len
        windows = []
        for request in requests:
            ids = self.tokenizer.encode(request.args[0], add_bos=False, add_eos=False)
            pairs = map(
                make_disjoint_window, get_rolling_token_windows(ids, start, size, context_len=1)
            )
            windows.append([Request(*pair) for pair in pairs])
        scores = iter(self.scorer.score(list(itertools.chain(*windows))))
        return [sum(next(scores).logprob for _ in text_windows) for text_windows in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        same_options: dict[str, list[int]] = {}  # each batch uses one set of options
        for index, request in enumerate(requests):
            same_options.setdefault(repr(request.args[1]), []).append(index)
        texts: dict[int, str] = {}
        size = self.scorer.batch_size
        with self.scorer.progress(len(requests)) as advance:
            for indices in same_options.values():
                for batch in (indices[i : i + size] for i in range(0, len(indices), size)):
                    contexts = [requests[index].args[0] for index in batch]
                    texts |= zip(
                        batch, self._generate(contexts, requests[batch[0]].args[1]), strict=True
                    )
                    advance(len(batch))
        return [texts[index] for index in range(len(requests))]

    def _generate(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        until = options.get("until") or []
        stop = [until] if isinstance(until, str) else until
        new_tokens = int(options.get("max_gen_toks", _MAX_NEW_TOKENS))
        room = self.scorer.max_seq_len - new_tokens
        if room < 1:
            raise UserError(
                f"the task needs {new_tokens} new tokens (max_gen_toks), but the model's context "
                f"is only {self.scorer.max_seq_len} tokens"
            )
        prompts = [
            ids[-room:] or [start_id(self.tokenizer)]
            for ids in self.tokenizer.encode_batch(contexts)
        ]
        streams = [TextStream(self.tokenizer, prompt, stop) for prompt in prompts]

        def on_token(row: int, token: int) -> bool:
            streams[row].push(token)
            return streams[row].stopped

        generate(
            self.scorer.model,
            prompts,
            max_new_tokens=new_tokens,
            sampling=_sampling(options),
            stop_ids=self.stop_ids,
            on_token=on_token,
        )
        for stream in streams:
            stream.finish()
        return [stream.text for stream in streams]


def evaluate_tasks(
    model: TorchtitanLM,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the metrics by task. Raise `UserError` for an unknown task. `tasks` are names of
    lm-eval's tasks, or of YAML tasks in the folder `include_path`; `limit` is the number of
    examples per task (None: all)."""
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise UserError(
            f"unknown lm-eval task {', '.join(unknown)}; use a name listed by `lm_eval ls tasks`, "
            "a task in --include_path, or a .jsonl, .txt or .md file"
        )
    results = simple_evaluate(
        model, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False
    )
    assert results is not None, (
        "only the first of several processes gets results, but there is only one"
    )
    return dict(results["results"])


def _sampling(options: dict[str, Any]) -> Sampling:
    if not options.get("do_sample", False):
        return Sampling()
    top_k = options.get("top_k") or None  # in transformers, 0 means all
    return Sampling(
        temperature=options.get("temperature", 1.0), top_k=top_k, top_p=options.get("top_p")
    )
