"""Sections that several recipes share: models, optimisation, data, sampling, checkpoints, trackers, processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, field_validator

from quartet.config.strict import Processes, Rows, Steps, Tokens
from quartet.config.strict import StrictModel as StrictModel

# Models, optimisation ------------------------------------------------------------------------------------


class HubConfig(StrictModel):
    """What a section says of a model on the hub beside its name."""

    revision: str | None = Field(
        None, min_length=1, description="Branch, tag or commit of a model on the hub; its main branch when left out."
    )
    trust_remote_code: bool = Field(
        False,
        description="Run Python code that comes with the model, on this machine and with your rights, where its "
        "architecture is not one of transformers'.",
    )

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        name = getattr(self, "path", getattr(self, "model", None))
        if name is None and (self.revision is not None or self.trust_remote_code):
            yield "revision and trust_remote_code say something of a path: set it, too"
        if self.revision is not None and "@" in str(name):
            yield f"{name} names a revision already: leave one of them out"


_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
"""What a chat template is told for each conversation."""


def _are_variables(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in value:
        if name in _GIVEN or name.endswith("_token") or not name.isidentifier():
            raise ValueError(
                f"{name!r} cannot be set: a template gets its messages, tools and special tokens from data and "
                "tokenizer, and its other variables have names of letters, digits and _"
            )
    return value


TemplateVariables = Annotated[dict[str, JsonValue], AfterValidator(_are_variables)]


class ModelConfig(HubConfig):
    """A transformers model directory, its URL, or a hub name."""

    path: str = Field(description="Model directory, URL or hub name.")
    tokenizer: str | None = Field(None, description="Directory, URL or hub name; the model's own when left out.")
    chat_template: str | None = Field(
        None, description="Jinja file with the chat template, also of what is saved; the tokenizer's own when left out."
    )
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict, description="Variables of the chat template, as {enable_thinking: false}; saved with it."
    )


DEVICES = r"auto|cpu|cuda(:(0|[1-9][0-9]?))?"
PrecisionChoice = Literal["auto", "fp32", "bf16"]
_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(StrictModel):
    """AdamW with linear warm-up."""

    lr: float = Field(1e-5, gt=0, description="Learning rate at its peak.")
    betas: tuple[_Decay, _Decay] = Field((0.9, 0.95), description="AdamW's decay rates of the two moments.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon, beside the root of the second moment.")
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay of matrices; norms and biases have none."
    )
    warmup_steps: int = Field(0, ge=0, description="Updates over which the learning rate rises from 0 to its peak.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after warm-up, down to min_lr_ratio at the last update."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Learning rate at the end, over its peak.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm, over all weights.")


ALL_LINEAR = "all-linear"


class ShardingConfig(StrictModel):
    """How a role's processes hold its model: processes = copies × shard × pipeline × context × tensor.

    Those that differ in the last three alone have the same part of every batch, and token budgets are theirs together.
    """

    shard: Processes = Field(
        1, ge=1, description="Processes with a share of every weight, which is gathered where it is used (FSDP)."
    )
    pipeline: Processes = Field(
        1, ge=1, description="Processes with some neighbouring layers each, through which micro-batches pass (1F1B)."
    )
    context: Processes = Field(
        1, ge=1, description="Processes with a share of every micro-batch's tokens and of every weight; for long texts."
    )
    tensor: Processes = Field(
        1, ge=1, description="Processes with a share of every layer and of the vocabulary, which compute it together."
    )
    fixed_order: bool = Field(
        False, description="Sum gradients in the order of the ranks: bits that no communication library decides."
    )
    cpu_offload: bool = Field(
        False,
        description="Keep weights, gradients and optimizer state in host memory, where the optimizer computes; "
        "on the GPU are only the layers under way.",
    )

    @property
    def peers(self) -> dict[str, int]:
        """Along which axes processes work on one part of a batch together, and how many."""
        return {"pipeline": self.pipeline, "context": self.context, "tensor": self.tensor}

    @property
    def copy_size(self) -> int:
        """Processes that hold one copy of the model between them."""
        return self.shard * math.prod(self.peers.values())

    def misfit(self, key: str, processes: int, *, compiles: bool = False) -> str | None:
        """Tells why ``processes`` cannot hold and compute a model that is cut so; None where they can.

        Args:
            key: of this section in the recipe.
            compiles: the layers of the model are compiled.
        """
        if self.cpu_offload and self.copy_size == 1:
            return (
                f"{key}.cpu_offload is on, but {key}.shard is 1: only models that are cut are kept in host memory; set "
                f"{key}.shard to 2 or more, or leave cpu_offload out"
            )
        if compiles and self.copy_size > self.shard:
            peers = " and ".join(f"{key}.{name} is {size}" for name, size in self.peers.items() if size > 1)
            return (
                f"{peers}: processes exchange rows within a pass, which torch.compile cannot follow; leave "
                "train.compile out, or use shard alone"
            )
        if processes % self.copy_size == 0:
            return None
        fitting = ", ".join(str(n) for n in range(1, processes + 1) if processes % n == 0)
        there = "1 process" if processes == 1 else f"{processes} processes"
        product = " × ".join(f"{k} {n}" for k, n in {"shard": self.shard, **self.peers}.items() if n > 1)
        return f"{key} is {product}, but the model has {there}, of which the product must be a divisor: {fitting}"


class LoRAConfig(StrictModel):
    """Low-rank adapters (Hu et al. 2021): ``W + alpha / rank · B A``, of which only ``A`` and ``B`` are trained.

    The scalar head of a critic or reward model is trained in full beside them.
    """

    rank: int = Field(16, ge=1, description="Numbers between A and B.")
    alpha: float = Field(32.0, gt=0, description="Adapters count alpha / rank times.")
    target_modules: tuple[str, ...] = Field(
        (ALL_LINEAR,),
        min_length=1,
        description="Linear layers by name or end of path, as in [q_proj, v_proj]; all-linear: all but heads.",
    )
    export: Literal["merged", "adapter", "both"] = Field(
        "both", description="merged: model/ with the adapters added to its weights; adapter: adapter/ as peft has it."
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name(cls, value: object) -> object:
        # What a validator returns is no longer read as JSON, which has no tuples.
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("target_modules")
    @classmethod
    def _all_or_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in value and len(value) > 1:
            raise ValueError(f"{ALL_LINEAR} stands alone: it names every linear layer already")
        return value


class TrainConfig(StrictModel):
    """How one model is trained: optimizer, precision, micro-batch budgets in tokens."""

    optim: OptimConfig = OptimConfig()
    precision: PrecisionChoice = Field(
        "auto", description="bf16: autocast over fp32 master weights; auto: bf16 on a GPU that has it, fp32 on the CPU."
    )
    token_budget: Tokens = Field(
        8192, ge=1, description="Most tokens of one micro-batch with gradients; a shared prompt counts once."
    )
    forward_token_budget: Tokens = Field(16384, ge=1, description="Most tokens of one forward-only micro-batch.")
    logprob_chunk: Tokens = Field(1024, ge=1, description="Tokens whose logits exist at a time; less saves memory.")
    share_prefixes: bool = Field(True, description="Compute a prompt once for all of its responses.")
    activation_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="true: keep only each layer's input and compute the layer again in the backward pass; selective: "
        "keep results of products and attention too, which costs little time and saves about half.",
    )
    compile: bool = Field(
        False, description="Compile decoder layers by torch.compile: faster after some minutes, without --resume."
    )
    lora: LoRAConfig | None = Field(None, description="Train small adapters (LoRA) instead of all weights.")
    freeze_vision_tower: bool = Field(
        True, description="Of a vision-language model: its features are then computed once for all roles."
    )
    freeze_projector: bool = Field(True, description="What brings the vision tower's features to the language model.")
    freeze_language_model: bool = Field(False, description="Train the projector alone, or it and the vision tower.")

    def _misfits(self) -> Iterator[str]:
        if self.freeze_language_model and self.freeze_projector:
            yield "with freeze_language_model and freeze_projector nothing trains: set freeze_projector: false"
        if self.freeze_projector and not self.freeze_vision_tower:
            yield "a vision tower that trains behind a frozen projector: set freeze_projector: false, too"
        if self.lora is not None and not (self.freeze_projector and not self.freeze_language_model):
            yield "lora trains adapters of the language model alone: leave the freeze_… keys out"


# Data ----------------------------------------------------------------------------------------------------


class _Rows(StrictModel):
    """Which rows are read, and under which names."""

    path: str | None = Field(None, description="File, directory, URL, or hub name (owner/name).")
    config: str | None = Field(None, description="Configuration of a hub data set that has several.")
    split: str = Field("train", description="Split of a hub data set, also a slice: train[:1000]; files have none.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Our name: the file's, as {prompt: question} or, of two texts, {prompt: instruction + input}.",
    )
    limit: Rows | None = Field(None, ge=1, description="Use only the first so many rows.")
    system_prompt: str | None = Field(
        None, description="Begins conversations without a system message; a row's column `system` comes before it."
    )
    bad_images: Literal["error", "skip"] = Field(
        "error", description="Rows with pictures that cannot be used stop the run, or are left out and counted."
    )


class SourceConfig(_Rows):
    """One of several sources of rows that are mixed."""

    weight: float | None = Field(
        None, gt=0, description="Share of the rows drawn, relative to the others'; as many as it has when left out."
    )

    def _misfits(self) -> Iterator[str]:
        if self.path is None:
            yield "a source needs a path"


class DataConfig(_Rows):
    """Rows from a JSON, CSV or Parquet file, or a hub data set; or from several of them.

    ``columns`` maps our names to the file's, e.g. ``{prompt: question, completion: answer}``. Columns that are not
    mapped reach the rewards under their own names.
    """

    sources: tuple[SourceConfig, ...] = Field((), description="Several files or data sets, mixed; in place of path.")
    max_tokens: int | None = Field(None, ge=1, description="Longest prompt (RL) or sequence; the context if left out.")
    overlong: Literal["error", "skip"] = Field(
        "error", description="Rows beyond max_tokens stop the run, or are left out and counted."
    )
    check_rows: Rows = Field(
        50_000,
        ge=1,
        description="So many rows, from the front, are checked and tokenised before the first step, the others when "
        "they are drawn; evaluations check all.",
    )

    def _misfits(self) -> Iterator[str]:
        if not self.sources:
            return
        usual = {name: field.get_default(call_default_factory=True) for name, field in _Rows.model_fields.items()}
        own = [name for name, value in usual.items() if getattr(self, name) != value]
        if own:
            yield f"with sources, {', '.join(own)} belong{'s' * (len(own) == 1)} to each of them"
        if len({source.weight is None for source in self.sources}) > 1:
            yield "give every source a weight, or none"

    @property
    def parts(self) -> tuple[SourceConfig, ...]:
        """The sources; one without weight where there is only a path, none where there is neither."""
        if self.sources:
            return self.sources
        own = {name: getattr(self, name) for name in _Rows.model_fields}
        return () if self.path is None else (SourceConfig(**own),)


class SamplingConfig(StrictModel):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0, description="Divides the logits; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus: the likeliest tokens with this probability together.")
    top_k: int = Field(0, ge=0, description="Only the so many likeliest tokens; 0: no limit.")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Leaves out tokens below this share of the likeliest's probability."
    )
    max_new_tokens: int = Field(128, ge=1, description="Longest response; a longer one is cut off.")
    stop_strings: tuple[str, ...] = Field((), description="Texts that end a response; they stay in it.")
    truncated_logprobs: bool = Field(
        False,
        description="Log-probabilities, the trainer's too, are those of the tokens that top_p, top_k and min_p leave, "
        "and not of all.",
    )
    draw: Literal["inverse", "gumbel"] = Field(
        "inverse",
        description="How a seed picks a token: inverse, by one number per token; gumbel, by one for every token of the "
        "vocabulary, which costs more, and lets drafts by speculation match more often. Native and vllm have both.",
    )

    @property
    def truncates(self) -> bool:
        """Whether tokens are chosen from less than the whole distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


# What every job has ---------------------------------------------------------------------------------------


def training_only_settings(sampling: SamplingConfig) -> list[str]:
    """Returns complaints about sampling settings that only training uses, such as ``truncated_logprobs``."""
    said = "sampling.truncated_logprobs is for rollouts that are trained on and has no effect here: leave it out"
    return [said] if sampling.truncated_logprobs else []


class CheckpointConfig(StrictModel):
    """When everything is saved that a resumed run needs."""

    every_steps: int = Field(50, ge=1, description="Steps between checkpoints; one more at the end, and on Ctrl-C.")
    keep: int = Field(2, ge=1, description="Newest complete checkpoints kept.")
    export_every: Steps | None = Field(
        None, ge=1, description="Steps between models written to exports/step_N/model while the run goes on; none."
    )
    background: bool = Field(
        True,
        description="Write checkpoints and rollouts while the next step computes; until it is written, "
        "a checkpoint is one more copy of the trained state in host memory.",
    )
    upload_timeout_s: float = Field(
        600.0,
        ge=0,
        description="Longest wait for uploads that make no progress, at the end of a run whose output_dir is a URL.",
    )


class BaseTrackerConfig(StrictModel):
    """Where metrics and samples also go: a section of a ``type``; those of plug-ins are subclasses."""

    if TYPE_CHECKING:
        type: str

    def check(self) -> None:
        """Looks for what the tracker needs, and asks no server.

        Raises:
            UserError: it is not there.
        """


class TensorBoardConfig(BaseTrackerConfig):
    """Event files for TensorBoard, in the run's directory."""

    type: Literal["tensorboard"] = "tensorboard"


class LocalCluster(StrictModel):
    """Every role in the one process of the command; they take turns."""

    type: Literal["local"] = "local"


class RayCluster(StrictModel):
    """A process per device of each pool, started by Ray: on this machine, or on a cluster that is there."""

    type: Literal["ray"] = "ray"
    address: str | None = Field(
        None, description="Address of a running cluster; left out: RAY_ADDRESS, else Ray starts here."
    )
    cpus_per_process: float = Field(1.0, ge=0, description="CPUs that Ray grants each process; parts are allowed.")
    gpus_per_process: float = Field(
        0.0, ge=0, description="GPUs that Ray grants each process; with 1 models go there, with 0 they are on the CPU."
    )
    strategy: Literal["pack", "spread"] = Field("pack", description="Nodes of a pool: as few as possible, or apart.")
    start_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait until a pool is granted and its processes run."
    )
    max_restarts: int = Field(3, ge=0, description="How often a run replaces workers that died.")


class TorchrunCluster(StrictModel):
    """The processes that torchrun has started: a recipe becomes one for them by being started so."""

    type: Literal["torchrun"] = "torchrun"


ClusterConfig = Annotated[LocalCluster | RayCluster, Field(discriminator="type")]
SupervisedClusterConfig = Annotated[LocalCluster | RayCluster | TorchrunCluster, Field(discriminator="type")]


def device_conflicts(cluster: LocalCluster | RayCluster | TorchrunCluster, device: str) -> Iterator[str]:
    """Tells why a recipe cannot have this ``device``, if it cannot. Ray gives each process its GPUs already."""
    if isinstance(cluster, TorchrunCluster) and device.startswith("cuda:"):
        yield f"each process of a torchrun takes a GPU of its own: set device: cuda in place of {device}"
    if isinstance(cluster, RayCluster):
        if device.startswith("cuda:"):
            yield f"Ray decides which GPU a process sees: set device: cuda in place of {device}"
        if device == "cuda" and cluster.gpus_per_process == 0:
            yield "device is cuda, but cluster.gpus_per_process is 0: set it to 1, or leave device out"
        if device == "cpu" and cluster.gpus_per_process > 0:
            yield f"device is cpu, but cluster.gpus_per_process is {cluster.gpus_per_process:g}: leave out either"


class WeightSyncConfig(StrictModel):
    """How new weights come to engines that have their own copy."""

    timeout_s: float = Field(120.0, gt=0, description="Longest silence of either end.")


class OffloadConfig(StrictModel):
    """Where parts go that must leave their device for others; only pools with budget_bytes ever move any."""

    to: Literal["mapped_files", "pinned_memory"] = Field(
        "mapped_files", description="Files mapped into memory, or host memory that a GPU reads fastest."
    )
    directory: str | None = Field(
        None, description="Folder of the mapped files; the system's temporary one when left out."
    )
