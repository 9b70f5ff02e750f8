"""`quartet init`: a short recipe to begin with. Its comments are the keys' own descriptions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from quartet.config.algorithms import PPO, BestOfN, Distillation, RewardedAlgorithm
from quartet.config.errors import UserError
from quartet.config.jobs import jobs, recipes
from quartet.config.load import methods, no_such_job
from quartet.config.nearest import nearest
from quartet.config.plugins import Starter, load
from quartet.config.preference import KTOLoss
from quartet.config.schema import chosen_member, item_annotation
from quartet.config.synonyms import usual_columns
from quartet.config.yamls import one_line
from quartet.extras.recipes.reference import meaning, purpose

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
_SUPERVISED: Mapping[str, Starter] = {
    "sft": Starter("demonstrations.jsonl", ("prompt", "completion"), {"model.path": "Qwen/Qwen2.5-0.5B"}),
    "reward-model": Starter("pairs.jsonl", ("prompt", "chosen", "rejected"), {"centring": 0.01}),
    "preference": Starter("pairs.jsonl", ("prompt", "chosen", "rejected"), {"train.optim.lr": 1e-6}),
}
_EXAMPLE = "# "
"""Before the last name of a key that is commented out."""
_WIDTH, _COLUMN = 100, 40
"""Longest line, and where comments begin."""
Row = Mapping[str, Any]


def starter(
    job: str, *, method: str | None = None, reward: str | None = None, data: str | None = None, row: Row | None = None
) -> str:
    """Writes a commented recipe of ``job`` with the keys that are changed first; it loads as it is.

    Args:
        row: the first row of ``data``, where it is there to be looked at: its columns are mapped where their names say
            what they are.

    Raises:
        UserError: no such job, method or reward, or the job has none to choose.
    """
    _check(job, "method", method, methods().get(job, ()))
    _check(job, "reward", reward, REWARDS if job in jobs() and is_rewarded(job) else ())
    if jobs()[job].is_supervised:
        keys, needs = _supervised(job, method or next(iter(methods().get(job, ())), None))
    elif job in _JOBS:
        keys, needs = _JOBS[job](method, reward)
    else:
        keys, needs = _of_plugin(_begun(job), method, reward)
    place = next(key for key in keys if key.endswith("data.path")).removesuffix("path")
    keys[f"{place}path"] = data or keys[f"{place}path"]
    if row is None:
        keys[f"{place}{_EXAMPLE}columns"] = {needs[0]: "question"}
    elif mapped := usual_columns(needs, row):
        keys[f"{place}columns"] = mapped
    if row is not None and any("\n\nHuman:" in text for text in row.values() if isinstance(text, str)):
        keys[f"{place}{_EXAMPLE}turns"] = "messages"
    keys[f"{place}overlong"] = "skip"
    called = "".join(f" --{name} {value}" for name, value in (("method", method), ("reward", reward)) if value)
    head = [
        f"# quartet {job} recipe.yaml",
        f"# Written by: quartet init {job}{called}. Every key: quartet config {job}",
        "# Lines that begin with # are examples of what else is often set.",
        f"# Columns of the data: {', '.join(needs)}; docs/data.md.",
    ]
    if reward == "math":
        head.append("# The reward needs math-verify: pip install 'quartet-rl[math]'")
    tree: dict[str, Any] = {}
    for address, value in {"job": job, "output_dir": f"runs/{job}", **keys}.items():
        *above, name = address.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return "\n".join([*head, *_written(tree, recipes()[job])]) + "\n"


def is_rewarded(job: str) -> bool:
    """Says whether the job scores answers, so that a kind of reward can be chosen."""
    return job in _JOBS or (job not in _SUPERVISED and _begun(job).reward is not None)


def _begun(job: str) -> Starter:
    if (named := jobs()[job].starter) is None:
        remedy = f"write one: quartet config {job} lists its keys"
        raise UserError("there is no recipe to begin with for this job", found=job, remedy=remedy)
    found: Starter = load(named)
    return found


def _check(job: str, what: str, name: str | None, known: Any) -> None:
    if job not in jobs():
        raise no_such_job(job)
    if name is None or name in known:
        return
    if not known:
        raise UserError(f"{job} has no {what} to choose", found=f"--{what} {name}", remedy=f"leave --{what} out")
    remedy = " Else ".join(filter(None, (nearest(name, known), f"use one of {', '.join(known)}")))
    raise UserError(f"{job} knows no such {what}", found=f"--{what} {name}", remedy=remedy)


# Keys of jobs by their addresses, in the order of the recipe, and columns that the data need ----------------------


def _supervised(job: str, method: str | None) -> tuple[dict[str, Any], list[str]]:
    begun = _SUPERVISED.get(job) or _begun(job)
    keys = {
        "model.path": "runs/sft/model",
        "data.path": begun.data,
        f"{_EXAMPLE}evaluation_data": {"path": "held_out.jsonl"},
    }
    if method is not None:
        loss = methods()[job][method]()
        shown = ("beta", "odds_coef", *(["undesirable_weight"] if isinstance(loss, KTOLoss) else []))
        keys |= {"loss.name": method} | {f"loss.{key}": getattr(loss, key) for key in shown if hasattr(loss, key)}
    size = next(name for name in recipes()[job].model_fields if name.endswith("_per_step"))
    keys |= {"epochs": 1, size: 32} | (_training("train.", 1e-5) if begun.is_tuned else {})
    needs = ["prompt", "completion", "label"] if method == "kto" else list(begun.columns)
    return keys | {"train.optim.warmup_steps": 10, "train.optim.schedule": "cosine", **begun.keys}, needs


def _rl(method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    algorithm = methods()["rl"][method or "ppo"]()
    keys, needs = {"actor.model.path": "runs/sft/model", **_training("actor.train.", 1e-6)}, ["prompt"]
    if isinstance(algorithm, PPO):
        keys |= {"critic.train.optim.lr": 1e-5, "critic.warmup_steps": 4}
    if isinstance(algorithm, Distillation):
        keys["reference.path"] = "runs/teacher/model"
    if reward or not isinstance(algorithm, Distillation):
        kind = reward or ("model" if isinstance(algorithm, PPO) else "function")
        keys["rewards"], needs = [_reward(kind)], needs + _reward_columns(kind)
    keys["algorithm.name"] = algorithm.name
    if isinstance(algorithm, RewardedAlgorithm):
        keys["algorithm.kl.coef"] = algorithm.kl.coef
    if isinstance(algorithm, BestOfN):
        keys["algorithm.keep"] = algorithm.keep
    responses = getattr(algorithm, "default_responses", 1)
    keys |= {
        "data.path": "prompts.jsonl",
        "rollout.sampling.temperature": 1.0,
        "rollout.sampling.max_new_tokens": 256,
        f"{_EXAMPLE}evaluation": {"data": {"path": "held_out.jsonl"}},
        "steps": 100,
        "prompts_per_step": 16 if responses > 1 else 64,
        "responses_per_prompt": responses,
        "minibatches": 2,
    }
    return keys, needs


def _eval(method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    kind = reward or "function"
    keys = {
        "model.path": "runs/rl/model",
        "data.path": "held_out.jsonl",
        "rewards": [_reward(kind)],
        "sampling.temperature": 0.0,
        "sampling.max_new_tokens": 256,
        "samples_per_prompt": 1,
        f"{_EXAMPLE}compare": {"model": "runs/sft/model"},
    }
    return keys, ["prompt", *_reward_columns(kind)]


_JOBS = {"rl": _rl, "eval": _eval}


def _of_plugin(begun: Starter, method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    keys = {key: _reward(reward or "function") if key == begun.reward else value for key, value in begun.keys.items()}
    if begun.rl is None:
        return {**keys, "data.path": begun.data}, list(begun.columns)
    left_out = ("rewards", f"{_EXAMPLE}evaluation")
    rl = {f"{begun.rl}.{key}": value for key, value in _rl(method, None)[0].items() if key not in left_out}
    return keys | rl, list(begun.columns)


def _training(above: str, lr: float) -> dict[str, Any]:
    return {f"{above}{_EXAMPLE}precision": "bf16", f"{above}{_EXAMPLE}lora": {"rank": 16}, f"{above}optim.lr": lr}


def _reward(kind: str) -> dict[str, Any]:
    return {"type": kind, **REWARDS[kind]}


def _reward_columns(kind: str) -> list[str]:
    return [column for key, column in REWARDS[kind].items() if key == "column"]


def _written(section: Mapping[str, Any], model: type[BaseModel], indent: int = 0) -> Iterator[str]:
    """Writes the keys of a section as YAML, with what ``model`` says of each behind it; ``indent`` is added later."""
    for name, value in section.items():
        annotation = model.model_fields[name.removeprefix(_EXAMPLE)].annotation
        is_list = isinstance(value, list) and isinstance(value[0], dict)
        first = value[0] if is_list else value
        below = chosen_member(item_annotation(annotation) or annotation, first) if isinstance(first, dict) else None
        if below is not None and not name.startswith(_EXAMPLE):
            yield f"{name}:"
            for n, line in enumerate(_written(first, below, indent + 2)):
                yield ("- " if is_list and n == 0 else "  ") + line
            continue
        text = f"{name}: {one_line(value)}"
        comment = meaning(model, name.removeprefix(_EXAMPLE)) or purpose(model)
        column = max(_COLUMN - indent, len(text) + 2)
        words = textwrap.wrap(comment, max(_WIDTH - indent - column - 2, 24))
        yield f"{text:<{column}}# {words[0]}"
        yield from (f"{'':<{column}}# {more}" for more in words[1:])
