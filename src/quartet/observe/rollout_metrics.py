"""Rows of the table of metrics about generation and episodes: name, unit, meaning, what a bad value looks like."""

from __future__ import annotations

ROLLOUT_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "rollout/tokens",
        "tokens",
        "Response tokens generated for the step.",
        "Grows with the score: length is being rewarded.",
    ),
    (
        "rollout/tokens_per_s",
        "tokens/s",
        "Response tokens per second of generation.",
        "Falls without longer responses.",
    ),
    (
        "rollout/length_mean",
        "tokens",
        "Mean length of a response.",
        "Runs to the limit, or collapses to a few tokens.",
    ),
    (
        "rollout/length_max",
        "tokens",
        "Longest response of the step.",
        "Always the limit: see rollout/truncated_frac.",
    ),
    (
        "rollout/truncated_frac",
        "fraction",
        "Responses that ended at the token limit instead of by themselves.",
        "Above 0.1: their scores judge half an answer.",
    ),
    (
        "episode/turns_mean",
        "turns",
        "Actions per episode, where the recipe has an environment.",
        "Pinned at environment.max_turns: episodes are cut off.",
    ),
    (
        "episode/sequences_mean",
        "sequences",
        "Sequences per episode: 1 more for every time that the environment rewrote the state.",
        "Above 1 where states should extend each other: the chat template changes earlier turns.",
    ),
    (
        "episode/observation_tokens",
        "tokens",
        "Tokens per episode that the environment added between actions.",
        "Many times rollout/length_mean: most of the computation reads, little acts.",
    ),
    (
        "episode/done_frac",
        "fraction",
        "Episodes that the environment ended, rather than max_turns or the end of the context.",
        "Far below 1: final rewards are missing from most trajectories.",
    ),
    (
        "rollout/prefill_tokens",
        "tokens",
        "Prompt tokens the engine computed for the step.",
        "More than the distinct prompt tokens: prompts are computed twice.",
    ),
    (
        "staleness/mean",
        "versions",
        "By how many versions the trained weights are newer than those that sampled a token; mean over tokens.",
        "Near max_staleness: generation is far ahead, and importance weights do more of the work.",
    ),
    (
        "staleness/max",
        "versions",
        "The same of the oldest token.",
        "Above max_staleness, which must not happen.",
    ),
)
