"""Quartet: RLHF and LLM reinforcement learning, from a laptop CPU upwards.

The public face: trainers, their recipes, and the error they raise for mistakes a user can mend. ``__init__.pyi`` lists
the names; each is loaded when it is first asked for, so ``import quartet`` is cheap.
"""

import os
from importlib.metadata import PackageNotFoundError, version

# An engine's process finds the package by a link, which does not stay.
__path__ = [os.path.realpath(folder) for folder in __path__]

try:
    import lazy_loader
except ModuleNotFoundError:  # within an engine's own environment, where only parts of the package are used
    __all__: list[str] = []
else:
    __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

try:
    __version__ = version("quartet-rl")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

if "QUARTET_LOG" in os.environ:  # another process of a run has started this one
    from quartet.observe.process import set_up_from_environment

    set_up_from_environment()
