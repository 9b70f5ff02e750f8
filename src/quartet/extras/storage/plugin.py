"""Runs, models and data at URLs that fsspec knows."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(
    commands={"Look at data, a model or a run": {"upload": "quartet.extras.storage.command:upload"}},
    storage="quartet.extras.storage.store:Store",
)
