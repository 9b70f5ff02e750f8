"""Imported last by the server of ``forkserver.py``: what it has imported is no longer walked by garbage collections.

Each process that it forks would else copy all of that at its first one, 0.4 s of computing.
"""

import gc

gc.freeze()
gc.enable()
