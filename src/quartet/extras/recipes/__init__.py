"""Recipes to begin with, and every key of a recipe."""
