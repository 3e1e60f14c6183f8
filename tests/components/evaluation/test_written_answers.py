"""Open questions of `torchtitan eval`: the model's own answers against transformers' greedy ones,
and their scores."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_images import write_rows
from tests.tiny_vision import reference_inputs, text_of, vision_folder
from torchtitan.cli.evaluate import evaluate
from torchtitan.components.evaluation import Question
from torchtitan.components.evaluation.tasks import read_questions
from torchtitan.components.evaluation.written_answers import score_answers
from torchtitan.components.rollout.chat import Reply
from torchtitan.tools.errors import UserError
from torchtitan.trainer.evaluation import Evaluation

N_TOKENS = 6


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("Paris", ["paris."], (1, 1, None)),
        ("Paris .", ["Paris"], (1, 1, None)),
        (" A  heron.\n", ["a heron"], (1, 1, None)),
        ("It is a heron, I think.", ["heron"], (0, 1, None)),
        ("herons", ["heron"], (0, 0, None)),
        ("A stork", ["heron", "stork", "a stork"], (1, 1, None)),
        ("There are 1,200 birds.", ["1200"], (0, 0, 1)),
        ("The answer is 7.", ["7"], (0, 1, 1)),
        ("17", ["7"], (0, 0, 0)),
        ("", ["7"], (0, 0, 0)),
        ("7", ["seven birds", "7"], (1, 1, 1)),
    ],
)
def test_scores_of_answers(answer: str, references: list[str], expected: Any) -> None:
    result = score_answers([Question("?", [], 0, answers=references)], [Reply(answer)])
    assert (result.exact_match, result.contains, result.number) == expected
    assert result.exact_match_stderr is None and result.questions == 1


def test_numbers_of_several_questions() -> None:
    questions = [Question("?", [], 0, answers=[str(number)]) for number in range(4)]
    replies = [Reply("0"), Reply("it is 1"), Reply("3"), Reply("3", is_cut=True)]
    result = score_answers(questions, replies)
    assert (result.exact_match, result.contains, result.number) == (0.5, 0.75, 0.75)
    assert result.exact_match_stderr == pytest.approx((0.25 / 3) ** 0.5)
    assert result.cut == 1
    mixed = [*questions, Question("?", [], 0, answers=["red"])]
    assert score_answers(mixed, [*replies, Reply("red")]).number is None


def answers_of_transformers(model_type: str, folder: Path, asked: list[Any]) -> list[str]:
    """Return the greedy answers of the class alone, to one message at a time."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for content, images in asked:
        messages = [{"role": "user", "content": content}]
        options = {"add_generation_prompt": True}
        if images:
            inputs = reference_inputs(model_type, folder, [messages], [images], **options)
        else:
            inputs = tokenizer(text_of(folder, messages, **options), return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=N_TOKENS, do_sample=False)
        new = ids[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("model_type", ["smolvlm", pytest.param("llava", marks=pytest.mark.slow)])
def test_answers_equal_transformers(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no, one and two images. The second reference is wrong, so two of three are right."""
    folder = vision_folder(model_type, tmp_path / "model")
    _, _, images = write_rows(tmp_path / "data")
    place, text = {"type": "image"}, {"type": "text", "text": "What is it?"}
    asked = [
        ([place, text], images[0]),
        ([text], []),
        ([place, place, text], images[1]),
    ]
    texts = answers_of_transformers(model_type, folder, asked)
    assert len(set(texts)) > 1 and all(map(str.strip, texts))
    columns: list[dict[str, Any]] = [{"image": "0-0.png"}, {}, {"images": ["1-0.png", "1-1.png"]}]
    rows = [
        {"query": "What is it?", "answer": answer} | column
        for answer, column in zip((texts[0], f"not {texts[1]}", texts[2]), columns, strict=True)
    ]
    path = tmp_path / "data/questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--checkpoint", str(folder), "--tasks", str(path), "--device", "cpu"]
    words += ["--max_new_tokens", str(N_TOKENS)]
    for batch_size in ("1", "3"):
        assert evaluate([*words, "--batch_size", batch_size]) == 0
        [result] = json.loads(capsys.readouterr().out)["results"].values()
        assert result["exact_match"] == pytest.approx(2 / 3)
        assert result["questions"] == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"query": "a", "answer": []}], "line 1: answer is an empty list"),
        ([{"query": "a", "answer": " "}], "line 1: query must be text, and answer a nonempty"),
        ([{"query": "a", "answer": [None]}], "line 1: query must be text"),
        ([{"query": "a", "answer": float("nan")}], "a nonempty text, a finite number"),
        (
            [{"query": "a", "answer": 1}, {"query": "b", "choices": ["x"], "gold": 0}],
            "line 2 and the first question differ in kind",
        ),
    ],
)
def test_bad_questions_are_named(lines: list[Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        read_questions(path)


def test_training_refuses_open_questions(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"query": "a", "answer": 1}\n')
    with pytest.raises(UserError, match="line 1 has no choices, and only `torchtitan eval`"):
        Evaluation.Config(files=[str(path)]).validate()


def test_a_question_without_room_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_folder("smolvlm", tmp_path / "model")
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"query": "What?", "answer": "x"}) + "\n")
    words = ["--checkpoint", str(folder), "--tasks", str(path), "--device", "cpu"]
    assert evaluate([*words, "--max_new_tokens", "4090"]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert re.search(
        "line 1: the question has .* tokens, and --max_new_tokens 4090 leaves 6", errors
    )


def test_a_model_without_a_chat_template_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_folder("smolvlm", tmp_path / "model")
    for file in folder.glob("*chat_template*"):
        file.unlink()
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"query": "What?", "answer": "x"}) + "\n")
    words = ["--checkpoint", str(folder), "--tasks", str(path), "--device", "cpu"]
    words += ["--max_new_tokens", "2"]
    assert evaluate(words) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "there is no chat template in" in errors and "set --chat_template to" in errors
    assert evaluate([*words, "--chat_template", "alpaca"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"].values()
    assert result["questions"] == 1
