"""Write prompts, reward and chat template for the GRPO and PPO runs in docs/post_training.md.

The files go to the current folder: 200 shuffled prompts, 40 of them held out.
"""

import itertools
import json
import random
from pathlib import Path

NAMES = "Lily Tom Ben Anna Sam Mia Max Sue Tim Amy".split()
WORDS = (
    "dog cat ball tree car bird fish hat box cake bear star boat frog duck book bed cup sun rock"
).split()

rows = [
    {"prompt": f"Once upon a time, {name} saw a {word}.", "word": word}
    for name, word in itertools.product(NAMES, WORDS)
]
random.Random(0).shuffle(rows)
for file, part in (("train", rows[:160]), ("heldout", rows[160:])):
    Path(f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
Path("plain.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
Path("story.py").write_text(
    "def has_word(prompt, completion, row):\n    return float(row['word'] in completion)\n"
)
