"""Recipes and user errors. Imports neither torch nor transformers."""

from quartet.config.errors import UserError

__all__ = ["UserError"]
