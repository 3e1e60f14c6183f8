"""Write the figure, the sample and the table of docs/index.md, of the dump folder of the run there:
`python docs/figures/first_page.py FOLDER`. The table is the first one of docs/performance.md."""

import re
import sys
from pathlib import Path

from run_curves import HERE, draw, points

PAGE = HERE.parent / "index.md"
LINES = (("loss", "training"), ("validation_loss", "validation"))
PROMPT = "Once upon a time"


def sample(folder: Path) -> str:
    """Return a story by the model of the run's last step, with the most probable tokens."""
    from torchtitan.components.generation import Sampling, generate
    from torchtitan.components.tokenizer import PretrainedTokenizer
    from torchtitan.models.pretrained import load_model

    (checkpoint,) = folder.glob("checkpoint/step-*")
    loaded = load_model(checkpoint, device="cpu")
    tokenizer = PretrainedTokenizer.Config().build(path=str(loaded.tokenizer_path))
    prompt = tokenizer.encode(PROMPT, add_bos=True)
    sampling = Sampling(temperature=0.0)
    (answer,) = generate(loaded.model, [prompt], max_new_tokens=60, sampling=sampling)
    return PROMPT + tokenizer.decode(answer.ids, skip_special_tokens=True)


def table() -> str:
    """Return the first table of docs/performance.md."""
    page = HERE.parent / "performance.md"
    found = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)
    first: str = found[0]
    return first.replace("](#", f"]({page.name}#")


def with_part(text: str, name: str, content: str) -> str:
    """Return a page's text with new content between two comments."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{content}{end}{rest.partition(end)[2]}"


def main(folder: Path) -> None:
    curves = [(label, points(folder, metric)) for metric, label in LINES]
    (HERE / "first_run.svg").write_text(draw([("loss, nats per token", curves)]))
    page = with_part(PAGE.read_text(), "sample", f"```text\n{sample(folder).strip()}\n```\n")
    PAGE.write_text(with_part(page, "speed", table()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
