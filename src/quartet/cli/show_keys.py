"""Keys of a recipe on the terminal: on the left as a recipe writes them, on the right what they take and mean."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quartet.config.reference import Key, Section, jobs, sections

_LEFT = 32
"""Width of the column with keys and defaults; longer ones are folded."""


def show_jobs() -> None:
    """The jobs that have recipes."""
    console = Console(highlight=False)
    console.print(_lines([(Text(job, "bold"), Text(words)) for job, words in jobs().items()], left=24))
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
