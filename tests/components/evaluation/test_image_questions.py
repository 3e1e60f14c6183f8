"""Multiple-choice questions about images, against transformers called directly."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_images import write_rows
from tests.tiny_vision import reference_inputs, vision_folder
from torchtitan.cli.evaluate import evaluate
from torchtitan.components.evaluation import read_questions
from torchtitan.components.evaluation.tasks import evaluate_file
from torchtitan.tools.errors import UserError
from torchtitan.trainer.evaluation import Evaluation

CHOICES = ["cats", "a dog", "no"]


def write_questions(folder: Path) -> tuple[Path, list[Any]]:
    """Write questions with one and two images; return the file and the images."""
    _, _, images = write_rows(folder)
    rows = [
        {"query": "What is it?", "choices": CHOICES, "gold": 1, "image": "0-0.png"},
        {
            "query": "<image>A? <image>B?",
            "choices": CHOICES[:2],
            "gold": 0,
            "images": ["1-0.png", "1-1.png"],
        },
    ]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, images[:2]


@pytest.mark.parametrize("model_type", ["smolvlm", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_scores_equal_transformers(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from torchtitan.components.evaluation import image_questions

    folder = vision_folder(model_type, tmp_path / "model")
    path, images = write_questions(tmp_path / "data")
    found: list[Any] = []
    score = image_questions.ImageQuestionScorer.score

    def keep(*args: Any) -> Any:
        found.extend(score(*args))
        return found

    monkeypatch.setattr(image_questions.ImageQuestionScorer, "score", keep)
    assert evaluate(["--checkpoint", str(folder), "--tasks", str(path), "--device", "cpu"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"].values()
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    place = {"type": "image"}
    contents = [
        [place, {"type": "text", "text": "What is it?"}],
        [place, {"type": "text", "text": "A? "}, place, {"type": "text", "text": "B?"}],
    ]
    expected: list[list[float]] = []
    for content, opened, question in zip(contents, images, read_questions(path), strict=True):
        conversation = [{"role": "user", "content": content}]
        inputs = reference_inputs(
            model_type, folder, [conversation], [opened], add_generation_prompt=True
        )
        expected.append([])
        for choice in question.choices:
            ids = torch.tensor([tokenizer(choice, add_special_tokens=False)["input_ids"]])
            whole = {**inputs, "input_ids": torch.cat((inputs["input_ids"], ids), dim=1)}
            for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
                if name in inputs:
                    end = torch.full_like(ids, int(name == "attention_mask"))
                    whole[name] = torch.cat((inputs[name], end), dim=1)
            with torch.no_grad():
                logits = model(**whole).logits[0, -ids.shape[1] - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, ids.T)
            expected[-1].append(float(chosen.sum()))
    flat = sum(expected, [])
    assert [one.logprob for one in found] == pytest.approx(flat, abs=5e-5)
    hits = [
        scores.index(max(scores)) == gold for scores, gold in zip(expected, (1, 0), strict=True)
    ]
    assert result["accuracy"] == sum(hits) / 2
    assert result["questions"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "no.png"}, "line 2: image 1: .*no.png does not exist"),
        ({"query": "<image><image>"}, "line 2: it has 2 places for images"),
        ({"choices": ["very " * 2000]}, "line 2: question and choice have .* is not cut"),
    ],
)
def test_bad_questions_are_named(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_folder("smolvlm", tmp_path / "model")
    path, _ = write_questions(tmp_path / "data")
    row = {"query": "What?", "choices": ["a"], "gold": 0, "image": "0-0.png", **change}
    first = path.read_text().splitlines()[0]
    path.write_text(f"{first}\n{json.dumps(row)}\n")
    assert evaluate(["--checkpoint", str(folder), "--tasks", str(path), "--device", "cpu"]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert re.search(message, errors)


def test_training_refuses_questions_with_images(tmp_path: Path) -> None:
    path, _ = write_questions(tmp_path)
    message = "line 1 has images, which only `torchtitan eval`"
    with pytest.raises(UserError, match=message):
        Evaluation.Config(files=[str(path)]).validate()
    with pytest.raises(UserError, match=message):
        evaluate_file(path, None, None)  # type: ignore[arg-type]
