"""Tensors in Ray's object store are what they were, and the reader's own."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
wire = pytest.importorskip("quartet.cluster.ray_backend")

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def there_and_back(tensor: Tensor) -> tuple[Tensor, int]:
    """As Ray does it: the array's bytes outside of the pickle and read-only."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(wire.serialize_tensor(tensor), protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]
    found: Tensor = wire.deserialize_tensor(pickle.loads(text, buffers=shared))
    return found, len(text) + sum(map(len, shared))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 0), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    found, _ = there_and_back(tensor)
    assert found.dtype == dtype and found.shape == tensor.shape
    assert torch.equal(found, tensor)


def test_one_element_of_any_stride() -> None:
    expanded = torch.tensor([3]).expand(1_000)
    found, num_bytes = there_and_back(expanded[5:6])
    assert found.tolist() == [3] and num_bytes < 500
    assert there_and_back(expanded)[0].tolist() == [3] * 1_000


def test_a_view_takes_only_its_own_bytes() -> None:
    whole = torch.arange(100_000.0).reshape(1000, 100)
    for view in (whole[10:20], whole[:, 3], whole.t()[5:6]):
        found, moved = there_and_back(view)
        assert torch.equal(found, view)
        assert moved < view.nbytes + 1000


def test_what_arrives_begins_where_memory_of_torch_does() -> None:
    """numpy's own begins on a multiple of 16 bytes, where a kernel may take a sum in another order."""
    assert all(there_and_back(torch.zeros(n))[0].data_ptr() % 64 == 0 for n in range(1, 4000, 37))


def test_gradients_and_conjugates() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert there_and_back(weight)[0].requires_grad
    assert not there_and_back(weight.detach())[0].requires_grad
    value = torch.tensor([1 + 2j])
    assert torch.equal(there_and_back(value.conj())[0], value.conj())
