"""`quartet generate`: answers of a model to prompts on the command line."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from quartet.cli.options import Precision, Revision, TrustRemoteCode
from quartet.config.errors import escape_control


def generate(
    model: Annotated[str, typer.Option(help="Model directory, run, checkpoint, URL or hub name.")],
    prompt: Annotated[list[str], typer.Option(help="Prompt; may be given several times.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 keeps every token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps every token.", min=0)] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest token's probability.")] = 0.0,
    num: Annotated[int, typer.Option(help="Answers per prompt.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.", min=0)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the chat template as a user turn.")] = False,
    chat_template: Annotated[str | None, typer.Option(help="Jinja file; the tokenizer's own by itself.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[Precision, typer.Option(help="auto: bf16 on a GPU that has it, fp32 on the CPU.")] = "auto",
    engine: Annotated[
        list[str] | None, typer.Option(help="A key of rollout.engine, e.g. type=vllm; may be given several times.")
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="A picture that every prompt shows; may be given several times.")
    ] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answers of a model to prompts on the command line."""
    from quartet.config.common import ModelConfig
    from quartet.config.engines import NativeEngineConfig
    from quartet.config.load import load_engine
    from quartet.models.loading import load_causal_lm
    from quartet.rollout.protocol import SamplingParams
    from quartet.text.loading import check_vocabulary, resolve_model_directory
    from quartet.text.tokenizer import TextCodec
    from quartet.trainers.checkpoints import model_directory
    from quartet.trainers.devices import FrozenModels, resolve_device, resolve_precision
    from quartet.trainers.engines import frozen_model_engine
    from quartet.trainers.evaluation import generate as run
    from quartet.trainers.input_sources import connect_pictures, feature_store

    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        stop_strings=tuple(stop or ()),
    )
    where = resolve_device(device)
    frozen = FrozenModels(where, resolve_precision(where, precision))
    model = resolve_model_directory(model_directory(model, revision, trust_remote_code=trust_remote_code), "model")
    given = ModelConfig(path=model, trust_remote_code=trust_remote_code)
    codec = TextCodec.from_pretrained(model, chat_template=chat_template, trust_remote_code=trust_remote_code)
    packed = frozen.causal(load_causal_lm(model, trust_remote_code=trust_remote_code))
    check_vocabulary(codec.tokenizer, packed.vocab_size)
    shown = [{"type": "image", "image": path} for path in image or ()]
    prompts: list[Any] = list(prompt)
    if chat or shown:
        prompts = [
            [{"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}]
            for text in prompt
        ]
    connect_pictures(packed, feature_store(codec))
    for warning in packed.warnings:
        typer.echo(escape_control(warning), err=True)
    chosen = load_engine(engine) if engine else NativeEngineConfig()
    with frozen_model_engine(chosen, packed, codec, given, packed.device) as generator:
        found = run(packed, codec, prompts, sampling, num_responses=num, seed=seed, engine=generator)
    for text, answers in zip(prompt, found, strict=True):
        for answer in answers:
            whole = answer.text if chat or shown else text + answer.text
            # Programs that read the output get the answer as it is; a terminal must not obey it.
            typer.echo(escape_control(whole) if sys.stdout.isatty() else whole)
