"""The quickstart: SFT, reward model and PPO on a toy task."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(commands={"Begin": {"quickstart": "quartet.extras.quickstart.command:quickstart"}})
