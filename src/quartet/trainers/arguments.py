"""What Python code may pass in place of an object: the path or hub name of a model or tokenizer, one bare reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.config import UserError
from quartet.config.common import ModelConfig
from quartet.config.recipe import Recipe
from quartet.text.loading import load_tokenizer

ModelLike: TypeAlias = PreTrainedModel | str | Path
TokenizerLike: TypeAlias = PreTrainedTokenizerBase | str | Path
Reward: TypeAlias = Callable[..., Any] | PreTrainedModel

R = TypeVar("R", bound=Recipe)


def check_recipe(recipe: object, kind: type[Recipe]) -> None:
    """Raises ``UserError`` where ``recipe`` is no recipe of this kind."""
    if not isinstance(recipe, kind):
        job = kind.model_fields["job"].default
        raise UserError(
            f"this trainer takes a recipe of the class {kind.__name__}",
            found=type(recipe).__name__,
            remedy=f"make one, {kind.__name__}(…), or read one, load_recipe({job!r}, 'recipe.yaml')",
        )


def with_names(
    recipe: R, model: ModelLike | None, tokenizer: TokenizerLike | None, section: str = "model"
) -> tuple[R, PreTrainedModel | None, PreTrainedTokenizerBase | None]:
    """The recipe in which ``section`` names the model and tokenizer that were passed by name, and those passed as
    objects.

    A name is written into the recipe, so that the run's record and ``--resume`` know it.

    Raises:
        UserError: the recipe names another model, or there is no such tokenizer.
    """
    config: ModelConfig | None = _get(recipe, section)
    if isinstance(model, str | Path):
        recipe, model = with_path(recipe, model, f"{section}.path"), None
        config = _get(recipe, section)
    elif isinstance(model, BaseModel) or (model is not None and not isinstance(model, PreTrainedModel)):
        raise _no_model("model", model)
    if not isinstance(tokenizer, str | Path):
        return recipe, model, tokenizer
    if model is not None or config is None:
        return recipe, model, load_tokenizer(tokenizer)
    return _set(recipe, section, config.model_copy(update={"tokenizer": str(tokenizer)})), None, None


def with_path(recipe: R, model: ModelLike | None, key: str) -> R:
    """The recipe whose ``key`` (``reference.path``, ``critic.path``) is the name passed; itself for an object or None.

    Raises:
        UserError: the recipe has another path there.
    """
    if not isinstance(model, str | Path):
        return recipe
    section, _, last = key.rpartition(".")
    former = _get(recipe, section)
    if former is None:
        return _set(recipe, section, ModelConfig(path=str(model)))
    if getattr(former, last) not in (None, str(model)):
        raise UserError(
            "two models are named for one place",
            found=f"{key}={getattr(former, last)} in the recipe, {str(model)!r} passed from Python",
            remedy="name it in one of them",
        )
    return _set(recipe, section, former.model_copy(update={last: str(model)}))


def only_object(name: str, model: ModelLike | None) -> PreTrainedModel | None:
    """``model`` where it is an object; None for a name, which :func:`with_path` has written into the recipe.

    Raises:
        UserError: it is neither.
    """
    if model is None or isinstance(model, str | Path):
        return None
    if not isinstance(model, PreTrainedModel):
        raise _no_model(name, model)
    return model


def as_rewards(rewards: Reward | Sequence[Reward], name: str = "rewards") -> tuple[Reward, ...]:
    """Rewards passed from Python, one or several, as a tuple.

    Raises:
        UserError: one of them cannot be called.
    """
    if callable(rewards):
        return (rewards,)
    if isinstance(rewards, str | Path | BaseModel) or not isinstance(rewards, Sequence):
        raise _no_reward(name, rewards)
    for reward in rewards:
        if not callable(reward):
            raise _no_reward(name, reward)
    return tuple(rewards)


def _get(recipe: BaseModel, dotted: str) -> Any:
    value: Any = recipe
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _set(recipe: Any, dotted: str, value: Any) -> Any:
    first, _, rest = dotted.partition(".")
    inner = _set(getattr(recipe, first), rest, value) if rest else value
    return recipe.model_copy(update={first: inner})


def _no_model(name: str, found: object) -> UserError:
    return UserError(
        f"{name} is not a model",
        found=f"{type(found).__name__}",
        remedy="pass a transformers model, or the path or hub name of one",
    )


def _no_reward(name: str, found: object) -> UserError:
    shown = repr(found)
    return UserError(
        f"{name} holds something that is not a reward",
        found=f"{shown if len(shown) <= 80 else shown[:77] + '…'} ({type(found).__name__})",
        remedy="pass functions f(prompts, completions, **columns) or sequence-classification models; "
        "rewards with a configuration belong into the recipe: RLRecipe(rewards=[…])",
    )
