"""Engine ``sglang``: SGLang's own HTTP interface, as its documentation has it ("SGLang for RL systems").

A pause aborts what runs; the server returns the tokens that each request has, and ``resume`` asks for the rest. So the
version of every token is known, and nothing computed from older weights is used.

New weights come as model directories, one per version.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file

from quartet.config import UserError
from quartet.config.rewards import RemoteServer
from quartet.extras.servers.client import LARGEST_SEED, HTTPEngine, Part
from quartet.extras.servers.config import SGLangEngineConfig
from quartet.remote.json_client import RemoteError
from quartet.rollout.protocol import Request
from quartet.rollout.scheduler import Decode
from quartet.rollout.staging import Load, StagedWeights
from quartet.trainers.engines import EnginePolicy
from quartet.weights.sink import TensorSink

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
        weights: PublishedWeights | None = None,
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
        body = {"model_path": self._weights.path(version), "weight_version": str(version), "flush_cache": True}
        answer = self._tell("/update_weights_from_disk", body)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise self._failed(
                UserError(
                    "it did not take the new weights",
                    found=f"version {version}: {answer!r}",
                    remedy="see its log; it needs the same architecture, and to see weights_directory",
                )
            )
        self.version = version

    def close(self) -> None:
        if self._weights is not None:
            self._weights.detach(self._take_commit)
        super().close()


def sglang_engines(config: SGLangEngineConfig, policy: EnginePolicy) -> list[SGLangEngine]:
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
    weights = None
    if policy.staging is not None:
        assert config.weights_directory is not None, "training needs one, see training_misfits"
        weights = PublishedWeights(policy.staging, Path(config.weights_directory), Path(policy.path))
    return [
        SGLangEngine(server, vocab_size=policy.vocab_size, decode=policy.decode, weights=weights)
        for server in config.servers
    ]
