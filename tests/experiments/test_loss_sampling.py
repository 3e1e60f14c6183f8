"""The experiment that draws samples with probabilities based on their recent loss."""

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


def statistics_of(samples, losses) -> StepStatistics:
    losses = np.array(losses, np.float64)
    return StepStatistics(
        step=1, loss=1.0, grad_norm=1.0, samples=np.array(samples), sample_losses=losses
    )


class TestSampler:
    def test_an_epoch_draws_the_number_of_samples(self):
        sampler = LossSampler.Config().build(n_samples=10, seed=0)
        drawn, epochs = [], []
        for _ in range(6):
            epochs.append(sampler.epoch)
            drawn.append(sampler.draw(4))
        assert [len(batch) for batch in drawn] == [4, 4, 2, 4, 4, 2]
        assert epochs == [0, 0, 0, 1, 1, 1]
        assert all(len(set(batch.tolist())) == len(batch) for batch in drawn)
        assert set(np.concatenate(drawn).tolist()) <= set(range(10))

    def test_chances(self):
        """Power, exploration, momentum, and the mean loss for unseen samples."""
        config = LossSampler.Config(power=2.0, explore=0.2, momentum=0.75)
        sampler = config.build(n_samples=4, seed=0)
        assert sampler.chances() == pytest.approx([0.25] * 4)
        sampler.observe(statistics_of([2, 0], [3.0, 1.0]))  # unseen samples have the mean, 2
        weights = np.array([1, 4, 9, 4])
        assert sampler.chances() == pytest.approx(0.8 * weights / 18 + 0.05)
        sampler.observe(statistics_of([2], [1.0]))  # 0.75 * 3 + 0.25 * 1 = 2.5, the mean 1.75
        weights = np.array([1, 1.75**2, 2.5**2, 1.75**2])
        assert sampler.chances() == pytest.approx(0.8 * weights / weights.sum() + 0.05)

    @pytest.mark.slow
    def test_the_first_sample_is_drawn_by_its_chance(self):
        """Counts of 20,000 draws are within 4.5 standard deviations."""
        config = LossSampler.Config(explore=0.1)
        first = np.zeros(5)
        sampler = config.build(n_samples=5, seed=3)
        sampler.observe(statistics_of(range(5), [0.1, 0.5, 1.0, 2.0, 4.0]))
        expected = 0.9 * np.array([0.1, 0.5, 1.0, 2.0, 4.0]) / 7.6 + 0.02
        draws = 20_000
        for _ in range(draws):
            first[sampler.draw(1)[0]] += 1
        deviation = np.sqrt(draws * expected * (1 - expected))
        assert (np.abs(first - draws * expected) < 4.5 * deviation).all()

    @pytest.mark.slow
    def test_the_second_sample_is_drawn_by_its_conditional_chance(self):
        """A draw has no repetitions, so the second sample is drawn from the others."""
        sampler = LossSampler.Config(explore=0.0).build(n_samples=3, seed=1)
        sampler.observe(statistics_of(range(3), [1.0, 2.0, 5.0]))
        chances, draws = np.array([1, 2, 5]) / 8, 20_000
        expected = [
            sum(chances[f] * chances[s] / (1 - chances[f]) for f in range(3) if f != s)
            for s in range(3)
        ]
        second = np.zeros(3)
        for _ in range(draws):
            second[sampler.draw(3)[1]] += 1
        deviation = np.sqrt(draws * np.array(expected) * (1 - np.array(expected)))
        assert (np.abs(second - draws * np.array(expected)) < 4.5 * deviation).all()

    def test_samples_without_loss_have_equal_chances(self):
        sampler = LossSampler.Config(explore=0.0).build(n_samples=3, seed=0)
        sampler.observe(statistics_of(range(3), [0.0, 0.0, 0.0]))
        assert sampler.chances() == pytest.approx([1 / 3] * 3)
        sampler.observe(statistics_of([1], [1.0]))
        assert sampler.draw(3)[0] == 1  # the others have a chance of 0 as long as it is not drawn

    def test_state_dict_restores_the_draws(self):
        sampler = LossSampler.Config().build(n_samples=8, seed=5)
        sampler.draw(3)
        sampler.observe(statistics_of([1, 2], [0.3, 2.0]))
        state = sampler.state_dict()
        same = state["estimates"] is sampler.state_dict()["estimates"]
        assert same, "state_dict must not copy"
        saved = json.dumps(state, default=np.ndarray.tolist)
        expected = [sampler.draw(4).tolist() for _ in range(5)]
        sampler.observe(statistics_of([1, 2], [9.0, 9.0]))
        assert json.dumps(state, default=np.ndarray.tolist) == saved
        other = LossSampler.Config().build(n_samples=8, seed=6)
        other.load_state_dict(json.loads(saved))
        assert [other.draw(4).tolist() for _ in range(5)] == expected
        old = LossSampler.Config().build(n_samples=8, seed=6)
        old.load_state_dict(json.loads(saved.replace("estimates", "losses")))
        assert [old.draw(4).tolist() for _ in range(5)] == expected

    @pytest.mark.parametrize(
        "field", [{"power": -1.0}, {"explore": 1.5}, {"explore": -0.1}, {"momentum": 1.0}]
    )
    def test_values_out_of_range_are_rejected(self, field):
        ((name, value),) = field.items()
        with pytest.raises(UserError, match=rf"--dataloader\.sampler\.{name} is {value}"):
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
    """Simulates the end of a process between two steps."""


class KilledAfterStepSix(Trainer):
    def complete_step(self, outcome):
        super().complete_step(outcome)
        if self.step == 6:
            raise Killed

    def save_last_step(self, error):
        """A kill saves nothing."""


def read_ledger(folder) -> list[str]:
    return [
        json.loads(line)["documents"] for line in (folder / "ledger.jsonl").read_text().splitlines()
    ]


class TestRun:
    def test_the_trainer_and_loader_of_the_library_are_used(self, tmp_path):
        config = config_of(tmp_path)
        assert type(config)._owner is Trainer and type(config.dataloader).__module__.startswith(
            "torchtitan.components"
        )

    @pytest.mark.slow
    def test_samples_with_a_high_loss_are_drawn_more_often(self, tmp_path):
        """Half of the samples have the same easy answer, which is learned quickly. With a power of
        0, all samples have equal chances."""
        data = tmp_path / "mixed.jsonl"
        words = random.Random(0)
        with open(data, "w") as file:
            for i in range(16):
                hard = " ".join(
                    "".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(16)
                )
                answer = "yes " * 60 if i < 8 else hard
                file.write(json.dumps({"prompt": f"number {i}", "response": answer}) + "\n")
        shares = {}
        for power in (0.0, 4.0):
            options = {
                "dataloader__dataset": data,
                "dataloader__pack_chunk": 4,
                "dataloader__sampler__power": power,
            }
            options |= {
                "training__steps": 50,
                "checkpoint__enable": False,
                "training__seq_len": 512,
            }
            run(config_of(tmp_path / str(power), **options))
            drawn = [name for names in read_ledger(tmp_path / str(power))[25:] for name in names]
            rows = [int(name.rpartition(":")[2]) for name in drawn]
            assert len(rows) > 60
            shares[power] = sum(row > 8 for row in rows) / len(rows)
        # Half, within four standard deviations of about 100 draws; and nearly all draws except
        # exploration.
        assert shares[0.0] == pytest.approx(0.5, abs=0.2)
        assert shares[4.0] > 0.75

    @pytest.mark.slow
    def test_runs_are_deterministic(self, tmp_path):
        for name in ("once", "again"):
            run(config_of(tmp_path / name, dataloader__sampler__power=8.0))
        assert read_ledger(tmp_path / "once") == read_ledger(tmp_path / "again")
        assert (tmp_path / "once" / "ledger.jsonl").stat().st_size > 0

    @pytest.mark.slow
    def test_the_sampler_observes_the_losses_of_the_step(self, tmp_path):
        """The observed samples are the samples in the ledger."""
        trainer = Trainer(config_of(tmp_path, training__steps=6))
        observed = []
        observe = trainer.dataloader.observe
        trainer.dataloader.observe = lambda statistics: (
            observed.append(statistics),
            observe(statistics),
        )
        try:
            trainer.train()
        finally:
            trainer.close()
        names = [
            set(trainer.dataloader.document_names(torch.tensor(statistics.samples)))
            for statistics in observed
        ]
        assert names == [set(documents) for documents in read_ledger(tmp_path)]
        assert all((statistics.sample_losses > 0).all() for statistics in observed)
        # The loss of the step is a mean over tokens, so it is between the smallest and the largest
        # sample loss.
        for statistics in observed:
            assert (
                statistics.sample_losses.min() <= statistics.loss <= statistics.sample_losses.max()
            )

    @pytest.mark.slow
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_resume_is_exact(self, tmp_path, num_workers):
        """The checkpoint contains the observed losses, so a killed and resumed run draws the same
        samples."""
        options = {"dataloader__num_workers": num_workers, "dataloader__sampler__power": 4.0}
        run(config_of(tmp_path / "straight", **options))
        with pytest.raises(Killed):
            run(config_of(tmp_path / "resumed", **options), KilledAfterStepSix)
        run(config_of(tmp_path / "resumed", **options))
        assert read_ledger(tmp_path / "resumed") == read_ledger(tmp_path / "straight")
        assert read_metrics(tmp_path / "resumed", "loss") == read_metrics(
            tmp_path / "straight", "loss"
        )
