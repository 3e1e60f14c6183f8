"""`recipes/assistant.yaml`: its data, the configuration of each stage, and a short run."""

import itertools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from torchtitan.cli.main import COMMANDS, main
from torchtitan.cli.run import PYTHON
from torchtitan.config.manager import ConfigManager
from torchtitan.config.yaml_files import read_config_file

RECIPE = PROJECT / "recipes/assistant.yaml"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(PROJECT / "recipes/assistant.py"))


def test_sums_are_right_and_held_out_pairs_are_not_trained(script):
    def drawn(seed: int, held_out: bool) -> list[Any]:
        return list(itertools.islice(script["sums"](seed, held_out=held_out), 2000))

    trained, tested = drawn(1, False), drawn(5, True)
    assert trained == drawn(1, False) != drawn(2, False)

    def pairs(found: list[Any]) -> set[tuple[Any, ...]]:
        return {(one.sign, *sorted((one.left, one.right))) for one in found}

    assert not pairs(trained) & pairs(tested)
    # 496 pairs of each sign; 1 in 10 is held out, within four standard deviations (9.4 each)
    assert 61 < len(pairs(tested)) < 137
    for one in trained + tested:
        numbers = [int(number) for number in re.findall(r"\d+", one.question)]
        assert numbers == [one.left, one.right] and 0 <= one.result <= 60
        assert one.answer(one.result).endswith(f" is {eval(f'{one.left}{one.sign}{one.right}')}.")


def test_the_files_are_the_same_each_time(script, tmp_path, monkeypatch):
    numbers = dict.fromkeys(("N_SUMS", "N_TALES", "N_CHATS", "N_PAIRS", "N_PROMPTS"), 30)
    for name, number in numbers.items():
        monkeypatch.setitem(script["write_data"].__globals__, name, number)
    for name in ("a", "b"):
        script["write_data"](tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 9
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / f"a/{name}.jsonl").open()]

    assert all(row["chosen"] != row["rejected"] for row in rows("pairs"))
    for row in rows("choices"):
        assert len(set(row["choices"])) == 4
        left, sign, right, _, result = row["choices"][row["gold"]].rstrip(".").split()
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    for row in rows("tales"):
        question, answer = row["text"].split(" Answer: ")
        hero = question.removeprefix("Question: Tell me a story about ").rstrip(".")
        assert hero in answer


def test_each_training_stage_has_valid_options(assets, tmp_path):
    """With the files of a published model in place of the stage before it."""
    model = assets / "stories260K/hf-converted"
    stages = read_config_file(RECIPE, str(RECIPE))["stages"]
    assert isinstance(stages, list)
    trained = []
    for stage in stages:
        line = re.sub(r"\{([^{}*]+)\*[^{}]*\}", r"\1", stage["run"])
        words = line.replace("{folder}/tokens", str(model)).replace("{folder}", "x").split()
        assert words[0] in (*COMMANDS, PYTHON)
        if words[0] != "train":
            continue
        based = ["--hf_assets_path", str(model)] if stage.get("base") else []
        config = ConfigManager().parse_args([*words[1:], *based]).config
        assert config.checkpoint.enable and config.checkpoint.last_save_in_hf
        trained.append(stage["name"])
    assert trained == ["pretrain", "midtrain", "sft", "dpo", "grpo"]
    names = [stage["name"] for stage in stages]
    assert all(f"after_{name}" in names for name in trained)


@pytest.mark.long
def test_a_short_run_ends_with_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    folder = tmp_path / "out"
    assert main(["run", str(RECIPE), "--hours", "0.005", "--folder", str(folder)]) == 0
    assert (folder / "report.html").stat().st_size > 10_000
    for name in ("midtrain", "sft", "dpo", "grpo"):
        text = Path(folder, f"answers_{name}/output.txt").read_text()
        assert re.search(r"^unseen sums: \d+ of 200 right$", text, re.MULTILINE)
