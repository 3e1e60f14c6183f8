"""Early stopping: when a run ends, what it says, and that a resumed run continues the count."""

import json
import logging
import math
import signal
from types import SimpleNamespace

import pytest
import torch

from tests.training import run, tiny_config
from torchtitan.components.checkpoint import list_checkpoints
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Callback, Trainer
from torchtitan.trainer.early_stopping import EarlyStopping


def _stopping(metric="validation_loss", **options):
    reasons = []
    trainer = SimpleNamespace(step=0, end_early=reasons.append, validator=None)
    config = EarlyStopping.Config(metric=metric, **options)
    return EarlyStopping(config, trainer=trainer), trainer, reasons


def _steps_until_end(values, **options):
    """Return the number of measurements after which the run ends; None: it does not."""
    stopping, trainer, reasons = _stopping(**options)
    for step, value in enumerate(values, start=1):
        trainer.step = step
        stopping.on_measured({stopping.config.metric: value})
        if reasons:
            return step
    return None


@pytest.mark.parametrize(
    ("values", "options", "end"),
    [
        ([3.0, 2.0, 2.1, 2.2], {"patience": 2}, 4),
        ([3.0, 2.0, 2.1, 1.9, 2.0], {"patience": 2}, None),
        ([3.0, 3.0, 3.0], {"patience": 2}, 3),  # a tie is no improvement
        ([3.0, 2.95, 2.92, 2.91], {"patience": 2, "min_delta": 0.1}, 3),
        ([math.nan, 3.0, math.nan, math.nan], {"patience": 2}, 4),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([0.1, 0.2, 0.2], {"patience": 1, "metric": "evaluation/quiz/accuracy"}, 3),
        ([0.1, 0.2, 0.3], {"patience": 1, "metric": "evaluation/x/score", "goal": "max"}, None),
        ([0.1, 0.2, 0.3], {"patience": 1, "metric": "evaluation/x/score", "goal": "min"}, 2),
    ],
)
def test_end_by_patience(values, options, end):
    assert _steps_until_end(values, **options) == end


@pytest.mark.parametrize(
    ("metric", "sign"),
    [
        ("validation_loss/books", -1),
        ("validation_bits_per_byte", -1),
        ("evaluation/wiki/word_perplexity", -1),
        ("evaluation/arc/acc_norm", 1),
        ("evaluation/mean/centered_accuracy", 1),
        ("evaluation/gsm8k/exact_match,strict-match", 1),
        ("validation_rewards/margins", 1),
        ("evaluation/weight_loss/accuracy", 1),
        ("validation_loss/acc", -1),
    ],
)
def test_names_tell_the_goal(metric, sign):
    assert EarlyStopping.Config(metric=metric).sign() == sign


def test_mistakes_are_reported(tmp_path):
    with pytest.raises(UserError, match="does not tell whether lower or higher is better"):
        EarlyStopping.Config(metric="evaluation/x/score").validate()
    with pytest.raises(UserError, match=r"validation_loss needs --validator\.enable"):
        tiny_config(tmp_path, callbacks__earlystopping__metric="validation_loss").check(1)
    stopping, _, _ = _stopping("evaluation/quiz/accuracy_raw")
    stopping.on_measured({"validation_loss": 1.0})
    stopping.on_measured({"evaluation/other/accuracy": 1.0})
    with pytest.raises(
        UserError, match=r"no 'evaluation/quiz/accuracy_raw'.*evaluation/quiz/accuracy"
    ):
        stopping.on_measured({"evaluation/quiz/accuracy": 1.0})


def test_metrics_that_nothing_measures_are_reported(tmp_path, log):
    """Before the run by the tasks of the evaluation, at the first validation by its numbers, and
    after the run if a callback did not report it; for both options that name a metric."""
    (tmp_path / "quiz.txt").write_text("text")
    best = {"checkpoint__enable": True, "checkpoint__keep_best": True}
    for key, options in (
        ("callbacks__earlystopping__metric", {}),
        ("checkpoint__best_metric", best),
    ):
        config = tiny_config(tmp_path, **options, **{key: "evaluation/nothing/accuracy"})
        with pytest.raises(UserError, match=r"best_metric|earlystopping\.metric") as raised:
            config.check(1)
        assert "evaluates no 'nothing'; name it in --callbacks.evaluation.files" in str(
            raised.value
        )
        files = {"callbacks__evaluation__files": [str(tmp_path / "quiz.txt")]}
        config = tiny_config(tmp_path, **files, **options, **{key: "evaluation/nothing/accuracy"})
        with pytest.raises(UserError, match="evaluates no 'nothing'"):
            config.check(1)
        for task in ("quiz", "mean"):
            name = f"evaluation/{task}/accuracy"
            tiny_config(tmp_path, **files, **options, **{key: name}).check(1)
    config = tiny_config(tmp_path, **best)
    with pytest.raises(UserError, match=r"keep_best with best_metric validation_loss needs"):
        config.check(1)

    with pytest.raises(UserError, match="best_goal max: of validation_loss, the lowest is kept"):
        tiny_config(tmp_path, **best, **VALIDATING, checkpoint__best_goal="max").check(1)
    best |= VALIDATING | {"checkpoint__best_goal": "min"}
    with pytest.raises(
        UserError, match=r"best_metric: there is no 'validation_los'.*mean 'validation_loss'"
    ):
        run(tiny_config(tmp_path / "a", checkpoint__best_metric="validation_los", **best))
    run(tiny_config(tmp_path / "b", checkpoint__best_metric="value_loss", **best))
    assert "--checkpoint.best_metric 'value_loss' was never measured" in log.text


def test_a_complete_run_that_is_started_again_says_nothing_about_its_metric(tmp_path, log):
    """Which it measured before the start; this process measures nothing."""
    options = {"checkpoint__enable": True, "checkpoint__keep_best": True, **VALIDATING}
    options["callbacks__earlystopping__metric"] = "validation_loss"
    for _ in range(2):
        run(tiny_config(tmp_path, **options))
    assert "already complete" in log.text and "was never measured" not in log.text


def test_a_known_number_that_is_missing_is_no_improvement():
    """As a mean without anything to measure, which a validation leaves out."""
    stopping, trainer, reasons = _stopping("validation_reward", patience=2)
    trainer.validator = SimpleNamespace(measured_names=lambda: ["validation_reward"])
    stopping.on_measured({"validation_loss": math.nan})
    assert stopping.without_improvement == 1
    stopping.on_measured({"validation_loss": 1.0, "validation_reward": 0.5})
    assert stopping.best == 0.5 and stopping.without_improvement == 0
    stopping.on_measured({"validation_loss": math.nan})
    assert reasons == []
    stopping.on_measured({"validation_loss": math.nan})
    assert len(reasons) == 1 and "validation_reward has not improved in 2" in reasons[0]

    stopping, _, _ = _stopping("evaluation/quiz/accuracy")
    stopping.on_measured({"evaluation/quiz/accuracy": 0.5})
    stopping.on_measured({"evaluation/quiz/other": 0.5})
    assert stopping.without_improvement == 1


def test_a_count_in_the_other_direction_is_dropped():
    metric = "evaluation/x/score"
    highest, _, _ = _stopping(metric, goal="max")
    highest.on_measured({metric: 0.5})
    again, _, _ = _stopping(metric, goal="max")
    again.load_state_dict(highest.state_dict())
    lowest, _, _ = _stopping(metric, goal="min")
    lowest.load_state_dict(highest.state_dict())
    assert (again.best, lowest.best) == (0.5, None)


class Mute(Trainer):
    """Measures nothing in validations before the third one."""

    measures_named = ("verdict", "other")
    has_own_loss = True

    def compute_loss(self, batch):
        loss, weight = super().compute_loss(batch)
        if not torch.is_grad_enabled():
            is_measured = torch.tensor(float(self.step > 4))
            self.measure("verdict", is_measured * self.step, is_measured)
        return loss, weight


VALIDATING = {"validator__enable": True, "validator__freq": 2, "validator__steps": 1}


def test_validations_without_the_number(tmp_path):
    options = {"callbacks__earlystopping__goal": "max", **VALIDATING}
    options |= {"training__steps": 7, "callbacks__earlystopping__patience": 3}
    metric = "callbacks__earlystopping__metric"
    trainer = run(tiny_config(tmp_path, **{metric: "validation_verdict"}, **options), Mute)
    (stopping,) = (one for one in trainer.callbacks if isinstance(one, EarlyStopping))
    assert trainer.step == 7 and stopping.best == 7 and stopping.without_improvement == 0
    with pytest.raises(UserError, match="there is no 'validation_verdicts'"):
        run(tiny_config(tmp_path / "b", **{metric: "validation_verdicts"}, **options), Mute)
    # By the clock of each rank, which would not end together.
    with pytest.raises(UserError, match="there is no 'validation_time'"):
        run(tiny_config(tmp_path / "c", **{metric: "validation_time"}, **options), Mute)


@pytest.mark.parametrize("measures", [True, False])
def test_data_that_ends_before_the_first_validation(tmp_path, log, measures):
    """The last validation follows the end, and measures the number."""
    config = tiny_config(
        tmp_path,
        **{**VALIDATING, "validator__freq": 100},
        callbacks__earlystopping__metric="validation_loss" if measures else "value_loss",
    )
    assert run(config, Ending).step == 2
    assert ("was never measured" in log.text) is not measures


class Ending(Trainer):
    """Has no data after step 2."""

    def read_batches(self, batches):
        return super().read_batches(batches) if self.step < 2 else []


@pytest.mark.parametrize("returns", [False, True])
def test_turned_on_later_it_counts_from_there(tmp_path, returns):
    """Checkpoints of the run before, which it resumes or returns to, have no count."""
    saving = {"checkpoint__enable": True, "checkpoint__interval": 2}
    run(tiny_config(tmp_path, training__steps=2, **saving))
    config = _config(
        tmp_path,
        training__on_nonfinite="skip",
        spikes__max_in_a_row=2,
        spikes__action="leave_out",
    )
    trainer = run(config, NotFinite if returns else None)
    assert trainer.step == 6 and trainer.spikes.returned_to == (2 if returns else None)


class NotFinite(Trainer):
    """The losses of steps 3 and 4 are NaN."""

    def forward_backward_step(self, batch, n_tokens):
        loss = super().forward_backward_step(batch, n_tokens)
        return loss * (math.nan if self.step in (2, 3) else 1)


class Measures(Callback):
    """Reports a value in each step that is best in the second one."""

    def after_step(self, outcome):
        self.trainer.report_measured({"value_loss": abs(self.trainer.step - 2.0)})


def _config(folder, **options):
    config = tiny_config(
        folder,
        training__steps=9,
        checkpoint__enable=True,
        checkpoint__interval=100,
        callbacks__earlystopping__metric="value_loss",
        callbacks__earlystopping__patience=3,
        **options,
    )
    config.callbacks = [Measures.Config(), *config.callbacks]
    return config


@pytest.mark.parametrize("metric", ["eval_loss", "val/loss"])
def test_a_callback_may_measure_what_other_libraries_name(tmp_path, metric):
    config = _config(tmp_path)
    config.callbacks[-1].metric = metric
    config.callbacks[-1].check_run(config)
    del config.callbacks[0]
    with pytest.raises(UserError, match="is validation_loss here"):
        config.callbacks[-1].check_run(config)


class Stops(Callback):
    """Stops the run after step 3."""

    def on_step(self, outcome):
        if self.trainer.step == 3:
            signal.raise_signal(signal.SIGTERM)


def test_a_resumed_run_continues_the_count(tmp_path, caplog):
    """Whether or not it is interrupted, the run ends after step 5, and says why; run again, it
    takes no step, and with more patience it continues."""
    caplog.set_level(logging.INFO)
    whole = run(_config(tmp_path / "whole"))
    assert whole.step == 5
    assert "training ended after step 5 of 9: value_loss has not improved in 3" in caplog.text
    assert "its best value is 0 after step 2" in caplog.text

    stopped = _config(tmp_path / "parts")
    stopped.callbacks.append(Stops.Config())
    first = run(stopped)
    assert first.step in (3, 4)  # the count is then 1 or 2
    assert run(_config(tmp_path / "parts")).step == 5
    assert [info.step for info in list_checkpoints(tmp_path / "parts" / "checkpoint")][-1] == 5

    caplog.clear()
    assert run(_config(tmp_path / "parts")).step == 5
    assert "training has ended after step 5: value_loss has not improved" in caplog.text
    config = _config(tmp_path / "parts")
    config.callbacks[-1].patience = 5
    assert run(config).step == 7


def test_validation_ends_the_run_and_saves_it(tmp_path):
    """A rate of 0 improves nothing, so the second validation ends the run, which is saved."""
    config = tiny_config(
        tmp_path,
        optimizer__lr=1e-30,
        training__steps=9,
        validator__enable=True,
        validator__freq=2,
        validator__steps=1,
        checkpoint__enable=True,
        checkpoint__interval=100,
        checkpoint__keep_best=True,
        callbacks__earlystopping__metric="validation_loss",
        callbacks__earlystopping__patience=1,
        training__dtype="bfloat16",
    )
    assert run(config).step == 4
    assert [info.step for info in list_checkpoints(tmp_path / "checkpoint")] == [2, 4]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1]["reason"] == "ended early"
    assert events[-1]["why"].startswith("validation_loss has not improved in 1 measurements, and")
