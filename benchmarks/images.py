"""Speed and memory of training on images, compared with the Trainer of transformers, in one run:

    python benchmarks/images.py [--rounds 3] [--steps 10] [--folder FOLDER]    # needs scikit-learn

Both train the class of a small Qwen3-VL with random weights in float32, all parts of it, on the
same conversations: scikit-learn's handwritten digits, enlarged to between 64 and 256 pixels per
side, with a short question and answer. Both take AdamW, and decode and process images in the
training process. The Trainer takes batches of 16 conversations, padded to the longest; torchtitan
packs conversations into windows of as many tokens as such a batch has without padding, on average.

Each run is a process, and the systems take turns. Images per second are those of all steps but the
first two; memory is the peak resident set of the process. The printed numbers are medians over
rounds.
"""

import argparse
import dataclasses
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

N_ROWS = 480
BATCH = 16
WARM_UP = 2
VOCABULARY = 32_768
SYSTEMS = ("torchtitan", "trainer")


def write_model(folder: Path) -> None:
    """Write a Qwen3-VL with random weights, and its processor."""
    from tests import tiny_vision

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 32}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]}
    vision = {"hidden_size": 192, "intermediate_size": 576, "depth": 4, "num_heads": 6}
    vision |= {"patch_size": 16, "out_hidden_size": 256, "deepstack_visual_indexes": [1]}
    pixels = {"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512}}
    kind = tiny_vision._TYPES["qwen3_vl"]
    tiny_vision._TYPES["qwen3_vl"] = dataclasses.replace(
        kind,
        text=sizes | {"rope_parameters": rope},
        vision={**kind.vision, **vision},
        pixels=kind.pixels | pixels,
    )
    tiny_vision.vision_folder("qwen3_vl", folder)


def write_rows(folder: Path) -> None:
    """Write images and conversations."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits, choose = load_digits(), random.Random(0)
    rows = []
    for number in range(N_ROWS):
        values = (digits.images[number] / 16 * 255).round().astype("uint8")
        size = choose.randrange(64, 257), choose.randrange(64, 257)
        Image.fromarray(values).resize(size).convert("RGB").save(folder / f"{number}.png")
        question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "Which?"}]
        answer = {"role": "assistant", "content": str(digits.target[number])}
        rows.append({"messages": [{"role": "user", "content": question}, answer]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_trainer(folder: Path, steps: int) -> dict[str, float]:
    """Train with transformers, and measure."""
    import torch
    import transformers
    from PIL import Image
    from transformers import AutoModelForImageTextToText, TrainerCallback

    from tests.tiny_vision import reference_inputs

    model_folder = folder / "model"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        conversations = [row["messages"] for row in batch]
        images = []
        for messages in conversations:
            with Image.open(folder / messages[0]["content"][0]["image"]) as image:
                images.append([image.convert("RGB")])
        inputs = reference_inputs("qwen3_vl", model_folder, conversations, images)
        places = torch.arange(inputs["input_ids"].shape[1])
        ends = inputs["attention_mask"].sum(-1, keepdim=True) - 1  # before the last line break
        is_answer = (places >= ends - 2) & (places < ends)
        inputs["labels"] = inputs["input_ids"].where(is_answer, -100)
        return inputs

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32)
    options = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=1e-4,
        use_cpu=True,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, options, train_dataset=rows, data_collator=collate, callbacks=[Clock()]
    )
    trainer.train()
    seconds = times[-1] - times[WARM_UP - 1]
    images = BATCH * (len(times) - WARM_UP)
    return {"images/s": images / seconds, "MiB": peak_mib()}


def run_torchtitan(folder: Path, steps: int, seq_len: int) -> dict[str, float]:
    """Train with torchtitan, and measure."""
    from torchtitan.cli.main import main

    out = folder / "torchtitan"
    words = ["train", "--module", "auto", "--config", "sft_images"]
    options = {
        "hf_assets_path": folder / "model",
        "dataloader.dataset": folder / "rows.jsonl",
        "dataloader.cache_dir": folder / "cache",
        "model.train": "language projector vision",
        "training.steps": steps,
        "training.seq_len": seq_len,
        "training.local_batch_size": 1,
        "training.mixed_precision_param": "float32",
        "checkpoint.export_dtype": None,
        "activation_checkpoint.mode": "none",
        "optimizer.lr": 1e-4,
        "metrics.log_freq": 1,
        "dump_folder": out,
    }
    for name, value in options.items():
        words += [f"--{name}", *str(value).split()]
    words += ["--checkpoint.no_enable", "--checkpoint.no_last_save_in_hf"]
    code = main(words)
    assert not code, code
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps_after = [line for line in lines if line["step"] > WARM_UP]
    images = sum(line["images_per_second"] * line["step_time"] for line in steps_after)
    seconds = sum(line["step_time"] for line in steps_after)
    return {"images/s": images / seconds, "MiB": peak_mib()}


def tokens_of_a_batch(folder: Path) -> int:
    """Return the tokens of `BATCH` conversations on average, without padding."""
    from PIL import Image

    from tests.tiny_vision import reference_inputs

    rows = [json.loads(line)["messages"] for line in (folder / "rows.jsonl").open()][:64]
    images = [[Image.open(folder / row[0]["content"][0]["image"])] for row in rows]
    inputs = reference_inputs("qwen3_vl", folder / "model", rows, images)
    return round(float(inputs["attention_mask"].sum()) / len(rows) * BATCH)


def measure(system: str, folder: Path, steps: int, seq_len: int) -> dict[str, float]:
    """Run a system in a process."""
    words = [sys.executable, __file__, "--system", system, "--folder", str(folder)]
    words += ["--steps", str(steps), "--seq_len", str(seq_len)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{system} failed:\n{result.stdout}\n{result.stderr}")
    numbers: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return numbers


def compare(folder: Path, rounds: int, steps: int) -> None:
    """Measure the systems in turns, and print medians and ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    write_rows(folder)
    seq_len = tokens_of_a_batch(folder)
    found: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for number in range(rounds):
        for system in SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]:
            found[system].append(measure(system, folder, steps, seq_len))
            print(number, system, found[system][-1], flush=True)
    ours, theirs = (
        {name: statistics.median(run[name] for run in found[system]) for name in found[system][0]}
        for system in SYSTEMS
    )
    print(f"windows of {seq_len} tokens; medians of {rounds} rounds")
    for name in ours:
        ratio = ours[name] / theirs[name]
        print(f"{name:16} {ours[name]:8.1f} {theirs[name]:8.1f}  ratio {ratio:.2f}")


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--system", choices=SYSTEMS)
    parser.add_argument("--seq_len", type=int, default=0)
    options = parser.parse_args()
    if options.system == "torchtitan":
        print(json.dumps(run_torchtitan(options.folder, options.steps, options.seq_len)))
    elif options.system == "trainer":
        print(json.dumps(run_trainer(options.folder, options.steps)))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            compare(options.folder or Path(temporary), options.rounds, options.steps)


if __name__ == "__main__":
    run()
