"""Rows with images, in all forms, as messages and images."""

import base64
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from torchtitan.components.data.finetuning.conversation import (
    BrokenSample,
    Conversation,
    EmptySample,
    Pair,
)
from torchtitan.components.data.finetuning.row_formats import find_format, function_format
from torchtitan.components.data.finetuning.sample_cache import first_columns
from torchtitan.components.data.sources.rows import Row
from torchtitan.components.data.sources.source import CHAT_DATASETS, resolve_source
from torchtitan.components.images.files import GivenImages, ImageOpener
from torchtitan.components.images.rows import folder_of, reads_images
from torchtitan.tools.errors import UserError

IMAGE = {"type": "image"}
WIDTHS = {"a.png": 1, "b.png": 2, "c.png": 3}
"""Each image is told by its width."""


def png(width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 1)).save(file, "PNG")
    return file.getvalue()


BASE64 = base64.b64encode(png(7)).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, width in WIDTHS.items():
        (folder / name).write_bytes(png(width))
    return folder


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def said(*content, role: str = "user") -> dict:
    return {"role": role, "content": list(content)}


def answered(*content) -> list[dict]:
    return [said(*content), {"role": "assistant", "content": "yes"}]


def converted(row: dict, folder: Path | None, kind="sft", mapping=None):
    format = reads_images(find_format(list(row), "auto", mapping or {}, kind), ImageOpener(folder))
    assert "image" not in str(format.unread_columns(row)).lower()
    return format.convert(row)


def read(row: dict, folder: Path | None, **options) -> tuple[list, list[int]]:
    conversation = converted(row, folder, **options)
    assert isinstance(conversation, Conversation)
    return conversation.messages, [image.width for image in conversation.images]


ONE = answered(IMAGE, text("What?"))

PARTS = {
    "image": {"type": "image", "image": "b.png"},
    "path": {"type": "image", "path": "b.png"},
    "url": {"type": "image", "url": "b.png"},
    "datasets": {"type": "image", "image": {"bytes": png(2), "path": None}},
    "bytes": {"type": "image", "bytes": png(2)},
    "OpenAI": {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}},
    "OpenAI, short": {"type": "image_url", "image_url": "b.png"},
    "Responses": {"type": "input_image", "image_url": "b.png"},
    "Anthropic": {
        "type": "image",
        "source": {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(png(2)).decode(),
        },
    },
    "Anthropic, by URL": {"type": "image", "source": {"type": "url", "url": "b.png"}},
    "Qwen, without a type": {"image": "b.png"},
    "table": {"type": "image", "image": "b.png", "text": None, "image_url": None},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_with_an_image_keeps_its_place(name, folder):
    row = {"messages": answered(text("Look: "), PARTS[name], text("\nWhat?"))}
    before = repr(row)
    expected = answered(text("Look: "), IMAGE, text("\nWhat?"))
    assert read(row, folder) == (expected, [2])
    assert repr(row) == before
    if "type" in PARTS[name]:
        with pytest.raises(BrokenSample, match="message 1: .*use --config sft_images or lora_imag"):
            find_format(["messages"], "auto", {}, "sft").convert(row)


A, B, C = ({"type": "image", "image": name} for name in WIDTHS)

ROWS = {
    "TRL": ({"messages": answered(IMAGE, text("What?")), "images": ["b.png"]}, ONE, [2]),
    "datasets, one image": (
        {"messages": answered(IMAGE, text("What?")), "image": {"bytes": png(2)}},
        ONE,
        [2],
    ),
    "parts with the index of their image": (
        {
            "messages": answered(
                {"type": "image", "index": 1, "text": None},
                {"type": "text", "index": None, "text": "or"},
                {"type": "image", "index": 0, "text": None},
            ),
            "images": ["a.png", "b.png"],
        },
        answered(IMAGE, text("or"), IMAGE),
        [2, 1],
    ),
    "metadata.jsonl of datasets": (
        {"file_name": "b.png", "question": "What?", "answer": "yes"},
        ONE,
        [2],
    ),
    "metadata.jsonl, with its place": (
        {"messages": answered(text("Look: "), IMAGE), "file_name": "b.png"},
        answered(text("Look: "), IMAGE),
        [2],
    ),
    "several files of datasets": (
        {"images_file_names": ["b.png", "a.png"], "question": "What?", "answer": "yes"},
        answered(IMAGE, IMAGE, text("What?")),
        [2, 1],
    ),
    "the file of another column of datasets": (
        {"mask_file_name": "a.png", "file_name": "b.png", "question": "What?", "answer": "yes"},
        ONE,
        [2],
    ),
    "lists of images": (
        {"images": [["a.png", "b.png"], ["c.png"]], "question": "What?", "answer": "yes"},
        answered(IMAGE, IMAGE, IMAGE, text("What?")),
        [1, 2, 3],
    ),
    "the name of a file besides an image": (
        {"messages": answered(IMAGE, text("What?")), "images": ["b.png"], "file_name": "a.png"},
        ONE,
        [2],
    ),
    "the name of another file": (
        {"file_name": "b.py", "question": "What?", "answer": "yes"},
        [said(role="user") | {"content": "What?"}, {"role": "assistant", "content": "yes"}],
        [],
    ),
    "FineVision, The Cauldron": (
        {
            "images": [{"bytes": png(2), "path": None}],
            "texts": [{"user": "What?", "assistant": "yes", "source": "a"}],
        },
        ONE,
        [2],
    ),
    "LLaVA": (
        {
            "id": "1",
            "image": "b.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat?"},
                {"from": "gpt", "value": "yes"},
            ],
        },
        answered(IMAGE, text("\nWhat?")),
        [2],
    ),
    "LLaMA-Factory": (
        {
            "messages": [
                {"role": "user", "content": "<image>First, <image>second"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "and\n<image>"},
                {"role": "assistant", "content": "yes"},
            ],
            "images": ["c.png", "a.png", "b.png"],
        },
        [
            *answered(IMAGE, text("First, "), IMAGE, text("second")),
            *answered(text("and\n"), IMAGE),
        ],
        [3, 1, 2],
    ),
    "Alpaca": (
        {
            "instruction": "Say what <image> is",
            "input": "after <image>",
            "output": "yes",
            "images": ["a.png", "b.png"],
        },
        answered(text("Say what "), IMAGE, text(" is\n\nafter "), IMAGE),
        [1, 2],
    ),
    "question and answer": (
        {"question": "What?", "answer": "yes", "image": {"bytes": png(5), "path": "x.png"}},
        ONE,
        [5],
    ),
    "no mark: before the first text of the user": (
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                *answered(text("What?")),
                *answered(text("Sure?")),
            ],
            "images": ["a.png", "b.png"],
        },
        [
            {"role": "system", "content": "Be short."},
            *answered(IMAGE, IMAGE, text("What?")),
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "yes"},
        ],
        [1, 2],
    ),
    "another case": ({"prompt": "What?", "response": "yes", "Image": "b.png"}, ONE, [2]),
    "JSON text in a table": (
        {"messages": json.dumps(answered(IMAGE, text("What?"))), "images": '["b.png"]'},
        ONE,
        [2],
    ),
    "JSON text of parts, of each message": (
        {"messages": [json.dumps(message) for message in answered(B, text("What?"))]},
        ONE,
        [2],
    ),
    "JSON text of an object": (
        {"prompt": "What?", "response": "yes", "image": json.dumps({"path": "b.png"})},
        ONE,
        [2],
    ),
    "only an image": (
        {"prompt": "<image>", "response": "yes", "image": "b.png"},
        answered(IMAGE),
        [2],
    ),
    "a prompt of messages": (
        {"prompt": [said(A, text("What?"))], "completion": "yes"},
        ONE,
        [1],
    ),
    "a prompt of one message": ({"prompt": said(A, text("What?")), "response": "yes"}, ONE, [1]),
    "several messages, out of order of the files": (
        {"messages": [*answered(C, text("x"), A), *answered(B)]},
        [*answered(IMAGE, text("x"), IMAGE), *answered(IMAGE)],
        [3, 1, 2],
    ),
    "a result of a tool, Anthropic's": (
        {
            "messages": [
                {"role": "user", "content": "Look"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}],
                },
                said({"type": "tool_result", "tool_use_id": "1", "content": [text("here: "), B]}),
                {"role": "assistant", "content": "yes"},
            ]
        },
        [said(text("here: "), IMAGE, role="tool")],
        [2],
    ),
    "a result of a tool, of Responses": (
        {
            "messages": [
                {"role": "user", "content": "Look"},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "1",
                    "output": [{"type": "input_image", "image_url": DATA_URL}],
                },
                {"role": "assistant", "content": "yes"},
            ]
        },
        [said(IMAGE, role="tool")],
        [7],
    ),
    "a system message": (
        {"messages": [said(B, text("Compare"), role="system"), *answered(text("What?"), A)]},
        [said(IMAGE, text("Compare"), role="system"), *answered(text("What?"), IMAGE)],
        [2, 1],
    ),
}


NAMED = answered({"type": "image", "image": "b.png"}, text("What?"))

SAMPLES = {
    "LLaVA with the name of the packed file": (
        {
            "png": png(5),
            "json": {
                "image": "train/00017.png",
                "conversations": [
                    {"from": "human", "value": "<image>\nWhat?"},
                    {"from": "gpt", "value": "yes"},
                ],
            },
        },
        (answered(IMAGE, text("\nWhat?")), [5]),
    ),
    "no name": ({"jpg": png(5), "json": {"messages": answered(text("What?"))}}, (ONE, [5])),
    "images after their text, in the order of their numbers": (
        {
            "json": {"prompt": "<image><image><image>", "response": "yes"},
            "10.png": png(5),
            "9.png": png(6),
            "left.PNG": png(7),
        },
        (answered(IMAGE, IMAGE, IMAGE), [6, 5, 7]),
    ),
    "a column of names": (
        {
            "json": {
                "prompt": "What?",
                "response": "yes",
                "images": ["0.b.png", {"path": "d/0.a.png"}, "0.b.png"],
            },
            "a.png": png(5),
            "b.png": png(6),
            "c.png": png(7),
        },
        (answered(IMAGE, IMAGE, IMAGE, text("What?")), [6, 5, 6]),
    ),
    "parts with names": (
        {
            "a.png": png(5),
            "b.png": png(6),
            "json": {
                "messages": answered(
                    {"type": "image", "image": "0.b.png"},
                    {"type": "image_url", "image_url": {"url": "0.a.png"}},
                    {"type": "image", "path": "0.b.png"},
                )
            },
        },
        (answered(IMAGE, IMAGE, IMAGE), [6, 5, 6]),
    ),
    "a part without a name beside one with a name": (
        {
            "a.png": png(5),
            "b.png": png(6),
            "json": {"messages": answered(IMAGE, {"type": "image", "image": "0.a.png"})},
        },
        (answered(IMAGE, IMAGE), [6, 5]),
    ),
    "a file beside the archive": ({"json": {"messages": NAMED}}, (ONE, [2])),
    "content in the row": (
        {"png": png(5), "json": {"prompt": "What?", "response": "yes", "image": DATA_URL}},
        (ONE, [7]),
    ),
}


def archive_of(members: dict, folder: Path) -> Path:
    """Write a WebDataset of one sample `0`."""
    path = folder / "a.tar"
    with tarfile.open(path, "w") as archive:
        for kind, value in members.items():
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            member = tarfile.TarInfo(f"0.{kind}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def row_of(path: Path) -> Row:
    source = resolve_source(str(path), catalog=CHAT_DATASETS)
    [row] = source.rows(lambda n_bytes: None)
    return row


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_of_webdataset_has_its_images(name, folder):
    members, expected = SAMPLES[name]
    values = row_of(archive_of(members, folder)).values
    assert values is not None
    assert read(values, folder) == expected


def test_images_of_webdataset_are_those_that_the_library_decodes(tmp_path):
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        pixels = Image.radial_gradient("L").resize((9, 7)).convert("RGB")
        row = {"prompt": "What?", "response": "yes"}
        writer.write({"__key__": "0", "0.png": pixels, "1.jpg": pixels, "json": row})
    [sample] = webdataset.WebDataset(
        str(tmp_path / "a.tar"), shardshuffle=False, empty_check=False
    ).decode("pil")
    conversation = converted(row_of(tmp_path / "a.tar").values or {}, tmp_path)
    ours = [image.decode() for image in conversation.images]
    assert ours == [sample["0.png"], sample["1.jpg"]]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (
            {"a.png": png(1), "b.png": png(2), "json": {"prompt": "x", "images": ["0.c.png"]}},
            "its .json names the image '0.c.png', but its images are 0.a.png, 0.b.png",
        ),
        (
            {"png": png(1), "json": {"prompt": "x", "images": ["c.png", "d.png"]}},
            "its .json names the image 'c.png', but its images are 0.png",
        ),
    ],
)
def test_a_name_that_no_member_has_is_reported(members, reason, tmp_path):
    assert row_of(archive_of(members, tmp_path)).error == reason


def test_columns_of_media_that_text_ignores_are_reported(tmp_path):
    members = {"png": png(1), "mp4": b"x", "wav": b"y", "json": {"prompt": "x", "response": "y"}}
    row = row_of(archive_of(members, tmp_path)).values
    assert row is not None
    plain = find_format(list(row), "auto", {}, "sft")
    assert plain.unread_columns(row) == ["videos", "audios", "images"]
    assert reads_images(plain, ImageOpener(tmp_path)).unread_columns(row) == ["videos", "audios"]


def of_tools(messages: list[dict]) -> list[dict]:
    return [
        {key: message[key] for key in ("role", "content")}
        for message in messages
        if message["role"] == "tool"
    ]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_with_images_becomes_messages_and_images(name, folder):
    row, expected, widths = ROWS[name]
    messages, found = read(row, folder)
    if "tool" in name:
        messages = of_tools(messages)
    assert (messages, found) == (expected, widths)


@pytest.mark.parametrize("images", [{}, {"images": []}, {"image": None}, {"images": ""}])
def test_without_images_a_mark_stays_text(images, folder):
    row = {"messages": [said(text("<image> in HTML")), said(text("<image>"), role="assistant")]}
    plain = find_format(["messages"], "auto", {}, "sft").convert(row)
    assert converted({**row, **images}, folder) == plain
    assert plain.images == [] and plain.messages[0]["content"] == "<image> in HTML"


PLACE = "\U000f49e1\U000f49e2"
TEXTS = {
    "a caption": ({"text": "A heron.", "image": "b.png"}, (f"{PLACE}A heron.", [2])),
    "marks": (
        {"text": "First <image>, then <image>.", "images": ["b.png", "a.png"]},
        (f"First {PLACE}, then {PLACE}.", [2, 1]),
    ),
    "a mark without images": ({"text": "In HTML: <image>"}, ("In HTML: <image>", [])),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_has_the_places_of_its_images(name, folder):
    row, expected = TEXTS[name]
    sample = converted(row, folder)
    assert (sample.text, [image.width for image in sample.images]) == expected


def test_captions_of_webdataset_have_their_images(folder):
    path = archive_of({"jpg": png(5), "txt": b"A heron."}, folder)
    sample = converted(row_of(path).values, folder)
    assert sample.text == f"{PLACE}A heron." and sample.images[0].width == 5


REFUSED = {
    "a text with too many marks": (
        {"text": "<image> <image>", "image": "a.png"},
        "^it has 2 places for images .*, but 1 in a column",
    ),
    "an image that is absent": (
        {"prompt": "What?", "response": "x", "images": ["a.png", "no.png"]},
        "^image 2: .*/no.png does not exist$",
    ),
    "a damaged image": (
        {"messages": answered(A, {"type": "image", "image": {"bytes": b"no image"}})},
        "^image 2: it is not an image of a known format",
    ),
    "a remote image": (
        {"messages": answered({"type": "image_url", "image_url": {"url": "http://a.b/c.png"}})},
        "^image 1: 'http://a.b/c.png' is a remote URL",
    ),
    "null": ({"prompt": "What?", "response": "x", "images": [None]}, "^image 1: .*not a NoneType"),
    "more marks than images": (
        {"prompt": "<image><image>", "response": "x", "image": "a.png"},
        "^it has 2 places for images .*, but 1 in a column",
    ),
    "more images than marks": (
        {"prompt": "<image>", "response": "x", "images": ["a.png", "b.png"]},
        "^it has 1 places for images .*, but 2 in a column",
    ),
    "parts without images": (
        {"messages": answered(IMAGE)},
        "1 places for images .*, but 0 in a col",
    ),
    "images of its own and of a column": (
        {"messages": answered(A), "images": ["a.png"]},
        "it has 0 places for images .*, but 1 in a column, beside 1 in its messages",
    ),
    "a mark beside an image of its own": (
        {"messages": answered(A, text("<image>"))},
        "it has 1 places for images .*, but 0 in a column, beside 1 in its messages",
    ),
    "an index outside the column": (
        {"messages": answered({"type": "image", "index": 1}), "images": ["a.png"]},
        "it has 1 places for images .*, but 1 in a column",
    ),
    "an image of the assistant": (
        {"messages": [said(text("Draw")), said(text("Here: "), A, role="assistant")]},
        "a message of the assistant has an image or the mark <image>; models write text alone",
    ),
    "a mark of the assistant": (
        {"prompt": "<image>", "response": "<image>", "images": ["a.png", "b.png"]},
        "a message of the assistant has an image or the mark <image>",
    ),
    "an image in reasoning": (
        {
            "messages": [
                said(text("What?")),
                said({"type": "thinking", "content": [A]}, text("yes"), role="assistant"),
            ]
        },
        "an image is in a part of a message that is no content, such as reasoning or a call",
    ),
    "characters of places": (
        {"messages": answered(A, text("\U000f49e10\U000f49e2"))},
        "its text contains the characters U.F49E1 and U.F49E2",
    ),
    "two columns": (
        {"prompt": "What?", "response": "x", "image": "a.png", "images": ["a.png"]},
        "images in both columns image and images; keep one",
    ),
    "two files of datasets": (
        {"old_file_name": "a.png", "new_file_name": "b.png", "question": "a", "answer": "b"},
        "both columns old_file_name and new_file_name; name one of them with --dataloader.columns",
    ),
    "no user": (
        {"messages": [{"role": "assistant", "content": "x"}], "image": "a.png"},
        "it has images, but no message of the user",
    ),
    "a video": (
        {"messages": answered({"type": "video", "video": "a.mp4"})},
        "a part of type 'video'; only text is supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_whose_images_cannot_be_used_is_broken(name, folder):
    row, reason = REFUSED[name]
    with pytest.raises(BrokenSample, match=reason):
        converted(row, folder)


def test_an_empty_row_is_reported_before_its_images_are_opened(folder):
    with pytest.raises(EmptySample, match="response is empty"):
        converted({"prompt": "<image>", "response": "", "image": "no.png"}, folder)


def in_pair(words: str) -> list[dict]:
    return [{"role": "assistant", "content": words}]


QUESTION, BOTH = [said(IMAGE, text("What?"))], {"chosen": in_pair("yes"), "rejected": in_pair("no")}
OF_B = [said(B, text("What?"))]
PAIRS = {
    "TRL": {"images": ["b.png"], "prompt": QUESTION, **BOTH},
    "TRL, implicit prompt": {
        "images": ["b.png"],
        **{side: QUESTION + answer for side, answer in BOTH.items()},
    },
    "parts": {"prompt": OF_B, **BOTH},
    "parts, implicit prompt": {side: OF_B + answer for side, answer in BOTH.items()},
    "renamed": {f"{side}_messages": OF_B + answer for side, answer in BOTH.items()},
    "RLHF-V": {"image": {"bytes": png(2)}, "question": "What?", "chosen": "yes", "rejected": "no"},
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": "<image>What?"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
        "images": ["b.png"],
    },
    "ms-swift": {
        "messages": [{"role": "user", "content": "<image>What?"}, *in_pair("yes")],
        "rejected_response": "no",
        "images": ["b.png"],
    },
    "ms-swift, messages": {
        "messages": [*OF_B, *in_pair("yes")],
        "rejected_messages": [*OF_B, *in_pair("no")],
    },
    "ms-swift, images of both": {
        "messages": [*QUESTION, *in_pair("yes")],
        "rejected_response": in_pair("no"),
        "images": ["b.png"],
        "rejected_images": ["b.png"],
    },
    "Alpaca": {"instruction": "What?", "chosen": "yes", "rejected": "no", "images": ["b.png"]},
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_has_the_images_of_its_prompt(name, folder):
    before = repr(PAIRS[name])
    pair = converted(PAIRS[name], folder, kind="preference")
    assert isinstance(pair, Pair)
    assert pair.prompt.messages == QUESTION
    assert [image.width for image in pair.prompt.images] == [2]
    assert (pair.chosen, pair.rejected) == (in_pair("yes"), in_pair("no"))
    assert repr(PAIRS[name]) == before


def test_images_of_several_turns_of_a_prompt_keep_their_order(folder):
    prompt = [said(C), *in_pair("c"), said(text("and "), A)]
    row = {side: prompt + answer for side, answer in BOTH.items()}
    pair = converted(row, folder, kind="preference")
    assert [image.width for image in pair.prompt.images] == [3, 1]
    assert pair.prompt.messages == [said(IMAGE), *in_pair("c"), said(text("and "), IMAGE)]


BROKEN_PAIRS = {
    "another image of the other prompt": (
        {"chosen": [said(A), *in_pair("yes")], "rejected": [said(B), *in_pair("no")]},
        "chosen and rejected have different images",
    ),
    "an image after the answer": (
        {"prompt": "What?", "chosen": [*in_pair("yes"), said(A)], "rejected": in_pair("no")},
        "chosen and rejected have different images, or images besides",
    ),
    "an image after both answers": (
        {"prompt": "Hi", **{side: [*one, said(A), *one] for side, one in BOTH.items()}},
        "chosen has an image or the mark <image> in or after the answer",
    ),
    "a mark in an answer": (
        {"prompt": "What?", "chosen": "a", "rejected": "an <image>", "image": "a.png"},
        "rejected has an image or the mark <image>",
    ),
    "too few images": (
        {"prompt": "<image> or <image>", "chosen": "a", "rejected": "b", "image": "a.png"},
        "it has 2 places for images .* but 1 in a column",
    ),
    "no file": (
        {"prompt": "What?", "chosen": "a", "rejected": "b", "image": "none.png"},
        "image 1: .*none.png does not exist",
    ),
    "other images of the rejected answer": (
        {
            "messages": [*QUESTION, *in_pair("yes")],
            "rejected_response": "no",
            "images": ["a.png"],
            "rejected_images": ["b.png"],
        },
        "rejected_images has other images",
    ),
    "no answer": (
        {"messages": OF_B, "rejected_response": "no"},
        "messages must end with the chosen answer",
    ),
}


@pytest.mark.parametrize("name", BROKEN_PAIRS)
def test_a_pair_whose_images_cannot_be_used_is_broken(name, folder):
    row, reason = BROKEN_PAIRS[name]
    with pytest.raises(BrokenSample, match=reason):
        converted(row, folder, kind="preference")


def test_a_function_may_return_pairs_with_images(folder):
    format = reads_images(
        function_format(lambda row: {"prompt": row["ask"], **BOTH}, "preference"),
        ImageOpener(folder),
    )
    pair = format.convert({"ask": OF_B})
    assert pair.prompt.messages == QUESTION and pair.prompt.images[0].width == 2


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [said(B, text("What?"))]},
        {"prompt": [said(B, text("What?"))]},
        {"prompt": "<image>What?", "image": "b.png"},
        {"question": "What?", "images": ["b.png"]},
        {"problem": "What?", "image": {"bytes": png(2), "path": None}},
        {"messages": [said(IMAGE, text("What?"))], "images": ["b.png"]},
    ],
)
def test_prompts_with_images_are_read(row, folder):
    """Rewards get the row without bytes, which would be stored once more."""
    sample = converted({**row, "answer": "7"}, folder, kind="prompt")
    assert sample.prompt.messages == [said(IMAGE, text("What?"))]
    assert [image.width for image in sample.prompt.images] == [2]
    assert sample.answer == "7"
    without = {"bytes": None, "path": None}
    images = {"image": without} if isinstance(row.get("image"), dict) else {}
    assert sample.row == {**row, **images, "answer": "7"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>Same? <image>", "images": [png(5), {"bytes": png(6), "path": None}]},
        {"messages": [said({"type": "image", "bytes": png(5)}, text("What?"))]},
        {"messages": [said({"type": "image", "image": {"bytes": png(5)}}, text("What?"))]},
        {
            "messages": [
                said({"type": "image_url", "image_url": {"url": "x.png"}}, text("What?")),
                {"role": "assistant", "content": "It is 5."},
                said(text("And this? <image>")),
            ],
            "images": [{"bytes": png(6), "path": "d/y.png"}, {"bytes": png(5), "path": "x.png"}],
        },
    ],
)
def test_rows_without_content_take_their_images_again(row, folder):
    """A reward model reads the row, and the images of the prompt."""
    prompt = converted({**row, "answer": "7"}, folder, kind="prompt")
    assert {image.width for image in prompt.prompt.images} <= {5, 6}
    plain = find_format(list(prompt.row), "auto", {}, "prompt")
    again = reads_images(plain, GivenImages(prompt.prompt.images)).convert(prompt.row)
    assert again.prompt == prompt.prompt
    with pytest.raises(BrokenSample, match="the row has more images than the 0 given for it"):
        reads_images(plain, GivenImages([])).convert(prompt.row)


def test_a_named_column_of_images_is_read_for_prompts(folder):
    row = {"prompt": "What?", "answer": "7", "picture": "b.png"}
    sample = converted(row, folder, kind="prompt", mapping={"image": "picture"})
    assert [image.width for image in sample.prompt.images] == [2]


def test_renamed_columns_are_read(folder):
    row = {"ask": "What?", "tell": "yes", "images": ["b.png"]}
    mapping = {"prompt": "ask", "response": "tell"}
    assert read(row, folder, mapping=mapping) == (ONE, [2])
    row = {"chat": json.dumps(answered(B, text("What?")))}
    assert read(row, folder, mapping={"messages": "chat"}) == (ONE, [2])


@pytest.mark.parametrize("name", ["image", "images"])
def test_another_column_of_images_may_be_named(name, folder):
    row = {"prompt": "What?", "response": "yes", "picture": "b.png"}
    assert read(row, folder, mapping={name: "picture"}) == (ONE, [2])
    plain = find_format(list(row), "auto", {name: "picture"}, "sft")
    with pytest.raises(UserError, match="names images .*, and this configuration trains on text"):
        plain.convert(row)
    format = reads_images(plain, ImageOpener(folder))
    assert format.unread_columns({**row, "image": "a.png"}) == ["image"]
    assert format.convert({**row, "image": "a.png"}).images[0].width == 2
    with pytest.raises(
        UserError, match="the rows have no column 'pictures'; did you mean 'picture"
    ):
        find_format(list(row), "auto", {name: "pictures"}, "sft")
    row = {"prompt": "What?", "chosen": "yes", "rejected": "no", "picture": "b.png"}
    pair = converted(row, folder, kind="preference", mapping={name: "picture"})
    assert pair.prompt.messages == ONE[:1] and pair.prompt.images[0].width == 2


@pytest.mark.parametrize(
    "name", ["picture", "image_1", "image2", "Image_Path", "img", "screenshots"]
)
def test_a_column_that_may_have_images_is_reported(name, folder):
    row = {"prompt": "What?", "response": "yes", name: "b.png"}
    plain = find_format(list(row), "auto", {}, "sft")
    for format in (plain, reads_images(plain, ImageOpener(folder))):
        assert format.unread_columns(row) == [name]
    assert plain.unread_columns({"imagenet": 1, "imagine": 1, name: None}) == []


def with_parts(row):
    if row["name"] == "none":
        return None
    return {"messages": answered({"type": "image", "image": row["name"]}, text("What?"))}


def with_column(row):
    return {"prompt": "What?", "response": "yes", "images": [row["name"]]}


@pytest.mark.parametrize("function", [with_parts, with_column])
def test_a_function_may_return_images(function, folder):
    plain = function_format(function, "sft")
    format = reads_images(plain, ImageOpener(folder))
    conversation = format.convert({"name": "b.png", "image": "ignored"})
    assert conversation.messages == ONE and [one.width for one in conversation.images] == [2]
    assert format.name == plain.name and format.unread_columns({"image": "x"}) == []
    with pytest.raises(BrokenSample, match="image 1: .*no.png does not exist"):
        format.convert({"name": "no.png"})
    with pytest.raises(BrokenSample, match="the function .* failed: KeyError"):
        format.convert({})


def test_a_function_may_drop_rows(folder):
    format = reads_images(function_format(with_parts, "sft"), ImageOpener(folder))
    assert format.convert({"name": "none"}) is None


def test_the_fingerprint_depends_on_the_folder(folder, tmp_path):
    plain = find_format(["messages"], "auto", {}, "sft")
    keys = [
        reads_images(plain, opener).fingerprint
        for opener in (ImageOpener(folder), ImageOpener(None, str(folder)), ImageOpener(tmp_path))
    ]
    assert keys[0] == keys[1] != keys[2] and plain.fingerprint not in keys


def opened_rows(dataset: Path, folder: Path | None = None) -> list[tuple[list, list[int]]]:
    source = resolve_source(str(dataset), catalog=CHAT_DATASETS)
    format = find_format(first_columns(source), "auto", {}, "sft")
    opener = ImageOpener(folder_of(source))
    convert = reads_images(format, opener).convert
    samples = [convert(row.values) for row in source.rows(lambda _: None)]
    return [(one.messages, [image.width for image in one.images]) for one in samples]


def test_images_of_datasets_are_read_from_parquet_and_its_own_folder(folder):
    import datasets

    features = datasets.Features(
        {
            "messages": [
                {
                    "role": datasets.Value("string"),
                    "content": [
                        {"type": datasets.Value("string"), "text": datasets.Value("string")}
                    ],
                }
            ],
            "images": [datasets.Image()],
        }
    )
    rows = [
        {
            "messages": answered(IMAGE, text("What?"))[:1] + [said(text("yes"), role="assistant")],
            "images": [image],
        }
        for image in (
            Image.new("RGB", (5, 1)),
            {"bytes": png(6), "path": "x.png"},
            str(folder / "b.png"),
        )
    ]
    data = datasets.Dataset.from_list(rows, features=features)
    data.to_parquet(folder / "rows.parquet")
    data.save_to_disk(folder / "saved")
    for name in ("rows.parquet", "saved"):
        assert opened_rows(folder / name) == [(ONE, [5]), (ONE, [6]), (ONE, [2])]


def test_images_are_found_beside_the_file_that_names_them(tmp_path):
    for name in ("top", "deep/inner"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "top/a.png").write_bytes(png(1))
    (tmp_path / "deep/inner/a.png").write_bytes(png(2))
    line = json.dumps({"prompt": "What?", "response": "yes", "image": "a.png"})
    for name in ("top/rows.jsonl", "deep/inner/rows.jsonl"):
        (tmp_path / name).write_text(line)
    assert opened_rows(tmp_path / "top/rows.jsonl") == [(ONE, [1])]
    assert opened_rows(tmp_path / "deep/inner/rows.jsonl") == [(ONE, [2])]
    assert opened_rows(tmp_path / "top") == [(ONE, [1])]
    assert opened_rows(tmp_path / "deep/*/rows.jsonl") == [(ONE, [2])]
    with pytest.raises(BrokenSample, match=f"image 1: {tmp_path}/deep/a.png does not exist"):
        opened_rows(tmp_path / "deep")


def test_the_folder_of_data(tmp_path, monkeypatch):
    for name in ("a/x.jsonl", "b/c/y.jsonl"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    monkeypatch.chdir(tmp_path)

    def found(dataset: str) -> Path | None:
        return folder_of(resolve_source(dataset, catalog=CHAT_DATASETS))

    data = tmp_path / "data"
    assert found("data") == found("data/**/*.jsonl") == found(str(data)) == data
    assert found("data/a/x.jsonl") == found("data/a/*") == data / "a"
    assert found("data/b") == data / "b" and found("data/b/c/y.jsonl") == data / "b/c"
    assert found(".") == tmp_path
    assert found("chats") is None
    monkeypatch.chdir(data / "a")
    assert found("x.jsonl") == data / "a"


def test_an_image_root_that_is_absent_is_named():
    with pytest.raises(UserError, match="--dataloader.image_root 'nothing' is not a folder"):
        ImageOpener(None, "nothing")
