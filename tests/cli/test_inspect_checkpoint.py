"""`torchtitan inspect` on complete, damaged and incomplete checkpoints, and on several at once."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training import train
from torchtitan.cli.main import main
from torchtitan.components.checkpoint import catalog
from torchtitan.components.checkpoint.dcp import write_dcp
from torchtitan.components.weights import write_huggingface, write_meta
from torchtitan.protocols.tensor_source import TensorSpec

TENSORS = {
    "b.weight": torch.randn(4, 6),
    "a.weight": torch.randn(3).bfloat16(),
    "c": torch.tensor(1.5),
}
FORMS = {name: TensorSpec.of(tensor) for name, tensor in TENSORS.items()}


def save_step(folder: Path, step: int, **marker) -> Path:
    """Save a checkpoint of a model only, as a run does."""
    partial = catalog.start_partial(folder, step)
    write_dcp(Path(str(partial)), FORMS, TENSORS.__getitem__)
    return Path(
        str(
            catalog.commit(
                partial, catalog.Marker(step=step, kind="model_only", world_size=1, **marker)
            )
        )
    )


def inspect(capsys, *words: object) -> tuple[int, str, str]:
    code = main(["inspect", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def facts(output: str) -> dict[str, str]:
    """Return the lines `name   value` of the output."""
    lines = (line.strip().partition("  ") for line in output.splitlines() if line.startswith("  "))
    return {name: value.strip() for name, _, value in lines}


def test_checkpoint_of_a_run(tmp_path, capsys):
    trainer = train(tmp_path, checkpoint__enable=True, checkpoint__interval=2)
    code, output, error = inspect(capsys, tmp_path / "checkpoint/step-4")
    found = facts(output)
    assert (code, error) == (0, "")
    assert (found["format"], found["step"], found["kind"]) == ("DCP", "4", "full")
    assert (found["complete"], found["digests"]) == ("yes", "verified")
    parameters = list(trainer.model_parts[0].parameters())
    values = sum(parameter.numel() for parameter in parameters)
    assert (
        found["model"]
        == f"{len(parameters)} tensors, {values:,} values, {4 * values:,} bytes: float32 "
        f"({len(parameters)})"
    )
    assert found["optimizer"].startswith(f"{3 * len(parameters)} tensors, ")
    files = [path for path in (tmp_path / "checkpoint/step-4").rglob("*") if path.is_file()]
    assert (
        found["size"]
        == f"{sum(path.stat().st_size for path in files):,} bytes in {len(files)} files"
    )


def test_every_format_and_its_tensors(tmp_path, capsys):
    for name, write in {"hf": write_huggingface, "meta": write_meta}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, FORMS, TENSORS.__getitem__)
    (tmp_path / "hf/config.json").write_text("{}")
    (tmp_path / "meta/params.json").write_text("{}")
    step = save_step(tmp_path, 7)
    for path, format in (
        (tmp_path / "hf", "Hugging Face"),
        (tmp_path / "meta", "Meta"),
        (step, "DCP"),
    ):
        code, output, _ = inspect(capsys, "--tensors", path)
        assert (code, facts(output)["format"], facts(output)["complete"]) == (0, format, "yes")
        assert (
            facts(output)["model"] == "3 tensors, 28 values, 106 bytes: float32 (2), bfloat16 (1)"
        )
        table = output.splitlines()[-4:]
        assert [line.split() for line in table] == [
            ["tensor", "shape", "type", "bytes"],
            ["a.weight", "3", "bfloat16", "6"],
            ["b.weight", "4", "x", "6", "float32", "96"],
            ["c", "scalar", "float32", "4"],
        ]


def test_hugging_face_model_saved_by_a_run(tmp_path, capsys):
    partial = catalog.start_partial(tmp_path, 3)
    write_huggingface(Path(str(partial)), FORMS, TENSORS.__getitem__)
    partial.write("config.json", b"{}")
    catalog.commit(partial, catalog.Marker(step=3, kind="huggingface", world_size=1))
    code, output, _ = inspect(capsys, tmp_path / "step-3")
    found = facts(output)
    assert (code, found["format"], found["kind"], found["digests"]) == (
        0,
        "Hugging Face",
        "huggingface",
        "verified",
    )
    (tmp_path / "step-3/model.safetensors").unlink()
    code, _, error = inspect(capsys, tmp_path / "step-3")
    assert code == 3
    assert "model.safetensors is missing" in error


def test_names_are_not_truncated_without_a_terminal(tmp_path, capsys):
    name = "a" * 200
    save_file({name: torch.zeros(1)}, tmp_path / "model.safetensors")
    assert name in inspect(capsys, "--tensors", tmp_path)[1]


@pytest.mark.parametrize(
    "damage", ["flipped", "truncated", "missing", "marker", "metadata", "no metadata"]
)
def test_damage_is_reported(tmp_path, capsys, damage):
    step = save_step(tmp_path, 7)
    data = max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)
    file = {"marker": step / "complete.json"}.get(
        damage, step / ".metadata" if "metadata" in damage else data
    )
    content = bytearray(file.read_bytes())
    if damage in ("flipped", "metadata"):
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage in ("truncated", "marker"):
        file.write_bytes(content[:-9])
    else:
        file.unlink()
    code, output, error = inspect(capsys, step)
    assert code == 3
    assert file.name in error
    assert facts(output)["complete"] == ("no" if damage == "marker" else "yes")
    if damage == "flipped":
        assert facts(output)["digests"] == f"wrong: {file.name} is damaged (its digest differs)"
        code, output, _ = inspect(capsys, "--no_verify", step)
        assert (code, facts(output)["digests"]) == (0, "not verified")


def test_option_without_effect_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        inspect(capsys, "--verify", save_step(tmp_path, 7))


def test_interrupted_save(tmp_path, capsys):
    step = save_step(tmp_path, 7)
    (step / "complete.json").unlink()
    code, output, error = inspect(capsys, step)
    assert (code, facts(output)["complete"]) == (3, "no")
    assert "the save did not finish" in error
    (step / ".metadata").unlink()  # written last
    code, output, _ = inspect(capsys, step)
    assert code == 3
    assert "incomplete" in output


def test_incomplete_hugging_face_folders(tmp_path, capsys):
    write_huggingface(tmp_path, FORMS, TENSORS.__getitem__, max_file_bytes=50)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"]["b.weight"]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    code, output, error = inspect(capsys, tmp_path)
    assert (code, facts(output)["complete"]) == (3, "no")
    assert f"{shard} cannot be read" in error
    shard.unlink()
    code, _, error = inspect(capsys, tmp_path)
    assert code == 3
    assert f"lists missing files: {shard.name}" in error


def test_several_checkpoints(tmp_path, capsys):
    for step, loss in ((5, 2.5), (10, 1.25), (15, None)):
        save_step(tmp_path / "checkpoint", step, validation_loss=loss)
    for path in (tmp_path, tmp_path / "checkpoint"):
        code, output, error = inspect(capsys, path)
        rows = [line.split() for line in output.splitlines()]
        assert (code, error) == (0, "")
        assert rows[0] == ["checkpoint", "step", "kind", "state", "validation", "loss", "bytes"]
        assert [row[1:4] for row in rows[1:]] == [
            [str(step), "model_only", "complete"] for step in (5, 10, 15)
        ]
        assert [row[4:-1] for row in rows[1:]] == [["2.5"], ["1.25", "(best)"], []]
    accuracy = "evaluation/quiz/accuracy"
    for step, value in ((5, 0.5), (10, 0.25), (15, None)):
        of_accuracy = {"best_metric": accuracy, "best_value": value, "best_goal": "max"}
        save_step(tmp_path / "other/checkpoint", step, **of_accuracy, validation_loss=5.0 / step)
    _, output, _ = inspect(capsys, tmp_path / "other")
    rows = [line.split() for line in output.splitlines()]
    assert rows[0][4:] == ["validation", "loss", accuracy, "bytes"]
    assert [row[4:-1] for row in rows[1:]] == [
        ["1", "0.5", "(best)"],
        ["0.5", "0.25"],
        ["0.333333"],
    ]
    (tmp_path / "checkpoint/step-20.partial").mkdir()
    code, output, _ = inspect(capsys, tmp_path)
    assert code == 3
    assert "incomplete" in output.splitlines()[-1]
    code, output, _ = inspect(capsys, tmp_path / "checkpoint/step-10")
    assert facts(output)["validation loss"] == "1.25"


def test_folder_without_a_checkpoint(tmp_path, capsys):
    code, _, error = inspect(capsys, tmp_path / "nowhere")
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"torchtitan inspect: {tmp_path / 'nowhere'} does not exist")
    code, _, error = inspect(capsys, tmp_path)
    assert code == 2
    assert "holds no checkpoint" in error
    for step in (10, 9):
        (tmp_path / f"checkpoint/step-{step}").mkdir(parents=True)
    code, _, error = inspect(capsys, tmp_path / "checkpoint/step-999")
    assert code == 2 and error.endswith(
        "step-999 does not exist; there are the checkpoints step-9, step-10\n"
    )


def test_damaged_metadata_is_reported(tmp_path, capsys):
    """Reading a damaged pickle can raise anything."""
    step = save_step(tmp_path, 1)
    whole = (step / ".metadata").read_bytes()
    for place in range(20, len(whole), len(whole) // 20):
        (step / ".metadata").write_bytes(
            whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        )
        code, _, error = inspect(capsys, step)
        assert code == 3 and ".metadata is damaged" in error
        assert inspect(capsys, step, "--no_verify")[0] in (0, 3)  # no traceback


@pytest.mark.parametrize("content", ["{", None])
def test_damaged_or_missing_model_json(tmp_path, capsys, content):
    write_huggingface(tmp_path, FORMS, TENSORS.__getitem__)
    (tmp_path / "config.json").write_text("{}")
    assert inspect(capsys, tmp_path)[0] == 0
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    code, output, error = inspect(capsys, tmp_path)
    assert code == 3 and facts(output)["complete"] == "no" and "config.json" in error
