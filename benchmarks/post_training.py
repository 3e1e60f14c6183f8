"""Speed and memory of post-training compared with TRL, in one run on the processor of a Linux
machine.

    python benchmarks/post_training.py --pairs dpo_en_demo.json --tokenizer FOLDER [--precisions
    float32] [--rounds 3]
        [--systems torchtitan trl trl-checkpointing] [--pythons PYTHON ...]

All train a Llama (dim 512, 8 layers, 8 heads, 4 key/value heads, ffn 1,536, GPT-2's vocabulary)
from random weights, with fused AdamW and clipped gradients.

- DPO: direct preference optimization on `--pairs` (ShareGPT turns, as in LlamaFactory's
  dpo_en_demo.json) of up to 1,024 tokens, with a second model as the reference. TRL trains as the
  page of its DPOTrainer shows: a folder as the model, and batches of 4 pairs padded to the longest;
  `trl-checkpointing` with its default gradient checkpointing, and `trl` without, which is faster
  and needs more memory. torchtitan packs pairs, 2 windows of 2,048 positions at a time
- GRPO: 4 prompts of the same rows per step, of at most 400 characters, with 8 answers of 128 tokens
  each. TRL samples with transformers, without vLLM, as the page of its GRPOTrainer shows, and
  trains on all 32 answers at once; the reward is the length of the text. Tokens are the sampled
  ones, and labels the answers: labels/s are samples/s

Processes, rounds, numbers and results are as in benchmarks/peers.py: tokens/s of DPO count the
tokens of all answers with their prompts, without padding. MFU excludes the work of the reference.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from peers import Job, parser_of, run
from systems.report import OURS

JOBS = {
    "DPO": Job(
        kind="dpo",
        vocab_size=50_257,
        seq_len=1024,
        systems=(OURS, "trl", "trl-checkpointing"),
    ),
    "GRPO": Job(
        kind="grpo", vocab_size=50_257, seq_len=512, systems=(OURS, "trl", "trl-checkpointing")
    ),
}
MOST_CHARACTERS = 400
"""Of a prompt of GRPO, which thus has room for an answer."""


def text_rows(pairs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the prompts and answers of ShareGPT rows as texts, with earlier turns as lines of the
    prompt."""
    return [
        {
            "prompt": "\n".join(turn["value"] for turn in row["conversations"]),
            **{side: row[side]["value"] for side in ("chosen", "rejected")},
        }
        for row in pairs
    ]


def main() -> None:
    parser = parser_of(JOBS, list(JOBS), __doc__)
    parser.add_argument("--pairs", type=Path, required=True, help="JSON list of ShareGPT rows")
    options = parser.parse_args()
    if not options.tokenizer:
        parser.error("--tokenizer is not set; name a folder with GPT-2's tokenizer.json")
    with tempfile.TemporaryDirectory() as folder:
        options.data = f"{folder}/pairs.jsonl"
        rows = text_rows(json.loads(options.pairs.read_text()))
        Path(options.data).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        options.grpo_data = f"{folder}/prompts.jsonl"
        prompts = [
            {"prompt": row["prompt"]} for row in rows if len(row["prompt"]) <= MOST_CHARACTERS
        ]
        Path(options.grpo_data).write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
        run(JOBS, options)


if __name__ == "__main__":
    main()
