"""What a run shows of itself.

- ``metrics``: the table of all metric names with unit, meaning and what a bad value looks like
- ``trackers``: JSON Lines and TensorBoard; trackers of other packages behind threads of their own
- ``callbacks``: objects that are told of a run's steps; messages at its end
- ``health``: whether a run learns, whether a reward is exploited, which worker is slow
- ``process``: Python's logging with role and rank, OpenMP's threads
- ``spans``: which stage ran when, over how many tokens and bytes
- ``rollouts``: every response with all its per-token columns
- ``progress``: bars in a terminal, plain lines elsewhere
- ``files``: the files under it, cut back on resume
"""
