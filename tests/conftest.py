"""What all tests share: one thread, reproducible hypothesis examples, the table of tolerances."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.nn.functional as F

hypothesis.settings.register_profile("quartet", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("quartet")


def _tolerances() -> dict[torch.dtype, tuple[float, float]]:
    # pytest's importlib mode puts no test folder on the path.
    spec = importlib.util.spec_from_file_location("tolerances", Path(__file__).with_name("tolerances.py"))
    if spec is None or spec.loader is None:
        raise ImportError("tests/tolerances.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TOLERANCES


@pytest.fixture(scope="session")
def tolerances() -> dict[torch.dtype, tuple[float, float]]:
    """``{dtype: (atol, rtol)}``."""
    return _tolerances()


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unit tests compute on one thread: sums are then reproducible and the machine is shared fairly."""
    if "unit" not in request.path.parts:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def exact_processor() -> None:
    """Skips where a row's bits change with the number of rows, so that exact numerics refuse the processor.

    Asked of torch directly, so that a fault of ours cannot skip the tests that should find it.
    """
    generator = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for inputs, outputs in ((32, 48), (256, 512), (512, 256)):
            rows = torch.randn(520, inputs, generator=generator)
            weight = torch.randn(outputs, inputs, generator=generator)
            many = F.linear(rows, weight)
            for num_rows in (16, 17, 33, 257):
                if not torch.equal(F.linear(rows[-num_rows:], weight), many[-num_rows:]):
                    pytest.skip(f"{num_rows} rows {inputs} → {outputs} have other bits than 520; see docs/numerics.md")
    finally:
        torch.set_num_threads(before)
