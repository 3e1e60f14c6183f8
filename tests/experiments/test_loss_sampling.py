"""The experiment that draws samples by their recent loss."""

import json
import random

import numpy as np
import pytest
import torch

from tests.training import flags, read_metrics, run
from torchtitan.components.data.plan.sampler import StepStatistics
from torchtitan.config.manager import ConfigManager
from torchtitan.experiments.loss_sampling.sampler import LossSampler
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer


def observed(samples, losses) -> StepStatistics:
    losses = np.array(losses, np.float64)
    return StepStatistics(step=1, loss=1.0, grad_norm=1.0, samples=np.array(samples), sample_losses=losses)


class TestSampler:
    def test_an_epoch_is_as_many_draws_as_samples(self):
        sampler = LossSampler.Config().build(n_samples=10, seed=0)
        drawn, epochs = [], []
        for _ in range(6):
            epochs.append(sampler.epoch)
            drawn.append(sampler.draw(4))
        assert [len(own) for own in drawn] == [4, 4, 2, 4, 4, 2]
        assert epochs == [0, 0, 0, 1, 1, 1]
        assert all(len(set(own.tolist())) == len(own) for own in drawn)
        assert set(np.concatenate(drawn).tolist()) <= set(range(10))

    def test_chances(self):
        """By hand: power, exploration, the mean for what is not seen yet, and momentum."""
        config = LossSampler.Config(power=2.0, explore=0.2, momentum=0.75)
        sampler = config.build(n_samples=4, seed=0)
        assert sampler.chances() == pytest.approx([0.25] * 4)
        sampler.observe(observed([2, 0], [3.0, 1.0]))  # the others count as 2
        weights = np.array([1, 4, 9, 4])
        assert sampler.chances() == pytest.approx(0.8 * weights / 18 + 0.05)
        sampler.observe(observed([2], [1.0]))  # 0.75 * 3 + 0.25 * 1 = 2.5, the mean 1.75
        weights = np.array([1, 1.75**2, 2.5**2, 1.75**2])
        assert sampler.chances() == pytest.approx(0.8 * weights / weights.sum() + 0.05)

    def test_samples_are_drawn_by_their_chance(self):
        """How often each is the first of a draw, in 20,000 draws; within 4.5 standard deviations."""
        config = LossSampler.Config(explore=0.1)
        first = np.zeros(5)
        sampler = config.build(n_samples=5, seed=3)
        sampler.observe(observed(range(5), [0.1, 0.5, 1.0, 2.0, 4.0]))
        expected = 0.9 * np.array([0.1, 0.5, 1.0, 2.0, 4.0]) / 7.6 + 0.02
        draws = 20_000
        for _ in range(draws):
            first[sampler.draw(1)[0]] += 1
        deviation = np.sqrt(draws * expected * (1 - expected))
        assert (np.abs(first - draws * expected) < 4.5 * deviation).all()

    def test_what_is_left_is_drawn_by_its_chance(self):
        """Without repetition, the second of a draw is drawn by the chances among those that are left."""
        sampler = LossSampler.Config(explore=0.0).build(n_samples=3, seed=1)
        sampler.observe(observed(range(3), [1.0, 2.0, 5.0]))
        chances, draws = np.array([1, 2, 5]) / 8, 20_000
        expected = [sum(chances[f] * chances[s] / (1 - chances[f]) for f in range(3) if f != s) for s in range(3)]
        second = np.zeros(3)
        for _ in range(draws):
            second[sampler.draw(3)[1]] += 1
        deviation = np.sqrt(draws * np.array(expected) * (1 - np.array(expected)))
        assert (np.abs(second - draws * np.array(expected)) < 4.5 * deviation).all()

    def test_nothing_left_to_learn_draws_all_alike(self):
        sampler = LossSampler.Config(explore=0.0).build(n_samples=3, seed=0)
        sampler.observe(observed(range(3), [0.0, 0.0, 0.0]))
        assert sampler.chances() == pytest.approx([1 / 3] * 3)
        sampler.observe(observed([1], [1.0]))
        assert sampler.draw(3)[0] == 1  # the others have no chance at all, until it is gone

    def test_state(self):
        sampler = LossSampler.Config().build(n_samples=8, seed=5)
        sampler.draw(3)
        sampler.observe(observed([1, 2], [0.3, 2.0]))
        state = sampler.state_dict()
        assert state["losses"] is sampler.state_dict()["losses"], "no copy for each batch"
        saved = json.dumps(state, default=np.ndarray.tolist)
        expected = [sampler.draw(4).tolist() for _ in range(5)]
        sampler.observe(observed([1, 2], [9.0, 9.0]))
        assert json.dumps(state, default=np.ndarray.tolist) == saved
        other = LossSampler.Config().build(n_samples=8, seed=6)
        other.load_state_dict(json.loads(saved))
        assert [other.draw(4).tolist() for _ in range(5)] == expected

    @pytest.mark.parametrize("field", [{"power": -1.0}, {"explore": 1.5}, {"explore": -0.1}, {"momentum": 1.0}])
    def test_numbers_out_of_range(self, field):
        (name,) = field
        with pytest.raises(UserError, match=f"sampler.{name}"):
            LossSampler.Config(**field).build(n_samples=2, seed=0)


OPTIONS = {
    "module": "loss_sampling",
    "config": "debugmodel",
    "model.dim": 64,
    "model.ffn_dim": 128,
    "model.n_layers": 2,
    "training.seq_len": 256,
    "training.local_batch_size": 2,
    "training.steps": 10,
    "dataloader.pack_chunk": 16,
    "metrics.log_freq": 1,
    "validator.enable": False,
    "debug.ledger": True,
    "checkpoint.enable": True,
    "checkpoint.interval": 4,
}


def config_of(folder, **options):
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    return ConfigManager().parse_args(flags({**OPTIONS, "dump_folder": folder, **overrides})).config


class Killed(Exception):
    """Stands for the end of a process between two steps."""


class KilledAfterStepSix(Trainer):
    def complete_step(self, outcome):
        super().complete_step(outcome)
        if self.step == 6:
            raise Killed


def ledger(folder) -> list[str]:
    return [json.loads(line)["documents"] for line in (folder / "ledger.jsonl").read_text().splitlines()]


class TestRun:
    def test_only_the_samplers_differ(self, tmp_path):
        """The library's trainer and loader are used as they are."""
        config = config_of(tmp_path)
        assert type(config)._owner is Trainer and type(config.dataloader).__module__.startswith("torchtitan.components")

    def test_what_is_predicted_badly_is_drawn_more_often(self, tmp_path):
        """Half of the samples have the same easy answer, soon learned; with a power of 0 that changes nothing."""
        data = tmp_path / "mixed.jsonl"
        words = random.Random(0)
        with open(data, "w") as file:
            for i in range(16):
                hard = " ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(16))
                answer = "yes " * 60 if i < 8 else hard
                file.write(json.dumps({"prompt": f"number {i}", "response": answer}) + "\n")
        shares = {}
        for power in (0.0, 4.0):
            options = {"dataloader__dataset": data, "dataloader__pack_chunk": 4, "dataloader__sampler__power": power}
            options |= {"training__steps": 50, "checkpoint__enable": False, "training__seq_len": 512}
            run(config_of(tmp_path / str(power), **options))
            drawn = [name for names in ledger(tmp_path / str(power))[25:] for name in names]
            rows = [int(name.rpartition(":")[2]) for name in drawn]
            assert len(rows) > 60
            shares[power] = sum(row > 8 for row in rows) / len(rows)
        # Half, within four standard deviations of some hundred draws; and nearly all but those of the exploration.
        assert shares[0.0] == pytest.approx(0.5, abs=0.2)
        assert shares[4.0] > 0.75

    def test_the_same_run_draws_the_same(self, tmp_path):
        for name in ("once", "again"):
            run(config_of(tmp_path / name, dataloader__sampler__power=8.0))
        assert ledger(tmp_path / "once") == ledger(tmp_path / "again")
        assert (tmp_path / "once" / "ledger.jsonl").stat().st_size > 0

    def test_the_losses_are_those_of_the_steps(self, tmp_path):
        """The statistics are of the samples that the ledger names."""
        trainer = Trainer(config_of(tmp_path, training__steps=6))
        told = []
        observe = trainer.dataloader.observe
        trainer.dataloader.observe = lambda statistics: (told.append(statistics), observe(statistics))
        try:
            trainer.train()
        finally:
            trainer.close()
        names = [set(trainer.dataloader.document_names(torch.tensor(statistics.samples))) for statistics in told]
        assert names == [set(documents) for documents in ledger(tmp_path)]
        assert all((statistics.sample_losses > 0).all() for statistics in told)
        # The loss of the step is the mean over tokens, and lies between those of its samples.
        for statistics in told:
            assert statistics.sample_losses.min() <= statistics.loss <= statistics.sample_losses.max()

    @pytest.mark.parametrize("workers", [0, 2])
    def test_resume_is_exact(self, tmp_path, workers):
        """What was learned is in the checkpoint: a run that is killed and resumed draws what it would have drawn."""
        options = {"dataloader__num_workers": workers, "dataloader__sampler__power": 4.0}
        run(config_of(tmp_path / "straight", **options))
        with pytest.raises(Killed):
            run(config_of(tmp_path / "resumed", **options), KilledAfterStepSix)
        run(config_of(tmp_path / "resumed", **options))
        assert ledger(tmp_path / "resumed") == ledger(tmp_path / "straight")
        assert read_metrics(tmp_path / "resumed", "loss") == read_metrics(tmp_path / "straight", "loss")
