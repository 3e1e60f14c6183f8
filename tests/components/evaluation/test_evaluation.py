"""Evaluation, compared with logits of transformers."""

import contextlib
import importlib.util
import json
import math
import statistics

import pytest
import torch

from tests.conftest import file_size_limit
from tests.lm_eval_tasks import share_task_files
from torchtitan.cli.evaluate import _report, evaluate
from torchtitan.components.evaluation import (
    Question,
    Request,
    Score,
    Scorer,
    multiple_choice,
    read_questions,
    text_perplexity,
)
from torchtitan.components.evaluation.tasks import encode_pairs, windows
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError

BOS, CONTEXT = 1, 512


@pytest.fixture(scope="module")
def reference(stories):
    """A function from ids to the log-probabilities of each next token (L - 1, V), by
    transformers."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(ids):
        return theirs(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    return logprobs


# Scores.


def random_request(generator, context, continuation):
    ids = torch.randint(3, 512, (context + continuation,), generator=generator).tolist()
    return Request([BOS, *ids[: context - 1]], ids[context - 1 : context - 1 + continuation])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_equal_transformers(stories_model, reference, stories_tokenizer, batch_size):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1), (1, 20), (30, 2), (7, 7), (100, 40), (512, 1), (473, 40)]
    requests = [random_request(generator, *size) for size in sizes]
    # A greedy continuation of this model.
    requests.append(
        Request(
            [BOS],
            stories_tokenizer.encode("Once upon a time, there was a little girl", add_bos=False),
        )
    )
    scorer = Scorer(stories_model, batch_size=batch_size)
    amounts = []
    scorer.progress = lambda total: contextlib.nullcontext(amounts.append)
    scores = scorer.score(requests)
    for request, score in zip(requests, scores, strict=True):
        logprobs = reference(request.context + request.continuation)[len(request.context) - 1 :]
        expected = logprobs[range(len(request.continuation)), request.continuation].sum().item()
        # Each of up to 40 float32 terms of order 10 is rounded.
        assert score.logprob == pytest.approx(expected, rel=1e-5, abs=1e-4)
        assert score.is_greedy is (logprobs.argmax(-1).tolist() == request.continuation)
        assert not score.truncated
    assert scores[-1].is_greedy and not scores[0].is_greedy
    assert sum(amounts) == len(requests) and len(amounts) == math.ceil(len(requests) / batch_size)


def test_a_long_context_is_truncated_at_the_start(stories_model, reference):
    request = random_request(torch.Generator().manual_seed(1), 600, 5)
    [score] = Scorer(stories_model).score([request])
    ids = (request.context + request.continuation)[-CONTEXT - 1 :]
    expected = reference(ids)[-5:][range(5), request.continuation].sum().item()
    assert score.truncated and score.logprob == pytest.approx(expected, rel=1e-5, abs=1e-4)
    with pytest.raises(UserError, match="513"):
        Scorer(stories_model).score([Request([BOS], [5] * 513)])


def test_a_model_that_returns_nan_is_rejected(stories):
    broken = load_model(stories, device="cpu").model
    broken.head.norm.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        Scorer(broken).score([Request([BOS], [0])])


def test_scoring_restores_the_training_mode(stories_model):
    stories_model.train()
    Scorer(stories_model).score([Request([BOS], [5])])
    assert stories_model.training
    stories_model.eval()
    with pytest.raises(UserError, match="batch_size is 0"):
        Scorer(stories_model, batch_size=0)


# Multiple choice.


def test_tokens_of_context_and_continuation(assets, stories_tokenizer):
    gpt2 = PretrainedTokenizer.Config().build(path=assets / "gpt2-tokenizer")
    whole = gpt2.encode("The cat sat")
    [plain] = encode_pairs(gpt2, [("The cat", " sat")])
    assert (plain.context, plain.continuation) == (whole[:2], whole[2:])
    # A space at the end of the context belongs to the next word.
    assert encode_pairs(gpt2, [("The cat ", "sat")]) == [plain]
    # GPT-2 has no BOS; its EOS separates documents.
    assert encode_pairs(gpt2, [("", "The cat")]) == [Request([gpt2.eos_id], whole[:2])]
    [story] = encode_pairs(stories_tokenizer, [("Once", " upon")])
    assert [*story.context, *story.continuation] == stories_tokenizer.encode(
        "Once upon"
    ) and story.context[0] == BOS
    assert encode_pairs(stories_tokenizer, [("", "Once")]) == [
        Request([BOS], stories_tokenizer.encode("Once", add_bos=False))
    ]
    with pytest.raises(UserError, match="adds no token"):
        encode_pairs(gpt2, [("The", "")])


class FixedScores:
    """A scorer with fixed results."""

    def __init__(self, logprobs):
        self.logprobs = logprobs

    def score(self, requests):
        assert len(requests) == len(self.logprobs)
        return [
            Score(logprob, is_greedy=False, truncated=logprob < -90) for logprob in self.logprobs
        ]


def test_accuracies_and_standard_errors(stories_tokenizer):
    questions = [
        Question("Q", ["a", "bb"], 0),  # by sum the first, per byte the second
        Question("Q", ["éé", "bbb"], 1),  # by sum a tie, so the first; per byte the first
        Question("Q", ["a", "b", "c"], 2),
        Question("Q", ["a", "b"], 1),
    ]
    result = multiple_choice(
        FixedScores([-2, -3, -6, -6, -3, -2, -1, -99, -1]), stories_tokenizer, questions
    )
    hits, norm_hits = [1, 0, 1, 1], [0, 0, 1, 1]
    assert (result.accuracy, result.accuracy_norm) == (0.75, 0.5)
    assert result.accuracy_stderr == pytest.approx(statistics.stdev(hits) / 2)
    assert result.accuracy_norm_stderr == pytest.approx(statistics.stdev(norm_hits) / 2)
    assert (result.questions, result.truncated) == (4, 1)
    assert (
        multiple_choice(FixedScores([-1, -2]), stories_tokenizer, questions[:1]).accuracy_stderr
        is None
    )


def test_query_and_choice_are_separated_by_one_space(stories_tokenizer):
    seen = []

    class Spy(FixedScores):
        def score(self, requests):
            seen.extend(
                stories_tokenizer.decode(request.context[1:] + request.continuation)
                for request in requests
            )
            return super().score(requests)

    questions = [
        Question("Eat", ["figs", " nuts"], 0),
        Question("Eat\n", ["figs"], 0),
        Question("", ["figs"], 0),
    ]
    multiple_choice(Spy([-1] * 4), stories_tokenizer, questions)
    assert seen == ["Eat figs", "Eat nuts", "Eat\nfigs", "figs"]


@pytest.mark.parametrize("name", ["arc_easy", "openbook_qa", "piqa"])
def test_real_questions(stories_model, stories_tokenizer, reference, assets, name):
    """A loop over choices with logits of transformers gives the same accuracy."""
    questions = read_questions(assets / "eval" / f"{name}.jsonl", limit=8)
    result = multiple_choice(Scorer(stories_model, batch_size=3), stories_tokenizer, questions)
    hits = []
    for question in questions:
        separator = "" if question.query.endswith("\n") else " "
        scores = []
        for choice in question.choices:
            ids = stories_tokenizer.encode(question.query + separator + choice)
            n_context = len(stories_tokenizer.encode(question.query.rstrip()))
            logprobs = reference(ids)[n_context - 1 :]
            scores.append(logprobs[range(len(ids) - n_context), ids[n_context:]].sum().item())
        hits.append(scores.index(max(scores)) == question.gold)
    assert result.accuracy == sum(hits) / 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ("null", "line 2"),
        ("[" * 100_000, "line 2 is not JSON: nested too deeply"),
        (
            '{"query": "a", "choices": ["b"], "gold": ' + "9" * 5000 + "}",
            "line 2 is not JSON: Exceeds the limit",
        ),
        (
            r'{"query": "a", "choices": ["\ud800"], "gold": 0}',
            r"line 2 is not JSON: lone surrogate '\\ud800'",
        ),
        ('{"query": "a", "choices": ["b"]}', "line 2"),
        ('{"query": "a", "choices": [], "gold": 0}', "choices a list of nonempty texts"),
        ('{"query": "a", "choices": ["b", " "], "gold": 0}', "choices a list of nonempty texts"),
        ('{"query": "a", "choices": ["b"], "gold": true}', "gold a number"),
        ('{"query": "a", "choices": ["b"], "gold": 1}', "gold is 1"),
    ],
)
def test_invalid_lines_are_named(tmp_path, line, message):
    file = tmp_path / "questions.jsonl"
    good = '{"query": "a\u2028b", "choices": ["b"], "gold": 0}\n'
    file.write_text(good + line)
    with pytest.raises(UserError, match=message):
        read_questions(file)
    assert read_questions(file, limit=1) == [Question("a\u2028b", ["b"], 0)]
    file.write_text("\ufeff" + good)
    assert read_questions(file) == [Question("a\u2028b", ["b"], 0)]
    file.write_text("\n")
    with pytest.raises(UserError, match="no questions"):
        read_questions(file)


# Perplexity.


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [2, 5, 6, 9, 10, 23])
def test_windows_score_each_token_once_with_half_a_context(size, length):
    ids = list(range(length))
    scored = 0
    for request in windows(ids, size):
        both = request.context + request.continuation
        assert both == list(range(both[0], both[-1] + 1)) and len(both) <= size + 1
        assert request.continuation[0] == scored + 1
        assert len(request.context) >= min(request.continuation[0], size // 2)
        scored = request.continuation[-1]
    assert scored == length - 1


@pytest.mark.parametrize("characters", [300, 5000])
def test_perplexity_equals_transformers(
    stories_model, stories_tokenizer, reference, assets, characters
):
    text = (assets / "text" / "tinyshakespeare.txt").read_text()[:characters] + "é"
    result = text_perplexity(Scorer(stories_model), stories_tokenizer, text)
    ids = [BOS, *stories_tokenizer.encode(text, add_bos=False)]
    nats = (
        -reference(ids[: CONTEXT + 1])[range(min(CONTEXT, len(ids) - 1)), ids[1 : CONTEXT + 1]]
        .sum()
        .item()
    )
    for begin in range(CONTEXT + 1, len(ids), CONTEXT // 2):
        end = min(begin + CONTEXT // 2, len(ids))
        logprobs = reference(ids[end - 1 - CONTEXT : end])[begin - end :]
        nats -= logprobs[range(end - begin), ids[begin:end]].sum().item()
    assert (len(ids) > CONTEXT) is (characters > 1000)
    # Float32 rounding of each term.
    assert result.loss == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / (characters + 2), rel=1e-5)
    assert (result.tokens, result.bytes) == (len(ids) - 1, characters + 2)


def test_an_empty_text_is_rejected(stories_model, stories_tokenizer):
    with pytest.raises(UserError, match="empty"):
        text_perplexity(Scorer(stories_model), stories_tokenizer, "")


# The command.


def run(capsys, *args):
    code = evaluate([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_eval_prints_json_and_a_table(
    stories_model, stories_tokenizer, stories, assets, capsys, tmp_path
):
    questions, text = assets / "eval" / "piqa.jsonl", tmp_path / "text.md"
    text.write_text("Once upon a time")
    args = [
        "--checkpoint",
        stories,
        "--device",
        "cpu",
        "--tasks",
        questions,
        text,
        "--limit",
        10,
        "--batch_size",
        4,
    ]
    code, out, err = run(capsys, *args)
    results = json.loads(out)["results"]
    expected = multiple_choice(
        Scorer(stories_model), stories_tokenizer, read_questions(questions, 10)
    )
    assert code == 0 and results[str(questions)]["accuracy"] == expected.accuracy
    assert results[str(text)]["tokens"] == len(
        stories_tokenizer.encode("Once upon a time", add_bos=False)
    )
    assert "accuracy" in err and "bits_per_byte" in err
    code, out, _ = run(capsys, *args, "--output", tmp_path / "results.json")
    assert code == 0 and out == ""
    assert json.loads((tmp_path / "results.json").read_text())["results"] == results


def test_the_window_of_a_text_is_chosen(
    stories_model, stories_tokenizer, stories, capsys, tmp_path
):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a boy. He had a red ball and a small dog. " * 4)
    args = ["--checkpoint", stories, "--device", "cpu", "--tasks", text, "--seq_len"]
    code, out, _ = run(capsys, *args, 16)
    expected, whole = (
        text_perplexity(Scorer(stories_model, max_seq_len=n), stories_tokenizer, text.read_text())
        for n in (16, None)
    )
    assert code == 0 and json.loads(out)["results"][str(text)]["loss"] == expected.loss
    assert expected.tokens == whole.tokens and expected.loss > whole.loss
    for wrong in (0, CONTEXT + 1):
        code, _, err = run(capsys, *args, wrong)
        assert code == 2 and f"--seq_len is {wrong}, but must be from 1 to" in err


def test_task_names_are_not_markup(stories, capsys, tmp_path):
    file = tmp_path / "[" / "b] :smile: [red].txt"
    file.parent.mkdir()
    file.write_text("Once upon a time")
    code, out, err = run(capsys, "--checkpoint", stories, "--device", "cpu", "--tasks", file)
    assert code == 0 and set(json.loads(out)["results"]) == {str(file)}
    assert "[red].txt" in "".join(err.split()) and ":smile:" in err


@pytest.mark.parametrize("width", [80, 40])
def test_the_table_is_complete_in_a_narrow_terminal(width, capsys, monkeypatch, tmp_path):
    """Each task is named once, and long cells are wrapped."""
    monkeypatch.setenv("COLUMNS", str(width))
    task = "/data/projects/evaluation/a_folder/within_a_folder/questions_about_science_and_history.jsonl"
    metric = "exact_match,flexible-extract_with_a_very_long_filter_name"
    results = {task: {"questions": 396, "accuracy": 0.3125}, "gsm8k": {metric: 0.25}}
    _report({"results": results}, tmp_path / "results.json")
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= width
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in lines
        if line.startswith("│")
    ]
    columns = ["".join(cells_of_column) for cells_of_column in zip(*cells, strict=True)]
    assert columns == [f"{task}gsm8k", f"questionsaccuracy{metric}", "3960.31250.2500"]


def test_results_are_written_before_the_table(stories, capsys, monkeypatch, tmp_path):
    def fail(*args, **options):
        raise RuntimeError

    (tmp_path / "text.txt").write_text("Once upon a time")
    monkeypatch.setattr("rich.table.Table.add_row", fail)
    args = [
        "--device",
        "cpu",
        "--tasks",
        tmp_path / "text.txt",
        "--output",
        tmp_path / "results.json",
    ]
    with pytest.raises(RuntimeError):
        run(capsys, "--checkpoint", stories, *args)
    assert json.loads((tmp_path / "results.json").read_text())["results"]


def test_results_are_printed_if_the_disk_is_full(capsys, tmp_path):
    """The results are printed, and the old file is kept."""
    (tmp_path / "results.json").write_text("before")
    with file_size_limit(10), pytest.raises(UserError, match="File too large.*printed instead"):
        _report({"results": {"task": {"loss": 1.5}}}, tmp_path / "results.json")
    assert json.loads(capsys.readouterr().out) == {"results": {"task": {"loss": 1.5}}}
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("results.json", "before")
    ]


def test_nonfinite_numbers_are_null_in_json(capsys):
    _report({"results": {"task": {"perplexity": math.inf, "list": [math.nan], "loss": 1.5}}}, None)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "results": {"task": {"perplexity": None, "list": [None], "loss": 1.5}}
    }
    assert "inf" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tasks", "missing.jsonl"], "file not found: missing.jsonl"),
        (["--tasks", "README.md", "--limit", "0"], "--limit is 0"),
        (
            ["--tasks", "README.md", "--output", "/nowhere/x"],
            "--output: the folder /nowhere does not exist",
        ),
        (
            ["--tasks", "README.md", "--include_path", "/nowhere"],
            "/nowhere does not exist; name the folder",
        ),
        (
            ["--tasks", "README.md", "--include_path", "README.md"],
            "README.md is not a folder; name the folder",
        ),
        # imports lm-eval
        pytest.param(["--tasks", "no_such_task"], "no_such_task", marks=pytest.mark.slow),
    ],
)
def test_user_errors(stories, capsys, monkeypatch, tmp_path, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("text")
    if "no_such_task" in args:
        share_task_files()
    code, out, err = run(capsys, "--checkpoint", stories, "--device", "cpu", *args)
    assert code == 2 and out == "" and message in err and "Traceback" not in err


def test_a_missing_chat_template_can_be_given(stories, capsys, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"query": "Who?", "answer": "x"}) + "\n")
    words = ["--checkpoint", stories, "--device", "cpu", "--tasks", str(path)]
    code, _, err = run(capsys, *words)
    assert code == 2 and "set --chat_template to a file or one of: chatml" in err
    code, out, _ = run(capsys, *words, "--max_new_tokens", "2", "--chat_template", "alpaca")
    assert code == 0 and json.loads(out)["results"][str(path)]["questions"] == 1


def test_missing_lm_eval(stories, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name)
    )
    code, _, err = run(capsys, "--checkpoint", stories, "--tasks", "hellaswag")
    assert code == 2 and "hellaswag" in err and "pip install 'torchtitan[eval]'" in err
