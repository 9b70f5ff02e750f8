"""transformers models run on packed sequences: a causal LM with its head, and a body with a scalar head.

Shapes: P packed tokens, M selected rows, D hidden, V vocabulary.

Both the train engine and the native rollout engine call the same object, so sampler and trainer share one forward path,
one autocast policy and one set of weights.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.config.plugins import load_object, weight_forms
from quartet.models import attention
from quartet.models.attention import AttentionContext
from quartet.models.directories import WHOLE, load_warnings
from quartet.models.exact import MIN_ROWS, ExactContext, padded_rows, row_multiple
from quartet.models.logprobs import LogprobOptions, SamplingLimits, VocabShard, token_logprobs
from quartet.models.lora import Adapters, attach_adapters, reject_peft_model
from quartet.models.memory import align_storages, to_device
from quartet.models.vision import ImageTower
from quartet.models.work import ModelFlops, WorkCounter

Precision = Literal["fp32", "bf16"]
Numerics = Literal["fast", "exact"]
Recomputation = bool | Literal["selective"]


class PackedModel:
    """Owns a transformers model while an engine works with it; ``release`` gives it back as it was.

    Dropout is set to 0: log-probabilities of sampler and trainer must agree.

    Args:
        precision: compute dtype; under "bf16" parameters stay as they are (see ``freeze``) and products run under
            autocast.
        numerics: "exact" fills products up to sizes from which a row's bits no longer depend on the other rows.
        activation_checkpointing: keep only each decoder layer's input, and compute the layer again in the backward;
            "selective": keep the results of products and attention too, and compute only what lies between them again.

    Attributes:
        shares_prefixes: a prompt may be computed once for all of its responses; False where the model cannot.
        unshared_because: why it cannot, for the warning.
        relative_positions: a sequence may begin at any position, as it does in a batch that is padded on the left.
        body: the language model without its head.
        tower: what a vision-language model has beside its language model, frozen unless told otherwise; None of a text
            model.
        adapters: what ``adapt`` put in; None where all weights are the model's own.
        one_call: ``one_call(function, *args)`` is ``function(*args)``. All passes of an engine go through it, hidden
            states and head of a pack within one call, so that a model can be one whose weights must be brought first.
        gather: how its tensors become whole, where several ranks hold them between them.
        parallel: the ranks that compute a pass between them (``train.parallel.context.ModelParallel``), where there are
            such.
        stage: which of the layers are here (``train.parallel.pipeline.Stage``), where ranks have some of them each.
        computes_on: the device, where the parameters are kept elsewhere.
        work: what its passes computed.

    Raises:
        UserError: the model cannot run packed, or has foreign adapters in it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        precision: Precision = "fp32",
        *,
        numerics: Numerics = "fast",
        activation_checkpointing: Recomputation = False,
    ) -> None:
        self.head = self._find_head(model)
        self.model = model
        self.precision: Precision = precision
        self.numerics: Numerics = numerics
        self.activation_checkpointing = activation_checkpointing
        self.shares_prefixes = True
        self.unshared_because = "a shared prompt gave other results than sequences alone"
        self.relative_positions = True
        self.adapters: Adapters | None = None
        reject_peft_model(model)
        align_storages(model)
        attention.install_attention(model)
        self._fused: list[nn.Module] = [m for form in weight_forms() for m in load_object(form.install)(model)]
        self.tower = ImageTower.of(model)
        self.body: nn.Module = getattr(model, model.base_model_prefix, model)
        if self.tower is not None:
            self.body = attention.language_model(model)
            self.tower.autocast = self.autocast
            self.tower.rounded = self.rounded_parameters if precision == "bf16" else set
            self.tower.freeze("language")
        self.disabled_dropout = disable_dropout(model)
        self._checkpointed: list[nn.Module] = []
        if activation_checkpointing:
            self._checkpointed = checkpoint_layers(self.body, selective=activation_checkpointing == "selective")
        self.one_call: Callable[..., Any] = _plain_call
        self.gather = WHOLE
        self.parallel: Any = None
        self.stage: Any = None
        self.work = WorkCounter()

    head: nn.Module
    computes_on: torch.device | None = None

    @abstractmethod
    def _find_head(self, model: PreTrainedModel) -> nn.Module:
        """Finds the model's head; UserError where it has none of this kind."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.computes_on if self.computes_on is not None else next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @cached_property
    def token_cost(self) -> int:
        """What a token costs besides its attention, in tokens attended to, by FLOPs."""
        return max(1, round(self.flops.token / self.flops.pair))

    @cached_property
    def flops(self) -> ModelFlops:
        """By the shapes of the weights. A token attended to takes four for each feature of a layer's heads, whatever
        window the layer has. Of experts, which are stacked, those count that a token meets."""
        config = self.model.config.get_text_config()
        embedding = self.model.get_input_embeddings().weight
        met = getattr(config, "num_experts_per_tok", None) or 1

        def of(parameters: Iterable[nn.Parameter], *, trained: bool = False) -> float:
            found = [p for p in parameters if p.ndim > 1 and (p.requires_grad or not trained)]
            return 2.0 * sum(p.numel() if p.ndim == 2 else p.numel() // p.shape[0] * met for p in found)

        head = list(self.head.parameters())
        # Adapters may be out of the model now.
        adapters = self.adapters.trained.values() if self.adapters is not None else ()
        apart = {id(p) for p in (embedding, *head)}
        layers = [p for p in {id(p): p for p in (*self.body.parameters(), *adapters)}.values() if id(p) not in apart]
        heads = config.num_attention_heads
        features = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        pair = 4.0 * config.num_hidden_layers * features
        return ModelFlops(of(layers), pair, of(head), of(layers, trained=True), of(head, trained=True))

    def num_rows(self, num_tokens: int) -> int:
        """Counts the rows that a pass over so many tokens computes; exact products may need more of them."""
        return padded_rows(num_tokens, self._row_step) if self.numerics == "exact" else num_tokens

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext, received: Tensor | None = None
    ) -> Tensor:
        """Computes last hidden states ``[P, D]`` of packed tokens ``[P]``; the context decides who sees whom. Where
        ranks share rows out between them, those of this rank.

        An exact context gets more rows where these are too few for exact products.

        Args:
            input_ids: of a vision-language model, places of pictures among them, where they lie on the host.
            position_ids: ``[P]``, or ``[3, P]`` where the tower says so.
            received: ``[P, D]`` of the layers before those that are here.

        Raises:
            RuntimeError: the model was released, so its own attention would ignore the context.
        """
        if not attention.is_attention_installed(self.model):
            raise RuntimeError(f"{type(self.model).__name__} was released; take it over again to run it packed")
        num_tokens = input_ids.shape[0]
        missing = 0
        if isinstance(context, ExactContext):
            missing = self.num_rows(num_tokens) - num_tokens
            input_ids, position_ids = F.pad(input_ids, (0, missing)), F.pad(position_ids, (0, missing))
            received = received if received is None else F.pad(received, (0, 0, 0, missing))
        with self.autocast(), self._receiving(received), self._placing(input_ids) as (embedded_ids, of_pictures):
            output = self.body(
                input_ids=embedded_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(-2),
                attention_mask=None,
                use_cache=False,
                quartet_attention=context,
                **of_pictures,
            )
        if not isinstance(getattr(output, "last_hidden_state", None), Tensor):
            raise TypeError(f"{type(self.body).__name__} gives no last_hidden_state, but a {type(output).__name__}")
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        # A slice of all rows would cost a copy in the backward.
        return hidden[:num_tokens] if missing else hidden

    @contextlib.contextmanager
    def _placing(self, input_ids: Tensor) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Gives the ids that the embedding takes, on the device, and what the language model is told of pictures."""
        if self.tower is None:
            yield input_ids, {}
            return
        with self.tower.placing(input_ids) as (ids, of_pictures):
            yield ids if ids.device == self.device else to_device(ids, self.device), of_pictures

    @contextlib.contextmanager
    def _receiving(self, received: Tensor | None) -> Iterator[None]:
        """Gives the stage what it received, within the block alone: else it would live as long as the model."""
        if self.stage is not None:
            self.stage.received = received if received is None else received.unsqueeze(0)
        try:
            yield
        finally:
            if self.stage is not None:
                self.stage.received = None

    def adapt(self, config: LoRAConfig, *, seed: int) -> None:
        """Puts fresh LoRA adapters in and freezes the rest of the model, but for a scalar head.

        Raises:
            UserError: peft is missing, or the section does not fit the model.
        """
        self.adapters = attach_adapters(self.model, self.body, config, seed=seed, head=self._head_in_full)

    @property
    def _head_in_full(self) -> nn.Module | None:
        """The head that is trained in full beside adapters."""
        return None

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Makes the model its base, to the bit, in the ``with`` block; it has no other users meanwhile, and nothing may
        be awaited.
        """
        return self.adapters.out() if self.adapters is not None else contextlib.nullcontext()

    def with_merged_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model plain layers of merged weights in the ``with`` block; it has no other users meanwhile."""
        return self.adapters.merged() if self.adapters is not None else contextlib.nullcontext()

    def freeze(self) -> None:
        """Freezes the model, once it is probed and will never be trained: it takes no gradients, and in bf16 its linear
        layers hold their weights in bf16.

        Autocast rounds these weights before every product anyway, so no result changes. Embeddings and norms stay as
        they are: they begin and scale the residual stream, which is fp32 under autocast. So does a scalar head.
        """
        self.model.requires_grad_(False)
        if self.precision == "bf16":
            self.round_frozen()

    def round_frozen(self) -> None:
        """Holds weights that take no gradients and that autocast rounds to bf16 in bf16 from now on."""
        for parameter in self.rounded_parameters():
            if parameter.dtype == torch.float32 and not parameter.requires_grad:
                parameter.data = parameter.detach().to(torch.bfloat16)

    def rounded_parameters(self) -> set[nn.Parameter]:
        """Returns what autocast to bf16 rounds before every use: weights of linear layers that nothing else uses."""
        linear = [module for module in self.model.modules() if type(module) in (nn.Linear, Conv1D)]
        others = (m for m in self.model.modules() if type(m) not in (nn.Linear, Conv1D) or m is self._head_in_full)
        kept = {parameter for module in others for parameter in module.parameters(recurse=False)}
        return {p for module in linear for p in module.parameters(recurse=False)} - kept

    def forget(self, gone: Collection[nn.Module]) -> None:
        """Lets go of modules that other ranks have from now on. What it says of the whole model it goes on saying."""
        _ = self.token_cost, self._row_step, self._dropout_warning
        self._checkpointed = [module for module in self._checkpointed if module not in gone]
        self._fused = [module for module in self._fused if module not in gone]
        self.disabled_dropout = [dropout for dropout in self.disabled_dropout if dropout.module not in gone]
        if self.adapters is not None:
            self.adapters.forget(gone)

    def complete_state(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the model's state without adapters, ``own`` of which is here, with what other stages have of it."""
        return own if self.stage is None else self.stage.complete(self.stage.state, own)

    def complete_trained(self) -> Mapping[str, Tensor]:
        """Returns what trains (with adapters those), with what other stages have of it."""
        if self.adapters is not None:
            return self.adapters.all_trained
        own = dict(self.model.named_parameters())
        return own if self.stage is None else self.stage.complete(self.stage.trained, own)

    def unfuse(self) -> None:
        """Lets normalisation and rotary embedding run as the model has them from now on: a compiler sees
        whole layers.
        """
        restore_forwards(self._fused)

    @cached_property
    def _dropout_warning(self) -> str | None:
        if not self.disabled_dropout:
            return None
        first, places = self.disabled_dropout[0], len(self.disabled_dropout)
        return f"dropout set to 0 in {places} places (first {first.name}, was {first.rate:g})"

    @cached_property
    def _row_step(self) -> int:
        return row_multiple(self.body)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out of the model or changed about it, in words, for the run's log."""
        found = list(load_warnings(self.model))
        if self._dropout_warning is not None:
            found.append(self._dropout_warning)
        if not self.shares_prefixes:
            found.append(
                f"{type(self.model).__name__}: prompts are computed for every response; {self.unshared_because}"
            )
        if self.adapters is not None:
            found.append(self.adapters.warning)
        return tuple(found)

    def release(self) -> PreTrainedModel:
        """Returns the model with its former attention, dropout and layers, usable on its own again.

        Adapters are added to its weights: it then is the trained model, as after training all of them.
        """
        attention.uninstall_attention(self.model)
        if self.adapters is not None:
            self.adapters.fold()
        restore_forwards(self._checkpointed)
        restore_forwards(self._fused)
        for dropout in self.disabled_dropout:
            setattr(dropout.module, dropout.attribute, dropout.rate)
        return self.model


class PackedCausalLM(PackedModel):
    """A causal LM: hidden states, logits, log-probabilities.

    Attributes:
        logit_scale: factor of the head's output; the probe finds it where an architecture has one.
        vocabulary: the rows of the head that this rank has, where several have them between them.
    """

    head: nn.Linear
    logit_scale = 1.0
    vocabulary: VocabShard | None = None

    def _find_head(self, model: PreTrainedModel) -> nn.Linear:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise UserError(
                f"{type(model).__name__} has no linear language-model head",
                found=f"get_output_embeddings() is {head}",
                remedy="load it with AutoModelForCausalLM",
            )
        return head

    @cached_property
    def _softcap(self) -> float | None:
        found: float | None = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits ``[M, D] → [M, V]`` fp32 (fp64 stays); the product itself runs in the compute dtype.

        Bit for bit the logits of which ``token_logprobs`` takes the log-probabilities, for the same rows in one chunk.
        """
        rows = self._enough_rows(hidden)
        with self.autocast():
            logits = self.scaled(self.head(rows))
        return logits if rows is hidden else logits[: hidden.shape[0]]

    def scaled(self, raw: Tensor) -> Tensor:
        """Returns the logits of what a head's product is, ``[M, V]``: in fp32 (fp64 stays), with the model's scale and
        cap.
        """
        logits = raw if raw.dtype == torch.float64 else raw.float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def token_logprobs(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        temperature: float = 1.0,
        chunk: int = 1024,
        entropy: bool = False,
        entropy_grad: bool = True,
        limits: SamplingLimits | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes log-probabilities (and entropies) of the temperature-scaled distribution, or of what ``limits``
        leave of it.

        Args:
            hidden: ``[M, D]`` rows that predict ``labels``.
            labels: ``[M]`` token ids.
            chunk: most rows whose logits exist at a time; the backward computes them again.
            entropy_grad: let entropies carry gradient.

        Returns:
            ``logprobs [M]``, and ``entropies [M]`` in nats or None.
        """
        weight, num_rows = self.head.weight, hidden.shape[0]
        if self.numerics == "exact":
            # Chunks are of nearly equal size, so none then has fewer than MIN_ROWS.
            chunk = max(chunk, 2 * MIN_ROWS)
        # Autocast leaves fp64 alone.
        halved = self.precision == "bf16" and weight.dtype != torch.float64
        compute_dtype = torch.bfloat16 if halved else weight.dtype
        shape = self.logit_scale, self._softcap, chunk
        rule = LogprobOptions(compute_dtype, temperature, *shape, entropy, entropy_grad, limits)
        rows = self._enough_rows(hidden)
        targets = F.pad(labels, (0, rows.shape[0] - num_rows))
        logprobs, entropies = token_logprobs(rows, weight, self.head.bias, targets, rule, self.vocabulary)
        return logprobs[:num_rows], None if entropies is None else entropies[:num_rows]

    def _enough_rows(self, hidden: Tensor) -> Tensor:
        """Adds rows of zeros below ``hidden`` where exact numerics need more of them."""
        if self.numerics == "fast":
            return hidden
        return F.pad(hidden, (0, 0, 0, padded_rows(hidden.shape[0]) - hidden.shape[0]))


class PackedScalarModel(PackedModel):
    """A sequence-classification model with one label: reward model or critic. The head runs wholly in fp32.

    Attributes:
        plain: the head's weight as a plain tensor, where ranks that share out layers have each the whole of it.
    """

    head: nn.Linear
    plain: Callable[[Tensor], Tensor] = staticmethod(lambda weight: weight)

    def _find_head(self, model: PreTrainedModel) -> nn.Linear:
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1 or head.bias is not None:
            raise UserError(
                f"{type(model).__name__} has no scalar head",
                found=f"score = {head}",
                remedy="load it with AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)",
            )
        return head

    @property
    def _head_in_full(self) -> nn.Module:
        return self.head

    def scalars(self, hidden: Tensor) -> Tensor:
        """Maps ``[M, D] → [M]`` fp32 (fp64 stays)."""
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        return (hidden.to(dtype) @ self.plain(self.head.weight).to(dtype).T).squeeze(-1)


def _plain_call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@dataclass(frozen=True)
class DisabledDropout:
    """One dropout that was above 0: ``module.attribute``, its dotted name, its rate."""

    module: nn.Module
    attribute: str
    name: str
    rate: float


def disable_dropout(model: PreTrainedModel) -> list[DisabledDropout]:
    """Sets every dropout of the model to 0; returns what was above it, for saying so and for putting it back."""
    disabled = []
    for name, module in model.named_modules():
        attribute = "p" if isinstance(module, nn.Dropout) else "attention_dropout"
        rate = getattr(module, attribute, None)
        if isinstance(rate, float) and rate > 0:
            disabled.append(DisabledDropout(module, attribute, f"{name}.{attribute}", rate))
            setattr(module, attribute, 0.0)
    return disabled


def decoder_layers(body: nn.Module) -> list[nn.Module]:
    """Returns the layers that transformers marks as such, in the order of the body."""
    return [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(body: nn.Module, *, selective: bool = False) -> list[nn.Module]:
    """Makes every decoder layer keep only its inputs while gradients are enabled; returns the layers.

    Works whether or not the model is in training mode, which transformers' own switch needs.

    Args:
        selective: results of products and attention are kept as well.
    """
    layers = decoder_layers(body)
    for layer in layers:
        # A partial of a bound method, so that a copy of the model runs its own layers.
        layer.forward = partial(_recomputed, layer.forward, selective)
    return layers


def _recomputed(forward: Callable[..., Any], selective: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if selective:
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
    # Nothing is drawn at random: dropout is 0.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._efficient_attention_forward.default,
}
"""What costs most to compute again."""


def _kept(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def restore_forwards(modules: list[nn.Module]) -> None:
    """Takes the forward off that each instance has; its class's shows again. Empties the list."""
    while modules:
        vars(modules.pop()).pop("forward", None)


_MIN_VARIANTS = 64
"""Compiled forms of one function that are kept: kinds of context x gradient mode x precision x architectures."""


class CompiledLayers:
    """The decoder layers of ``packed``, compiled for all shapes by their first calls, which take a minute or so.

    On a GPU a norm, a rotary embedding or a gate of an unmodified model is five to ten kernels that each read and write
    the whole activation; compiled it is one. Attention stays outside: its context objects change from call to call.

    Parameters, their names and the model's class stay as they are; an engine that shares the model runs plain layers.

    Args:
        backend: torch's name of the compiler.

    Raises:
        UserError: the model has no decoder layers that transformers marks as such.
    """

    def __init__(self, packed: PackedModel, *, backend: str = "inductor") -> None:
        self._layers = decoder_layers(packed.body)
        if not self._layers:
            raise UserError(
                f"the layers of {type(packed.model).__name__} cannot be compiled",
                found="none of its modules is a transformers decoder layer",
                remedy="leave train.compile out",
            )
        packed.unfuse()
        # For all models of the process.
        AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.packed_attention))
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _MIN_VARIANTS)
        self._calls = []
        for layer in self._layers:
            # On a GPU torch would otherwise time several forms of a kernel and keep the fastest.
            options: Any = {"deterministic": True} if backend == "inductor" else None
            self._calls.append(torch.compile(layer.forward, dynamic=True, backend=backend, options=options))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Runs the model's compiled layers in the ``with`` block."""
        # Recomputation has put a forward on each instance.
        own = [vars(layer).get("forward") for layer in self._layers]
        for layer, call in zip(self._layers, self._calls, strict=True):
            layer.forward = call
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, own, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward
