"""The sink's own promises that no transport shows: sleeping engines, strides, ties, what is served when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from quartet.weights.digest import BLOCK_BYTES, tensor_digest
from quartet.weights.manifest import TensorSpec, WeightMismatch, WeightsRefused, WeightsUnusable
from quartet.weights.sink import NamedSource, SinkStatus, TensorSink, sync_in_process


def send(sink: TensorSink, tensors: dict[str, Tensor], version: int) -> None:
    sync_in_process(NamedSource(lambda: tensors.items()), sink, version)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_pieces_land_where_they_belong_whatever_the_strides(
    sizes: list[int], random: object, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    backing = torch.zeros([2 * sizes[i] for i in order])
    inverse = [order.index(i) for i in range(len(sizes))]
    destination = backing.permute(inverse)[tuple(slice(None, None, 2) for _ in sizes)]
    expected = torch.arange(destination.numel(), dtype=torch.float32) + 1
    cuts = sorted({0, len(expected), *data.draw(st.lists(st.integers(0, len(expected)), max_size=5))})
    sink = TensorSink([("w", destination)])
    sink.begin([TensorSpec.of("w", destination)], 1)
    for start, end in itertools.pairwise(cuts):
        sink.write("w", start, expected[start:end])
    assert torch.equal(destination.reshape(-1), expected)


def test_a_sleeping_engines_memory_is_not_held() -> None:
    """The engine gives its storage back and later gets another one; the sink fills the one it has then."""
    parameter = nn.Parameter(torch.zeros(4, 3))
    sink = TensorSink([("w", parameter)])
    send(sink, {"w": torch.ones(4, 3)}, 1)
    parameter.data = torch.empty(0)
    sink.invalidate("the engine slept")
    with pytest.raises(WeightsUnusable, match="the engine slept"):
        sink.require(1)
    with pytest.raises(WeightsRefused, match=r"\[4, 3\], needed F32 \[0\]"):
        send(sink, {"w": torch.ones(4, 3)}, 1)
    parameter.data = torch.zeros(4, 3)
    assert sink.status is SinkStatus.UNUSABLE
    send(sink, {"w": torch.ones(4, 3)}, 1)
    assert torch.equal(parameter, torch.ones(4, 3))
    sink.require(1)


def test_writing_needs_no_gradient_and_shows_in_the_version_counter() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    before = parameter._version
    send(TensorSink([("w", parameter)]), {"w": torch.ones(3)}, 1)
    assert parameter._version > before and parameter.requires_grad and parameter.is_leaf


def test_an_engine_asks_for_the_version_it_was_told() -> None:
    sink = TensorSink([("w", torch.zeros(1))])
    with pytest.raises(WeightsUnusable, match="no weights yet"):
        sink.require()
    send(sink, {"w": torch.ones(1)}, 3)
    sink.require()
    sink.require(3)
    with pytest.raises(WeightsUnusable, match=r"compute with version 4\n.*found: version 3"):
        sink.require(4)


def test_half_a_sync_is_not_served() -> None:
    spec = TensorSpec("w", "F32", (2,))
    sink = TensorSink([("w", torch.zeros(2))])
    send(sink, {"w": torch.ones(2)}, 1)
    sink.begin([spec], 2)
    sink.write("w", 0, torch.zeros(1))
    with pytest.raises(WeightsUnusable, match="a sync of version 2 under way"):
        sink.require()
    sink.abort("the trainer stopped")
    with pytest.raises(WeightsUnusable, match="version 2 broke off halfway: the trainer stopped"):
        sink.require()


def test_an_engine_that_cannot_take_over_is_unusable() -> None:
    def fail(version: int) -> None:
        raise RuntimeError(f"no room for version {version}")

    sink = TensorSink([("w", torch.zeros(1))], on_commit=fail)
    with pytest.raises(RuntimeError, match="no room for version 1"):
        send(sink, {"w": torch.ones(1)}, 1)
    with pytest.raises(WeightsUnusable, match="failed to take over version 1"):
        sink.require()


def test_ties_that_differ_are_found() -> None:
    weight = torch.zeros(2)
    sink = TensorSink([("embed", weight), ("head", weight)])
    with pytest.raises(WeightMismatch, match="'embed'"):
        send(sink, {"embed": torch.ones(2), "head": torch.zeros(2)}, 1)
    assert sink.status is SinkStatus.UNUSABLE


def test_an_engine_that_sleeps_in_a_sync_serves_nothing_after_it() -> None:
    """What arrived may have gone into memory that the engine gave back."""
    held = torch.zeros(3)
    sink = TensorSink([("w", held)])

    def weights() -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.ones(3)
        if sink.status is SinkStatus.RECEIVING:
            sink.invalidate("the engine slept")

    with pytest.raises(WeightsUnusable, match="no more room"):
        sync_in_process(NamedSource(weights), sink, 1)
    with pytest.raises(WeightsUnusable, match="slept"):
        sink.require()
    send(sink, {"w": torch.ones(3)}, 1)
    sink.require(1)


@pytest.mark.parametrize("cuts", [[], [BLOCK_BYTES // 4], [BLOCK_BYTES // 4, BLOCK_BYTES // 2]])
def test_what_has_arrived_is_digested_in_pieces(cuts: list[int]) -> None:
    """Behind whichever blocks the pieces end, the digest is that of the whole."""
    values = torch.randn(BLOCK_BYTES // 2 + 7)
    sink, spec = TensorSink([("w", torch.zeros_like(values))]), TensorSpec.of("w", values)
    sink.begin([spec], 1)
    edges = sorted({0, *cuts, values.numel()})
    for start, stop in itertools.pairwise(edges):
        sink.write("w", start, values[start:stop])
    sink.verify([tensor_digest(values)])
    with pytest.raises(WeightMismatch):
        sink.verify([tensor_digest(values + 1)])


def test_tied_weights_go_under_one_name_and_older_versions_are_refused() -> None:
    embed = nn.Parameter(torch.zeros(6, 4))
    sink = TensorSink([("embed.weight", embed), ("lm_head.weight", embed)])
    new = torch.randn(6, 4)
    send(sink, {"lm_head.weight": new}, 5)
    assert torch.equal(embed, new)
    with pytest.raises(WeightsRefused, match="version 4 after 5"):
        send(sink, {"embed.weight": new}, 4)
    sink.require(5)
    with pytest.raises(WeightsRefused, match="unknown names, first 'other'"):
        send(sink, {"embed.weight": new, "other": new}, 6)
