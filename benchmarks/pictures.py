"""A GRPO step on pictures, with features computed once and with the tower run for every answer: processor
seconds of the tower and of the whole step, which other programs beside it do not change much.

    python benchmarks/pictures.py [--repeats 5] [--threads 1]

A step is 4 prompts, each with a picture of 256 rows and 16 words, and 8 answers of 16 tokens to each; one update of the
language model. A forward pass of the LLaVA model spends a quarter of its operations in the tower (counted). Sides:

- shared: as it comes; every picture goes through the tower once per run, beside the step before.
- update: the tower also runs for each of the 8 answers in the update, as in a trainer whose engine keeps features.
- unshared: for each answer in generation and in the update, as where every role has answers of its own.

All else is the same, sharing of prompts included. Pictures are read and prepared once on every side.

Then how much of the tower's time the look ahead hides, under the placement `pipelined`: of the seconds that pictures of
steps behind the first take, how many generation and updates did not wait for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import arguments, build_tokenizer, markdown, write_results
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, Qwen2Config
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from quartet import GRPO, Callback, RLRecipe, RLTrainer
from quartet.config.common import ModelConfig, SamplingConfig
from quartet.config.placement import NamedPoolConfig, PipelinedPlacement
from quartet.config.recipe import ActorConfig, RolloutConfig
from quartet.models.vision import ImageFeatures, ImageTower
from quartet.trainers.workers import LookAhead, VisionWorker

ANSWERS, PATCH, VOCABULARY = 8, 8, 4096
SIDES = ("shared", "update", "unshared")
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text or '<image> ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} w3{% endif %}"
)


def save(directory: Path, side: int) -> float:
    """Writes model and processor for pictures of ``side`` pixels. Returns the tower's share of a forward pass."""
    tokenizer = build_tokenizer(VOCABULARY)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    vision = CLIPVisionConfig(
        hidden_size=208, intermediate_size=832, num_hidden_layers=2, num_attention_heads=4, image_size=side,
        patch_size=PATCH,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=image, vision_feature_layer=-1)
    ).eval()
    model.save_pretrained(directory)
    images = CLIPImageProcessorPil(size={"height": side, "width": side}, do_center_crop=False)
    LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(directory)
    pixels, num_rows = torch.zeros(1, 3, side, side), (side // PATCH) ** 2
    with torch.no_grad(), FlopCounterMode(display=False) as whole:
        model(input_ids=torch.tensor([[image] * num_rows + [5] * 32]), pixel_values=pixels, logits_to_keep=16)
    with torch.no_grad(), FlopCounterMode(display=False) as tower:
        model.model.get_image_features(pixel_values=pixels)
    return tower.get_total_flops() / whole.get_total_flops()


def rows(folder: Path, num: int, side: int) -> list[dict[str, Any]]:
    """Makes prompts with pictures of noise."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for n in range(num):
        path = folder / f"{n}.png"
        Image.fromarray(torch.randint(256, (side, side, 3), generator=draw, dtype=torch.uint8).numpy()).save(path)
        words = " ".join(f"w{k}" for k in torch.randint(3, VOCABULARY, (16,), generator=draw).tolist())
        content = [{"type": "image", "image": str(path)}, {"type": "text", "text": words}]
        found.append({"prompt": [{"role": "user", "content": content}]})
    return found


@contextmanager
def side_of(name: str) -> Iterator[list[float]]:
    """Has towers run as often as on a side, in the ``with`` block. Yields the seconds of each run."""
    features, compute, begun = ImageTower.features, ImageTower.compute, LookAhead.begun
    prepared: dict[int, dict[str, torch.Tensor]] = {}
    seconds: list[float] = []

    def timed(self: ImageTower, inputs: dict[str, torch.Tensor]) -> ImageFeatures:
        start = time.thread_time()
        found = compute(self, inputs)
        seconds.append(time.thread_time() - start)
        return found

    def for_every_answer(self: ImageTower, keys: Sequence[int]) -> list[ImageFeatures]:
        before, found = len(seconds), features(self, keys)
        if self._store is not None:
            # Without gradients a picture is first seen in generation, and then in passes that only check weights.
            due = (
                keys if torch.is_grad_enabled() else [key for key in keys if name == "unshared" and key not in prepared]
            )
            for key in set(keys).difference(prepared):
                prepared[key] = self._store.inputs(key)
            with torch.inference_mode(False), torch.no_grad():
                for key in (*due,) * ANSWERS:
                    if len(seconds) - before < ANSWERS * len(due):
                        self.compute(prepared[key])
        return found

    ImageTower.compute = timed  # type: ignore[method-assign]
    if name != "shared":
        ImageTower.features = for_every_answer  # type: ignore[method-assign]
        LookAhead.begun = lambda self, index: None  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        ImageTower.features, ImageTower.compute, LookAhead.begun = features, compute, begun  # type: ignore[method-assign]


@contextmanager
def waits() -> Iterator[dict[str, float]]:
    """Yields the seconds in which features are computed ahead, and those in which others wait for features."""
    features, look = ImageTower.features, VisionWorker.look
    found, thread = {"ahead": 0.0, "waited": 0.0}, threading.local()

    def timed(self: ImageTower, keys: Sequence[int]) -> list[ImageFeatures]:
        start = time.perf_counter()
        made = features(self, keys)
        found["ahead" if getattr(thread, "looks", False) else "waited"] += time.perf_counter() - start
        return made

    @wraps(look)  # workers are called by the names of their methods
    def looking(self: VisionWorker, prompt: Any) -> None:
        thread.looks = True
        look(self, prompt)

    ImageTower.features, VisionWorker.look = timed, looking  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ImageTower.features, VisionWorker.look = features, look  # type: ignore[method-assign]


class Clock(Callback):
    """Notes the processor's time behind each step."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.at: list[float] = []
        self._at_step = at_step

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.at.append(time.process_time())
        self._at_step(step)


def measure(name: str, model: Path, data: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, float]:
    """Runs GRPO and returns medians of a step: its seconds, those of the tower, and its runs."""
    clock, steps = Clock(), len(data) // prompts_of(args)
    with side_of(name) as seconds:
        train(model, data, args, clock)
    # Of all steps together, as features may be computed beside the step before.
    return {
        "step_s": statistics.median(b - a for a, b in pairwise(clock.at)),
        "tower_s": sum(seconds) / steps,
        "tower_runs": len(seconds) / steps,
    }


def hidden(model: Path, data: list[dict[str, Any]], args: argparse.Namespace) -> float:
    """Returns the share of the tower's seconds, behind the first step, that nobody waited for."""
    pools = {name: NamedPoolConfig(roles=(name,)) for name in ("rollout", "actor")}
    with waits() as found:

        def behind_the_first(step: int) -> None:
            if step == 1:
                found["waited"] = 0.0

        train(model, data, args, Clock(behind_the_first), placement=PipelinedPlacement(pools=pools))
    return 1 - found["waited"] / found["ahead"]


def prompts_of(args: argparse.Namespace) -> int:
    return 2 if args.smoke else 4


def train(model: Path, data: list[dict[str, Any]], args: argparse.Namespace, clock: Clock, **options: Any) -> None:
    """Runs GRPO with each of the pictures once."""
    draw = torch.Generator().manual_seed(0)

    def reward(completions: list[str]) -> list[float]:
        return torch.rand(len(completions), generator=draw).tolist()

    with tempfile.TemporaryDirectory() as folder:
        recipe = RLRecipe(
            output_dir=folder + "/run",
            threads=args.threads,
            actor=ActorConfig(model=ModelConfig(path=str(model))),
            algorithm=GRPO(),
            rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=16)),
            steps=len(data) // prompts_of(args),
            prompts_per_step=prompts_of(args),
            responses_per_prompt=ANSWERS,
            **options,
        )
        RLTrainer(recipe, rewards=reward, prompts=data, callbacks=[clock]).train()


def main() -> None:
    parser = arguments(__doc__, repeats=5)  # steps behind the first
    parser.set_defaults(threads=1)  # others wait busily where the machine is shared
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    side = 128 if not args.smoke else 16
    with tempfile.TemporaryDirectory() as folder:
        share = save(Path(folder, "model"), side)
        data = rows(Path(folder), (args.repeats + 1) * (4 if not args.smoke else 2), side)
        found = {name: measure(name, Path(folder, "model"), data, args) for name in SIDES}
        share_hidden = hidden(Path(folder, "model"), data, args)
    print(f"the tower has {share:.1%} of a forward pass's operations; processor seconds of a step")
    print(
        markdown(
            ("side", "tower", "runs of the tower", "whole step", "shared is faster by"),
            [
                (
                    name,
                    f"{of['tower_s']:.3f}",
                    f"{of['tower_runs']:.1f}",
                    f"{of['step_s']:.3f}",
                    f"{of['step_s'] / found['shared']['step_s']:.2f} ×",
                )
                for name, of in found.items()
            ],
        )
    )
    print(f"hidden by the look ahead, of the tower's seconds behind the first step: {share_hidden:.1%}")
    write_results(args, {"tower_share": share, "sides": found, "hidden": share_hidden})


if __name__ == "__main__":
    main()
