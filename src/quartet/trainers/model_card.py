"""The model card, ``README.md`` of an exported model: what it is, how to load it, and what it was made of."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from quartet.config import UserError
from quartet.config.common import DataConfig, HubConfig
from quartet.config.load import dump_recipe
from quartet.config.recipe import Recipe
from quartet.observe.metrics import find_metric
from quartet.remote.hub import split_name
from quartet.text.loading import local_or_hub

_EXPORTS = ("model", "critic", "adapter", "critic_adapter")
_DATA = ("data", "evaluation_data", "evaluation.data", "ptx.data")
_SAID = ("loss/", "reward/", "kl/", "sft/", "reward_model/", "preference/", "process_reward/")
"""Figures of the last step that say how well it learned; seconds, memory and such are left out."""
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_cards(path: Path, recipe: Recipe, pinned: Recipe, summary: Mapping[str, Any]) -> None:
    """Writes a card into each model that the run in ``path`` has exported; a link to another run's keeps its own.

    Args:
        pinned: the recipe with the commits of its models.
        summary: of the run, as ``summary.json`` has it; ``rows`` counts those of each source of data.

    Raises:
        OSError: it cannot be written.
    """
    for name in _EXPORTS:
        if (folder := path / name).is_dir() and not folder.is_symlink():
            text = _PASSWORD.sub("…", model_card(folder, recipe, pinned, summary))
            (folder / "README.md").write_text(text, encoding="utf-8")


def model_card(folder: Path, recipe: Recipe, pinned: Recipe, summary: Mapping[str, Any]) -> str:
    """The card of the model in ``folder``: metadata as the hub has it, then text."""
    job, base = str(summary["job"]), _base(pinned)
    is_adapter, is_scalar = _kind(folder)
    method = [str(part.name) for key in ("algorithm", "loss") if (part := getattr(recipe, key, None)) is not None]
    metadata = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if is_scalar else "text-generation",
        **base,
        "tags": ["quartet", job, *method],
    }
    if "base_model" in base:
        metadata["base_model_relation"] = "adapter" if is_adapter else "finetune"
    if datasets := sorted({s for _, s, _ in _sources(recipe, {}) if _HUB_NAME.fullmatch(s) and not Path(s).exists()}):
        metadata["datasets"] = datasets
    own = _start(pinned)
    begun = f"`{own.path}`" if own is not None else "a model passed from Python"
    how = f"`quartet {job}`{f' ({method[0]})' if method else ''}"
    what = "Adapters of a model" if is_adapter else "A critic" if folder.name == "critic" else "A model"
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---",
        f"# {folder.parent.name}",
        f"{what} trained with Quartet by {how} from {begun}, seed {summary['seed']}.",
        f"## Loading\n\n````python\n{_loading(is_adapter, is_scalar, own is not None and own.trust_remote_code)}\n````",
        *_data_section(recipe, summary.get("rows") or {}),
        *_figures(summary),
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


def _start(recipe: Recipe) -> Any:
    """The section of the model that the trained one started as; None where Python passed it."""
    return getattr(recipe.actor if hasattr(recipe, "actor") else recipe, "model", None)


def _base(pinned: Recipe) -> dict[str, str]:
    """Base model and licence, as far as they are known: a directory hands on what its own card says."""
    start = _start(pinned)
    if not isinstance(start, HubConfig):
        return {}
    name, found = str(attrgetter("path")(start)), {}
    with contextlib.suppress(UserError, ValueError, OSError, yaml.YAMLError):
        found = metadata_load(Path(local_or_hub(name, "model")) / "README.md") or {}
    repo, commit = split_name(name)
    if commit is not None and not Path(name).expanduser().exists():
        found["base_model"] = repo
    return {key: found[key] for key in ("base_model", "license", "license_name", "license_link") if key in found}


def _sources(recipe: Recipe, rows: Mapping[str, int]) -> Iterator[tuple[str, str, int | None]]:
    """Key, file or data set, and rows of every source; those of several together are counted with the first."""
    for key in _DATA:
        try:
            config: DataConfig | None = attrgetter(key)(recipe)
        except AttributeError:  # another job's
            config = None
        named = [str(part.path) for part in config.parts] if config is not None else []
        if not named and rows.get(key):
            named = ["rows passed from Python"]
        for number, path in enumerate(named):
            yield key, path, rows.get(key) if number == 0 else None


def _data_section(recipe: Recipe, rows: Mapping[str, int]) -> list[str]:
    lines = [f"| `{k}` | {path} | {'' if num is None else f'{num:,}'} |" for k, path, num in _sources(recipe, rows)]
    return ["## Data\n\n| key | source | rows used |\n|---|---|---:|\n" + "\n".join(lines)] if lines else []


def _figures(summary: Mapping[str, Any]) -> list[str]:
    last: Mapping[str, float] = summary["stages"][-1]["metrics"] if summary.get("stages") else {}
    parts = {
        "Held-out evaluation": [name for name in last if name.startswith("eval/")],
        "Last step of training": [name for name in last if name.startswith(_SAID)],
    }
    return [
        f"## {title}\n\n| figure | value | meaning |\n|---|---:|---|\n"
        + "\n".join(f"| `{name}` | {last[name]:.4g} | {find_metric(name).meaning} |" for name in names)
        for title, names in parts.items()
        if names
    ]


def _loading(is_adapter: bool, is_scalar: bool, has_code: bool) -> str:
    kind = "SequenceClassification" if is_scalar else "CausalLM"
    package, name = ("peft", f"AutoPeftModelFor{kind}") if is_adapter else ("transformers", f"AutoModelFor{kind}")
    code = ", trust_remote_code=True" if has_code else ""
    imports = (
        f"from peft import {name}\nfrom transformers import AutoTokenizer"
        if package == "peft"
        else f"from transformers import {name}, AutoTokenizer"
    )
    return (
        f'{imports}\n\npath = "."  # this directory, or its name on the hub\n'
        f"model = {name}.from_pretrained(path{code})\n"
        f"tokenizer = AutoTokenizer.from_pretrained(path{code})"
    )
