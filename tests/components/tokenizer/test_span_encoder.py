"""`SpanEncoder`: ids and characters of tokens as from `Tokenizer.tokenize_with_offsets`."""

import pickle

import pytest
import tokenizers

from tests.components.tokenizer.array_encoder import (
    change_ids,
    load,
    open_for_any_text,
    texts_for,
)
from torchtitan.components.tokenizer import (
    DifferentIds,
    PretrainedTokenizer,
    SpanEncoder,
    Tokenizer,
)


def special_texts(tokenizer: PretrainedTokenizer) -> list[str]:
    """Return texts with special and added tokens, and characters of several tokens."""
    special = [tokenizer.decode([token_id]) for token_id in sorted(tokenizer.special_ids)[:3]]
    texts = [
        f"{name}user\nHi {name}\n\n {name}{name}Größe 中文 👩‍👩‍👧 e\u0301 \u2003x"
        for name in special
    ]
    others = [text for text in texts_for(tokenizer, 10) if len(text) < 1000]
    return [*others, *texts, "", " ", "\ud83d\ude00 \ud83d", "Ａ①ﬁ"]


def check(encoder: SpanEncoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    expected = tokenizer.tokenize_with_offsets(texts, allow_special=True)
    found = encoder.encode(texts)
    for text, spans, (ids, offsets) in zip(texts, found, expected, strict=True):
        assert spans.ids.tolist() == ids, text
        assert list(zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)) == offsets, text


NAMES = ("embedded", "gpt2", "llama3", "mistral", "qwen", "spaces", "prefix", "neox", "nfkc")


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_spans_are_the_tokenizers(name, is_fast, tmp_path, assets, monkeypatch):
    if is_fast and name == "llama3":
        pytest.skip("opening files of ranks takes seconds; test_array_encoder.py does it")
    if is_fast:
        pytest.importorskip("gigatoken", reason="gigatoken is not installed")
        open_for_any_text(monkeypatch)
    tokenizer = load(name, tmp_path, assets)
    encoder = SpanEncoder(tokenizer)
    texts = special_texts(tokenizer)
    for _ in range(2):
        check(encoder, tokenizer, texts)
    # without a text that is compared alone, and with all others
    together = [text for text in texts if text and text.isprintable()]
    check(encoder, tokenizer, together)
    check(encoder, tokenizer, [text for text in together if text.isascii()])
    check(pickle.loads(pickle.dumps(encoder)), tokenizer, texts)
    assert encoder.encode([]) == []


def test_other_ids_are_told(tokenizer, monkeypatch):
    pytest.importorskip("gigatoken", reason="gigatoken is not installed")
    open_for_any_text(monkeypatch)
    change_ids(monkeypatch, lambda content, ids: ids[::-1] if b"Rare" in content else ids)
    encoder = SpanEncoder(tokenizer)
    check(encoder, tokenizer, ["A common text."])
    assert encoder.arrays.is_fast
    encoder.arrays.sample_next()
    with pytest.raises(DifferentIds, match="other ids for 'Rare text.'"):
        encoder.encode(["Rare text."])
    check(encoder, tokenizer, ["Rare text."])


def test_a_token_that_takes_the_space_before_it(tmp_path, assets):
    """With a space before the text, as many bytes as the text has, but not its bytes (RoBERTa)."""
    load("prefix", tmp_path, assets)
    [file] = tmp_path.rglob("tokenizer.json")
    changed = tokenizers.Tokenizer.from_file(str(file))
    changed.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    changed.save(str(file))
    tokenizer = PretrainedTokenizer.Config().build(path=str(file.parent))
    encoder = SpanEncoder(tokenizer)
    check(encoder, tokenizer, ["hi <mask>", "hi <mask> there"])
    # the bytes of almost no text are those of its tokens
    encoder.arrays.expect(10**9)
    assert not encoder.arrays.is_fast


class Reversed(PretrainedTokenizer):
    def tokenize_with_offsets(self, texts, *, allow_special):
        encoded = super().tokenize_with_offsets(texts, allow_special=allow_special)
        return [(ids[::-1], offsets) for ids, offsets in encoded]


def test_a_subclass_with_other_offsets():
    tokenizer = Reversed(PretrainedTokenizer.Config())
    check(SpanEncoder(tokenizer), tokenizer, ["Once upon a time"])
