"""Engine ``sglang``: SGLang's own HTTP interface, as its documentation has it ("SGLang for RL systems").

A pause aborts what runs; the server returns the tokens that each request has, and ``resume`` asks for the rest. So the
version of every token is known, and nothing computed from older weights is used.

New weights come as model directories, one per version, or over a process group
(``/update_weights_from_distributed``). Both ends make the group beside their default one with the function of torch's
that is used here: by which names its members meet in the store differs between versions of torch, and is torch's own
affair.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import save_file
from torch import Tensor

from quartet.cluster.torchrun import address_towards
from quartet.config import UserError
from quartet.config.rewards import RemoteServer, RetryConfig
from quartet.extras.servers.client import LARGEST_SEED, HTTPEngine, Part
from quartet.extras.servers.config import SGLangEngineConfig
from quartet.models.directories import checkpoint_shapes
from quartet.remote.json_client import JSONClient, RemoteError
from quartet.rollout.protocol import Request
from quartet.rollout.scheduler import Decode
from quartet.rollout.staging import Load, StagedWeights
from quartet.trainers.engines import Policy
from quartet.weights.manifest import WeightsRefused, WeightSyncError
from quartet.weights.sink import TensorSink

_PART_BYTES = 1 << 30
"""Of one request: the server has so much memory more while it takes new weights."""
_GOODBYE_S = 5.0
_LOOK_S = 0.01
_LONG = timedelta(days=1)
"""NCCL's own limit, never reached: it would end this process. Waiting is ours."""


class GroupWeights:
    """Staged weights on the way to one server.

    Args:
        num_workers: of the server: its tensor-parallel size. Each takes the part that it needs.
        device: from which the weights are sent.
        shapes: of the checkpoint that the server was started with, by name.

    Raises:
        WeightsRefused: names or shapes are not the checkpoint's.
    """

    def __init__(
        self,
        staging: StagedWeights,
        server: RemoteServer,
        *,
        num_workers: int = 1,
        device: torch.device | None = None,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.staging, self._server, self._num_workers = staging, server, num_workers
        self._device = device or torch.device("cpu")
        _check(staging, shapes)
        # Sent once only: who did not hear the answer would wait for a second broadcast.
        self._client = JSONClient(server.model_copy(update={"retry": RetryConfig(attempts=1)}))
        self._group: ServedGroup | None = None

    def send(self, version: int) -> Any:
        """Sends the weights, and returns what the server says at the end; it is the engine's to look at.

        Raises:
            UserError: it did not take all of it. The group is given up; the next call forms another one.
        """
        answer: Any = None
        try:
            group = self._group = self._group or self._formed()
            parts = list(_parts(self.staging))
            for number, part in enumerate(parts):
                last = {"weight_version": str(version)} if number == len(parts) - 1 else {}
                body = {
                    "names": [name for name, _ in part],
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                    "shapes": [list(tensor.shape) for _, tensor in part],
                    "group_name": group.name,
                    "flush_cache": bool(last),
                    **last,
                }
                told = self._tell("/update_weights_from_distributed", body)
                group.send((tensor for _, tensor in part), told)
                answer = _agreed(told.result())
        except BaseException:
            self.leave()
            raise
        return answer

    def _formed(self) -> ServedGroup:
        host = address_towards(urlsplit(self._server.url).hostname or "")
        group = ServedGroup(self._num_workers, host, self._device, self._server.timeout_s)
        where = {"master_address": host, "master_port": group.port, "rank_offset": 1, "world_size": group.size}
        told = self._tell(
            "/init_weights_update_group", {**where, "group_name": group.name, "backend": group.backend}
        )  # fmt: skip
        try:
            group.form(told)
            _agreed(told.result())
        except BaseException:
            group.close()
            raise
        return group

    def _tell(self, path: str, body: Any) -> Future[Any]:
        return self._client.start(body, lambda answer: answer, path)

    def leave(self) -> None:
        """Leaves the server's end of the group to itself; it may have died with the server."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def attach(self, load: Load) -> None:
        self.staging.attach(load)

    def detach(self, load: Load) -> None:
        self.staging.detach(load)
        if self._group is not None:
            with suppress(UserError, TimeoutError):
                self._tell("/destroy_weights_update_group", {"group_name": self._group.name}).result(_GOODBYE_S)
        self.leave()
        self._client.close()


def _agreed(answer: Any) -> Any:
    if not (isinstance(answer, dict) and answer.get("success") is True):
        raise UserError("the server refused", found=repr(answer), remedy="see its log")
    return answer


def _parts(staging: StagedWeights) -> Iterator[list[tuple[str, Tensor]]]:
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in staging.handle:
        if part and size + tensor.nbytes > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part


def _check(staging: StagedWeights, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks names and shapes: SGLang passes over names that it does not know, and keeps old weights where
    none come.
    """
    sent = {spec.name: spec.shape for spec in staging.handle.specs}
    sent |= {name: sent[own] for name, own in staging.handle.ties if name in shapes}
    wrong = [name for name in sorted({**sent, **shapes}) if sent.get(name) != shapes.get(name)]
    if wrong:
        name, had = wrong[0], shapes.get(wrong[0], "nothing")
        raise WeightsRefused(
            "the policy's weights are not those of the checkpoint that the server has",
            found=f"{name!r}: {sent.get(name, 'nothing')} is sent, {had} is in the checkpoint ({len(wrong)} such)",
            remedy="use rollout.engine.weights: disk, or another engine",
            tensor=name,
        )


class ServedGroup:
    """Rank 0 of a group whose other members are on a server.

    Args:
        host: where they reach this process.
        device: where tensors are sent from: NCCL from a GPU, gloo from the CPU.
        timeout_s: until all members are there, and of every broadcast.

    Attributes:
        name: nobody else's, ever.

    Raises:
        RuntimeError: ``host`` is not this machine's.
    """

    def __init__(self, num_receivers: int, host: str, device: torch.device, timeout_s: float) -> None:
        self.size, self.device, self.name = 1 + num_receivers, device, f"quartet_{uuid.uuid4().hex[:12]}"
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._limit = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(
            host, 0, self.size, is_master=True, timeout=self._limit, wait_for_workers=False, use_libuv=True
        )
        self.port = self._store.port
        self._group: Any = None

    def form(self, answer: Future[Any]) -> None:
        """
        Args:
            answer: of the server that was told to join. Where it is an error nothing is waited for.

        Raises:
            WeightSyncError: not all came in time.
        """
        while not self._store.num_keys() and not answer.done():
            time.sleep(_LOOK_S)
        if answer.done():
            answer.result()
        store = dist.PrefixStore(self.name, self._store)
        limit = self._limit if self.backend == "gloo" else _LONG
        backend, options = dist.Backend(self.backend), {"group_name": self.name, "timeout": limit}
        try:
            self._group, _ = c10d._new_process_group_helper(self.size, 0, [], backend, store, **options)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise self._broke("its members did not all come", error) from error

    def send(self, tensors: Iterable[Tensor], answer: Future[Any]) -> None:
        """Broadcasts one after the other.

        Args:
            answer: as in ``form``, of the server that was told to receive these.

        Raises:
            WeightSyncError: a broadcast failed, or was not taken in time.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        end = time.monotonic() + self._limit.total_seconds()
        sent = [tensor.to(self.device) for tensor in tensors]  # held until it is through
        try:
            for work in [self._group.broadcast([tensor], options) for tensor in sent]:
                while not work.is_completed():
                    if answer.done():
                        answer.result()
                    if time.monotonic() > end:
                        raise self._broke("a broadcast was not taken", f"within {self._limit.total_seconds():g} s")
                    time.sleep(_LOOK_S)
                work.wait()
        except RuntimeError as error:
            raise self._broke("a broadcast failed", error) from error

    def _broke(self, problem: str, found: object) -> WeightSyncError:
        return WeightSyncError(
            f"the group for new weights broke: {problem}",
            found=f"{found} ({self.size} members, {self.backend})",
            remedy="see the server's log; it must reach this machine, and have as many workers as the recipe says",
        )

    def close(self) -> None:
        """Gives up what is under way; gloo cannot, and its end waits for that in a thread."""
        held, self._group = [self._group], None  # whoever drops the last reference waits: the thread, not this frame
        if held[0] is not None:
            threading.Thread(target=_end, args=(held,), name=f"end of {self.name}", daemon=True).start()


def _end(held: list[Any]) -> None:
    group = held.pop()
    group.abort()
    c10d._world.pg_group_ranks[group] = {}  # which only torch's own callers of the function enter
    dist.destroy_process_group(group)


_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_KEPT = 2


class PublishedWeights:
    """Staged weights as model directories, one per version, that servers load; shared by all engines of a staging.

    A version takes its name when all of it is written; the two newest stay, and all go with the last engine.

    Args:
        folder: on a file system that the servers see under the same path; a folder in it is this one's own.
        template: the model's directory; its files other than weights go beside them.
    """

    def __init__(self, staging: StagedWeights, folder: Path, template: Path | None = None) -> None:
        self.staging = staging
        self._folder = folder.resolve() / f"weights_{uuid.uuid4().hex[:12]}"
        self._template = template
        self._written: int | None = None
        self._lock = threading.Lock()
        self._users: set[Load] = set()

    def path(self, version: int) -> str:
        """Returns the path of the directory with the version that is staged."""
        target = self._folder / f"version_{version:08d}"
        with self._lock:
            if self._written != version:
                draft = self._folder / "draft"
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
                save_file(dict(self.staging.handle), draft / "model.safetensors", metadata={"format": "pt"})
                for path in self._template.iterdir() if self._template is not None else ():
                    if path.is_file() and not path.name.endswith(_NOT_COPIED):
                        shutil.copy2(path, draft / path.name)
                shutil.rmtree(target, ignore_errors=True)  # the same version once more
                draft.rename(target)
                for old in sorted(self._folder.glob("version_*"))[:-_KEPT]:
                    shutil.rmtree(old)
                self._written = version
        return str(target)

    def attach(self, load: Load) -> None:
        """Does what ``StagedWeights.attach`` does."""
        self._users.add(load)
        self.staging.attach(load)

    def detach(self, load: Load) -> None:
        """Detaches a user; the last one deletes what was written."""
        self.staging.detach(load)
        self._users.discard(load)
        if not self._users:
            shutil.rmtree(self._folder, ignore_errors=True)


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
        """Gives up memory of the server, which is started with ``--enable-memory-saver``. Level 1 gives up the cache
        alone, level 2 the weights as well, without a copy.
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
    """Makes the ways by which new weights come to each server."""
    if policy.staging is None:
        return [None] * len(config.urls)
    if config.weights == "distributed":
        options: dict[str, Any] = {"num_workers": config.tensor_parallel_size, "device": policy.device}
        shapes = checkpoint_shapes(Path(policy.path))
        return [GroupWeights(policy.staging, server, shapes=shapes, **options) for server in config.servers]
    assert config.weights_directory is not None, "training needs one, see cross_checks"
    shared = PublishedWeights(policy.staging, Path(config.weights_directory), Path(policy.path))
    return [shared] * len(config.urls)
