"""``python -m quartet``: the ``quartet`` command."""

from quartet.cli.main import main

main()
