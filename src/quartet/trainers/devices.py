"""Where a run computes and in which precision: what `auto` stands for here, and what ``run.json`` says of it.

How fast a step was, on what its devices could do, and how much memory and wire it took.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.config.common import DEVICES, PrecisionChoice
from quartet.config.recipe import Recipe, RLRecipe, SupervisedRecipe
from quartet.config.strict import flatten
from quartet.models.loading import packed_causal_lm, packed_scalar_model
from quartet.models.packed_model import Numerics, PackedCausalLM, PackedScalarModel, Precision
from quartet.models.work import WorkTotals
from quartet.observe.process import set_up_logging
from quartet.schedule.role_group import ColocatedWorker
from quartet.train.parallel.mesh import DataParallelGroup

_log = logging.getLogger(__name__)
CPU = torch.device("cpu")
META = torch.device("meta")
"""Of models that have names, shapes and configs, and no contents."""


def compute_device(recipe: Recipe, passed: PreTrainedModel | None = None) -> torch.device:
    """Returns where the models of a run lie: those of its workers under Ray, else those of this process.

    Under Ray it has no number, as each worker sees the GPUs that it was granted.

    Args:
        passed: the object that is trained; under ``auto`` it stays where it lies, and the others come there.

    Raises:
        UserError: the recipe names a device that is not there.
    """
    if isinstance(recipe, RLRecipe | SupervisedRecipe) and recipe.cluster.type == "ray":
        return torch.device("cuda" if recipe.cluster.gpus_per_process > 0 else "cpu")
    if isinstance(recipe, SupervisedRecipe) and recipe.cluster.type == "torchrun":
        return torch.device(resolve_device(recipe.device).type)
    if isinstance(recipe, RLRecipe) and recipe.numerics == "exact" and passed is None:
        return torch.device("cpu")
    if recipe.device == "auto" and passed is not None:
        return next(passed.parameters()).device
    return resolve_device(recipe.device)


def resolve_device(asked: str) -> torch.device:
    """Returns what ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` stands for in this process.

    Raises:
        UserError: it is not there.
    """
    if not re.fullmatch(DEVICES, asked):
        raise UserError(f"{asked!r} is no device", found=repr(asked), remedy="use auto, cpu, cuda, or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and not count):
        return torch.device("cpu")
    number = int(asked.partition(":")[2] or 0)
    if number < count:
        return torch.device("cuda", number)
    raise UserError(
        f"there is no device {asked}",
        found=_in_words(count),
        remedy="name one that is there, or leave device out: it then is the GPU if there is one, else the CPU"
        if count
        else "install a driver and a CUDA build of torch, or set device: cpu",
    )


def _in_words(count: int) -> str:
    if count:
        return ", ".join(f"cuda:{n} ({torch.cuda.get_device_name(n)})" for n in range(count))
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__}, which was built without CUDA"
    return f"torch {torch.__version__} sees no GPU"


def worker_device(seen: torch.device, recipe: RLRecipe | SupervisedRecipe) -> torch.device:
    """Returns where a worker's models go: of Ray the GPU it was granted, of torchrun its own, or the CPU where there is
    none.

    Args:
        seen: what the worker would take by itself.

    Raises:
        UserError: there is no GPU in it after all.
    """
    if isinstance(recipe, SupervisedRecipe) and recipe.cluster.type == "torchrun":
        if recipe.device == "cpu" or (recipe.device == "auto" and seen.type == "cpu"):
            return CPU
    elif recipe.cluster.type != "ray" or recipe.cluster.gpus_per_process == 0:
        return CPU
    if seen.type == "cpu":
        raise UserError(
            "a worker was granted a GPU and sees none",
            found=_in_words(0),
            remedy="install a CUDA build of torch on every node, or set cluster.gpus_per_process: 0",
        )
    return seen


def use_threads(recipe: Recipe) -> None:
    """Sets torch's number of threads to the recipe's; to one where ``numerics`` is exact."""
    threads = 1 if getattr(recipe, "numerics", None) == "exact" else recipe.threads
    if threads is not None:
        torch.set_num_threads(threads)


def set_up_worker_process(
    process: ColocatedWorker, role: str, recipe: Recipe, directory: str, *, is_group: bool
) -> DataParallelGroup | None:
    """Makes a worker's process ready to load what a recipe names.

    Args:
        role: what the process is for, in its log records.
        directory: of the driver; paths of the recipe begin there, where a node has it.
        is_group: the processes of the worker's group train one model together.

    Returns:
        Those processes; None where this one is on its own.
    """
    if os.path.isdir(directory):
        os.chdir(directory)
    set_up_logging(recipe.log.level, role, process.rank)
    _log.info("started as process %d on %s", os.getpid(), socket.gethostname())
    use_threads(recipe)
    if not is_group:
        return None
    process.init_process_group()
    return DataParallelGroup.of_world()


# Precision -----------------------------------------------------------------------------------------------


def resolve_precision(device: torch.device, asked: PrecisionChoice) -> Precision:
    """Returns the compute dtype of models on ``device``; ``auto``: bf16 on a GPU that has it, fp32 elsewhere."""
    if asked != "auto":
        return asked
    return "bf16" if device.type == "cuda" and _has_bf16(device) else "fp32"


def _has_bf16(device: torch.device) -> bool:
    if device.index is None:
        return True  # of a worker, which looks itself
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


@dataclass(frozen=True)
class FrozenModels:
    """Takes over models that are never trained: on one device, with linear weights in one precision.

    An object passed from Python keeps its weights, and unless ``moves_user_models`` its device. Its results are the
    same.
    """

    device: torch.device = CPU
    precision: Precision = "fp32"
    moves_user_models: bool = False

    def causal(
        self, model: PreTrainedModel, *, is_user_object: bool = False, numerics: Numerics = "fast"
    ) -> PackedCausalLM:
        packed = packed_causal_lm(self._placed(model, is_user_object), self.precision, numerics=numerics)
        if not is_user_object:
            packed.freeze()
        return packed

    def scalar(self, model: PreTrainedModel, *, is_user_object: bool = False) -> PackedScalarModel:
        packed = packed_scalar_model(self._placed(model, is_user_object), self.precision)
        if not is_user_object:
            packed.freeze()
        return packed

    def _placed(self, model: PreTrainedModel, is_user_object: bool) -> PreTrainedModel:
        return model if is_user_object and not self.moves_user_models else model.to(self.device)


# The record ----------------------------------------------------------------------------------------------


def resolved_settings(recipe: Recipe, device: torch.device) -> dict[str, str]:
    """Returns what a run has in the place of ``auto``: ``device`` and every ``precision`` by its key; ``gpu``, its
    name."""
    found = {"device": str(device)}
    if device.index is not None:
        found["gpu"] = torch.cuda.get_device_name(device)
    values = flatten(recipe.model_dump(mode="json"))
    asked = {key: value for key, value in values.items() if key.rpartition(".")[2] == "precision"}
    return found | {key: resolve_precision(device, value) for key, value in asked.items()}


def throughput(
    seconds: float, *, samples: int, tokens: int, devices: int, works: Mapping[str, WorkTotals]
) -> dict[str, float]:
    """Computes the throughput metrics of a step.

    Args:
        samples: responses, or rows of a supervised job, that the step trained on.
        tokens: of these, a shared prompt once.
        devices: processes of the run, each of which has one.
        works: of every role with a model, what its processes computed in the step.
    """
    whole = WorkTotals.joined(works.values())
    found = {
        "throughput/samples_per_s": samples / seconds,
        "throughput/samples_per_s_per_device": samples / seconds / devices,
        "throughput/tokens_per_s_per_device": tokens / seconds / devices,
        "throughput/collective_bytes": float(whole.sent_bytes),
    }
    if whole.computed_tokens:
        found["throughput/useful_token_share"] = whole.useful_tokens / whole.computed_tokens
    for role, work in works.items():
        if work.flops and work.seconds:
            found[f"throughput/tflops/{role}"] = work.flops / work.seconds / 1e12
            if work.possible_flops is not None:
                found[f"throughput/mfu/{role}"] = work.flops / work.possible_flops
    if whole.host_peak_bytes:
        found["memory/host_peak_bytes"] = float(whole.host_peak_bytes)
    if whole.device_peak_bytes:
        found["memory/device_peak_bytes"] = float(whole.device_peak_bytes)
    return found
