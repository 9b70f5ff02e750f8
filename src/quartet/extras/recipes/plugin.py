"""Recipes to begin with (`quartet init`), and every key of a recipe (`quartet config`)."""

from quartet.config.plugins import Plugin

PLUGIN = Plugin(
    commands={"Begin": {name: f"quartet.extras.recipes.commands:{name}" for name in ("init", "config")}},
)
