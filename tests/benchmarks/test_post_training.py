"""The runs of `benchmarks/post_training.py`."""

import json
import sys
from pathlib import Path

import pytest
from post_training import text_rows
from systems import runs
from systems.report import OURS
from systems.task import GROUP_SIZE, NEW_TOKENS, Task
from tokenizers import Tokenizer

from tests.benchmarks.test_peers import RUN_SECONDS, TINY, step_log  # noqa: F401


def test_rows_as_text():
    turns = [
        {"from": "human", "value": "Hi!"},
        {"from": "gpt", "value": "Hello."},
        {"from": "human", "value": "Who?"},
    ]
    row = {
        "conversations": turns,
        **{side: {"from": "gpt", "value": side} for side in ("chosen", "rejected")},
    }
    assert text_rows([row]) == [
        {"prompt": "Hi!\nHello.\nWho?", "chosen": "chosen", "rejected": "rejected"}
    ]


@pytest.mark.parametrize(
    "system",
    [pytest.param(OURS, marks=pytest.mark.slow), pytest.param("trl", marks=pytest.mark.long)],
)
def test_dpo_counts_the_same_tokens(
    system: str,
    assets: Path,
    tmp_path: Path,
    step_log: list[dict[str, float]],  # noqa: F811
):
    """All pairs are equal, so that each system counts a multiple of one pair's tokens and
    labels."""
    if system != OURS:
        pytest.importorskip(runs.SYSTEMS[system].package)
    row = {
        "prompt": "How many legs do seven ants have?",
        "chosen": "7 * 6 = 42",
        "rejected": "Seven ants have 7 legs.",
    }
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 60))
    encoder = Tokenizer.from_file(str(assets / "gpt2-tokenizer/tokenizer.json"))
    prompt, chosen, rejected = (
        len(encoder.encode(text).ids) for text in (row["prompt"] + "\n", *list(row.values())[1:])
    )
    options = {
        "data": str(tmp_path / "rows.jsonl"),
        "tokenizer": str(assets / "gpt2-tokenizer"),
        "seq_len": 128,
    }
    task = Task(kind="dpo", steps=2, **{**TINY, "vocab_size": 50_257, **options})
    runs.measure(system, task, sys.executable, threads=1, limit=RUN_SECONDS, warm_up=1)
    assert len(step_log) == 2
    for step in step_log:
        # the end has no next token
        n_pairs, rest = divmod(step["tokens"], 2 * prompt + chosen + rejected)
        assert (rest, n_pairs >= 4) == (0, True)
        assert step["labels"] == n_pairs * (chosen + rejected + 2)


@pytest.mark.parametrize(
    "system",
    [pytest.param(OURS, marks=pytest.mark.slow), pytest.param("trl", marks=pytest.mark.long)],
)
def test_grpo_counts_samples(
    system: str,
    assets: Path,
    tmp_path: Path,
    step_log: list[dict[str, float]],  # noqa: F811
):
    """No answer of a random model ends early, which has a probability of 1 / 50,257 per token."""
    if system != OURS:
        pytest.importorskip(runs.SYSTEMS[system].package)
    rows = [json.dumps({"prompt": f"How many legs do {n} ants have?"}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    options = {
        "data": str(tmp_path / "rows.jsonl"),
        "tokenizer": str(assets / "gpt2-tokenizer"),
        "seq_len": 256,
    }
    task = Task(kind="grpo", steps=2, **{**TINY, "vocab_size": 50_257, **options})
    runs.measure(system, task, sys.executable, threads=1, limit=RUN_SECONDS, warm_up=1)
    n_samples = GROUP_SIZE * task.batch_size
    for step in step_log:
        assert step["labels"] == n_samples
        assert step["tokens"] == pytest.approx(n_samples * NEW_TOKENS, rel=0.01)
