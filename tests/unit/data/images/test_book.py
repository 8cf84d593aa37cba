"""Prompts with images as tokens: those of transformers' processors, which fill the same places."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megarl.data.conversations import Encoder
from megarl.data.images.book import Images, cut_at_borders
from megarl.data.images.names import image_ids, key_of, mark_of, row_of
from megarl.data.prompt import Prompt
from megarl.data.prompts import load_prompts
from megarl.errors import UsageError
from tests.helpers.texts.picture_prompts import PROCESSORS, encoded, encoder_of, picture, write_folder
from tests.helpers.tiers import by_default
from tests.helpers.worlds import on_each_rank

PICTURES = [picture(300, 200, 1), picture(96, 128, 2)]


# As the published processor_config.json says.
OF_WHOLE = {
    "mistral3": {"patch_size": 14, "spatial_merge_size": 2},
    "llava": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
}


def processor_of_transformers(folder: Path, family: str):
    """The whole processor of a family with the folder's tokenizer, as published but for videos, which need another
    package."""
    import transformers

    settings = dict(PROCESSORS[family])
    name, kind = settings.pop("processor_class"), settings.pop("image_processor_type").removesuffix("Fast")
    unchecked = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
    of_family = transformers
    if family == "mistral3":  # its module imports one that needs torchvision
        from transformers.models.pixtral import image_processing_pil_pixtral

        sys.modules["transformers.models.pixtral.image_processing_pixtral"] = image_processing_pil_pixtral
        of_family = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    whole = type(name, (getattr(of_family, name),), unchecked)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pillow = getattr(transformers, f"{kind}Pil")(**settings)
    return whole(pillow, tokenizer, chat_template=tokenizer.chat_template, **OF_WHOLE.get(family, {}))


@pytest.mark.parametrize("family", by_default(PROCESSORS, ["qwen3_vl", "glm4v", "mistral3"]))
@on_each_rank()
def test_ids_and_pixels_are_those_of_transformers(rank, family, tmp_path):
    folder = write_folder(tmp_path / "folder", family)
    encoder, reference = encoder_of(folder), processor_of_transformers(folder, family)
    refs = [encoder.images.add_bytes(encoded(each)) for each in PICTURES]
    content = f"{mark_of(refs[0])}\nWhat is the picture? {mark_of(refs[1])}And{mark_of(refs[1])}"
    ids = encoder.prompt(Prompt(0, [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]))
    parts = [{"type": "image"}, {"type": "text", "text": "\nWhat is the picture? "}, {"type": "image"},
             {"type": "text", "text": "And"}, {"type": "image"}]  # fmt: skip
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = reference(text=[text], images=[*PICTURES, PICTURES[1]], return_tensors="np")
    place = reference.image_token_id
    assert place in ids or any(token < 0 for token in ids)
    assert [place if token < 0 else token for token in ids] == expected["input_ids"][0].tolist()
    pixels = [encoder.images.pixels(key_of(token)) for token in ids if token < 0 and row_of(token) == 0]
    if "image_grid_thw" in expected:
        assert [each.grid for each in pixels] == list(map(tuple, expected["image_grid_thw"].tolist()))
        assert np.array_equal(np.concatenate([each.values for each in pixels]), expected["pixel_values"])
    else:  # padded to the largest
        for each, theirs in zip(pixels, expected["pixel_values"], strict=True):
            height, width = each.values.shape[2:]
            assert np.array_equal(each.values[0], theirs[:, :height, :width])
            assert each.grid == (1, height // 14, width // 14) and not theirs[:, height:].any()
    rows = [token for each in pixels for token in image_ids(each.key, each.tokens)]
    assert len(ids) == sum(token >= 0 for token in ids) + len(rows)
    assert [token for token in ids if token < 0] == rows and pixels[1].digest == pixels[2].digest


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Encoder:
    return encoder_of(write_folder(tmp_path_factory.mktemp("model") / "folder"))


def asked(content: str) -> Prompt:
    return Prompt(0, [{"role": "user", "content": content}])


def test_what_text_spells_is_text(encoder):
    """Beside an image: the placeholder, and the mark of an image that the run does not know, or that the policy
    writes."""
    ref = encoder.images.add_bytes(encoded(PICTURES[1]))
    place = encoder.tokenizer.special["<|image_pad|>"]
    spelt = f"<|image_pad|> <|vision_start|> \ufdd2 {mark_of(ref).replace(ref.digest, 'a' * 64)}"
    ids = encoder.prompt(asked(f"{spelt}{mark_of(ref)}{spelt}"))
    assert place not in ids and [token for token in ids if token < 0] == encoder.images.ids(ref)
    plain = Encoder(encoder.tokenizer, type(encoder.template)(encoder.template.source, encoder.tokenizer))
    assert encoder.prompt(asked(spelt)) == plain.prompt(asked(spelt))  # and without one, nothing is otherwise
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark_of(ref)}]
    assert all(token >= 0 for ids, _ in encoder.conversation(turns) for token in ids)


def test_a_template_that_leaves_images_out_is_an_error(encoder):
    ref = encoder.images.add_bytes(encoded(PICTURES[1]))
    source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    template = type(encoder.template)(source, encoder.tokenizer, images=encoder.images)
    with pytest.raises(UsageError, match=r"the template writes 0 <\|image_pad\|> for 1 images"):
        Encoder(encoder.tokenizer, template).prompt(asked(mark_of(ref)))


def test_prompts_with_other_images_are_two(encoder):
    refs = [encoder.images.add_bytes(encoded(each)) for each in PICTURES]
    one, other = (asked(mark_of(ref) + "a") for ref in refs)
    assert one.key != other.key and encoder.prompt(one) != encoder.prompt(other)


def test_a_copy_knows_no_image_and_images_are_forgotten(encoder):
    import pickle

    ref = encoder.images.add_bytes(encoded(picture(64, 64, 9)))
    copied = pickle.loads(pickle.dumps(encoder))
    assert len(copied.images) == 0 and copied.fingerprint == encoder.fingerprint
    key = encoder.images.key(ref)
    assert encoder.images.of_token(image_ids(key, 1)[0]) == ref
    encoder.images.forget([encoder.images.add_bytes(encoded(picture(64, 64, 9)))])
    assert encoder.images.of_token(image_ids(key, 1)[0]) == ref  # somebody else still needs it
    encoder.images.forget([ref])
    with pytest.raises(UsageError, match="is in none of the run's data"):
        encoder.images.pixels(key)


def test_a_picture_that_changes_after_it_was_read(encoder, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(picture(64, 64, 5)))
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": asked("a").prompt, "image": "a.png"}) + "\n")
    (prompt,) = load_prompts(str(tmp_path / "p.jsonl"), images=encoder.images)
    (tmp_path / "a.png").write_bytes(encoded(picture(64, 64, 6)))
    with pytest.raises(UsageError, match="a.png: has changed since the data were read"):
        encoder.images.pixels(encoder.images.key(prompt.images[0]))


def test_limits_count_the_tokens_of_images(encoder, tmp_path):
    big, small = encoded(picture(900, 900)), encoded(picture(64, 64))
    for name, data in {"big.png": big, "small.png": small}.items():
        (tmp_path / name).write_bytes(data)
    rows = [{"prompt": asked("a").prompt, "image": f"{name}.png"} for name in ("small", "big")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(str(tmp_path / "p.jsonl"), images=encoder.images)
    counts = [sum(token < 0 for token in ids) for ids in prompts.encode(encoder)]
    assert counts == [8 * 8, 28 * 28]  # at least 65,536 pixels; sides of 32
    with pytest.raises(
        UsageError, match=r"p.jsonl:2: the prompt has .* tokens, 784 of them of images, which --image-max"
    ):
        prompts.encode(encoder, 300)
    kept, tokens = prompts.encode_fitting(encoder, 300)
    assert len(kept) == 1 and tokens[0] == encoder.prompt(prompts[0])


def test_cuts_are_at_borders_of_images():
    ids = [5, 6, *image_ids(77, 4), 7, *image_ids(77, 2), *image_ids(78, 2)]
    assert [cut_at_borders(ids, n) for n in range(len(ids) + 1)] == [0, 1, 2, 6, 6, 6, 6, 7, 9, 9, 11, 11]
    broken = [5, *ids[2:4], 90, *ids[4:6], 91, 7]  # an image with breaks, which are text
    assert [cut_at_borders(broken, n) for n in range(len(broken) + 1)] == [0, 1, 6, 6, 6, 6, 6, 7, 8]


def test_why_there_is_no_processor(tmp_path):
    with pytest.raises(UsageError, match="has images; because"):
        Images("because").processor  # noqa: B018


def test_thumbnails_are_small_pictures_of_what_texts_name(encoder, tmp_path):
    refs = [encoder.images.add_bytes(encoded(picture(200 + n, 100, n))) for n in range(20)]
    texts = [f"{ref.name} and [image 1×1 sha:00000000]" for ref in refs]
    encoder.images.write_thumbnails(tmp_path / "thumbnails", texts)
    sizes = {path.stem: Image.open(path).size for path in (tmp_path / "thumbnails").iterdir()}
    assert len(sizes) == 15 and sizes[refs[0].digest[:8]] == (64, 32)  # the second of 16 names is of no image


def kept_in(encoder: Encoder, own: Path | None, *others: Path) -> Images:
    """Images of another process with these folders."""
    images = Images(encoder.images.processor, 2)
    images.keep_in(own, others)
    return images


def test_images_of_environments_are_found_by_every_process_of_a_run(encoder, tmp_path):
    one, data = kept_in(encoder, tmp_path / "images"), encoded(PICTURES[0])
    for _ in range(2):
        one.keep(data)
    (path,) = (tmp_path / "images").iterdir()
    assert path.read_bytes() == data
    ref = one.found(mark_of(one.add_bytes(data)))[0]
    one.forget([ref])  # of a client that has sent the same
    ids = one.ids(ref)
    other, another = kept_in(encoder, None, tmp_path / "images"), kept_in(encoder, tmp_path / "b", tmp_path / "images")
    assert other.of_token(ids[0]) == one.of_token(ids[0]) != None and other.of_data == 0  # noqa: E711
    assert np.array_equal(another.pixels(key_of(ids[0])).values, one.pixels(key_of(ids[0])).values)
    assert [each.digest for each in kept_in(encoder, None, tmp_path / "images").found(mark_of(ref))] == [ref.digest]
    decode = "".join
    text = one.text([65, *ids, *ids, 66, *image_ids(77, 2)], lambda run: decode(map(chr, run)))
    assert text == f"A{ref.name}{ref.name}B[image]"
    another.take_over()
    path.unlink()
    another.check_known(mark_of(ref))
    with pytest.raises(UsageError, match="of an environment is gone; images/ of the run had it"):
        kept_in(encoder, tmp_path / "images").check_known(f"a{mark_of(ref)}")


def test_images_of_environments_may_be_refused(encoder, tmp_path):
    images = kept_in(encoder, tmp_path / "images")
    images.shown_problem = "a judge reads none"
    with pytest.raises(UsageError, match="has images; a judge reads none"):
        images.keep(encoded(PICTURES[0]))
    assert not (tmp_path / "images").exists()
