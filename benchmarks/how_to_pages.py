"""The how-to pages as a newcomer follows them: their files are written, their commands run in order and timed.

    git clone . CLONE && make -C CLONE .venv/.installed && CLONE/.venv/bin/pip install -e "CLONE[data,lora]"
    OMP_NUM_THREADS=1 python benchmarks/how_to_pages.py CLONE --model MODEL --gsm8k FOLDER

Runs in CLONE with CLONE/.venv. MODEL, a small Hugging Face directory, takes the place of Qwen2.5-0.5B, and FOLDER with
gsm8k_train.jsonl and gsm8k_test.jsonl that of openai/gsm8k; ``INSTEAD`` shortens long runs. Prints each command with
its seconds, then a table, and what was not run and why.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import markdown  # noqa: E402

from doc_samples import SHELL, samples  # noqa: E402

ORDER = ("own-data", "own-reward", "not-learning", "read-the-report", "own-environment", "own-model", "own-method", "one-gpu")  # fmt: skip # noqa: E501
"""Pages that run on one CPU; a page that uses the run of another comes after it."""
ELSEWHERE = {"eight-gpus-vllm": "GPUs", "two-machines": "two machines", "slurm": "Slurm", "kubernetes": "Kubernetes"}
NOT_RUN = {"pip install": "the clone is installed", "torch.cuda": "GPU", "vllm": "GPU", "--live": "ends by Ctrl-C"}
"""Part of a command: why it is not run."""
INSTEAD = {
    "Qwen/Qwen2.5-0.5B": "{model}",
    "path: openai/gsm8k, config: main, split: train": "path: {gsm8k}/gsm8k_train.jsonl, overlong: skip",
    'path: openai/gsm8k, config: main, split: "test[:200]"': "path: {gsm8k}/gsm8k_test.jsonl, limit: 20",
    "steps: 200": "steps: 4",
    "every_steps: 20": "every_steps: 2",
    " recipe.yaml": " words.yaml",
}
"""What is replaced in files and commands: no hub, no GPU, steps of seconds."""


@dataclass
class Page:
    """Commands that ended well with their seconds; the others with the reason."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def lines_of(shell: str) -> Iterator[str]:
    """The commands of a block, each on one line."""
    lines = (line.removeprefix("$ ").strip() for line in shell.replace("\\\n", " ").splitlines())
    return (line for line in lines if line and not line.startswith("#"))


def follow(text: str, folder: Path, instead: Mapping[str, str], limit_s: float) -> Page:
    """Writes a page's files into ``folder`` and runs its commands there, with ``folder/.venv/bin`` first in PATH."""
    for old, new in instead.items():
        text = text.replace(old, new)
    page = Page()
    for sample in samples(text):
        if sample.title:
            (folder / sample.title).write_text(sample.text, encoding="utf-8")
        for line in lines_of(sample.text) if sample.language in SHELL else ():
            if reason := next((why for words, why in NOT_RUN.items() if words in line), ""):
                page.left_out[line] = reason
                continue
            begun = time.monotonic()
            status, output = _run(line, folder, limit_s)
            seconds = time.monotonic() - begun
            print(f"{seconds:7.1f} s  {line}" + (f"  FAILED ({status})\n{output}" if status else ""), flush=True)
            if status:
                page.failed[line] = f"exit status {status}"
            else:
                page.seconds[line] = seconds
    return page


def _run(line: str, folder: Path, limit_s: float) -> tuple[int, str]:
    """Exit status and the end of the output; after ``limit_s`` the command and its children are killed."""
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=folder, text=True, start_new_session=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return process.returncode, output[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--pages", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one command")
    args = parser.parse_args()
    instead = {k: v.format(model=args.model.resolve(), gsm8k=args.gsm8k.resolve()) for k, v in INSTEAD.items()}
    text = {name: (ROOT / "docs/how-to" / f"{name}.md").read_text("utf-8") for name in args.pages}
    found = {name: follow(text[name], args.clone.resolve(), instead, args.limit) for name in args.pages}
    rows = [(name, str(len(page.seconds)), f"{sum(page.seconds.values()):.0f}") for name, page in found.items()]
    rows += [(name, "0", f"not run: needs {what}") for name, what in ELSEWHERE.items()]
    print(markdown(("page", "commands", "seconds"), rows))
    for name, page in found.items():
        for line, reason in (page.failed | page.left_out).items():
            print(f"not run to its end, {name}: {line} ({reason})")
    sys.exit(any(page.failed for page in found.values()))


if __name__ == "__main__":
    main()
