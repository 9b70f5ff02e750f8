"""New weights for SGLang's servers over a process group: the server's workers are processes that really join one."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
from starlette.responses import JSONResponse

from quartet.config.rewards import RemoteServer, RetryConfig
from quartet.extras.servers import sglang
from quartet.extras.servers.sglang import GroupWeights, SGLangEngine
from quartet.rollout.protocol import EngineFailed, Request, SamplingParams
from quartet.rollout.router import Router
from quartet.rollout.staging import StagedWeights
from quartet.weights.errors import WeightsRefused
from quartet.weights.in_process import write_into

targets: Any = importlib.import_module("engine_targets")
servers: Any = importlib.import_module("http_engines")


class Side:
    """A policy, a server, and the engine between them."""

    def __init__(self, opened: ExitStack, *, is_tied: bool, num_workers: int, joined: int, timeout_s: float) -> None:
        self.model = targets.build_model(0, is_tied=is_tied)
        self.staging = StagedWeights(self.model.named_parameters(remove_duplicate=False))
        inside = targets.native(seed=5, is_tied=is_tied, version=0)
        self.server = servers.SGLangServer(inside, targets.CONTEXT, num_workers=joined)
        url = opened.enter_context(servers.sglang_server(self.server))
        remote = RemoteServer(url=url, retry=RetryConfig(attempts=2, first_wait_s=0.01), timeout_s=timeout_s)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        self.weights = GroupWeights(self.staging, remote, num_workers=num_workers, shapes=shapes)
        self.engine = SGLangEngine(remote, vocab_size=targets.VOCAB, weights=self.weights)
        opened.enter_context(closing(self.engine))
        self.engine.wait_ready()

    def send(self, version: int, engine: Any = None) -> None:
        engine = engine or self.engine
        engine.pause()
        write_into(self.staging.weight_sink(), self.model.named_parameters(), version)
        engine.resume()

    def check(self, engine: Any, version: int) -> None:
        """It answers with these weights."""
        request = Request(f"r{version}", "g", (5, 9, 2), SamplingParams(max_new_tokens=6, temperature=0.0))
        engine.submit([request])
        done: list[Any] = []
        end = time.monotonic() + 60
        while not done:
            assert time.monotonic() < end
            done += engine.completed(0.1)
        (made,) = done
        assert set(made.versions) == {version}
        with torch.no_grad():
            logits = self.model(torch.tensor([[*request.prompt_ids, *made.token_ids]])).logits[0, 2:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=1e-5, rtol=0)

    @torch.no_grad()
    def move(self) -> None:
        for parameter in self.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))

    def told(self, path: str) -> list[Any]:
        return [body for asked, body in self.server.asked if asked == path]


@contextmanager
def side(
    *, is_tied: bool = False, num_workers: int = 1, joined: int | None = None, timeout_s: float = 30.0
) -> Iterator[Side]:
    with ExitStack() as opened:
        count = num_workers if joined is None else joined
        yield Side(opened, is_tied=is_tied, num_workers=num_workers, joined=count, timeout_s=timeout_s)


def test_every_update_arrives_in_parts_at_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_PART_BYTES", 20_000)
    with side(is_tied=True, num_workers=2) as made_of:
        for version in (1, 2, 3):
            made_of.send(version)
            made_of.check(made_of.engine, version)
            made_of.move()
        (joined,) = made_of.told("/init_weights_update_group")
        name = joined["group_name"]
        assert (joined["rank_offset"], joined["world_size"], joined["backend"]) == (1, 3, "gloo")
        assert made_of.told("/destroy_weights_update_group") == []
        parts = made_of.told("/update_weights_from_distributed")
        assert len(parts) > 6 and {part["group_name"] for part in parts} == {name}
        assert {dtype for part in parts for dtype in part["dtypes"]} == {"float32"}
        sent = [each for part in parts for each in part["names"]]
        assert sent == [name for name, _ in made_of.model.named_parameters()] * 3, "a tied tensor once"
    assert made_of.told("/destroy_weights_update_group") == [{"group_name": name}]


@pytest.mark.parametrize("wrong", ["name", "shape", "more"])
def test_names_and_shapes_are_checked_before_anything_is_sent(wrong: str) -> None:
    model = targets.build_model(0)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    last = list(shapes)[-1]
    if wrong == "name":
        shapes["other.weight"] = shapes.pop(last)
    elif wrong == "shape":
        shapes[last] = (*shapes[last], 1)
    else:
        shapes["one.more"] = (3,)
    staging = StagedWeights(model.named_parameters())
    with closing(staging), pytest.raises(WeightsRefused, match=r"other\.weight|one\.more|lm_head\.weight"):
        GroupWeights(staging, RemoteServer(url="http://127.0.0.1:9"), shapes=shapes)


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
def test_a_refusal_is_told_at_once_and_leaves_an_engine_that_answers_nothing(path: str) -> None:
    with side() as made_of:
        answers, refused = made_of.server.answers[path], []

        async def refuse(body: Any) -> Any:
            refused.append(body)
            return JSONResponse({"success": False, "message": "planted"}, 400)

        if path.startswith("/update"):
            made_of.send(1)
        made_of.server.answers[path] = refuse
        began = time.monotonic()
        made_of.send(2)
        with pytest.raises(EngineFailed, match="planted"):
            made_of.check(made_of.engine, 2)
        assert time.monotonic() - began < 15, "it did not wait for the time limit"
        assert len(refused) == 1, "nothing is sent twice"
        assert not made_of.engine.has_weights()
        made_of.server.answers[path] = answers
        made_of.engine.restart()
        made_of.engine.wait_ready()
        made_of.check(made_of.engine, 2)


def test_a_worker_that_dies_costs_a_restart_which_forms_another_group() -> None:
    with side() as made_of, closing(Router([made_of.engine])) as router:
        made_of.send(1, router)
        made_of.check(router, 1)
        made_of.server.workers[0].kill()
        takes = made_of.server.answers["/update_weights_from_distributed"]

        async def after_its_death(body: Any) -> Any:
            answer = await takes(body)
            made_of.server.workers.clear()  # as when the server is started anew
            return answer

        made_of.server.answers["/update_weights_from_distributed"] = after_its_death
        made_of.move()
        made_of.send(2, router)
        made_of.server.answers["/update_weights_from_distributed"] = takes
        made_of.check(router, 2)
        assert router.restarts == 1
        names = [body["group_name"] for body in made_of.told("/init_weights_update_group")]
        assert len(names) == len(set(names)) == 2


@pytest.mark.parametrize("is_there", [True, False], ids=["too few workers", "no answer"])
def test_waits_for_members_end(is_there: bool) -> None:
    with side(num_workers=2, joined=1, timeout_s=3.0) as made_of:
        if not is_there:

            async def silent(body: Any) -> Any:
                while True:
                    await servers.asyncio.sleep(0.05)

            made_of.server.answers["/init_weights_update_group"] = silent
        began = time.monotonic()
        made_of.send(1)
        with pytest.raises(EngineFailed, match=r"its members did not all come|no answer"):
            made_of.check(made_of.engine, 1)
        assert 2 < time.monotonic() - began < 20
