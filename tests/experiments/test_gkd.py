"""Generalized knowledge distillation: own answers and those of the data."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.experiments.test_distillation import (  # noqa: F401
    NUMBERS,
    distill,
    distill_on_ranks,
    folder,
)
from tests.processes import run_processes
from tests.training import killed_in, read_metrics
from torchtitan.experiments.distillation.gkd import GKDTrainer, is_on_policy
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


@pytest.fixture(scope="module")
def models(folder) -> Path:  # noqa: F811
    """The folder of models, with a template that marks the turns."""
    for name in ("student", "teacher"):
        (folder / name / "chat_template.jinja").write_text(
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.role == 'assistant' %}"
            "<|end_of_text|>{% endif %}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant] {% endif %}"
        )
    return folder


def options(folder: Path, **more: object) -> dict[str, object]:  # noqa: F811
    return {
        "dataloader__dataset": [folder / "rows.jsonl"],
        "loss__cross_entropy_weight": 0.0,
        "loss__temperature": 1.0,
        "loss__beta": 0.3,
        "training__steps": 4,
        "rollout__max_new_tokens": 6,
        **more,
    }


def test_the_share_of_steps_is_a_probability():
    """Binomial: 0.3 of 2,000 steps, within four standard deviations of 20."""
    drawn = [is_on_policy(0.3, seed=7, step=step) for step in range(2000)]
    assert abs(sum(drawn) - 600) < 4 * (2000 * 0.3 * 0.7) ** 0.5
    assert drawn == [is_on_policy(0.3, seed=7, step=step) for step in range(2000)]
    assert drawn != [is_on_policy(0.3, seed=8, step=step) for step in range(2000)]
    assert all(is_on_policy(1.0, 0, step) and not is_on_policy(0.0, 0, step) for step in range(99))


@pytest.mark.slow
def test_answers_of_the_data_give_the_loss_of_trl(models, tmp_path, monkeypatch):
    """With λ = 0, the first step's loss is the mean of TRL's divergence over the answers' tokens,
    by the classes of transformers, each conversation alone. Float32 sums differ by 1e-5."""
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer as TRLTrainer

    batches: list[dict] = []
    packed = GKDTrainer.packed
    monkeypatch.setattr(
        GKDTrainer, "packed", lambda *args: batches.extend(packed(*args)) or batches[-1:]
    )
    monkeypatch.setattr(GKDTrainer, "sample", lambda *args: pytest.fail("sampled"))
    trainer = distill(
        models, tmp_path, "gkd", **options(models, on_policy_share=0.0, training__steps=1)
    )
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(models / name).eval()
        for name in ("student", "teacher")
    )
    total, n_tokens, texts = 0.0, 0, []
    for batch in batches:
        starts = (batch["attention"].positions_BL == 0).nonzero().tolist()
        ends = [*starts[1:], [len(batch["input"]), 0]]
        for (row, first), (next_row, last) in zip(starts, ends, strict=True):
            part = slice(first, last if next_row == row else None)
            ids, labels = (batch[name][row : row + 1, part] for name in ("input", "labels"))
            if not (labels != -100).any():
                continue
            with torch.no_grad():
                logits = [model(ids).logits for model in (student, teacher)]
            total += TRLTrainer.generalized_jsd_loss(
                *logits, labels=labels, beta=0.3, temperature=1.0, reduction="sum"
            ).item()
            n_tokens += int((labels != -100).sum())
            texts.append(trainer.tokenizer.decode(labels[labels != -100].tolist()))
    assert len(texts) > 1 and all("small." in text for text in texts)
    ((_, loss, on_policy),) = read_metrics(tmp_path, "loss", "on_policy")
    assert loss == pytest.approx(total / n_tokens, rel=1e-4)
    assert on_policy == 0


@pytest.mark.slow
def test_resume_is_exact_and_both_kinds_of_steps_occur(models, tmp_path):
    """A kill between two steps of different kinds changes nothing. Only steps with own answers have
    their numbers."""
    own = {"on_policy_share": 0.5, "checkpoint__enable": True, "checkpoint__interval": 1}
    own |= {"rollout__overlong": "penalty"}
    distill(models, tmp_path / "whole", "gkd", **options(models, **own))
    kinds = [on for _, on in read_metrics(tmp_path / "whole", "on_policy")]
    assert set(kinds) == {0, 1}
    lines = map(json.loads, (tmp_path / "whole/metrics.jsonl").read_text().splitlines())
    assert ["rewards/overlong_penalty" in line for line in lines if "loss" in line] == kinds
    with killed_in(Trainer, "train_step", 3):
        distill(models, tmp_path / "parts", "gkd", **options(models, **own))
    distill(models, tmp_path / "parts", "gkd", **options(models, **own))
    names = (*NUMBERS, "on_policy")
    assert read_metrics(tmp_path / "parts", *names) == read_metrics(tmp_path / "whole", *names)


@pytest.mark.slow
def test_two_processes_match_one(models, tmp_path):
    """Both draw the same kind for a step, and sample and train the same answers, in other windows.
    Float32 sums differ by their order, which four steps amplify."""
    own = options(models, on_policy_share=0.5)
    distill(models, tmp_path / "one", "gkd", **own)
    run_processes(distill_on_ranks, 2, models, tmp_path / "two", {"config": "gkd", **own})
    names = (*NUMBERS, "on_policy")
    one, two = (read_metrics(tmp_path / name, *names) for name in ("one", "two"))
    assert {row[-1] for row in one} == {0, 1}
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_all_own_answers_are_those_of_on_policy(models, tmp_path):
    """With λ = 1 and the same prompts, the steps are those of `on_policy`."""
    rows = [json.loads(line) for line in (models / "rows.jsonl").read_text().splitlines()]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["instruction"]}) + "\n" for row in rows))
    own = {"loss__kind": "jensen_shannon", "training__steps": 2}
    distill(models, tmp_path / "gkd", "gkd", **options(models, on_policy_share=1.0, **own))
    own |= {"dataloader__dataset": [prompts]}
    distill(models, tmp_path / "on_policy", "on_policy", **options(models, **own))
    found, expected = (read_metrics(tmp_path / name, *NUMBERS) for name in ("gkd", "on_policy"))
    assert found == expected


def test_what_gkd_cannot_use_is_refused(models, tmp_path):
    with pytest.raises(UserError, match=r"--on_policy_share is 1\.5, but must be from 0 to 1"):
        distill(models, tmp_path, "gkd", **options(models, on_policy_share=1.5))
    function = "torchtitan.experiments.rl.environments:GuessNumber"
    with pytest.raises(
        UserError, match=r"--rollout\.function is .*, but must be empty with --conf"
    ):
        distill(models, tmp_path, "gkd", **options(models, rollout__function=function))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    with pytest.raises(UserError, match="ends with an answer of the assistant"):
        distill(models, tmp_path / "run", "gkd", **options(models, dataloader__dataset=[rows]))
