"""Distillation (`--module distillation`) against full logits, in several layouts, resumed, and with
bad input."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import PROJECT
from tests.processes import run_processes
from tests.training import flags, killed_in, read_metrics, run
from torchtitan.components.data.sequence_cache import SequenceCache
from torchtitan.components.observe.run_events import read_events
from torchtitan.config.manager import ConfigManager
from torchtitan.dry_run import dry_run
from torchtitan.experiments.distillation.trainer import DistillationTrainer, OnPolicyTrainer
from torchtitan.models.pretrained import load_model
from torchtitan.tools.errors import UserError
from torchtitan.trainer import reference

SIZES = {
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPTIONS = {
    "training.steps": 4,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 4,
    "training.mixed_precision_param": "float32",
    "optimizer.lr": 1e-3,
    "lr_scheduler.warmup_steps": 0,
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": False,
    "activation_checkpoint.mode": "none",
    "loss.cross_entropy_weight": 0.25,
    "loss.temperature": 2.0,
    "loss.chunk_tokens": 50,
}
NUMBERS = "loss", "grad_norm", "cross_entropy", "divergence"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a student (Llama) and teachers of another family, one of them with a larger,
    padded vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("distillation")
    torch.manual_seed(0)
    models = {
        "student": LlamaForCausalLM(LlamaConfig(**SIZES, hidden_size=32, vocab_size=2048)),
        "teacher": Qwen3ForCausalLM(
            Qwen3Config(**SIZES, hidden_size=48, head_dim=16, vocab_size=2048)
        ),
        "padded": Qwen3ForCausalLM(
            Qwen3Config(**SIZES, hidden_size=48, head_dim=16, vocab_size=2100)
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        for file in (PROJECT / "torchtitan/assets/tokenizer").glob("*.json"):
            shutil.copy(file, folder / name)
    rows = [
        {"instruction": f"Is {i} big?", "output": "Quite " * (i % 5) + "small."} for i in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def distill(
    folder: Path, dump: Path, config: str = "pretrain", world_size: int = 1, **options: object
) -> DistillationTrainer:
    changed = {key.replace("__", "."): value for key, value in options.items()}
    common = {
        "hf_assets_path": folder / "student",
        "teacher.path": folder / "teacher",
        "dump_folder": dump,
    }
    data = {"dataloader.cache_dir": folder / "cache", "dataloader.dataset": "stories"}
    words = flags({**common, **data, **OPTIONS, **changed})
    parsed = (
        ConfigManager().parse_args(["--module", "distillation", "--config", config, *words]).config
    )
    parsed.check(world_size)
    return run(parsed)


def distill_on_ranks(folder: Path, dump: Path, options: dict[str, object]) -> None:
    distill(folder, dump, world_size=torch.distributed.get_world_size(), **options)


@pytest.mark.parametrize("teacher", ["teacher", "padded"])
def test_the_first_step_equals_full_logits_in_float64(folder, tmp_path, monkeypatch, teacher):
    """float32 against float64 over two layers: 1e-5."""
    batches = []
    process = DistillationTrainer.post_dataloading_process
    monkeypatch.setattr(
        DistillationTrainer,
        "post_dataloading_process",
        lambda self, batch: batches.append(process(self, batch)) or batches[-1],
    )
    distill(folder, tmp_path, training__steps=1, teacher__path=folder / teacher)
    student, taught = (
        load_model(folder / name, device="cpu", dtype=torch.float64).model
        for name in ("student", teacher)
    )
    total, n_tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        with torch.no_grad():
            p = (taught(batch["input"], batch["attention"])[..., :2048] / 2).log_softmax(-1)
        logits = student(batch["input"], batch["attention"])
        q = (logits / 2).log_softmax(-1)
        is_valid = batch["labels"] != -100
        divergence = ((p.exp() * (p - q)).sum(-1) * is_valid).sum() * 4
        cross_entropy = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        total = total + 0.75 * divergence + 0.25 * cross_entropy
        n_tokens += int(is_valid.sum())
    (total / n_tokens).backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters()]).norm()
    ((_, loss, grad_norm),) = read_metrics(tmp_path, "loss", "grad_norm")
    assert loss == pytest.approx(total.item() / n_tokens, rel=1e-5)
    assert grad_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.fixture(scope="module")
def in_one_process(folder, tmp_path_factory) -> Path:
    dump = tmp_path_factory.mktemp("one")
    distill(folder, dump)
    return dump


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "degrees"),
    [
        (2, {"data_parallel_shard_degree": 2}),
        (2, {"tensor_parallel_degree": 2}),
        (2, {"tensor_parallel_degree": 2, "disable_loss_parallel": True}),
        (2, {"context_parallel_degree": 2}),
        (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    ],
    ids=["FSDP", "TP", "TP, whole logits", "CP", "HSDP"],
)
def test_a_sharded_teacher_matches_one_process(
    folder, in_one_process, tmp_path, processes, degrees
):
    """The tolerance of 1e-4 covers a different order of sums over four steps of Adam."""
    options = {f"parallelism__{name}": degree for name, degree in degrees.items()}
    options["training__local_batch_size"] = 1
    run_processes(distill_on_ranks, processes, folder, tmp_path / "many", options)
    for row, expected in zip(
        read_metrics(tmp_path / "many", *NUMBERS),
        read_metrics(in_one_process, *NUMBERS),
        strict=True,
    ):
        assert row == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_dry_run_has_both_models(folder, tmp_path, monkeypatch):
    """The teacher's frozen weights are in memory, and not written to a cache; sampled answers are
    refused."""
    options = {
        "hf_assets_path": folder / "student",
        "teacher.path": folder / "teacher",
        "dump_folder": tmp_path,
    }
    words = ["--module", "distillation", "--config", "pretrain", *flags({**options, **OPTIONS})]
    (report,) = dry_run(ConfigManager().parse_args(words).config, 1)
    models = [load_model(folder / name, device="cpu").model for name in ("student", "teacher")]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert report.parameters == sum(sizes)
    words[3:4] = ["on_policy", "--dataloader.dataset", str(folder / "rows.jsonl")]
    with pytest.raises(UserError, match="a dry run cannot sample answers"):
        dry_run(ConfigManager().parse_args(words).config, 1)


@pytest.mark.slow
def test_resume_is_exact(folder, tmp_path):
    options = {"checkpoint__interval": 2}
    distill(folder, tmp_path / "straight", **options)
    with killed_in(DistillationTrainer, "train_step", 4):
        distill(folder, tmp_path / "stopped", **options)
    resumed = distill(folder, tmp_path / "stopped", **options)
    assert read_metrics(tmp_path / "stopped", *NUMBERS) == read_metrics(
        tmp_path / "straight", *NUMBERS
    )
    assert "teacher" not in resumed.states()


@pytest.mark.slow
def test_conversations_and_validation(folder, tmp_path):
    """Validation after the last step: the divergence is lower than before it, on the same rows."""
    options = {
        "dataloader__dataset": [folder / "rows.jsonl"],
        "dataloader__chat_template": "alpaca",
    }
    options |= {
        "validator__enable": True,
        "validator__dataset": [folder / "rows.jsonl"],
        "loss__kind": "reverse_kl",
    }
    distill(folder, tmp_path, "sft", **options, training__steps=8, training__seq_len=128)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (validation,) = (line for line in lines if "validation_loss" in line)
    first = next(line for line in lines if "loss" in line)
    assert validation["validation_divergence"] < first["divergence"]
    assert validation["validation_cross_entropy"] > 0
    assert (tmp_path / "checkpoint/step-8/config.json").is_file()


def test_invalid_options_are_rejected(folder, tmp_path):
    for options, message in (
        ({"teacher__path": ""}, r"--teacher\.path is not set"),
        ({"teacher__path": "/nowhere"}, r"--teacher\.path: /nowhere"),
        ({"loss__temperature": 0}, r"--loss\.temperature is 0"),
        ({"loss__cross_entropy_weight": 1.5}, r"--loss\.cross_entropy_weight is 1\.5"),
        ({"loss__chunk_tokens": 0}, r"--loss\.chunk_tokens is 0"),
        (
            {"parallelism__pipeline_parallel_degree": 2},
            r"--parallelism\.pipeline_parallel_degree 2 cannot be combined",
        ),
        ({"teacher__offload": True}, r"--teacher\.offload is a part of FSDP"),
        (
            {"teacher__path": folder / "padded", "parallelism__tensor_parallel_degree": 2},
            r"2 cannot be combined with a student's vocabulary of 2048 rows and a teacher's of "
            r"2100",
        ),
    ):
        with pytest.raises(UserError, match=message):
            distill(
                folder,
                tmp_path,
                world_size=options.get("parallelism__tensor_parallel_degree", 1),
                **options,
            )


def test_different_tokenizers_are_rejected(folder, tmp_path):
    shutil.copytree(folder / "teacher", tmp_path / "other")
    document = json.loads((tmp_path / "other/tokenizer.json").read_text())
    names = {number: name for name, number in document["model"]["vocab"].items()}
    document["model"]["vocab"] |= {names[1000]: 1001, names[1001]: 1000}
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(
        UserError, match=r"differ first in token 1000, which twice is .* for the teacher"
    ) as caught:
        distill(folder, tmp_path / "run", teacher__path=tmp_path / "other")
    assert "\n" not in str(caught.value)
    with pytest.raises(
        UserError,
        match=r"first in token 2048, which twice is None for the teacher and '<\|new\|><\|new\|>' "
        r"for the student",
    ):
        distill(folder, tmp_path / "run", tokenizer__added_tokens=["<|new|>"])


@pytest.mark.slow
def test_the_embedded_student_learns_from_a_checkpoint(tmp_path):
    tiny = {
        "training.steps": 2,
        "training.seq_len": 32,
        "training.local_batch_size": 2,
        "checkpoint.enable": True,
    }
    words = flags({**tiny, "validator.enable": False, "dump_folder": tmp_path / "teacher"})
    run(ConfigManager().parse_args(["--module", "llama3", "--config", "debugmodel", *words]).config)
    options = {
        **tiny,
        "teacher.path": tmp_path / "teacher/checkpoint/step-2",
        "dump_folder": tmp_path / "student",
    }
    words = flags({**options, "validator.enable": False, "checkpoint.enable": False})
    config = (
        ConfigManager()
        .parse_args(["--module", "distillation", "--config", "debugmodel", *words])
        .config
    )
    config.check(world_size=1)
    trainer = run(config)
    assert trainer.num_parameters < trainer.models["teacher"].num_parameters


def test_a_cache_of_the_whole_vocabulary_replaces_the_teacher(folder, tmp_path):
    """With all tokens, training from the cache equals training with the teacher except for the
    rounding of stored log-probabilities (float32): 1e-5. Validation reads the cache too."""
    options = {"teacher__cache": tmp_path / "cache", "training__steps": 2, "teacher__top_k": 2048}
    trainer = distill(folder, tmp_path / "cached", **options)
    assert not trainer.models["teacher"].parts
    distill(folder, tmp_path / "live", training__steps=2)
    for row, expected in zip(
        read_metrics(tmp_path / "cached", *NUMBERS),
        read_metrics(tmp_path / "live", *NUMBERS),
        strict=True,
    ):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def cache(folder, tmp_path_factory) -> Path:
    """A cache of the first four steps, with all but 50 tokens as one event."""
    path = tmp_path_factory.mktemp("teacher") / "cache"
    distill(folder, path.parent / "write", teacher__cache=path, teacher__top_k=50)
    return path


def stamps(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}


@pytest.mark.slow
def test_writing_a_cache_continues_after_a_kill(folder, cache, tmp_path, monkeypatch):
    """It keeps what it has written, ends with the files of an uninterrupted one, and trains with
    them."""
    options = {"teacher__cache": tmp_path / "cache", "teacher__top_k": 50}
    logged: list[str] = []
    monkeypatch.setattr(
        reference.logger, "info", lambda text, *values, **_: logged.append(text % values)
    )
    with killed_in(SequenceCache, "write", 4):
        distill(folder, tmp_path / "run", **options)
    before = stamps(tmp_path / "cache")
    distill(folder, tmp_path / "run", **options)
    after = stamps(tmp_path / "cache")
    assert 0 < len(before) < len(after) and before.items() <= after.items()
    assert {file.relative_to(tmp_path / "cache") for file in after} == {
        file.relative_to(cache) for file in stamps(cache)
    }
    for file in after:
        assert file.read_bytes() == (cache / file.relative_to(tmp_path / "cache")).read_bytes()
    assert f"{tmp_path / 'cache'}: at most 16 windows, 0.4 MiB" in "".join(logged)
    [complete] = [line for line in logged if "is complete" in line]
    assert int(re.search(r"complete: (\d+) of this rank's batches", complete)[1]) > 0  # type: ignore[index]
    assert not list((tmp_path / "cache/unfinished").iterdir())


def test_a_complete_cache_is_not_looked_up_again_unless_a_file_is_missing(
    folder, cache, tmp_path, monkeypatch
):
    cache = Path(shutil.copytree(cache, tmp_path / "copy"))
    looked_up: list[bool] = []
    holds = SequenceCache.holds
    monkeypatch.setattr(
        SequenceCache, "holds", lambda *args: looked_up.append(holds(*args)) or looked_up[-1]
    )
    distill(folder, tmp_path / "same", teacher__cache=cache, teacher__top_k=50)
    assert not looked_up
    distill(folder, tmp_path / "longer", teacher__cache=cache, teacher__top_k=50, training__steps=5)
    assert not all(looked_up)  # the data of another step
    missing = min(stamps(cache))
    missing.unlink()
    damaged = max(stamps(cache))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    distill(folder, tmp_path / "again", teacher__cache=cache, teacher__top_k=50, training__steps=5)
    assert damaged.exists() and damaged.with_suffix(".damaged").exists()
    assert missing.exists()


@pytest.fixture(scope="module")
def from_the_cache(folder, cache, tmp_path_factory) -> Path:
    """Folder of a run in one process that does not need the teacher."""
    dump = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistillationTrainer, "frozen_results", None)
        distill(folder, dump, teacher__cache=cache, teacher__top_k=50)
    return dump


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_shard_degree": 2},
        {"tensor_parallel_degree": 2},
        {"context_parallel_degree": 2},
    ],
)
def test_a_cache_serves_other_layouts(folder, cache, from_the_cache, tmp_path, degrees):
    """The tolerances of 1e-4 cover a different order of sums."""
    options = {f"parallelism__{name}": degree for name, degree in degrees.items()}
    options |= {"training__local_batch_size": 1, "teacher__cache": cache, "teacher__top_k": 50}
    before = stamps(cache)
    run_processes(distill_on_ranks, 2, folder, tmp_path / "many", options)
    assert stamps(cache) == before
    for row, expected in zip(
        read_metrics(tmp_path / "many", *NUMBERS),
        read_metrics(from_the_cache, *NUMBERS),
        strict=True,
    ):
        assert row == pytest.approx(expected, rel=1e-4)
    if "data_parallel_shard_degree" not in degrees:
        return
    options |= {"teacher__cache": tmp_path / "cache"}
    run_processes(distill_on_ranks, 2, folder, tmp_path / "write", options)
    for file in stamps(cache):
        ours, theirs = (
            load_file(path / file.relative_to(cache)) for path in (tmp_path / "cache", cache)
        )
        torch.testing.assert_close(ours["log_probs"], theirs["log_probs"], rtol=1e-4, atol=1e-4)


def test_one_folder_keeps_what_different_settings_need(folder, cache, tmp_path):
    """Another teacher, temperature, top_k or length has files of its own, and the same ones are not
    written again."""
    # other tests compare the files of the fixture
    cache = Path(shutil.copytree(cache, tmp_path / "copy"))
    before = stamps(cache)
    for options in (
        {"teacher__path": folder / "padded"},
        {"loss__temperature": 3.0},
        {"teacher__top_k": 40},
        {"training__seq_len": 32},
    ):
        known = stamps(cache)
        run = tmp_path / "run"
        distill(
            folder,
            run,
            **{"training__steps": 1, "teacher__cache": cache, "teacher__top_k": 50, **options},
        )
        assert known.items() < stamps(cache).items()
        shutil.rmtree(run)
    known = stamps(cache)
    distill(folder, tmp_path / "run", training__steps=1, teacher__cache=cache, teacher__top_k=50)
    assert before.items() < known.items() == stamps(cache).items()


def test_caches_that_cannot_be_written_are_rejected(folder, cache, tmp_path):
    for options, message in (
        (
            {"teacher__top_k": 2049},
            r"--teacher\.top_k is 2049, but must be from 1 to the student's vocabulary, 2048",
        ),
        ({"training__batch_schedule": "2:8"}, r"--teacher\.cache needs batches of one size"),
        ({"teacher__cache": "/proc/no"}, r"cannot write to the cache /proc/no"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            distill(
                folder,
                tmp_path / "run",
                **{"teacher__cache": cache, "teacher__top_k": 50, **options},
            )
        assert "\n" not in str(caught.value)


def test_on_policy_distillation_compares_the_models_on_the_students_own_answers(
    folder, tmp_path, monkeypatch
):
    """The first step equals float64 on all logits at the sampled tokens (1e-5), for answers that
    the student's own probabilities explain; a teacher that is the student gives no loss. Validation
    samples too."""
    for file in ("student", "teacher"):
        (folder / file / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.content }}{% endfor %}"
        )
    prompts = [{"prompt": f"Is {i} big?"} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    batches = []
    packed = OnPolicyTrainer.packed
    monkeypatch.setattr(
        OnPolicyTrainer, "packed", lambda *args: batches.append(packed(*args)) or batches[-1]
    )
    options = {
        "dataloader__dataset": [tmp_path / "prompts.jsonl"],
        "training__steps": 1,
        "rollout__max_new_tokens": 6,
    }
    options |= {
        "rollout__group_size": 2,
        "loss__cross_entropy_weight": 0.0,
        "validator__enable": True,
    }
    options |= {"validator__dataset": [tmp_path / "prompts.jsonl"]}
    distill(folder, tmp_path / "run", "on_policy", **options)
    student, teacher = (
        load_model(folder / name, device="cpu", dtype=torch.float64).model
        for name in ("student", "teacher")
    )
    total, n_tokens, surprise = 0.0, 0, 0.0
    for batch in batches[0]:
        is_sampled = batch["labels"] != -100
        with torch.no_grad():
            inputs = batch["input"], batch["attention"]
            q, p = (
                (model(*inputs)[is_sampled] / 2).log_softmax(-1) for model in (student, teacher)
            )
            total += float((q.exp() * (q - p)).sum()) * 4
            labels = batch["labels"][is_sampled]
            surprise = student(*inputs)[is_sampled].log_softmax(-1).gather(1, labels[:, None])[:, 0]
            torch.testing.assert_close(
                surprise.float(), batch["logprobs"][is_sampled], rtol=1e-4, atol=1e-5
            )
        n_tokens += int(is_sampled.sum())
    assert n_tokens == 4 * 2 * 6  # prompts, answers, tokens: a random model does not end
    ((_, loss),) = read_metrics(tmp_path / "run", "loss")
    assert loss == pytest.approx(total / n_tokens, rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("validation_divergence", 0) > 0 for line in lines)
    assert any(line.get("validation_length") == 6 for line in lines)
    ((_, *measured),) = read_metrics(tmp_path / "run", "length", "truncated", "overlong")
    assert measured == [6, 1, 0]
    completions = (tmp_path / "run/completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in completions] == [1, 1]
    seconds = read_events(tmp_path / "run")[-1]["seconds"]
    assert seconds["rollouts"] > seconds["data"]  # sampling is no wait for data
    distill(folder, tmp_path / "self", "on_policy", **options, teacher__path=folder / "student")
    ((_, loss),) = read_metrics(tmp_path / "self", "loss")
    assert loss == pytest.approx(0, abs=1e-6)
    with pytest.raises(
        UserError, match=r"--teacher\.cache has no scores of new answers; leave it out"
    ):
        distill(
            folder, tmp_path / "cached", "on_policy", **options, teacher__cache=tmp_path / "cache"
        )
