"""Looking at runs: the report, the live page, the terminal, comparisons and replays."""

from quartet.config.plugins import Plugin

_COMMANDS = ("watch", "report", "compare", "replay")
PLUGIN = Plugin(
    commands={"Look at data, a model or a run": {name: f"quartet.extras.report.commands:{name}" for name in _COMMANDS}},
    report="quartet.extras.report.build:build_report",
)
