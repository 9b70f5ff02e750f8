"""Parts of a model that leave the device: nothing computed changes by a bit, memory is really freed, errors undo it."""

import copy
import errno
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.config import UserError
from quartet.config.algorithms import PPO
from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import SFTObjective, ValueObjective
from quartet.train.offload import PARTS, MappedFileStore, Offload
from quartet.train.state import copy_to_host
from train_fixtures import load_state

KINDS = ("causal", "scalar", "lora", "tied")


class Memory:
    """A store in plain memory that counts what it gave, and has no room when told so."""

    def __init__(self):
        self.given = []
        self.is_full = False

    def allocate(self, sizes):
        if self.is_full:
            raise UserError("no room", found="a full store", remedy="make some")
        self.given += sizes
        return [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]


@pytest.fixture
def build(make_model):
    """``build(kind)``: an engine with fresh weights, the same ones for the same kind."""

    def make(kind):
        config = TrainConfig(
            optim=OptimConfig(lr=1e-2, max_grad_norm=1.0),
            lora=LoRAConfig(rank=3, alpha=7.0) if kind == "lora" else None,
        )
        model = make_model("scalar" if kind == "scalar" else "causal", torch.float32)
        if kind == "tied":
            model.config.tie_word_embeddings = True
            model.lm_head.weight = model.model.embed_tokens.weight
        packed = (PackedScalarModel if kind == "scalar" else PackedCausalLM)(model)
        if kind == "lora":
            packed.adapt(config.lora, seed=1)
        return TrainEngine(packed, config, total_steps=10)

    return make


@pytest.fixture
def frozen(make_model):
    """A causal model that is not trained."""
    packed = PackedCausalLM(make_model("causal", torch.float32))
    packed.model.requires_grad_(False)
    return packed


@pytest.fixture
def files(tmp_path):
    return MappedFileStore(tmp_path / "away")


@pytest.fixture
def data(batch):
    """The batch in fp32."""
    return batch.with_token(
        **{name: values.float() for name, values in batch.token.items() if values.dtype == torch.float64}
    )


def objective_for(engine):
    return ValueObjective(PPO(), 6) if isinstance(engine.packed, PackedScalarModel) else SFTObjective()


def needs_for(engine):
    is_scalar = isinstance(engine.packed, PackedScalarModel)
    return ForwardNeeds(logprobs=not is_scalar, entropies=not is_scalar, values=is_scalar, mask="action_mask")


def assert_same(found, expected, at=""):
    """Two nested states are equal to the bit."""
    assert type(found) is type(expected), at
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.stride() == expected.stride(), at
        assert torch.equal(found, expected), at
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key in expected:
            assert_same(found[key], expected[key], f"{at}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), at
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{at}/{i}")
    else:
        assert found == expected, at


def storage_sizes(tensors):
    """Bytes of each storage that they lie in."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()


def parameter_bytes(packed):
    return sum(storage_sizes([*packed.model.parameters(), *packed.model.buffers()]))


def optimizer_bytes(engine):
    return sum(storage_sizes(t for values in engine.optimizer.state.values() for t in values.values()))


def parameters(packed):
    return dict(packed.model.named_parameters())


# Nothing changes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_movements_and_work_leaves_the_bits_of_work_alone(seed, build, data, tmp_path):
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    plain, moved = build(kind), build(kind)
    offload = moved.offloading(Memory() if seed % 3 else MappedFileStore(tmp_path))
    tensors = {id(p): p for p in moved.packed.model.parameters()}
    away, saved = set(), [copy_to_host(plain.state())]
    for _ in range(30):
        action = draw.choice(["offload", "onload", "onload", "forward", "train", "train", "state", "load"])
        parts = draw.sample(PARTS, draw.randint(0, 3))
        if action in ("offload", "onload"):
            getattr(offload, action)(parts)
            away = away | set(parts) if action == "offload" else away - set(parts)
            assert offload.offload(away).num_bytes == offload.onload(set(PARTS) - away).num_bytes == 0
            assert all(offload.is_resident([part]) == (part not in away) for part in PARTS)
        elif action == "forward" and "params" in away:
            with pytest.raises(RuntimeError, match="params of"):
                moved.forward(data, needs_for(moved))
        elif action == "forward":
            found, expected = (engine.forward(data, needs_for(engine)) for engine in (moved, plain))
            assert_same(dict(found.token), dict(expected.token))
        elif action == "train" and away:
            with pytest.raises(RuntimeError, match=", ".join(part for part in PARTS if part in away)):
                moved.train_step(data, objective_for(moved))
        elif action == "train":
            found, expected = (engine.train_step(data, objective_for(engine)) for engine in (moved, plain))
            assert found == expected
        elif action == "state":
            assert_same(moved.state(), plain.state())
            assert_same(dict(moved.weights()), dict(plain.weights()))
            saved.append(copy_to_host(moved.state()))
        else:
            state = draw.choice(saved)
            for engine in (plain, moved):
                load_state(engine, copy.deepcopy(state))
            assert offload.offload(away).num_bytes == 0
    moved.offloading().onload()
    assert_same(moved.state(), plain.state())
    assert {id(p): p for p in moved.packed.model.parameters()} == tensors
    assert offload.offload(["optimizer"]).num_bytes == optimizer_bytes(plain)


def test_gradients_move(build, files):
    engine = build("causal")
    generator = torch.Generator().manual_seed(3)
    for p in engine.packed.model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    expected = {name: p.grad.clone() for name, p in parameters(engine.packed).items()}
    offload = engine.offloading(files)
    total = sum(storage_sizes(p.grad for p in engine.packed.model.parameters()))
    assert engine.offloading().offload(["grads"]).num_bytes == total > 0
    assert offload.offload(["grads"]).num_bytes == 0 and offload.is_resident(["params", "optimizer"])
    assert_same({name: p.grad for name, p in parameters(engine.packed).items()}, expected)
    assert engine.offloading().onload().num_bytes == total
    assert_same({name: p.grad for name, p in parameters(engine.packed).items()}, expected)


# Tensors keep what they are ------------------------------------------------------------------------------


def test_tied_weights_and_views_move_once_and_stay_tied(make_model, files):
    model = make_model("causal", torch.float32)
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().t().contiguous().t())
    both = torch.randn(6, 16)
    model.register_buffer("upper", both[:2])
    model.register_buffer("lower", both[2:])
    q, k = (getattr(model.model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj"))
    k.data = q.data[: k.shape[0]]
    packed = PackedCausalLM(model)
    tensors = [*model.parameters(), *model.buffers()]
    before = [(t.clone(), t.stride(), t.storage_offset(), t._version) for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    offload = Offload(packed, files)
    del both

    def check():
        assert model.upper.untyped_storage().data_ptr() == model.lower.untyped_storage().data_ptr()
        assert q.data_ptr() == k.data_ptr()
        for tensor, (value, *place) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, value)
            assert [tensor.stride(), tensor.storage_offset(), tensor._version] == place

    assert offload.offload().num_bytes == sum(storages.values())
    check()
    assert offload.onload().num_bytes == sum(storages.values())
    check()
    with torch.no_grad():
        q.zero_()
    assert not k.any()


# Adapters ------------------------------------------------------------------------------------------------


def test_nothing_moves_while_adapters_are_switched_off(build, files):
    engine = build("lora")
    offload = engine.offloading(files)
    for switch in (engine.packed.without_adapters, engine.packed.with_merged_adapters):
        with switch():
            for move in (offload.offload, offload.onload):
                with pytest.raises(RuntimeError, match="switched off"):
                    move()
    assert offload.is_resident(PARTS)


# What is not written again -------------------------------------------------------------------------------


def written_bytes(monkeypatch):
    """Bytes copied by each movement from now on."""
    found, copy_all = [], Offload._copy

    def counting(self, pairs):
        found.append(sum(source.numel() for source, _ in pairs))
        copy_all(self, pairs)

    monkeypatch.setattr(Offload, "_copy", counting)
    return found


def _step(packed, optimizer):
    for p in packed.model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("change", ["none", "in place", "through a view", "loaded", "elsewhere", "loaded while away"])
def test_frozen_weights_are_written_again_only_if_they_changed(change, frozen, monkeypatch):
    written = written_bytes(monkeypatch)
    store = Memory()
    offload = Offload(frozen, store)
    buffers = sum(b.numel() * b.element_size() for b in frozen.model.buffers())
    total = offload.offload().num_bytes
    offload.onload()
    weight = frozen.model.model.layers[0].mlp.down_proj.weight
    num_bytes = weight.numel() * 4
    state = {name: tensor + 1 for name, tensor in frozen.model.state_dict().items()}
    with torch.no_grad():
        if change == "in place":
            weight.mul_(2)
        elif change == "through a view":
            weight.detach()[:2].zero_()
        elif change == "elsewhere":
            weight.data = weight.data * 2
        elif change == "loaded":
            frozen.model.load_state_dict(state)
        elif change == "loaded while away":
            offload.offload()
            frozen.model.load_state_dict(state)
            offload.onload()
    expected = copy.deepcopy(frozen.model.state_dict())
    del written[:]
    assert offload.offload().num_bytes == total
    persistent = sum(t.numel() * 4 for t in expected.values())
    changed = {"none": 0, "loaded": persistent, "loaded while away": 0}.get(change, num_bytes)
    assert written == [changed + buffers]
    assert_same(frozen.model.state_dict(), expected)
    offload.onload()
    assert_same(frozen.model.state_dict(), expected)
    assert sum(store.given) == total


def test_trained_weights_are_always_written(build, data, monkeypatch):
    """A fused optimizer does not count their versions up, which a comparison of versions would take for no change."""
    engine, written = build("causal"), written_bytes(monkeypatch)
    weight = engine.packed.model.model.layers[0].mlp.down_proj.weight
    engine.offloading(Memory())
    engine.train_step(data, objective_for(engine))
    version = weight._version
    num_bytes = engine.offloading().offload().num_bytes
    engine.offloading().onload()
    engine.train_step(data, objective_for(engine))
    assert weight._version == version
    del written[:]
    engine.offloading().offload()
    assert written == [num_bytes]


# Sizes and memory ----------------------------------------------------------------------------------------


def test_the_memory_of_what_leaves_is_free_and_that_is_measured():
    """In a process of its own: where other tests have run, freed memory may lie between what they left."""
    alone = f"{__file__}::test_memory_in_a_fresh_process"
    options = ["-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, alone],
        env={**os.environ, "QUARTET_FRESH_PROCESS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.skipif("QUARTET_FRESH_PROCESS" not in os.environ, reason="run by the test before it")
def test_memory_in_a_fresh_process(files):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16_384, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    packed = PackedCausalLM(LlamaForCausalLM(config).eval())
    optimizer = torch.optim.AdamW(packed.model.parameters(), fused=True)
    _step(packed, optimizer)
    offload = Offload(packed, files, optimizer)
    params, moments = (
        parameter_bytes(packed),
        sum(storage_sizes(v for s in optimizer.state.values() for v in s.values())),
    )
    assert params > 64 * 2**20

    def check(moved, num_bytes, sign):
        assert moved.num_bytes == num_bytes
        assert sign * moved.freed_bytes == pytest.approx(num_bytes, rel=0.05)
        assert moved.seconds > 0

    for _ in range(2):
        check(offload.offload(["optimizer"]), moments, 1)
        check(offload.offload(), params, 1)
        check(offload.onload(["params"]), params, -1)
        check(offload.onload(), moments, -1)
    assert abs(offload.onload().freed_bytes) < 2**20
    held = packed.model.lm_head.weight.detach()
    moved = offload.offload(["params"])
    assert params - moved.freed_bytes == pytest.approx(held.numel() * 4, rel=0.05), "what is held is not free"


# Errors leave everything as it was -----------------------------------------------------------------------


def failing_copies(monkeypatch, error):
    """The next movement fails halfway through its copies."""

    def fail(self, pairs):
        for source, target in pairs[: len(pairs) // 2]:
            target.copy_(source)
        raise error

    monkeypatch.setattr(Offload, "_copy", fail)


@pytest.mark.parametrize("kind", ["causal", "lora"])
@pytest.mark.parametrize("where", ["offload", "onload", "again"])
def test_a_movement_that_fails_halfway_changes_nothing(kind, where, build, data, monkeypatch):
    plain, engine = build(kind), build(kind)
    offload = engine.offloading(Memory())
    for each in (plain, engine):
        each.train_step(data, objective_for(each))
    if where != "offload":
        engine.offloading().offload()
    if where == "again":
        engine.offloading().onload()
        for each in (plain, engine):
            each.train_step(data, objective_for(each))
    with monkeypatch.context() as patch:
        failing_copies(patch, MemoryError())
        with pytest.raises(MemoryError):
            (offload.onload if where == "onload" else offload.offload)()
    assert offload.is_resident(PARTS) == (where != "onload")
    assert (offload.offload if where == "onload" else offload.onload)().num_bytes == 0
    assert_same(engine.state(), plain.state())
    engine.offloading().onload()
    for each in (plain, engine):
        each.metrics = each.train_step(data, objective_for(each))
    assert engine.metrics == plain.metrics
    engine.offloading().offload()
    assert_same(engine.state(), plain.state())


def test_a_full_disk_is_said_and_nothing_moves(build, data, files, monkeypatch):
    engine = build("causal")
    engine.offloading(files)
    engine.offloading().offload(["params"])
    engine.offloading().onload()
    engine.train_step(data, objective_for(engine))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = copy.deepcopy(engine.state())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left"):
        engine.offloading().offload()
    assert engine.offloading().is_resident(PARTS)
    assert_same(engine.state(), expected)
    engine.train_step(data, objective_for(engine))


# What is away is not computed with -----------------------------------------------------------------------


def test_passes_on_what_is_away_name_it(build, frozen, data, files):
    engine = build("causal")
    engine.offloading(files)
    engine.offloading().offload(["grads", "optimizer"])
    engine.forward(data, ForwardNeeds(logprobs=True))
    with pytest.raises(RuntimeError, match="grads, optimizer of LlamaForCausalLM are offloaded"):
        engine.train_step(data, SFTObjective())
    engine.offloading().onload(["grads"])
    with pytest.raises(RuntimeError, match=r"^optimizer of LlamaForCausalLM are offloaded"):
        engine.train_step(data, SFTObjective())
    engine.offloading().offload(["params"])
    with pytest.raises(RuntimeError, match=r"^params of LlamaForCausalLM"):
        engine.forward(data, ForwardNeeds(logprobs=True))
    offload = Offload(frozen, files)
    before = forward_only(frozen, data, ForwardNeeds(logprobs=True), 1000)
    offload.offload()
    for run in (
        lambda: forward_only(frozen, data, ForwardNeeds(logprobs=True), 1000),
        lambda: frozen.model(torch.zeros(1, 3, dtype=torch.long)),
    ):
        with pytest.raises(RuntimeError, match=r"params of .* offloaded"):
            run()
    offload.onload()
    assert_same(dict(forward_only(frozen, data, ForwardNeeds(logprobs=True), 1000).token), dict(before.token))


def test_a_released_model_computes(frozen, data, files):
    expected = dict(forward_only(frozen, data, ForwardNeeds(logprobs=True), 1000).token)
    offload = Offload(frozen, files)
    offload.offload()
    away = {parameter.data_ptr() for parameter in frozen.model.parameters()}
    offload.release()
    assert away.isdisjoint(parameter.data_ptr() for parameter in frozen.model.parameters())
    assert_same(dict(forward_only(frozen, data, ForwardNeeds(logprobs=True), 1000).token), expected)
    Offload(frozen, files).offload()
