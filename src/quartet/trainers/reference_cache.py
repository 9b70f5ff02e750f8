"""Log-probabilities of a reference policy, computed once per data set and kept on disk.

A file belongs to the weights and the token ids that its name and its header tell (SHA-256 of both), so neither other
weights nor other data, another tokenizer or another chat template can be taken for it. What cannot be read is computed
again.

::

    <run>/reference.json                  digests of the reference and of each data set, as the run began
    <cache>/<weights>-<data>.safetensors  by default <cache> is <run>/reference
        answers     [rows, answers per row]  log-probability of each whole answer
        mismatched  [rows, answers per row]  the same of answers to other prompts (KTO)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.data.lazy import Chained, Unchecked
from quartet.data.preference import JudgedData, PreferenceData
from quartet.observe.jsonl import replace_atomically
from quartet.train.engine import TrainEngine
from quartet.train.preference_objectives import answer_logprobs
from quartet.trainers.run import write_json
from quartet.trainers.run_files import read_json, writing
from quartet.weights.gather import gather

FORMAT = "quartet-reference-logprobs-1"
_ROWS = 64
"""Rows of one forward-only pass; micro-batches are cut by the token budget."""
_UNSTABLE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""What a model's config says about its file rather than about what it computes."""

Tables = Mapping[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """A policy that answers are compared with.

    Args:
        digest: names its weights and how they are computed with.
        forward: ``logprobs [T]`` of a batch's loss tokens.
        is_start: it is the model as the run began, so a resumed run no longer has it.
        release: called when the tables are complete; gives back what the reference holds.
    """

    digest: Callable[[], str]
    forward: Callable[[RaggedBatch], ColumnSet]
    is_start: bool
    release: Callable[[], object] = lambda: None


def weights_digest(model: PreTrainedModel, *, precision: str) -> str:
    """SHA-256 of what a model computes: its config, its parameters, the compute dtype.

    Of a model that ranks hold between them the first one's result counts. Collective then.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _UNSTABLE}
    state = hashlib.sha256(json.dumps([config, precision], sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        if (whole := gather(parameter)) is None:
            continue
        values: Any = whole.cpu().contiguous()
        state.update(f"{name}|{values.dtype}|{tuple(values.shape)}".encode())
        state.update(values.flatten().view(torch.uint8).numpy())
    return state.hexdigest()


def data_digest(data: PreferenceData | JudgedData, *, mismatched: bool, reading: str = "") -> str:
    """SHA-256 of all token ids, in their order; of rows that are only checked when they are drawn, of what is in them
    and of ``reading``."""
    state = hashlib.sha256(f"{FORMAT}|{type(data).__name__}|{mismatched}".encode())
    if mismatched:
        state.update(str(data.max_tokens).encode())
    if data.unchecked:
        state.update(reading.encode())
    for part in data.items.parts() if isinstance(data.items, Chained) else (data.items,):
        if isinstance(part, Unchecked):
            state.update(part.digest)
            continue
        for item in part:
            for ids in item.parts:
                state.update(len(ids).to_bytes(8, "little"))
                state.update(np.asarray(ids, dtype=np.int64).tobytes())
    return state.hexdigest()


class ReferenceTables:
    """The tables of one run's data sets: ``tables[name]["answers"]`` is ``[rows, answers per row]`` float32.

    All ranks make the same calls: each computes its share, and the first one reads and writes files.

    Args:
        reference: whose log-probabilities.
        data: the data sets by name.
        drawn: the rows of each that the run uses, ascending.
        engine: of the model that is trained, for its ranks.
        cache: folder to share between runs; the run's own when None.
        mismatched: also of answers to other prompts.
        reading: what decides on the tokens of rows that are only checked when they are drawn.
    """

    def __init__(
        self,
        reference: Reference,
        data: Mapping[str, PreferenceData | JudgedData],
        drawn: Mapping[str, Sequence[int]],
        engine: TrainEngine[Any],
        *,
        cache: str | None,
        mismatched: bool,
        reading: str,
    ) -> None:
        self._engine = engine
        self._reference: Reference | None = reference
        self._data, self._drawn = dict(data), dict(drawn)
        self._cache = None if cache is None else Path(cache).expanduser()
        self._mismatched, self._reading = mismatched, reading
        self._work: Iterator[int] = iter(())
        self.tables: dict[str, Tables] = {}

    def __getitem__(self, name: str) -> Tables:
        if name not in self.tables:
            raise RuntimeError(f"the reference's log-probabilities of {name!r} are not there before the first step")
        return self.tables[name]

    def begin(self, path: Path, *, is_resumed: bool) -> tuple[int, tuple[str, ...]]:
        """Reads the tables that are there; ``compute`` makes the others.

        Args:
            path: the run's directory.
            is_resumed: the run has a checkpoint from which it goes on.

        Returns:
            How many rows have to be computed, and which files are there and cannot be used, in words.

        Raises:
            UserError: data or reference are not those with which the run that is resumed began.
        """
        reference = self._reference
        assert reference is not None, "begun once, before the reference is given back"
        digests = {
            name: data_digest(data, mismatched=self._mismatched, reading=self._reading)
            for name, data in self._data.items()
        }
        first, record = self._engine.of_first_rank, path / "reference.json"
        weights = _weights(reference, first(lambda: _recorded(record)) if is_resumed else None, digests)
        first(lambda: write_json(record, {"weights": weights, "data": digests}))
        folder, warnings = self._cache if self._cache is not None else path / "reference", []
        missing: dict[str, tuple[Path, dict[str, str]]] = {}
        for name, data in self._data.items():
            header, stem = {"format": FORMAT, "weights": weights, "data": digests[name]}, digests[name][:16]
            header["rows"] = str(len(self._drawn[name]))
            if len(self._drawn[name]) < len(data):
                header["drawn"] = hashlib.sha256(np.asarray(self._drawn[name], np.int64).tobytes()).hexdigest()
                stem += f"-{header['drawn'][:8]}"
            file = folder / f"{weights[:16]}-{stem}.safetensors"
            found, is_there = first(partial(_load, file, header))
            if found is not None:
                self.tables[name] = _spread(found, self._drawn[name], len(data))
                continue
            if is_there:
                warnings.append(f"{file} is damaged or belongs to something else: it is computed again")
            if reference.is_start and reference.digest() != weights:
                raise UserError(
                    "the run's reference log-probabilities are gone and cannot be computed again",
                    found=f"no usable {file}, and the model given is not the one the run began with",
                    remedy="give the model the run began with, or choose another output_dir",
                )
            missing[name] = file, header
        self._work = self._computed(reference, missing)
        return sum(len(self._drawn[name]) for name in missing), tuple(warnings)

    def compute(self) -> int:
        """Computes some rows of what is missing, and writes a table that is complete.

        Returns:
            How many rows; 0 when all tables are there.

        Raises:
            UserError: the reference computes numbers that are not finite, or the file cannot be written.
        """
        return next(self._work, 0)

    def _computed(self, reference: Reference, missing: Mapping[str, tuple[Path, dict[str, str]]]) -> Iterator[int]:
        for name, (path, header) in missing.items():
            data = self._data[name]
            sources: dict[str, Callable[[Sequence[int]], RaggedBatch]] = {"answers": data.select}
            if self._mismatched:
                sources["mismatched"] = data.mismatched
            parts: dict[str, list[Tensor]] = {kind: [] for kind in sources}
            size, drawn = _ROWS * self._engine.num_ranks, self._drawn[name]
            for start in range(0, len(drawn), size):
                rows = drawn[start : start + size]
                passes = self._engine.in_shares((select(rows) for select in sources.values()), reference.forward)
                for kind, (batch, found) in zip(sources, passes, strict=True):
                    totals, _ = answer_logprobs(found.token["logprobs"], batch)
                    parts[kind].append(totals.float().view(len(rows), -1))
                if start + size >= len(drawn):
                    tables = {kind: torch.cat(part) for kind, part in parts.items()}
                    self._engine.of_first_rank(partial(_write, path, header, tables))
                    self.tables[name] = _spread(tables, drawn, len(data))
                yield len(rows)

    def release(self) -> None:
        """Gives the reference back, if it is still there; it may change afterwards."""
        reference, self._reference, self._work = self._reference, None, iter(())
        if reference is not None:
            reference.release()


def _spread(tables: Tables, rows: Sequence[int], num: int) -> Tables:
    """Tables of ``rows`` as those of ``num`` rows; NaN stands for the others, which are not drawn."""
    if len(rows) == num:
        return tables
    found = {name: torch.full((num, *values.shape[1:]), math.nan) for name, values in tables.items()}
    for name, values in tables.items():
        found[name][torch.tensor(rows)] = values
    return found


def _write(path: Path, header: Mapping[str, str], tables: dict[str, Tensor]) -> None:
    if wrong := sum(int((~torch.isfinite(values)).sum()) for values in tables.values()):
        raise UserError(
            "the reference gives log-probabilities that are not finite",
            found=f"{wrong} answers",
            remedy="check the reference's weights, or compute in fp32",
        )
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, save(tables, metadata=dict(header)))


def _weights(reference: Reference, record: Mapping[str, Any] | None, digests: Mapping[str, str]) -> str:
    """The digest of the run's reference; the one it began with, where it goes on from a checkpoint with a record."""
    if record is None:
        return reference.digest()
    changed = [name for name, digest in digests.items() if record["data"].get(name) != digest]
    if changed:
        raise UserError(
            f"the {' and '.join(changed)} data are not those the run began with",
            found="other token ids, or rows that are only checked when they are drawn are read in another way",
            remedy="resume with the same rows, tokenizer, chat template, system prompt, max_tokens and doubtful_pairs "
            "(a template that writes today's date: also with that date), or choose another output_dir",
        )
    weights = str(record["weights"])
    if not reference.is_start and reference.digest() != weights:
        raise UserError(
            "the reference is not the one the run began with",
            found="other weights at reference.path",
            remedy="put the former weights back, or choose another output_dir",
        )
    return weights


def _recorded(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except ValueError:
        found = None
    if not (isinstance(found, dict) and isinstance(found.get("data"), dict) and isinstance(found.get("weights"), str)):
        raise UserError(
            f"{path} does not say what the run's reference is",
            found="a damaged file",
            remedy="restore it from a copy, or choose another output_dir",
        )
    return found


def _load(path: Path, header: Mapping[str, str]) -> tuple[Tables | None, bool]:
    """What the file holds, if it holds what ``header`` says and is whole; whether there is anything at its place."""
    return _loaded(path, header) if path.is_file() else None, path.exists()


def _loaded(path: Path, header: Mapping[str, str]) -> Tables | None:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    return tables if {name: metadata.get(name) for name in header} == dict(header) else None
