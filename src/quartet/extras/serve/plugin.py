"""An OpenAI-compatible server over any engine."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(commands={"Look at data, a model or a run": {"serve": "quartet.extras.serve.command:serve"}})
