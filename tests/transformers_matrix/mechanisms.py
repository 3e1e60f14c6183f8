"""Tiny models with each mechanism, trained in two processes, resumed and packed: the second tier of
the matrix."""

import json
import random
import shutil
import string
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import torchtitan.models.transformers as any_class
from tests.equivalence.layouts import Options
from tests.equivalence.runs import (
    TOLERANCE,
    Differences,
    Outcome,
    UnitVariance,
    compare,
    record_run,
)
from tests.equivalence.workers import WorkerFailure, Workers
from tests.models.transformers.model_types import decoder_config
from tests.training import ABSENT
from tests.transformers_matrix.trial import quiet, without_dropout
from torchtitan.distributed import initialize_weights
from torchtitan.models.pretrained import huggingface_model
from torchtitan.models.transformers.description import build_class
from torchtitan.models.transformers.model import TransformersModel
from torchtitan.models.transformers.tiny import TEXT_IDS, text_inputs, tiny_config
from torchtitan.models.transformers.weights import class_names
from torchtitan.protocols.attention import AttentionMetadata
from torchtitan.tools.errors import UserError

MECHANISMS = {
    "llama": "attention of groups",
    "gemma2": "windows, soft caps, tied embeddings",
    "gemma3_text": "another RoPE in layers with windows",
    "llama4_text": "chunks, scale by position",
    "gpt_oss": "sinks, experts with biases",
    "granitemoe": "experts, multipliers",
    "glm4_moe": "sigmoid router with a bias, shared expert",
    "deepseek_v3": "latent attention",
    "deepseek_v32": "keys chosen by an index",
    "bloom": "ALiBi",
    "gpt2": "learned positions, transposed weights",
    "cohere": "attention and network in parallel",
    "starcoder2": "LayerNorm, biases",
    "bert": "a tied head with a bias",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "falcon_h1": "Mamba-2 and attention in parallel",
    "zamba2": "layers with the same weights",
    "qwen3_next": "gated delta net, experts",
    "minimax": "linear attention",
    "lfm2_moe": "short convolutions, experts",
    "recurrent_gemma": "linear recurrence",
    "xlstm": "xLSTM",
    "qwen2_5_vl": "text of images: RoPE in three parts",
    "gemma3": "text of images: windows",
}
"""Type → what its class computes otherwise than others."""

STEPS, RESUMED_FROM = 3, 2
RUN: Options = {
    "module": "transformers",
    "config": "scratch",
    **dict.fromkeys(("model__dim", "model__ffn_dim", "model__n_layers"), ABSENT),
    "training__steps": STEPS,
    "training__local_batch_size": 2,
    "training__global_batch_size": 4,
    "dataloader__num_workers": 0,
    "metrics__enable_tensorboard": False,
    "validator__freq": STEPS,
    "validator__steps": 1,
    "checkpoint__enable": True,
    "checkpoint__interval": RESUMED_FROM,
    "activation_checkpoint__mode": "none",
    "optimizer__name": "AdamW",
    "optimizer__lr": 1e-2,
    # Elements with a gradient near 0 take steps in proportion to it, not of the full size in a
    # direction that rounding decides.
    "optimizer__eps": 1e-3,
}
"""Options of every run. Both processes, or one that accumulates, have two windows of packed
documents per pass."""

_LENGTHS = [30, 3, 1, 14, 20, 28]
"""Tokens of the packed documents in two rows; windows and chunks of tiny models have 8."""


@dataclass(frozen=True)
class MechanismRow:
    """Result of one mechanism."""

    model_type: str
    seconds: float
    packing: str = ""
    """Form of packing."""
    leak: float = 0.0
    """Largest difference of a logit from the logits of the document alone, relative to the
    largest."""
    differences: Differences | None = None
    """FSDP over two processes and one process; None: a run did not finish."""
    changed_bits: str = ""
    """Quantities of the resumed run that are not bitwise equal."""
    failure: str = ""
    """The refusal, or the last line of the first exception."""

    @property
    def problems(self) -> list[str]:
        """Differences from the expected results."""
        problems = [self.failure] if self.failure else []
        if not self.leak <= TOLERANCE:
            problems.append(f"packed documents differ by {self.leak:.1e}")
        if self.differences and not self.differences.agree:
            problems.append(f"FSDP differs: {self.differences}")
        if self.changed_bits:
            problems.append(f"resumed: other {self.changed_bits}")
        return problems


def run_mechanisms(model_types: Iterable[str]) -> Iterator[MechanismRow]:
    """Yield the row of each type of `MECHANISMS`. The same two processes train all of them, unless
    one fails."""
    with Workers(2, runs_per_process=len(MECHANISMS)) as workers:
        for model_type in model_types:
            start, facts = time.monotonic(), dict[str, Any]()
            with tempfile.TemporaryDirectory() as folder, quiet():
                try:
                    _run(model_type, Path(folder), workers, facts)
                except (UserError, WorkerFailure) as error:
                    facts["failure"] = str(error).strip().splitlines()[-1]
                except Exception as error:  # one mechanism must not stop the others
                    facts["failure"] = f"{type(error).__name__}: {error}"
            yield MechanismRow(model_type, time.monotonic() - start, **facts)


def _run(model_type: str, folder: Path, workers: Workers, facts: dict[str, Any]) -> None:
    """Fill `facts` for a row."""
    write_model(model_type, folder / "model")
    facts["packing"], facts["leak"] = compare_packed(folder / "model")
    options = {**RUN, "hf_assets_path": folder / "model"}
    options |= dict.fromkeys(
        ("dataloader__dataset", "validator__dataset"), folder / "model/documents.jsonl"
    )
    for name in ("alone", "sharded"):
        (folder / name).mkdir()
    record_run(folder / "alone", options)
    workers.run(train_and_resume, folder, options)
    sharded, resumed = (
        Outcome.read(folder / name, processes=2, pipeline_degree=1)
        for name in ("sharded", "resumed")
    )
    facts["differences"] = compare(
        sharded, Outcome.read(folder / "alone", processes=1, pipeline_degree=1)
    )
    facts["changed_bits"] = ", ".join(changed(resumed, sharded))


def write_model(model_type: str, folder: Path) -> None:
    """Write a tiny config.json of a type, a tokenizer of characters, whose ids are `TEXT_IDS`, and
    short documents."""
    folder.mkdir()
    document = json.loads(tiny_config(decoder_config(model_type)).to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps(without_dropout(document)))
    letters = (string.ascii_letters + string.punctuation)[: len(TEXT_IDS)]
    vocabulary = {f"<{i}>": i for i in range(TEXT_IDS.start)} | dict(
        zip(letters, TEXT_IDS, strict=True)
    )
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": None, "eos_token": None})
    )
    draw = random.Random(0)
    texts = ("".join(draw.choices(letters, k=draw.randint(1, 60))) for _ in range(100))
    (folder / "documents.jsonl").write_text(
        "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    )


def train_and_resume(folder: Path, options: Options) -> None:
    """Train in the subfolder `sharded`, and once more in `resumed` from a checkpoint of the first
    run. Every rank calls it."""
    record_run(folder / "sharded", options)
    dist.barrier()
    if dist.get_rank() == 0:
        left_out = shutil.ignore_patterns(f"step-{STEPS}", "weights-*")
        shutil.copytree(folder / "sharded", folder / "resumed", ignore=left_out)
    dist.barrier()
    record_run(folder / "resumed", options)


def changed(outcome: Outcome, expected: Outcome) -> Iterator[str]:
    """Yield what differs from `expected` in any bit."""
    for name in ("losses", "grad_norms", "validation_losses"):
        if getattr(outcome, name) != getattr(expected, name):
            yield name.replace("_", " ")
    if any(
        not torch.equal(tensor, expected.weights[name]) for name, tensor in outcome.weights.items()
    ):
        yield "weights"


@torch.no_grad()
def compare_packed(folder: Path) -> tuple[str, float]:
    """Return how documents are packed, and by how much the largest logit differs from the class's,
    which gets each document alone."""
    spec, _ = huggingface_model(folder, any_class)
    assert isinstance(spec.model, TransformersModel.Config)
    with torch.device("meta"):
        model = spec.model.build()
    UnitVariance.Config().build().convert(model)
    initialize_weights(model.to_empty(device="cpu"), seed=0)
    reference = build_class(spec.model.transformers_config()).eval()
    names = class_names(model)
    reference.load_state_dict(
        {names[name]: tensor for name, tensor in model.state_dict().items()}, strict=False
    )
    tokens_BL = torch.randint(
        TEXT_IDS.start, TEXT_IDS.stop, (2, 48), generator=torch.Generator().manual_seed(0)
    )
    positions_BL = torch.cat([torch.arange(length) for length in _LENGTHS]).view(2, 48)

    def of_class(tokens_BL: Tensor) -> Tensor:
        logits: Tensor = reference(**text_inputs(reference, tokens_BL)).logits
        return logits

    documents = tokens_BL.flatten().split(_LENGTHS)
    expected = torch.cat([of_class(document[None]) for document in documents], 1).view(2, 48, -1)
    packed = model.eval()(tokens_BL, AttentionMetadata.from_positions(positions_BL))

    def difference(logits: Tensor) -> float:
        return ((logits - expected).abs().max() / expected.abs().max()).item()

    if difference(of_class(tokens_BL)) < 1000 * TOLERANCE:
        raise AssertionError("a leak between documents would not be seen")
    return model.packing.mode, difference(packed)
