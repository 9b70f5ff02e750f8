"""Engines that are servers of others: SGLang's, and any that speaks OpenAI's completions with token ids."""

from quartet.config.plugins import EngineType, Plugin

_OPEN = "quartet.extras.servers.open"
_CONFIG = "quartet.extras.servers.config"
PLUGIN = Plugin(
    engines={
        "sglang": EngineType(f"{_CONFIG}:SGLangEngineConfig", f"{_OPEN}:sglang_engines"),
        "server": EngineType(f"{_CONFIG}:ServerEngineConfig", f"{_OPEN}:server_engines"),
    }
)
