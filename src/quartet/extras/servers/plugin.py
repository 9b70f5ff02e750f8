"""Engines that are servers of others: SGLang's, and any that speaks OpenAI's completions with token ids."""

from quartet.config.plugins import EngineType, Plugin

_HERE = "quartet.extras.servers"
PLUGIN = Plugin(
    engines={
        "sglang": EngineType(f"{_HERE}.config:SGLangEngineConfig", f"{_HERE}.sglang:sglang_engines"),
        "server": EngineType(f"{_HERE}.config:ServerEngineConfig", f"{_HERE}.client:server_engines"),
    }
)
