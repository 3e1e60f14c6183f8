"""Models in lm-eval, compared with its transformers models; needs lm-eval, but no network."""

import json
import types
from pathlib import Path

import pytest

from tests.lm_eval_tasks import share_task_files
from torchtitan.cli.evaluate import evaluate
from torchtitan.components.evaluation import Scorer

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'torchtitan[eval]')")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: {kind}
doc_to_text: "{{{{query}}}}"
"""
CHOICE = """
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["."], max_gen_toks: 20}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def ours(stories_model, stories_tokenizer):
    from torchtitan.components.evaluation.lm_eval_adapter import TorchtitanLM

    return TorchtitanLM(Scorer(stories_model, batch_size=3), stories_tokenizer, {2})


@pytest.fixture(scope="module")
def theirs(stories):
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(stories),
        tokenizer=transformers.AutoTokenizer.from_pretrained(stories),
        add_bos_token=True,
        device="cpu",
        max_length=512,
    )


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def requests(*args):
    return [types.SimpleNamespace(args=arg) for arg in args]


STORY = "Once upon a time, there was a little girl named Lily. "


def test_log_likelihoods_equal_transformers(ours, theirs):
    pairs = requests(
        ("Once upon a", " time"),
        ("Once upon a ", "time"),
        ("", "Once upon"),
        ("The cat", " sat."),
        (STORY * 60, "She"),
    )
    for result, expected in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        # Float32 rounding.
        assert (
            result[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-4) and result[1] == expected[1]
        )


def test_rolling_log_likelihoods_equal_transformers(ours, theirs):
    texts = requests(("Once upon a time",), (STORY * 40,))
    for result, text in zip(ours.loglikelihood_rolling(texts), texts, strict=True):
        # With add_bos_token, lm-eval would predict a second BOS.
        theirs.add_bos_token = False
        [expected] = theirs.loglikelihood_rolling([text])
        theirs.add_bos_token = True
        assert result == pytest.approx(expected, rel=1e-4)


def test_generated_texts_equal_transformers(ours, theirs):
    options = {"until": [".", "!"], "max_gen_toks": 40, "do_sample": False}
    contexts = requests(
        ("Once upon a time", options),
        ("The cat", options),
        (STORY * 60, options),
        ("Lily", {"until": "\n", "max_gen_toks": 5}),
    )
    # lm-eval decodes only the new tokens, and this tokenizer then drops the leading space.
    expected = theirs.generate_until(contexts)
    assert [text.removeprefix(" ") for text in ours.generate_until(contexts)] == expected


@pytest.mark.slow
def test_files_that_tests_share_are_those_of_lm_eval():
    from lm_eval.tasks import _index, _yaml_loader

    share_task_files()
    assert _index.load_yaml is not _yaml_loader.load_yaml
    paths = sorted(Path(_index.__file__).parent.glob("**/*.yaml"))[::500]
    assert len(paths) > 20
    for path in paths:
        expected = _yaml_loader.load_yaml(path, resolve_func=False)
        found = _index.load_yaml(path, resolve_func=False, recursive=True)
        assert found == expected
        found.clear()  # nobody else has this one
        assert _index.load_yaml(path, resolve_func=False, recursive=True) == expected


@pytest.mark.slow
def test_a_local_task_equals_the_built_in_evaluation(stories, assets, tmp_path, capsys):
    share_task_files()
    file = tmp_path / "questions.jsonl"
    lines = (assets / "eval" / "openbook_qa.jsonl").read_text().splitlines()[:20]
    file.write_text("\n".join(lines))
    head = TASK.format(name="local_choice", file=file, kind="multiple_choice")
    (tmp_path / "choice.yaml").write_text(head + CHOICE)
    (tmp_path / "generate.yaml").write_text(
        TASK.format(name="local_text", file=file, kind="generate_until") + GENERATE
    )
    args = [
        "--checkpoint",
        stories,
        "--device",
        "cpu",
        "--include_path",
        tmp_path,
        "--tasks",
        "local_choice",
        "local_text",
    ]
    assert evaluate([str(arg) for arg in [*args, file]]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["local_choice"]["acc,none"] == results[str(file)]["accuracy"]
    assert results["local_choice"]["acc_norm,none"] == results[str(file)]["accuracy_norm"]
    assert results["local_choice"]["acc_stderr,none"] == pytest.approx(
        results[str(file)]["accuracy_stderr"]
    )
    assert "exact_match,none" in results["local_text"]
