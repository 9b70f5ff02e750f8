"""Imported first by the server of ``forkserver.py``: no garbage collection until ``frozen_heap``, which comes last.

Nothing of what is imported between them is garbage; walking it again and again is a fifth of the time.
"""

import gc

gc.disable()
