"""What the numbers of a recipe count, where the name of a key does not end with it.

For `quartet config` and docs/reference; nothing is checked by it.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Unit

Tokens = Annotated[int, Unit("tokens")]
Rows = Annotated[int, Unit("rows")]
Steps = Annotated[int, Unit("steps")]
Pairs = Annotated[int, Unit("pairs")]
Batches = Annotated[int, Unit("batches")]
Prompts = Annotated[int, Unit("prompts")]
Groups = Annotated[int, Unit("groups")]
Responses = Annotated[int, Unit("responses")]
Samples = Annotated[int, Unit("samples")]
Sequences = Annotated[int, Unit("sequences")]
Processes = Annotated[int, Unit("processes")]
Devices = Annotated[int, Unit("devices")]
Nats = Annotated[float, Unit("nats")]
