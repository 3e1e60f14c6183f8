"""Data, score and figure of the example in docs/diffusion.md (needs scikit-learn, which brings the
images):

    python docs/figures/generated_digits.py prepare FOLDER
    python docs/figures/generated_digits.py score MODEL [inverted]
    python docs/figures/generated_digits.py draw RUN STEP STEP ...

`prepare` writes the 1,797 handwritten digits as a folder of images for each class, and 200 of them
in another style, dark on light, for adapters. `score` generates 100 images of each class with a
model in diffusers' format, and counts those that a classifier, trained on real digits, recognizes.
`draw` shows the images that a run has generated at some of its steps.
"""

import base64
import sys
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC

from torchtitan.components.diffusion.sampler import euler, guided, times_of
from torchtitan.models.pretrained import load_model

PER_CLASS = 100
STEPS = 50
GUIDANCE = 2.0
WIDTH = 150


def prepare(folder: Path) -> None:
    """Write the digits, and some of them inverted."""
    digits = load_digits()
    for number, (values, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        pixels = (values / 16 * 255).round().astype("uint8")
        styles = {"digits": pixels} | ({"inverted": 255 - pixels} if number < 200 else {})
        for style, image in styles.items():
            path = folder / style / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


def score(checkpoint: str, *, inverted: bool) -> None:
    """Print how many generated digits a classifier recognizes, and its accuracy on real ones."""
    digits = load_digits()
    half = len(digits.data) // 2
    held_out = SVC(gamma=0.001).fit(digits.data[:half], digits.target[:half])
    real = held_out.score(digits.data[half:], digits.target[half:])
    classifier = SVC(gamma=0.001).fit(digits.data, digits.target)
    model = load_model(checkpoint, device="cpu").model
    labels = torch.arange(10).repeat_interleave(PER_CLASS)
    nothing = torch.full_like(labels, 10)
    torch.manual_seed(0)
    velocity = guided(
        lambda x, t: model(x, t, classes=labels),
        lambda x, t: model(x, t, classes=nothing),
        GUIDANCE,
    )
    images = euler(velocity, torch.randn(len(labels), 1, 8, 8), times_of(STEPS)).clamp(-1, 1)
    light = (-images if inverted else images) + 1
    answers = classifier.predict((light * 8).flatten(1).numpy())
    right = answers == labels.numpy()
    print(f"{right.sum()} of {len(labels)} generated digits: {right.mean():.1%}")
    print("by class:", " ".join(f"{of:.0%}" for of in right.reshape(10, -1).mean(axis=1)))
    print(f"real digits, half of them held out: {real:.1%}")
    print(f"mean brightness from 0 to 1: {float((images.mean() + 1) / 2):.2f}")


def draw(run: Path, steps: list[str]) -> str:
    """Return a figure of the grids of images at several steps."""
    files = [run / "samples" / f"step-{step}.png" for step in steps]
    if missing := [str(file) for file in files if not file.is_file()]:
        found = ", ".join(sorted(file.stem for file in run.glob("samples/step-*.png"))) or "none"
        sys.exit(f"{', '.join(missing)} is missing; samples of this run: {found}")
    if not files:
        sys.exit("name the steps after the run's folder, such as: draw RUN 100 2000")
    grids = list(map(Image.open, files))
    height = round(WIDTH * grids[0].height / grids[0].width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {(WIDTH + 12) * len(steps)} '
        f'{height + 24}" font-family="sans-serif" font-size="12">'
    ]
    for number, step in enumerate(steps):
        content = (run / "samples" / f"step-{step}.png").read_bytes()
        data = base64.b64encode(content).decode()
        x = (WIDTH + 12) * number
        parts.append(f'<text x="{x}" y="14" fill="#444">step {step}</text>')
        parts.append(
            f'<image x="{x}" y="22" width="{WIDTH}" height="{height}" '
            f'image-rendering="pixelated" href="data:image/png;base64,{data}"/>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    elif sys.argv[1] == "score":
        score(sys.argv[2], inverted=sys.argv[3:] == ["inverted"])
    else:
        figure = draw(Path(sys.argv[2]), sys.argv[3:])
        (Path(__file__).parent / "generated_digits.svg").write_text(figure)
