"""The row inspector: rows of a recipe as they will be trained on, token by token."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(commands={"Look at data, a model or a run": {"data": "quartet.extras.data_rows.command:data"}})
