"""Rollout engines: requests in, completions out."""
