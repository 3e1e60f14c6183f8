"""Adapter for lm-eval, EleutherAI's evaluation harness
(https://github.com/EleutherAI/lm-evaluation-harness). Importing this module requires the package
`lm_eval`."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from torchtitan.components.checkpoint.state import kept_random_state
from torchtitan.components.evaluation.scoring import Request, Scorer
from torchtitan.components.evaluation.tasks import centered, encode_pairs
from torchtitan.components.generation import Sampling, TextStream, generate, start_id
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.tools.errors import UserError, in_words

_MAX_NEW_TOKENS = 256  # lm-eval's default
_BOOTSTRAPS = 100_000  # lm-eval's default


class TorchtitanLM(LM):
    """lm-eval's interface to the model of `scorer`. `stop_ids` end generated text."""

    def __init__(
        self, scorer: Scorer, tokenizer: Tokenizer, stop_ids: AbstractSet[int] = frozenset()
    ):
        super().__init__()
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        pairs = encode_pairs(self.tokenizer, [request.args for request in requests])
        return [(score.logprob, score.is_greedy) for score in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
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

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        same_options: dict[str, list[int]] = {}  # each batch uses one set of options
        for index, request in enumerate(requests):
            same_options.setdefault(repr(request.args[1]), []).append(index)
        size, share = self.scorer.batch_size, self.scorer.share
        batches = [
            indices[i : i + size]
            for indices in same_options.values()
            for i in range(0, len(indices), size)
        ]
        texts: dict[int, str] = {}
        with self.scorer.progress(len(requests)) as advance:
            for number in share.rounds(len(batches)):
                batch = batches[number]
                contexts = [requests[index].args[0] for index in batch]
                options = requests[batch[0]].args[1]
                texts |= zip(batch, self._generate(contexts, options), strict=True)
                advance(len(batch) * share.count)
        return share.gather(texts)

    def _generate(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        until = options.get("until") or []
        stop = [until] if isinstance(until, str) else until
        new_tokens = int(options.get("max_gen_toks", _MAX_NEW_TOKENS))
        room = _room(new_tokens, self.scorer.max_seq_len, "the task")
        prompts = [
            ids[-room:] or [start_id(self.tokenizer)]
            for ids in self.tokenizer.encode_batch(contexts)
        ]
        streams = [TextStream(self.tokenizer, prompt, stop) for prompt in prompts]
        generate(
            self.scorer.model,
            prompts,
            max_new_tokens=new_tokens,
            sampling=_sampling(options),
            stop_ids=self.stop_ids,
            on_token=lambda row, token: streams[row].ends_with(token),
            group=self.scorer.share.group,
        )
        for stream in streams:
            stream.finish()
        return [stream.text for stream in streams]


class HarnessTasks:
    """Tasks of lm-eval, loaded once. Raises `UserError` for an unknown task, or data that cannot be
    read.

    Args:
        names: names of lm-eval's tasks, or of YAML tasks in the folder `include_path`.
        option: name of the option that sets this folder, for messages.
    """

    def __init__(
        self,
        names: Sequence[str],
        include_path: Path | None = None,
        *,
        option: str = "--include_path",
    ):
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
        if unknown := [name for name in names if name not in manager.all_tasks]:
            raise UserError(
                f"unknown lm-eval task {', '.join(unknown)}; use a name listed by `lm_eval ls "
                f"tasks`, a task in {option}, or a .jsonl, .txt or .md file"
            )
        with _seeded():  # as lm-eval's command does, for tasks that draw examples
            try:
                self._loaded = manager.load([*names])
            except (OSError, ValueError) as error:
                raise UserError(
                    f"lm-eval cannot load {', '.join(names)}: {in_words(error)}"
                ) from error
        for name, task in self._loaded["tasks"].items():
            _check(name, task)
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)

    def check_context(self, n_tokens: int) -> None:
        """Raise `UserError` if a task writes more new tokens than a context leaves."""
        for name, task in self._loaded["tasks"].items():
            options = task.get_config("generation_kwargs") or {}
            if task.OUTPUT_TYPE == "generate_until":
                _room(int(options.get("max_gen_toks", _MAX_NEW_TOKENS)), n_tokens, f"task {name}")

    @property
    def members(self) -> set[str]:
        """Names of the results that belong to the result of a group."""
        return {name for names in self._loaded["group_map"].values() for name in names}

    def evaluate(
        self, model: TorchtitanLM, limit: int | None = None, *, with_stderr: bool = True
    ) -> dict[str, dict[str, object]]:
        """Return the metrics by task and group, each with `centered_accuracy` if its chance level
        is known. Random numbers of this process stay as they are.

        Args:
            limit: examples per task; None: all.
            with_stderr: estimate standard errors, for some metrics by bootstrap in other processes.
        """
        tasks = self._loaded["tasks"]
        with _seeded():
            for task in tasks.values():
                task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            results = evaluate(
                model,
                self._loaded,
                limit=limit,
                log_samples=False,
                bootstrap_iters=_BOOTSTRAPS if with_stderr else 0,
            )
        assert results is not None, "every rank of a model has the rank 0 of lm-eval"
        found: dict[str, dict[str, object]] = {
            name: dict(numbers) for name, numbers in results["results"].items()
        }
        for name, numbers in found.items():
            group = self._loaded["groups"].get(name)
            leaves = group.get_all_tasks() if group else [tasks[name]]
            numbers["centered_accuracy"] = _mean(
                [(_centered(leaf, found[leaf.task_name]), _n_examples(leaf)) for leaf in leaves]
            )
        return found


def _room(new_tokens: int, context: int, user: str) -> int:
    """Return the tokens of a context that new ones leave for the prompt. Raise `UserError` if there
    are none."""
    if new_tokens >= context:
        raise UserError(
            f"{user} needs {new_tokens} new tokens (max_gen_toks), but the context is only "
            f"{context} tokens"
        )
    return context - new_tokens


def _check(name: str, task: object) -> None:
    """Raise `UserError` for a task that lm-eval refuses when it begins."""
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(
            f"task {name} executes code that the model writes, which is not supported; use lm-eval "
            "on an exported model, in a sandbox"
        )
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"task {name} has images or audio; only tasks of text are supported")


def _centered(task: Task, numbers: Mapping[str, Any]) -> float | None:
    """Return the centered accuracy of a task: of the choice with the highest probability, or of
    greedy texts, which chance never writes."""
    kind = task.OUTPUT_TYPE
    if kind != "multiple_choice":
        names = {"loglikelihood": "acc", "generate_until": "exact_match"}
        found = [
            value for key, value in numbers.items() if key.partition(",")[0] == names.get(kind)
        ]
        return found[0] if len(found) == 1 else None  # several filters read the same texts
    accuracy = numbers.get("acc,none")
    if accuracy is None or task.multiple_target:
        return None
    # mutual information also scores each choice without its question
    passes = 2 if "acc_mutual_info,none" in numbers else 1
    counts = Counter(instance.doc_id for instance in task.instances)
    chance = sum(passes / count for count in counts.values()) / len(counts)
    return centered(accuracy, chance)


def _n_examples(task: Task) -> int:
    return len({instance.doc_id for instance in task.instances})


def _mean(values: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the weighted mean of values; None if one is unknown."""
    known = [(value, weight) for value, weight in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the generators as lm-eval's command does, and restore their states after the block."""
    with kept_random_state():
        random.seed(DEFAULT_RANDOM_SEED)
        numpy.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        yield


def _sampling(options: Mapping[str, Any]) -> Sampling:
    if not options.get("do_sample", False):
        return Sampling()
    top_k = options.get("top_k") or None  # in transformers, 0 means all
    return Sampling(
        temperature=options.get("temperature", 1.0), top_k=top_k, top_p=options.get("top_p")
    )
