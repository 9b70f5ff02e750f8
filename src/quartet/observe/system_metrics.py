"""Rows of the table of metrics about time, memory, tokens and data."""

from __future__ import annotations

SYSTEM_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "time/<stage>_s",
        "s",
        "Seconds in one stage of the step, its spans added up; stages overlap, so they may exceed the step.",
        "One stage grows from step to step.",
    ),
    (
        "overlap/score_generate_s",
        "s",
        "Seconds in which scoring ran while later groups were still being generated.",
        "0 with more than one chunk per step: stages wait for each other.",
    ),
    (
        "tokens/useful",
        "tokens",
        "Distinct tokens whose computation the step needs; a shared prompt counts once.",
        "Jumps without a change of prompts or lengths.",
    ),
    (
        "memory/rss_bytes",
        "bytes",
        "Resident memory of this process.",
        "Grows from step to step: something keeps old batches.",
    ),
    (
        "handover/onload_bytes",
        "bytes",
        "Parts of models brought to their devices in the step, where pools have a budget.",
        "Several times the models' size: roles take turns too often; raise budget_bytes or chunk_size.",
    ),
    (
        "handover/offload_bytes",
        "bytes",
        "Parts of models, and caches of engines, that left their devices in the step.",
        "As above.",
    ),
    (
        "handover/freed_bytes",
        "bytes",
        "What the devices really had free after these parts had left, as measured.",
        "Far below handover/offload_bytes: somebody still holds the memory.",
    ),
    (
        "handover/onload_s",
        "s",
        "Seconds in which parts were brought in.",
        "A large share of time/step_s: the budget is too small for what the pool holds.",
    ),
    (
        "handover/offload_s",
        "s",
        "Seconds in which parts left.",
        "As above.",
    ),
    (
        "policy_version",
        "versions",
        "Version of the weights that the engines have after the step; the rollouts say which sampled them.",
        "Stands still while training goes on.",
    ),
    (
        "data/epoch",
        "epochs",
        "Passes over the prompts or demonstrations so far.",
        "Far above 1 with falling held-out figures: overfitting.",
    ),
    (
        "data/ptx_epoch",
        "epochs",
        "Passes over the demonstrations that are mixed into the actor's updates.",
        "Far above 1 while loss/ptx nears 0: they are learned by heart.",
    ),
)
