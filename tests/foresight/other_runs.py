"""Predicted against published runs of other trainers and setups, none of which chose a constant:
`python -m tests.foresight.other_runs [--write_docs]`, a minute."""

import argparse
import statistics
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

from tests.conftest import PROJECT
from tests.foresight.published import Run, configuration
from tests.tables import Row, as_markdown, print_table, write_docs
from torchtitan.components.quantization.narrow import MXFP8
from torchtitan.foresight.prediction import Prediction, predict

COLUMNS = ["setup", "source", "tokens/s", "predicted", "error"]

TORCHAO, FSDP_POST, FOUNDRY = "torchao", "PyTorch", "LLM Foundry"
"""Pages, with links in docs/foresight.md."""

LIMITED = "B200, power limited"

SIZES = {
    "llama2-7B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 11_008},
    # MPT has two matrices of 4 x dim in a feed-forward layer, not three: here as many weights
    "mpt-7B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 10_912},
    "mpt-13B": {"dim": 5120, "n_layers": 40, "n_heads": 40, "ffn_dim": 13_664},
}
VOCABULARIES = {"llama2-7B": 32_000, "mpt-7B": 50_432, "mpt-13B": 50_432}


class Other(NamedTuple):
    """A published run, and the names of device and products in a prediction."""

    source: str
    device: str
    run: Run
    products: str = "bfloat16"

    @property
    def setup(self) -> str:
        words = [self.run.setup, *([self.products] if self.products == "MXFP8" else [])]
        return ", ".join(words)


def _run(
    model: str, layout: str, gpus: int, device: str, tokens_per_s: float, **options: Any
) -> Run:
    settings = {
        "activation_checkpoint": "none",
        "compile": False,
        "float8": False,
        "async_tp": False,
        "schedule": "",
        "id": "",
        "gib": 0.0,
    }
    given = {"model": model, "layout": layout, "gpus": gpus, "device": device}
    return Run(**{**settings, **given, "tokens_per_s": tokens_per_s, **options})


def other_runs() -> list[Other]:
    compiled = {"compile": True, "activation_checkpoint": "selective"}
    eight = {"local_batch": 1, "seq_len": 8192, **compiled}
    short = {"local_batch": 6, "seq_len": 2048}
    b200 = ("llama3-8B", "fsdp8", 8, LIMITED)
    return [
        Other(TORCHAO, "b200", _run(*b200, 8307.5, **eight)),
        Other(TORCHAO, "b200", _run(*b200, 10_417, float8=True, **eight)),
        Other(TORCHAO, "b200", _run(*b200, 9642, **eight), "MXFP8"),
        Other(
            FSDP_POST,
            "a100",
            _run("llama2-7B", "fsdp128", 128, "A100", 3700, local_batch=2, seq_len=4096),
        ),
        Other(FOUNDRY, "a100", _run("mpt-7B", "fsdp8", 8, "A100", 4641, **short)),
        Other(FOUNDRY, "h100", _run("mpt-7B", "fsdp8", 8, "H100", 10_643, **short)),
        Other(
            FOUNDRY,
            "h100",
            _run("mpt-13B", "fsdp64", 64, "H100", 4800, **{**short, "local_batch": 2}),
        ),
    ]


def prediction_of(other: Other) -> Prediction:
    run = other.run
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(run._replace(model="llama3-8B"), folder)
        if other.products == "MXFP8":
            config.model_converters = [MXFP8.Config(min_features=0)]
        if run.model in SIZES:
            sizes = SIZES[run.model]
            model = replace(
                config.model_spec.model,
                **sizes,
                n_kv_heads=sizes["n_heads"],
                vocab_size=VOCABULARIES[run.model],
            )
            config.model_spec = replace(config.model_spec, model=model)
        return predict(config, run.gpus, other.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write_docs", action="store_true", help="write into docs/foresight.md")
    arguments = parser.parse_args()
    rows, sizes = [], []
    for other in other_runs():
        published = other.run.tokens_per_s
        predicted = prediction_of(other).tokens_per_second
        error = published / predicted - 1
        if other.run.device != LIMITED:
            sizes.append(abs(error))
        numbers = [f"{published:,.0f}", f"{predicted:,.0f}", f"{error:+.1%}"]
        rows.append(Row([other.setup, other.source, *numbers]))
    summary = (
        f"Without limited power: median error {statistics.median(sizes):.1%}, worst "
        f"{max(sizes):.1%}."
    )
    print_table("Predicted against other published runs", COLUMNS, rows)
    print(summary)
    if arguments.write_docs:
        page = PROJECT / "docs/foresight.md"
        write_docs(page, "others", f"{as_markdown(COLUMNS, rows)}\n\n{summary}")


if __name__ == "__main__":
    main()
