"""The road of an RL step through the code: files up to the first iteration, frames from an iteration to ``backward()``.

    python benchmarks/road.py [--source src] [--source ../before/src] [--list]

`quartet rl` on a random model: PPO with a critic, two steps in one process. Counted are

- files of ``cli``, ``trainers``, ``schedule`` and ``cluster`` on the call stack as the first iteration begins;
- files of those folders with a function that ran between the command's entry and that moment (not at import);
- frames of quartet, and their files, from ``run_iteration`` to the actor's first ``Tensor.backward``: the coroutines of
  the task that waits for the update, and what the thread calls that computes it;
- frames from the task that asks the engine to the first forward pass that samples, counted likewise;
- files of all folders with a function that ran between that iteration's begin and that ``backward()``: what a token
  passes from its prompt to its gradient.

``--source`` measures another tree, the one before a change, say; ``--list`` prints names.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

FOLDERS = ("cli", "trainers", "schedule", "cluster")
REWARD = "def longer(prompts, completions, **_):\n    return [float(len(text)) for text in completions]\n"


class Road:
    """What is seen of one run."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._ran: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun: list[str] = []
        self.found: dict[str, list[str]] = {}

    def watch(self) -> None:
        """Notes every file with a function that runs from here to the first iteration."""

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_name != "<module>":
                self._ran.add(frame.f_code.co_filename)

        threading.setprofile(note)
        sys.setprofile(note)

    def iteration_begins(self) -> None:
        if self._begun:
            return
        self._loop = asyncio.get_running_loop()
        self._begun = [self._name(frame) for frame in self._own(_stack(sys._getframe(1)))]
        self.found["on the stack"] = sorted({where for name in self._begun if _counts(where := name.split(":")[0])})
        ran = {self._relative(file) for file in self._ran.copy() if file.startswith(str(self._package))}
        self.found["ran before"] = sorted(file for file in ran if _counts(file))
        self._ran.clear()

    def sampling_begins(self) -> None:
        names = [self._name(frame) for frame in self._own(iter(self._frames()))][::-1]
        if "to the sampling" not in self.found and any(name.startswith("rollout/") for name in names):
            self.found["to the sampling"] = [name for name in names if name not in self._begun]

    def _frames(self) -> list[FrameType]:
        """The caller's frames, the innermost first; of a compute thread then the coroutines that wait for it."""
        frames = list(_stack(sys._getframe(2)))
        done = next((frame.f_locals["done"] for frame in frames if frame.f_code.co_name == "_work"), None)
        return frames + (self._waiting(done) if done is not None else [])

    def backward_begins(self) -> None:
        frames = self._frames()
        names = [self._name(frame) for frame in self._own(iter(frames))][::-1]
        iteration = "schedule/iteration.py:run_iteration"
        names = [iteration, *[name for name in names if name != iteration and name not in self._begun]]
        if any("policy" in name.lower() or "actor" in name.lower() for name in self._objectives(frames)):
            self.found.setdefault("iteration to backward", names)
            if "ran in it" not in self.found:
                self.found["ran in it"] = sorted(
                    self._relative(file) for file in self._ran.copy() if file.startswith(str(self._package))
                )

    def _objectives(self, frames: list[FrameType]) -> Iterator[str]:
        for frame in frames:
            yield type(frame.f_locals.get("objective")).__name__

    def _waiting(self, done: asyncio.Future[Any]) -> list[FrameType]:
        """Frames of the task that waits for what the compute thread makes, the innermost first."""
        assert self._loop is not None
        for task in asyncio.all_tasks(self._loop):
            chain: list[FrameType] = []
            waiting: Any = task.get_coro()
            while waiting is not None and getattr(waiting, "cr_frame", None) is not None:
                chain.append(waiting.cr_frame)
                waiting = waiting.cr_await
            if any(value is done for frame in chain for value in frame.f_locals.values()):
                return chain[::-1]
        raise LookupError("no task waits for the compute thread")

    def _own(self, frames: Iterator[FrameType]) -> list[FrameType]:
        return [frame for frame in frames if frame.f_code.co_filename.startswith(str(self._package))]

    def _name(self, frame: FrameType) -> str:
        return f"{self._relative(frame.f_code.co_filename)}:{frame.f_code.co_name}"

    def _relative(self, file: str) -> str:
        return str(Path(file).relative_to(self._package))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _counts(file: str) -> bool:
    return file.split("/")[0] in FOLDERS


def measure(folder: Path) -> dict[str, list[str]]:
    """Runs the job with the ``quartet`` that this process imports."""
    import torch
    from common import saved_model

    import quartet

    package = Path(quartet.__file__).parent
    for module in pkgutil.walk_packages([str(package)], "quartet."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(f"{module.name}: {error}", file=sys.stderr)  # an engine that is not installed
    from quartet.cli.main import add_plugins, app

    add_plugins()
    from quartet.models.packed_model import PackedModel
    from quartet.trainers import rl

    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w7"}) + "\n" for i in range(3, 9)))
    (folder / "recipe.yaml").write_text(
        f"actor: {{model: {{path: {saved_model('tiny', folder)}}}}}\n"
        f"data: {{path: {folder / 'data.jsonl'}}}\n"
        f"rewards: [{{type: function, name: longer, target: '{folder / 'reward.py'}:longer'}}]\n"
        "algorithm: {name: ppo}\n"
        "rollout: {sampling: {max_new_tokens: 4}}\n"
        "steps: 2\nprompts_per_step: 2\nresponses_per_prompt: 2\n"
        f"output_dir: {folder / 'run'}\n",
        encoding="utf-8",
    )
    road = Road(package)
    run_iteration, backward, hidden = rl.run_iteration, torch.Tensor.backward, PackedModel.hidden

    async def seen_iteration(*args: Any) -> Any:
        road.iteration_begins()
        return await run_iteration(*args)

    def seen_backward(*args: Any, **options: Any) -> None:
        road.backward_begins()
        backward(*args, **options)

    def seen_hidden(*args: Any, **options: Any) -> Any:
        if road.found:
            road.sampling_begins()
        return hidden(*args, **options)

    rl.run_iteration = seen_iteration
    PackedModel.hidden = seen_hidden  # type: ignore[method-assign]
    torch.Tensor.backward = seen_backward  # type: ignore[method-assign]
    road.watch()
    app(["rl", str(folder / "recipe.yaml")], standalone_mode=False)
    return road.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, action="append", help="default: this tree's src")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        options.measure.write_text(json.dumps(measure(options.measure.parent)), encoding="utf-8")
        return
    for source in options.source or [Path(__file__).parents[1] / "src"]:
        with tempfile.TemporaryDirectory() as directory:
            result = Path(directory) / "found.json"
            environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "TRANSFORMERS_VERBOSITY": "error"}
            command = [sys.executable, __file__, "--measure", str(result)]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            found: dict[str, list[str]] = json.loads(result.read_text(encoding="utf-8"))
        road = found["iteration to backward"]
        print(source)
        print(f"  files on the stack as the first iteration begins  {len(found['on the stack']):3d}")
        print(f"  files with functions that ran before it           {len(found['ran before']):3d}")
        print(f"  frames from the iteration to backward()           {len(road):3d}")
        print(f"  their files                                       {len({name.split(':')[0] for name in road}):3d}")
        print(f"  frames to the forward pass that samples           {len(found['to the sampling']):3d}")
        print(f"  files that a token passes, prompt to gradient     {len(found['ran in it']):3d}")
        for title, names in found.items() if options.list else ():
            print(f"  {title}:", *names, sep="\n    ")


if __name__ == "__main__":
    main()
