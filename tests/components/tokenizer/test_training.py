"""`torchtitan tokenizer train`: the result, its determinism, and comparison."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan.cli.main import main
from torchtitan.cli.tokenizer import Pieces
from torchtitan.components.chat_template import load_chat_template
from torchtitan.components.tokenizer import PretrainedTokenizer
from torchtitan.components.tokenizer.training import train_tokenizer
from torchtitan.tools.errors import UserError

WORDS = ["low", "lower", "lowest", "newer", "newest", "wider", "wide"]


def texts(n: int = 200) -> list[str]:
    return [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 9)) for i in range(n)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return path


def test_merges_are_those_of_the_definition():
    """Byte-pair encoding by hand (Sennrich et al. 2016): the most frequent pair of neighbors inside
    words is merged; here `aa` (3 times), then `aa` + `c` (2 times)."""
    tokenizer = train_tokenizer(["aac", "aab", "aac"], 256 + 3 + 2)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert [tuple(merge) for merge in merges] == [("a", "a"), ("aa", "c")]


@pytest.mark.parametrize("digits", [1, 2])
def test_a_token_has_at_most_so_many_digits(digits, tmp_path, capsys):
    path, out = tmp_path / "data.txt", tmp_path / "t"
    path.write_text("1234 and 1234 and 123456 " * 20)
    words = ["tokenizer", "train", str(path), "--vocab_size", "300", "--out", str(out), "--digits"]
    assert (
        main([*words, "0"]) == 2 and "--digits is 0, but must be from 1" in capsys.readouterr().err
    )
    assert main([*words, str(digits)]) == 0
    tokenizer = PretrainedTokenizer.Config().build(path=out)
    parts = [tokenizer.decode([i]) for i in tokenizer.encode("123456", add_bos=False)]
    assert parts == [list("123456"), ["12", "34", "56"]][digits - 1]


def test_every_text_comes_back(data, tmp_path):
    words = ["tokenizer", "train", str(data), "--vocab_size", "270", "--out", str(tmp_path / "t")]
    assert main(words) == 0
    tokenizer = PretrainedTokenizer.Config().build(path=tmp_path / "t")
    assert tokenizer.vocab_size == 270
    for text in (texts()[3], "Ünïcode 漢字 🙂\r\n\t  x  ", "\x00\x7f", "  leading"):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False, add_eos=False)) == text
    assert tokenizer.adds_bos and not tokenizer.adds_eos
    assert tokenizer.decode([tokenizer.eos_id]) == "<|end_of_text|>"


@pytest.mark.slow
def test_threads_and_hashes_do_not_change_it(data, tmp_path):
    files = []
    for threads in ("1", "7"):
        out = tmp_path / threads
        words = ["tokenizer", "train", str(data), "--vocab_size", "290", "--out", str(out)]
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-m", "torchtitan", *words], check=True, env=environment)
        files.append((out / "tokenizer.json").read_bytes())
    assert files[0] == files[1]


def test_a_chat_template_brings_its_tokens(data, tmp_path):
    words = ["tokenizer", "train", str(data), "--vocab_size", "300", "--out", str(tmp_path / "t")]
    assert main([*words, "--chat_template", "chatml", "--special_tokens", "<|tool|>"]) == 0
    tokenizer = PretrainedTokenizer.Config().build(path=tmp_path / "t")
    special = ["<|im_start|>", "<|im_end|>", "<|tool|>"]
    assert all(tokenizer.id_of(token) in tokenizer.special_ids for token in special)
    assert load_chat_template(tmp_path / "t") is not None


def test_bytes_per_token_are_compared(data, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("Zebras quiz jumpy vixens. " * 50)
    out = tmp_path / "t"
    words = ["tokenizer", "train", str(data), str(other), "--vocab_size", "900"]
    assert main([*words, "--out", str(out), "--compare", str(out)]) == 2  # is not yet there
    assert "--out" not in capsys.readouterr().out
    embedded = Path("torchtitan/assets/tokenizer").resolve()
    assert main([*words, "--out", str(out), "--compare", str(embedded)]) == 0
    printed = capsys.readouterr().out
    tokenizer = PretrainedTokenizer.Config().build(path=out)
    n_tokens = sum(map(len, tokenizer.tokenize(texts(), allow_special=False)))
    assert f"{sum(map(len, texts())) / n_tokens:.3f}" in printed
    assert "(2,048)" in printed and f"{other.stat().st_size:,}" in printed
    assert "the data gives only" in printed


def test_a_share_of_the_data_is_spread_over_it(data):
    pieces = list(Pieces(str(data), None).taken(0.1))
    assert pieces == texts()[9::10]
    assert list(Pieces(str(data), None).taken(1.0)) == texts()


def test_a_killed_command_may_be_repeated_but_not_changed(data, tmp_path, capsys):
    words = ["tokenizer", "train", str(data), "--out", str(tmp_path / "t"), "--vocab_size"]
    assert main([*words, "300"]) == 0
    content = (tmp_path / "t/tokenizer.json").read_bytes()
    (tmp_path / "t/tokenizer_config.json").unlink()  # killed before it was written
    assert main([*words, "300"]) == 0
    assert (tmp_path / "t/tokenizer_config.json").exists()
    assert main([*words, "262"]) == 2
    assert "has another tokenizer; name a new folder" in capsys.readouterr().err
    assert (tmp_path / "t/tokenizer.json").read_bytes() == content


def test_mistakes_are_named(data, tmp_path, capsys):
    with pytest.raises(UserError, match="--vocab_size is 258, but 256 bytes and 3 special tokens"):
        train_tokenizer(["a"], 258)
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(["", ""], 300)
    with pytest.raises(UserError, match="--vocab_size is 1000000000, but must be at most 4194304"):
        train_tokenizer(["a"], 10**9)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    words = ["tokenizer", "train", str(data), "--vocab_size", "300", "--out"]
    for rest, message in (
        ([str(tmp_path / "full")], "is not empty"),
        ([str(tmp_path / "t"), "--chat_template", "chatmll"], "neither a file nor one of"),
        ([str(tmp_path / "t"), "--max_bytes", "0"], "--max_bytes is 0"),
        ([str(tmp_path / "t"), "--max_bytes", "1"], "--max_bytes 1 is less than one row"),
        ([str(tmp_path / "full" / "x")], "is a file"),
    ):
        assert main([*words, *rest]) == 2
        assert message in capsys.readouterr().err
    assert main(["tokenizer", "learn"]) == 2 and main(["tokenizer"]) == 0


@pytest.mark.parametrize("token", ["the", "t", "###", "\u0120the", ""])
def test_special_tokens_that_ordinary_text_may_have_are_refused(token):
    """As tokens of the library, these get the identifier that the same word of the text has."""
    with pytest.raises(UserError, match="--special_tokens .* ordinary text"):
        train_tokenizer(["the ### cat"] * 9, 300, [token])


@pytest.mark.parametrize(
    "token", ["<|the|>", "[THE]", "<the>", "</the>", "the cat", " the", "\u20ac"]
)
def test_other_special_tokens_are_not_part_of_ordinary_text(token):
    """Ordinary text that looks like the token is other tokens."""
    tokenizer = train_tokenizer([f"{token} {token}"] * 9, 400, [token])
    special = tokenizer.token_to_id(token)
    tokenizer.encode_special_tokens = True
    assert special not in tokenizer.encode(token, add_special_tokens=False).ids
