"""Answers of a model on the command line."""
