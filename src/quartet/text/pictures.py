"""Pictures beside text: where they come from, what a model's processor makes of them, and how texts and ids show them.

A message whose content holds pictures has a list of parts, ``{"type": "text", "text": …}`` and ``{"type": "image",
"image": Picture}``. Three forms of a prompt follow from it, of which the second is what people read::

    the chat template's    <img><image></img>   a placeholder per picture
    shown                  <img><image></img>   what the processor writes for it, with one mark per picture
    ids                    7 -9 -10 -11 -12 8   ids of its own for every row of features (``batch/pictures.py``)

Only paths and encoded bytes are kept. A picture is decoded to see that it can be, where it is first encoded into ids,
and once more where its features are computed.
"""

from __future__ import annotations

import base64
import binascii
import filecmp
import io
import json
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import transformers
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from quartet.batch.pictures import MAX_ROWS, picture_ids, picture_key
from quartet.config.errors import UserError, short_error_text
from quartet.config.run import PicturesConfig
from quartet.config.strict import is_url
from quartet.observe.files import replace_atomically
from quartet.text.examples import Messages, PromptText, is_image
from quartet.text.loading import load_tokenizer, resolve_model_directory

MAX_PIXELS = 89_478_485
"""Of a picture, 256 MiB decoded; Pillow warns of more."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Those that Pillow reads by itself: of others some run programs."""
_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Of a processor; its chat template is the tokenizer's."""
_REMEMBERED = 1 << 18
"""Pictures that a process knows the size of."""


class PictureError(UserError):
    """A picture that cannot be used."""


def _unusable(problem: str, found: str, remedy: str = "write the file again, or remove the row") -> PictureError:
    return PictureError(f"a picture {problem}", found=found, remedy=remedy)


# Pictures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A picture that is not decoded.

    Args:
        source: the path of a file, or encoded bytes (PNG, JPEG, …). Of an animation the first picture counts.
        num_beside: pictures of the same prompt beside it, where the processor's result depends on them, else 0.
    """

    source: str | bytes
    num_beside: int = 0

    def __str__(self) -> str:
        return self.source if isinstance(self.source, str) else f"{len(self.source):,} bytes"

    def __repr__(self) -> str:
        return f"Picture({self}, {hash(self.source)})"

    def read(self) -> bytes:
        """Returns the encoded bytes. PictureError: there is no such file, or it cannot be read."""
        if isinstance(self.source, bytes):
            return self.source
        try:
            return Path(self.source).read_bytes()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise _unusable(
                "is not there" if missing else "cannot be read",
                self.source if missing else f"{self.source}: {error.strerror or error}",
                "correct its path; relative ones begin at the data file's directory",
            ) from None

    def size(self) -> tuple[int, int]:
        """Returns width and height as it is shown, in pixels.

        Raises:
            PictureError: it cannot be decoded to the end, though perhaps in less detail, or is too large.
        """
        image = self._opened(self.read())
        width, height = image.size
        image.draft("RGB", (1, 1))  # of JPEG a rough picture, which takes all of its bytes as well
        self._load(image)
        is_turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        return (height, width) if is_turned else (width, height)

    def decode(self) -> Image.Image:
        """Returns the picture as RGB, the way up that it is shown.

        Raises:
            PictureError: no picture, one that ends too soon, or more than ``MAX_PIXELS``.
        """
        image = self._opened(self.read())
        self._load(image)
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # which Pillow would cut off at 255
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        return image.convert("RGBA").convert("RGB") if "transparency" in image.info else image.convert("RGB")

    def _opened(self, data: bytes) -> Image.Image:
        """Reads the header."""
        try:
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        except Image.DecompressionBombError:
            pixels = 2 * MAX_PIXELS
        except Exception as error:  # as many kinds as there are formats
            known = f"{self}: no picture in {', '.join(_FORMATS)}"
            is_known = isinstance(error, Image.UnidentifiedImageError)
            raise _unusable("cannot be read", known if is_known else f"{self}: {short_error_text(error)}") from None
        else:
            if (pixels := image.width * image.height) <= MAX_PIXELS:
                return image
        raise _unusable("is too large", f"{self}: over {pixels:,} pixels; allowed {MAX_PIXELS:,}", "make it smaller")

    def _load(self, image: Image.Image) -> None:
        try:
            image.load()
        except Exception as error:  # as many kinds as there are formats
            raise _unusable("cannot be decoded", f"{self}: {short_error_text(error)}") from None


_SOURCES = ("bytes", "path", "url", "image", "image_url")
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.ASCII)


def to_picture(value: Any, base: Path | None = None) -> Picture:
    """Returns a picture from what people have: a path, a data URL, encoded bytes, an image of Pillow, or an object with
    ``bytes``, ``path`` or ``url``.

    Args:
        base: directory of relative paths.

    Raises:
        PictureError: a URL of a server, or something else.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture(bytes(value))
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG", compress_level=1)
        return Picture(file.getvalue())
    if isinstance(value, Mapping) and (given := given_source(value)) is not None:
        return to_picture(given, base)
    if isinstance(value, str | Path) and str(value).strip():
        return _at(str(value), base)
    raise _unusable("is neither a path nor bytes", f"{value!r:.80}", "give a path, encoded bytes, or a data URL")


def given_source(value: Mapping[str, Any]) -> Any:
    """Returns what an object or a part of a message has of its picture; None where it has nothing."""
    return next((value[name] for name in _SOURCES if value.get(name) is not None), None)


def _at(text: str, base: Path | None) -> Picture:
    if (head := _DATA_URL.match(text)) is not None:
        try:
            return Picture(base64.b64decode(text[head.end() :], validate=True))
        except binascii.Error as error:
            raise _unusable("is not valid base64", f"{text[:60]}…: {error}") from None
    if text.startswith("data:"):
        raise _unusable("is a data URL without base64", f"{text[:60]}", "write data:image/png;base64,…")
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://"))
    elif is_url(text) or text.startswith(("http:", "https:")):
        raise _unusable("is on a server", f"{text[:80]}", "download it first, and give its path")
    return Picture(str((base or Path()).joinpath(Path(text).expanduser()).absolute()))


def with_data_urls(prompt: PromptText) -> PromptText:
    """Returns a prompt as it is sent to servers: its pictures as data URLs, in OpenAI's words."""

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if not is_image(part):
            return part
        data = base64.b64encode(to_picture(part).read()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image;base64,{data}"}}

    if isinstance(prompt, str) or not image_parts(prompt):
        return prompt
    return [
        {**turn, "content": [sent(part) for part in turn["content"]]} if isinstance(turn["content"], list) else turn
        for turn in prompt
    ]


def image_parts(prompt: PromptText) -> list[dict[str, Any]]:
    """Returns the parts of messages that are pictures, in order."""
    messages = [] if isinstance(prompt, str) else prompt
    contents = [turn["content"] for turn in messages if isinstance(turn.get("content"), list)]
    return [part for content in contents for part in content if is_image(part)]


# The pictures of a run -----------------------------------------------------------------------------------


class PictureStore:
    """Pictures by their keys, in a directory that all processes of a run share: links to files, and bytes.

    Args:
        directory: None: one of this process, which goes with it.
        sizes: how much of the features is kept beside them.
    """

    def __init__(self, directory: Path | None = None, sizes: PicturesConfig | None = None) -> None:
        self.sizes = sizes or PicturesConfig()
        if directory is None:
            self._own = tempfile.TemporaryDirectory(prefix="quartet-pictures-", ignore_cleanup_errors=True)
            directory = Path(self._own.name)
        self.directory = directory
        self._known: dict[int, int] = {}

    def __reduce__(self) -> tuple[type[PictureStore], tuple[Path, PicturesConfig]]:
        return PictureStore, (self.directory, self.sizes)

    def put(self, key: int, picture: Picture) -> None:
        """Keeps a picture, perhaps once more.

        Raises:
            UserError: the key is another picture's, or nothing can be written.
        """
        identity = hash(picture)
        if self._known.get(key) == identity:
            return
        path = self._path(key, picture.num_beside)
        try:
            if path.is_symlink() and not path.exists():
                path.unlink()  # its file has been moved
            if not path.exists():
                self.directory.mkdir(parents=True, exist_ok=True)
                self._write(path, picture)
            elif not self._is_same(path, picture):
                raise UserError(
                    "a picture has the key of another one",
                    found=f"{picture} and {path}",
                    remedy="keep pictures as they are while a run uses them; else begin another run",
                )
        except OSError as error:
            found = f"{path}: {error.strerror or error}"
            raise UserError("pictures cannot be kept", found=found, remedy="make room there") from None
        self._known[key] = identity

    def get(self, key: int) -> Picture:
        """Returns a picture. UserError: the run has none of that key."""
        for num_beside in (0, 1):
            path = self._path(key, num_beside)
            if path.is_symlink():
                return Picture(os.readlink(path), num_beside)
            if path.exists():
                return Picture(path.read_bytes(), num_beside)
        remedy = "let all processes of a run have the same directory"
        raise UserError("a sequence has a picture that the run does not", found=str(self._path(key, 0)), remedy=remedy)

    def move_to(self, directory: Path) -> None:
        """Keeps the pictures of this process there from now on, beside those that a run has left; who was told the
        former directory finds them through a link, which goes with this process."""
        if directory.absolute() == self.directory:
            return
        former, names = self.directory, [path.name for path in self.directory.iterdir() if not path.is_dir()]
        self.copy_to(directory, (int(name.partition("_")[0], 16) for name in names))
        self._own.cleanup()
        former.symlink_to(directory.absolute())
        weakref.finalize(self, former.unlink, missing_ok=True)
        self.directory = directory.absolute()

    def copy_to(self, directory: Path, keys: Iterable[int]) -> None:
        """Puts pictures into a directory as well, for readers of a run when its own store may be gone."""
        other = PictureStore(directory)
        for key in keys if directory.resolve() != self.directory.resolve() else ():
            other.put(key, self.get(key))

    def _path(self, key: int, num_beside: int) -> Path:
        return self.directory / (f"{key:012x}" + "_beside" * (num_beside > 0))

    @staticmethod
    def _write(path: Path, picture: Picture) -> None:
        if isinstance(picture.source, bytes):
            replace_atomically(path, picture.source)
            return
        try:
            path.symlink_to(picture.source)
        except FileExistsError:  # another process was faster
            return

    @staticmethod
    def _is_same(path: Path, picture: Picture) -> bool:
        if isinstance(picture.source, bytes):
            return path.read_bytes() == picture.source
        return (path.is_symlink() and os.readlink(path) == picture.source) or filecmp.cmp(path, picture.source, False)


# What a model's processor makes of them ------------------------------------------------------------------


@dataclass(frozen=True)
class PlacedPicture:
    """A picture as it stands in texts and ids.

    Args:
        shown: the text for it, with one mark.
        written: that text as it is tokenised, with one mark for each run of rows.
        runs: rows of features, in runs without text between.
        size: width and height in pixels.
    """

    key: int
    shown: str
    written: str
    runs: tuple[int, ...]
    size: tuple[int, int]

    def ids(self) -> Iterator[list[int]]:
        """Yields the ids of each run."""
        rows = iter(picture_ids(self.key, sum(self.runs)))
        yield from (list(islice(rows, num)) for num in self.runs)


_ONE_AT_A_TIME = threading.Lock()
"""Of threads: tokenizers, which processors have in them, may not be used by two."""


class PictureProcessor:
    """The processor of a vision-language model, as far as it is about pictures.

    Attributes:
        placeholder: what the chat template writes for a picture.
        mark: what stands for a picture in texts that people read.
        placeholder_id: id of the mark, in whose places the model puts features.
        counts_beside: whether its result depends on pictures beside a picture (LLaVA-OneVision).
    """

    def __init__(self, processor: ProcessorMixin, placeholder_id: int, files: Mapping[str, bytes]) -> None:
        self._processor, self.placeholder_id, self._files = processor, placeholder_id, files
        images: Any = processor.image_processor
        self.placeholder: str = getattr(processor, "image_token")  # noqa: B009 - of most classes
        self.mark = str(processor.tokenizer.convert_ids_to_tokens(placeholder_id))
        self.counts_beside = "batch_num_images" in images.model_input_names
        own = getattr(type(processor), "images_kwargs", {})
        self._settings = f"{type(images).__name__} {own} {images.to_json_string()}".encode()
        self._layouts: dict[tuple[int, int, bool], PlacedPicture] = {}
        self._placed: dict[int, PlacedPicture] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layouts": {}, "_placed": {}}

    @classmethod
    def load(cls, model: str | Path, *, trust_remote_code: bool = False) -> PictureProcessor:
        """Loads the processor of a model's directory or hub name.

        Raises:
            UserError: the model reads no pictures, or the directory has no processor that can be used.
        """
        source = resolve_model_directory(model, "tokenizer")
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if not hasattr(config, "vision_config"):
            raise text_model_error(f"{source}: {type(config).__name__}")
        files = {name: file.read_bytes() for name in _FILES if (file := Path(source, name)).is_file()}
        if not files.keys() & set(_FILES[:2]):
            raise UserError(
                "the model has no processor for pictures",
                found=f"{source} has none of {', '.join(_FILES[:2])}",
                remedy="put the files of the processor there, from the model that it was made of",
            )
        try:
            processor = _load_processor(source, config, trust_remote_code=trust_remote_code)
            return cls(processor, _placeholder_id(config), files)
        except UserError:
            raise
        except Exception as error:  # as many kinds as a file can be broken
            raise UserError(
                "the processor for pictures cannot be loaded",
                found=f"{source}: {short_error_text(error)}",
                remedy="put the processor's files of a model there that transformers knows",
            ) from error

    @classmethod
    def of(cls, processor: ProcessorMixin, config: PreTrainedConfig) -> PictureProcessor:
        """Takes the processor that was passed for a model with this config."""
        with tempfile.TemporaryDirectory() as folder:
            processor.save_pretrained(folder)
            files = {name: file.read_bytes() for name in _FILES if (file := Path(folder, name)).is_file()}
        return cls(processor, _placeholder_id(config), files)

    def key(self, picture: Picture) -> int:
        """Returns what names the picture in ids: of its encoded bytes and how they are processed."""
        return picture_key(picture.read(), self._settings, b"beside" if picture.num_beside else b"")

    def placed(self, picture: Picture) -> PlacedPicture:
        """Returns the picture's texts and ids.

        Raises:
            PictureError: it cannot be decoded, or takes too many places.
        """
        key = self.key(picture)
        if key not in self._placed:
            if len(self._placed) > _REMEMBERED:
                self._placed.clear()
            layout = (*picture.size(), picture.num_beside > 0)
            if layout not in self._layouts:  # which pictures of one size share
                self._layouts[layout] = self._layout(layout[:2], picture)
            found = self._placed[key] = replace(self._layouts[layout], key=key)
            return found
        return self._placed[key]

    def _layout(self, size: tuple[int, int], picture: Picture) -> PlacedPicture:
        found = self._processed(Image.new("RGB", size), picture, return_text_replacement_offsets=True)
        text = str(found["text_replacement_offsets"][0][0]["replacement"])  # a mark per row of features
        marks = re.compile(f"(?:{re.escape(self.mark)})+")
        runs = tuple(len(run[0]) // len(self.mark) for run in marks.finditer(text))
        if not 0 < sum(runs) <= MAX_ROWS:
            found = f"{picture}, {size[0]} × {size[1]}: {sum(runs):,} tokens; allowed 1 to {MAX_ROWS:,}"
            raise _unusable("takes too many tokens", found, "make it smaller, or lower the processor's largest size")
        before, _, behind = text.partition(self.mark)
        shown = before + self.mark + behind.replace(self.mark, "")
        return PlacedPicture(0, shown, marks.sub(lambda _: self.mark, text), runs, size)

    def size_of(self, key: int) -> tuple[int, int]:
        """Returns width and height of a picture that was placed lately."""
        return self._placed[key].size

    def inputs(self, picture: Picture) -> dict[str, Tensor]:
        """Returns what the tower takes of a picture, a batch of one; of a picture beside others, ``batch_num_images``
        says so.
        """
        found = self._processed(picture.decode(), picture, return_tensors="pt")
        of_text = {*self._processor.tokenizer.model_input_names, "mm_token_type_ids", "token_type_ids"}
        own = {name: value for name, value in found.items() if name not in of_text}
        if self._num(picture) == 1:
            return own
        return {name: value if name == "batch_num_images" else value[:1] for name, value in own.items()}

    def _num(self, picture: Picture) -> int:
        return 1 + (self.counts_beside and picture.num_beside > 0)  # that there are others matters, not which

    def _processed(self, image: Image.Image, picture: Picture, **options: Any) -> Any:
        num = self._num(picture)
        try:
            with _ONE_AT_A_TIME:
                return self._processor(text=[self.placeholder * num], images=[[image] * num], **options)
        except Exception as error:  # what processors raise
            found = f"{picture}, {image.width} × {image.height}: {short_error_text(error)}"
            raise _unusable("cannot be processed", found, "remove the row, or use a model that takes it") from error

    def save(self, directory: Path) -> None:
        """Writes its files beside an exported model, as they were."""
        for name, data in self._files.items():
            (directory / name).write_bytes(data)


def _placeholder_id(config: PreTrainedConfig) -> int:
    token = getattr(config, "image_token_id", None)
    return int(config.image_token_index if token is None else token)


def text_model_error(found: str) -> UserError:
    """Makes the error for pictures that a model cannot read."""
    return UserError(
        "the prompt has pictures, and the model has no processor for them",
        found=found,
        remedy="use a vision-language model with preprocessor_config.json in its directory, or data without pictures",
    )


def _load_processor(source: str, config: Any, *, trust_remote_code: bool) -> ProcessorMixin:
    """Loads a processor without its part for videos, which needs more packages."""
    named = [json.loads(file.read_bytes()) for name in _FILES[:2] if (file := Path(source, name)).is_file()]
    name = next((values["processor_class"] for values in named if values.get("processor_class")), None)
    found: Any = getattr(transformers, str(name), None) or PROCESSOR_MAPPING[type(config)]
    parts: dict[str, Any] = {
        "image_processor": AutoImageProcessor.from_pretrained(
            source, backend="pil", trust_remote_code=trust_remote_code
        ),
        "tokenizer": load_tokenizer(source, trust_remote_code=trust_remote_code),
    }
    module: Any = __import__(found.__module__, fromlist=["num2words"])
    if getattr(module, "num2words", found) is None:
        module.num2words = str  # SmolVLM's, for lengths of videos
    takes_none: Any = type(found.__name__, (found,), {"check_argument_for_proper_class": lambda *_: object})
    values, _ = found.get_processor_dict(source)
    processor: Any = takes_none.from_args_and_dict([parts.get(each) for each in found.get_attributes()], values)
    processor.__class__ = found
    return processor


@dataclass(frozen=True)
class PictureCodec:
    """How pictures stand in a codec's texts and ids.

    Args:
        store: gets every picture that is encoded; one of this process when left out.
    """

    processor: PictureProcessor
    store: PictureStore = field(default_factory=PictureStore)

    @classmethod
    def of(
        cls, model: str | Path, store: PictureStore | None = None, *, trust_remote_code: bool = False
    ) -> PictureCodec | None:
        """Returns the codec of a model's directory or hub name; None where the model reads text alone, or has no
        processor, so that it can learn from texts.

        Raises:
            UserError: the processor cannot be used.
        """
        source = resolve_model_directory(model, "tokenizer")
        if not any(Path(source, name).is_file() for name in _FILES[:2]):
            return None
        if not hasattr(AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code), "vision_config"):
            return None
        return cls(PictureProcessor.load(source, trust_remote_code=trust_remote_code), store or PictureStore())

    def placed(self, messages: Messages) -> list[PlacedPicture]:
        """Returns the pictures of a prompt, which are in the store from then on."""
        pictures = [to_picture(part) for part in image_parts(messages)]
        if self.processor.counts_beside:
            pictures = [replace(picture, num_beside=len(pictures) - 1) for picture in pictures]
        found = [self.processor.placed(picture) for picture in pictures]
        for picture, placed in zip(pictures, found, strict=True):
            self.store.put(placed.key, picture)
        return found

    def shown(self, text: str, pictures: Sequence[PlacedPicture]) -> str:
        """Returns what the chat template wrote, with the processor's text in the place of each placeholder.

        Raises:
            UserError: there are not as many placeholders as pictures.
        """
        parts = text.split(self.processor.placeholder)
        self._check(len(parts) - 1, len(pictures), self.processor.placeholder)
        return parts[0] + "".join(picture.shown + part for picture, part in zip(pictures, parts[1:], strict=True))

    def written(self, text: str, pictures: Sequence[PlacedPicture]) -> str:
        """Returns a shown text as it is tokenised."""
        parts, at = [], 0
        for picture in pictures:
            if (found := text.find(picture.shown, at)) < 0:
                break
            parts += [text[at:found], picture.written]
            at = found + len(picture.shown)
        return "".join(parts) + text[at:]

    def place(self, ids: Iterable[int], pictures: Sequence[PlacedPicture]) -> list[int]:
        """Returns the ids of a written text with those of the pictures' rows in the place of its marks.

        Raises:
            UserError: there are not as many marks as runs of rows.
        """
        ids, mark = list(ids), self.processor.placeholder_id
        runs = [run for picture in pictures for run in picture.ids()]
        self._check(ids.count(mark), len(runs), self.processor.mark)
        if not runs:
            return ids
        left = iter(runs)
        return list(chain.from_iterable(next(left) if token == mark else (token,) for token in ids))

    def _check(self, num: int, wanted: int, name: str) -> None:
        if num == wanted:
            return
        if num > wanted:
            problem, remedy = f"a text holds {name}, which stands for pictures", "take it out of the text"
        else:
            problem = f"the text has no {name} for some pictures"
            remedy = "use the model's own chat template and tokenizer, which know pictures"
        raise UserError(problem, found=f"{num} of {name}, {wanted} for the pictures", remedy=remedy)
