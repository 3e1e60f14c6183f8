"""Parts replaced from outside the package: components by subclasses in a configuration function,
single methods of the Trainer, and a model's layers by a converter, each with an option and an
effect."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.commands import run_command
from tests.training import flags, read_metrics, read_validation
from torchtitan.cli.main import main

TINY = {
    "model.dim": 64,
    "model.ffn_dim": 128,
    "model.n_layers": 2,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.steps": 3,
    "metrics.log_freq": 1,
    "lr_scheduler.warmup_steps": 0,
    "validator.enable": False,
}
IMPORTS = """
from dataclasses import dataclass, field

import torch

from torchtitan.models.llama3.config_registry import llama3_debugmodel
"""


pytestmark = pytest.mark.usefixtures("empty_folder")


def write_module(code: str) -> list[str]:
    """Command-line words that select the configuration `own_debugmodel` of `code`."""
    folder = Path("own")
    folder.mkdir()
    (folder / "config_registry.py").write_text(IMPORTS + code)
    return ["--module", str(folder.absolute()), "--config", "debugmodel"]


def train(folder: str, *selection: str, **options) -> Path:
    """Train a tiny run through the command line (options with `__` for `.`); return its folder."""
    overrides = {key.replace("__", "."): value for key, value in options.items()}
    words = flags({**TINY, "dump_folder": folder, **overrides})
    assert main(["train", *selection, *words]) == 0
    return Path(folder)


def losses(folder: Path) -> list[float]:
    return [loss for _, loss in read_metrics(folder, "loss")]


# --- components
# --------------------------------------------------------------------------------------------------


def test_optimizer():
    own = write_module('''
from torchtitan.components.optim.optimizer import Optimizer

class ScaledDescent(Optimizer):
    @dataclass(kw_only=True, slots=True)
    class Config(Optimizer.Config):
        multiple: float = 1.0
        """By how much the rate is multiplied."""

    def make_optimizers(self, groups):
        parameters = [parameter for members in groups.values() for _, parameter in members]
        return [torch.optim.SGD(parameters, lr=self.config.lr * self.config.multiple)]

def own_debugmodel():
    config = llama3_debugmodel()
    config.optimizer = ScaledDescent.Config()
    return config
''')
    built_in = {"optimizer__name": "SGD", "optimizer__weight_decay": 0.0}
    own_run = train("own_run", *own, optimizer__lr=0.0625, optimizer__multiple=4.0)
    assert read_metrics(own_run, "loss", "grad_norm") == read_metrics(
        train("expected", **built_in, optimizer__lr=0.25), "loss", "grad_norm"
    )
    assert losses(own_run) != losses(train("other", **built_in, optimizer__lr=0.0625))


def test_lr_scheduler():
    own = write_module('''
from torchtitan.components.optim.lr_scheduler import LRScheduler

class Halving(LRScheduler):
    @dataclass(kw_only=True, slots=True)
    class Config(LRScheduler.Config):
        every: int = 1000
        """Steps after which the rate is halved."""

    def factor(self, steps_taken):
        return 0.5 ** (steps_taken // self.config.every)

def own_debugmodel():
    config = llama3_debugmodel()
    config.lr_scheduler = Halving.Config()
    return config
''')
    run = train("own_run", *own, optimizer__lr=0.01, lr_scheduler__every=2, training__steps=5)
    assert read_metrics(run, "lr") == [(1, 0.01), (2, 0.01), (3, 0.005), (4, 0.005), (5, 0.0025)]
    # The optimizer really had these rates.
    constant = train(
        "constant", optimizer__lr=0.01, lr_scheduler__decay_ratio=0.0, training__steps=5
    )
    assert losses(run)[:3] == losses(constant)[:3]
    assert losses(run)[3] != losses(constant)[3]


def test_loss():
    own = write_module('''
import torch.nn.functional as F
from torchtitan.components.losses.loss import CrossEntropyLoss

class Smoothed(CrossEntropyLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        smoothing: float = 0.0
        """Share of the target that is spread over the vocabulary."""

    def from_logits(self, logits, labels):
        return F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=self.config.smoothing)

def own_debugmodel():
    config = llama3_debugmodel()
    config.model_spec.loss = Smoothed.Config()
    return config
''')
    none, half, full = (
        losses(train(f"smoothed_{smoothing}", *own, loss__smoothing=smoothing))[0]
        for smoothing in (0.0, 0.5, 1.0)
    )
    # float32 sums over 64 tokens, in another order: the built-in loss uses its closed form.
    assert none == pytest.approx(losses(train("built_in"))[0], rel=1e-6)
    # Linear in the smoothing for equal weights.
    assert half == pytest.approx((none + full) / 2, rel=1e-6)
    assert full != none


@pytest.mark.slow
def test_dataloader():
    """The loader inherits only the base class, so the trainer cannot rely on more."""
    own = write_module('''
from torchtitan.components.data.base import BaseDataLoader

class Counting(BaseDataLoader):
    """Rows of numbers that count up to `period` - 1 and begin again."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        period: int = 1000
        """Number of rows."""

    def __init__(self, config, *, seq_len, local_batch_size, **_):
        super().__init__(config)
        self.shape, self.position = (local_batch_size, seq_len + 1), 0

    def __next__(self):
        rows, length = self.shape
        tokens = (torch.arange(rows * length).reshape(rows, length) + self.position) % self.config.period
        self.position += 1
        return {"input": tokens[:, :-1], "labels": tokens[:, 1:], "documents": torch.zeros(rows, 2, dtype=torch.int64)}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def describe(self, documents):
        return "counting"

def own_debugmodel():
    config = llama3_debugmodel()
    config.dataloader = Counting.Config()
    return config
''')
    options = {"optimizer__lr": 0.01, "checkpoint__enable": True, "lr_scheduler__total_steps": 20}
    easy = train("easy", *own, dataloader__period=3, training__steps=8, **options)
    hard = train("hard", *own, dataloader__period=1000, training__steps=8, **options)
    assert losses(easy)[-1] < 1 < losses(hard)[-1]
    # The checkpoint contains its position.
    train("resumed", *own, dataloader__period=3, training__steps=4, **options)
    resumed = train("resumed", *own, dataloader__period=3, training__steps=8, **options)
    assert losses(resumed) == losses(easy)


def test_tokenizer():
    own = write_module('''
import hashlib
from torchtitan.components.tokenizer import Tokenizer

class Characters(Tokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(Tokenizer.Config):
        alphabet: str = "ab"
        """The characters that are tokens; all others are one more."""

    bos_id, adds_bos, adds_eos = None, False, False

    def __init__(self, config, *, path):
        super().__init__(config)
        self.eos_id = len(config.alphabet) + 1
        self.vocab_size = len(config.alphabet) + 2
        self.fingerprint = hashlib.sha256(config.alphabet.encode()).hexdigest()

    def tokenize(self, texts, *, allow_special):
        alphabet = self.config.alphabet
        return [[alphabet.find(c) if c in alphabet else len(alphabet) for c in text] for text in texts]

    def decode(self, ids, *, skip_special_tokens=False):
        return "".join((self.config.alphabet + "?")[i] for i in ids if i != self.eos_id)

def own_debugmodel():
    config = llama3_debugmodel()
    config.tokenizer = Characters.Config()
    return config
''')
    Path("abab.txt").write_text("ab" * 2000)
    options = {"dataloader__dataset": "abab.txt", "dataloader__cache_dir": "cache"}
    run = train(
        "own_run",
        *own,
        tokenizer__alphabet="abcdef",
        training__steps=8,
        optimizer__lr=0.01,
        **options,
    )
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["vocab_size"] == 8
    # The first loss is close to guessing among 8 characters; the model soon learns that b follows
    # a.
    assert losses(run)[0] == pytest.approx(math.log(8), abs=0.3)
    assert losses(run)[-1] < 0.3


def test_metrics():
    own = write_module('''
from pathlib import Path
from torchtitan.components.observe.metric_sinks import Sink
from torchtitan.components.observe.metrics import MetricsProcessor

class Csv(Sink):
    def __init__(self, path):
        self.file = open(path, "w")

    def write(self, step, values):
        if "loss" in values:
            self.file.write(f"{step},{values['loss']!r}\\n")

    def close(self):
        self.file.close()

class WithCsv(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        csv_name: str = "losses.csv"
        """File inside the dump folder."""

    def make_sinks(self, step):
        return [*super().make_sinks(step), Csv(Path(self.dump_folder) / self.config.csv_name)]

def own_debugmodel():
    config = llama3_debugmodel()
    config.metrics = WithCsv.Config()
    return config
''')
    run = train("own_run", *own, metrics__csv_name="mine.csv")
    rows = [line.split(",") for line in (run / "mine.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in rows] == read_metrics(run, "loss")
    assert len(rows) == 3


@pytest.mark.slow
def test_checkpointer():
    own = write_module('''
from torchtitan.components.checkpoint import CheckpointManager

class AlsoAt(CheckpointManager):
    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        also_at: int = 0
        """A step to save after, whatever the interval."""

    def is_due(self, step, **arguments):
        return super().is_due(step, **arguments) or step == self.config.also_at

def own_debugmodel():
    config = llama3_debugmodel()
    config.checkpoint = AlsoAt.Config(enable=True)
    return config
''')
    run = train("own_run", *own, checkpoint__also_at=2)
    assert {path.name for path in (run / "checkpoint").iterdir()} == {"step-2", "step-3"}
    straight = losses(run)
    again = train("own_run", *own, checkpoint__load_step=2)
    assert losses(again) == straight


# --- the Trainer
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_experiment_in_another_repository(capsys):
    """A custom section has options, appears in --help, and is saved with the run."""
    own = write_module('''
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

@dataclass
class CustomConfig:
    how_is_your_day: str = "good"
    """Answer to the question."""

class MyTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        custom_config: CustomConfig = field(default_factory=CustomConfig)

    def describe_run(self):
        super().describe_run()
        print("my day is", self.config.custom_config.how_is_your_day)

def own_debugmodel() -> MyTrainer.Config:
    return MyTrainer.Config(model_spec=model_registry("debugmodel"), training=TrainingConfig(steps=100),
                            custom_config=CustomConfig(how_is_your_day="great"))
''')
    with pytest.raises(SystemExit) as ended:
        main(["train", *own, "--help"])
    assert ended.value.code == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert (
        "--custom_config.how_is_your_day" in help_text
        and "Answer to the question. (default: great)" in help_text
    )

    run = train("default", *own)
    assert "my day is great" in capsys.readouterr().out
    run = train("overridden", *own, custom_config__how_is_your_day="splendid")
    assert "my day is splendid" in capsys.readouterr().out
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["custom_config"] == {"how_is_your_day": "splendid"}
    train("from_file", "--config_file", str(run / "config.yaml"))
    assert "my day is splendid" in capsys.readouterr().out
    assert losses(Path("from_file")) == losses(run)
    assert main(["train", *own, "--config_file", "missing.yaml"]) == 2


def own_trainer(methods: str) -> list[str]:
    """Return code of the debug model with a Trainer that has an option `--knob` and overrides
    `methods`."""
    return write_module(f"""
from dataclasses import fields
from pathlib import Path
from torchtitan.trainer import Trainer

class Own(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        knob: float = 1.0
        \"\"\"What the methods below need.\"\"\"
{methods}

def own_debugmodel():
    base = llama3_debugmodel()
    return Own.Config(**{{part.name: getattr(base, part.name) for part in fields(base)}})
""")


def test_override_forward():
    """Training and validation use the same definition of the loss."""
    own = own_trainer("""
    def forward(self, batch):
        return self.config.knob * super().forward(batch)
""")
    options = {
        "training__steps": 1,
        "validator__enable": True,
        "validator__steps": 1,
        "optimizer__lr": 0.0,
    }
    doubled, built_in = train("own_run", *own, knob=2.0, **options), train("built_in", **options)
    assert losses(doubled) == [2 * loss for loss in losses(built_in)]
    assert read_validation(doubled) == [
        (step, 2 * loss) for step, loss in read_validation(built_in)
    ]


def test_override_forward_backward_step():
    own = own_trainer("""
    def forward_backward_step(self, batch, n_tokens):
        return super().forward_backward_step(batch, n_tokens / self.config.knob)
""")
    doubled, built_in = (
        read_metrics(run, "loss", "grad_norm")[0]
        for run in (train("own_run", *own, knob=2.0), train("built_in"))
    )
    assert doubled == (1, 2 * built_in[1], 2 * built_in[2])


def test_override_post_dataloading_process():
    own = own_trainer("""
    def post_dataloading_process(self, batch):
        batch = super().post_dataloading_process(batch)
        return {**batch, "labels": torch.full_like(batch["labels"], int(self.config.knob))}
""")
    run = train("own_run", *own, knob=7.0, training__steps=8, optimizer__lr=0.01)
    built_in = train("built_in", training__steps=8, optimizer__lr=0.01)
    assert losses(run)[-1] < 3 < losses(built_in)[-1]  # a constant answer is learned quickly


def test_override_train_step():
    own = own_trainer("""
    def train_step(self, batches):
        for _ in range(int(self.config.knob)):
            next(batches)
        return super().train_step(batches)
""")
    every_second = train("own_run", *own, knob=1.0, optimizer__lr=0.0)
    assert (
        losses(every_second)
        == losses(train("built_in", training__steps=6, optimizer__lr=0.0))[1::2]
    )


def test_override_should_continue_training():
    own = own_trainer("""
    def should_continue_training(self):
        return super().should_continue_training() and self.step < self.config.knob
""")
    assert losses(train("own_run", *own, knob=2.0)) == losses(train("built_in"))[:2]


def test_override_init_weights():
    own = own_trainer("""
    def init_weights(self):
        super().init_weights()
        torch.nn.init.constant_(self.model_parts[0].head.output.weight, self.config.knob)
""")
    # Equal logits give the loss of guessing among 2,048 tokens.
    assert losses(train("own_run", *own, knob=0.0))[0] == pytest.approx(math.log(2048), rel=1e-6)


@pytest.mark.slow
def test_override_state_dict():
    """State added by a subclass is restored on resume."""
    own = own_trainer("""
    first_loss = None

    def complete_step(self, outcome):
        self.first_loss = self.first_loss or outcome.loss
        super().complete_step(outcome)

    def finish(self, ending):
        super().finish(ending)
        (Path(self.config.dump_folder) / "first_loss").write_text(repr(self.first_loss))

    def state_dict(self):
        return {**super().state_dict(), "first_loss": self.first_loss}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.first_loss = state_dict["first_loss"]
""")
    for steps in (2, 4):
        run = train("own_run", *own, checkpoint__enable=True, training__steps=steps)
    assert len(losses(run)) == 4
    assert float((run / "first_loss").read_text()) == losses(run)[0]


# --- converters
# --------------------------------------------------------------------------------------------------

CONVERTERS = '''
import json
import os
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.protocols import ModelConverter

class Recorder(ModelConverter):
    """Writes down what it is given, and in which order."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        log: str = ""
        """File to write to."""

    def record(self, hook, parts):
        parameters = [parameter for part in parts for parameter in part.parameters()]
        line = {
            "by": type(self).__name__,
            "hook": hook,
            "devices": sorted({parameter.device.type for parameter in parameters}),
            "sharded": any(isinstance(parameter, DTensor) for parameter in parameters),
            "output": None if parameters[-1].is_meta else parameters[-1].detach().float().sum().item(),
        }
        if os.environ.get("RANK", "0") == "0":
            with open(self.config.log, "a") as file:
                file.write(json.dumps(line) + "\\n")

    def convert(self, model):
        self.record("convert", [model])

    def post_init_hook(self, model_parts):
        self.record("post_init", model_parts)

    def post_optimizer_hook(self, model_parts):
        self.record("post_optimizer", model_parts)

class Second(Recorder):
    pass

class Headless(ModelConverter):
    """Fixes the output weights, and shrinks them after each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        keep: float = 1.0
        """Share of the weights that is left after a step."""

    def convert(self, model):
        model.head.output.requires_grad_(False)

    @torch.no_grad()
    def post_optimizer_hook(self, model_parts):
        for part in model_parts:
            part.head.output.weight.mul_(self.config.keep)

def own_debugmodel():
    config = llama3_debugmodel()
    config.model_converters = [Recorder.Config(log="hooks.jsonl"), Second.Config(log="hooks.jsonl")]
    return config

def headless():
    config = llama3_debugmodel()
    config.model_converters = [Headless.Config()]
    return config
'''


@pytest.mark.slow
def test_converters_are_called_in_order():
    """With two processes, so that weights are sharded."""
    own = write_module(CONVERTERS)
    words = flags(
        {
            **TINY,
            "dump_folder": "run",
            "training.steps": 2,
            "model_converters.second.log": "hooks.jsonl",
        }
    )
    command = [sys.executable, "-m", "torchtitan.cli.main", "train", *own, *words]
    environment = {**os.environ, "NGPU": "2", "OMP_NUM_THREADS": "1"}
    result = run_command(command, env=environment)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in Path("hooks.jsonl").read_text().splitlines()]
    hooks = ["convert", "post_init", "post_optimizer", "post_optimizer"]
    assert [(line["hook"], line["by"]) for line in lines] == [
        (hook, name) for hook in hooks for name in ("Recorder", "Second")
    ]
    for line in lines:
        before_sharding = line["hook"] == "convert"
        assert line["devices"] == ["meta"] if before_sharding else "meta" not in line["devices"]
        assert line["sharded"] is not before_sharding
    _, initial, first, second = (line["output"] for line in lines[::2])
    # weights exist at post_init, and each step changes them
    assert len({initial, first, second}) == 3


def test_converter_option_is_set_by_name():
    own = [*write_module(CONVERTERS)[:2], "--config", "headless"]
    shrinking = train("shrinking", *own, model_converters__headless__keep=0.0)
    # After the first step, all logits are equal, and the output weights stay zero.
    assert losses(shrinking)[1:] == pytest.approx([math.log(2048)] * 2, rel=1e-6)
    assert losses(train("fixed", *own))[1] != losses(shrinking)[1]
    saved = yaml.safe_load((shrinking / "config.yaml").read_text())
    assert saved["model_converters"] == {"headless": {"keep": 0.0}}


def test_unknown_converter_option_is_rejected(capsys):
    own = [*write_module(CONVERTERS)[:2], "--config", "headless"]
    assert main(["train", *own, "--model_converters.headless.keeep", "0.5"]) == 2
    assert "did you mean '--model_converters.headless.keep'?" in capsys.readouterr().err
