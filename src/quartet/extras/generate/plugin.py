"""Answers of a model to prompts on the command line."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(commands={"Look at data, a model or a run": {"generate": "quartet.extras.generate.command:generate"}})
