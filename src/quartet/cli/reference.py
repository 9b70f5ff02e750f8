"""Keys of a recipe on the terminal (left as a recipe writes them, right what they take and mean), and as the pages of
docs/reference, which `quartet config --write` makes from the same source."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quartet.config.reference import Key, Section, purposes, sections

_LEFT = 32
"""Width of the column with keys and defaults; longer ones are folded."""


def show_jobs() -> None:
    """The jobs that have recipes."""
    console = Console(highlight=False)
    console.print(_lines([(Text(job, "bold"), Text(words)) for job, words in purposes().items()], left=24))
    _hint(console, "quartet config rl lists the keys of a job, quartet init rl writes a recipe to begin with")


def show_keys(job: str, part: str) -> None:
    """The keys at ``part`` of a job's recipe; raises ``UserError`` where there is nothing."""
    found = sections(job, part)
    console = Console(highlight=False)
    for section in found:
        title = Text.assemble((section.address or f"quartet {job}", "bold underline"), "   ", section.meaning.strip())
        console.print(title)
        if section.variants:
            variants = section.variants.items()
            rows = [(Text.assemble(f"  {section.tag}: ", (name, "green")), Text(words)) for name, words in variants]
        else:
            rows = [(_key(key), _words(key, section)) for key in section.keys]
        console.print(_lines(rows))
        console.print()
    choice = next((section for section in found if section.variants), None)
    hints = [f"keys of a choice: quartet config {job} {choice.address}.{next(iter(choice.variants))}"] if choice else []
    if not part:
        hints += [f"a part: quartet config {job} {found[1].address}"] if len(found) > 1 else []
        hints.append(f"a recipe to begin with: quartet init {job}")
    for hint in hints:
        _hint(console, hint)


def _key(key: Key) -> Text:
    return Text.assemble("  ", (f"{key.name}:", "bold"), " " if key.default else "", (key.default or "", "green"))


def _words(key: Key, section: Section) -> Text:
    """Type, unit and meaning; for a section also where its keys are."""
    words = Text(key_type(key), "cyan")
    below = f"{section.address}.{key.name}".strip(".")
    if key.section is not None and key.section != below:
        words.append(f"; keys of {key.section}", "cyan")
    return words.append(". ", "cyan").append(key.meaning, "default")


def key_type(key: Key) -> str:
    """``integer ≥ 1, tokens``, and whether it must be set."""
    return ", ".join([key.type, *([key.unit] if key.unit else []), *(["required"] if key.default is None else [])])


def _lines(rows: list[tuple[Text, Text]], left: int = _LEFT) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=False)
    table.add_column(width=left, overflow="fold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _hint(console: Console, text: str) -> None:
    console.print(Text(text, "dim"), soft_wrap=True)


# The pages of docs/reference ------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """The text of each page by its file name: one a job, and README.md, which lists them."""
    rows = "\n".join(f"| [`{job}`]({job}.md) | {_cell(words)} |" for job, words in purposes().items())
    index = (
        "# Keys of every recipe\n\nWritten by `make reference` from the recipes' own classes; `quartet config` prints "
        f"the same.\n\n| job | what it does |\n|---|---|\n{rows}\n"
    )
    return {"README.md": index, **{f"{job}.md": _page(job) for job in purposes()}}


def _page(job: str) -> str:
    parts = [
        f"# `quartet {job}`: every key",
        f"{purposes()[job]} On the command line: `quartet config {job}`. A section that is given in part keeps the "
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
