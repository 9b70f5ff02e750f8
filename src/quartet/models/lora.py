"""LoRA through peft: frozen linear layers with small trained factors beside them.

An adapted layer computes ``W x + scale · B A x`` with ``scale = alpha / rank`` (Hu et al. 2021, section 4.1). ``W`` is
frozen, ``A [rank, in]`` and ``B [out, rank]`` are trained, and ``B`` starts at 0, so a run starts as its base model.

peft's layer stands in the model where the linear layer stood, and holds it. So one switch serves everybody who wants
something else than the trainer's forward: it puts the linear layers back for a while. As they are, the model is the
base, to the bit: the reference of an RL run. With ``W + scale · B A`` in the place of ``W``, it is the trained model
without the extra products: what the rollout engine computes with, and what is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quartet.config import UserError
from quartet.config.common import ALL_LINEAR, LoRAConfig
from quartet.models.directories import WHOLE, GatherFunctions, save_tensors

_ADAPTER = "default"
"""peft's name of a model's first adapter."""


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """One linear layer with its adapter.

    Attributes:
        path: the layer's dotted name in the model.
        parent, name: where it stands: ``parent.name``.
        adapted: peft's layer, which stands there while the adapters are in.
        base: the linear layer that it holds; in some families transformers' ``Conv1D``, whose weight is ``[in, out]``.
        scale: ``alpha / rank``.
    """

    path: str
    parent: nn.Module
    name: str
    adapted: Any
    base: nn.Linear
    scale: float

    @property
    def factors(self) -> tuple[nn.Parameter, nn.Parameter]:
        """``A [rank, in]`` and ``B [out, rank]``."""
        return self.adapted.lora_A[_ADAPTER].weight, self.adapted.lora_B[_ADAPTER].weight

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """All that ``merged_weight`` is made of."""
        return (self.base.weight, *self.factors)

    def merged_weight(self) -> Tensor:
        """Computes ``W + scale · B A`` in the layout and dtype of ``W``, computed in fp32 (fp64 stays)."""
        return self.merge(*self.sources)

    @torch.no_grad()
    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Computes ``merged_weight`` of what the ``sources`` are as whole tensors."""
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        left, right = (a.T, b.T) if isinstance(self.base, Conv1D) else (b, a)
        merged = torch.addmm(weight.to(dtype), left.to(dtype), right.to(dtype), alpha=self.scale)
        return merged.to(weight.dtype)

    def take_out(self) -> None:
        setattr(self.parent, self.name, self.base)

    def put_in(self) -> None:
        setattr(self.parent, self.name, self.adapted)


class Adapters:
    """The adapters of one model, and the switch that takes them out.

    The switch is the module's, so every computation with the model sees it: its user must be the only one, in one
    piece, with nothing awaited inside. A second use inside of the first is refused.

    Attributes:
        config: what was asked for.
        layers: the adapted layers, in the model's order.
        trained: the parameters that learn, by their name in the model: the factors, and a scalar head in full.
        digest: the SHA-256 of named tensors; replaced where they are sharded.
        stage: as of the packed model.
    """

    def __init__(
        self, model: PreTrainedModel, config: LoRAConfig, layers: list[AdaptedLayer], target_names: list[str]
    ) -> None:
        self.config = config
        self.layers = layers
        self._drawn: list[tuple[AdaptedLayer | None, torch.Size]] = [(one, one.factors[0].shape) for one in layers]
        self._model = model
        self.take_up_parameters()
        self._target_names = target_names
        self.digest: Callable[[Iterable[tuple[str, Tensor]]], str] = named_tensors_digest
        self._is_in = True
        self._is_folded = False
        self._transposed = all(isinstance(layer.base, Conv1D) for layer in layers)
        self.stage: Any = None

    @cached_property
    def heads(self) -> list[str]:
        """Names of the modules that are trained in full."""
        factors = {id(factor) for layer in self.layers for factor in layer.factors}
        return sorted({n.rpartition(".")[0] for n, p in self.trained.items() if id(p) not in factors})

    @cached_property
    def warning(self) -> str:
        """What is trained, in words."""
        num_trained = sum(p.numel() for p in self.trained.values())
        num_all = sum(p.numel() for p in self._model.parameters())
        head = "".join(f" and {name} in full" for name in self.heads)
        return (
            f"LoRA of rank {self.config.rank} on {len(self.layers)} linear layers{head}: "
            f"{num_trained:,} of {num_all:,} parameters are trained"
        )

    @property
    def all_trained(self) -> Mapping[str, Tensor]:
        """``trained`` with what other pipeline stages have."""
        return self.trained if self.stage is None else self.stage.complete(self.stage.trained, self.trained)

    def take_up_parameters(self) -> None:
        """Sets ``trained`` anew, after other code has put other parameters into the model."""
        self.trained: dict[str, nn.Parameter] = {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    # The switch ------------------------------------------------------------------------------------------

    def check_in(self) -> None:
        """Raises where the adapters are out: what is computed now would be another model's.

        Raises:
            RuntimeError: the switch is in use.
        """
        if not self._is_in:
            raise RuntimeError(
                "the model's adapters are switched off: a reference pass, an engine step or an export is under way, "
                "and nothing else may compute with the model until it ends"
            )

    @contextlib.contextmanager
    def out(self) -> Iterator[None]:
        """Puts the linear layers back as they were before, in the ``with`` block: the model is its base.

        Raises:
            RuntimeError: they are out already.
        """
        self.check_in()
        self._is_in = False
        for layer in self.layers:
            layer.take_out()
        try:
            yield
        finally:
            for layer in self.layers:
                layer.put_in()
            self._is_in = True

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Gives the linear layers merged weights in the ``with`` block; afterwards they have their own again.

        Raises:
            RuntimeError: the adapters are out already.
        """
        with self.out():
            own = [layer.base.weight for layer in self.layers]
            try:
                for layer in self.layers:
                    layer.base.weight = nn.Parameter(layer.merged_weight(), requires_grad=False)
                yield
            finally:
                for layer, weight in zip(self.layers, own, strict=True):
                    layer.base.weight = weight

    @torch.no_grad()
    def fold(self) -> None:
        """Adds the adapters to the base weights for good and leaves the model as one that never had any."""
        if self._is_folded:
            return
        self.check_in()
        for layer in self.layers:
            layer.base.weight.copy_(layer.merged_weight())
            layer.take_out()
        self._model.requires_grad_(True)
        self._is_in, self._is_folded = False, True

    # Contents --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reset(self, seed: int, write: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Draws ``A`` uniform in ``± 1 / sqrt(in)`` from ``seed`` alone, as peft draws it from the global state; ``B``
        is 0.

        Args:
            write: of a sharded parameter and the values of the whole one.
        """
        generator = torch.Generator().manual_seed(seed)
        for layer, shape in self._drawn:
            drawn = torch.rand(shape, generator=generator)
            if layer is not None:
                a, b = layer.factors
                write(a, (2 * drawn - 1) * (1 / math.sqrt(shape[1])))
                b.zero_()

    def forget(self, gone: Collection[nn.Module]) -> None:
        """Lets go of adapted layers that other ranks have from now on; what it says of all layers it goes on saying."""
        _ = self.heads, self.warning
        self._drawn = [(None if layer and layer.adapted in gone else layer, shape) for layer, shape in self._drawn]
        self.layers = [layer for layer, _ in self._drawn if layer is not None]

    @contextlib.contextmanager
    def stirred(self) -> Iterator[None]:
        """Draws ``B`` at random for the ``with`` block: a check of the model then sees adapters that do something.

        ``B`` is 0 afterwards, so only for adapters that have not learned yet.
        """
        generator = torch.Generator().manual_seed(0)
        factors = [layer.factors[1] for layer in self.layers]
        with torch.no_grad():
            for b in factors:
                b.copy_(0.02 * torch.randn(b.shape, generator=generator))
        try:
            yield
        finally:
            with torch.no_grad():
                for b in factors:
                    b.zero_()

    # Checkpoints -----------------------------------------------------------------------------------------

    @cached_property
    def base_digest(self) -> str:
        """SHA-256 of every weight that is not trained, under its name in the model without adapters."""
        seen = {id(parameter) for parameter in self.all_trained.values()}
        named = []
        with self.out():
            state: Mapping[str, Tensor] = self._model.state_dict(keep_vars=True)
            if self.stage is not None:
                state = self.stage.complete(self.stage.state, state)
            for name, tensor in sorted(state.items()):
                if id(tensor) not in seen:
                    named.append((name, tensor))
                seen.add(id(tensor))
            return self.digest(named)

    @property
    def base(self) -> dict[str, str]:
        """Which model the adapters belong to."""
        return {"path": str(self._model.name_or_path), "sha256": self.base_digest}

    def check_base(self, state: Mapping[str, Any]) -> None:
        """
        Args:
            state: ``base`` among others, as it was when the adapters were saved.

        Raises:
            UserError: they were trained on another base, or the model had none.
        """
        base = state.get("base", {"path": "a model without adapters", "sha256": "none"})
        if base["sha256"] != self.base_digest:
            raise UserError(
                "the checkpoint's adapters were trained on another base model",
                found=f"then {base['path']!r} with SHA-256 {base['sha256'][:16]}…, "
                f"now {self._model.name_or_path!r} with {self.base_digest[:16]}…",
                remedy="resume with the model that the run started from, unchanged",
            )

    def save(self, path: Path, gather: GatherFunctions = WHOLE) -> None:
        """Writes what ``PeftModel.from_pretrained`` loads on top of the base model.

        Args:
            gather: of a sharded model, all of whose ranks call this.

        Raises:
            OSError: it could not be written.
        """
        if gather.is_first:
            path.mkdir(parents=True, exist_ok=True)
            config = _peft_config(
                self.config,
                self._target_names,
                transposed=self._transposed,
                task_type="SEQ_CLS" if self.heads else "CAUSAL_LM",
                modules_to_save=self.heads or None,
                base_model_name_or_path=str(self._model.name_or_path),
                inference_mode=True,
            )
            config.save_pretrained(path)
        names = {name: name.replace(f".{_ADAPTER}.weight", ".weight") for name in self.all_trained}
        named = {f"base_model.model.{names[name]}": parameter for name, parameter in self.all_trained.items()}
        save_tensors(path / "adapter_model.safetensors", named, gather)


def named_tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and contents, in their order."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Putting adapters in -------------------------------------------------------------------------------------


def attach_adapters(
    model: PreTrainedModel, body: nn.Module, config: LoRAConfig, *, seed: int, head: nn.Module | None = None
) -> Adapters:
    """Puts fresh adapters into the linear layers of ``body`` and freezes everything else.

    Args:
        seed: of the first factors; nothing else is drawn.
        head: a module of the model that is trained in full.

    Raises:
        UserError: peft is not installed, the model has adapters already, or the section does not fit its layers.
    """
    reject_peft_model(model)
    targets = _targets(body, config)
    names = _target_names(model, targets, config)
    paths = {id(module): path for path, module in model.named_modules()}
    bases = list(targets.values())
    transposed = all(isinstance(base, Conv1D) for base in bases)
    _inject(model, _peft_config(config, names, transposed=transposed), {paths[id(base)] for base in bases})
    layers = []
    for base in bases:
        path = paths[id(base)]
        parent, _, name = path.rpartition(".")
        adapted = model.get_submodule(path)
        layers.append(AdaptedLayer(path, model.get_submodule(parent), name, adapted, base, config.alpha / config.rank))
    model.requires_grad_(False)
    for layer in layers:
        for factor in layer.factors:
            factor.requires_grad_(True)
    if head is not None:
        head.requires_grad_(True)
    adapters = Adapters(model, config, layers, names)
    adapters.reset(seed)
    return adapters


def _inject(model: nn.Module, config: Any, paths: set[str]) -> None:
    """Has peft replace the layers at ``paths``.

    For families whose experts once were single layers, peft takes some names for those of the experts.

    Raises:
        UserError: it would not, or replaces others; the model is of no more use then.
    """
    failure = ""
    # peft draws first factors from the global generator.
    with torch.random.fork_rng(devices=[]):
        try:
            _peft().inject_adapter_in_model(config, model, _ADAPTER)
        except ValueError as error:
            failure = str(error)
    vars(model).pop("peft_config", None)
    found = {name for name, m in model.named_modules() if _is_of_peft(m) and hasattr(m, "base_layer")}
    if failure or found != paths:
        raise UserError(
            f"peft does not adapt these layers of {type(model).__name__}",
            found=failure or f"other layers, as {min(found ^ paths)}",
            remedy="name fewer layers in lora.target_modules, as those of attention: [q_proj, k_proj, v_proj, o_proj]",
        )


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def reject_peft_model(model: nn.Module) -> None:
    """Raises for a model that has adapters of peft in it already.

    Raises:
        UserError: it has.
    """
    found = next((name for name, module in model.named_modules() if _is_of_peft(module)), None)
    if found is not None:
        raise UserError(
            f"{type(model).__name__} has adapters of peft in it already",
            found=f"{type(model.get_submodule(found)).__name__} at {found or 'the top'}",
            remedy="merge them first (model = model.merge_and_unload()) and pass or save the plain model",
        )


def _targets(body: nn.Module, config: LoRAConfig) -> dict[str, nn.Linear]:
    """Returns the linear layers of the decoder to adapt, by name; what a multimodal model has beside it
    sees no text.
    """
    decoder, wanted = getattr(body, "language_model", body), config.target_modules
    linears = {name: module for name, module in decoder.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    found = linears
    if wanted != (ALL_LINEAR,):
        unknown = [target for target in wanted if not any(_is_named(name, target) for name in linears)]
        if unknown:
            raise UserError(
                "lora.target_modules names layers that the model does not have",
                found=f"{', '.join(unknown)}; its linear layers are called {', '.join(_last_names(linears))}",
                remedy="choose from these, or leave target_modules out (all-linear)",
            )
        found = {name: m for name, m in linears.items() if any(_is_named(name, target) for target in wanted)}
    return found


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _last_names(names: Mapping[str, object]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _target_names(model: nn.Module, targets: Mapping[str, nn.Linear], config: LoRAConfig) -> list[str]:
    """Returns the names by which peft finds these layers and no others: short ones where that is so, else
    whole paths.
    """
    ids = {id(module) for module in targets.values()}
    short = _last_names(targets) if config.target_modules == (ALL_LINEAR,) else list(config.target_modules)
    found = {id(m) for name, m in model.named_modules() if any(_is_named(name, target) for target in short)}
    return short if found == ids else [name for name, module in model.named_modules() if id(module) in ids]


def _peft_config(config: LoRAConfig, names: list[str], *, transposed: bool, **options: Any) -> Any:
    return _peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(names),
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=transposed,
        **options,
    )


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise UserError(
            "LoRA needs the peft package",
            found=str(error),
            remedy="install it with the extra: pip install 'quartet-rl[lora]'",
        ) from error
