"""Stories of a model and what is measured about them: the reward's parts, and quantities that no reward contains."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from textstats import distinct, mean_interval, repeated, shared_sentences
from transformers import AutoModelForCausalLM

from quartet.models.loading import load_causal_lm, packed_causal_lm
from quartet.rollout.protocol import SamplingParams
from quartet.text.tokenizer import TextCodec
from quartet.trainers.evaluation import GeneratedText, generate

MAX_NEW_TOKENS = 256
FIRST_WORDS = 60
PARTS = ("complete_ending", "hero_stays", "somebody_speaks")


def _reward_functions() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples" / "story_reward.py"
    spec = importlib.util.spec_from_file_location("story_reward", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Samples:
    """Stories in prompt order, ``responses_per_prompt`` each.

    ``parts`` scores by reward part; ``nats`` and ``kl`` per story: mean over its tokens of -log p under the reference,
    and of log p under the policy less log p under the reference.
    """

    prompts: Sequence[str]
    responses_per_prompt: int
    stories: Sequence[GeneratedText]
    parts: dict[str, list[float]]
    nats: Sequence[float]
    kl: Sequence[float]

    @property
    def texts(self) -> list[str]:
        return [story.text for story in self.stories]

    def by_prompt(self, values: Sequence[float]) -> list[float]:
        """Means over each prompt's stories, which are not independent of each other."""
        size = self.responses_per_prompt
        return [sum(values[start : start + size]) / size for start in range(0, len(values), size)]

    def score_by_prompt(self) -> list[float]:
        scores = [sum(values) / len(self.parts) for values in zip(*self.parts.values(), strict=True)]
        return self.by_prompt(scores)

    def shown(self, index: int) -> str:
        text = self.prompts[index // self.responses_per_prompt] + self.stories[index].text
        return text.replace("\n", " ")


def sample(model: Path, reference: Path, rows: Sequence[dict[str, Any]], responses_per_prompt: int) -> Samples:
    """Stories at temperature 1 with fixed seeds, scored; the reference is run by plain transformers."""
    codec = TextCodec.from_pretrained(str(model))
    packed = packed_causal_lm(load_causal_lm(str(model)))
    prompts = [row["prompt"] for row in rows]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS)
    found = generate(packed, codec, prompts, sampling, num_responses=responses_per_prompt, seed=1, max_running=128)
    packed.release()
    stories = [story for group in found for story in group]
    heroes = [row["hero"] for row in rows for _ in range(responses_per_prompt)]
    texts, rewards = [story.text for story in stories], _reward_functions()
    frozen = AutoModelForCausalLM.from_pretrained(reference)
    nats, kl = [], []
    for i, story in enumerate(stories):
        expected = _logprobs(
            frozen, codec.encode_prompt(prompts[i // responses_per_prompt]), story.completion.token_ids
        )
        nats.append(-float(expected.mean()))
        kl.append(float((torch.tensor(story.completion.logprobs) - expected).mean()))
    parts = {
        "complete_ending": rewards.complete_ending(texts),
        "hero_stays": rewards.hero_stays(texts, heroes),
        "somebody_speaks": rewards.somebody_speaks(texts),
    }
    return Samples(prompts, responses_per_prompt, stories, parts, nats, kl)


@torch.no_grad()
def _logprobs(model: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """``[R]`` log-probabilities of the response's tokens."""
    ids = torch.tensor([[*prompt, *response]])
    table = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return table.gather(1, ids[0, len(prompt) :, None])[:, 0]


def measure(samples: Samples) -> dict[str, str]:
    """Every quantity as text, the reward's parts first."""
    texts, lengths = samples.texts, [float(len(story.completion.token_ids)) for story in samples.stories]

    def interval(values: Sequence[float], digits: int = 3) -> str:
        return mean_interval(samples.by_prompt(values)).number(digits)

    return {
        "**reward** (mean of the three parts)": mean_interval(samples.score_by_prompt()).number(),
        **{name.replace("_", " "): interval(samples.parts[name]) for name in PARTS},
        "KL to the reference, nats per token": interval(samples.kl),
        "*not in the reward:*": "",
        "ended by itself": interval([float(story.finish_reason != "length") for story in samples.stories]),
        "length, tokens": interval(lengths, 1),
        "-log p under the reference, nats per token": interval(samples.nats),
        f"distinct-1, distinct-2 (first {FIRST_WORDS} words)": ", ".join(
            f"{distinct(texts, n, FIRST_WORDS):.3f}" for n in (1, 2)
        ),
        "4-grams repeated within a story": interval([repeated(text, 4) for text in texts]),
        "sentences that another story has too": f"{shared_sentences(texts):.3f}",
    }
