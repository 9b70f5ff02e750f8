"""`quartet init`: a short recipe to begin with. Its comments are the keys' own descriptions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from quartet.config.algorithms import PPO, BestOfN, Distillation, RewardedAlgorithm
from quartet.config.describe import inline
from quartet.config.errors import UserError
from quartet.config.nearest import nearest
from quartet.config.preference import KTOLoss
from quartet.config.recipe import RECIPES
from quartet.config.reference import METHODS, meaning_at, no_such_job
from quartet.config.synonyms import usual_columns

REWARDS: Mapping[str, Mapping[str, Any]] = {
    "model": {"path": "runs/reward-model/model"},
    "process_model": {"path": "runs/process-reward/model"},
    "function": {"target": "my_rewards.py:score"},
    "exact_match": {"column": "answer"},
    "numeric": {"column": "answer"},
    "regex": {"pattern": r"answer is (\S+)", "column": "answer"},
    "format": {"tags": ["think", "answer"]},
    "length": {"max": 400, "unit": "characters"},
    "math": {"column": "answer"},
    "code": {"column": "tests", "timeout_s": 5.0},
    "http": {"url": "http://localhost:8000/score"},
    "judge": {"url": "http://localhost:8000/v1", "model": "name-at-the-server"},
}
"""By its type, what a reward must be told or is told first."""
REWARDED = ("rl", "eval", "iterated-reward-model")
"""Jobs that score answers."""
_MODELS = {"sft": "Qwen/Qwen2.5-0.5B", "eval": "runs/rl/model"}
_DATA = {
    "sft": "demonstrations.jsonl",
    "reward-model": "pairs.jsonl",
    "preference": "pairs.jsonl",
    "process-reward": "steps.jsonl",
    "medusa": "prompts.jsonl",
    "rl": "prompts.jsonl",
    "iterated-reward-model": "prompts.jsonl",
    "eval": "held_out.jsonl",
}
_COLUMNS = {
    "sft": ("prompt", "completion"),
    "reward-model": ("prompt", "chosen", "rejected"),
    "preference": ("prompt", "chosen", "rejected"),
    "process-reward": ("prompt", "steps", "labels"),
    "medusa": ("prompt",),
}
_WIDTH, _COLUMN = 100, 40
"""Longest line, and where comments begin."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One key: its address as in an override, and what it is set to.

    Args:
        is_example: commented out.
        note: follows the key's own description.
    """

    address: str
    value: Any
    is_example: bool = False
    note: str = ""


def starter(
    job: str, *, method: str | None = None, reward: str | None = None, data: str | None = None, row: Row | None = None
) -> str:
    """A commented recipe of ``job`` with the keys that are changed first; it loads as it is.

    Args:
        row: the first row of ``data``, where it is there to be looked at: its columns are mapped where their names say
            what they are.

    Raises:
        UserError: no such job, method or reward, or the job has none to choose.
    """
    _check(job, "method", method, METHODS.get(job, ()))
    _check(job, "reward", reward, REWARDS if job in REWARDED else ())
    chosen = method or next(iter(METHODS.get(job, ())), None)
    source = data or _DATA[job]
    body = {"rl": _rl, "eval": _eval, "iterated-reward-model": _iterated}.get(job, _supervised)
    lines = [Line("job", job), Line("output_dir", f"runs/{job}"), *body(job, chosen, reward, source, row)]
    called = "".join(f" --{name} {value}" for name, value in (("method", method), ("reward", reward)) if value)
    head = [
        f"quartet {job} recipe.yaml",
        f"Written by: quartet init {job}{called}. Every key: quartet config {job}",
        "Lines that begin with # are examples of what else is often set.",
    ]
    if reward == "math":
        head.append("The reward needs math-verify: pip install 'quartet-rl[math]'")
    return _commented(job, lines, head)


def _check(job: str, what: str, name: str | None, known: Any) -> None:
    if job not in RECIPES:
        raise no_such_job(job)
    if name is None or name in known:
        return
    if not known:
        raise UserError(f"{job} has no {what} to choose", found=f"--{what} {name}", remedy=f"leave --{what} out")
    choice = f"use one of {', '.join(known)}"
    close = nearest(name, known)
    raise UserError(
        f"{job} knows no such {what}", found=f"--{what} {name}", remedy=f"{close} Else {choice}" if close else choice
    )


# Jobs ----------------------------------------------------------------------------------------------------


def _supervised(job: str, method: str | None, reward: str | None, data: str, row: Row | None) -> Iterator[Line]:
    yield Line("model.path", _MODELS.get(job, "runs/sft/model"))
    needs = ("prompt", "completion", "label") if method == "kto" else _COLUMNS[job]
    yield from _data("data.", data, needs, row)
    yield Line("evaluation_data", {"path": "held_out.jsonl"}, is_example=True)
    if method is not None:
        loss = METHODS[job][method]()
        yield Line("loss.name", method)
        yield from (Line(f"loss.{key}", getattr(loss, key)) for key in ("beta", "odds_coef") if hasattr(loss, key))
        if isinstance(loss, KTOLoss):
            yield Line("loss.undesirable_weight", loss.undesirable_weight)
    yield Line("epochs", 1)
    size = next(name for name in RECIPES[job].model_fields if name.endswith("_per_step"))
    yield Line(size, 32)
    if job == "reward-model":
        yield Line("centring", 0.01)
    if job == "process-reward":
        yield Line("separator", "\n\n")
    if job == "medusa":
        yield Line("heads.depth", 3)
        yield Line("sampling.max_new_tokens", 256)
        yield Line("train.optim.lr", 1e-3)
    else:
        yield from _training("train.", 1e-6 if job == "preference" else 1e-5)
    yield Line("train.optim.warmup_steps", 10)
    yield Line("train.optim.schedule", "cosine")


def _rl(
    job: str, method: str | None, reward: str | None, data: str, row: Row | None, above: str = ""
) -> Iterator[Line]:
    algorithm = METHODS["rl"][method or "ppo"]()
    kind = reward or ("model" if isinstance(algorithm, PPO) else "function")
    yield Line(f"{above}actor.model.path", "runs/sft/model")
    yield from _training(f"{above}actor.train.", 1e-6)
    if isinstance(algorithm, PPO):
        yield Line(f"{above}critic.train.optim.lr", 1e-5)
        yield Line(f"{above}critic.warmup_steps", 4)
    if isinstance(algorithm, Distillation):
        yield Line(f"{above}reference.path", "runs/teacher/model")
    needs = ["prompt"]
    if job == "rl" and (reward or not isinstance(algorithm, Distillation)):
        yield from _reward("rewards.0.", kind)
        needs += _reward_columns(kind)
    yield Line(f"{above}algorithm.name", algorithm.name)
    if isinstance(algorithm, RewardedAlgorithm):
        yield Line(f"{above}algorithm.kl.coef", algorithm.kl.coef)
    if isinstance(algorithm, BestOfN):
        yield Line(f"{above}algorithm.keep", algorithm.keep)
    yield from _data(f"{above}data.", data, tuple(needs), row)
    yield Line(f"{above}rollout.sampling.temperature", 1.0)
    yield Line(f"{above}rollout.sampling.max_new_tokens", 256)
    if job == "rl":
        yield Line("evaluation", {"data": {"path": "held_out.jsonl"}}, is_example=True)
    yield Line(f"{above}steps", 100)
    responses = getattr(algorithm, "default_responses", 1)
    yield Line(f"{above}prompts_per_step", 16 if responses > 1 else 64)
    yield Line(f"{above}responses_per_prompt", responses)
    yield Line(f"{above}minibatches", 2)


def _eval(job: str, method: str | None, reward: str | None, data: str, row: Row | None) -> Iterator[Line]:
    yield Line("model.path", _MODELS[job])
    yield from _data("data.", data, ("prompt", *_reward_columns(reward or "function")), row)
    yield from _reward("rewards.0.", reward or "function")
    yield Line("sampling.temperature", 0.0)
    yield Line("sampling.max_new_tokens", 256)
    yield Line("samples_per_prompt", 1)
    yield Line("compare", {"model": "runs/sft/model"}, is_example=True)


def _iterated(job: str, method: str | None, reward: str | None, data: str, row: Row | None) -> Iterator[Line]:
    yield Line("rounds", 2)
    yield from _reward("collect.labeller.", reward or "function")
    yield Line("collect.prompts_per_round", 256)
    yield Line("collect.samples_per_prompt", 4)
    yield Line("collect.sampling.max_new_tokens", 256)
    yield Line("reward_model.model.path", "runs/sft/model")
    yield Line("reward_model.data", {"path": "pairs.jsonl"}, is_example=True)
    yield Line("reward_model.centring", 0.01)
    yield from _training("reward_model.train.", 1e-5)
    yield from _rl(job, method, reward, data, row, "rl.")


# Sections ------------------------------------------------------------------------------------------------


def _training(above: str, lr: float) -> Iterator[Line]:
    yield Line(f"{above}precision", "bf16", is_example=True)
    yield Line(f"{above}lora", {"rank": 16}, is_example=True)
    yield Line(f"{above}optim.lr", lr)


def _data(above: str, path: str, needs: tuple[str, ...], row: Row | None) -> Iterator[Line]:
    yield Line(f"{above}path", path, note=f"Columns: {', '.join(needs)}; docs/data.md.")
    if row is None:
        yield Line(f"{above}columns", {needs[0]: "question"}, is_example=True)
    elif mapped := usual_columns(needs, row):
        yield Line(f"{above}columns", mapped)
    if row is not None and any("\n\nHuman:" in text for text in row.values() if isinstance(text, str)):
        yield Line(f"{above}turns", "messages", is_example=True)
    yield Line(f"{above}overlong", "skip")


def _reward(above: str, kind: str) -> Iterator[Line]:
    yield Line(f"{above}type", kind)
    for key, value in REWARDS[kind].items():
        yield Line(f"{above}{key}", value)


def _reward_columns(kind: str) -> list[str]:
    column = REWARDS[kind].get("column")
    return [] if column is None else [column]


# As YAML, with what the recipe's classes say behind every key ------------------------------------------


def _commented(job: str, lines: Sequence[Line], head: Sequence[str]) -> str:
    """The recipe that ``lines`` make, section by section in their order, under comments with the text of ``head``.

    Raises:
        UserError: a key that the recipe of ``job`` does not have.
    """
    written = [f"# {text}" for text in head]
    chosen: dict[str, str] = {}
    before: list[str] = []
    for line in lines:
        *above, name = line.address.split(".")
        if name in ("name", "type"):
            chosen[".".join(above)] = str(line.value)
        shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(above, before, strict=False)))
        opened = above[len(shared) :]
        depth = len(above) - len(opened)
        written += [f"{'  ' * (depth + more)}{part}:" for more, part in enumerate(opened) if not part.isdecimal()]
        is_item = bool(opened) and opened[-1].isdecimal()
        indent = "  " * (len(above) - is_item) + "- " * is_item
        text = f"{'# ' * line.is_example}{name}: {inline(line.value)}"
        words = meaning_at(job, _resolved(line.address, chosen))
        written += _with_comment(indent + text, " ".join(filter(None, (words, line.note))))
        before = above
    return "\n".join(written) + "\n"


def _resolved(address: str, chosen: Mapping[str, str]) -> str:
    """The address at which a key is described: ``algorithm.grpo.kl.coef``, and ``algorithm.grpo`` for its name."""
    *above, name = address.split(".")
    parts: list[str] = []
    for depth, part in enumerate(above, start=1):
        tag = chosen.get(".".join(above[:depth]))
        parts += [part, *([tag] if tag is not None else [])]
    return ".".join(parts if ".".join(above) in chosen and name in ("name", "type") else [*parts, name])


def _with_comment(text: str, comment: str) -> list[str]:
    """The line with its comment beside it; what does not fit goes on below."""
    if not comment:
        return [text]
    column = max(_COLUMN, len(text) + 2)
    first, *others = textwrap.wrap(comment, max(_WIDTH - column - 2, 24))
    return [f"{text:<{column}}# {first}", *(f"{'':<{column}}# {other}" for other in others)]
