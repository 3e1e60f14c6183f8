"""Events of real runs: sessions, phases, saves, skipped steps, and slow ranks."""

import os
import re
import time

import pytest
import torch

from tests.training import killed_in, launch, run, tiny_config, train
from torchtitan.components.observe.run_events import describe_goodput, goodput, read_events
from torchtitan.trainer import Trainer
from torchtitan.trainer.accounting import OWN_PHASES, Accounting, largest_excess

SAVED = {"checkpoint__enable": True, "checkpoint__interval": 2}


def test_account_of_a_resumed_run(tmp_path, log):
    begun = time.time()
    with killed_in(Trainer, "train_step", call=4):
        train(tmp_path, **SAVED)
    assert not any("goodput" in message for message in log.messages)  # it did not come to its end
    train(tmp_path, training__steps=6, **SAVED)
    events, wall = read_events(tmp_path), time.time() - begun
    assert [(event["event"], event["step"]) for event in events] == [
        *[("start", 0), ("progress", 1), ("progress", 2), ("save", 2), ("progress", 3)],
        *[("start", 2), ("progress", 3), ("progress", 4), ("save", 4), ("progress", 5)],
        *[("progress", 6), ("save", 6), ("end", 6)],
    ]
    first, second = (event for event in events if event["event"] == "start")
    assert first["environment"]["torch"] == torch.__version__ and list(first["data"]) == ["stories"]
    epochs = first["data"]["stories"]["epochs"]
    assert f"stories: {epochs:.3g} epochs in 4 steps" in log.messages
    epochs = second["data"]["stories"]["epochs"]
    assert f"stories: {epochs:.3g} epochs in 6 steps" in log.messages
    assert first["hub"] == []  # the stories are embedded
    parts = goodput(events)
    assert parts["lost steps"] > 0 and parts["restart"] > second["time"] - second["begun"]
    assert (
        events[-1]["time"] - first["begun"] == pytest.approx(sum(parts.values()))
        and sum(parts.values()) < wall
    )
    phases = events[-1]["seconds"]
    in_order = [
        "data",
        "forward",
        "backward",
        "gradient clipping",
        "reading the outcome",
        "optimizer step",
        "save",
    ]
    assert [phase for phase in phases if phase in in_order] == in_order and min(
        phases[p] for p in in_order
    ) > 0
    described, summary = log.messages[-2:]
    assert re.match(
        r"mean step: [\d.]+ ms; start of the step .* data .* forward .* backward", described
    )
    assert summary == f"goodput {describe_goodput(parts)}"


def test_skipped_step_is_an_event(tmp_path):
    class Overflowing(Trainer):
        def forward_backward_step(self, batch, n_tokens):
            loss = super().forward_backward_step(batch, n_tokens)
            return loss * float("nan") if self.step == 1 else loss

    run(tiny_config(tmp_path, training__steps=3, training__on_nonfinite="skip"), Overflowing)
    (skipped,) = (event for event in read_events(tmp_path) if event["event"] == "skipped")
    assert skipped["step"] == 2 and "loss nan" in skipped["reason"]


def test_full_disk_does_not_end_the_run(tmp_path, log, monkeypatch):
    def full(line):
        raise OSError(28, "No space left on device")

    class FullAfterOneStep(Trainer):
        def complete_step(self, outcome):
            super().complete_step(outcome)
            for callback in self.callbacks:
                if isinstance(callback, Accounting) and callback.file:
                    monkeypatch.setattr(callback.file, "append", full)

    trainer = run(tiny_config(tmp_path), FullAfterOneStep)
    assert trainer.step == 4 and [event["event"] for event in read_events(tmp_path)] == [
        "start",
        "progress",
    ]
    warnings = [record.message for record in log.records if record.levelname == "WARNING"]
    assert warnings == [
        "events.jsonl cannot be written: [Errno 28] No space left on device; training continues"
    ]


def test_median_of_the_ranks_is_exceeded():
    equal = [0.5, 0.5, 0.5]
    seconds = [[1.0, 5.0, *equal], [1.1, 5.0, *equal], [3.0, 5.1, *equal], [1.2, 4.0, *equal]]
    excess, rank, phase = largest_excess(seconds)
    assert (rank, phase) == (2, OWN_PHASES[0]) and excess == pytest.approx(1.9)
    # Without peers to wait for, the slower of two is the one to name.
    assert largest_excess(seconds[1:3])[1:] == (1, OWN_PHASES[0])
    seconds[1][4] = 2.9
    assert largest_excess(seconds)[1:] == (1, OWN_PHASES[4])


SLOW = """
import os, time
from tests.training import tiny_config
from torchtitan.trainer import Trainer

def sleep(seconds):
    if os.environ.get("RANK") == "1":
        time.sleep(seconds)

class SlowTrainer(Trainer):
    def METHOD(self, *args):
        sleep(0.3)
        return super().METHOD(*args)

def debug():
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    return SlowTrainer.Config.based_on(llama3_debugmodel())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "phase"), [("compute_loss", "forward"), ("next_micro_batches", "data"), (None, None)]
)
def test_slow_rank_is_named(tmp_path, method, phase):
    """Under FSDP, the other rank waits in its own forward pass for the weights of the slow one."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/config_registry.py").write_text(SLOW.replace("METHOD", method or "unused"))
    words = {
        "module": tmp_path / "slow",
        "config": "debug",
        "training.steps": 6,
        "metrics.log_freq": 2,
    }
    printed = launch(tmp_path / "run", 2, **words)
    host = os.uname().nodename
    named = [event for event in read_events(tmp_path / "run") if event["event"] == "straggler"]
    if method is None:
        assert [event for event in named if event["seconds_more"] > 0.2] == []
        return
    assert [(event["rank"], event["host"], event["phase"], event["step"]) for event in named] == [
        (1, host, phase, step) for step in (2, 4, 6)
    ]
    assert all(0.2 < event["seconds_more"] < 1 for event in named)
    assert (
        printed.count(f"rank 1 on {host} is slower than the other ranks") == 1
        and f'phase "{phase}"' in printed
    )
    assert phase in OWN_PHASES
