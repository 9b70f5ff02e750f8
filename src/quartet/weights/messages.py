"""What the driver of a weight sync tells the two ends, and what they answer: plain data, as JSON where needed.

=================== ============================ ==================================================================
message             to, and its answer           meaning
=================== ============================ ==================================================================
``Describe``        both: ``Endpoint``           where the end computes, and what an engine wants
``ConnectSender``   sender: ``Done``             the transport to use from now on
``ConnectReceiver`` receivers: ``Done``          the same
``Prepare``         sender: ``Announcement``     what will be sent and where to find it
``Announcement``    receivers: ``Done``          everything fits; nothing has been written yet
``Pieces``          both: ``Sealed``, ``Done``   move the data, each end digests what it has; at both ends at once
``Verify``          receivers: ``Done``          every digest is as the sender's
``Commit``          receivers: ``Done``          the new version is served
``Abort``           both: ``Done``               the sync has failed; ignored by an end that is not in it
``Disconnect``      both: ``Done``               lets go of the transport; engines keep what they have
=================== ============================ ==================================================================

Each end answers one message at a time, and ``Failed`` where something is wrong with the sync. What does not belong to
the sync under way is refused by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quartet.weights.errors import WeightSyncError, rebuilt
from quartet.weights.manifest import Manifest, TensorSpec, from_plain

PROTOCOL = 1
"""Counts changes of these messages and of the manifest's ``WIRE_FORMAT``."""
Transport = Literal["shared", "shared_memory", "cuda_ipc", "collective", "disk"]
SEQUENTIAL: frozenset[Transport] = frozenset({"shared", "disk"})
"""Transports whose sender moves everything before a receiver takes it."""
Offer = Mapping[str, Any]
"""What a receiver needs in order to find the data: JSON."""


@dataclass(frozen=True)
class Describe:
    """Asks for an ``Endpoint``."""


@dataclass(frozen=True)
class Endpoint:
    """One end of a sync.

    Attributes:
        machine: the same for processes that can open each other's memory: one boot, one process namespace, one user.
        address: by which other machines reach this one.
        device: ``cpu``, or of a GPU its UUID.
        torch: its release.
        dtypes: what an engine takes, by the names that are sent and as safetensors calls them; None of a sender.
    """

    machine: str
    pid: int
    address: str
    device: str
    torch: str
    byte_order: str
    dtypes: Mapping[str, str] | None = None
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class ConnectSender:
    """
    Attributes:
        host: where receivers reach the sender's machine.
        timeout_s: longest silence of another end.
        dtypes: what the engines take.
    """

    transport: Transport
    num_receivers: int
    host: str
    timeout_s: float
    dtypes: Mapping[str, str]


@dataclass(frozen=True)
class ConnectReceiver:
    transport: Transport
    rank: int
    timeout_s: float


@dataclass(frozen=True)
class Prepare:
    version: int


@dataclass(frozen=True)
class Announcement:
    """
    Attributes:
        sync: its number, which all later messages carry.
        tensors: in the order in which they are sent.
    """

    sync: int
    version: int
    transport: Transport
    tensors: tuple[TensorSpec, ...]
    offer: Offer


@dataclass(frozen=True)
class Pieces:
    sync: int


@dataclass(frozen=True)
class Sealed:
    manifest: Manifest


@dataclass(frozen=True)
class Verify:
    sync: int
    manifest: Manifest


@dataclass(frozen=True)
class Commit:
    sync: int


@dataclass(frozen=True)
class Abort:
    """
    Attributes:
        has_begun: the sender may have written data.
    """

    sync: int
    reason: str
    has_begun: bool


@dataclass(frozen=True)
class Disconnect:
    pass


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Failed:
    """A ``WeightSyncError`` as data.

    Attributes:
        error: the name of its class.
        fields: its attributes.
    """

    error: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, error: WeightSyncError) -> Failed:
        return cls(type(error).__name__, vars(error))

    def as_error(self, rank: int | None) -> WeightSyncError:
        """The error again. ``rank``: of the receiver that answered, where the error names none; None: the sender."""
        kinds = {kind.__name__: kind for kind in WeightSyncError.__subclasses__()}
        fields = dict(self.fields)
        if rank is not None and fields["rank"] is None:
            fields["rank"] = rank
            if f"rank {rank}" not in f"{fields['problem']} {fields['found']}":
                fields["found"] += f" (at rank {rank})"
        return rebuilt(kinds.get(self.error, WeightSyncError), fields)


Message = (
    Describe | ConnectSender | ConnectReceiver | Prepare | Announcement | Pieces | Verify | Commit | Abort | Disconnect
)
Answer = Endpoint | Announcement | Sealed | Done | Failed
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*Message.__args__, *Answer.__args__)}


def to_json(message: Message | Answer) -> dict[str, Any]:
    """For ``json.dumps``; ``from_json`` gives the message back."""
    return {"type": type(message).__name__, **asdict(message)}


def from_json(value: Mapping[str, Any]) -> Any:
    """
    Raises:
        WeightSyncError: not what ``to_json`` gives.
    """
    fields = dict(value)
    return from_plain(_KINDS.get(fields.pop("type", "")), fields, "a message with")
