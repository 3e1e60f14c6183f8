"""Evaluation and samples during training: their numbers in any layout, and that training stays the
same bit for bit."""

import json
import types

import pytest

from tests.lm_eval_tasks import share_task_files
from tests.processes import run_processes
from tests.training import ABSENT, TINY, flags, read_metrics, run, tiny_config
from torchtitan.components.evaluation.scoring import Share
from torchtitan.components.evaluation.tasks import centered, mean_centered
from torchtitan.components.generation import generate
from torchtitan.components.rollout.chat import Chat
from torchtitan.config.manager import ConfigManager
from torchtitan.tools.errors import UserError

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: {kind}
"""
CHOICE = """
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """
doc_to_text: "{{query}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
doc_to_text: ""
doc_to_target: "{{query}}"
metric_list: [{metric: bits_per_byte}]
"""
TASKS = {
    "local_choice": ("multiple_choice", CHOICE),
    "local_text": ("generate_until", GENERATE),
    "local_rolling": ("loglikelihood_rolling", ROLLING),
}
MOE = {"model.dim": ABSENT, "model.ffn_dim": ABSENT, "model.n_layers": ABSENT}
LAYOUTS = {
    "fsdp": ("llama3", {}),
    "tp": ("llama3", {"parallelism.tensor_parallel_degree": 2}),
    "ep": ("qwen3_moe", {"parallelism.expert_parallel_degree": 2}),
}


@pytest.fixture
def files(tmp_path):
    """A folder with questions, a text, and tasks of lm-eval over the questions."""
    folder = tmp_path / "files"
    folder.mkdir()
    choices = ["two", "a dog", "something longer"]
    rows = [
        {"query": f"{n} dogs and {n} cats are", "choices": choices[: 2 + n % 2], "gold": n % 2}
        for n in range(7)
    ]
    questions = folder / "quiz.jsonl"
    questions.write_text("\n".join(map(json.dumps, rows)))
    (folder / "story.txt").write_text("Once there was a small dog who liked to dig holes. " * 5)
    for name, (kind, body) in TASKS.items():
        head = TASK.format(name=name, file=questions, kind=kind)
        (folder / f"{name}.yaml").write_text(head + body)
    return folder


@pytest.fixture
def offline(monkeypatch, tmp_path):
    pytest.importorskip(
        "lm_eval", reason="lm-eval is not installed (pip install 'torchtitan[eval]')"
    )
    share_task_files()
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def _options(files, *, with_tasks=True):
    tasks = {
        "callbacks.evaluation.tasks": [*TASKS],
        "callbacks.evaluation.include_path": files,
    }
    return {
        **(tasks if with_tasks else {}),
        "callbacks.evaluation.files": [files / "quiz.jsonl", f"tale={files / 'story.txt'}"],
        "callbacks.evaluation.freq": 1,
        "callbacks.evaluation.batch_size": 2,
        "callbacks.samples.prompts": ["Once upon", "The dog", "A"],
        "callbacks.samples.freq": 1,
        "callbacks.samples.batch_size": 2,
        "callbacks.samples.max_new_tokens": 6,
    }


def _train(folder, module, options):
    chosen = {
        **TINY,
        **(MOE if module == "qwen3_moe" else {}),
        "training.steps": 2,
        "training.global_batch_size": 4,
        "training.mixed_precision_param": "float32",
        "dump_folder": folder,
        **options,
    }
    words = flags({key: value for key, value in chosen.items() if value != ABSENT})
    return run(
        ConfigManager().parse_args(["--module", module, "--config", "debugmodel", *words]).config
    )


def _train_with_and_without(folder, module, options, layout):
    if "callbacks.evaluation.tasks" in options:
        share_task_files()  # in each rank
    _train(folder / "with", module, {**options, **layout})
    _train(folder / "without", module, layout)


def _lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def _evaluations(folder):
    return [line for line in _lines(folder) if any(key.startswith("evaluation/") for key in line)]


def _assert_unchanged(folder):
    """Training with and without evaluation has the same numbers, bit for bit."""
    for name in ("loss", "grad_norm"):
        with_it, without = (read_metrics(folder / kind, name) for kind in ("with", "without"))
        assert len(with_it) == 2 and with_it == without


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_training_in_layouts(tmp_path, files, offline, layout):
    """Two ranks give the scores and texts of one, and train as they do without evaluation."""
    module, options = LAYOUTS[layout]
    chosen = _options(files, with_tasks=layout == "fsdp")  # importing lm-eval takes long
    _train(tmp_path / "one", module, chosen)
    run_processes(_train_with_and_without, 2, tmp_path, module, chosen, options)
    found, expected = _evaluations(tmp_path / "with"), _evaluations(tmp_path / "one")
    # two steps of two files, the mean, and three tasks
    assert len(found) == 2 * (6 if layout == "fsdp" else 3)
    for line, reference in zip(found, expected, strict=True):
        # Exact in the first step, since ranks compute the same batches; sums of gradients differ.
        assert line == pytest.approx(reference, rel=1e-5)
    assert _lines(tmp_path / "with", "samples.jsonl") == _lines(tmp_path / "one", "samples.jsonl")
    _assert_unchanged(tmp_path)


@pytest.mark.slow
def test_scores_are_those_of_lm_eval_alone(tmp_path, files, offline):
    transformers = pytest.importorskip("transformers")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    saved = {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True}
    _train_with_and_without(tmp_path, "llama3", {**_options(files), **saved}, {})
    _assert_unchanged(tmp_path)
    exported = tmp_path / "with" / "checkpoint" / "step-2"
    theirs = HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(exported),
        tokenizer=transformers.AutoTokenizer.from_pretrained(exported),
        max_length=32,
        device="cpu",
        batch_size=2,
    )
    manager = TaskManager(include_path=str(files))
    tasks = ["local_choice", "local_text"]
    expected = simple_evaluate(theirs, tasks=tasks, task_manager=manager)["results"]
    theirs.add_bos_token = False  # otherwise lm-eval's rolling windows predict a second BOS
    tasks = ["local_rolling"]
    expected |= simple_evaluate(theirs, tasks=tasks, task_manager=manager)["results"]
    numbers = {
        key: value for line in _evaluations(tmp_path / "with") for key, value in line.items()
    }
    for task, metric in [
        ("local_choice", "acc"),
        ("local_choice", "acc_norm"),
        ("local_text", "exact_match"),
        ("local_rolling", "bits_per_byte"),
    ]:
        ours = numbers[f"evaluation/{task}/{metric}"]
        assert ours == pytest.approx(expected[task][f"{metric},none"], rel=1e-5)
    chance = (4 * (1 / 2) + 3 * (1 / 3)) / 7
    centered_acc = (expected["local_choice"]["acc,none"] - chance) / (1 - chance)
    assert numbers["evaluation/local_choice/centered_accuracy"] == pytest.approx(centered_acc)
    assert numbers["evaluation/quiz/centered_accuracy"] == pytest.approx(centered_acc)
    # the questions, the same as a task, and greedy texts, none of which is right
    assert numbers["evaluation/mean/centered_accuracy"] == pytest.approx(2 * centered_acc / 3)


def test_centered_accuracy():
    assert centered(0.25, 0.25) == 0 and centered(1.0, 0.5) == 1 and centered(0.0, 0.5) == -1
    assert centered(1.0, 1.0) is None
    results = {"a": {"centered_accuracy": 0.5}, "b": {"loss": 1.0}, "c": {"centered_accuracy": 0.0}}
    assert mean_centered(results) == {"centered_accuracy": 0.25, "centered_tasks": 2}
    assert mean_centered(results, {"c"}) == {"centered_accuracy": 0.5, "centered_tasks": 1}
    assert mean_centered({"b": {"loss": 1.0}}) == {}


def test_ranks_divide_work():
    """Every item is done, and all ranks take part in every round."""
    of_ranks = [[*Share(index, 3).rounds(7)] for index in range(3)]
    assert of_ranks == [[0, 3, 6], [1, 4, 6], [2, 5, 6]]
    assert [*Share().rounds(2)] == [0, 1] and [*Share(1, 2).rounds(0)] == []


def test_samples_are_the_texts_of_the_model(tmp_path):
    trainer = run(
        tiny_config(
            tmp_path,
            callbacks__samples__prompts=["Once upon a time"],
            callbacks__samples__freq=3,
            callbacks__samples__max_new_tokens=8,
        )
    )
    lines = _lines(tmp_path, "samples.jsonl")
    assert [line["step"] for line in lines] == [3, 4]
    ids = trainer.tokenizer.encode("Once upon a time")
    with trainer.mixed_precision():
        [expected] = generate(trainer.model_parts[0], [ids], max_new_tokens=8)
    text = trainer.tokenizer.decode([*ids, *expected.ids], skip_special_tokens=True)
    assert lines[-1]["prompt"] == "Once upon a time"
    assert lines[-1]["prompt"] + lines[-1]["completion"] == text


def test_messages_are_answered_in_the_template_of_the_data(tmp_path):
    options = {
        "dump_folder": tmp_path,
        "training.steps": 1,
        "validator.enable": False,
        "callbacks.samples.messages": ["What is a dog?"],
        "callbacks.samples.max_new_tokens": 4,
    }
    words = ["--module", "llama3", "--config", "debugmodel_sft", *flags(options)]
    trainer = run(ConfigManager().parse_args(words).config)
    [line] = _lines(tmp_path, "samples.jsonl")
    chat = Chat(trainer.dataloader.template, trainer.tokenizer)
    ids = chat.encode([{"role": "user", "content": "What is a dog?"}])
    with trainer.mixed_precision():
        [answer] = generate(
            trainer.model_parts[0], [ids], max_new_tokens=4, stop_ids={*chat.stops.ids()}
        )
    assert line["completion"] == chat.read(ids, answer.ids).content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluation.files": ["quiz.jsonl", "quiz=story.txt"]}, "'quiz' names two results"),
        ({"evaluation.files": ["mean=story.txt"]}, "'mean' names two results"),
        ({"evaluation.include_path": "."}, "names no task"),
        ({"evaluation.limit": 0}, "limit is 0, but must be at least 1"),
        (
            {"samples.prompts": ["Once"], "samples.max_new_tokens": 32},
            "leaves no room for a prompt",
        ),
        ({"samples.temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_mistakes_are_reported(tmp_path, files, monkeypatch, options, message):
    monkeypatch.chdir(files)
    chosen = {f"callbacks__{key.replace('.', '__')}": value for key, value in options.items()}
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **chosen).check(world_size=1)


@pytest.mark.parametrize("section", ["evaluation.files", "samples.prompts"])
def test_context_parallelism_is_refused(tmp_path, files, section):
    value = [str(files / "story.txt")] if section == "evaluation.files" else ["Once"]
    config = tiny_config(
        tmp_path,
        parallelism__context_parallel_degree=2,
        callbacks__samples__max_new_tokens=4,
        **{f"callbacks__{section.replace('.', '__')}": value},
    )
    with pytest.raises(
        UserError, match=r"context_parallel_degree 2 .*callbacks\.(evaluation|samples)"
    ):
        for callback in config.callbacks:
            callback.check_run(config)


def test_unknown_tasks_are_reported(tmp_path, offline):
    with pytest.raises(UserError, match="unknown lm-eval task no_such_task"):
        tiny_config(tmp_path, callbacks__evaluation__tasks=["no_such_task"]).check(world_size=1)


def test_tasks_that_lm_eval_refuses_later_are_reported(tmp_path, files, offline):
    """Before the model is built, not in the middle of a run."""
    task = files / "local_text.yaml"
    options = {
        "callbacks__evaluation__include_path": str(task.parent),
        "callbacks__evaluation__tasks": ["local_text"],
    }
    config = tiny_config(tmp_path, training__seq_len=6, **options)
    with pytest.raises(UserError, match="task local_text needs 6 new tokens .* only 6 tokens"):
        config.build()
    task.write_text(task.read_text() + "unsafe_code: true\n")
    with pytest.raises(UserError, match="task local_text executes code that the model writes"):
        tiny_config(tmp_path, **options).check(world_size=1)


def test_absent_lm_eval_is_reported(tmp_path, monkeypatch):
    fake = types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr("torchtitan.components.evaluation.tasks.importlib", fake)
    with pytest.raises(UserError, match=r"hellaswag .* lm-eval is not installed"):
        tiny_config(tmp_path, callbacks__evaluation__tasks=["hellaswag"]).check(world_size=1)
