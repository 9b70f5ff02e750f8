"""Checks that only read text: the chat template, the tokenizer, the data. They take a second and run with every run.

Tokens are looked at of some prompts; lengths are known of all that were checked, which are compared with each other.
What a check found is a :class:`Finding`; what to do about it is one table for these and for those of other checks.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from quartet.batch.pictures import is_picture, key_of
from quartet.config import UserError
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import ExactMatchReward, MathReward, NumericReward, RegexReward
from quartet.data.datasets import PromptData, PromptItem
from quartet.data.fields import get_column
from quartet.rewards.builtin import accepted_answers
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.trainers.roles import RLRoles

USUAL = (
    *("completion", "chosen", "answer", "solution", "response", "output", "target", "ground_truth"),
    *("final_answer", "expected_answer", "correct_answer", "gold"),
)
"""Names of columns with right answers."""
Compared = ExactMatchReward | NumericReward | RegexReward | MathReward
_SAMPLED = 64
"""Prompts that are read, spread over the data."""
_ANSWER = "7"
_REMEDIES = {
    "template": "mend chat_template.jinja: it writes every message, and opens the assistant's turn where asked to",
    "turn_end": "set eos_token_id in generation_config.json to all tokens that end an answer",
    "begin_of_text": "write bos_token once, in the chat template or in the data, where the tokenizer adds it to text",
    "round_trip": "use the tokenizer that the model was trained with, one that keeps all characters of the data",
    "prompt_lengths": "raise data.max_tokens, lower rollout.sampling.max_new_tokens, or use a longer context",
    "answer_lengths": "raise rollout.sampling.max_new_tokens: what is cut off cannot be right",
    "duplicates": "leave repeated rows out: they are trained on more often than others",
    "held_out": "take them out of either: the evaluation says nothing about new prompts",
    "pictures": "use another family (docs/models.md lists those that the tests prove), or texts alone",
    "disk": "free some, lower checkpoint.keep, or choose another output_dir",
    "memory": "lower token_budget, logprob_chunk or max_running; checkpoint activations; see docs/memory.md",
    "diversity": "raise rollout.sampling.temperature; at 1, see that the engine uses each request's seed",
    "sampler_agreement": "both sides need the same weights, precision, positions and temperature (docs/numerics.md)",
    "reward_answers": "see that the reward reads the column that it means (data.columns), and the sign of its weight",
    "reward_values": "mend the reward, or leave it out",
    "reward_spread": "begin with a model that succeeds at times, easier prompts, or a reward with more grades",
    "reward_time": "raise the reward's concurrency or batch_size, or give its server more room",
    "end_of_text": "the engine must stop at every id of eos_token_id",
    "truncation": "raise rollout.sampling.max_new_tokens, or begin with a model that ends its answers",
    "learning_signal": "see reward_spread: where all answers to a prompt score alike, it teaches nothing",
    "first_ratio": "passes with and without gradients must agree: no dropout, one temperature, one precision",
    "gradient": "check the model's weights and its precision; see learning_signal",
    "reference_kl": "the reference is the actor as it starts, or of its family: same tokenizer, precision, temperature",
    "weight_update": "the engine kept old weights: look at weight_sync, and at what it computes from weights only once",
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
        """Returns the finding as the terminal shows it."""
        return f"{self.status:<7}  {self.name:<17}  {self.found}{f'; do: {self.remedy}' if self.remedy else ''}"


def judged(name: str, found: str, *, failure: bool = False, warning: bool = False) -> Finding:
    """Makes the finding of the check ``name``; ``ok`` where neither is set."""
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
        """Notes a ``UserError`` inside as what the check ``name`` found; what follows it is not done."""
        try:
            yield
        except UserError as error:
            self.add(Finding(name, status, f"{error.problem} ({error.found})", error.remedy))


def quick_findings(roles: RLRoles, directory: Path) -> list[Finding]:
    """Runs all checks of this module.

    Args:
        directory: where the run will write; it need not be there yet.
    """
    items, codec, recipe = roles.prompts.items, roles.codec, roles.recipe
    sampled = items[:: max(1, len(items) // _SAMPLED)][:_SAMPLED]
    prompts = [item.prompt for item in sampled]
    return [
        *(check(codec, prompts) for check in (check_template, check_turn_end, check_round_trip)),
        check_begin_of_text(codec, [codec.encode_prompt(prompt) for prompt in prompts]),
        check_prompt_lengths(roles),
        check_answer_lengths(recipe, codec, sampled),
        check_duplicates(roles.prompts),
        check_held_out(roles),
        check_disk(roles, directory),
        *check_pictures(roles, prompts),
    ]


def quick_warnings(roles: RLRoles, directory: Path) -> list[str]:
    """Returns what a run should say of the quick findings as it begins."""
    found = [finding for finding in quick_findings(roles, directory) if finding.status != "ok"]
    return [f"{one.status}: {one.name}: {one.found}; do: {one.remedy}" for one in found]


# Tokens --------------------------------------------------------------------------------------------------


def check_template(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    """Checks that the template leaves the assistant the next word."""
    name, silent, num = "template", 0, 0
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        text, num = codec.render(prompt), num + 1
        silent += text == codec.render(prompt, generation_prompt=False)
    if not num:
        return judged(name, "prompts are plain text")
    return judged(name, f"{silent} of {num} prompts are rendered without a generation prompt", failure=silent > 0)


def check_turn_end(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    """Checks that what the template writes behind an answer is what ends one."""
    name, stops, tokenizer = "turn_end", codec.eos_ids, codec.tokenizer
    if not stops:
        return judged(name, "neither tokenizer nor model names an end-of-text token: no answer ends", failure=True)
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(stops))))
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        try:
            whole = codec.render([*prompt, {"role": "assistant", "content": _ANSWER}], generation_prompt=False)
        except UserError as error:  # a run never renders one
            return judged(name, f"the template writes no answer behind a prompt: {error.found}", warning=True)
        ends = [token for token in _plain(codec, whole.rpartition(_ANSWER)[2]) if token in special]
        if ends and stops.isdisjoint(ends):
            token = tokenizer.convert_ids_to_tokens(ends[0])
            return judged(name, f"the template ends answers with {token!r}, the engine at {shown}", failure=True)
    return judged(name, f"answers end with {shown}{codec.kept_special}")


def check_begin_of_text(codec: TextCodec, prompts: Sequence[Sequence[int]]) -> Finding:
    """Checks that there is at most one begin-of-text token, and one where the tokenizer adds it to plain text."""
    name, bos, token = "begin_of_text", codec.tokenizer.bos_token_id, codec.tokenizer.bos_token
    if bos is None:
        return judged(name, "the tokenizer has no begin-of-text token")
    heads = [list(ids[:2]) for ids in prompts]
    doubled = sum(head == [bos, bos] for head in heads)
    is_added = list(codec.tokenizer("a")["input_ids"])[:1] == [bos]
    missing = sum(head[:1] != [bos] for head in heads) if is_added else 0
    found = f"{doubled} of {len(heads)} prompts begin with {token!r} twice, {missing} lack it"
    return judged(name, found, failure=doubled > 0, warning=missing > 0)


def check_round_trip(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    """Checks that text → ids → text comes back; blanks, which some decoders move, aside."""
    lost, first = 0, ""
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else codec.render(prompt)
        again = codec.decode(_plain(codec, text), skip_special=False)
        if "".join(again.split()) != "".join(text.split()):
            lost += 1
            same = next((n for n, (a, b) in enumerate(zip(text, again, strict=False)) if a != b), 0)
            first = first or f": {text[same : same + 20]!r} became {again[same : same + 20]!r}"
    found = f"{lost} of {len(prompts)} prompts are another text after their tokens{first}"
    return judged("round_trip", found, failure=2 * lost > len(prompts), warning=lost > 0)


def _plain(codec: TextCodec, text: str) -> list[int]:
    return list(codec.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


# Lengths -------------------------------------------------------------------------------------------------


def check_prompt_lengths(roles: RLRoles) -> Finding:
    """Finds prompts that leave an answer no room."""
    recipe, lengths = roles.recipe, roles.prompts.lengths[:, 0]
    new = recipe.rollout.sampling.max_new_tokens
    short = 0 if recipe.environment else float((lengths + new > roles.context).mean())
    found = f"{short:.1%} of {len(lengths):,} prompts leave fewer than max_new_tokens={new} of the context"
    return judged("prompt_lengths", f"{found}; the longest has {int(lengths.max())} tokens", warning=short > 0.05)


def check_answer_lengths(recipe: RLRecipe, codec: TextCodec, items: Sequence[PromptItem]) -> Finding:
    """Checks that answers that the data know can be given in the tokens allowed."""
    name, column, new = "answer_lengths", answer_column(recipe, items), recipe.rollout.sampling.max_new_tokens
    texts = [text for item in items if (text := answer_text(item, column)) is not None] if column is not None else []
    if not texts:
        return judged(name, "the data have no answers")
    lengths = [len(codec.encode_continuation(text)) + 1 for text in texts]
    long = sum(length > new for length in lengths) / len(texts)
    found = f"{long:.1%} of {len(texts)} answers of the data exceed max_new_tokens={new}"
    return judged(name, f"{found}, the longest has {max(lengths)}", failure=long > 0.5, warning=long > 0.05)


# Pictures ------------------------------------------------------------------------------------------------


def check_pictures(roles: RLRoles, prompts: Sequence[PromptText]) -> list[Finding]:
    """Tells what pictures cost, and whether the model can take them; nothing of a model that reads text alone."""
    name, tower, codec = "pictures", roles.actor.packed.tower, roles.codec
    if tower is None:
        return []
    if codec.pictures is None:
        return [judged(name, "the model has a tower for pictures, but no processor; prompts have none")]
    of_prompts = [{token for token in codec.encode_prompt(prompt) if is_picture(token)} for prompt in prompts]
    rows = Counter(key_of(token) for token in set[int]().union(*of_prompts))
    num, config = sum(map(bool, of_prompts)), tower.base.config
    found = f"{num} of {len(prompts)} prompts have pictures"
    if rows:
        widths = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        size = 4 * widths * config.get_text_config().hidden_size * rows.total() / len(rows)
        found += f", of {min(rows.values()):,} to {max(rows.values()):,} rows; their features take up to "
        found += f"{size / 2**20:.3g} MiB each and "
        found += (
            "are computed in every pass, as the tower trains" if tower.trains else "are kept, as the tower is frozen"
        )
    weights = sum(parameter.numel() for parameter in tower.parameters())
    found += f"; the tower has {weights / 1e6:,.1f} M weights" + (f"; {tower.unsupported}" if tower.unsupported else "")
    return [judged(name, found, failure=bool(rows) and tower.unsupported is not None)]


# Data, disk ----------------------------------------------------------------------------------------------


def check_duplicates(prompts: PromptData) -> Finding:
    num = len(prompts.hashes)
    more = num - len(np.unique(prompts.hashes))
    found = f"{more} of {num:,} prompts stand in the data more than once"
    return judged("duplicates", found, warning=10 * more > num)


def check_held_out(roles: RLRoles) -> Finding:
    """Checks that prompts of the evaluation are not trained on."""
    if roles.evaluation_prompts is None:
        return judged("held_out", "no held-out prompts")
    held_out = roles.evaluation_prompts.hashes
    both = int(np.isin(held_out, roles.prompts.hashes).sum())
    return judged("held_out", f"{both} of {len(held_out)} held-out prompts are trained on", warning=both > 0)


def check_disk(roles: RLRoles, directory: Path) -> Finding:
    """Checks that there is room for the checkpoints that are kept, one that is being written, and the models at the
    end.
    """
    trained = [p for engine in roles.engines().values() for p in engine.packed.model.parameters()]
    state = sum(4 * p.numel() for p in trained if p.requires_grad)
    needed = (roles.recipe.checkpoint.keep + 1) * 3 * state + sum(4 * p.numel() for p in trained)
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    found = f"checkpoints and models take {needed / 2**30:.2f} GiB, {there} has {free / 2**30:.2f} GiB free"
    return judged("disk", found, failure=needed > free, warning=needed > 0.9 * free)


# Answers that the data know ---------------------------------------------------------------------------


def compared_reward(recipe: RLRecipe, items: Sequence[PromptItem]) -> Compared | None:
    """Returns the first rule that compares with a column of the data."""
    for reward in recipe.rewards if items else ():
        if isinstance(reward, Compared) and reward.column and answer_text(items[0], reward.column) is not None:
            return reward
    return None


def answer_column(recipe: RLRecipe, items: Sequence[PromptItem]) -> str | None:
    """Returns the column with right answers: what a rule compares with, else one with a usual name; None: there is
    none.
    """
    if (compared := compared_reward(recipe, items)) is not None:
        return compared.column
    return next((name for name in USUAL if items and answer_text(items[0], name) is not None), None)


def answer_text(item: PromptItem, column: str) -> str | None:
    """Returns the first of the row's right answers in ``column``; None where that holds anything else."""
    try:
        value = get_column(item.columns, column)
        return None if isinstance(value, bool) else next(iter(accepted_answers(value)), None)
    except (KeyError, UserError):
        return None
