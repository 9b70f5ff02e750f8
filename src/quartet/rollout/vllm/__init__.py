"""vLLM as a rollout engine, in a process and an environment of its own. Nothing here is imported by the trainer."""
