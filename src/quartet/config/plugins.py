"""Plug-ins: what extends Quartet without being imported by it.

A plug-in is one object :class:`Plugin`. Quartet's own are the folders of ``quartet/extras`` with a module ``plugin``
that calls it ``PLUGIN``; those of other packages are entry points of the group ``quartet.plugins``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError

GROUP = "quartet.plugins"
EXTRAS = "quartet.extras"


@dataclass(frozen=True)
class RewardType:
    """A source of reward that a recipe names by ``type``.

    Args:
        section: ``module:class`` of the recipe's section, a ``Fallible`` whose ``type`` is the name.
        source: ``module:function`` that makes a ``quartet.rewards.source.RewardSource`` of a section.
    """

    section: str
    source: str


@dataclass(frozen=True)
class DrafterType:
    """What drafts tokens that a recipe's ``rollout.speculation`` names by ``type``.

    Args:
        section: ``module:class`` of it, a ``quartet.config.speculation.Speculation`` whose ``type`` is the name.
        drafter: function ``(section, policy, model)`` that makes a ``quartet.rollout.drafter.Drafter`` of the native
            engine; ``model`` is the trainer's where the engine shares the policy with it, else None.
        vllm: function ``(section, folder)`` that makes the ``quartet.rollout.vllm.start.Drafts`` of vLLM, which may
            read files in ``folder``. None: it drafts for the native engine alone.
        model: function ``(section, policy)`` that loads its ``quartet.rollout.drafter.DrafterModel``, or refuses
            one that is another policy's.
        worker: function ``(engine, also, section, model, seed)`` that makes the
            ``quartet.schedule.model_worker.TrainWorker`` of an actor with which ``model`` learns.
        folder: where a run writes such a model, beside the policy's.
    """

    section: str
    drafter: str
    vllm: str | None = None
    model: str | None = None
    worker: str | None = None
    folder: str = "drafter"


@dataclass(frozen=True)
class Job:
    """A command with a recipe: ``quartet NAME recipe.yaml``.

    Args:
        recipe: ``module:class`` of its recipe, a ``Recipe`` whose ``job`` is the name. Importable without torch.
        trainer: ``module:class`` of what runs it: made with the recipe, ``resume`` and ``progress``, its ``train()``
            returns a ``quartet.trainers.results.TrainResult``.
        help: its line in ``quartet --help``.
        is_supervised: it is a ``SupervisedTrainer``, of which torchrun may start several processes.
        reader: ``module:function`` that says for a recipe how its rows are read; as prompts when left out.
        starter: ``module:name`` of the ``quartet.config.starter.Starter`` that ``quartet init`` writes.
        methods: address of the choice in the recipe that ``quartet init --method`` makes.
        words: parts of the name of a run's directory from which it is guessed that this job writes it.
        folder: what it makes, in the run's directory.
        metrics: those that are shown at the end, as the names in its last row of metrics.
    """

    recipe: str
    trainer: str
    help: str
    is_supervised: bool = False
    reader: str | None = None
    starter: str | None = None
    methods: str | None = None
    words: tuple[str, ...] = ()
    folder: str = "model"
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plugin:
    """What a plug-in adds, as ``module:name``, each imported when it is used.

    Args:
        commands: functions that typer makes sub-commands of ``quartet`` of, by the heading of the help they stand below
            and their names. All are imported for each call of ``quartet``, so their modules import late what is heavy.
        jobs: commands with recipes, by their names.
        rewards: sources of reward by ``type``. Their sections are imported with every recipe, and without torch.
        drafters: what drafts tokens for an engine, by ``type``. As for rewards.
        checks: look at an RL run that is about to begin: functions of its ``RLRoles`` and directory, which return what
            is to be said, as texts.
        report: writes a report of the run in a directory, and returns where it is.
    """

    commands: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    rewards: Mapping[str, RewardType] = field(default_factory=dict)
    drafters: Mapping[str, DrafterType] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    report: str | None = None


@cache
def plugins() -> tuple[Plugin, ...]:
    """All that are installed, Quartet's own first, in the order of their names.

    Raises:
        UserError: one that cannot be imported, or is no plug-in; or two that add the same.
    """
    found = [importlib.import_module(f"{EXTRAS}.{name}.plugin").PLUGIN for name in _extras()]
    found += [_loaded(point) for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]
    names = Counter(name for plugin in found for name in _additions(plugin))
    if both := [name for name, count in names.items() if count > 1]:
        raise UserError("two plug-ins add the same", found=", ".join(both), remedy="uninstall one of them")
    return tuple(found)


def _additions(plugin: Plugin) -> Iterator[str]:
    yield from (f"the command {name}" for commands in plugin.commands.values() for name in commands)
    yield from (f"the command {name}" for name in plugin.jobs)
    yield from (f"the reward type {name}" for name in plugin.rewards)
    yield from (f"the drafter {name}" for name in plugin.drafters)


def _extras() -> list[str]:
    spec = importlib.util.find_spec(EXTRAS)
    folders = spec.submodule_search_locations if spec is not None else None
    return sorted(path.parent.name for folder in folders or () for path in Path(folder).glob("*/plugin.py"))


def _loaded(point: EntryPoint) -> Plugin:
    package = point.dist.name if point.dist is not None else point.value
    try:
        plugin = point.load()
    except Exception as error:  # whatever the package does when it is imported
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(plugin, Plugin):
            return plugin
        problem = f"{point.value} is a {type(plugin).__name__}, no quartet.Plugin"
    raise UserError(
        f"the plug-in {point.name} of the package {package} cannot be used",
        found=problem,
        remedy=f"mend it, or pip uninstall {package}",
    )


def load(target: str) -> Any:
    """What ``module:name`` stands for.

    Raises:
        UserError: it is not there, of a plug-in of another package.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if module.partition(".")[0] == "quartet":
            raise
        problem = f"{type(error).__name__}: {error}"
        raise UserError(
            f"a plug-in names {target}", found=problem, remedy="mend the package, or uninstall it"
        ) from error


def sections(what: str, base: type, kinds: Mapping[str, RewardType | DrafterType]) -> tuple[type, ...]:
    """The recipe's sections of ``kinds``.

    Raises:
        UserError: one is none.
    """
    found = {name: load(kind.section) for name, kind in kinds.items()}
    for name, section in found.items():
        fields: Any = getattr(section, "model_fields", {}) if isinstance(section, type) else {}
        if not fields or not issubclass(section, base) or "type" not in fields or fields["type"].default != name:
            raise UserError(
                f"the section of the {what} {name}, which a plug-in adds, is none",
                found=kinds[name].section,
                remedy=f"mend it: a subclass of {base.__name__} with "
                f'type: Literal["{name}"] = "{name}"; or uninstall it',
            )
    return tuple(found.values())


def report_writer() -> Callable[[Path], Path] | None:
    """What writes a report of a run directory; None where no plug-in does."""
    return next((load(plugin.report) for plugin in plugins() if plugin.report is not None), None)
