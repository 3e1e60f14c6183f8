"""Token files of other programs: the same documents as in the arrays that wrote them."""

import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import torchtitan
from tests.components.data.helpers import (
    open_tokens,
    raises,
    split_documents,
    take,
    with_positions,
    write_jsonl,
)
from torchtitan.components.data import PretrainDataLoader
from torchtitan.components.data.pretraining.token_files import find_token_files

TEXTS = [f"Text {i} " + "and more of it " * (i % 5) for i in range(80)]


@pytest.fixture
def documents(tokenizer) -> list[list[int]]:
    """Documents that end in EOS."""
    return [tokenizer.encode(text, add_bos=False, add_eos=True) for text in TEXTS]


def write_megatron(path: Path, documents, dtype="uint16", sequences_per_document=1) -> str:
    """Write `.bin` and `.idx` by the published layout."""
    code = {"uint16": 8, "int32": 4}[dtype]
    sequences = [
        part
        for ids in documents
        for part in np.array_split(np.array(ids, dtype), sequences_per_document)
    ]
    lengths = np.array([len(sequence) for sequence in sequences])
    np.concatenate(sequences).tofile(path.with_suffix(".bin"))
    ends = np.arange(len(documents) + 1) * sequences_per_document
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    arrays = (lengths.astype(np.int32), pointers.astype(np.int64), ends.astype(np.int64))
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return str(path)


def write_datatrove(path: Path, documents, dtype="uint16") -> str:
    """Write `.ds` and `.ds.index` by the layout of datatrove 0.10.1."""
    np.concatenate(documents).astype(dtype).tofile(path)
    np.cumsum([len(ids) for ids in documents]).astype(np.uint64).tofile(f"{path}.index")
    return str(path)


def write_llm_c(path: Path, documents, magic=20240520, dtype="uint16") -> str:
    ids = np.concatenate(documents).astype(dtype)
    path.write_bytes(np.array([magic, 1, len(ids), *[0] * 253], np.int32).tobytes() + ids.tobytes())
    return str(path)


def write_raw(path: Path, documents) -> str:
    np.concatenate(documents).astype(np.uint16).tofile(path)
    return str(path)


def batches(dataset, tokenizer, tmp_path, **options):
    config = PretrainDataLoader.Config(dataset=[dataset], cache_dir=str(tmp_path / "cache"))
    loader = config.build(
        tokenizer=tokenizer, seq_len=33, local_batch_size=4, epochs=1, seed=2, **options
    )
    return loader, [with_positions(batch) for batch in take(loader)]


WRITERS = {
    "megatron": lambda folder, ids: write_megatron(folder / "data", ids),
    "megatron, sequences": lambda folder, ids: write_megatron(folder / "data", ids, "int32", 3),
    "datatrove": lambda folder, ids: write_datatrove(folder / "data.ds", ids),
    "datatrove, 32 bits": lambda folder, ids: (
        write_datatrove(folder / "0_shuffled.ds", ids[:9], "uint32")
        and (folder / "0_shuffled.ds.metadata").write_text("tokenizer.json|4\n9\n9.0 T")
        and write_datatrove(folder / "1_shuffled.ds", ids[9:], "uint32")
        and str(folder)
    ),
    "llm.c": lambda folder, ids: write_llm_c(folder / "data.bin", ids),
    "llm.c, 32 bits": lambda folder, ids: write_llm_c(folder / "data.bin", ids, 20240801, "uint32"),
    "nanoGPT": lambda folder, ids: write_raw(folder / "data.bin", ids),
    "OLMo": lambda folder, ids: write_raw(folder / "data.npy", ids),
    "numpy": lambda folder, ids: (
        np.save(folder / "data.npy", np.concatenate(ids)) or str(folder / "data.npy")
    ),
    "numpy, another byte order": lambda folder, ids: (
        np.save(folder / "data.npy", np.concatenate(ids).astype(">u4")) or str(folder / "data.npy")
    ),
    "two files": lambda folder, ids: (
        write_raw(folder / "1.npy", ids[:30])
        and write_megatron(folder / "2", ids[30:])
        and str(folder)
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_windows_equal_those_of_the_arrays(name, documents, tokenizer, tmp_path):
    """The reference is made of the arrays alone: input, labels and positions of every window."""
    (tmp_path / "data").mkdir()
    _, read = batches(WRITERS[name](tmp_path / "data", documents), tokenizer, tmp_path)
    ids = np.concatenate(documents)
    position_in = np.concatenate([np.arange(len(document)) for document in documents])
    expected = {}
    for start in range(0, len(ids) - 1, 33):
        window = ids[start : start + 34]
        begins = np.flatnonzero(position_in[start : start + len(window)] == 0)
        positions = [j - max([0, *begins[begins <= j]]) for j in range(len(window) - 1)]
        labels = [-100 if j + 1 in begins else int(window[j + 1]) for j in range(len(window) - 1)]
        expected[tuple(window[:-1].tolist())] = labels, positions
    found = 0
    for batch in read:
        for inputs, labels, positions in zip(
            *(batch[key].tolist() for key in ("input", "labels", "positions")), strict=True
        ):
            n = next(
                (
                    n
                    for n in range(33, 0, -1)
                    if labels[n - 1] != -100 or tuple(inputs[:n]) in expected
                ),
                0,
            )
            if tuple(inputs[:n]) in expected:
                assert (labels[:n], positions[:n]) == expected[tuple(inputs[:n])]
                found += 1
    assert found == len(expected)


def test_delimiters_before_documents(documents, tokenizer, tmp_path):
    """llm.c's scripts write the delimiter before each document."""
    before = [[tokenizer.eos_id, *ids[:-1]] for ids in documents]
    tokens = open_tokens(write_llm_c(tmp_path / "a.bin", before), tokenizer, tmp_path)
    starts = np.cumsum([0, *(len(ids) for ids in before)])
    assert tokens.starts(0, tokens.n_tokens).tolist() == starts[:-1].tolist()
    assert tokens.starts(int(starts[3]) + 1, int(starts[5]) + 1).tolist() == [
        starts[4] - starts[3] - 1,
        starts[5] - starts[3] - 1,
    ]
    assert tokens.lengths().tolist() == [len(ids) for ids in before]


def test_files_cut_within_documents(documents, tokenizer, tmp_path):
    """The second file begins within a document, as llm.c's scripts cut the stream; the first one is
    decisive."""
    before = np.concatenate([[tokenizer.eos_id, *ids[:-1]] for ids in documents])
    cut = len(before) // 2
    assert before[cut] != tokenizer.eos_id
    write_llm_c(tmp_path / "1.bin", [before[:cut]])
    write_llm_c(tmp_path / "2.bin", [before[cut:]])
    tokens = open_tokens(str(tmp_path), tokenizer, tmp_path)
    assert (
        tokens.starts(0, tokens.n_tokens).tolist()
        == np.flatnonzero(before == tokenizer.eos_id).tolist()
    )


def test_counts_of_many_files_are_estimated(documents, tokenizer, tmp_path):
    for number in range(40):
        write_raw(tmp_path / f"{number}.npy", documents)
    report = open_tokens(str(tmp_path), tokenizer, tmp_path).report()
    n_documents, n_tokens = 40 * len(documents), 40 * sum(map(len, documents))
    assert (report.format, report.kept, report.tokens) == ("tokens, about", n_documents, n_tokens)
    assert report.trained_tokens == n_tokens - n_documents


def test_megatron_documents(documents, tokenizer, tmp_path):
    tokens = open_tokens(
        write_megatron(tmp_path / "a", documents, "uint16", 2), tokenizer, tmp_path
    )
    starts = np.cumsum([0, *(len(ids) for ids in documents)])
    expected = [("a.bin, document", number + 1) for number in range(len(documents))]
    assert [tokens.locate(int(start)) for start in starts[:-1]] == expected
    assert [tokens.locate(int(start) - 1) for start in starts[1:]] == expected
    assert tokens.lengths().tolist() == [len(ids) for ids in documents]
    assert tokens.describe(int(starts[6]), int(starts[8])) == "a.bin, documents 7-9"


def test_file_written_by_datatrove(documents, tokenizer, tmp_path):
    """datatrove writes Megatron's format itself."""
    megatron = pytest.importorskip(
        "datatrove.pipeline.tokens.megatron_tokenizer", reason="needs datatrove"
    )
    file = megatron.MegatronTokenizedFile(str(tmp_path), "a", token_size=2)
    for ids in documents:
        file.write(ids)
    file.close()
    tokens = open_tokens(str(tmp_path / "a.bin"), tokenizer, tmp_path)
    assert split_documents(tokens) == documents


def test_tokens_written_by_datatrove(tokenizer, tmp_path):
    tokens_of = pytest.importorskip(
        "datatrove.pipeline.tokens.tokenizer", reason="needs datatrove"
    ).DocumentTokenizer
    from datatrove.data import Document

    vocabulary = Path(torchtitan.__file__).parent / "assets" / "tokenizer" / "tokenizer.json"
    step = tokens_of(str(tmp_path / "out"), str(vocabulary), seed=1)
    step.run((Document(text=text, id=text) for text in TEXTS), rank=0, world_size=1)
    expected = [tokenizer.encode(text, add_bos=True, add_eos=False) for text in TEXTS]
    for dataset in (tmp_path / "out", tmp_path / "out" / "*.ds"):
        assert sorted(split_documents(open_tokens(str(dataset), tokenizer, tmp_path))) == sorted(
            expected
        )


def test_another_position_and_content(documents, tokenizer, tmp_path):
    path = write_raw(tmp_path / "a.npy", documents)
    loader, read = batches(path, tokenizer, tmp_path)
    again, _ = batches(path, tokenizer, tmp_path)
    again.load_state_dict({**loader.state_dict(), "position": {"position": 4, "seed": 2}})
    assert next(again)["input"].equal(read[1]["input"])
    identity = loader.config.identity()["dataloader.dataset"]
    write_raw(tmp_path / "a.npy", documents[::-1])
    assert loader.config.identity()["dataloader.dataset"] != identity


class TestErrors:
    def test_shorter_than_announced(self, documents, tokenizer, tmp_path):
        for dataset in (
            write_llm_c(tmp_path / "a.bin", documents),
            write_megatron(tmp_path / "b", documents),
        ):
            file = Path(dataset).with_suffix(".bin")
            size = file.stat().st_size
            file.write_bytes(file.read_bytes()[:-20])
            with pytest.raises(
                ValueError, match=rf"{file.name} ends at byte {size - 20:,}, but .* {size:,}"
            ):
                open_tokens(dataset, tokenizer, tmp_path).tokens(0, 10)

    def test_damaged_index(self, documents, tokenizer, tmp_path):
        dataset = write_megatron(tmp_path / "b", documents)
        index = tmp_path / "b.idx"
        index.write_bytes(index.read_bytes()[:-3])
        with raises("but its header announces"):
            open_tokens(dataset, tokenizer, tmp_path)
        index.write_bytes(b"something else")
        with raises("is not a Megatron index"):
            open_tokens(dataset, tokenizer, tmp_path)

    def test_index_of_datatrove(self, documents, tokenizer, tmp_path):
        dataset = write_datatrove(tmp_path / "a.ds", documents)
        index = tmp_path / "a.ds.index"
        ends = np.fromfile(index, np.uint64)
        for wrong, problem in (
            (ends[:-1], "which does not fit the"),
            (ends * 2, "which does not fit the"),
            (ends[:0], "which does not fit the 0 tokens"),
            (ends[::-1], "does not divide its file into documents"),
        ):
            wrong.tofile(index)
            with raises(problem):
                open_tokens(dataset, tokenizer, tmp_path)
        index.write_bytes(b"abc")
        with raises(f"{dataset} cannot be read: buffer size"):
            open_tokens(dataset, tokenizer, tmp_path)
        index.unlink()
        with raises("a.ds has no a.ds.index, which says where its documents end"):
            open_tokens(dataset, tokenizer, tmp_path)

    def test_index_without_tokens(self, documents, tokenizer, tmp_path):
        dataset = write_megatron(tmp_path / "b", documents)
        (tmp_path / "b.bin").unlink()
        with raises(f"{tmp_path / 'b.bin'} cannot be read"):
            open_tokens(dataset, tokenizer, tmp_path)

    @pytest.mark.parametrize(
        "entries", [[0, 5, 99], [0, 5, -1], [0, 7, 5, 80], [1, 80], [0, 79], []]
    )
    def test_index_that_does_not_divide_the_tokens(self, entries, documents, tokenizer, tmp_path):
        dataset = write_megatron(tmp_path / "b", documents)
        index = tmp_path / "b.idx"
        content = (
            bytearray(index.read_bytes()[: 34 + 12 * len(documents)])
            + np.array(entries, np.int64).tobytes()
        )
        content[26:34] = struct.pack("<Q", len(entries))
        index.write_bytes(content)
        with raises(f"{index} does not divide {tmp_path / 'b.bin'} into documents"):
            open_tokens(dataset, tokenizer, tmp_path).tokens(0, 10)

    def test_index_without_sequences(self, documents, tokenizer, tmp_path):
        dataset = write_megatron(tmp_path / "b", documents)
        (tmp_path / "b.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQq", 1, 8, 0, 1, 0))
        with raises("but its index announces 0"):
            open_tokens(dataset, tokenizer, tmp_path).tokens(0, 10)

    def test_other_tokenizer(self, documents, tokenizer, tmp_path):
        documents[60][1] = 60_000
        offset = 2 * (sum(map(len, documents[:60])) + 1)
        with raises(f"token 60000 at offset {offset:,} is outside the vocabulary"):
            open_tokens(write_raw(tmp_path / "a.bin", documents), tokenizer, tmp_path)

    def test_odd_size_and_other_arrays(self, tokenizer, tmp_path):
        (tmp_path / "a.bin").write_bytes(b"abc")
        with raises("has 3 bytes, which are not whole tokens"):
            open_tokens(str(tmp_path / "a.bin"), tokenizer, tmp_path)
        np.save(tmp_path / "b.npy", np.ones((2, 2)))
        with raises("not a row of token ids"):
            open_tokens(str(tmp_path / "b.npy"), tokenizer, tmp_path)
        (tmp_path / "c.bin").touch()
        with raises("contains no tokens"):
            open_tokens(str(tmp_path / "c.bin"), tokenizer, tmp_path)


def test_no_dataset():
    assert find_token_files("") == []


def test_jsonl_next_to_token_files_is_text(tokenizer, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "some text"}])
    (tmp_path / "model.bin").write_bytes(b"\0" * 4)
    assert len(open_tokens(tmp_path, tokenizer, tmp_path).lengths()) == 1


def write_litdata(folder: Path, documents, dtype="uint16", per_chunk=13, **config) -> str:
    """Write chunks and index by litdata's layout: number of items, their offsets, and their
    values."""
    folder.mkdir(exist_ok=True)
    chunks = []
    for number, first in enumerate(range(0, len(documents), per_chunk)):
        items = documents[first : first + per_chunk]
        values = [np.array(ids, dtype).tobytes() for ids in items]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, values)]).astype(np.uint32)
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(
            np.uint32(len(items)).tobytes() + offsets.tobytes() + b"".join(values)
        )
        chunks.append({"filename": name, "chunk_size": len(items), "dim": sum(map(len, items))})
    config = {"data_format": ["no_header_tensor:16"], "compression": None, **config}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return str(folder)


class TestLitdata:
    def test_documents(self, documents, tokenizer, tmp_path):
        for dtype in ("uint16", "int32", "int64"):
            tokens = open_tokens(
                write_litdata(tmp_path / dtype, documents, dtype), tokenizer, tmp_path
            )
            assert split_documents(tokens) == documents
            token = sum(map(len, documents[:14]))
            assert tokens.describe(token, token) == "chunk-0-1.bin, document 2"

    def test_files_written_by_litdata(self, documents, tokenizer, tmp_path):
        cache = pytest.importorskip("litdata.streaming.cache", reason="needs litdata")
        loader = pytest.importorskip("litdata.streaming.item_loader")
        for name, convert in {"arrays": np.uint16, "tensors": torch.int32}.items():
            writer = cache.Cache(
                str(tmp_path / name), chunk_bytes=400, item_loader=loader.TokensLoader(8)
            )
            for index, ids in enumerate(documents):
                writer[index] = (
                    np.array(ids, convert) if name == "arrays" else torch.tensor(ids, dtype=convert)
                )
            writer.done()
            writer.merge()
            assert len(find_token_files(str(tmp_path / name))) > 3
            assert (
                split_documents(open_tokens(str(tmp_path / name), tokenizer, tmp_path)) == documents
            )

    @pytest.mark.parametrize("place", [0, 4, 9, 20, 13 * 4 + 4])
    def test_a_damaged_offset_is_an_error(self, place, documents, tokenizer, tmp_path):
        chunk = Path(write_litdata(tmp_path / "data", documents)) / "chunk-0-1.bin"
        content = bytearray(chunk.read_bytes())
        content[place] ^= 128
        chunk.write_bytes(content)
        with raises(f"{chunk} does not divide its tokens into documents"):
            split_documents(open_tokens(str(chunk.parent), tokenizer, tmp_path))

    def test_refused(self, documents, tokenizer, tmp_path):
        with raises("holds litdata's items of type str int, not uncompressed tokens"):
            open_tokens(
                write_litdata(tmp_path / "text", documents, data_format=["str", "int"]),
                tokenizer,
                tmp_path,
            )
        with raises("items of type no_header_tensor:16 zstd, not uncompressed tokens"):
            open_tokens(
                write_litdata(tmp_path / "compressed", documents, compression="zstd"),
                tokenizer,
                tmp_path,
            )
        index = Path(write_litdata(tmp_path / "tensors", documents)) / "index.json"
        # without TokensLoader
        index.write_text(re.sub('"dim": [0-9]+', '"dim": null', index.read_text()))
        with raises("items of type no_header_tensor:16, not uncompressed tokens"):
            open_tokens(str(index.parent), tokenizer, tmp_path)
        (tmp_path / "index.json").write_text(
            json.dumps({"version": 2, "shards": [{"format": "mds"}]})
        )
        with raises(f"{tmp_path} is in MDS, whose library needs NumPy below 2.2"):
            open_tokens(str(tmp_path), tokenizer, tmp_path)
        folder = Path(write_litdata(tmp_path / "short", documents))
        chunk = folder / "chunk-0-2.bin"
        chunk.write_bytes(chunk.read_bytes()[:-3])
        with raises(f"{chunk} ends at byte {chunk.stat().st_size:,}, which does not fit"):
            open_tokens(str(folder), tokenizer, tmp_path)
        chunk.unlink()
        with raises(f"{chunk} cannot be read"):
            open_tokens(str(folder), tokenizer, tmp_path)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Change a file in the middle, with its size and time as before."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("place", [0, 1, 40_000, 70_000, 100_001, 149_999])
def test_any_changed_token_is_another_dataset(place, tokenizer, tmp_path):
    """In the run's identity and in the position of the loader, also if the digest was
    remembered."""
    path = tmp_path / "data.bin"
    (np.arange(150_000) % 50).astype(np.uint16).tofile(path)
    os.utime(path, (1e9, 1e9))
    config = PretrainDataLoader.Config(dataset=[str(path)], cache_dir=str(tmp_path / "cache"))

    def found() -> tuple[str, str]:
        [tokens] = config.open(tokenizer)
        return tokens.key, config.identity()["dataloader.dataset"]["digest"]

    before = found()
    assert found() == before
    overwrite(path, 2 * place, np.uint16(51).tobytes())
    assert set(found()).isdisjoint(before)


@pytest.mark.parametrize("index", ["data.idx", "index.json", "data.bin.index"])
def test_a_changed_index_is_another_dataset(index, documents, tokenizer, tmp_path):
    dataset = write_megatron(tmp_path / "data", documents)
    config = PretrainDataLoader.Config(dataset=[dataset], cache_dir=str(tmp_path / "cache"))
    for name in ("index.json", "data.bin.index"):
        (tmp_path / name).write_text("{}")
    before = config.identity()
    with (tmp_path / index).open("ab") as file:
        file.write(b" ")
    assert config.identity() != before


@pytest.mark.parametrize("place", [0, 77_777, 149_999])
def test_any_token_outside_the_vocabulary_is_named_at_the_start(place, tokenizer, tmp_path):
    ids = (np.arange(150_000) % 50).astype(np.uint16)
    ids[place] = 60_000
    ids.tofile(tmp_path / "data.bin")
    for _ in range(2):  # also if the largest id is remembered
        with raises(
            f"{tmp_path / 'data.bin'}: token 60000 at offset {2 * place:,} is outside the "
            "vocabulary"
        ):
            open_tokens(tmp_path / "data.bin", tokenizer, tmp_path)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["delimited", "index", "cache"])
def test_a_token_that_is_changed_during_the_run_is_named(
    kind, num_workers, documents, tokenizer, tmp_path
):
    """Not by an IndexError of the model."""
    if kind == "cache":
        dataset = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    else:
        dataset = {"delimited": write_llm_c, "index": write_megatron}[kind](
            tmp_path / "data.bin", documents
        )
    config = PretrainDataLoader.Config(
        dataset=[dataset], cache_dir=str(tmp_path / "cache"), shuffle=False, num_workers=num_workers
    )
    loader = config.build(tokenizer=tokenizer, seq_len=16, local_batch_size=1, seed=2)
    [path] = (
        [tmp_path / "data.bin"] if kind != "cache" else tmp_path.glob("cache/tokens/*/tokens.bin")
    )
    overwrite(path, path.stat().st_size - 2, np.uint16(60_000).tobytes())
    with raises(f"{path}, token ") as failed:
        take(loader, 10_000)
    assert "token id 60000 is outside the vocabulary of" in str(failed.value)
    loader.close()
