"""SGLang's HTTP interface: weights that really arrive, pauses that lose no token, servers that forget their weights."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.rewards import RemoteServer, RetryConfig
from quartet.extras.servers import sglang
from quartet.extras.servers.sglang import PublishedWeights, SGLangEngine
from quartet.rollout.protocol import Completion, EngineFailed, Request, SamplingParams
from quartet.rollout.router import Router
from quartet.rollout.staging import StagedWeights
from quartet.weights.sink import write_weights

targets: Any = importlib.import_module("engine_targets")
servers: Any = importlib.import_module("http_engines")

CODEC = servers.letter_codec(targets.VOCAB)


@dataclass
class Side:
    """A policy, its staging, and the server with its engine; ``engine`` has been sent version 1."""

    model: Any
    staging: StagedWeights
    server: Any
    engine: SGLangEngine
    folder: Path

    def send(self, version: int, engine: Any = None) -> None:
        (engine or self.engine).pause()
        write_weights(self.staging.weight_sink(), self.model.named_parameters(), version)
        (engine or self.engine).resume()


@contextmanager
def side(folder: Path, *, is_tied: bool = False, seed: int = 5, **options: Any) -> Iterator[Side]:
    model = targets.build_model(0, is_tied=is_tied)
    staging = StagedWeights(model.named_parameters(remove_duplicate=False))
    server = servers.SGLangServer(targets.native(seed=seed, is_tied=is_tied, version=0), targets.CONTEXT)
    with ExitStack() as opened:
        url = opened.enter_context(servers.sglang_server(server))
        weights = PublishedWeights(staging, folder)
        retry = RetryConfig(attempts=2, first_wait_s=0.01)
        remote = RemoteServer(url=url, **{"retry": retry, "timeout_s": 20.0, "concurrency": 8, **options})
        engine = SGLangEngine(remote, vocab_size=targets.VOCAB, decode=CODEC.decode_completion, weights=weights)
        opened.enter_context(closing(engine))
        engine.wait_ready()
        yield Side(model, staging, server, engine, folder)


def ask(name: str = "r", **sampling: Any) -> Request:
    return Request(name, name, (5, 9, 2), SamplingParams(**{"max_new_tokens": 12, "temperature": 0.0, **sampling}))


def collect(engine: Any, number: int = 1) -> list[Completion]:
    done: list[Completion] = []
    end = time.monotonic() + 20
    while len(done) < number:
        assert time.monotonic() < end
        done += engine.completed(0.2)
    return sorted(done, key=lambda made: made.request_id)


@torch.no_grad()
def expected(model: Any, request: Request, made: Completion) -> torch.Tensor:
    logits = model(torch.tensor([[*request.prompt_ids, *made.token_ids]])).logits[0, len(request.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]


@torch.no_grad()
def move(model: Any) -> None:
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_every_update_arrives_and_only_the_newest_files_stay(tmp_path: Path, is_tied: bool) -> None:
    with side(tmp_path, is_tied=is_tied) as made_of:
        for version in range(1, 6):
            made_of.send(version)
            made_of.engine.submit([ask(f"r{version}")])
            (made,) = collect(made_of.engine)
            assert set(made.versions) == {version}
            torch.testing.assert_close(
                torch.tensor(made.logprobs), expected(made_of.model, ask(), made), atol=1e-5, rtol=0
            )
            move(made_of.model)
        (own,) = tmp_path.iterdir()
        assert sorted(path.name for path in own.iterdir()) == ["version_00000004", "version_00000005"]
        updates = [body for path, body in made_of.server.asked if path == "/update_weights_from_disk"]
        assert [body["weight_version"] for body in updates] == ["1", "2", "3", "4", "5"]
        assert all(body["flush_cache"] is True for body in updates)
    assert list(tmp_path.iterdir()) == []


def test_a_version_that_breaks_off_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = targets.build_model(0)
    weights = PublishedWeights(StagedWeights(model.named_parameters(remove_duplicate=False)), tmp_path)

    def broken(_: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("the disk is on fire")

    def seen() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("*/version_*"))

    write_weights(weights.staging.weight_sink(), model.named_parameters(), 1)
    weights.path(1)
    write_weights(weights.staging.weight_sink(), model.named_parameters(), 2)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="on fire"):
        patched.setattr(sglang, "save_file", broken)
        weights.path(2)
    assert seen() == ["version_00000001"]
    weights.path(2)
    assert seen() == ["version_00000001", "version_00000002"]


def test_the_documented_names_are_used(tmp_path: Path) -> None:
    with side(tmp_path) as made_of:
        made_of.send(1)
        sampling = SamplingParams(0.5, 0.9, 0, 0.1, 7, (60,), ("zz",), seed=(1 << 64) - 1)
        made_of.engine.submit([Request("r", "g", (5, 9, 2), sampling)])
        collect(made_of.engine)
        path, body = made_of.server.asked[-1]
        assert path == "/generate"
        params = {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "stop": ["zz"],
            "stop_token_ids": [60],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "sampling_seed": (1 << 63) - 1,
        }
        assert body == {
            "input_ids": [5, 9, 2],
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
        }


def test_requests_go_on_from_what_they_have(tmp_path: Path) -> None:
    with side(tmp_path) as made_of:
        made_of.send(1)
        made_of.engine.submit([ask("all", max_new_tokens=80)])
        (whole,) = collect(made_of.engine)
        made_of.engine.submit([ask(f"r{n}", max_new_tokens=80) for n in range(3)])
        for _ in range(4):
            time.sleep(0.05)
            made_of.engine.pause()
            made_of.engine.resume()
        assert [made.token_ids for made in collect(made_of.engine, 3)] == [whole.token_ids] * 3
        prompts = [len(body["input_ids"]) for path, body in made_of.server.asked if path == "/generate"]
        assert max(prompts) > 3, "none went on"


def test_a_server_that_started_anew_has_not_the_weights(tmp_path: Path) -> None:
    """Its own were taken for those of the policy otherwise, and no error would tell."""
    with side(tmp_path) as made_of:
        router = Router([made_of.engine])
        made_of.send(3, router)
        made_of.server.engine.update_weights(targets.build_model(5).named_parameters(), 3)
        made_of.server.weight_version = "default"
        request = ask()
        router.submit([request])
        (made,) = collect(router)
        assert router.restarts == 1 and set(made.versions) == {3}
        torch.testing.assert_close(
            torch.tensor(made.logprobs), expected(made_of.model, request, made), atol=1e-5, rtol=0
        )


def test_an_update_that_fails_leaves_an_engine_that_answers_nothing(tmp_path: Path) -> None:
    with side(tmp_path) as made_of:
        made_of.send(1)
        broken = made_of.server.update

        async def refuse(body: Any) -> Any:
            return {"success": False, "message": "planted", "num_paused_requests": 0}

        made_of.server.answers["/update_weights_from_disk"] = refuse
        made_of.send(2)
        with pytest.raises(EngineFailed, match="planted"):
            made_of.engine.submit([ask()])
        assert not made_of.engine.has_weights()
        made_of.server.answers["/update_weights_from_disk"] = broken
        made_of.engine.restart()
        made_of.engine.wait_ready()
        made_of.engine.submit([ask()])
        assert set(collect(made_of.engine)[0].versions) == {2}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda meta: meta["output_token_logprobs"].pop(), "11 log-probabilities of 12 tokens"),
        (lambda meta: meta.pop("output_token_logprobs"), "lacks what was asked for"),
        (lambda meta: meta.update(finish_reason={"type": "abort"}), "the server broke it off"),
        (lambda meta: meta.update(finish_reason={"type": "odd"}), "it ended by 'odd'"),
        (lambda meta: meta.update(finish_reason={"type": "stop", "matched": 7}), "where nothing stops it"),
        (lambda meta: meta["output_token_logprobs"].append([-1.0, 7, None]), "13 log-probabilities of 12"),
    ],
    ids=["short", "none", "aborted", "odd", "stopped", "long"],
)
def test_wrong_answers(tmp_path: Path, spoil: Any, said: str) -> None:
    with side(tmp_path) as made_of:
        made_of.send(1)

        def spoiled(answer: dict[str, Any]) -> dict[str, Any]:
            spoil(answer["meta_info"])
            return answer

        made_of.server.spoil = spoiled
        made_of.engine.submit([ask()])
        with pytest.raises(EngineFailed, match=said):
            collect(made_of.engine)


def test_sleep_gives_up_what_its_level_says_and_waking_brings_the_weights_back(tmp_path: Path) -> None:
    with side(tmp_path) as made_of:
        made_of.send(1)
        for level, regions in ((1, {"kv_cache"}), (2, {"kv_cache", "weights"})):
            made_of.engine.pause()
            made_of.engine.sleep(level)
            assert made_of.server.released == regions
            made_of.engine.wake()
            made_of.engine.resume()
            assert made_of.server.released == set()
            made_of.engine.submit([ask()])
            assert set(collect(made_of.engine)[0].versions) == {1}
        loads = [body for path, body in made_of.server.asked if path == "/update_weights_from_disk"]
        assert [body["weight_version"] for body in loads] == ["1", "1"]
