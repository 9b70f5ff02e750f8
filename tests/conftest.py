"""What all tests share: one thread, reproducible hypothesis examples, the table of tolerances."""

import contextlib
import gc
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F

hypothesis.settings.register_profile("quartet", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("quartet")

SHARED_RAY = pytest.StashKey[Any]()
RAY_FILES = pytest.StashKey[set[Path]]()


def pytest_report_header() -> str:
    """What decides the order of sums here; a failure on another processor begins with this line."""
    from quartet.observe.memory import describe_processor

    return f"processor: {describe_processor()}"


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several processes begin with the longest files, so that none works at one when the others have ended."""
    config.stash[RAY_FILES] = {item.path for item in items if "shared_ray" in getattr(item, "fixturenames", ())}
    if hasattr(config, "workerinput"):
        longest: Sequence[str] = _beside("longest").FILES
        rank = {file: number for number, file in enumerate(longest)}
        items.sort(key=lambda item: rank.get(_file(item.nodeid), len(rank)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end: no garbage collection looks at them, 0.4 s each time."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The files that took longest, in the form in which ``longest.py`` lists them."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[_file(getattr(report, "nodeid", ""))] += getattr(report, "duration", 0.0)
    if config.option.durations and len(seconds) > 1:
        terminalreporter.section(f"slowest {config.option.durations} files")
        for file, took in seconds.most_common(config.option.durations):
            terminalreporter.line(f'    "{file}",  # {took:.0f} s')


def _beside(name: str) -> Any:
    """The module of this folder with that name: pytest's importlib mode puts no test folder on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"tests/{name}.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tolerances() -> dict[torch.dtype, tuple[float, float]]:
    """``{dtype: (atol, rtol)}``."""
    table: dict[torch.dtype, tuple[float, float]] = _beside("tolerances").TOLERANCES
    return table


@pytest.fixture(scope="session")
def leeway() -> Callable[..., dict[str, float]]:
    """By how much each of several results may differ between two ways to compute it; see ``tolerances.py``."""
    derive: Callable[..., dict[str, float]] = _beside("tolerances").leeway
    return derive


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A stand-in for the hub with an empty cache, and nobody logged in; see ``hub_server.py``."""
    from huggingface_hub import constants

    with _beside("hub_server").served() as served:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        template = served.url + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # It waits between attempts; nobody else's clock is touched.
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
        yield served


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
    """``serve(answer)`` starts a server of JSON; see ``json_server.py``."""
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(_beside("json_server").served(answer))


@pytest.fixture(scope="session")
def shared_ray(request: pytest.FixtureRequest) -> Iterator[Any]:
    """See ``SharedRay`` in ``ray_forks.py``. It ends with the last of several files in a row that ask for it."""
    made = request.config.stash[SHARED_RAY] = _beside("ray_forks").SharedRay()
    with contextlib.closing(made):
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Tests of other files find no Ray."""
    yield
    made = item.config.stash.get(SHARED_RAY, None)
    if made is not None and (nextitem is None or nextitem.path not in item.config.stash[RAY_FILES]):
        made.stop()


@pytest.fixture(scope="module")
def ray_cluster(shared_ray: Any) -> Iterator[Any]:
    """A connection to a Ray of this machine, which other files use before and after; what it starts ends with it."""
    from quartet.cluster import connect

    shared_ray.start()
    with connect() as connected:
        yield connected


@pytest.fixture(scope="session")
def as_from_a_file() -> Callable[[torch.nn.Module], torch.nn.Module]:
    """Moves a model's tensors to where a safetensors file leaves them: on a multiple of 8 bytes, and of no more."""

    @torch.no_grad()
    def move(model: torch.nn.Module) -> torch.nn.Module:
        for tensor in (*model.parameters(), *model.buffers()):
            memory = bytearray(tensor.nbytes + 128)
            begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            held = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=72 - begin % 64)
            tensor.data = held.view(tensor.shape).copy_(tensor)
            assert tensor.data_ptr() % 64 == 8
        return model

    return move


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


@pytest.fixture
def sensitive_kernels(exact_processor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """See ``sensitive_kernels.py``: a planted fault shows on every processor that holds what it is planted in."""
    _beside("sensitive_kernels").install(monkeypatch)


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
