"""Every architecture of docs/models.md in training: packed roots and shared trees against unmodified models, one
sequence at a time; heads that scale logits; experts; reward models and critics saved and loaded plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
)

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.models.loading import (
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    save_causal_lm,
    save_scalar_model,
    scalar_model_from,
)
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.models.packing import pack

VISION = {"vision_tower", "multi_modal_projector"}
"""Modules of multimodal models that text does not reach."""
WITHOUT_CLASSIFIER = ("granite", "cohere", "olmoe", "ernie4_5")
VOCAB = 61


@pytest.fixture(scope="module")
def tree() -> RaggedBatch:
    """A group of three responses, a prompt whose second turn forks three ways, and a sequence of its own.

    Windows of 4 and 5 tokens end inside of prompts; full lengths are 6 to 13 tokens.
    """
    lengths, parents = (6, 4, 4, 2, 5, 3, 4, 2, 4, 4, 7), (-1, 0, 0, 0, -1, 4, 4, 6, 6, 6, -1)
    leaves = (1, 2, 3, 5, 7, 8, 9, 10)
    generator = torch.Generator().manual_seed(3)
    owned = torch.tensor([k in leaves for k in range(len(lengths))]).repeat_interleave(torch.tensor(lengths))
    owned[sum(lengths[:-1])] = False
    return RaggedBatch(
        torch.randint(VOCAB, (sum(lengths),), generator=generator),
        lengths,
        parents,
        leaves,
        tuple("abcdefgh"),
        token={"loss_mask": owned},
    )


def _ours(packed: PackedCausalLM, batch: RaggedBatch, *, share: bool) -> Tensor:
    """``[T]`` log-probabilities of the tokens under the mask."""
    laid_out = pack(batch, share=share)
    hidden = packed.hidden(laid_out.input_ids, laid_out.position_ids, laid_out.attention())
    rows, labels, targets = laid_out.predicted(batch.token["loss_mask"])
    logprobs, _ = packed.token_logprobs(hidden[rows], labels)
    return laid_out.scatter(logprobs, targets)


def _theirs(plain: PreTrainedModel, batch: RaggedBatch) -> Tensor:
    """The same by one forward pass of the unmodified model per sequence."""
    out = torch.zeros(batch.num_tokens, dtype=plain.dtype)
    for s in range(len(batch)):
        ids = torch.tensor(batch.token_ids(s))
        logits = plain(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)
        start, stop = batch.leaf_span(s)
        places = torch.arange(start, stop)[-len(logprobs) :]
        out = out.index_put((places,), logprobs[-len(places) :])
    return out * batch.token["loss_mask"]


def _weighted(values: Tensor) -> Tensor:
    """A scalar that every value enters with its own weight."""
    generator = torch.Generator().manual_seed(11)
    return (torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values.dtype) * values).sum()


def _check_gradients(
    ours: PreTrainedModel, theirs: PreTrainedModel, close: Callable[..., None], dtype: torch.dtype | None = None
) -> None:
    """On the scale of each parameter's gradient, as the weighted sum is not normalised."""
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        reference = expected[name].grad
        if name.split(".")[1] in VISION:
            assert reference is None and parameter.grad is None, name
            continue
        scale = float(reference.abs().max())
        assert scale > 0, name
        close(parameter.grad / scale, reference / scale, dtype)


Twins = Callable[..., tuple[PackedCausalLM, PreTrainedModel]]


@pytest.fixture(scope="module")
def build_twins(make_model: Callable[..., PreTrainedModel]) -> Twins:
    """A probed model and its unmodified copy."""

    def build(architecture: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
        plain = make_model(architecture, dtype, **options)
        return packed_causal_lm(copy.deepcopy(plain)), plain

    return build


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in fp64 throughout: by themselves they take norms, routers and some softmaxes down to fp32."""
    to, softmax = torch.Tensor.to, torch.Tensor.softmax

    def kept(self: Tensor, *args: Any, **options: Any) -> Tensor:
        narrowing = torch.float32 in (*args, options.get("dtype"))
        return self if narrowing and self.dtype == torch.float64 else to(self, *args, **options)

    def same(scores: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(scores, dim)

    monkeypatch.setattr(torch.Tensor, "to", kept)
    monkeypatch.setattr(torch.Tensor, "type", kept)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: kept(self, torch.float32))
    monkeypatch.setattr(torch.nn.functional, "softmax", same)
    monkeypatch.setattr(torch.Tensor, "softmax", same)


# Packed roots and shared trees ---------------------------------------------------------------------------


def _check(packed: PackedCausalLM, plain: PreTrainedModel, batch: RaggedBatch, close: Any, share: bool = True) -> None:
    ours, theirs = _ours(packed, batch, share=share), _theirs(plain, batch)
    close(ours, theirs)
    assert torch.equal(theirs != 0, batch.token["loss_mask"]) and ours.dtype == plain.dtype
    _weighted(ours).backward()
    _weighted(theirs).backward()
    _check_gradients(packed.model, plain, close)


@pytest.mark.parametrize("share", [True, False], ids=["tree", "roots"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_neox", "qwen3_moe", "deepseek_v3"])
def test_logprobs_and_gradients_equal_sequences_alone(name, share, build_twins, tree, close):
    _check(*build_twins(name), tree, close, share)


def test_fp64_is_exact(architecture, build_twins, tree, close, wide):
    _check(*build_twins(architecture, torch.float64), tree, close)


def test_bf16_stays_within_the_table(architecture, build_twins, tree, close):
    packed, plain = build_twins(architecture, initializer_range=0.02)
    packed.precision = "bf16"
    with torch.no_grad():
        ours, theirs = _ours(packed, tree, share=True), _theirs(plain, tree)
    # Of log-probabilities around -4.
    close(ours / theirs.abs().max(), theirs / theirs.abs().max(), torch.bfloat16)
    assert not torch.equal(ours, theirs)
    packed.model.zero_grad()
    _weighted(_ours(packed, tree, share=True)).backward()
    gradients = [
        parameter.grad for name, parameter in packed.model.named_parameters() if name.split(".")[1] not in VISION
    ]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


# What the comparison rests on: the features are there ----------------------------------------------------


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral's window": ("mistral", {"sliding_window": 64}),
    "gemma-3's window": ("gemma3", {"sliding_window": 64}),
    "gemma-3's local rotary base": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            }
        },
    ),
    "gemma-3's global rotary base": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "gpt-neox's parallel residual": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt-neox's partial rotation": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
    "phi-3's partial rotation": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "phi-3's short factors": (
        "phi3_longrope",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "granite's scaled logits": ("granite", {"logits_scaling": 1.0}),
}


@pytest.mark.parametrize("feature", list(FEATURES))
def test_without_the_feature_something_else_comes_out(feature, build_twins, tree):
    """Equal weights, another config: guards the tests above against models in which the feature does nothing."""
    architecture, options = FEATURES[feature]
    (packed, plain), (other, _) = build_twins(architecture), build_twins(architecture, **options)
    other.model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        difference = _ours(packed, tree, share=True) - _ours(other, tree, share=True)
    assert float(difference.abs().max()) > 1e-2


def test_the_experts_are_chosen_per_token(build_twins, tree):
    """Every expert works on some of the tree's tokens and on not all of them; the balancing loss is not computed."""
    packed, plain = build_twins("qwen3_moe")
    chosen: list[Tensor] = []
    packed.model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2]))
    _ours(packed, tree, share=True)
    (experts,) = chosen
    assert experts.shape == (tree.num_tokens, 2), "a shared prompt is routed once"
    counts = experts.flatten().bincount(minlength=4)
    assert int(counts.min()) > 0 and int(counts.max()) < tree.num_tokens
    # The config switches the loss on for training; it has no part in ours.
    packed.model.config.output_router_logits = True
    with torch.no_grad():
        assert torch.equal(_ours(packed, tree, share=True), _ours(packed_causal_lm(plain), tree, share=True))


# Gemma-3 with its vision tower ---------------------------------------------------------------------------


def test_multimodal_gemma3_is_its_text_part(build_twins, tree, close):
    """Loaded whole; the vision tower is carried along untouched."""
    packed, _ = build_twins("gemma3_multimodal")
    _, text = build_twins("gemma3")
    text.model.load_state_dict(packed.model.model.language_model.state_dict())
    text.lm_head.load_state_dict(packed.model.lm_head.state_dict())
    ours, theirs = _ours(packed, tree, share=True), _theirs(text, tree)
    close(ours, theirs)
    _weighted(ours).backward()
    assert {n.split(".")[1] for n, p in packed.model.named_parameters() if p.grad is None} == VISION


# Directories ---------------------------------------------------------------------------------------------


def test_saved_causal_lm_reloads_plainly(architecture, build_twins, tmp_path, make_tokenizer):
    packed, plain = build_twins(architecture)
    save_causal_lm(packed, make_tokenizer(), tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=ids).logits, plain(input_ids=ids).logits)
    again = reloaded.state_dict()
    assert all(torch.equal(again[name], values) for name, values in plain.state_dict().items())


def test_scalar_model_trains_and_reloads_plainly(architecture, make_model, tree, close, tmp_path, make_tokenizer):
    """Scores by the tree, alone by the unmodified class, and by a padded batch of what was saved."""
    if architecture in WITHOUT_CLASSIFIER:
        with pytest.raises(UserError, match="has no sequence-classification class") as refused:
            scalar_model_from(make_model(architecture), seed=0)
        assert "docs/models.md" in refused.value.remedy
        return
    scalar = scalar_model_from(make_model(architecture), seed=0)
    torch.nn.init.normal_(scalar.score.weight, generator=torch.Generator().manual_seed(2))
    plain = copy.deepcopy(scalar)
    packed = packed_scalar_model(scalar)
    ours = _scores(packed, tree)
    texts = [tree.token_ids(s) for s in range(len(tree))]
    theirs = torch.cat([plain(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in texts])
    close(ours, theirs)
    _weighted(ours).backward()
    _weighted(theirs).backward()
    _check_gradients(packed.model, plain, close)

    pad = 60
    seen = torch.ones(VOCAB, dtype=torch.bool)
    seen[pad] = False
    assert all(pad not in text for text in texts)
    save_scalar_model(packed, make_tokenizer(pad_token=f"t{pad}"), tmp_path, seen=seen)
    saved = load_scalar_model(str(tmp_path))
    longest = max(map(len, texts))
    ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        close(saved(input_ids=ids, attention_mask=(ids != pad).long()).logits.squeeze(1), ours)
        assert torch.equal(_scores(packed_scalar_model(saved), tree), ours)


def _scores(packed: PackedScalarModel, batch: RaggedBatch) -> Tensor:
    laid_out = pack(batch)
    hidden = packed.hidden(laid_out.input_ids, laid_out.position_ids, laid_out.attention())
    return packed.scalars(hidden[laid_out.last_rows()])
