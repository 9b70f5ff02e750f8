"""`quartet init`: a short recipe to begin with. Its comments are the keys' own descriptions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from quartet.config.algorithms import PPO, BestOfN, Distillation, RewardedAlgorithm
from quartet.config.describe import inline
from quartet.config.errors import UserError
from quartet.config.jobs import jobs, recipes
from quartet.config.nearest import nearest
from quartet.config.plugins import load
from quartet.config.preference import KTOLoss
from quartet.config.reference import meaning_at, methods, no_such_job
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


@dataclass(frozen=True)
class Asked:
    """What `quartet init` was asked for: the job, its method and kind of reward, its data and their first row."""

    job: str
    method: str | None
    reward: str | None
    data: str
    row: Row | None


@dataclass(frozen=True)
class Starter:
    """How a job's recipe begins.

    Args:
        data: a name for its data, where none is given.
        lines: what is written below ``job`` and ``output_dir``.
        is_rewarded: the job scores answers, so that ``--reward`` can be given.
    """

    data: str
    lines: Callable[[Asked], Iterator[Line]]
    is_rewarded: bool = False


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
    _check(job, "method", method, methods().get(job, ()))
    _check(job, "reward", reward, REWARDS if job in jobs() and starter_of(job).is_rewarded else ())
    chosen = method or next(iter(methods().get(job, ())), None)
    begun = starter_of(job)
    asked = Asked(job, chosen, reward, data or begun.data, row)
    lines = [Line("job", job), Line("output_dir", f"runs/{job}"), *begun.lines(asked)]
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
    if job not in jobs():
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


def supervised(
    asked: Asked,
    columns: tuple[str, ...],
    *own: Line,
    model: str = "runs/sft/model",
    lr: float = 1e-5,
    is_tuned: bool = True,
) -> Iterator[Line]:
    """The recipe of a supervised job.

    Args:
        columns: of its data.
        own: keys that only this job has.
        is_tuned: the model itself is trained, with a precision or adapters.
    """
    yield Line("model.path", model)
    yield from data_lines("data.", asked.data, columns, asked.row)
    yield Line("evaluation_data", {"path": "held_out.jsonl"}, is_example=True)
    if asked.method is not None:
        loss = methods()[asked.job][asked.method]()
        yield Line("loss.name", asked.method)
        yield from (Line(f"loss.{key}", getattr(loss, key)) for key in ("beta", "odds_coef") if hasattr(loss, key))
        if isinstance(loss, KTOLoss):
            yield Line("loss.undesirable_weight", loss.undesirable_weight)
    yield Line("epochs", 1)
    size = next(name for name in recipes()[asked.job].model_fields if name.endswith("_per_step"))
    yield Line(size, 32)
    yield from own
    yield from train_lines("train.", lr) if is_tuned else [Line("train.optim.lr", lr)]
    yield Line("train.optim.warmup_steps", 10)
    yield Line("train.optim.schedule", "cosine")


def _preference(asked: Asked) -> Iterator[Line]:
    is_judged = asked.method == "kto"
    columns = ("prompt", "completion", "label") if is_judged else ("prompt", "chosen", "rejected")
    yield from supervised(asked, columns, lr=1e-6)


def rl_lines(asked: Asked, above: str = "") -> Iterator[Line]:
    """The recipe of RL, at the top or as a section ``above`` of another job's, which then has the rewards."""
    algorithm = methods()["rl"][asked.method or "ppo"]()
    kind = asked.reward or ("model" if isinstance(algorithm, PPO) else "function")
    yield Line(f"{above}actor.model.path", "runs/sft/model")
    yield from train_lines(f"{above}actor.train.", 1e-6)
    if isinstance(algorithm, PPO):
        yield Line(f"{above}critic.train.optim.lr", 1e-5)
        yield Line(f"{above}critic.warmup_steps", 4)
    if isinstance(algorithm, Distillation):
        yield Line(f"{above}reference.path", "runs/teacher/model")
    needs = ["prompt"]
    if not above and (asked.reward or not isinstance(algorithm, Distillation)):
        yield from reward_lines("rewards.0.", kind)
        needs += _reward_columns(kind)
    yield Line(f"{above}algorithm.name", algorithm.name)
    if isinstance(algorithm, RewardedAlgorithm):
        yield Line(f"{above}algorithm.kl.coef", algorithm.kl.coef)
    if isinstance(algorithm, BestOfN):
        yield Line(f"{above}algorithm.keep", algorithm.keep)
    yield from data_lines(f"{above}data.", asked.data, tuple(needs), asked.row)
    yield Line(f"{above}rollout.sampling.temperature", 1.0)
    yield Line(f"{above}rollout.sampling.max_new_tokens", 256)
    if not above:
        yield Line("evaluation", {"data": {"path": "held_out.jsonl"}}, is_example=True)
    yield Line(f"{above}steps", 100)
    responses = getattr(algorithm, "default_responses", 1)
    yield Line(f"{above}prompts_per_step", 16 if responses > 1 else 64)
    yield Line(f"{above}responses_per_prompt", responses)
    yield Line(f"{above}minibatches", 2)


def _eval(asked: Asked) -> Iterator[Line]:
    kind = asked.reward or "function"
    yield Line("model.path", "runs/rl/model")
    yield from data_lines("data.", asked.data, ("prompt", *_reward_columns(kind)), asked.row)
    yield from reward_lines("rewards.0.", kind)
    yield Line("sampling.temperature", 0.0)
    yield Line("sampling.max_new_tokens", 256)
    yield Line("samples_per_prompt", 1)
    yield Line("compare", {"model": "runs/sft/model"}, is_example=True)


_PAIRS = ("prompt", "chosen", "rejected")
_HEADS = (Line("heads.depth", 3), Line("sampling.max_new_tokens", 256))
_STARTERS: Mapping[str, Starter] = {
    "sft": Starter(
        "demonstrations.jsonl", lambda asked: supervised(asked, ("prompt", "completion"), model="Qwen/Qwen2.5-0.5B")
    ),
    "reward-model": Starter("pairs.jsonl", lambda asked: supervised(asked, _PAIRS, Line("centring", 0.01))),
    "preference": Starter("pairs.jsonl", _preference),
    "medusa": Starter("prompts.jsonl", lambda asked: supervised(asked, ("prompt",), *_HEADS, lr=1e-3, is_tuned=False)),
    "rl": Starter("prompts.jsonl", rl_lines, is_rewarded=True),
    "eval": Starter("held_out.jsonl", _eval, is_rewarded=True),
}


def starter_of(job: str) -> Starter:
    """How the recipe of a job begins.

    Raises:
        UserError: the job is of a plug-in that does not say so.
    """
    found = jobs()[job].starter
    if job not in _STARTERS and found is None:
        remedy = f"write one: quartet config {job} lists its keys"
        raise UserError("there is no recipe to begin with for this job", found=job, remedy=remedy)
    return _STARTERS[job] if found is None else load(found)


# Sections ------------------------------------------------------------------------------------------------


def train_lines(above: str, lr: float) -> Iterator[Line]:
    """How a model is trained."""
    yield Line(f"{above}precision", "bf16", is_example=True)
    yield Line(f"{above}lora", {"rank": 16}, is_example=True)
    yield Line(f"{above}optim.lr", lr)


def data_lines(above: str, path: str, needs: tuple[str, ...], row: Row | None) -> Iterator[Line]:
    """Where data are, with the columns that they need, as far as ``row`` has them under other names."""
    yield Line(f"{above}path", path, note=f"Columns: {', '.join(needs)}; docs/data.md.")
    if row is None:
        yield Line(f"{above}columns", {needs[0]: "question"}, is_example=True)
    elif mapped := usual_columns(needs, row):
        yield Line(f"{above}columns", mapped)
    if row is not None and any("\n\nHuman:" in text for text in row.values() if isinstance(text, str)):
        yield Line(f"{above}turns", "messages", is_example=True)
    yield Line(f"{above}overlong", "skip")


def reward_lines(above: str, kind: str) -> Iterator[Line]:
    """One source of reward."""
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
