"""Conversion of SentencePiece models to tokenizer.json, checked against the library
sentencepiece."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.components.tokenizer import probes, tiktoken_model
from torchtitan.components.tokenizer.conversion_cache import cached_conversion
from torchtitan.components.tokenizer.probes import probe_texts
from torchtitan.components.tokenizer.tiktoken_model import declared_tokens
from torchtitan.components.tokenizer.tokenizer_json import suppress_native_errors, wrap_errors
from torchtitan.tools.digests import bytes_digest, digest_of
from torchtitan.tools.errors import UserError
from torchtitan.tools.files import open_regular, read_object, read_regular, unreadable_file_error

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers
    from tokenizers import models, normalizers
    from tokenizers.processors import TemplateProcessing

_SPACE = "▁"
"""Character that represents a space in pieces."""

_MOST_BYTES = 2**27
"""Ten times the largest published models."""

# Values of the enumerations in sentencepiece_model.proto.
_BPE = 2
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5


def is_sentencepiece(path: Path) -> bool:
    """Return whether a file is a SentencePiece model: a protobuf that begins with tag 0x0A, the
    list of pieces."""
    with open_regular(path) as file:
        return file.read(1) == b"\x0a"


def convert_sentencepiece(path: Path) -> bytes:
    """Return the tokenizer.json of a SentencePiece model, with the tokens that
    tokenizer_config.json and added_tokens.json in its folder add. It is converted once, and then
    read from the cache folder.

    Texts without special tokens get the same ids as in the library sentencepiece. This is verified
    on texts with runs of spaces, digits, code, several scripts, all added pieces and parts of the
    vocabulary. BOS is added if the model has one. sentencepiece knows no special tokens within a
    text; after one, the text begins with the dummy prefix, as in separate texts, unless
    tokenizer_config.json has `legacy` false or the model has user-defined pieces. Raise `UserError`
    if the library is missing, the file is not a usable model, or the ids differ.
    """
    try:
        import sentencepiece  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"'{path}' is a SentencePiece model, which needs the package sentencepiece (pip "
            "install 'torchtitan[sentencepiece]', or EXTRA=sentencepiece ./run_train.sh); or use "
            "the model's tokenizer.json"
        ) from error
    content = read_regular(path, most=_MOST_BYTES)
    folder = path.parent
    modules = (__file__, probes.__file__, tiktoken_model.__file__)
    key = digest_of(
        [
            *(bytes_digest(Path(module).read_bytes()) for module in modules),
            *(importlib.metadata.version(name) for name in ("sentencepiece", "tokenizers")),
            bytes_digest(content),
            read_object(folder / "tokenizer_config.json"),
            read_object(folder / "added_tokens.json"),
        ]
    )
    return cached_conversion(key, lambda: _converted(path, content))


def _converted(path: Path, content: bytes) -> bytes:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    protobuf: Any = sentencepiece_model_pb2  # its classes are made at run time
    model = protobuf.ModelProto()
    try:
        model.ParseFromString(content)
        reference = sentencepiece.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # DecodeError of protobuf, RuntimeError of sentencepiece
        raise unreadable_file_error(
            path, f"'{path}' is not a valid SentencePiece model: {error}"
        ) from error
    _check_supported(path, model)
    settings = read_object(path.parent / "tokenizer_config.json")
    with suppress_native_errors(path):
        tokenizer = _convert(model, prefix_everywhere=settings.get("legacy") is not False)
    with wrap_errors(path, "cannot be converted to tokenizer.json"):
        _check_ids(path, tokenizer, reference, model)
        _add_declared(path.parent, tokenizer)
    text: str = tokenizer.to_str(pretty=True)
    return text.encode()


def _check_supported(path: Path, model: Any) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    # tokenizer.json's unigram finds control pieces such as <s> in text, and its normalization by
    # rules treats characters of several code points differently; sentencepiece does neither.
    reasons = {
        "another algorithm than BPE": trainer.model_type != _BPE,
        f"the normalization rules {normalizer.name}": bool(normalizer.precompiled_charsmap),
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "escape_whitespaces false": not normalizer.escape_whitespaces,
        "a denormalizer": bool(model.denormalizer_spec.precompiled_charsmap),
        "unused pieces": any(piece.type == _UNUSED for piece in model.pieces),
        "no piece for unknown text": not any(piece.type == _UNKNOWN for piece in model.pieces),
        "equal pieces": len({piece.piece for piece in model.pieces}) < len(model.pieces),
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), None):
        raise UserError(
            f"'{path}' is a SentencePiece model with {reason}, which tokenizer.json cannot express "
            "exactly; use the model's tokenizer.json"
        )


def _convert(model: Any, *, prefix_everywhere: bool) -> "tokenizers.Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers

    pieces, normalizer = model.pieces, model.normalizer_spec
    tokenizer = Tokenizer(_bpe(model))
    tokenizer.normalizer = normalizers.Sequence([*_normalizers(normalizer)])
    user_defined = [piece.piece for piece in pieces if piece.type == _USER_DEFINED]
    strip = []
    if normalizer.add_dummy_prefix:
        # Metaspace adds no prefix to text that begins with its replacement, but sentencepiece
        # always does. Normalized text has no spaces, so a first Metaspace with a space as
        # replacement always adds one.
        scheme = "always" if prefix_everywhere and not user_defined else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(replacement=" ", prepend_scheme=scheme, split=False),
                pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False),
            ]
        )
        strip = [decoders.Strip(content=" ", left=1, right=0)]
    fallback = [decoders.ByteFallback()] if model.trainer_spec.byte_fallback else []
    parts = [decoders.Replace(_SPACE, " "), *fallback, decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=True, special=False) for text in user_defined]
    )
    special = [piece.piece for piece in pieces if piece.type in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in special]
    )
    if model.trainer_spec.bos_id >= 0:
        tokenizer.post_processor = _bos_processor(
            pieces[model.trainer_spec.bos_id].piece, model.trainer_spec.bos_id
        )
    return tokenizer


def _normalizers(spec: Any) -> Iterator["normalizers.Normalizer"]:
    from tokenizers import Regex, normalizers

    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(r"\A +"), "")
        yield normalizers.Replace(Regex(" +"), " ")
    yield normalizers.Replace(" ", _SPACE)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(rf"{_SPACE}+\z"), "")


def _bpe(model: Any) -> "models.BPE":
    """Every split of a piece into two pieces becomes a merge, with the priority of the piece's
    score."""
    from tokenizers import models

    ids = {piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == _NORMAL}
    merges = []
    for text, i in ids.items():
        halves = ((text[:n], text[n:]) for n in range(1, len(text)))
        splits = [half for half in halves if half[0] in ids and half[1] in ids]
        merges += [(-model.pieces[i].score, i, ids[left], (left, right)) for left, right in splits]
    merges.sort()
    return models.BPE(
        vocab={piece.piece: i for i, piece in enumerate(model.pieces)},
        merges=[merge[-1] for merge in merges],
        unk_token=next(piece.piece for piece in model.pieces if piece.type == _UNKNOWN),
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _bos_processor(bos: str, bos_id: int) -> "TemplateProcessing":
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(
        single=[bos, "$A"],
        pair=[bos, "$A", f"{bos}:1", "$B:1"],
        special_tokens=[(bos, bos_id)],
    )


def _check_ids(
    path: Path,
    tokenizer: "tokenizers.Tokenizer",
    reference: "sentencepiece.SentencePieceProcessor",
    model: Any,
) -> None:
    added = [piece.piece for piece in model.pieces if piece.type in (_CONTROL, _USER_DEFINED)]
    normal = [piece.piece.replace(_SPACE, " ") for piece in model.pieces if piece.type == _NORMAL]
    tokenizer.encode_special_tokens = True
    for text in probe_texts(added, normal):
        ids, expected = tokenizer.encode(text, add_special_tokens=False).ids, reference.encode(text)
        if ids != expected:
            raise UserError(
                f"'{path}' cannot be converted to tokenizer.json: the ids of {text[:60]!r} would "
                "differ from the ids of the library sentencepiece; use the model's tokenizer.json"
            )
    tokenizer.encode_special_tokens = False


def _add_declared(folder: Path, tokenizer: "tokenizers.Tokenizer") -> None:
    """Add the tokens that the folder's files declare, and mark the special ones. Raise `UserError`
    for other ids than the next ones."""
    from tokenizers import AddedToken

    decoder = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    flags = (
        {token["content"]: token for token in decoder.values()} if isinstance(decoder, dict) else {}
    )
    for text, token_id in sorted(declared_tokens(folder).items(), key=lambda item: item[1]):
        n_ids = tokenizer.get_vocab_size(with_added_tokens=True)
        present = tokenizer.token_to_id(text)
        if present not in (None, token_id) or present is None and token_id != n_ids:
            given = n_ids if present is None else present
            raise UserError(
                f"'{folder}' declares the added token {text!r} with id {token_id}, but the "
                f"SentencePiece model gives it {given}; use the model's tokenizer.json"
            )
        declared = flags.get(text, {})
        token = AddedToken(
            text,
            lstrip=declared.get("lstrip") is True,
            rstrip=declared.get("rstrip") is True,
            single_word=declared.get("single_word") is True,
            normalized=declared.get("normalized") is True,
            special=declared.get("special") is not False,
        )
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
