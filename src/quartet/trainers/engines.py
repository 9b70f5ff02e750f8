"""From what a recipe says of an engine to the engine: ``open_engine`` for all kinds, behind a router where they are
served."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from quartet.config import UserError
from quartet.config.choices import EngineConfig
from quartet.config.common import LoRAConfig, ModelConfig
from quartet.config.engines import BaseSpeculationConfig, NativeEngineConfig, VLLMEngineConfig, is_served
from quartet.config.plugins import load_object, plugin_entries
from quartet.models.packed_model import Numerics, PackedCausalLM, Precision
from quartet.observe.process import log_rank, logging_variables
from quartet.rollout.drafter import DrafterModel, make_drafter
from quartet.rollout.engine import NativeEngine, load_engine
from quartet.rollout.process import EngineProcess, EngineSpec
from quartet.rollout.protocol import PacedEngine, RolloutEngine, StepEngine, SteppedEngine
from quartet.rollout.router import Router
from quartet.rollout.scheduler import Decode
from quartet.rollout.staging import StagedWeights
from quartet.text.loading import has_custom_code, resolve_model_directory
from quartet.text.pictures import PictureStore
from quartet.text.tokenizer import TextCodec

_DTYPES: dict[Precision, Literal["float32", "bfloat16"]] = {"fp32": "float32", "bf16": "bfloat16"}


def native_engine(
    packed: PackedCausalLM,
    config: EngineConfig,
    decode: Decode,
    *,
    owns_weights: bool = False,
    speculation: BaseSpeculationConfig | None = None,
    model: DrafterModel | None = None,
) -> NativeEngine:
    """Makes the native engine in this process, which computes with ``packed``; where it owns the weights they are yet
    to come.

    Args:
        model: the trainer's own of the drafter, where the engine shares the policy with it.

    Raises:
        UserError: what speculation reads is not there, or does not belong to the model.
    """
    assert isinstance(config, NativeEngineConfig)
    # Before the engine turns the weights around: a drafter's model is compared with the policy.
    drafter = make_drafter(speculation, packed, model)
    options = _native_options(config)
    return NativeEngine(packed, owns_weights=owns_weights, decode=decode, drafter=drafter, **options)


def _native_options(config: NativeEngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("max_running", "max_prefill_tokens", "cache_tokens")}


@dataclass(frozen=True)
class EnginePolicy:
    """What an engine is to generate with.

    Args:
        path: directory of the model and its tokenizer.
        vocab_size, decode: of the tokenizer.
        lora, seed: of the trainer's adapters, which alone are sent.
        device: of a native engine.
        staging: where new weights come from; None: the model stays as it is at ``path``.
        sleeps: its memory is others' at times.
        speculation: of an engine of this project, or vLLM.
        trust_remote_code: engines in processes run Python code that comes with the model.
        pictures: of the run, where prompts may have any.
    """

    path: str
    vocab_size: int
    decode: Decode
    precision: Precision = "fp32"
    numerics: Numerics = "fast"
    lora: LoRAConfig | None = None
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    staging: StagedWeights | None = None
    sleeps: bool = False
    speculation: BaseSpeculationConfig | None = None
    trust_remote_code: bool = False
    pictures: PictureStore | None = None

    @property
    def version(self) -> int | None:
        """The version of the weights that an engine loads: none that count, where others are sent."""
        return None if self.staging is not None else 0


def open_engine(config: EngineConfig, policy: EnginePolicy) -> Router:
    """Opens the engines of a recipe, ready, or ready once weights were staged. The caller closes them.

    Raises:
        UserError: an engine cannot be had, in its own words.
        EngineFailed: it did not start; with its last lines.
    """
    # A native one is never short of work.
    most = 4 * config.max_running if isinstance(config, NativeEngineConfig) else config.max_outstanding
    return Router(_engines(config, policy), max_restarts=config.max_restarts, max_outstanding=most)


def _engines(config: EngineConfig, policy: EnginePolicy) -> list[RolloutEngine]:
    if isinstance(config, NativeEngineConfig):
        arguments = _native_arguments(config, policy)
        if not config.process:
            return [SteppedEngine(load_engine(**arguments))]
        target, options = "quartet.rollout.engine:load_engine", _process_options(config)
        environment = _threads() | logging_variables("native engine", log_rank())
        spec = EngineSpec(target, arguments, environment=environment, name="native engine", **options)
        return [EngineProcess(spec, policy.staging)]
    if isinstance(config, VLLMEngineConfig):
        return [EngineProcess(spec, policy.staging) for spec in _vllm_specs(config, policy)]
    made: list[RolloutEngine] = load_object(plugin_entries("engines")[config.type].open)(config, policy)
    return made


def _native_arguments(config: NativeEngineConfig, policy: EnginePolicy) -> dict[str, Any]:
    return {
        "path": policy.path,
        "device": str(policy.device),
        "precision": policy.precision,
        "numerics": policy.numerics,
        "lora": None if policy.lora is None else policy.lora.model_dump(),
        "seed": policy.seed,
        "version": policy.version,
        "speculation": None if policy.speculation is None else policy.speculation.model_dump(),
        "trust_remote_code": policy.trust_remote_code,
        "pictures": policy.pictures,
        **_native_options(config),
    }


def _vllm_specs(config: VLLMEngineConfig, policy: EnginePolicy) -> Iterator[EngineSpec]:
    keys = ("tensor_parallel_size", "max_model_len", "max_num_seqs", "gpu_memory_utilization")
    arguments = {name: getattr(config, name) for name in (*keys, "cache_bytes", "enforce_eager")}
    arguments |= {
        "engine_args": {**({"trust_remote_code": True} if policy.trust_remote_code else {}), **config.engine_args},
        "path": policy.path,
        "dtype": vllm_dtype(config, policy.precision),
        "version": policy.version,
        "lora": None if policy.lora is None else policy.lora.model_dump(),
        "sleep": policy.sleeps,
        "seed": policy.seed,
        "pictures": None if policy.pictures is None else str(policy.pictures.directory),
    }
    if policy.speculation is not None:
        arguments["drafter"] = plugin_entries("drafters")[policy.speculation.type].vllm, policy.speculation.model_dump()
    visible = visible_gpus()
    for number in range(config.engines):
        yield EngineSpec(
            "quartet.rollout.vllm.start:make_vllm_engine",
            arguments,
            python=config.python,
            environment=_devices_of(number, config, visible)
            | logging_variables("vllm engine", log_rank() * config.engines + number),
            name=f"vllm engine {number}",
            **_process_options(config),
        )


def _process_options(config: NativeEngineConfig | VLLMEngineConfig) -> dict[str, Any]:
    return {"start_timeout_s": config.start_timeout_s, "stall_timeout_s": config.stall_timeout_s}


def vllm_dtype(config: VLLMEngineConfig, precision: Precision) -> str:
    return _DTYPES[precision] if config.dtype == "auto" else config.dtype


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def _threads() -> dict[str, str]:
    """Returns the variables that give an engine on the CPU as many threads as its worker has."""
    return {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def _devices_of(number: int, config: VLLMEngineConfig, visible: Sequence[str]) -> dict[str, str]:
    """Returns the variables that give one of several engines its devices: the next ones, from the first again at the
    end."""
    if not visible:
        return _threads()
    size = config.tensor_parallel_size
    if size > len(visible):
        raise UserError(
            "a vLLM engine is cut over more devices than its process has",
            found=f"tensor_parallel_size = {size}; {len(visible)} devices",
            remedy="lower rollout.engine.tensor_parallel_size, or give each process of rollout more devices "
            "(cluster.gpus_per_process)",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[(number * size + n) % len(visible)] for n in range(size))}


def has_model_directory(config: ModelConfig | None) -> bool:
    """Tells whether the recipe names a directory, or a model of the hub, that has the model and its tokenizer."""
    return config is not None and config.tokenizer is None


@contextmanager
def engine_model_directory(config: ModelConfig | None, packed: PackedCausalLM, codec: TextCodec) -> Iterator[str]:
    """Yields a directory with the model as it started and its tokenizer: the recipe's, the hub cache's, or one that is
    gone afterwards."""
    if config is not None and has_model_directory(config):
        yield resolve_model_directory(config.path, "model")
        return
    with tempfile.TemporaryDirectory(prefix="quartet-policy-") as folder:
        with packed.without_adapters():
            packed.model.save_pretrained(folder)
        codec.tokenizer.save_pretrained(folder)
        if codec.pictures is not None:
            codec.pictures.processor.save(Path(folder))
        yield folder


def run_pictures(codec: TextCodec) -> PictureStore | None:
    """Returns the pictures that the codec reads; None where it reads none."""
    return None if codec.pictures is None else codec.pictures.store


def trusts_remote_code(config: ModelConfig | None, packed: PackedCausalLM) -> bool:
    """Tells whether code that comes with the model may run: as the recipe says; of a model from Python, where its
    does."""
    return has_custom_code(packed.model) if config is None else config.trust_remote_code


@contextmanager
def frozen_model_engine(
    config: EngineConfig, packed: PackedCausalLM, codec: TextCodec, model: ModelConfig | None, device: torch.device
) -> Iterator[StepEngine]:
    """Yields an engine for a model that stays as it is, until the block ends; ``packed`` itself where it is native.

    Args:
        packed: on the meta device where the engine reads the weights itself.
        device: of a native engine.
    """
    if not is_served(config):
        yield native_engine(packed, config, codec.decode_completion)
        return
    with ExitStack() as made:
        policy = EnginePolicy(
            "" if config.has_own_weights else made.enter_context(engine_model_directory(model, packed, codec)),
            packed.vocab_size,
            codec.decode_completion,
            packed.precision,
            packed.numerics,
            device=device,
            trust_remote_code=trusts_remote_code(model, packed),
            pictures=run_pictures(codec),
        )
        router = open_engine(config, policy)
        made.callback(router.close)
        yield PacedEngine(router)
