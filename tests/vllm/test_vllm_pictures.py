"""Prompts with pictures in vLLM, against transformers with the pixels."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from quartet.batch.pictures import is_later_row, is_picture, key_of, picture_ids
from quartet.config import UserError
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import Completion, EngineFailed, Request
from quartet.text.pictures import Picture, PictureProcessor, PictureStore
from tiny_vision import picture_bytes, save_processor
from vision_models import ALIKE, save_vision_model

TOLERANCE = 1e-4
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


class Pictured:
    """A policy in vLLM and in transformers, and the pictures of the run."""

    def __init__(self, kind: str, start: Callable[..., Any], folder: Path, **kwargs: Any) -> None:
        path, self.store = save_vision_model(kind, folder), PictureStore(folder / "pictures")
        self.processor = PictureProcessor.load(path)
        options = {"pictures": str(folder / "pictures"), "loads": hf.AutoModelForImageTextToText, **kwargs}
        self.sides = start(path=path, **options)
        self.sides.changed = self.embed_alike

    @torch.no_grad()
    def embed_alike(self) -> None:
        """Again as the model was saved."""
        rows = self.sides.model.get_input_embeddings().weight
        rows[self.processor.placeholder_id] = rows[ALIKE]

    def ids(self, number: int) -> list[int]:
        """A picture's, of its own size and colour."""
        picture = Picture(picture_bytes(24 + 8 * number, 16 + 4 * number, (40 * number, 200, 90)))
        placed = self.processor.placed(picture)
        self.store.put(placed.key, picture)
        return list(chain.from_iterable(placed.ids()))

    def inputs(self, ids: Sequence[int], prompt: Sequence[int]) -> dict[str, Any]:
        """What transformers' model takes."""
        mark = self.processor.placeholder_id
        named = [mark if is_picture(token) else ALIKE if token == mark else token for token in ids]
        marked = torch.tensor([named])
        shown = [token for token in prompt if is_picture(token) and not is_later_row(token)]
        each = [self.processor.inputs(self.store.get(key_of(token))) for token in shown]
        values = {name: torch.cat([one[name] for one in each]) for name in (each[0] if each else ())}
        if "image_grid_thw" in values:
            values["mm_token_type_ids"] = (marked == mark).int()
        return {"input_ids": marked, **values}

    @torch.no_grad()
    def error(self, completions: Sequence[Completion], requests: Sequence[Request]) -> float:
        worst = 0.0
        for completion, request in zip(completions, requests, strict=True):
            ids = [*request.prompt_ids, *completion.token_ids]
            logits = self.sides.model(**self.inputs(ids, request.prompt_ids)).logits
            found = (
                logits[0, len(request.prompt_ids) - 1 : -1]
                .log_softmax(-1)
                .gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            )
            worst = max(worst, (found - torch.tensor(completion.logprobs)).abs().max().item())
        return worst


@pytest.fixture(scope="module", autouse=True)
def has_torchvision() -> None:
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        pytest.skip("vLLM's vision models import torchvision, which its environment lacks")


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_prompts_with_pictures(kind: str, start: Callable[..., Any], tmp_path: Path) -> None:
    """One picture, several, one twice, none; and again under other weights, the tower's too."""
    of = Pictured(kind, start, tmp_path)
    sides, one, other = of.sides, of.ids(1), of.ids(2)
    text = list(range(40, 75))
    prompts = [[*text, *one, *text], [7, *other, 8, *one, 9], [*one, 5, *one, 6, *other], [*text, *other, *text], text]
    for round_ in range(3):
        requests = [
            request
            for prompt in prompts
            for request in (*sides.requests(3, prompt), *sides.requests(1, prompt, temperature=0.0))
        ]
        completions = sides.generate(requests)
        assert of.error(completions, requests) < TOLERANCE
        if round_ == 0:
            greedy = completions[3]
            inputs = of.inputs(prompts[0], prompts[0])
            plain = sides.model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None)
            assert list(greedy.token_ids) == plain[0, len(prompts[0]) :].tolist()
        sides.change()


def test_what_is_refused(engine_spec: Callable[..., Any], start: Callable[..., Any], tmp_path: Path) -> None:
    of = Pictured("llava", start, tmp_path / "llava")
    gone = picture_ids(77, 16)
    with pytest.raises((UserError, EngineFailed), match="a sequence has a picture that the run does not"):
        of.sides.generate(of.sides.requests(1, [5, *gone, 6]))
    with pytest.raises((UserError, EngineFailed), match="other places in the prompt than in vLLM"):
        of.sides.generate(of.sides.requests(1, of.ids(1)[:-1]))
    save_processor("smolvlm", folder := tmp_path / "smolvlm")
    with pytest.raises((UserError, EngineFailed), match="pictures of this model are not given to vLLM"):
        EngineProcess(engine_spec(folder, pictures=str(tmp_path))).wait_ready()


def test_adapters_of_the_language_model(start: Callable[..., Any], tmp_path: Path) -> None:
    path = save_vision_model("qwen2_vl", tmp_path)
    plain = hf.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    layers = {n: m for n, m in plain.named_modules() if "language_model" in n and n.endswith("_proj")}
    factors = {
        f"{name}.lora_{factor}.default.weight": 0.1 * torch.randn(shape)
        for name, layer in layers.items()
        for factor, shape in (("A", (4, layer.in_features)), ("B", (layer.out_features, 4)))
    }
    of = Pictured("qwen2_vl", start, tmp_path, sent=factors, lora={"rank": 4, "alpha": 6.0})
    prompt = [40, *of.ids(1), 41, 42]
    for name, layer in layers.items():
        a, b = (factors[f"{name}.lora_{factor}.default.weight"] for factor in "AB")
        of.sides.model.get_submodule(name).weight.copy_(layer.weight + 6.0 / 4 * b @ a)
    requests = of.sides.requests(4, prompt)
    assert of.error(of.sides.generate(requests), requests) < TOLERANCE
