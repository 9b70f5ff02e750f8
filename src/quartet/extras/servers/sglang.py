"""Engine ``sglang``: SGLang's own HTTP interface, as its documentation has it ("SGLang for RL systems").

A pause aborts what runs; the server returns the tokens that each request has, and ``resume`` asks for the rest. So the
version of every token is known, and nothing computed from older weights is used.

Weights as model directories, one per version, for servers that load files.

``version_00000012/`` holds ``model.safetensors``, ``manifest.json`` and, where a template is given, its configuration
and tokenizer, so that it loads as any Hugging Face model does. It takes its name when all of it is on the disk; half a
version is never seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torch import Tensor

from quartet.config import UserError
from quartet.config.remote import RemoteServer
from quartet.extras.servers.checks import Part
from quartet.extras.servers.client import LARGEST_SEED, HTTPEngine
from quartet.extras.servers.config import SGLangEngineConfig
from quartet.extras.servers.sglang_group import GroupWeights
from quartet.models.directories import checkpoint_shapes
from quartet.observe.digests import sync_directory
from quartet.remote.json_client import RemoteError
from quartet.rollout.owned_folders import OwnedFolder
from quartet.rollout.protocol import Request
from quartet.rollout.staging import Load, StagedWeights
from quartet.rollout.stop_strings import Decode
from quartet.trainers.engines import Policy
from quartet.weights.digest import bytes_of, tensor_digest
from quartet.weights.manifest import TensorSpec
from quartet.weights.sink import TensorSink

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
WIRE_FORMAT = 1
"""Counts changes of the manifest or of the digest's definition."""
_PREFIX = "version_"
_DRAFT = ".draft_"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_KEPT = 2


class PublishedWeights:
    """Staged weights as model directories, one per version, that servers load; shared by all engines of a staging.

    Args:
        folder: on a file system that the servers see under the same path; a folder in it is this one's own.
        template: the model's directory; its other files go beside the weights.
    """

    def __init__(self, staging: StagedWeights, folder: Path, template: Path | None = None) -> None:
        self.staging = staging
        self._folder = OwnedFolder(folder, "weights_")
        self._template = template
        self._written: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._users: set[Load] = set()

    def path(self, version: int) -> str:
        """Of the directory with the version that is staged."""
        with self._lock:
            if self._written is None or self._written[0] != version:
                handle = self.staging.handle
                tensors = (tensor for _, tensor in handle)
                written = publish(self._folder.path, version, handle.specs, tensors, self._template)
                self._written = version, str(written)
            return self._written[1]

    def attach(self, load: Load) -> None:
        """As ``StagedWeights.attach``."""
        self._users.add(load)
        self.staging.attach(load)

    def detach(self, load: Load) -> None:
        """The last one deletes what was written."""
        self.staging.detach(load)
        self._users.discard(load)
        if not self._users:
            self._folder.remove()


def publish(
    folder: Path, version: int, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], template: Path | None = None
) -> Path:
    """Writes a version into ``folder``, into which nothing else writes, and leaves of all versions the two newest.

    Args:
        tensors: those of ``specs``, in their order.
        template: a model directory whose files other than weights go beside them.

    Returns:
        The version's own directory.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(_DRAFT + "*"):
        shutil.rmtree(left)  # of a process that was killed
    draft, target = folder / f"{_DRAFT}{version:08d}", folder / f"{_PREFIX}{version:08d}"
    draft.mkdir()
    try:
        _write(draft, version, specs, tensors)
        for path in template.iterdir() if template is not None else ():
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copy2(path, draft / path.name)
        replaced = folder / f"{_DRAFT}replaced"
        if target.exists():  # the same version once more
            os.rename(target, replaced)
        os.rename(draft, target)
        sync_directory(folder)  # the rename itself must survive a crash of the machine
        shutil.rmtree(replaced, ignore_errors=True)
        for old in sorted(path for path in folder.glob(_PREFIX + "*") if path.is_dir())[:-_KEPT]:
            shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _write(draft: Path, version: int, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
    header, offsets = _safetensors_header(specs)
    digests = []
    with _synced(draft / WEIGHTS) as file:
        file.write(header)
        for spec, tensor in zip(specs, tensors, strict=True):
            here = tensor.cpu()
            file.seek(offsets[spec.name])
            file.write(bytes_of(here).numpy().data)
            digests.append(tensor_digest(here))
    # Of all names, dtypes, shapes and contents, whatever their order.
    rows = [(spec.name, spec.dtype, list(spec.shape), digest) for spec, digest in zip(specs, digests, strict=True)]
    lines = "\n".join(sorted(json.dumps(row, separators=(",", ":")) for row in rows))
    whole = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
    listed = [dict(zip(("name", "dtype", "shape", "digest"), row, strict=True)) for row in rows]
    manifest = {"wire_format": WIRE_FORMAT, "version": version, "digest": whole, "tensors": listed}
    with _synced(draft / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def _safetensors_header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where in the file each tensor goes: wide dtypes first, so that all are aligned."""
    ordered = sorted(specs, key=lambda spec: (-spec.torch_dtype.itemsize, spec.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, used = {}, 0
    for spec in ordered:
        end = used + spec.num_bytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [used, end]}
        offsets[spec.name], used = used, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


_REGIONS = {1: ["kv_cache"], 2: ["kv_cache", "weights"]}
"""What each level of sleep gives up."""


class SGLangEngine(HTTPEngine):
    """
    Args:
        weights: where new weights come from; None: the server keeps those that it was started with.
    """

    path = "/generate"
    models_path = "/v1/models"
    break_off_s = 0.5

    def __init__(
        self,
        server: RemoteServer,
        *,
        vocab_size: int,
        decode: Decode | None = None,
        weights: PublishedWeights | GroupWeights | None = None,
    ) -> None:
        self._weights = weights
        self._asleep: Literal[1, 2] | None = None
        super().__init__(server, vocab_size=vocab_size, decode=decode, version=0 if weights is None else None)
        if weights is not None:
            weights.attach(self._take_commit)

    def body(self, request: Request, token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "input_ids": [*request.prompt_ids, *token_ids],
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "stop": list(sampling.stop_strings),
                "stop_token_ids": list(sampling.stop_token_ids),
                "skip_special_tokens": False,  # stop strings are looked for in the text that we have
                # Only what the request names ends it, not the model's own end-of-text.
                "ignore_eos": True,
                "sampling_seed": sampling.seed & LARGEST_SEED,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
        }

    def part(self, answer: Any, request: Request) -> Part:
        meta = answer["meta_info"]
        kind = meta["finish_reason"]["type"]
        if kind not in ("stop", "length", "abort"):
            raise ValueError(f"it ended by {kind!r}")
        has = meta.get("weight_version")
        if self._weights is not None and has is not None and has != str(self.version):
            raise ValueError(f"weights of version {has!r}, after {self.version} was sent: did the server start anew?")
        # An aborted request that had not begun has none.
        columns = (meta.get("output_token_logprobs") or []) if kind == "abort" else meta["output_token_logprobs"]
        if kind != "abort" and meta["completion_tokens"] != len(columns):
            raise ValueError(f"{len(columns)} log-probabilities of {meta['completion_tokens']} tokens")
        token_ids, logprobs = [token for _, token, _ in columns], [logprob for logprob, _, _ in columns]
        return Part(token_ids, logprobs, None if kind == "abort" else kind)

    # Pauses, sleep ----------------------------------------------------------------------------------------

    def _tell(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return self.control(path, body).result()
        except RemoteError as error:
            raise self._failed(error) from error

    def break_off(self) -> None:
        self._tell("/pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        if self._is_paused:
            self._tell("/continue_generation", {})
        super().resume()

    def sleep(self, level: Literal[1, 2]) -> None:
        """The server is started with ``--enable-memory-saver``. Level 1 gives up the cache alone, level 2 the weights
        as well, without a copy.
        """
        self._tell("/release_memory_occupation", {"tags": _REGIONS[level]})
        self._asleep = level
        if level == 2:
            self.version = None

    def wake(self) -> None:
        if self._asleep is not None:
            self._tell("/resume_memory_occupation", {"tags": _REGIONS[self._asleep]})
            self._asleep = None
        self._take_staged()

    # Weights ----------------------------------------------------------------------------------------------

    def weight_sink(self) -> TensorSink:
        return super().weight_sink() if self._weights is None else self._weights.staging.weight_sink()

    def _is_ready(self, timeout_s: float | None) -> bool:
        was_away = self._probe is not None
        if not super()._is_ready(timeout_s):
            return False
        if was_away and self._weights is not None:
            self._tell("/continue_generation", {})  # it may stand in a pause that nobody is left to end
            self._take_staged()
        return True

    def restart(self) -> None:
        super().restart()
        if self._weights is not None:
            self.version = None
        if isinstance(self._weights, GroupWeights):
            self._weights.leave()

    def _take_staged(self) -> None:
        version = None if self._weights is None else self._weights.staging.version
        if version is not None and version != self.version:
            self._load(version)

    def _take_commit(self, version: int) -> None:
        # One that is away or asleep takes what is staged when it is back.
        if self._probe is None and self._asleep is None and self._failure is None:
            try:
                self._load(version)
            except UserError as error:
                # Remembered: the sync goes on for the others, and this one raises at its next call.
                self._failure = self._failed(error)

    def _load(self, version: int) -> None:
        """Raises EngineFailed; the server may have half of the new weights then, and is asked nothing."""
        assert self._weights is not None
        self.version = None
        if isinstance(self._weights, GroupWeights):
            try:
                answer = self._weights.send(version)
            except UserError as error:
                raise self._failed(error) from error
        else:
            body = {"model_path": self._weights.path(version), "weight_version": str(version), "flush_cache": True}
            answer = self._tell("/update_weights_from_disk", body)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise self._failed(
                UserError(
                    "it did not take the new weights",
                    found=f"version {version}: {answer!r}",
                    remedy="see its log; it needs the same architecture, and to see weights_directory, if it has one",
                )
            )
        self.version = version

    def close(self) -> None:
        if self._weights is not None:
            self._weights.detach(self._take_commit)
        super().close()


def sglang_engines(config: SGLangEngineConfig, policy: Policy) -> list[SGLangEngine]:
    """Makes an engine for each address, and the way of new weights to it.

    Raises:
        UserError: adapters are trained.
    """
    if policy.lora is not None:
        raise UserError(
            "sglang takes whole models here, not adapters",
            found="actor.train.lora",
            remedy="leave lora out, or use another rollout.engine",
        )
    text: dict[str, Any] = {"vocab_size": policy.vocab_size, "decode": policy.decode}
    ways = _ways(config, policy)
    return [SGLangEngine(server, weights=way, **text) for server, way in zip(config.servers, ways, strict=True)]


def _ways(config: SGLangEngineConfig, policy: Policy) -> Sequence[PublishedWeights | GroupWeights | None]:
    """By which new weights come to each server."""
    if policy.staging is None:
        return [None] * len(config.urls)
    if config.weights == "distributed":
        options: dict[str, Any] = {"num_workers": config.tensor_parallel_size, "device": policy.device}
        shapes = checkpoint_shapes(Path(policy.path))
        return [GroupWeights(policy.staging, server, shapes=shapes, **options) for server in config.servers]
    assert config.weights_directory is not None, "training needs one, see cross_checks"
    shared = PublishedWeights(policy.staging, Path(config.weights_directory), Path(policy.path))
    return [shared] * len(config.urls)
