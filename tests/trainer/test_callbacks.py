"""Order of callbacks around a step, and evaluation tasks during training."""

import dataclasses
import json
from dataclasses import dataclass

import pytest

from tests.processes import run_processes
from tests.training import read_metrics, run, tiny_config
from torchtitan.components.data.dataloader import PretrainDataLoader
from torchtitan.components.evaluation import (
    Scorer,
    multiple_choice,
    read_questions,
    text_perplexity,
)
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Callback
from torchtitan.trainer.callbacks import PeriodicEvaluation
from torchtitan.trainer.evaluation import Evaluation


class Recorder(Callback):
    """Records its calls, and logs the learning rate at a configured step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Callback.Config):
        label: str = ""
        """Prefix of the records."""

    def __init__(self, config, *, trainer):
        super().__init__(config, trainer=trainer)
        self.notes = trainer.notes = getattr(trainer, "notes", [])

    def note(self, what):
        self.notes.append(f"{self.config.label}{what}")

    def on_batches(self, micro_batches):
        self.note(f"{len(micro_batches)} batches")

    def on_step(self, outcome):
        self.note(f"on {self.trainer.step} {outcome.is_finite}")

    def after_step(self, outcome):
        self.note(f"after {self.trainer.step}")

    def before_save(self):
        self.note("save")

    def close(self):
        self.note("close")


class Second(Recorder):
    """A second class, since names of callbacks are unique."""


def test_hooks_are_called_in_order(tmp_path):
    config = tiny_config(
        tmp_path,
        training__steps=2,
        checkpoint__enable=True,
        checkpoint__interval=2,
        training__global_batch_size=4,
    )
    config.callbacks = [Recorder.Config(), Second.Config(label="2: ")]
    of_steps = [
        note for step in (1, 2) for note in ("2 batches", f"on {step} True", f"after {step}")
    ]
    of_both = [label + note for note in of_steps for label in ("", "2: ")]
    notes = run(config).notes
    saves = ["save", "2: save"]
    assert notes[: len(of_both) + 2] == of_both + saves
    assert notes[-2:] == ["2: close", "close"]


def test_callbacks_without_work_are_left_out(tmp_path, files):
    def built(**options):
        trainer = tiny_config(tmp_path, training__steps=1, **options).build()
        try:
            return {type(callback).__name__ for callback in trainer.callbacks}
        finally:
            trainer.close()

    plain = built()
    assert plain == {"Accounting", "Ledger", "RecompileWarning", "GarbageCollection"}
    options = {
        "callbacks__evaluation__files": [str(files[0])],
        "callbacks__samples__prompts": ["Once"],
        "callbacks__samples__max_new_tokens": 4,
        "callbacks__earlystopping__metric": "validation_loss",
        "checkpoint__enable": True,
        "checkpoint__keep_best": True,
        "profiling__enable_profiling": True,
        "validator__enable": True,
    }
    more = {"Evaluation", "Samples", "EarlyStopping", "BestMetric", "Profiling"}
    assert built(**options) == plain | more


class Never(PeriodicEvaluation):
    period = 0

    def evaluate(self):
        raise AssertionError("its period is 0")


def test_an_evaluation_with_the_period_0_never_runs(tmp_path):
    config = tiny_config(tmp_path, training__steps=2)
    config.callbacks = [Never.Config()]
    assert run(config).step == 2


def test_callbacks_are_options(tmp_path):
    assert tiny_config(tmp_path, callbacks__evaluation__freq=7).callbacks[:1] == [
        Evaluation.Config(freq=7)
    ]


@pytest.fixture
def files(tmp_path):
    text, questions = tmp_path / "story.txt", tmp_path / "quiz.jsonl"
    text.write_text(
        "Once upon a time there was a small dog who liked to dig holes in the garden. " * 5
    )
    rows = [
        {"query": f"{n} and {n} is", "choices": ["two", "a dog"], "gold": n % 2} for n in range(6)
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    return text, questions


def evaluations(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if any(key.startswith("evaluation/") for key in line)]
    return [line for line in found if "evaluation/mean/centered_tasks" not in line]


def _train(folder, files):
    config = tiny_config(
        folder,
        callbacks__evaluation__files=list(files),
        callbacks__evaluation__freq=3,
        training__global_batch_size=4,
    )
    return run(config)


def test_evaluation_during_training(tmp_path, files):
    """Evaluates every third step and after the last; results equal a separate evaluation, and
    training is unchanged."""
    text, questions = files
    trainer = _train(tmp_path / "with", files)
    lines = evaluations(tmp_path / "with")
    assert [line["step"] for line in lines] == [3, 3, 4, 4]
    scorer = Scorer(trainer.model_parts[0], max_seq_len=32)
    with trainer.mixed_precision():
        scored = text_perplexity(scorer, trainer.tokenizer, text.read_text())
        answered = multiple_choice(scorer, trainer.tokenizer, read_questions(questions))
    assert lines[2]["evaluation/story/perplexity"] == pytest.approx(scored.perplexity, rel=1e-6)
    assert lines[3]["evaluation/quiz/accuracy"] == answered.accuracy
    assert lines[3]["evaluation/quiz/questions"] == 6
    _train(tmp_path / "without", [])
    assert read_metrics(tmp_path / "with", "loss") == read_metrics(tmp_path / "without", "loss")


@pytest.mark.slow
def test_evaluation_under_fsdp(tmp_path, files):
    _train(tmp_path / "one", files)
    run_processes(_train, 2, tmp_path / "two", files)
    for line, expected in zip(
        evaluations(tmp_path / "two"), evaluations(tmp_path / "one"), strict=True
    ):
        assert line == pytest.approx(expected, rel=1e-3)  # other shapes of bfloat16 products


def test_mistakes_are_reported(tmp_path, files):
    with pytest.raises(UserError, match=r"there is no file '/absent\.txt'"):
        tiny_config(tmp_path, callbacks__evaluation__files=["/absent.txt"]).check(world_size=1)
    with pytest.raises(UserError, match=r"'/etc/passwd' is not one of \.jsonl"):
        tiny_config(tmp_path, callbacks__evaluation__files=["/etc/passwd"]).check(world_size=1)


def test_evaluation_at_the_end_of_data(tmp_path, files):
    """If a stream ends before the last step, the final evaluation runs once."""

    class Short(PretrainDataLoader):
        taken = 0

        def __next__(self):
            if self.taken == 3:
                raise StopIteration
            self.taken += 1
            return super().__next__()

    config = tiny_config(
        tmp_path, callbacks__evaluation__files=[files[0]], callbacks__evaluation__freq=2
    )
    fields = {
        field.name: getattr(config.dataloader, field.name)
        for field in dataclasses.fields(config.dataloader)
    }
    config.dataloader = Short.Config(**fields)
    trainer = run(config)
    assert trainer.step == 3
    assert [line["step"] for line in evaluations(tmp_path)] == [2, 3]


def test_duplicate_names_are_rejected(tmp_path):
    config = tiny_config(tmp_path)
    config.callbacks = [Evaluation.Config(), Evaluation.Config(freq=3)]
    with pytest.raises(UserError, match="callbacks: evaluation is listed twice"):
        config.check(world_size=1)
