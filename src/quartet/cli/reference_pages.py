"""The pages of docs/reference: every key of every job, from the same source as `quartet config`."""

from __future__ import annotations

from dataclasses import replace

from quartet.cli.show_keys import key_type
from quartet.config.reference import Key, Section, jobs, sections


def pages() -> dict[str, str]:
    """The text of each page by its file name: one a job, and README.md, which lists them."""
    rows = "\n".join(f"| [`{job}`]({job}.md) | {_cell(words)} |" for job, words in jobs().items())
    index = (
        "# Keys of every recipe\n\nWritten by `make reference` from the recipes' own classes; `quartet config` prints "
        f"the same.\n\n| job | what it does |\n|---|---|\n{rows}\n"
    )
    return {"README.md": index, **{f"{job}.md": _page(job) for job in jobs()}}


def _page(job: str) -> str:
    parts = [
        f"# `quartet {job}`: every key",
        f"{jobs()[job]} On the command line: `quartet config {job}`. A section that is given in part keeps the "
        "defaults of its place, which are shown where they differ from those of the keys it points to.",
    ]
    siblings: dict[str, list[Section]] = {}
    for section in sections(job, variants=True):
        is_variant = bool(section.tag and not section.variants)
        if section.address:
            parts += [f"{'###' if is_variant else '##'} `{section.address}`", _cell(section.meaning)]
        if section.variants:
            rows = [[f"`{name}`", _cell(words)] for name, words in section.variants.items()]
            parts.append(_table([f"`{section.tag}`", "what it is"], rows))
            continue
        keys = section.keys
        if is_variant:
            earlier = siblings.setdefault(section.address.rpartition(".")[0], [])
            base, keys = _beyond(section, earlier)
            earlier.append(section)
            if base is not None:
                parts.append(f"Keys of `{base.address}`{', with this difference:' if keys else '.'}")
        if keys:
            parts.append(_table(["key", "default", "type", "meaning"], [_row(key, section.address) for key in keys]))
        elif not section.keys:
            parts.append("No keys of its own.")
    return "\n\n".join(parts) + "\n"


def _beyond(section: Section, earlier: list[Section]) -> tuple[Section | None, tuple[Key, ...]]:
    """The earlier variant with most of this one's keys and no others, and the keys that differ or are new."""
    mine = {_without_default(key) for key in section.keys}
    bases = [other for other in earlier if other.keys and {_without_default(key) for key in other.keys} <= mine]
    if not bases:
        return None, section.keys
    base = max(bases, key=lambda other: len(set(other.keys) & set(section.keys)))
    known = {replace(key, section=None) for key in base.keys}
    return base, tuple(key for key in section.keys if replace(key, section=None) not in known)


def _without_default(key: Key) -> Key:
    return replace(key, default=None, section=None, type=key.type.removesuffix(", or null"))


def _row(key: Key, address: str) -> list[str]:
    below = f"{address}.{key.name}".strip(".")
    kind = key_type(key)
    if key.section is not None and key.section.startswith("job "):
        job = key.section.removeprefix("job ")
        kind = f"keys of [`{job}`]({job}.md)"
    elif key.section is not None and key.section != below:
        kind = f"{kind}, keys of `{key.section}`"
    return [f"`{key.name}`", f"`{_cell(key.default)}`" if key.default else "", _cell(kind), _cell(key.meaning)]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    """Text that Markdown shows as it is; between backticks only a table's bar needs care."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")
