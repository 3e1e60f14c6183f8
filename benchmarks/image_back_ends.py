"""Pixel values and time of the two back ends of transformers' image processors, Pillow and
torchvision.

Each class with its default settings reads each image by itself, on the CPU: photographs that
scikit-learn ships, and generated images. Differences are in steps of 8-bit pixels, before
normalization: without it, the values of a class are 0 to 1, times 255. Times are processor times of
one thread with the default settings, in turns. Without torchvision, this says so and exits with 0.
"""

import argparse
import importlib
import platform
import statistics
import time
from importlib.metadata import version
from typing import Any

CLASSES = {
    "SmolVLM": "SmolVLM",
    "Idefics3": "Idefics3",
    "Qwen2VL": "Qwen2-VL to Qwen3.5",
    "Glm4v": "GLM-4V",
    "Gemma3": "Gemma 3",
    "Gemma4": "Gemma 4",
    "Llava": "LLaVA",
    "LlavaNext": "LLaVA-NeXT",
    "LlavaOnevision": "LLaVA-OneVision",
    "CLIP": "CLIP",
    "Siglip": "PaliGemma",
    "GotOcr2": "InternVL",
    "Pixtral": "Mistral 3",
}
"""Beginning of the classes' names → models that use them."""

SIZES = ((100, 75), (640, 480), (333, 1000), (1600, 1200))
TOY_SIZES = SIZES[:1]

Images = dict[str, Any]
Numbers = dict[str, Any]


def missing() -> str:
    """Return why the back ends cannot be compared here; empty if they can."""
    for name in ("PIL", "transformers", "torchvision"):
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # the latter if built for another torch
            return f"{name} cannot be imported, so nothing is measured: {error}"
    return ""


def photographs() -> Images:
    """Return the photographs that scikit-learn ships, if it is installed."""
    from PIL import Image

    try:
        from sklearn.datasets import load_sample_images
    except ImportError:
        return {}
    found = load_sample_images()
    names = [str(name).rpartition("/")[2] for name in found.filenames]
    pixels = [Image.fromarray(values) for values in found.images]
    return dict(zip(names, pixels, strict=True))


def generated(sizes: tuple[tuple[int, int], ...]) -> Images:
    """Return smooth colors, sharp edges, and noise, of each size."""
    import numpy as np
    from PIL import Image

    images = {}
    for width, height in sizes:
        x, y = np.meshgrid(np.arange(width), np.arange(height))
        smooth = np.stack([x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)], -1)
        edges = np.repeat(255 * ((x // 7 + y // 5) % 2)[..., None], 3, -1)
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3))
        for name, values in (("smooth", smooth), ("edges", edges), ("noise", noise)):
            image = Image.fromarray(values.astype(np.uint8))
            images[f"{name} {width}x{height}"] = image
    return images


def processors(prefix: str) -> dict[str, Any]:
    """Return the class's processor of each back end, with default settings."""
    import transformers

    names = {"torchvision": f"{prefix}ImageProcessor", "pillow": f"{prefix}ImageProcessorPil"}
    return {back_end: getattr(transformers, name)() for back_end, name in names.items()}


def unequal_results(outputs: dict[str, Any]) -> list[str]:
    """Return what differs between the back ends besides the values of pixels: shapes, grids, sizes
    and masks, which decide the number of tokens."""
    import numpy as np

    ours, theirs = outputs["pillow"], outputs["torchvision"]
    found = [f"only one returns {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = np.asarray(ours[name]), np.asarray(theirs[name])
        if one.shape != other.shape:
            found.append(f"{name} {list(one.shape)} and {list(other.shape)}")
        elif name != "pixel_values" and not np.array_equal(one, other):
            found.append(f"{name} {one.ravel()[:4]} and {other.ravel()[:4]}")
    return found


def differences(processors: dict[str, Any], images: Images) -> Numbers:
    """Return the largest and the mean difference of pixels, and the part of them that differs by
    more than one step, over images; and what else is unequal."""
    import numpy as np

    largest, total, above, count = 0.0, 0.0, 0, 0
    unequal = {}
    for name, image in images.items():
        outputs = {
            back_end: processor(image, do_normalize=False, return_tensors="pt")
            for back_end, processor in processors.items()
        }
        if found := unequal_results(outputs):
            unequal[name] = "; ".join(found)
            continue
        one, other = (np.asarray(outputs[each]["pixel_values"]) * 255.0 for each in outputs)
        steps = np.abs(one - other)
        largest = max(largest, float(steps.max()))
        total += float(steps.sum(dtype=np.float64))
        above += int((steps > 1.01).sum())
        count += steps.size
    numbers: Numbers = {"unequal": unequal}
    if count:
        numbers |= {"largest": largest, "mean": total / count, "above_one": above / count}
    return numbers


def time_ratio(processors: dict[str, Any], images: Images, rounds: int) -> float:
    """Return the processor time of Pillow relative to torchvision's, the median of rounds in
    turns."""
    ratios = []
    for _ in range(rounds + 1):
        seconds = {}
        for back_end, processor in processors.items():
            started = time.process_time()
            for image in images.values():
                processor(image, return_tensors="pt")
            seconds[back_end] = time.process_time() - started
        ratios.append(seconds["pillow"] / seconds["torchvision"])
    return statistics.median(ratios[1:])  # the first round warms up


def measure(toy: bool = False, rounds: int = 3) -> Numbers:
    """Return the numbers of each class, or a note where the back ends cannot be compared."""
    if note := missing():
        return {"note": note}
    import torch
    from transformers import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)  # as in a process that loads data
    kinds = {"photographs": photographs(), "generated": generated(TOY_SIZES if toy else SIZES)}
    if toy:
        kinds["photographs"] = {}
    results: Numbers = {}
    for prefix in CLASSES:
        pair = processors(prefix)
        numbers = {kind: differences(pair, images) for kind, images in kinds.items() if images}
        timed = kinds["photographs"] or kinds["generated"]
        results[prefix] = {**numbers, "time_ratio": time_ratio(pair, timed, 1 if toy else rounds)}
    return results


def versions() -> str:
    names = ("torch", "torchvision", "transformers", "pillow", "numpy")
    known = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{known}; {platform.machine()}, Python {platform.python_version()}"


def table(results: Numbers) -> list[str]:
    """Return the lines of a table in Markdown, and below it what was unequal."""
    kinds = [kind for kind in ("photographs", "generated") if kind in next(iter(results.values()))]
    columns = [f"{kind}: {name}" for kind in kinds for name in ("largest", "mean", "above 1")]
    last = "shapes, grids and masks | time, Pillow / torchvision"
    lines = [
        f"| class | models | {' | '.join(columns)} | {last} |",
        f"|---|---|{'---:|' * len(columns)}---|---:|",
    ]
    remarks = []
    for prefix, numbers in results.items():
        cells = []
        for kind in kinds:
            found = numbers[kind]
            if "largest" in found:
                part = f"{found['above_one']:.2%}"
                cells += [f"{found['largest']:.1f}", f"{found['mean']:.3f}", part]
            else:
                cells += ["-", "-", "-"]
            remarks += [f"{prefix}, {name}: {text}" for name, text in found["unequal"].items()]
        n_unequal = sum(len(numbers[kind]["unequal"]) for kind in kinds)
        equal = f"{n_unequal} images differ" if n_unequal else "equal"
        ratio = f"{numbers['time_ratio']:.2f}"
        lines.append(f"| {prefix} | {CLASSES[prefix]} | {' | '.join(cells)} | {equal} | {ratio} |")
    return [*lines, *remarks]


def run() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of time")
    parser.add_argument("--toy", action="store_true", help="small images, one round")
    options = parser.parse_args()
    if note := missing():
        print(note)
        return
    print(versions())
    print("\n".join(table(measure(toy=options.toy, rounds=options.rounds))))


if __name__ == "__main__":
    run()
