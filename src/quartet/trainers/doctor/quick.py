"""Checks that only read text: the chat template, the tokenizer, the data. They take a second and run with every run."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.config import UserError
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptItem
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.trainers.doctor.answers import answer_column
from quartet.trainers.doctor.findings import Finding, judged, of_error, ok
from quartet.trainers.roles import RLRoles

_SAMPLED = 64
"""Prompts that are read, spread over the data."""
_MARK = "7"


def quick_findings(roles: RLRoles, directory: Path) -> list[Finding]:
    """All checks of this module.

    Args:
        directory: where the run will write; it need not be there yet.
    """
    items, codec, recipe = roles.prompts.items, roles.codec, roles.recipe
    sampled = items[:: max(1, len(items) // _SAMPLED)][:_SAMPLED]
    prompts = [item.prompt for item in sampled]
    return [
        check_template(codec, prompts),
        check_turn_end(codec, prompts),
        check_begin_of_text(codec, prompts),
        check_round_trip(codec, prompts),
        check_unknown_tokens(codec, prompts),
        check_prompt_lengths(roles),
        check_answer_lengths(recipe, codec, sampled),
        check_answer_stops(recipe, sampled),
        check_duplicates(items),
        check_held_out(roles),
        check_disk(roles, directory),
    ]


def quick_warnings(roles: RLRoles, directory: Path) -> list[str]:
    """What of it a run should say as it begins."""
    found = [finding for finding in quick_findings(roles, directory) if finding.status != "ok"]
    return [f"{one.status}: {one.name}: {one.found}; do: {one.remedy}" for one in found]


# Tokens --------------------------------------------------------------------------------------------------


def check_template(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    """The template keeps what users say, and leaves the assistant the next word."""
    name, messages = "template", [prompt for prompt in prompts if not isinstance(prompt, str)]
    if not messages:
        return ok(name, "prompts are plain text")
    lost = [
        message["role"]
        for prompt in messages
        for message in prompt
        if message["role"] != "assistant"
        and isinstance(message["content"], str)
        and message["content"].strip() not in codec.render(prompt)
    ]
    if lost:
        return Finding(
            name,
            "failure",
            f"the chat template leaves out what {lost[0]!r} says, in {len(lost)} messages of {len(messages)} prompts",
            "mend chat_template.jinja: the content of every message belongs into the text",
        )
    silent = sum(codec.render(prompt) == codec.render(prompt, generation_prompt=False) for prompt in messages)
    return judged(
        name,
        f"{silent} of {len(messages)} rendered prompts end without a generation prompt"
        if silent
        else f"{len(messages)} prompts rendered, with a generation prompt",
        "let the template open the assistant's turn where add_generation_prompt is set",
        failure=silent > 0,
    )


def check_turn_end(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    """What the template writes behind an answer is what ends one."""
    name, stops = "turn_end", codec.eos_ids
    if not stops:
        return Finding(
            name,
            "failure",
            "neither the tokenizer nor generation_config.json names an end-of-text token: no answer ever ends",
            "set eos_token in tokenizer_config.json",
        )
    special = {token for token in codec.tokenizer.all_special_ids}
    added = getattr(codec.tokenizer, "added_tokens_decoder", {})
    shown = ", ".join(map(repr, codec.tokenizer.convert_ids_to_tokens(sorted(stops))))
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        try:
            whole = codec.render([*prompt, {"role": "assistant", "content": _MARK}], generation_prompt=False)
        except UserError as error:
            return of_error(name, error)
        tail = whole.rpartition(_MARK)[2]
        ends = [token for token in _plain(codec, tail) if token in special or token in added]
        if ends and not stops.intersection(ends):
            token = codec.tokenizer.convert_ids_to_tokens(ends[0])
            return Finding(
                name,
                "failure",
                f"the template ends an answer with {token!r}, which is no end-of-text token ({shown})",
                "add its id to eos_token_id in generation_config.json",
            )
    return ok(name, f"answers end with {shown}")


def check_begin_of_text(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    """At most one begin-of-text token, and one where the tokenizer adds it to plain text."""
    name, bos = "begin_of_text", codec.tokenizer.bos_token_id
    if bos is None:
        return ok(name, "the tokenizer has no begin-of-text token")
    heads = [codec.encode_prompt(prompt)[:2] for prompt in prompts]
    doubled = sum(head == [bos, bos] for head in heads)
    adds = list(codec.tokenizer("a")["input_ids"])[:1] == [bos]
    missing = sum(head[:1] != [bos] for head in heads) if adds else 0
    token = codec.tokenizer.bos_token
    found = f"{len(heads)} prompts begin with {token!r} once" if adds else f"{token!r} is not doubled"
    if doubled:
        found = f"{doubled} of {len(heads)} prompts begin with {token!r} twice"
    elif missing:
        found = f"{missing} of {len(heads)} prompts lack {token!r}, which the tokenizer puts before plain text"
    return judged(
        name,
        found,
        "write it in the chat template or in the data, not in both"
        if doubled
        else "put bos_token at the head of the chat template",
        failure=doubled > 0,
        warning=missing > 0,
    )


def check_round_trip(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    """Text → ids → text → ids comes back."""
    name, changed, first = "round_trip", 0, ""
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else codec.render(prompt)
        ids = _plain(codec, text)
        again = codec.decode(ids, skip_special=False)
        if again.strip() != text.strip() or (again == text and _plain(codec, again) != ids):
            changed += 1
            same = next((n for n, (a, b) in enumerate(zip(text, again, strict=False)) if a != b), 0)
            first = first or f"{text[same : same + 20]!r} became {again[same : same + 20]!r}"
    return judged(
        name,
        f"{changed} of {len(prompts)} prompts are another text after their tokens: {first}"
        if changed
        else f"{len(prompts)} prompts come back from their tokens",
        "use a tokenizer that keeps case, spaces and all characters of the data",
        failure=2 * changed > len(prompts),
        warning=changed > 0,
    )


def check_unknown_tokens(codec: TextCodec, prompts: Sequence[PromptText]) -> Finding:
    name, unknown = "unknown_tokens", codec.tokenizer.unk_token_id
    if unknown is None:
        return ok(name, "the tokenizer knows every character")
    ids = [token for prompt in prompts for token in codec.encode_prompt(prompt)]
    num = ids.count(unknown)
    return judged(
        name,
        f"{num} of {len(ids)} tokens of {len(prompts)} prompts are {codec.tokenizer.unk_token!r}",
        "use the tokenizer that the model was trained with, or clean the data",
        failure=num > 0.01 * len(ids),
        warning=num > 0,
    )


def _plain(codec: TextCodec, text: str) -> list[int]:
    return list(codec.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


# Lengths -------------------------------------------------------------------------------------------------


def check_prompt_lengths(roles: RLRoles) -> Finding:
    """Prompts that are too long, or leave an answer no room."""
    name, recipe, items = "prompt_lengths", roles.recipe, roles.prompts.items
    counts = [re.match(r"([\d,]+) rows left out: prompt longer", text) for text in roles.prompts.warnings]
    left_out = sum(int(count[1].replace(",", "")) for count in counts if count)
    new = recipe.rollout.sampling.max_new_tokens
    short = 0 if recipe.environment else sum(item.num_tokens + new > roles.context for item in items)
    total, longest = left_out + len(items), max(item.num_tokens for item in items)
    return judged(
        name,
        f"{total:,} prompts, the longest used has {longest} tokens; {left_out / total:.1%} are over the limit and left "
        f"out, {short / total:.1%} leave fewer than max_new_tokens={new} of the context",
        "raise data.max_tokens, lower rollout.sampling.max_new_tokens, or use a model with a longer context",
        failure=2 * (left_out + short) > total,
        warning=20 * (left_out + short) > total,
    )


def check_answer_lengths(recipe: RLRecipe, codec: TextCodec, items: Sequence[PromptItem]) -> Finding:
    """Answers that the data know can be given in the tokens allowed."""
    name, texts = "answer_lengths", _answers(recipe, items)
    if not texts:
        return ok(name, "the data have no answers")
    new = recipe.rollout.sampling.max_new_tokens
    lengths = [len(codec.encode_continuation(text)) + 1 for text in texts]
    long = sum(length > new for length in lengths)
    return judged(
        name,
        f"{long} of {len(texts)} answers of the data have more than max_new_tokens={new} (longest {max(lengths)})",
        "raise rollout.sampling.max_new_tokens: what is cut off cannot be right",
        failure=2 * long > len(texts),
        warning=20 * long > len(texts),
    )


def check_answer_stops(recipe: RLRecipe, items: Sequence[PromptItem]) -> Finding:
    """No stop string stands in the middle of a right answer."""
    name, texts, stops = "answer_stops", _answers(recipe, items), recipe.rollout.sampling.stop_strings
    cut = [(text, stop) for text in texts for stop in stops if text.partition(stop)[2].strip()]
    return judged(
        name,
        f"stop string {cut[0][1]!r} stands inside {len(cut)} of {len(texts)} answers of the data"
        if cut
        else f"{len(stops)} stop strings, none inside an answer of the data",
        "take it out of rollout.sampling.stop_strings, or use a longer one",
        failure=bool(cut),
    )


def _answers(recipe: RLRecipe, items: Sequence[PromptItem]) -> list[str]:
    column = answer_column(recipe, items)
    return [] if column is None else [str(item.columns[column]) for item in items if item.columns.get(column)]


# Data, disk ----------------------------------------------------------------------------------------------


def _key(item: PromptItem) -> str:
    return repr(item.prompt)


def check_duplicates(items: Sequence[PromptItem]) -> Finding:
    more = len(items) - len(Counter(map(_key, items)))
    return judged(
        "duplicates",
        f"{more} of {len(items):,} prompts stand in the data more than once",
        "leave repeated rows out: they are trained on more often than others",
        warning=10 * more > len(items),
    )


def check_held_out(roles: RLRoles) -> Finding:
    """Prompts of the evaluation are not trained on."""
    name = "held_out"
    if roles.evaluation_prompts is None:
        return ok(name, "no held-out prompts")
    trained, held_out = set(map(_key, roles.prompts.items)), roles.evaluation_prompts.items
    both = sum(_key(item) in trained for item in held_out)
    return judged(
        name,
        f"{both} of {len(held_out)} held-out prompts are trained on",
        "take them out of either: the evaluation says nothing about new prompts",
        warning=both > 0,
    )


def check_disk(roles: RLRoles, directory: Path) -> Finding:
    """Room for the checkpoints that are kept, one that is being written, and the models at the end."""
    trained: list[Any] = [engine.packed.model for engine in roles.engines().values()]
    whole = sum(4 * p.numel() for model in trained for p in model.parameters())
    state = sum(4 * p.numel() for model in trained for p in model.parameters() if p.requires_grad)
    needed = (roles.recipe.checkpoint.keep + 1) * 3 * state + whole
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    return judged(
        "disk",
        f"checkpoints and models take {needed / 2**30:.2f} GiB, {there} has {free / 2**30:.2f} GiB free",
        "free some, lower checkpoint.keep, or choose another output_dir",
        failure=needed > free,
        warning=needed > 0.9 * free,
    )
