"""`--training.batch_schedule` and `seq_len_schedule`: data and rates of runs whose batches or
windows grow."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from tests.processes import run_processes
from tests.training import killed_in, read_metrics, tiny_config, train
from torchtitan.config.manager import ConfigManager
from torchtitan.config.schedule import change_at, parse_changes
from torchtitan.tools.errors import UserError
from torchtitan.trainer import Trainer

# 32 tokens per window: 4 steps of 4 windows, then of 8, and after 16 + 24 = 40 windows (1280
# tokens) of 12.
OPTIONS = {
    "training__steps": 10,
    "training__global_batch_size": 4,
    "training__batch_schedule": ["4:8", "1.28e3t:12"],
    "training__mixed_precision_param": "float32",
    "debug__ledger": True,
}
SIZES = [4] * 4 + [8] * 3 + [12] * 3
SAVING = {"checkpoint__enable": True, "checkpoint__interval": 3}


def ledger(folder: Path) -> list[list[str]]:
    return [
        json.loads(line)["documents"] for line in (folder / "ledger.jsonl").read_text().splitlines()
    ]


def test_changes():
    changes = parse_changes("batch_schedule", 4, ["10:8", "1.5e3t:16"])
    assert [change[1:] for change in changes] == [(0, False, 4), (10, False, 8), (1500, True, 16)]
    assert changes[2].text == "--training.batch_schedule 1.5e3t:16"
    assert [change_at(changes, step, step * 100).value for step in (0, 9, 10, 14, 15)] == [
        4,
        4,
        8,
        8,
        16,
    ]


@pytest.mark.parametrize(
    "word",
    [
        "",
        "8",
        "x:8",
        "4:",
        "4:0",
        "0:4",
        "0t:4",
        "-4:8",
        "1.5:8",
        "1e-3t:8",
        "4T:8",
        "4:8:9",
        "1e999t:8",
        "\uff11:8",
    ],
)
def test_malformed_changes_are_rejected(tmp_path, word):
    with pytest.raises(UserError, match="--training.batch_schedule '.*' is not like 1000:64"):
        tiny_config(tmp_path, training__batch_schedule=[word]).check(world_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"training__batch_schedule": ["4:7"]},
            "batch_schedule 4:7 is not a multiple of local_batch_size x",
        ),
        ({"training__batch_schedule": ["4:8"]}, "batch_schedule 4:8 never takes effect in 4 steps"),
        (
            {"training__batch_schedule": ["3:8", "2:4"]},
            "batch_schedule 3:8 never takes effect in 4 steps",
        ),
        (
            {"training__seq_len_schedule": ["512t:64", "4t:16"]},
            "seq_len_schedule 512t:64 never takes effect",
        ),
        (
            {"training__batch_schedule": ["4:8"], "training__epochs": 1},
            "cannot be combined with --training.epochs",
        ),
        (
            {
                "training__batch_schedule": ["4:8"],
                "training__max_norm": math.inf,
                "optimizer__early_step_in_backward": True,
            },
            "early_step_in_backward cannot be combined with gradient accumulation "
            ".--training.batch_schedule",
        ),
    ],
)
def test_mistakes(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **options).check(world_size=1)


def changes_in(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the console about changes."""
    return [line for line in log.messages if line.startswith("from step")]


def test_reads_the_data_in_order_and_counts_tokens(tmp_path, log):
    """The documents of batches are the slices of one sequence, which a run with constant batches
    reads too."""
    trainer = train(tmp_path / "growing", **OPTIONS)
    assert changes_in(log) == [
        "from step 5 on, 8 x 32 tokens per step",
        "from step 8 on, 12 x 32 tokens per step",
    ]
    train(
        tmp_path / "constant",
        **{**OPTIONS, "training__batch_schedule": [], "training__steps": sum(SIZES) // 4},
    )
    growing, constant = ledger(tmp_path / "growing"), ledger(tmp_path / "constant")
    assert [len(documents) for documents in growing] == SIZES
    assert list(itertools.chain(*growing)) == list(itertools.chain(*constant))
    seen = [line[1] for line in read_metrics(tmp_path / "growing", "n_tokens_seen")]
    assert seen == list(itertools.accumulate(32 * size for size in SIZES))
    assert trainer.run_length.n_samples_read == sum(SIZES)
    # the same number of samples again
    assert trainer.run_length.samples_read_at(10, 0, 0) == 2 * sum(SIZES)
    assert trainer.run_length.tokens_at(10, 0, 0) == 32 * sum(SIZES)


def test_rates_by_tokens(tmp_path):
    """The total is the tokens of all steps, and each step's rate follows the tokens before it."""
    options = {
        "lr_scheduler__unit": "tokens",
        "lr_scheduler__warmup_steps": 256,
        "lr_scheduler__min_lr_factor": 0.0,
    }
    options |= {"lr_scheduler__decay_ratio": None, "lr_scheduler__decay_type": "linear"}
    trainer = train(tmp_path, **OPTIONS, **options)
    total = 32 * sum(SIZES)
    assert trainer.lr_scheduler.total_steps == total
    position, expected = 0, []
    for size in SIZES:
        warming = (position + 32 * size) / 256
        expected.append(
            3e-4 * (min(1.0, warming) if position < 256 else 1 - (position - 256) / (total - 256))
        )
        position += 32 * size
    # Metrics have the rate of the step itself.
    assert [line[1] for line in read_metrics(tmp_path, "lr")] == pytest.approx(expected, rel=1e-9)


def test_a_warm_up_below_one_step_of_tokens_is_refused(tmp_path):
    options = {"lr_scheduler__unit": "tokens", "lr_scheduler__warmup_steps": 2}
    with pytest.raises(
        UserError,
        match=r"warmup_steps is 2, but must be 0 tokens \(.*\), or at least the \d+ of a step",
    ):
        tiny_config(tmp_path, **options).check(1)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [4, 5, 8])
def test_resumes_bit_identically(tmp_path, killed):
    in_tokens = {"lr_scheduler__unit": "tokens", "lr_scheduler__warmup_steps": 256}
    options = {**OPTIONS, **SAVING, "checkpoint__interval": 1, **in_tokens}
    straight = train(tmp_path / "straight", **options)
    with killed_in(Trainer, "train_step", killed + 1):
        train(tmp_path / "resumed", **options)
    resumed = train(tmp_path / "resumed", **options)
    exact = ("loss", "grad_norm", "lr", "n_tokens_seen")
    assert read_metrics(tmp_path / "straight", *exact) == read_metrics(tmp_path / "resumed", *exact)
    assert ledger(tmp_path / "straight") == ledger(tmp_path / "resumed")
    first, second = (trainer.states()["model"].state_dict() for trainer in (straight, resumed))
    assert all(torch.equal(first[name], value) for name, value in second.items())


def finish(folder: Path) -> None:
    train(folder, **OPTIONS, **SAVING)


@pytest.mark.slow
def test_resumes_on_two_processes(tmp_path):
    """One process takes 5 steps, two take the rest: the same data and losses."""
    train(tmp_path / "straight", **OPTIONS)
    with killed_in(Trainer, "train_step", 6):
        train(tmp_path / "resumed", **OPTIONS, **SAVING)
    run_processes(finish, 2, tmp_path / "resumed")
    resumed = [sorted(documents) for documents in ledger(tmp_path / "resumed")]
    assert resumed == [sorted(documents) for documents in ledger(tmp_path / "straight")]
    straight = read_metrics(tmp_path / "straight", "loss", "grad_norm", "n_tokens_seen")
    # Float32 sums in another order, over ten steps.
    assert read_metrics(tmp_path / "resumed", "loss", "grad_norm", "n_tokens_seen") == [
        pytest.approx(line, rel=1e-4) for line in straight
    ]


# 2 windows of 32 tokens in each of 4 steps, then of 64, and of 128 after 256 + 3 x 128 = 640
# tokens.
LENGTHS = {
    **OPTIONS,
    "training__global_batch_size": 2,
    "training__batch_schedule": [],
    "training__seq_len_schedule": ["4:64", "640t:128"],
    "lr_scheduler__unit": "tokens",
    "lr_scheduler__warmup_steps": 128,
}
TOKENS = [64] * 4 + [128] * 3 + [256] * 3


class Reading(Trainer):
    """Records the tokens of each step."""

    def next_micro_batches(self, batches):
        micro_batches = super().next_micro_batches(batches)
        self.__dict__.setdefault("read", []).append(
            torch.cat([batch["input"] for batch in micro_batches])
        )
        return micro_batches


def test_lengths_cut_the_same_text(tmp_path, log):
    """Without shuffling, the windows of all lengths follow each other like those of one length."""
    options = {**LENGTHS, "dataloader__shuffle": False}
    growing = train(tmp_path / "growing", trainer_class=Reading, **options)
    assert changes_in(log) == [
        "from step 5 on, 2 x 64 tokens per step",
        "from step 8 on, 2 x 128 tokens per step",
    ]
    assert [tokens.shape[1] for tokens in growing.read] == [32] * 4 + [64] * 3 + [128] * 3
    constant = {**options, "training__seq_len_schedule": [], "training__steps": sum(TOKENS) // 64}
    read = train(tmp_path / "constant", trainer_class=Reading, **constant).read
    assert torch.equal(
        torch.cat([tokens.flatten() for tokens in growing.read]), torch.cat(read).flatten()
    )
    assert [line[1] for line in read_metrics(tmp_path / "growing", "n_tokens_seen")] == list(
        itertools.accumulate(TOKENS)
    )
    assert growing.lr_scheduler.total_steps == growing.n_tokens_seen == sum(TOKENS)


def test_each_token_is_read_once_in_an_epoch(tmp_path):
    """Shuffled blocks of the longest windows, in a text of distinct words that nearly fills an
    epoch."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{i:04d}" for i in range(700)))
    trainer = train(tmp_path / "run", trainer_class=Reading, dataloader__dataset=text, **LENGTHS)
    [tokens] = trainer.config.dataloader.open(trainer.tokenizer)
    starts = torch.cat([tokens.flatten().unfold(0, 16, 16) for tokens in trainer.read])
    assert sum(TOKENS) <= tokens.n_tokens - tokens.n_tokens % 128
    assert len({tuple(row.tolist()) for row in starts}) == len(starts) == sum(TOKENS) // 16


@pytest.mark.slow
@pytest.mark.parametrize("killed", [4, 5, 7, 8])
def test_lengths_resume_bit_identically(tmp_path, killed):
    options = {**LENGTHS, **SAVING, "checkpoint__interval": 1}
    straight = train(tmp_path / "straight", trainer_class=Reading, **options)
    with killed_in(Trainer, "train_step", killed + 1):
        train(tmp_path / "resumed", **options)
    resumed = train(tmp_path / "resumed", trainer_class=Reading, **options)
    assert all(map(torch.equal, straight.read[killed:], resumed.read))
    exact = ("loss", "grad_norm", "lr", "n_tokens_seen")
    assert read_metrics(tmp_path / "straight", *exact) == read_metrics(tmp_path / "resumed", *exact)
    first, second = (trainer.states()["model"].state_dict() for trainer in (straight, resumed))
    assert all(torch.equal(first[name], value) for name, value in second.items())


def finish_lengths(folder: Path) -> None:
    train(folder, **LENGTHS, **SAVING, training__local_batch_size=1)


@pytest.mark.slow
def test_lengths_resume_on_two_processes(tmp_path):
    train(tmp_path / "straight", **LENGTHS)
    with killed_in(Trainer, "train_step", 4):
        train(tmp_path / "resumed", **LENGTHS, **SAVING)
    run_processes(finish_lengths, 2, tmp_path / "resumed")
    assert ledger(tmp_path / "resumed") == ledger(tmp_path / "straight")
    straight = read_metrics(tmp_path / "straight", "loss", "grad_norm", "n_tokens_seen")
    # Float32 sums in another order, over ten steps.
    assert read_metrics(tmp_path / "resumed", "loss", "grad_norm", "n_tokens_seen") == [
        pytest.approx(line, rel=1e-4) for line in straight
    ]


def test_lengths_that_cannot_change_are_rejected(tmp_path):
    with pytest.raises(UserError, match="seq_len_schedule is 32, but must be a divisor of 48"):
        tiny_config(tmp_path, training__seq_len_schedule=["4:48"]).check(world_size=1)
    config = tiny_config(
        tmp_path, training__seq_len_schedule=["4:64"], parallelism__pipeline_parallel_degree=2
    )
    with pytest.raises(
        UserError, match="pipeline_parallel_degree 2 cannot be combined with --training.seq_len_sch"
    ):
        config.check(world_size=2)


def test_packed_samples_cannot_change_length(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": "a b", "response": "c d"}) for _ in range(9)))
    words = [
        "--config",
        "debugmodel_sft",
        "--dataloader.dataset",
        str(rows),
        "--training.seq_len_schedule",
        "4:4096",
    ]
    config = ConfigManager().parse_args([*words, "--dump_folder", str(tmp_path)]).config
    with pytest.raises(
        UserError, match="--training.seq_len_schedule: the windows of .*DataLoader have one length"
    ):
        Trainer(config)
