"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from quartet.config import UserError

_TOKENS = "use the tokenizer that the model was trained with, one that keeps all characters of the data"
_REMEDIES = {
    "template": "mend chat_template.jinja: it writes every message, and opens the assistant's turn where asked to",
    "turn_end": "set eos_token_id in generation_config.json to all tokens that end an answer",
    "begin_of_text": "write bos_token once, in the chat template or in the data, where the tokenizer adds it to text",
    "round_trip": _TOKENS,
    "unknown_tokens": _TOKENS,
    "prompt_lengths": "raise data.max_tokens, lower rollout.sampling.max_new_tokens, or use a longer context",
    "answer_lengths": "raise rollout.sampling.max_new_tokens: what is cut off cannot be right",
    "answer_stops": "take it out of rollout.sampling.stop_strings, or use a longer one",
    "duplicates": "leave repeated rows out: they are trained on more often than others",
    "held_out": "take them out of either: the evaluation says nothing about new prompts",
    "disk": "free some, lower checkpoint.keep, or choose another output_dir",
    "memory": "lower token_budget, logprob_chunk or max_running; checkpoint activations; see docs/memory.md",
    "stop_tokens": "the engine must get stop_token_ids with every request, and stop there",
    "stop_strings": "the engine must get stop_strings with every request, and stop there",
    "pad_by_mask": "attention is masked by where padding is, never by the pad token's id",
    "versions": "the engine must note for every token which weights computed it",
    "diversity": "raise rollout.sampling.temperature; at 1, see that the engine uses each request's seed",
    "sampler_agreement": "both sides need the same weights, precision, positions and temperature (docs/numerics.md)",
    "temperature": "divide the logits by rollout.sampling.temperature before the log-softmax, on both sides",
    "packing": "see whether actor.train.share_prefixes=false mends it, and report the architecture",
    "reward_answers": "see that the reward reads the column that it means (data.columns), whole, and the sign of its "
    "weight; math reads LaTeX",
    "reward_values": "mend the reward, or leave it out",
    "reward_spread": "begin with a model that succeeds at times, easier prompts, or a reward with more grades",
    "reward_time": "raise the reward's concurrency or batch_size, or give its server more room",
    "reward_repeats": "scores must be in the order of the completions; a random judge wants several votes",
    "end_of_text": "the engine must stop at every id of eos_token_id",
    "end_is_learned": "no mask may know padding by its id: the end-of-text token may have the same",
    "truncation": "raise rollout.sampling.max_new_tokens, or begin with a model that ends its answers",
    "learning_signal": "see reward_spread: where all answers to a prompt score alike, it teaches nothing",
    "first_ratio": "passes with and without gradients must agree: no dropout, one temperature, one precision",
    "gradient": "check the model's weights and its precision; see learning_signal",
    "reference_kl": "the reference is the actor as it starts, or of its family: same tokenizer, precision, temperature",
    "critic_values": "train the critic first (critic.warmup_steps), or begin with a copy of the reward model",
    "tied_head": "the engine kept an old output head: a tied one is sent once, its packed or rounded copy made anew",
    "weight_update": "the engine kept old weights: look at weight_sync, and at what it computes from weights only once",
    "after_sleep": "send weights again after level 2, and keep what level 1 moves",
    "weights_restored": "the engine keeps something of older weights: look at its prefix cache and its copies",
    "duration": "lower steps, prompts_per_step or max_new_tokens, or use more devices (docs/placements.md)",
}
"""What to do, by the names of the checks."""


@dataclass(frozen=True)
class Finding:
    """
    Args:
        name: of the check.
        found: in words, with the figures.
        remedy: what to do; empty where all is well.
    """

    name: str
    status: Literal["ok", "warning", "failure"]
    found: str
    remedy: str = ""

    def line(self) -> str:
        """As the terminal shows it."""
        return f"{self.status:<7}  {self.name:<17}  {self.found}{f'; do: {self.remedy}' if self.remedy else ''}"


def judged(name: str, found: str, *, failure: bool = False, warning: bool = False) -> Finding:
    """What the check ``name`` found; ``ok`` where neither is set."""
    if not (failure or warning):
        return Finding(name, "ok", found)
    return Finding(name, "failure" if failure else "warning", found, _REMEDIES[name])


class Findings:
    """Findings in their order; each is told as it comes."""

    def __init__(self, tell: Callable[[Finding], object]) -> None:
        self.all: list[Finding] = []
        self._tell = tell

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.all.append(finding)
            self._tell(finding)

    @contextmanager
    def errors_of(self, name: str, status: Literal["warning", "failure"] = "failure") -> Iterator[None]:
        """A ``UserError`` inside is what the check ``name`` found; what follows it is not done."""
        try:
            yield
        except UserError as error:
            self.add(Finding(name, status, f"{error.problem} ({error.found})", error.remedy))
