"""What a run shows of itself.

- ``metrics``: the table of all metric names with unit, meaning and what a bad value looks like
- ``trackers``, ``tracker_kinds``: JSON Lines, and beside it TensorBoard, wandb, trackio, mlflow
- ``callbacks``, ``notify``: objects that are told of a run's steps; messages at its end
- ``logs``: Python's logging, with role and rank
- ``spans``: which stage ran when, over how many tokens and bytes
- ``rollouts``: every response with all its per-token columns
- ``progress``: bars in a terminal, plain lines elsewhere
- ``jsonl``: the files under it, cut back on resume
"""
