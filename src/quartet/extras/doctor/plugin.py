"""The doctor: what goes wrong in RL runs, looked for before a run begins."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(
    commands={"Look at data, a model or a run": {"doctor": "quartet.extras.doctor.command:doctor"}},
    checks=("quartet.extras.doctor.checks:quick_warnings",),
)
