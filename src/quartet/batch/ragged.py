"""Ragged batches: sequences of any length without padding, prompts stored once.

Shape suffixes: T stored tokens, K segments, S sequences.

A *segment* is a run of tokens with an optional parent segment. A *sequence* is a leaf segment together with
its chain of ancestors. Two responses to the prompt ``[5, 6]`` are three segments and two sequences::

    segment   0 (root)   1 (parent 0)   2 (parent 0)
    input_ids 5 6        7 8 9          7 4
    leaves    1 -> sequence 0,  2 -> sequence 1

Every token field has one entry per *stored* token and belongs to that token: ``logprobs[t]`` is the
log-probability of token t given everything before it. Ancestor tokens are shared, so they carry no loss of
their own: their masks are 0.

An *outline* is a batch without its token ids: it has everything else, ``input_ids`` is -1 everywhere, and ``elsewhere``
refers to batches that have the ids.

What a scoring pass returns: columns keyed by sequence id, joined to a batch without touching it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def to_device_async(values: Tensor, device: torch.device | str) -> Tensor:
    """Sends ``values`` to ``device``; to a GPU in the order of its work, which the host does not wait for."""
    return values.to(device, non_blocking=torch.device(device).type != "cpu")


_FIELDS = ("token", "sequence", "objects")


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """An immutable set of sequences over shared segments; every operation returns a new batch.

    Args:
        input_ids: ``[T]`` int64, segments one after the other.
        segment_lengths: ``[K]`` tokens per segment, each at least 1.
        parents: ``[K]`` index of the parent segment, or -1; a parent stands before its children.
        leaves: ``[S]`` the leaf segment of each sequence; it has no children and belongs to that sequence
            alone. A segment that no sequence needs is allowed; ``select`` drops it.
        ids: ``[S]`` unique sequence ids, the keys by which columns are joined.
        token: fields ``[T]``.
        sequence: fields ``[S]``.
        objects: per-sequence Python objects, each a tuple of length S.
        elsewhere: references to batches that together have the token ids of all sequences, where this one has none.
            Only the cluster layer knows what such a reference is. With references ``input_ids`` becomes -1, which no
            embedding takes, as a view of one element.
    """

    input_ids: Tensor
    segment_lengths: tuple[int, ...]
    parents: tuple[int, ...]
    leaves: tuple[int, ...]
    ids: tuple[str, ...]
    token: Mapping[str, Tensor] = field(default_factory=dict)
    sequence: Mapping[str, Tensor] = field(default_factory=dict)
    objects: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    elsewhere: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "parents", "leaves", "ids", "elsewhere"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "objects", {name: tuple(column) for name, column in self.objects.items()})
        for name in _FIELDS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if self.elsewhere:
            unknown = torch.full((1,), -1, device=self.input_ids.device)
            object.__setattr__(self, "input_ids", unknown.expand(sum(self.segment_lengths)))
        self._validate()

    def __reduce__(self) -> tuple[type[RaggedBatch], tuple[Any, ...]]:
        # A mapping proxy cannot be pickled, and batches travel between processes.
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.elsewhere:
            held["input_ids"] = self.input_ids[:1]
        return RaggedBatch, tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in held.values())

    def _validate(self) -> None:
        num_tokens = sum(self.segment_lengths)
        if self.input_ids.ndim != 1 or self.input_ids.shape[0] != num_tokens:
            raise ValueError(f"input_ids has shape {tuple(self.input_ids.shape)}, segments hold {num_tokens} tokens")
        if any(length < 1 for length in self.segment_lengths):
            raise ValueError("a segment needs at least one token")
        if any(not -1 <= parent < k for k, parent in enumerate(self.parents)):
            raise ValueError(f"a parent must stand before its child: parents {self.parents}")
        if self.input_ids.dtype != torch.int64:
            raise ValueError(f"input_ids must be int64, found {self.input_ids.dtype}")
        if len(set(self.leaves)) != len(self.leaves):
            raise ValueError("a segment is the leaf of at most one sequence")
        if inner := set(self.leaves) & set(self.parents):
            raise ValueError(f"a leaf has no children, but leaves {sorted(inner)} are parents of segments")
        if len(self.ids) != len(self.leaves) or len(set(self.ids)) != len(self.ids):
            raise ValueError(f"{len(self.leaves)} sequences need as many distinct ids, found {self.ids}")
        for family, size in zip(_FIELDS, (num_tokens, len(self), len(self)), strict=True):
            for name, values in getattr(self, family).items():
                if len(values) != size:
                    raise ValueError(f"{family} field {name!r} has {len(values)} entries, expected {size}")

    def _check_has_ids(self) -> None:
        if not self.has_ids:
            raise ValueError(f"the token ids of this batch of {len(self)} sequences are elsewhere; fill it before")

    # Sizes -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def num_tokens(self) -> int:
        """Stored tokens: a shared prompt counts once."""
        return int(self.input_ids.shape[0])

    @property
    def has_ids(self) -> bool:
        """Whether the token ids are here; False for an outline."""
        return not self.elsewhere

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @cached_property
    def segment_offsets(self) -> tuple[int, ...]:
        """``[K + 1]`` where each segment starts in the token fields."""
        return tuple(accumulate(self.segment_lengths, initial=0))

    def chain(self, s: int) -> tuple[int, ...]:
        """Returns the segments of sequence ``s`` from its root to its leaf."""
        chain: list[int] = []
        k = self.leaves[s]
        while k >= 0:
            chain.append(k)
            k = self.parents[k]
        return tuple(reversed(chain))

    def segments_of(self, sequences: Iterable[int]) -> list[int]:
        """Returns the segments of these sequences, each once, in the order in which they come to need them."""
        return list(dict.fromkeys(k for s in sequences for k in self.chain(s)))

    def sequence_lengths(self) -> list[int]:
        """Counts the tokens of each sequence with its ancestors (what it costs when nothing is shared)."""
        return [sum(self.segment_lengths[k] for k in self.chain(s)) for s in range(len(self))]

    def leaf_span(self, s: int) -> tuple[int, int]:
        """Returns where the leaf of sequence ``s`` lies in the token fields: ``[start, stop)``."""
        start = self.segment_offsets[self.leaves[s]]
        return start, start + self.segment_lengths[self.leaves[s]]

    def sequence_index(self) -> Tensor:
        """Returns ``[T]`` the sequence whose leaf holds the token, -1 for ancestor tokens."""
        owner = dict(zip(self.leaves, range(len(self)), strict=True))
        # The dtype is spelt out because an empty list would make a float tensor.
        per_segment, lengths = torch.tensor(
            [[owner.get(k, -1) for k in range(len(self.parents))], self.segment_lengths], dtype=torch.int64
        )
        # Spread out on the host: a GPU would be waited for to know the size.
        return to_device_async(per_segment.repeat_interleave(lengths), self.device)

    def token_ids(self, s: int) -> list[int]:
        """Returns all token ids of sequence ``s``, ancestors included.

        Raises:
            ValueError: an outline has none.
        """
        self._check_has_ids()
        offsets = self.segment_offsets
        return [token for k in self.chain(s) for token in self.input_ids[offsets[k] : offsets[k + 1]].tolist()]

    # Building and changing -------------------------------------------------------------------------------

    @classmethod
    def from_sequences(
        cls, sequences: Sequence[Sequence[int]], ids: Sequence[str] | None = None, **fields: Any
    ) -> RaggedBatch:
        """Makes a batch of independent sequences, each one root segment. ``fields`` as in the constructor."""
        segments = Segments()
        leaves = [segments.add(tokens, -1) for tokens in sequences]
        return segments.batch(leaves, ids if ids is not None else [str(s) for s in leaves], **fields)

    @classmethod
    def from_groups(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[Sequence[int]]],
        ids: Sequence[str],
        **fields: Any,
    ) -> RaggedBatch:
        """Makes a batch of one prompt segment per group and one child per response; ``ids`` in group order."""
        segments = Segments()
        leaves: list[int] = []
        for prompt, members in zip(prompts, responses, strict=True):
            root = segments.add(prompt, -1)
            leaves += [segments.add(response, root) for response in members]
        return segments.batch(leaves, ids, **fields)

    def with_token(self, **fields: Tensor) -> RaggedBatch:
        return replace(self, token={**self.token, **fields})

    def with_sequence(self, **fields: Tensor) -> RaggedBatch:
        return replace(self, sequence={**self.sequence, **fields})

    def with_objects(self, **fields: Sequence[Any]) -> RaggedBatch:
        return replace(self, objects={**self.objects, **{k: tuple(v) for k, v in fields.items()}})

    def without_objects(self) -> RaggedBatch:
        """Returns the same batch for computing only: texts and prompts need not travel."""
        return replace(self, objects={})

    def bare(self) -> RaggedBatch:
        """Returns the segments, sequences and token ids, without any field."""
        return replace(self, token={}, sequence={}, objects={})

    def pop(self, name: str) -> tuple[RaggedBatch, Any]:
        """Returns the batch without token, sequence or object field ``name``, and that field."""
        family = next((family for family in _FIELDS if name in getattr(self, family)), None)
        if family is None:
            raise KeyError(name)
        remaining = dict(getattr(self, family))
        value = remaining.pop(name)
        change: dict[str, Any] = {family: remaining}
        return replace(self, **change), value

    def to(self, device: torch.device | str) -> RaggedBatch:
        return replace(
            self,
            input_ids=to_device_async(self.input_ids, device),
            token={k: to_device_async(v, device) for k, v in self.token.items()},
            sequence={k: to_device_async(v, device) for k, v in self.sequence.items()},
        )

    def select(self, indices: Sequence[int], *, keep_order: bool = False) -> RaggedBatch:
        """Returns the sequences ``indices`` in that order, with the ancestors they need, each stored once.

        Negative indices count from the end; an index twice is refused, as ids are unique.

        Args:
            keep_order: of the segments, which else are stored in the order in which the sequences need them.
        """
        indices = [range(len(self))[s] for s in indices]
        needed = self.segments_of(indices)
        kept = {k: place for place, k in enumerate(sorted(needed) if keep_order else needed)}
        lengths = [self.segment_lengths[k] for k in kept]
        parents = [kept.get(self.parents[k], -1) for k in kept]
        return self.regrouped(list(kept), lengths, parents, [kept[self.leaves[s]] for s in indices], indices)

    def regrouped(
        self,
        segments: Sequence[int | None],
        lengths: Sequence[int],
        parents: Sequence[int],
        leaves: Sequence[int],
        sequences: Sequence[int],
    ) -> RaggedBatch:
        """Puts these ``sequences`` over another segment table.

        Args:
            segments: for each segment of the new table the one here that its tokens are taken from; None: zeros.
            lengths, parents, leaves: the new table, as in the constructor.
        """
        spans = [None if k is None else slice(*self.segment_offsets[k : k + 2]) for k in segments]

        def tokens(values: Tensor) -> Tensor:
            # Whole segments are copied at the speed of memory, picked tokens are not.
            pieces = [
                values.new_zeros(length, *values.shape[1:]) if span is None else values[span]
                for span, length in zip(spans, lengths, strict=True)
            ]
            return torch.cat(pieces) if pieces else values[:0]

        picked = torch.tensor(list(sequences), dtype=torch.int64, device=self.device)
        return RaggedBatch(
            input_ids=tokens(self.input_ids) if self.has_ids else self.input_ids[:0],
            segment_lengths=tuple(lengths),
            parents=tuple(parents),
            leaves=tuple(leaves),
            ids=tuple(self.ids[s] for s in sequences),
            token={name: tokens(values) for name, values in self.token.items()},
            sequence={name: values[picked] for name, values in self.sequence.items()},
            objects={name: tuple(values[s] for s in sequences) for name, values in self.objects.items()},
            elsewhere=self.elsewhere,
        )

    @classmethod
    def concat(cls, batches: Sequence[RaggedBatch]) -> RaggedBatch:
        """Joins batches that have the same fields. Prompts are not merged.

        Raises:
            ValueError: there is none, fields differ, or some are outlines and others are not.
        """
        if not batches:
            raise ValueError("nothing to concatenate")
        first = batches[0]
        for other in batches[1:]:
            for family in _FIELDS:
                ours, theirs = sorted(getattr(first, family)), sorted(getattr(other, family))
                if ours != theirs:
                    raise ValueError(f"{family} fields differ: {ours} and {theirs}")
            if other.has_ids != first.has_ids:
                raise ValueError("an outline cannot be joined with a batch that has its token ids; fill it before")
        parents: list[int] = []
        leaves: list[int] = []
        for batch in batches:
            base = len(parents)
            leaves.extend(base + leaf for leaf in batch.leaves)
            parents.extend(base + parent if parent >= 0 else -1 for parent in batch.parents)
        return cls(
            input_ids=torch.cat([b.input_ids for b in batches]) if first.has_ids else first.input_ids[:0],
            segment_lengths=tuple(n for b in batches for n in b.segment_lengths),
            parents=tuple(parents),
            leaves=tuple(leaves),
            ids=tuple(i for b in batches for i in b.ids),
            token={name: torch.cat([b.token[name] for b in batches]) for name in first.token},
            sequence={name: torch.cat([b.sequence[name] for b in batches]) for name in first.sequence},
            objects={name: tuple(o for b in batches for o in b.objects[name]) for name in first.objects},
            elsewhere=tuple({id(ref): ref for b in batches for ref in b.elsewhere}.values()),
        )

    def outline(self, elsewhere: Sequence[Any]) -> RaggedBatch:
        """Returns the batch without its token ids, which the batches referred to by ``elsewhere`` have."""
        if not elsewhere:
            raise ValueError("an outline refers to where its token ids are, found no reference")
        return replace(self, elsewhere=tuple(elsewhere))

    def filled(self, sources: Sequence[RaggedBatch]) -> RaggedBatch:
        """Fills an outline with the token ids of ``sources``, which may hold more sequences; a batch with ids as it is.

        A sequence is found by its id, in the first source that has it. Segments that no sequence needs keep -1.

        Raises:
            ValueError: no source has a sequence, or there it is cut into other segments, or a source is an outline.
        """
        if self.has_ids:
            return self
        own_ids = set(self.ids)
        at = {
            name: (sources[b], s)
            for b in reversed(range(len(sources)))
            for s, name in enumerate(sources[b].ids)
            if name in own_ids
        }
        found: list[Tensor | None] = [None] * len(self.parents)
        for s, name in enumerate(self.ids):
            if name not in at:
                raise ValueError(f"no source has the token ids of sequence {name!r}")
            source, there = at[name]
            source._check_has_ids()
            own, other = self.chain(s), source.chain(there)
            lengths = [self.segment_lengths[k] for k in own]
            lengths_there = [source.segment_lengths[k] for k in other]
            if lengths != lengths_there:
                raise ValueError(f"sequence {name!r} has segments of {lengths} tokens, in its source {lengths_there}")
            for k, k_there in zip(own, other, strict=True):
                if found[k] is None:  # by offsets: a source may be far larger than this batch
                    start = source.segment_offsets[k_there]
                    found[k] = source.input_ids[start : start + source.segment_lengths[k_there]]
        unknown = self.input_ids.cpu().split(self.segment_lengths) if None in found else ()
        parts = [unknown[k] if ids is None else ids for k, ids in enumerate(found)]
        input_ids = torch.cat(parts) if parts else self.input_ids
        return replace(self, input_ids=to_device_async(input_ids, self.device), elsewhere=())


# Building, prompts that begin alike stored once ----------------------------------------------------------

MIN_SHARED = 16
"""Shortest common beginning of two different prompts that becomes a segment of its own: every segment is another call
of attention, which a few saved tokens do not pay for. Equal prompts are always one segment."""


@dataclass
class Segments:
    """Segments of a batch in the making; ``lengths``, ``parents`` and ``input_ids`` as in ``RaggedBatch``."""

    input_ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], parent: int) -> int:
        """Appends a segment; returns its index."""
        self.input_ids.extend(token_ids)
        self.lengths.append(len(token_ids))
        self.parents.append(parent)
        return len(self.lengths) - 1

    def add_prompts(self, prompts: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Adds prompts, and returns the segment at which each ends; what they have in common from the start is stored
        once.
        """
        ends: dict[tuple[int, ...], int] = {}
        self._grow(list(dict.fromkeys(prompts)), 0, -1, ends)
        return ends

    def batch(self, leaves: Sequence[int], ids: Sequence[str], **fields: Any) -> RaggedBatch:
        """Returns the batch whose sequences end at the segments ``leaves``."""
        input_ids = torch.tensor(self.input_ids, dtype=torch.int64)
        return RaggedBatch(input_ids, tuple(self.lengths), tuple(self.parents), tuple(leaves), tuple(ids), **fields)

    def _grow(self, prompts: list[tuple[int, ...]], start: int, parent: int, ends: dict[tuple[int, ...], int]) -> None:
        """Adds different prompts, equal in their first ``start`` tokens, which end at ``parent``."""
        alike: dict[int, list[tuple[int, ...]]] = {}
        for prompt in prompts:
            if len(prompt) == start:
                ends[prompt] = parent
            else:
                alike.setdefault(prompt[start], []).append(prompt)
        for members in alike.values():
            stop = _common(members)
            if len(members) > 1 and stop - start < MIN_SHARED:
                for prompt in members:
                    ends[prompt] = self.add(prompt[start:], parent)
            else:
                self._grow(members, stop, self.add(members[0][start:stop], parent), ends)


def _common(prompts: Sequence[tuple[int, ...]]) -> int:
    """Counts tokens that all have in common from the start."""
    # Whatever lies between the least and the greatest shares what these two share.
    least, greatest = min(prompts), max(prompts)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(least), len(greatest)))


@dataclass(frozen=True)
class ColumnSet:
    """Columns of one pass over one batch.

    Args:
        ids: the sequences, in the batch's order.
        token: fields ``[T]`` in the batch's stored layout, 0 where the pass computed nothing.
        sequence: fields ``[S]``.
    """

    ids: tuple[str, ...]
    token: Mapping[str, Tensor] = field(default_factory=dict)
    sequence: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", MappingProxyType(dict(self.token)))
        object.__setattr__(self, "sequence", MappingProxyType(dict(self.sequence)))

    def __reduce__(self) -> tuple[type[ColumnSet], tuple[object, ...]]:
        # A mapping proxy cannot be pickled, and columns travel between processes.
        return ColumnSet, (self.ids, dict(self.token), dict(self.sequence))

    @classmethod
    def concat(cls, parts: Sequence[ColumnSet]) -> ColumnSet:
        """Joins columns of consecutive chunks, for the concatenated batch."""
        return cls(
            ids=tuple(i for part in parts for i in part.ids),
            token={name: torch.cat([part.token[name] for part in parts]) for name in parts[0].token},
            sequence={name: torch.cat([part.sequence[name] for part in parts]) for name in parts[0].sequence},
        )


def join_columns(batch: RaggedBatch, *columns: ColumnSet) -> RaggedBatch:
    """Returns the batch with the columns as fields.

    Raises:
        ValueError: the columns belong to other sequences, or a field would be written twice.
    """
    for column_set in columns:
        if column_set.ids != batch.ids:
            raise ValueError(f"columns belong to sequences {column_set.ids[:3]}…, the batch has {batch.ids[:3]}…")
        taken = (set(column_set.token) & set(batch.token)) | (set(column_set.sequence) & set(batch.sequence))
        if taken:
            raise ValueError(f"the batch already has {sorted(taken)}")
        batch = batch.with_token(**column_set.token).with_sequence(**column_set.sequence)
    return batch
