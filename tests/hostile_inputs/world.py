"""A small example of every kind of file that torchtitan reads, written by torchtitan itself if it
can."""

import base64
import csv
import gzip
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import load_file

from tests.components.tokenizer.helpers import write_sentencepiece, write_tekken
from tests.training import flags

TINY = {
    "model.dim": 16,
    "model.ffn_dim": 32,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "lr_scheduler.warmup_steps": 2,
    "validator.enable": False,
}
"""A run that takes tenths of a second."""

STEPS = 3
"""Steps of the run whose checkpoints are damaged, also after a resume."""

SECRET = "the-content-of-a-file-outside-of-the-folder"

Command = Sequence[str]


def train(folder: str, data: str, **options: object) -> list[str]:
    """Return the command of a tiny run on `data`."""
    named = {name.replace("__", "."): value for name, value in options.items()}
    return ["train", *flags({**TINY, "dump_folder": folder, "dataloader.dataset": data, **named})]


def resume() -> list[str]:
    """Return the command that made the run's checkpoints, or resumes from the newest one that is
    left."""
    saving = {"checkpoint__enable": True, "checkpoint__interval": 1, "checkpoint__keep_latest_k": 0}
    return train("run", "rows.jsonl", training__steps=STEPS, debug__ledger=True, **saving)


def chat_run(folder: str) -> list[str]:
    """Return the command of a step of fine-tuning on the conversations."""
    words = train(folder, "chats.jsonl", training__steps=1, training__seq_len=256)
    return [words[0], "--module", "llama3", "--config", "debugmodel_sft", *words[1:]]


def preference_run(folder: str) -> list[str]:
    """Return the command of a step of preference optimization with cached results of the
    reference."""
    words = train(
        folder, "pairs.jsonl", training__steps=1, training__seq_len=256, reference__kind="cached"
    )
    return [words[0], "--module", "preference", "--config", "dpo_debugmodel", *words[1:]]


def show() -> list[str]:
    """Return the command that shows the documents of a step of the run."""
    words = train("run", "rows.jsonl", training__steps=STEPS)
    return ["data", "show", *words[1:], "--step", "2"]


def recipe() -> list[str]:
    """Return the command of a recipe, whose stages have finished."""
    return ["run", "recipe.yaml", "--folder", "stages"]


def adapter_run(folder: str, adapter: str = "") -> list[str]:
    """Return the command of a step of training adapters, which begin from the ones in `adapter`, if
    any."""
    options = {"model_converters__lora__rank": 4, "model_converters__lora__adapter_path": adapter}
    words = train(folder, "chats.jsonl", training__steps=1, training__seq_len=256, **options)
    return [words[0], "--module", "llama3", "--config", "debugmodel_lora", *words[1:]]


def build(folder: Path, run: Callable[[Command], None]) -> None:
    """Write the examples into `folder`; `run` runs a command of torchtitan with that as its current
    folder."""
    generator = random.Random(0)
    words = [
        "".join(generator.choices("aeioulnrstm", k=generator.randint(2, 7))) for _ in range(200)
    ]

    def text(count: int) -> str:
        return " ".join(generator.choices(words, k=count))

    rows = [{"text": text(30)} for _ in range(40)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": text(5)},
                {"role": "assistant", "content": text(8)},
            ]
        }
        for _ in range(20)
    ]
    pairs = [{"prompt": text(5), "chosen": text(6), "rejected": text(4)} for _ in range(8)]
    (folder / "secret.txt").write_text(SECRET)
    for name, content in (("rows", rows), ("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in content))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(folder / "saved")
    with gzip.open(folder / "rows.txt.gz", "wt") as compressed:
        compressed.writelines(row["text"] + "\n\n" for row in rows)
    with open(folder / "rows.csv", "w") as table:
        writer = csv.DictWriter(table, ["text"])
        writer.writeheader()
        writer.writerows(rows)
    questions = [{"query": text(4), "choices": [text(1), text(2)], "gold": 1} for _ in range(3)]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in questions))
    ranks = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc"]
    (folder / "tiktoken").mkdir()
    (folder / "tiktoken/tokenizer.model").write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    )
    (folder / "pieces").mkdir()
    write_sentencepiece(folder / "pieces/tokenizer.model", [text(30) for _ in range(200)])
    (folder / "tekken").mkdir()
    write_tekken(folder / "tekken/tekken.json", ranks)
    run(resume())
    run(chat_run("chat_run"))
    run(preference_run("preference_run"))
    run([*adapter_run("adapted"), "--checkpoint.enable", "--checkpoint.last_save_in_hf"])
    # Stages that take a second if a case repeats them.
    stages = [{"name": name, "run": "ls"} for name in ("first", "second")]
    (folder / "recipe.yaml").write_text(json.dumps({"stages": stages}))  # JSON is YAML
    run(recipe())
    (folder / "run/foresight.json").write_text(
        '{"device": "this machine", "step_time": 0.125, "mfu": 1.0}'
    )
    completions = [
        {"step": 1, "reward": 0.5, "prompt": "a", "completion": "b"},
        {"step": 2, "reward": 1},
    ]
    (folder / "run/completions.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in completions)
    )
    last = f"run/checkpoint/step-{STEPS}"
    run(["convert", last, "hf", "--to", "hf"])
    run(["convert", last, "sharded", "--to", "hf", "--max_shard_size", "0.0001"])
    run(["convert", last, "meta", "--to", "meta"])
    shutil.copytree(folder / "hf", folder / "bin")
    torch.save(load_file(folder / "bin/model.safetensors"), folder / "bin/pytorch_model.bin")
    (folder / "bin/model.safetensors").unlink()
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    (folder / "hf/chat_template.jinja").write_text(template)
    shutil.copy(folder / "run/config.yaml", folder / "run.yaml")
