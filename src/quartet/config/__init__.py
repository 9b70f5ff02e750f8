"""Recipes and user errors. Imports neither torch nor transformers."""

from quartet.config.errors import Interrupted, UserError

__all__ = ["Interrupted", "UserError"]
