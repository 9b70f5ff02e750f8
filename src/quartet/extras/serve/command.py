"""`quartet serve`: a model behind an OpenAI-compatible server, for agents and other programs."""

from __future__ import annotations

import os
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from quartet.cli.options import Precision, Revision, TrustRemoteCode
from quartet.config import UserError


def serve(
    model: Annotated[str, typer.Option(help="Model directory, run, checkpoint or hub name.")],
    engine: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of rollout.engine, e.g. type=vllm engines=2; a native one by itself."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name for clients; the directory's when left out.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Directory or hub name; the model's own by itself.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Jinja file; the tokenizer's own by itself.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    device: Annotated[str, typer.Option(help="Of a native engine: auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[Precision, typer.Option(help="Of a native engine.")] = "auto",
    max_requests: Annotated[int, typer.Option(help="Answers under way; more are turned away (429).", min=1)] = 1024,
    api_key_env: Annotated[str | None, typer.Option(help="Variable with the key that clients must send.")] = None,
    grace_s: Annotated[float, typer.Option(help="Seconds for what is under way at the end.", min=0.0)] = 5.0,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """OpenAI-compatible server of a model."""
    missing = [each for each in ("starlette", "uvicorn") if find_spec(each) is None]
    if missing:
        raise UserError(
            "a server needs packages that are not installed",
            found=f"no {' and no '.join(missing)}",
            remedy="pip install 'quartet-rl[serve]'",
        )
    from quartet.config.load import load_engine

    config = load_engine(engine or [])
    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise UserError(
            "there is no key that clients could send",
            found=f"the environment variable {api_key_env} is not set",
            remedy=f"export {api_key_env}=…, or leave --api-key-env out",
        )

    from quartet.extras.serve.bodies import ModelLimits
    from quartet.extras.serve.server import ServerSettings, listen, run
    from quartet.models.loading import load_causal_lm
    from quartet.models.packing_probe import model_context_length
    from quartet.text.loading import check_vocabulary, resolve_model_directory
    from quartet.text.tokenizer import TextCodec
    from quartet.trainers.checkpoints import model_directory
    from quartet.trainers.devices import resolve_device, resolve_precision
    from quartet.trainers.engines import EnginePolicy, open_engine
    from quartet.trainers.input_sources import vocabulary_size

    path = resolve_model_directory(model_directory(model, revision, trust_remote_code=trust_remote_code), "model")
    # Before the engine starts, which takes long.
    with closing(listen(host, port)) as bound:
        sizes = load_causal_lm(path, empty=True, trust_remote_code=trust_remote_code)
        codec = TextCodec.from_pretrained(path, tokenizer, chat_template, trust_remote_code=trust_remote_code)
        vocab_size, context = vocabulary_size(sizes), model_context_length(sizes)
        check_vocabulary(codec.tokenizer, vocab_size)
        if (most := getattr(config, "max_model_len", None)) is not None:
            context = most if context is None else min(context, most)
        where = resolve_device(device)
        policy = EnginePolicy(
            path=path,
            vocab_size=vocab_size,
            decode=codec.decode_completion,
            precision=resolve_precision(where, precision),
            device=where,
            trust_remote_code=trust_remote_code,
        )
        with closing(open_engine(config, policy)) as router:
            name = name or Path(model).resolve().name
            shown, number = bound.getsockname()[:2]
            settings = ServerSettings(name, ModelLimits(context, vocab_size), max_requests, key, grace_s)
            typer.echo(f"serving {name} at http://{f'[{shown}]' if ':' in shown else shown}:{number}/v1")
            run(router, codec, settings, bound)
