"""Engines that generate: one class per ``type``, each with only its own keys.

========== ============================================== =========================== ==========================
``type``   computes in                                    takes weights               restarted by
========== ============================================== =========================== ==========================
``native`` the process of the rollout role, or its child  yes                         the run (``process: true``)
``vllm``   child processes in an environment of their own yes                         the run
========== ============================================== =========================== ==========================

Plug-ins add others, and sections of ``rollout.speculation``; ``choices`` has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import AliasChoices, Field, JsonValue

from quartet.config.common import SamplingConfig, StrictModel
from quartet.config.strict import Devices, Processes, Sequences, Steps, Tokens

if TYPE_CHECKING:
    from quartet.config.recipe import RLRecipe


class ServedEngineConfig(StrictModel):
    """What engines have that generate at their own pace.

    Attributes:
        has_our_sampler: it draws with this project's sampler, and so by any ``draw`` and with drafts.
        has_own_weights: it answers with what its servers have, whichever model it is asked for.
    """

    if TYPE_CHECKING:
        type: str
    has_our_sampler: ClassVar[bool] = False
    has_own_weights: ClassVar[bool] = False

    max_restarts: int = Field(
        3, ge=0, description="How often a failed engine is restarted, or a failed server tried again."
    )


class _Processes(ServedEngineConfig):
    start_timeout_s: float = Field(600.0, gt=0, description="Longest start of an engine's process.")
    stall_timeout_s: float = Field(300.0, gt=0, description="Longest silence of an engine's process that has work.")


class NativeEngineConfig(_Processes):
    """Quartet's own engine, with the trainer's arithmetic: exact numerics are possible. ``max_restarts`` and the
    time limits are of ``process: true``.
    """

    has_our_sampler = True
    type: Literal["native"] = "native"
    max_running: Sequences = Field(64, ge=1, description="Sequences that decode together.")
    max_prefill_tokens: int = Field(2048, ge=16, description="Prompt tokens computed per step, beside decoding.")
    cache_tokens: int | None = Field(
        None, ge=1, description="Tokens the key/value cache holds; grows with the requests when left out."
    )
    steps_per_lease: Steps = Field(
        8, ge=1, description="Decode steps until generation pauses, so that finished chunks can be scored."
    )
    process: bool = Field(False, description="Compute in a process of its own, which is started anew when it dies.")

    @property
    def capacity(self) -> int:
        """Requests that are answered at a time."""
        return self.max_running


class RoutedEngineConfig(ServedEngineConfig):
    """What all engines but the native one have; sections of plug-ins are subclasses."""

    max_outstanding: Sequences = Field(256, ge=1, description="Requests sent to one engine at a time.")

    def training_misfits(self) -> Iterator[str]:
        """Says why it cannot be the engine of a policy that is trained, if it cannot."""
        return iter(())

    @property
    def capacity(self) -> int:
        """Counts the requests that are answered at a time."""
        return self.max_outstanding

    @property
    def steps_per_lease(self) -> int:
        """Nobody counts the steps of such an engine: a lease lasts for a stretch of time."""
        return 1


class VLLMEngineConfig(RoutedEngineConfig, _Processes):
    """vLLM in processes and an environment of its own."""

    has_our_sampler = True
    type: Literal["vllm"] = "vllm"
    python: str | None = Field(
        None, description="Python of the environment that has vLLM; the running one when left out."
    )
    engines: Processes = Field(1, ge=1, description="Engines of each process of rollout, which divide its devices.")
    tensor_parallel_size: Devices = Field(1, ge=1, description="Devices that every layer of an engine is cut over.")
    max_model_len: Tokens | None = Field(
        None, ge=1, description="Longest prompt and answer together; the model's context when left out."
    )
    max_num_seqs: Sequences = Field(
        256,
        ge=1,
        # The native engine's name of the same: its recipes work with type: vllm as they are.
        validation_alias=AliasChoices("max_num_seqs", "max_running"),
        description="Sequences that decode together.",
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of a device's memory for weights and cache; vLLM's own when left out."
    )
    cache_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of each engine's key/value cache, in place of what gpu_memory_utilization leaves for it. "
        "With neither, on a CPU: 4 GiB, or an eighth of the free memory where that is less.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and products; auto: what the actor computes in."
    )
    enforce_eager: bool = Field(False, description="No compilation and no CUDA graphs: starts sooner, decodes slower.")
    sleep_level: Literal[1, 2] = Field(
        1, description="While others use its devices: 1 moves weights to host memory, 2 drops them until they are sent."
    )
    engine_args: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further arguments of vLLM's EngineArgs, passed as they are."
    )

    @property
    def capacity(self) -> int:
        return self.engines * min(self.max_num_seqs, self.max_outstanding)


def is_served(engine: ServedEngineConfig) -> bool:
    """Tells whether the engine generates at its own pace, apart from the process that asks."""
    return not isinstance(engine, NativeEngineConfig) or engine.process


def sampling_conflicts(key: str, sampling: SamplingConfig, engine: ServedEngineConfig) -> Iterator[str]:
    """Says why the engine cannot draw as the section ``key`` asks, if it cannot."""
    if sampling.draw == "gumbel" and not engine.has_our_sampler:
        yield (
            f"{key}.draw gumbel needs this project's sampler, which native and vllm have; {engine.type} draws in its "
            "own way: leave it out"
        )


class BaseSpeculationConfig(StrictModel):
    """A section of a ``type``. A key ``path`` in it names the drafter's model: a directory, its URL, or the hub's."""

    if TYPE_CHECKING:
        type: str

    @property
    def learns(self) -> bool:
        """Its model learns along with the actor."""
        return False

    def misfits_with(self, recipe: RLRecipe) -> Iterator[str]:
        """Tells why the section does not fit the other sections."""
        yield from ()
