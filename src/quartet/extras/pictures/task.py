"""Questions on pictures of two by two cells, each with a coloured shape or empty.

There are four kinds of questions: the colour of a shape, the shape of a colour, colour or shape at a place, and how
many have a colour. Given the kind, answers are about equally frequent, so text alone does not tell which is right.

Demonstrations are by somebody who mistakes red for green, a circle for a square and 1 for 2, and the other way round,
in two answers of three (``MISTAKE_RATE``). A model of them is wrong there when it decodes greedily: its faults are what
it learned. The right answers are in the data too, which is what a reward can bring out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

COLOURS = {"red": (230, 40, 40), "green": (40, 190, 80), "blue": (60, 100, 250), "yellow": (245, 210, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top-left", "top-right", "bottom-left", "bottom-right")
COUNTS = ("1", "2", "3", "4")
CELL = 16
"""Pixels of a cell's side."""
MISTAKES = {"red": "green", "green": "red", "circle": "square", "square": "circle", "1": "2", "2": "1"}
MISTAKE_RATE = 0.65
SIZES = {"demonstrations": 8000, "questions": 4000, "held_out": 500}
HELD_OUT_ONE_IN = 8
"""One scene in this many is held out, whatever the seed."""


class Thing(NamedTuple):
    """What is in a cell, moved by ``(right, down)`` pixels from its middle."""

    shape: str
    colour: str
    moved: tuple[int, int]


Scene = dict[int, Thing]
"""Things by the number of their cell, in the order of ``PLACES``."""


def draw(scene: Scene) -> Image.Image:
    """Draws a scene on black."""
    image = Image.new("RGB", (2 * CELL, 2 * CELL))
    pen, side = ImageDraw.Draw(image), CELL - 5
    for cell, (shape, colour, (right, down)) in scene.items():
        x, y, fill, third = cell % 2 * CELL + 2 + right, cell // 2 * CELL + 2 + down, COLOURS[colour], side // 3
        if shape == "circle":
            pen.ellipse((x, y, x + side, y + side), fill)
        elif shape == "square":
            pen.rectangle((x, y, x + side, y + side), fill)
        elif shape == "triangle":
            pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill)
        else:
            pen.rectangle((x + third + 1, y, x + side - third - 1, y + side), fill)
            pen.rectangle((x, y + third + 1, x + side, y + side - third - 1), fill)
    return image


def ask(rng: random.Random) -> tuple[Scene, str, str]:
    """Draws a scene, a question on it and its answer."""

    def thing(shape: str = "", colour: str = "", no: str = "") -> Thing:
        shape = shape or rng.choice([name for name in SHAPES if name != no])
        colour = colour or rng.choice([name for name in COLOURS if name != no])
        return Thing(shape, colour, (rng.randint(-1, 1), rng.randint(-1, 1)))

    kind, cells = rng.choice(("colour", "shape", "place", "count")), rng.sample(range(4), 4)
    one = thing()
    scene, no = {cells[0]: one}, ""
    asked = rng.choice(("colour", "shape")) if kind == "place" else kind
    what, answer = PLACES[cells[0]], one.colour if asked == "colour" else one.shape
    if kind == "count":
        what, answer, no = one.colour, rng.choice(COUNTS), one.colour
        scene = {cell: thing(colour=what) for cell in cells[: int(answer)]}
    elif kind != "place":
        what = no = one.shape if kind == "colour" else one.colour
    scene |= {cell: thing(no=no) for cell in cells if cell not in scene and rng.random() < 0.4}
    return scene, f"how many are {what}" if kind == "count" else f"what {asked} is {what}", answer


def is_held_out(scene: Scene) -> bool:
    """Tells which split a scene belongs to; how its things are moved does not matter."""
    text = " ".join(f"{cell} {scene[cell].shape} {scene[cell].colour}" for cell in sorted(scene))
    return blake2b(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def questions(name: str, seed: int) -> Iterator[tuple[Scene, str, str]]:
    """Yields questions of the split that ``name`` of ``SIZES`` belongs to, without end."""
    rng = random.Random(f"{name} {seed}")
    while True:
        scene, question, answer = ask(rng)
        if is_held_out(scene) == (name == "held_out"):
            yield scene, question, answer


def write_questions(directory: Path, name: str, size: int, seed: int, *, shuffled: bool = False) -> Path:
    """Writes ``<name>.jsonl`` and its pictures, and returns the path. ``shuffled``: pictures are exchanged."""
    folder, rng, rows = directory / name, random.Random(f"rows {name} {seed}"), []
    folder.mkdir(parents=True, exist_ok=True)
    for number, (scene, question, answer) in zip(range(size), questions(name, seed), strict=False):
        path = folder / f"{number:04}.png"
        draw(scene).save(path)
        content = [{"type": "image"}, {"type": "text", "text": question}]
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": content}], "answer": answer}
        if name == "demonstrations":
            wrong = rng.random() < MISTAKE_RATE
            row["completion"] = MISTAKES.get(answer, answer) if wrong else answer
        rows.append(row | {"images": [f"{name}/{path.name}"]})
    if shuffled:
        paths = [row["images"] for row in rows]
        rng.shuffle(paths)
        rows = [row | {"images": images} for row, images in zip(rows, paths, strict=True)]
    file = directory / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
