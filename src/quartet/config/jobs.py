"""All jobs, Quartet's own and those of plug-ins, and their recipes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from quartet.config.errors import UserError
from quartet.config.plugins import Job, load, plugins

if TYPE_CHECKING:
    from quartet.config.run import Recipe

OWN: Mapping[str, Job] = {
    "sft": Job(
        "quartet.config.recipe:SFTRecipe",
        "quartet:SFTTrainer",
        "Supervised fine-tuning on demonstrations.",
        is_supervised=True,
    ),
    "reward-model": Job(
        "quartet.config.recipe:RewardModelRecipe",
        "quartet:RewardModelTrainer",
        "Reward model from preference pairs.",
        is_supervised=True,
    ),
    "preference": Job(
        "quartet.config.preference:PreferenceRecipe",
        "quartet:PreferenceTrainer",
        "DPO, SimPO, KTO and others on preference data.",
        is_supervised=True,
        methods="loss",
    ),
    "rl": Job(
        "quartet.config.recipe:RLRecipe",
        "quartet:RLTrainer",
        "Reinforcement learning: PPO, GRPO and others.",
        methods="algorithm",
    ),
    "eval": Job(
        "quartet.config.evaluation:EvalRecipe",
        "quartet:Evaluator",
        "Held-out prompts answered and scored; win rates.",
    ),
}


@cache
def jobs() -> Mapping[str, Job]:
    """All jobs by their names, which are their commands.

    Raises:
        UserError: a plug-in adds one that is Quartet's own.
    """
    added = {name: job for plugin in plugins() for name, job in plugin.jobs.items()}
    if both := OWN.keys() & added.keys():
        raise UserError("a plug-in adds a job that is Quartet's own", found=", ".join(both), remedy="uninstall it")
    return {**OWN, **added}


@cache
def recipes() -> Mapping[str, type[Recipe]]:
    """The class of each job's recipe.

    Raises:
        UserError: a plug-in names one that is no recipe of its job.
    """
    from quartet.config.run import Recipe

    found = {name: load(job.recipe) for name, job in jobs().items()}
    for name, recipe in found.items():
        fields = recipe.model_fields if isinstance(recipe, type) and issubclass(recipe, Recipe) else {}
        if "job" not in fields or fields["job"].default != name:
            raise UserError(
                f"the recipe of the job {name}, which a plug-in adds, is none",
                found=jobs()[name].recipe,
                remedy=f'mend it: a subclass of Recipe with job: Literal["{name}"] = "{name}"; or uninstall it',
            )
    return found
