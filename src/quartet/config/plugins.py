"""Plug-ins: what extends Quartet without being imported by it.

A plug-in is one object :class:`Plugin`. Quartet's own are the folders of ``quartet/extras`` with a module ``plugin``
that calls it ``PLUGIN``; those of other packages are entry points of the group ``quartet.plugins``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quartet.config.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from quartet.config.run import Recipe


GROUP = "quartet.plugins"
EXTRAS = "quartet.extras"


@dataclass(frozen=True)
class RewardType:
    """A source of reward that a recipe names by ``type``.

    Args:
        section: ``module:class`` of the recipe's section, a ``FallibleReward`` whose ``type`` is the name.
        source: ``module:function`` that makes a ``quartet.rewards.source.RewardSource`` of a section.
        model: in place of a source, for a reward that is a model of the run's own: ``module:function`` that makes a
            ``quartet.trainers.model_loader.RewardModelRole`` of a section (a ``BaseModelReward``), the policy's codec
            and what frozen models are made with.
        metrics: ``module:function`` of further figures of a step: of its batch, the rewards ``[N]`` and their weights.
    """

    section: str
    source: str = ""
    model: str | None = None
    metrics: str | None = None


class Storage(Protocol):
    """What is at a URL: a model or data, or what a run has uploaded. All but ``work_dir`` may raise UserError."""

    def __init__(self, url: str) -> None: ...

    def local_copy(self) -> Path:
        """Brings the file or directory to this machine, once: only what has changed comes again."""

    def records(self, names: Collection[str] | None = None) -> Path:
        """Brings files of a run into a directory here: those of these names, or all but models and checkpoints."""

    def upload(self, file: Path, name: str) -> object:
        """Writes a file below the URL."""

    def work_dir(self) -> Path:
        """Returns the directory here in which a run works whose ``output_dir`` it is."""

    def remote_run(self, path: Path, tell: Callable[[str], object], *, keep: int, timeout_s: float) -> Any:
        """Makes what ``quartet.trainers.run.LocalRunStorage`` describes, for the run in ``path``; it keeps the newest
        ``keep`` checkpoints.
        """


@dataclass(frozen=True)
class DrafterType:
    """What drafts tokens that a recipe's ``rollout.speculation`` names by ``type``.

    Args:
        section: ``module:class`` of it, a ``quartet.config.engines.BaseSpeculationConfig`` whose ``type`` is the name.
        drafter: function ``(section, policy, model)`` that makes a ``quartet.rollout.drafter.Drafter`` of the native
            engine; ``model`` is the trainer's where the engine shares the policy with it, else None.
        vllm: function ``(section, folder)`` that makes the ``quartet.rollout.vllm.start.DraftSettings`` of vLLM, which
            may read files in ``folder``. None: it drafts for the native engine alone.
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
class StarterRecipe:
    """What ``quartet init`` writes first for a job.

    Args:
        data: a name for its data.
        columns: that these need.
        keys: further keys by their addresses, in their order. A last name ``# key`` is commented out.
        reward: address of a reward, which ``--reward`` chooses, in ``keys`` with None.
        rl: section that is a recipe of ``rl``, without rewards.
        is_tuned: a supervised job trains the model itself, in a precision or with adapters.
    """

    data: str
    columns: tuple[str, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    reward: str | None = None
    rl: str | None = None
    is_tuned: bool = True


@dataclass(frozen=True)
class Job:
    """A command with a recipe: ``quartet NAME recipe.yaml``.

    Args:
        recipe: ``module:class`` of its recipe, a ``Recipe`` whose ``job`` is the name. Importable without torch.
        trainer: ``module:class`` of what runs it: made with the recipe, ``resume`` and ``progress``, its ``train()``
            returns a ``quartet.trainers.checkpoints.TrainResult``.
        help: its line in ``quartet --help``.
        is_supervised: it is a ``SupervisedTrainer``, of which torchrun may start several processes.
        reader: ``module:function`` that says for a recipe how its rows are read; as prompts when left out.
        sections: ``module:function`` that gives recipes of other jobs within a recipe, by their keys.
        starter: ``module:name`` of a ``StarterRecipe``; without one ``quartet init`` writes no recipe.
        methods: address of the choice in the recipe that ``quartet init --method`` makes.
        beside: ``module:function`` that writes what belongs beside a trained model, of a recipe and the directory.
        folder: what it makes, in the run's directory.
        metrics: those that are shown at the end, as the names in its last row of metrics.
    """

    recipe: str
    trainer: str
    help: str
    is_supervised: bool = False
    reader: str | None = None
    sections: str | None = None
    starter: str | None = None
    methods: str | None = None
    beside: str | None = None
    folder: str = "model"
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineType:
    """A kind of rollout engine that a recipe names by ``type``.

    Args:
        section: ``module:class`` of the recipe's section, a ``RoutedEngineConfig`` whose ``type`` is the name.
        open: ``module:function`` that makes the engines of a section and a ``quartet.trainers.engines.EnginePolicy``.
    """

    section: str
    open: str


@dataclass(frozen=True)
class TrackerType:
    """Where metrics and samples also go: what a recipe's ``log.trackers`` names by ``type``.

    Args:
        section: ``module:class`` of it, a ``quartet.config.common.BaseTrackerConfig`` whose ``type`` is the name.
        tracker: ``module:function`` that makes a ``quartet.observe.trackers.Tracker`` of a section, a
            ``quartet.observe.trackers.RunInfo``, and the id that the run had there before, if it is resumed.
    """

    section: str
    tracker: str


@dataclass(frozen=True)
class WeightForm:
    """Other ways to compute with a model's weights, of which no result changes but in its rounding.

    Args:
        copies: ``module:function`` that makes ``quartet.rollout.compute_dtype_weights.WeightCopy`` objects, which stand
            in for weights within an engine's steps, of a packed model, the adapters by their layers, the rows that most
            products have, and whether the model is the engine's own. What it leaves out is copied in its own form.
        install: ``module:function`` that gives modules of a model quicker forwards, and returns these modules.
    """

    copies: str
    install: str


@dataclass(frozen=True)
class Plugin:
    """What a plug-in adds, as ``module:name``, each imported when it is used.

    Args:
        commands: functions that typer makes sub-commands of ``quartet`` of, by the heading of the help they stand below
            and their names. All are imported for each call of ``quartet``, so their modules import late what is heavy.
        jobs: commands with recipes, by their names.
        rewards: sources of reward by ``type``. Their sections are imported with every recipe, and without torch.
        checks: look at an RL run that is about to begin: functions of its ``RLRoles`` and directory, which return what
            is to be said, as texts.
        drafters: what drafts tokens for an engine, by ``type``. As for rewards.
        engines: what generates, by ``type``; as with rewards.
        environments: classes of ``quartet.envs.protocol.Environment`` by ``type``, made with ``environment.options``.
        trackers: where metrics and samples also go, by ``type``; as with rewards.
        weight_form: other ways to compute with weights, used wherever they are there.
        report: writes a report of the run in a directory, and returns where it is.
        storage: a class of ``Storage``, for all URLs.
    """

    commands: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    rewards: Mapping[str, RewardType] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    drafters: Mapping[str, DrafterType] = field(default_factory=dict)
    engines: Mapping[str, EngineType] = field(default_factory=dict)
    environments: Mapping[str, str] = field(default_factory=dict)
    trackers: Mapping[str, TrackerType] = field(default_factory=dict)
    report: str | None = None
    storage: str | None = None
    weight_form: WeightForm | None = None


@cache
def installed_plugins() -> tuple[Plugin, ...]:
    """Returns all that are installed, Quartet's own first, in the order of their names.

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
    names = [*plugin.jobs, *(name for commands in plugin.commands.values() for name in commands)]
    yield from (f"the command {name}" for name in names)
    tables = {each.name: getattr(plugin, each.name) for each in fields(plugin) if each.name not in ("commands", "jobs")}
    yield from (f"{table} {name}" for table, made in tables.items() if isinstance(made, Mapping) for name in made)
    yield from ["storage at URLs"] if plugin.storage else []


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


def load_object(target: str) -> Any:
    """Loads what ``module:name`` stands for.

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


def plugin_entries(table: str, own: Collection[str] = ()) -> dict[str, Any]:
    """Returns what plug-ins add under a key of :class:`Plugin`, by its names.

    Raises:
        UserError: one of them is Quartet's ``own``.
    """
    found = {name: made for plugin in installed_plugins() for name, made in getattr(plugin, table).items()}
    if both := set(own) & found.keys():
        remedy = "uninstall it"
        raise UserError(f"a plug-in adds {table} that are Quartet's own", found=", ".join(both), remedy=remedy)
    return found


def config_classes_by_type(
    table: str, base: type | Callable[[Any], type], own: Mapping[str, type] | None = None
) -> dict[str, type[BaseModel]]:
    """Returns Quartet's own sections and those that plug-ins add under a key of :class:`Plugin`, by their ``type``.

    Args:
        base: of all that are added, or of one entry.

    Raises:
        UserError: one is no section, or has the ``type`` of one of ours.
    """
    found: dict[str, Any] = dict(own or {})
    for name, kind in plugin_entries(table, found).items():
        found[name] = _section(table, name, kind.section, base if isinstance(base, type) else base(kind))
    return found


def _section(table: str, name: str, target: str, base: type, key: str = "type") -> Any:
    """Loads the class at ``target``: derived from ``base``, with ``name`` as the default of ``key``."""
    section = load_object(target)
    is_one = isinstance(section, type) and issubclass(section, base)
    if is_one and getattr(section.model_fields.get(key), "default", None) == name:
        return section
    raise UserError(
        f"what a plug-in names for {name} of its {table} does not fit",
        found=target,
        remedy=f'mend it: a subclass of {base.__name__} with {key}: Literal["{name}"] = "{name}"; or uninstall it',
    )


def weight_forms() -> list[WeightForm]:
    """Returns all forms of weights that plug-ins add."""
    return [plugin.weight_form for plugin in installed_plugins() if plugin.weight_form is not None]


def report_writer() -> Callable[[Path], Path] | None:
    """Returns what writes a report of a run directory; None where no plug-in does."""
    return next((load_object(plugin.report) for plugin in installed_plugins() if plugin.report is not None), None)


def storage_for(url: str) -> Storage:
    """Returns the storage at ``url``.

    Raises:
        UserError: no plug-in serves URLs, or it cannot serve this one.
    """
    target = next((plugin.storage for plugin in installed_plugins() if plugin.storage is not None), None)
    if target is None:
        raise UserError("nothing here serves URLs", found=url, remedy="name a path, or install a plug-in for storage")
    served: Storage = load_object(target)(url)
    return served


OWN: Mapping[str, Job] = {
    "sft": Job(
        "quartet.config.recipe:SFTRecipe",
        "quartet:SFTTrainer",
        "Supervised fine-tuning on demonstrations.",
        is_supervised=True,
        metrics=("loss/sft", "eval/loss"),
    ),
    "reward-model": Job(
        "quartet.config.recipe:RewardModelRecipe",
        "quartet:RewardModelTrainer",
        "Reward model from preference pairs.",
        is_supervised=True,
        metrics=("loss/reward_model", "reward_model/accuracy", "eval/accuracy", "eval/longer_answer_accuracy"),
    ),
    "preference": Job(
        "quartet.config.preference:PreferenceRecipe",
        "quartet:PreferenceTrainer",
        "DPO, SimPO, KTO and others on preference data.",
        is_supervised=True,
        methods="loss",
        metrics=(
            "loss/preference",
            "preference/accuracy",
            "preference/margin",
            "preference/reward_chosen",
            "preference/kl",
            "eval/loss",
            "eval/accuracy",
        ),
    ),
    "rl": Job(
        "quartet.config.recipe:RLRecipe",
        "quartet:RLTrainer",
        "Reinforcement learning: PPO, GRPO and others.",
        methods="algorithm",
        metrics=("reward/score_mean", "eval/score_mean", "kl/ref", "policy/entropy", "agreement/logprob_diff_max"),
    ),
    "eval": Job(
        "quartet.config.evaluation:EvalRecipe",
        "quartet:Evaluator",
        "Held-out prompts answered and scored; win rates.",
    ),
}


@cache
def all_jobs() -> dict[str, Job]:
    """Returns all jobs by their names, which are their commands.

    Raises:
        UserError: a plug-in adds one that is Quartet's own.
    """
    return {**OWN, **plugin_entries("jobs", OWN)}


@cache
def recipe_classes() -> Mapping[str, type[Recipe]]:
    """Returns the class of each job's recipe.

    Raises:
        UserError: a plug-in names one that is no recipe of its job.
    """
    from quartet.config.run import Recipe

    return {name: _section("jobs", name, job.recipe, Recipe, "job") for name, job in all_jobs().items()}
