"""Hub models in runs: the commits that a recipe's names mean, kept by a resume; and the model card (``README.md``)
of an exported model: what it is, how to load it, and what it was made of.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub import metadata_load

from quartet.config import UserError
from quartet.config.common import DataConfig, HubConfig, ModelConfig, Strict
from quartet.config.engines import Speculation
from quartet.config.evaluation import ComparisonConfig
from quartet.config.load import dump_recipe
from quartet.config.plugins import added
from quartet.config.recipe import Recipe, RLRecipe
from quartet.observe.metrics import find_metric
from quartet.remote.hub import current_commit, pin, split_name
from quartet.text.loading import local_directory, local_or_hub

R = TypeVar("R", bound=Recipe)
_DATA = ("data", "evaluation_data", "evaluation.data", "ptx.data")
_SAID = ("loss/", "reward/", "kl/", "sft/", "reward_model/", "preference/", "process_reward/")
"""Figures of the last step that say how well it learned; seconds, memory and such are left out."""
_FROM_BASE = ("base_model", "license", "license_name", "license_link")
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def pinned(recipe: R, former: object, tell: Callable[[str], object]) -> tuple[R, dict[str, str]]:
    """The recipe with ``owner/name@commit`` in the place of every name of the hub; and these by their keys.

    Args:
        former: the same of the run that goes on, whose commits stay; anything else where none does.
        tell: told of a branch that has moved since, and of a hub that does not answer.

    Raises:
        UserError: a model cannot be fetched; where workers of other machines load it, they say so.
    """
    pins = _Pins(former if isinstance(former, Mapping) else {}, tell)
    workers_load = getattr(getattr(recipe, "cluster", None), "type", None) == "ray"
    with contextlib.suppress(UserError) if workers_load else contextlib.nullcontext():
        recipe = pins.section(recipe, "")
    return recipe, pins.commits


class _Pins:
    def __init__(self, former: Mapping[str, Any], tell: Callable[[str], object]) -> None:
        self.commits: dict[str, str] = {}
        self._former, self._tell = former, tell

    def section(self, value: Any, key: str) -> Any:
        """``value`` with pinned names, at ``key`` of the recipe."""
        dot = f"{key}." if key else ""
        if isinstance(value, tuple):
            return tuple(self.section(each, f"{dot}{number}") for number, each in enumerate(value))
        if not isinstance(value, Strict):
            return value
        changes = {name: self.section(getattr(value, name), f"{dot}{name}") for name in value.model_fields_set}
        if isinstance(value, HubConfig):
            named = "model" if isinstance(value, ComparisonConfig) else "path"
            changes |= {"revision": None, named: self._name(f"{dot}{named}", getattr(value, named), value.revision)}
            if getattr(value, "tokenizer", None) is not None:
                changes["tokenizer"] = self._name(f"{dot}tokenizer", changes["tokenizer"], None, "tokenizer")
        if isinstance(value, Speculation) and hasattr(value, "path"):
            changes["path"] = self._name(
                f"{dot}path", value.path, None, "drafter", added("drafters")[value.type].folder
            )
        changes = {name: new for name, new in changes.items() if new != getattr(value, name)}
        return value.model_copy(update=changes) if changes else value

    def _name(
        self, key: str, name: str | None, revision: str | None, what: str = "model", part: str = "model"
    ) -> str | None:
        if name is None:
            return None
        full = name if revision is None else f"{name}@{revision}"
        try:
            if local_directory(full, what, part) is not None:
                return name
        except UserError:
            if revision is not None:
                raise
            return name  # who loads it says what is wrong
        repo, asked = split_name(full)
        found, then = None, self._former.get(key)
        if isinstance(then, str) and split_name(then)[0] == repo:
            found, now = then, current_commit(full)
            if now is not None and now != split_name(then)[1]:
                self._tell(
                    f"{repo}: {asked or 'main'} is now at {now[:12]}; the run goes on with the commit that it began "
                    f"with, {str(split_name(then)[1])[:12]}"
                )
        if found is None:
            found, remark = pin(full, weights=what != "tokenizer")
            if remark is not None:
                self._tell(remark)
        self.commits[key] = found
        return found


# The model card -------------------------------------------------------------------------------------------


def write_cards(path: Path, recipe: Recipe, pinned: Recipe, summary: Mapping[str, Any]) -> None:
    """Writes a card into the model and the adapters that the run in ``path`` has exported; a link to another run's
    keeps its own.

    Args:
        pinned: the recipe with the commits of its models.
        summary: of the run, as ``summary.json`` has it; ``rows`` counts those of each source of data.

    Raises:
        OSError: it cannot be written.
    """
    for folder in (path / "model", path / "adapter"):
        if folder.is_dir() and not folder.is_symlink():
            text = _USER.sub("…", model_card(folder, recipe, pinned, summary))
            (folder / "README.md").write_text(text, encoding="utf-8")


def model_card(folder: Path, recipe: Recipe, pinned: Recipe, summary: Mapping[str, Any]) -> str:
    """The card of the model in ``folder``: metadata as the hub has it, then text."""
    start: ModelConfig | None = getattr(pinned.actor if isinstance(pinned, RLRecipe) else pinned, "model", None)
    is_adapter, is_scalar = _kind(folder)
    kind = "SequenceClassification" if is_scalar else "CausalLM"
    package, name = ("peft", f"AutoPeftModelFor{kind}") if is_adapter else ("transformers", f"AutoModelFor{kind}")
    method = [str(part.name) for key in ("algorithm", "loss") if (part := getattr(recipe, key, None)) is not None]
    sources = list(_sources(recipe, summary.get("rows") or {}))
    datasets = sorted({source for _, source, _ in sources if _HUB_NAME.fullmatch(source) and not Path(source).exists()})
    base = {} if start is None else _base(start.path)
    metadata = {
        "library_name": package,
        "pipeline_tag": "text-classification" if is_scalar else "text-generation",
        **base,
        **({"base_model_relation": "adapter" if is_adapter else "finetune"} if "base_model" in base else {}),
        **({"datasets": datasets} if datasets else {}),
        "tags": ["quartet", str(summary["job"]), *method],
    }
    begun = "a model passed from Python" if start is None else f"`{start.path}`"
    code = ", trust_remote_code=True" if start is not None and start.trust_remote_code else ""
    loading = (
        f"from {package} import {name}\nfrom transformers import AutoTokenizer\n\n"
        f'path = "."  # this directory, or its name on the hub\nmodel = {name}.from_pretrained(path{code})\n'
        f"tokenizer = AutoTokenizer.from_pretrained(path{code})"
    )
    last: Mapping[str, float] = summary["stages"][-1]["metrics"]
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n\n# {folder.parent.name}",
        f"Trained by `quartet {' '.join([str(summary['job']), *method])}` from {begun}, seed {summary['seed']}.",
        f"## Loading\n\n````python\n{loading}\n````",
        *_table("Data", "key | source | rows used", [(f"`{key}`", path, num) for key, path, num in sources]),
        *_figures("Held-out evaluation", {n: value for n, value in last.items() if n.startswith("eval/")}),
        *_figures("Last step of training", {n: value for n, value in last.items() if n.startswith(_SAID)}),
        f"## Recipe\n\n````yaml\n{dump_recipe(recipe.model_copy(update={'output_dir': None}))}````",
        "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def _kind(folder: Path) -> tuple[bool, bool]:
    """Whether it holds adapters, and whether its model gives one number instead of text."""
    if (file := folder / "adapter_config.json").is_file():
        return True, json.loads(file.read_text(encoding="utf-8")).get("task_type") == "SEQ_CLS"
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return False, any("SequenceClassification" in name for name in found.get("architectures") or [])


def _base(path: str) -> dict[str, Any]:
    """Base model and licence, as far as they are known: a directory hands on what its own card says."""
    found: dict[str, Any] = {}
    with contextlib.suppress(UserError, ValueError, OSError, yaml.YAMLError):
        found = metadata_load(Path(local_or_hub(path, "model")) / "README.md") or {}
    repo, commit = split_name(path)
    if commit is not None and not Path(path).expanduser().exists():
        found["base_model"] = repo
    return {key: found[key] for key in _FROM_BASE if key in found}


def _sources(recipe: Recipe, rows: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """Key, file or data set, and rows of every source; those of several together are counted with the first."""
    for key in _DATA:
        section: Any = recipe
        for name in key.split("."):
            section = getattr(section, name, None)
        named = [str(part.path) for part in section.parts] if isinstance(section, DataConfig) else []
        if not named and rows.get(key):
            named = ["rows passed from Python"]
        for number, path in enumerate(named):
            yield key, path, f"{rows[key]:,}" if number == 0 and key in rows else ""


def _figures(title: str, figures: Mapping[str, float]) -> list[str]:
    rows = [(f"`{name}`", f"{value:.4g}", find_metric(name).meaning) for name, value in figures.items()]
    return _table(title, "figure | value | meaning", rows)


def _table(title: str, head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """A section with a table; none without rows."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [f"## {title}\n\n| {head} |\n|---|---|---|\n" + "\n".join(lines)] if rows else []
