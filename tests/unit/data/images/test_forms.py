"""Images in the forms of published data: each becomes the same prompt; wrong ones are one line."""

import base64
import json
import os
from pathlib import Path

import pytest

from megarl.data.columns import Columns
from megarl.data.images.names import key_of, readable
from megarl.data.prompts import PromptSet, load_prompts
from megarl.errors import UsageError
from tests.helpers.texts.picture_prompts import (
    PUBLISHED,
    encoded,
    encoder_of,
    picture,
    write_folder,
    write_published,
)

ASKED = "What is it?"
RED, BLUE = encoded(picture(96, 64, 1)), encoded(picture(64, 128, 2), "JPEG")


def url_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


URL, BASE64 = url_of(RED), base64.b64encode(RED).decode()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return encoder_of(write_folder(tmp_path_factory.mktemp("model") / "folder"))


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder of data with pictures beside and outside of it."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    for name, data in {"data/red.png": RED, "data/sub/blue.jpg": BLUE, "secret.png": RED}.items():
        (tmp_path / name).write_bytes(data)
    os.symlink(tmp_path / "secret.png", folder / "link.png")
    os.symlink("red.png", folder / "inside.png")
    os.mkfifo(folder / "fifo.png")
    (folder / "cut.png").write_bytes(RED[:-90])
    return folder


def load(encoder, folder: Path, rows: list[dict], suffix: str = "jsonl", **named) -> PromptSet:
    path, columns = folder / f"prompts.{suffix}", Columns(**named)
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return load_prompts(str(path), columns=columns, images=encoder.images)


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def parts(*given) -> list[dict]:
    return user([*given, {"type": "text", "text": ASKED}])


# What a line of a library's data says -> the images of its prompt, before its text.
LINES = {
    "TRL's column": ({"prompt": user(ASKED), "images": ["red.png", "sub/blue.jpg"]}, 2),
    "TRL's single image": ({"prompt": user(ASKED), "image": "red.png"}, 1),
    "TRL's parts": ({"prompt": parts({"type": "image"}), "images": ["red.png"]}, 1),
    "verl": ({"prompt": user(f"<image><image>{ASKED}"), "images": [{"image": "red.png"}, {"path": "sub/blue.jpg"}],
              "data_source": "x", "reward_model": {"ground_truth": "2"}}, 2),
    "numbered": ({"prompt": user(f"<image 2><image 1>{ASKED}"), "images": ["sub/blue.jpg", "red.png"]}, 2),
    "a text": ({"problem": f"<image>{ASKED}", "images": ["red.png"], "answer": "2"}, 1),
    "OpenAI's parts": ({"prompt": parts({"type": "image_url", "image_url": {"url": URL, "detail": "low"}})}, 1),
    "own parts": ({"prompt": parts({"type": "image", "image": "red.png"}), "answer": "2"}, 1),
    "a path's part": ({"prompt": parts({"type": "image", "path": "red.png"})}, 1),
    "a URL of a file": ({"prompt": user(ASKED), "image": "file://inside.png"}, 1),
    "a data URL": ({"prompt": user(ASKED), "images": [URL]}, 1),
    "a data URL of any kind": ({"prompt": user(ASKED), "images": [URL.replace("/png", "")]}, 1),
    "base64": ({"prompt": user(ASKED), "images": [BASE64, base64.b64encode(BLUE).decode()]}, 2),
    "columns of one each": ({"question": f"<image 2><image 1>{ASKED}", "image_1": "sub/blue.jpg", "image_2": "red.png",
                             "image_3": None}, 2),
    "one such column": ({"question": ASKED, "image_1": "red.png"}, 1),
    "a link inside": ({"prompt": user(ASKED), "images": ["inside.png"]}, 1),
    "nulls": ({"prompt": user(f"{ASKED}<image>"), "images": None, "answer": "2"}, 0),
    "no image": ({"prompt": user(ASKED), "images": []}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_lines_of_json(name, encoder, files):
    row, count = LINES[name]
    prompts = load(encoder, files, [row])
    (prompt,), expected = prompts, [RED, BLUE][:count]
    assert [prompts.images.read(ref) for ref in prompt.images] == expected
    marks = "".join(ref.name for ref in prompt.images)
    assert prompt.text == marks + ASKED + "<image>" * (name == "nulls")  # a text without a column
    keys = dict.fromkeys(key_of(token) for token in encoder.prompt(prompt) if token < 0)
    assert list(keys) == list(map(encoder.images.key, prompt.images))
    assert prompt.metadata is None or not {"images", "image"} & set(prompt.metadata)
    if count:
        assert [(ref.width, ref.height) for ref in prompt.images] == [(96, 64), (64, 128)][:count]


@pytest.mark.parametrize("suffix", ["parquet"])
def test_structs_of_datasets_images(suffix, encoder, files):
    """Rows as `datasets` writes its Image, of bytes and of paths, whose other field is null."""
    rows = [
        {"prompt": user(f"<image>{ASKED}"), "images": [{"bytes": RED, "path": "gone.png"}], "answer": "1", "level": 3},
        {"prompt": user(f"<image>{ASKED}"), "images": [{"bytes": None, "path": "sub/blue.jpg"}], "answer": "2",
         "level": 4},
        {"prompt": user(f"<image>{ASKED}"), "images": [{"bytes": RED, "path": None}], "answer": "1", "level": 3},
        {"prompt": user(ASKED), "images": [], "answer": "2", "level": 3},
    ]  # fmt: skip
    prompts = load(encoder, files, rows, suffix)
    assert [[prompts.images.read(ref) for ref in prompt.images] for prompt in prompts] == [[RED], [BLUE], [RED], []]
    assert len(prompts.images) == 2 and prompts[0].key == prompts[2].key != prompts[1].key
    assert [prompt.metadata for prompt in prompts] == [{"level": n} for n in (3, 4, 3, 3)]
    (note,) = [note for note in prompts.notes if "tokens of an image" in note]
    assert "2 images; tokens of an image: median" in note and "images from images" in prompts.notes[0]
    assert "left out" not in prompts.notes[0]


PROMPTS = {  # of data sets: what their prompts, those of the second line, and images are recognised from
    "geo3k": (
        "rl",
        "1",
        "prompt from prompt, answer from reward_model.ground_truth, task from data_source, images from",
    ),
    "rlaif-v": ("reward", None, "prompt from prompt, chosen from chosen, rejected from rejected, images from images"),
    "mmmu": ("rl", "B", "images from image_1, image_2, image_3, image_4, image_5, image_6, image_7, metadata from id,"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets(name, encoder, tmp_path):
    purpose, answer, note = PROMPTS[name]
    path = write_published(name, tmp_path)
    prompts = load_prompts(str(path), columns=Columns(purpose=purpose), images=encoder.images)
    assert note in prompts.notes[0] and "bytes" not in prompts.notes[0] and len(prompts.notes) == 2
    assert len(prompts) == 12 == len(prompts.images) and prompts[1].answer == answer
    for number, prompt in enumerate(prompts):
        (ref,) = prompt.images
        assert prompts.images.read(ref) and (ref.width, ref.height) == [(64, 64), (96, 64), (64, 96)][number % 3]
        twice = name == "mmmu" and number % 2
        assert prompt.text.count(ref.name) == 1 + twice and "<image" not in prompt.text
        assert sum(token < 0 for token in encoder.prompt(prompt)) == encoder.images.tokens(ref) * (1 + twice)
        assert not {each for each in prompt.metadata or () if each.startswith("image")}


def test_a_named_column_is_that_one_alone(encoder, files):
    row = {"question": ASKED, "image_1": "red.png", "image_2": "sub/blue.jpg", "answer": "2"}
    (prompt,) = load(encoder, files, [row], images="image_2")
    assert [ref.height for ref in prompt.images] == [128] and prompt.metadata == {"image_1": "red.png"}


def test_a_named_column_inside_another(encoder, files):
    prompts = load(encoder, files, [{"prompt": user(ASKED), "extra": {"shots": ["red.png"]}}], images="extra.shots")
    assert [ref.width for ref in prompts[0].images] == [96]
    with pytest.raises(UsageError, match="--images-column other: .*has no such column"):
        load(encoder, files, [{"prompt": user(ASKED)}], images="other")


def test_supervised_and_preference_lines(encoder, files):
    turns = [*user(f"<image>{ASKED}"), {"role": "assistant", "content": "A <image>."}]
    (prompt,) = load(encoder, files, [{"messages": turns, "images": ["red.png"]}], purpose="sft")
    assert prompt.images[0].name in readable(prompt.messages[0]["content"])
    assert prompt.messages[1]["content"] == "A <image>."  # what the assistant says is text
    ((ids, mask),) = encoder.conversation(prompt.messages)
    assert any(token < 0 for token in ids) and not any(trained for token, trained in zip(ids, mask, strict=True)
                                                       if token < 0)  # fmt: skip
    pair = {"images": ["red.png"], "chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "B"}]}
    (prompt,) = load(encoder, files, [pair], purpose="reward")
    assert len(prompt.images) == 1 and prompt.images[0].name in prompt.text and prompt.chosen == "A <image>."
    row = {"prompt": ASKED, "chosen": "a", "rejected": "b", "image": "red.png"}
    (prompt,) = load(encoder, files, [row], purpose="reward")
    assert prompt.text == prompt.images[0].name + ASKED


WRONG = {
    "more places": ({"prompt": user("<image><image>"), "images": ["red.png"]}, "has 2 places for images"),
    "a number too many": ({"prompt": user("<image 2>"), "images": ["red.png"]}, "has places for <image 2>, each of"),
    "a number twice": ({"prompt": user("<image 1><image 1>"), "images": ["red.png"]}, "once, and 1 images"),
    "a hole in columns": ({"prompt": user("<image 2>"), "image_1": None, "image_2": "red.png"},
                          "has image_2 and no image_1; numbers of places count the images from 1"),
    "no place of a column's": ({"prompt": user("<image 1>"), "image_1": "red.png", "image_2": "red.png"},
                               "places for <image 1>, each of which may be there once, and 2 images"),
    "its own size": ({"prompt": user(ASKED), "images": [{"image": "red.png", "max_pixels": 9}]},
                     "an image has max_pixels of its own; --image-max-pixels holds for all images"),
    "a part's own size": ({"prompt": parts({"type": "image", "image": "red.png", "min_pixels": 9})},
                          "an image has min_pixels of its own"),
    "fewer places": ({"prompt": user("<image>"), "images": ["red.png", "red.png"]}, "1 places for images"),
    "part without image": ({"prompt": parts({"type": "image"})}, "has 1 places for images"),
    "video": ({"prompt": parts({"type": "image", "image": "red.png"}, {"type": "video", "video": "x"})},
              "a part of the type video; megarl reads text and images"),
    "a place of megarl's own": ({"prompt": parts({"type": "image", "image": "red.png"}, {"type": "all"})},
                                "a part of the type all; megarl reads text and images"),
    "the assistant's": ({"prompt": [parts({"type": "image", "image": URL})[0] | {"role": "assistant"}, *user("b")]},
                        "a message of the assistant has an image"),
    "network": ({"prompt": user(ASKED), "images": ["http://127.0.0.1/x.png"]}, "nothing is downloaded"),
    "other network": ({"prompt": user(ASKED), "images": ["s3://bucket/x.png"]}, "nothing is downloaded"),
    "parent": ({"prompt": user(ASKED), "images": ["../secret.png"]}, "image '../secret.png': is outside of"),
    "absolute": ({"prompt": user(ASKED), "images": ["/etc/hostname"]}, "--images-folder names another folder"),
    "link that leaves": ({"prompt": user(ASKED), "images": ["link.png"]}, "image 'link.png': is outside of"),
    "absent": ({"prompt": user(ASKED), "images": ["none.png"]}, "image 'none.png': cannot be read: No such file"),
    "FIFO": ({"prompt": user(ASKED), "images": ["fifo.png"]}, "is no regular file"),
    "folder": ({"prompt": user(ASKED), "images": ["sub"]}, "image 'sub': cannot be read"),
    "NUL": ({"prompt": user(ASKED), "images": ["a\0.png"]}, "a path has no NUL"),
    "half a character": ({"prompt": user(ASKED), "images": ["\ud800.png"]}, "no half of a character"),
    "a cut picture": ({"prompt": user(ASKED), "images": ["cut.png"]}, "PNG that cannot be decoded"),
    "number": ({"prompt": user(ASKED), "images": [7]}, "a path, bytes, a data: URL or {bytes, path}, not 7"),
    "empty": ({"prompt": user(ASKED), "images": [""]}, "not ''"),
    "empty object": ({"prompt": user(ASKED), "images": [{"x": 1}]}, "an object without bytes, image, path"),
    "no base64": ({"prompt": user(ASKED), "images": ["data:image/png;base64,@@@"]}, "no base64"),
    "another URL": ({"prompt": user(ASKED), "images": ["data:text/html;base64,AAAA"]}, "not 'data:text/html;base64'"),
    "no picture": ({"prompt": user(ASKED), "images": ["prompts.jsonl"]}, "not PNG, JPEG, WebP, GIF or plain BMP"),
    "many": ({"prompt": user(ASKED), "images": [url_of(encoded(picture(8, 8, n))) for n in range(9)]},
             "has 9 images; --max-images allows 8"),
    "no user": ({"prompt": [{"role": "system", "content": "a"}], "images": ["red.png"]}, "no message of a user"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lines(name, encoder, files):
    row, needle = WRONG[name]
    good = {"prompt": user(ASKED), **({"image_1": "red.png"} if "image_1" in row else {"images": ["red.png"]})}
    with pytest.raises(UsageError) as failure:
        load(encoder, files, [good, row])
    line = str(failure.value)
    assert line.startswith(f"--prompts {files}/prompts.jsonl:2: ") and needle in line and "\n" not in line, line


def test_a_snapshot_of_a_hub_leads_to_its_blobs(encoder, files):
    snapshot = files / "snapshots" / "abc" / "data"
    snapshot.mkdir(parents=True)
    (files / "blobs").mkdir()
    (files / "blobs" / "123").write_bytes(RED)
    os.symlink("../../../blobs/123", snapshot / "x.png")
    (prompt,) = load(encoder, snapshot, [{"prompt": user(ASKED), "images": ["x.png"]}])
    assert prompt.images[0].width == 96
    os.symlink("../../../red.png", snapshot / "y.png")
    with pytest.raises(UsageError, match="is outside of"):
        load(encoder, snapshot, [{"prompt": user(ASKED), "images": ["y.png"]}])


def test_without_a_tower_columns_of_images_are_named_and_not_read(files):
    path = files / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": user(ASKED), "images": ["none.png"], "answer": "2"}) + "\n")
    prompts = load_prompts(str(path))
    assert not prompts[0].images and prompts.notes[-1].endswith("the model has no vision tower, or no chat template")
