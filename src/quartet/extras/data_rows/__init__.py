"""Rows of a recipe's data as they will be trained on."""
