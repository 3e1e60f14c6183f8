"""Images with captions: forms of data, encoders, the cache of their results, the loader."""

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.flux_encoders import T5_TOKENS, WORDS, save_encoders
from torchtitan.components.images import encoded
from torchtitan.components.images.captioned import CaptionFormat, find_captions, open_captioned
from torchtitan.components.images.captioned_loader import CaptionedImageDataLoader
from torchtitan.components.images.encoders import EncoderFolder, Encoders
from torchtitan.tools.errors import UserError

Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.slow  # importing diffusers takes seconds

SQUARE, WIDE = (8, 8), (8, 16)
FORMAT = CaptionFormat(buckets=(SQUARE, WIDE), channels=3)
SIZES = [SQUARE, WIDE, SQUARE, SQUARE, WIDE, SQUARE, SQUARE]
CAPTIONS = [f"a {word} in the reeds" for word in WORDS[: len(SIZES)]]


@pytest.fixture(scope="module", autouse=True)
def diffusers() -> Any:
    """The library, imported by the process that runs these tests only."""
    return pytest.importorskip("diffusers")


def pixels_of(number: int) -> np.ndarray:
    height, width = SIZES[number]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels_of(number)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with images of two sizes, and captions beside them."""
    folder = tmp_path_factory.mktemp("images")
    for number, caption in enumerate(CAPTIONS):
        path = folder / ("a", "b")[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(number))
        path.with_suffix(".txt").write_text(caption + "\n")
    return folder


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("encoders")
    return folder, save_encoders(folder)


def config(dataset: Path, folder: Path, cache: Path, **options: Any) -> Any:
    chosen = {
        "buckets": ["8x8", "8x16"],
        "caption_tokens": T5_TOKENS,
        "encoding_dtype": "float32",
        "encoders": str(folder),
        **options,
    }
    return CaptionedImageDataLoader.Config(dataset=[str(dataset)], cache_dir=str(cache), **chosen)


def write_metadata(folder: Path) -> None:
    rows = []
    for number, caption in enumerate(CAPTIONS):
        (folder / f"{number}.png").write_bytes(png(number))
        rows.append(json.dumps({"file_name": f"{number}.png", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))


def write_webdataset(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, caption in enumerate(CAPTIONS):
            for kind, content in (("png", png(number)), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_table(folder: Path, *, saved: bool) -> None:
    import datasets

    rows = [{"image": {"bytes": png(n), "path": None}, "text": c} for n, c in enumerate(CAPTIONS)]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    table = datasets.Dataset.from_list(rows, features=features)
    if saved:
        table.save_to_disk(str(folder))
    else:
        table.to_parquet(str(folder / "a.parquet"))


FORMS = {
    "metadata.jsonl": write_metadata,
    "WebDataset": write_webdataset,
    "parquet": lambda folder: write_table(folder, saved=False),
    "datasets": lambda folder: write_table(folder, saved=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data_have_the_same_images_and_captions(tmp_path, form):
    data = tmp_path / "data"
    data.mkdir()
    FORMS[form](data)
    check_images(data, tmp_path / "cache", range(len(CAPTIONS)))


def test_folder_has_images_with_captions_beside_them(folder, tmp_path):
    in_order = sorted(range(len(CAPTIONS)), key=lambda n: (n % 2, n))
    check_images(folder, tmp_path, in_order)


def test_folder_may_be_relative_to_the_working_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    in_order = sorted(range(len(CAPTIONS)), key=lambda n: (n % 2, n))
    check_images(Path(folder.name), tmp_path, in_order)


def check_images(data: Path, cache: Path, order: Any) -> None:
    images = open_captioned(find_captions(str(data), "train", FORMAT), FORMAT, str(cache))
    for bucket, size in zip(images.buckets, FORMAT.buckets, strict=True):
        numbers = [n for n in order if SIZES[n] == size]
        assert list(bucket.captions) == [CAPTIONS[n] for n in numbers]
        for n, pixels in zip(numbers, bucket.pixels, strict=True):
            assert np.array_equal(pixels, pixels_of(n).transpose(2, 0, 1))


def test_another_image_under_a_name_in_the_metadata_is_noticed(tmp_path):
    write_metadata(tmp_path)

    def pixels() -> np.ndarray:
        source = find_captions(str(tmp_path), "train", FORMAT, str(tmp_path / "cache"))
        return open_captioned(source, FORMAT, str(tmp_path / "cache")).buckets[0].pixels.copy()

    before = pixels()
    first = next(n for n in range(len(CAPTIONS)) if SIZES[n] == FORMAT.buckets[0])
    other = next(n for n in range(first + 1, len(CAPTIONS)) if SIZES[n] == SIZES[first])
    (tmp_path / f"{first}.png").write_bytes(png(other))
    after = pixels()
    assert np.array_equal(after[0], pixels_of(other).transpose(2, 0, 1))
    assert not np.array_equal(before[0], after[0]) and np.array_equal(before[1:], after[1:])


def test_what_is_left_out_is_an_error_or_counted(tmp_path, caplog):
    write_metadata(tmp_path)
    (tmp_path / "1.png").write_bytes(b"no image")
    small = Image.fromarray(np.zeros((8, 7, 3), np.uint8))
    small.save(tmp_path / "2.png")
    source = find_captions(str(tmp_path), "train", FORMAT)
    with pytest.raises(UserError, match="metadata.jsonl:2: .*--dataloader.broken drop"):
        open_captioned(source, FORMAT, str(tmp_path / "cache"))
    drops = CaptionFormat(buckets=FORMAT.buckets, channels=3, broken="drop")
    images = open_captioned(source, drops, str(tmp_path / "cache"))
    assert [len(bucket) for bucket in images.buckets] == [4, 1]
    assert "1 images cannot be read" in caplog.text
    assert "1 images are smaller than their bucket's pixels" in caplog.text


def test_image_without_caption_is_an_error(tmp_path):
    (tmp_path / "heron.png").write_bytes(png(0))
    with pytest.raises(UserError, match="heron.png: it has no caption heron.txt beside it"):
        open_captioned(find_captions(str(tmp_path), "train", FORMAT), FORMAT, str(tmp_path / "c"))


class RunsCode:
    """A pickle that leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def leave_out_weights(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file(dict(sorted(tensors.items())[1:]), file, metadata={"format": "pt"})


def pickle_weights(file: Path) -> None:
    file.unlink()
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin"):
        torch.save(RunsCode(file.parents[1] / "ran"), file.parent / name)


def name_code(file: Path) -> None:
    path = file.parents[1] / "ran"
    (file.parent / "evil.py").write_text(f"open({str(path)!r}, 'w')\nclass Evil: pass\n")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("text_encoder/model.safetensors", truncate, "text_encoder cannot be opened"),
        ("text_encoder_2/model.safetensors", leave_out_weights, "lacks weights of T5EncoderModel"),
        ("vae/diffusion_pytorch_model.safetensors", leave_out_weights, "lacks weights of Auto"),
        ("text_encoder/model.safetensors", pickle_weights, "text_encoder cannot be opened"),
        ("vae/diffusion_pytorch_model.safetensors", pickle_weights, "vae cannot be opened"),
        ("tokenizer/tokenizer.json", truncate, "tokenizer cannot be opened"),
        ("tokenizer_2/tokenizer_config.json", name_code, "tokenizer_2 cannot be opened"),
        ("text_encoder/config.json", lambda file: file.write_text("[]"), "cannot be opened"),
    ],
)
def test_damaged_encoders_are_named_and_run_no_code(encoders, tmp_path, file, damage, message):
    shutil.copytree(encoders[0], tmp_path / "encoders")
    damage(tmp_path / "encoders" / file)
    folder = EncoderFolder(tmp_path / "encoders", T5_TOKENS, torch.float32)
    with pytest.raises(UserError, match=message):
        Encoders(folder)
    assert not (tmp_path / "encoders" / "ran").exists()


@pytest.mark.parametrize("value", ["8", [], 0, True, None, {}, 1.5])
def test_sizes_of_encoders_have_their_types(tmp_path, value):
    for part, key in (
        ("text_encoder", "hidden_size"),
        ("text_encoder_2", "d_model"),
        ("vae", "block_out_channels"),
    ):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps({key: value}))
    folder = EncoderFolder(tmp_path, T5_TOKENS, torch.float32)
    for name in ("pooled_dim", "text_dim", "reduction"):
        with pytest.raises(UserError, match="download the folder"):
            getattr(folder, name)


def test_states_are_those_of_a_pipeline_of_diffusers(encoders, diffusers):
    """1e-5 of float32 with values near 1; sums of other batches differ in the seventh digit."""
    folder, parts = encoders
    captions = [CAPTIONS[0], "a small red dog in the blue reeds the the the the"]
    pipeline = diffusers.FluxPipeline(scheduler=None, transformer=None, **parts)
    text, pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=T5_TOKENS)
    pixels = np.stack([pixels_of(0), pixels_of(2)]).transpose(0, 3, 1, 2)
    opened = EncoderFolder(folder, T5_TOKENS, torch.float32)
    states = Encoders(opened)(captions, pixels)
    assert (states["text"] - text).abs().max() < 1e-5
    assert (states["pooled"] - pooled).abs().max() < 1e-5
    shapes = {name: tuple(x.shape[1:]) for name, x in states.items()}
    assert shapes == opened.shapes((3, *SQUARE))
    # The pipeline turns pixels into the numbers that the autoencoder reads, and back.
    vae = parts["vae"]
    read = pipeline.image_processor.preprocess([Image.fromarray(pixels_of(n)) for n in (0, 2)])
    with torch.no_grad():
        means = vae.encode(read).latent_dist.mean
        expected = (means - 0.1) * 0.3
        assert (states["pixels"] - expected).abs().max() < 1e-5
        assert (opened.decode(expected) - vae.decode(means).sample).abs().max() < 1e-4


def test_encoding_continues_and_is_shared_by_ranks(folder, encoders, tmp_path, monkeypatch):
    monkeypatch.setattr(encoded, "ROWS", 2)  # three shards of squares, one of wide images
    chosen = config(folder, encoders[0], tmp_path)
    seen: list[str] = []
    call = Encoders.__call__

    def counted(self: Encoders, captions: Any, pixels: np.ndarray) -> Any:
        if len(seen) == 4:
            raise KeyboardInterrupt
        seen.extend(captions)
        return call(self, captions, pixels)

    monkeypatch.setattr(Encoders, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        chosen.build(local_batch_size=2)
    first = list(seen)
    seen.clear()
    seen.extend(["of another run"] * 10)
    # The second of two ranks begins with the second half, of which it encodes all that is missing.
    loader = chosen.build(local_batch_size=2, dp_rank=1, dp_world_size=2)
    assert sorted(first + seen[10:]) == sorted(CAPTIONS)
    monkeypatch.setattr(Encoders, "__call__", lambda *_: pytest.fail("all is in the cache"))
    again = chosen.build(local_batch_size=2, dp_rank=1, dp_world_size=2)
    ours, theirs = next(loader), next(again)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_other_encoders_are_another_cache(folder, encoders, tmp_path):
    other = tmp_path / "other"
    save_encoders(other, autoencoder=False)
    cache = tmp_path / "cache"
    latents, pixels = (
        config(folder, path, cache).build(local_batch_size=1) for path in (encoders[0], other)
    )
    assert next(latents)["pixels"].shape[1:] in {(2, 4, 4), (2, 4, 8)}
    assert next(pixels)["pixels"].shape[1:] in {(3, 8, 8), (3, 8, 16)}


def test_batches_are_the_same_for_any_number_of_ranks_and_after_a_resume(
    folder, encoders, tmp_path
):
    chosen = config(folder, encoders[0], tmp_path)
    options = {"global_batch_size": 4, "seed": 1, "epochs": 2}
    whole = list(chosen.build(local_batch_size=4, **options))
    assert len(whole) == 2 * 3  # 5 squares and 2 wide images, in batches of 4
    ranks = [
        list(chosen.build(local_batch_size=1, dp_rank=r, dp_world_size=2, **options))
        for r in range(2)
    ]
    for n, batch in enumerate(whole):
        assert {4, 8} >= {batch["pixels"].shape[3]}
        parts = [ranks[r][2 * n + k] for k in range(2) for r in range(2)]
        for name, value in batch.items():
            assert torch.equal(value, torch.cat([part[name] for part in parts])), name
    used = torch.cat([batch["documents"][batch["weights"] > 0] for batch in whole[:3]])
    assert used.flatten().sort().values.tolist() == list(range(len(CAPTIONS)))

    loader = chosen.build(local_batch_size=4, **options)
    next(loader)
    next(loader)
    resumed = chosen.build(local_batch_size=4, **options)
    resumed.load_state_dict(loader.state_dict())
    rest = list(resumed)
    assert len(rest) == 4
    for ours, theirs in zip(rest, whole[2:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoders": ""}, "--dataloader.encoders is empty"),
        ({"encoders": "/nowhere"}, "has no folder text_encoder"),
        ({"buckets": ["8"]}, "'8' must be HEIGHTxWIDTH"),
        ({"buckets": ["8x9"]}, "8x9 must be multiples of 2, the pixels of a latent"),
        ({"buckets": [], "image_size": 9}, "--dataloader.image_size 9 must be multiples of 2"),
        ({"caption_tokens": 0}, "--dataloader.caption_tokens"),
    ],
)
def test_wrong_options_are_refused(folder, encoders, tmp_path, options, message):
    chosen = config(folder, encoders[0], tmp_path, **options)
    with pytest.raises(UserError, match=message):
        chosen.validate()


@pytest.mark.parametrize(
    ("part", "key"), [("text_encoder_2", "d_model"), ("vae", "block_out_channels")]
)
def test_an_incomplete_download_is_refused(folder, encoders, tmp_path, part, key):
    shutil.copytree(encoders[0], tmp_path / "part")
    (tmp_path / "part" / part / "config.json").unlink()
    chosen = config(folder, tmp_path / "part", tmp_path)
    with pytest.raises(UserError, match=f"{part}/config.json has no {key}; download"):
        chosen.validate()
        chosen.blank_batch(1, 1)


def test_cut_captions_are_counted(folder, encoders, tmp_path, caplog):
    chosen = config(folder, encoders[0], tmp_path, caption_tokens=3)
    next(chosen.build(local_batch_size=1))
    assert "captions have more than 3 tokens for T5 and were cut" in caplog.text
