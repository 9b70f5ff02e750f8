"""Questions on generated pictures, and a tiny vision-language model that learns to answer them."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(commands={"Begin": {"pictures": "quartet.extras.pictures.command:pictures"}})
