"""Pictures as models' own processors encode them, in every form that people have, and those that cannot be used."""

from __future__ import annotations

import base64
import io
import multiprocessing
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import ProcessorMixin

from quartet.batch.pictures import is_picture, key_of, keys_in
from quartet.config.errors import UserError
from quartet.text import pictures as pictures_module
from quartet.text.examples import Demonstration
from quartet.text.pictures import (
    Picture,
    PictureCodec,
    PictureError,
    PictureProcessor,
    PictureStore,
    to_picture,
)
from quartet.text.tokenizer import TextCodec, load_tokenizer
from tiny_vision import KINDS, MARKED, make_tokenizer, picture_bytes, save_processor

ONE, OTHER = picture_bytes(), picture_bytes(16, 50, (1, 2, 3))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_processor(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def codecs(directories: dict[str, Path]) -> dict[str, TextCodec]:
    return {kind: codec_at(directory) for kind, directory in directories.items()}


def codec_at(directory: Path) -> TextCodec:
    store = PictureStore(directory / "pictures")
    return TextCodec(load_tokenizer(directory), pictures=PictureCodec(PictureProcessor.load(directory), store))


def part(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def as_processed(codec: TextCodec, messages: Any) -> list[int]:
    """Returns the ids that the processor itself makes."""
    assert codec.pictures is not None
    processor: Any = codec.pictures.processor._processor
    decoded = [
        {
            **turn,
            "content": [
                part(Image.open(io.BytesIO(each["image"].source))) if each["type"] == "image" else each
                for each in ([text(turn["content"])] if isinstance(turn["content"], str) else turn["content"])
            ],
        }
        for turn in messages
    ]
    found = ProcessorMixin.apply_chat_template(processor, decoded, tokenize=True, add_generation_prompt=True)
    return list(found[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sources", [(ONE,), (ONE, OTHER), ()])
def test_ids_are_those_of_the_processor(codecs: dict[str, TextCodec], kind: str, sources: tuple[bytes, ...]) -> None:
    codec = codecs[kind]
    assert codec.pictures is not None
    placed = [part(Picture(source)) for source in sources]
    messages = [
        user(text("hello\n"), *placed, text("\nwhat?")),
        {"role": "assistant", "content": "is"},
        user(text("x\n"), *placed),
    ]
    ids = codec.encode_prompt(messages)
    mark = codec.pictures.processor.placeholder_id
    assert [mark if is_picture(token) else token for token in ids] == as_processed(codec, messages)
    assert len(keys_in(ids)) == len(set(sources))
    shown = codec.render(messages)
    assert codec.decode(ids, skip_special=False).removeprefix("<s>") == shown.removeprefix("<s>")
    assert shown.count(codec.pictures.processor.mark) == 2 * len(sources)
    texts = codec.token_texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == codec.decode(ids, skip_special=False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_tower_takes_is_what_the_processor_makes(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind].pictures
    assert codec is not None
    own: Any = codec.processor._processor
    sources = [picture_bytes(), picture_bytes(40, 24, (9, 99, 199))]
    asked = {"text": [codec.processor.placeholder * 2], "return_tensors": "pt"}
    both = own(images=[[Image.open(io.BytesIO(source)) for source in sources]], **asked)
    placed = codec.placed([user(*(part(source) for source in sources))])
    assert codec.store is not None
    each = [codec.processor.inputs(codec.store.get(picture.key)) for picture in placed]
    assert each[0].keys() <= both.keys()
    assert "input_ids" not in each[0]
    pixels = [one["pixel_values"] for one in each]
    if kind in ("smolvlm", "idefics3"):  # pictures of one prompt stand beside each other
        assert torch.equal(torch.cat(pixels, 1), both["pixel_values"])
    else:
        assert torch.equal(torch.cat(pixels), both["pixel_values"])
    if codec.processor.counts_beside:
        assert all(one["batch_num_images"].tolist() == [2] for one in each)
        assert codec.processor.key(Picture(ONE)) != placed[0].key == codec.processor.key(Picture(ONE, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_alone_are_learned(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    turns = [user(part(ONE), text("what?")), {"role": "assistant", "content": "red"}, user(text("and"), part(OTHER))]
    answer = {"role": "assistant", "content": "blue"}
    ids, mask = codec.encode_conversation([*turns, answer])
    assert not any(learned and is_picture(token) for token, learned in zip(ids, mask, strict=True))
    learned = codec.decode([token for token, keep in zip(ids, mask, strict=True) if keep], skip_special=False)
    assert learned.replace(" ", "") == "red<|im_end|>blue<|im_end|>"
    prompt = codec.encode_prompt(turns)
    assert ids[: len(prompt)] == prompt
    one = codec.encode_example(Demonstration(turns, "blue"))[0]
    assert one == ids[: len(one)]
    assert one[-1] == codec.eos_id
    assert codec.decode_completion(prompt, one[len(prompt) :]).strip() == "blue"
    assert "".join(codec.completion_pieces(prompt, one[len(prompt) :])).strip() == "blue"


def test_marks_of_a_template_say_what_is_learned(directories: dict[str, Path]) -> None:
    turns = [user(part(ONE), text("a")), {"role": "assistant", "content": "b"}]
    for kind in ("qwen2_vl", "smolvlm"):
        codec = codec_at(directories[kind])
        assert codec.pictures is not None
        codec.tokenizer.chat_template = MARKED.replace("IMAGE", repr(codec.pictures.processor.placeholder))
        if kind == "smolvlm":
            with pytest.raises(UserError, match="marks cannot be used with the pictures"):
                codec.encode_conversation(turns)
            continue
        ids, mask = codec.encode_conversation(turns)
        assert ids[: len(codec.encode_prompt(turns[:1]))] == codec.encode_prompt(turns[:1])
        assert codec.decode([t for t, keep in zip(ids, mask, strict=True) if keep], skip_special=False) == "b<|im_end|>"


def test_a_long_prompt_counts_as_too_long(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["qwen2_vl"].limited(10)
    assert len(codec.encode_prompt([user(text("a" * 100_000), part(ONE))])) > 10


def test_pictures_are_shown_whatever_else_is_left_out(codecs: dict[str, TextCodec]) -> None:
    ids = codecs["qwen2_vl"].encode_prompt([user(part(ONE), text("a"))])
    assert codecs["qwen2_vl"].decode(ids) == "user\n<|image_pad|>a\nassistant\n"


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_stand_for_pictures_are_refused(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    assert codec.pictures is not None
    processor = codec.pictures.processor
    for typed in {processor.mark, processor.placeholder}:
        for content in ([part(ONE), text(f"a {typed} b")], [text(f"a {typed} b")]):
            with pytest.raises(UserError, match=r"a text holds .*, which stands for pictures"):
                codec.encode_prompt([user(*content)])
    with pytest.raises(UserError, match="a text holds"):
        codec.encode_prompt(f"a {processor.mark} b")
    with pytest.raises(UserError, match="a text holds"):
        codec.encode_completion([user(part(ONE))], f"is {processor.mark}")


def test_a_template_that_knows_no_pictures_is_refused(directories: dict[str, Path]) -> None:
    codec = codec_at(directories["llava"])
    codec.tokenizer.chat_template = "{% for m in messages %}a{% endfor %}"
    with pytest.raises(UserError, match=r"has no .* for some pictures"):
        codec.encode_prompt([user(part(ONE))])


def test_another_tokenizer_without_the_mark_is_refused(directories: dict[str, Path]) -> None:
    codec = codec_at(directories["qwen2_vl"])
    other = TextCodec(make_tokenizer(KINDS["qwen2_vl"]["template"], []), pictures=codec.pictures)
    with pytest.raises(UserError, match=r"has no .* for some pictures"):
        other.encode_prompt([user(part(ONE))])


def test_models_without_a_processor(directories: dict[str, Path], tmp_path: Path) -> None:
    codec = TextCodec(load_tokenizer(directories["qwen2_vl"]))
    with pytest.raises(UserError, match="no processor for them"):
        codec.encode_prompt([user(part(ONE))])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="no processor for them"):
        PictureProcessor.load(tmp_path)
    assert PictureCodec.of(tmp_path) is None
    (tmp_path / "config.json").write_bytes((directories["llava"] / "config.json").read_bytes())
    with pytest.raises(UserError, match="the model has no processor for pictures"):
        PictureProcessor.load(tmp_path)
    assert PictureCodec.of(tmp_path) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        PictureCodec.of(tmp_path)
    assert PictureCodec.of(directories["llava"]) is not None


def test_a_processor_is_saved_and_sent_as_it_is(directories: dict[str, Path], tmp_path: Path) -> None:
    for kind, directory in directories.items():
        processor = PictureProcessor.load(directory)
        target = tmp_path / kind
        target.mkdir()
        processor.save(target)
        load_tokenizer(directory).save_pretrained(target)
        (target / "config.json").write_bytes((directory / "config.json").read_bytes())
        for other in (PictureProcessor.load(target), pickle.loads(pickle.dumps(processor))):
            assert other.placed(Picture(OTHER)) == processor.placed(Picture(OTHER))


def test_an_older_processor_has_the_chat_template(directories: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directories["qwen2_vl"])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}!"}')
    assert TextCodec(load_tokenizer(tmp_path)).render([{"role": "user", "content": "a"}]) == "a!"


# Sources -------------------------------------------------------------------------------------------------


def test_a_picture_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "a b.png"
    file.write_bytes(ONE)
    url = "data:image/png;base64," + base64.b64encode(ONE).decode()
    in_bytes = [ONE, bytearray(ONE), {"bytes": ONE, "path": "gone.png"}, url, {"url": url}, {"image_url": {"url": url}}]
    for source in in_bytes:
        assert to_picture(source) == Picture(ONE)
    paths = [str(file), file, {"bytes": None, "path": str(file)}, f"file://{tmp_path}/a%20b.png", {"path": "a b.png"}]
    for source in (*paths, "a b.png"):
        found = to_picture(source, tmp_path)
        assert found == Picture(str(file))
        assert found.read() == ONE
    image = Image.open(io.BytesIO(ONE))
    assert to_picture(image).decode().tobytes() == image.tobytes()
    assert to_picture(image) == to_picture(image.copy())
    assert to_picture(found) is found


@pytest.mark.parametrize(
    ("source", "problem", "said"),
    [
        ("https://example.com/a.png", "is on a server", "download it first"),
        ("s3://bucket/a.png", "is on a server", "download it first"),
        ("data:image/png;base64,a_b", "is not valid base64", "data:image/png"),
        ("data:image/png,abc", "is a data URL without base64", "data:image/png"),
        ({"bytes": None, "path": None}, "is neither a path nor bytes", "None"),
        (7, "is neither a path nor bytes", "7"),
        ("", "is neither a path nor bytes", "''"),
    ],
)
def test_what_is_no_picture(source: Any, problem: str, said: str) -> None:
    with pytest.raises(PictureError, match=problem) as refused:
        to_picture(source)
    assert said in str(refused.value)


def bomb() -> bytes:
    """Returns a PNG whose header promises 60,000 by 60,000 pixels."""
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    written = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
        (b"\x00\x00\x00\x18ftypmp42", "cannot be read"),
        (ONE[: len(ONE) // 2], "cannot be decoded"),
        (picture_bytes(200, 200, form="JPEG")[:-300], "cannot be decoded"),
        (picture_bytes(64, 64, form="WEBP")[:-30], "cannot be"),
        (bomb(), "is too large"),
    ],
)
def test_bytes_that_are_no_picture(codecs: dict[str, TextCodec], data: bytes, problem: str) -> None:
    for use in (Picture.size, Picture.decode):
        with pytest.raises(PictureError, match=problem):
            use(Picture(data))
    with pytest.raises(PictureError, match=problem):
        codecs["llava"].encode_prompt([user(part(data))])


def test_more_pixels_than_allowed_are_seen_in_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures_module, "MAX_PIXELS", 40 * 24)
    assert Picture(ONE).size() == (40, 24)
    monkeypatch.setattr(pictures_module, "MAX_PIXELS", 40 * 24 - 1)
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(PictureError, match="is too large"):
        Picture(ONE).decode()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="is not there") as refused:
        Picture(str(tmp_path / "a.png")).read()
    assert "a.png" in refused.value.found
    with pytest.raises(PictureError, match="cannot be read"):
        Picture(str(tmp_path)).read()


def test_what_a_processor_refuses(codecs: dict[str, TextCodec]) -> None:
    with pytest.raises(PictureError, match="cannot be processed") as refused:
        codecs["qwen2_vl"].encode_prompt([user(part(picture_bytes(900, 2)))])
    assert "900 × 2" in refused.value.found


def test_too_many_tokens(codecs: dict[str, TextCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures_module, "MAX_ROWS", 14)
    with pytest.raises(PictureError, match="takes too many tokens"):
        codecs["qwen2_vl"].encode_prompt([user(part(picture_bytes(41, 24)))])


def test_every_kind_of_pixels_becomes_colours() -> None:
    image = Image.open(io.BytesIO(ONE))
    grey = image.convert("L")
    wide = Image.new("I;16", (40, 24), 40_000)
    clear = Image.new("RGBA", (40, 24), (10, 200, 30, 0))
    palette = image.quantize(8)
    for given, expected in [
        (image, image),
        (grey, grey.convert("RGB")),
        (wide, Image.new("RGB", (40, 24), (156,) * 3)),
        (clear, clear.convert("RGB")),
        (palette, palette.convert("RGB")),
        (image.convert("1"), image.convert("1").convert("RGB")),
    ]:
        found = to_picture(given).decode()
        assert found.mode == "RGB"
        assert found.tobytes() == expected.tobytes(), given.mode
    jpeg = io.BytesIO()
    image.convert("CMYK").save(jpeg, "JPEG")
    assert Picture(jpeg.getvalue()).decode().mode == "RGB"


def test_a_picture_is_the_way_up_that_it_is_shown(codecs: dict[str, TextCodec]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Picture(picture_bytes(form="JPEG", exif=exif))
    plain = Picture(picture_bytes(form="JPEG")).decode()
    assert turned.size() == turned.decode().size == (24, 40)
    assert turned.decode().tobytes() == plain.transpose(Image.Transpose.ROTATE_270).tobytes()
    codec = codecs["qwen2_vl"].pictures
    assert codec is not None
    grid = codec.processor.inputs(turned)["image_grid_thw"]
    assert sum(codec.processor.placed(turned).runs) == int(grid.prod()) // 4


def test_the_first_picture_of_an_animation_counts() -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert Picture(file.getvalue()).decode().getpixel((4, 4)) == (255, 0, 0)


# Store and keys ------------------------------------------------------------------------------------------


def test_a_key_is_of_content_and_processor(directories: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(ONE)
    processor = PictureProcessor.load(directories["llava"])
    assert processor.key(Picture(ONE)) == processor.key(Picture(str(file))) != processor.key(Picture(OTHER))
    assert processor.key(Picture(ONE)) == PictureProcessor.load(directories["llava"]).key(Picture(ONE))
    assert processor.key(Picture(ONE)) != PictureProcessor.load(directories["llava_next"]).key(Picture(ONE))


def test_a_store_keeps_links_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(ONE)
    store = PictureStore(tmp_path / "store")
    store.put(1, Picture(str(file)))
    store.put(2, Picture(OTHER, num_beside=3))
    for same in (store, PictureStore(tmp_path / "store")):
        same.put(1, Picture(str(file)))
        same.put(1, Picture(ONE))
        same.put(2, Picture(OTHER, num_beside=3))
        assert same.get(1) == Picture(str(file))
        assert same.get(2) == Picture(OTHER, 1)
        with pytest.raises(UserError, match="key of another one"):
            same.put(1, Picture(OTHER))
    with pytest.raises(UserError, match="the run does not"):
        store.get(3)
    file.unlink()
    with pytest.raises(PictureError, match="is not there"):
        store.get(1).read()


def _put(directory: Path) -> None:
    for key in range(40):
        PictureStore(directory).put(key, Picture(ONE if key % 2 else __file__))


def test_many_processes_fill_a_store(tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=_put, args=(tmp_path,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(list(tmp_path.iterdir())) == 40
    assert PictureStore(tmp_path).get(7).read() == ONE


def test_encoding_puts_pictures_into_the_store(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["gemma3"]
    ids = codec.encode_prompt([user(part(ONE), part(OTHER))])
    assert codec.pictures is not None
    assert codec.pictures.store is not None
    places = list(filter(is_picture, ids))
    assert [codec.pictures.store.get(key_of(places[n])).read() for n in (0, -1)] == [ONE, OTHER]
