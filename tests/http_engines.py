"""Real servers on this machine, answered by the native engine: our own, and one that speaks the HTTP of SGLang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.extras.serve.bodies import ModelLimits
from quartet.extras.serve.server import EngineThread, Server, ServerSettings, listen
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, Request, RolloutEngine, SamplingParams, SteppedEngine
from quartet.text.tokenizer import TextCodec

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def letter_codec(vocab_size: int) -> TextCodec:
    """A character per token, from "A" on; the last one ends a text and is not shown."""
    letters = [chr(ord("A") + i) for i in range(vocab_size)]
    backend = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=letters[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=letters[-1], unk_token=letters[0])
    tokenizer.chat_template = TEMPLATE
    return TextCodec(tokenizer)


@contextmanager
def _in_thread(make: Callable[[], Any]) -> Iterator[str]:
    """Serves ``make()``, an asynchronous context with an application, in a thread; gives its address."""
    bound = listen("127.0.0.1", 0)
    ends: list[Callable[[], None]] = []
    failed: list[BaseException] = []
    started = threading.Event()

    async def serve() -> None:
        async with make() as app:
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
            ends.append(lambda: setattr(server, "should_exit", True))
            started.set()
            await server.serve(sockets=[bound])

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    port = bound.getsockname()[1]
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        for end in ends:
            end()
        thread.join(20)
        assert not thread.is_alive() and not failed, failed


@contextmanager
def openai_server(
    engine: RolloutEngine, codec: TextCodec, *, context: int, vocab_size: int, **settings: Any
) -> Iterator[str]:
    """``quartet serve``'s server; the model is called "policy"."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Starlette]:
        server = Server(engine, codec, ServerSettings("policy", ModelLimits(context, vocab_size), **settings))
        try:
            yield server.app
        finally:
            server.engine.close()

    with _in_thread(make) as url:
        yield url


@dataclass
class SGLangServer:
    """What SGLang's documentation says of its server, with the native engine inside.

    Attributes:
        answers: what answers each path.
        asked: paths and bodies, in order.
        spoil: changes an answer of ``/generate`` before it is sent.
    """

    engine: NativeEngine
    context: int
    answers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    spoil: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
    weight_version: str = "default"
    released: set[str] = field(default_factory=set)
    _number: int = 0
    _paused: bool = False

    @asynccontextmanager
    async def app(self) -> AsyncIterator[Starlette]:
        self._go_on = asyncio.Event()
        self._go_on.set()
        self.thread = EngineThread(SteppedEngine(self.engine))
        self.answers = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.continue_,
            "/update_weights_from_disk": self.update,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume,
        }
        routes = [Route(path, self._noted, methods=["POST"]) for path in self.answers]
        try:
            yield Starlette(routes=[*routes, Route("/v1/models", self.models)])
        finally:
            self.thread.close()

    async def _noted(self, http: HTTPRequest) -> Response:
        body = await http.json()
        self.asked.append((http.url.path, body))
        answer = await self.answers[http.url.path](body)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    async def models(self, http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": self.context}]})

    async def generate(self, body: dict[str, Any]) -> Any:
        await self._go_on.wait()
        assert not self.released, "it has no memory to compute with"
        params = dict(body["sampling_params"])
        assert body["return_logprob"] is True and params.pop("ignore_eos") is True
        assert params.pop("skip_special_tokens") is False
        self._number += 1
        name = str(self._number)
        sampling = SamplingParams(
            max_new_tokens=params.pop("max_new_tokens"),
            temperature=params.pop("temperature"),
            top_p=params.pop("top_p"),
            top_k=max(0, params.pop("top_k")),
            min_p=params.pop("min_p"),
            stop_token_ids=tuple(params.pop("stop_token_ids")),
            stop_strings=tuple(params.pop("stop")),
            seed=params.pop("sampling_seed"),
        )
        assert not params, f"parameters that SGLang may not know: {params}"
        events = self.thread.ask([Request(name, name, tuple(body["input_ids"]), sampling)])
        _, end = await events.get()
        if not isinstance(end, Completion):
            return JSONResponse({"error": {"message": str(end)}}, 400)
        reason: dict[str, Any] = {"type": "stop", "matched": end.token_ids[-1] if end.token_ids else None}
        if end.finish_reason is FinishReason.LENGTH:
            reason = {"type": "length", "length": sampling.max_new_tokens}
        elif end.finish_reason is FinishReason.CANCELLED:
            reason = {"type": "abort", "message": "Abort before prefill" if not end.token_ids else "Aborted"}
        logprobs = [[logprob, token, None] for logprob, token in zip(end.logprobs, end.token_ids, strict=True)]
        meta = {
            "id": name,
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(end.token_ids),
            "weight_version": self.weight_version,
        }
        if logprobs or reason["type"] != "abort":
            meta["output_token_logprobs"] = logprobs
        return self.spoil({"text": "", "output_ids": list(end.token_ids), "meta_info": meta})

    async def pause(self, body: dict[str, Any]) -> Any:
        assert body == {"mode": "abort"}
        self._go_on.clear()
        held = [str(n) for n in range(1, self._number + 1)]
        await self.thread.call(lambda engine: engine.cancel(held))
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_(self, body: dict[str, Any]) -> Any:
        self._go_on.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def update(self, body: dict[str, Any]) -> Any:
        assert not self._go_on.is_set() or not self.thread.held, "updated while it computes"
        tensors = load_file(Path(body["model_path"]) / "model.safetensors")
        weight_version = body["weight_version"]
        try:
            await self.thread.call(lambda engine: self.engine.update_weights(tensors.items(), int(weight_version)))
        except Exception as error:  # As SGLang answers.
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        self.weight_version = weight_version
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def release(self, body: dict[str, Any]) -> Any:
        assert not self.thread.held, "released while it computes"
        self.released |= set(body["tags"])
        return None

    async def resume(self, body: dict[str, Any]) -> Any:
        self.released -= set(body["tags"])
        return None


@contextmanager
def sglang_server(server: SGLangServer) -> Iterator[str]:
    with _in_thread(server.app) as url:
        yield url
