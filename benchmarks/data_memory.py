"""Memory and time to the first step by the number of rows: neither should grow with them.

    python benchmarks/data_memory.py [--rows 10000 100000 1000000] [--formats jsonl parquet] [--jobs sft rl …] [--ray]
        [--model DIR]

Three steps of each job on generated rows of ten-word texts. ``MiB above`` is the largest resident memory that the
process had, less the same of a run on ten rows; ``first step`` the seconds from the start of the process, imports
included, until the figures of the first step are written, and in brackets those of the processor, which do not depend
on what others compute beside it. With ``--ray`` the model is in a process of its own: memory is told of both, the
driver first; processor seconds are those of all processes together. ``--model`` is a causal LM with a tokenizer
(stories260K, say); without it a random one of 1.8 M parameters is made, whose tokens are words. Prints one Markdown
table.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common import saved_model

JOBS = ("sft", "preference", "reward-model", "rl")
STEPS, ROWS_PER_STEP = 3, 8
_MARK = "QUARTET_DATA_MEMORY"
"""Variable of the environment by which the processes of one run are known."""


def rows(num: int, job: str) -> Iterator[dict[str, str]]:
    """Prompts of ten words and answers of ten."""
    draw = random.Random(0)
    halves = [" ".join(f"w{draw.randrange(3, 512)}" for _ in range(5)) for _ in range(4096)]

    def text() -> str:
        return f"{draw.choice(halves)} {draw.choice(halves)}"

    for _ in range(num):
        row = {"prompt": text()}
        if job == "sft":
            row["completion"] = " " + text()
        elif job != "rl":
            row["chosen"], row["rejected"] = " " + text(), " " + text()
        yield row


def write(path: Path, num: int, job: str) -> None:
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for row in rows(num, job):
                file.write("{" + ", ".join(f'"{name}": "{value}"' for name, value in row.items()) + "}\n")
        return
    import pyarrow
    import pyarrow.parquet

    tables, given = [], rows(num, job)
    while held := list(islice(given, 50_000)):
        tables.append(pyarrow.Table.from_pylist(held))
    # As pyarrow writes by itself: one row group up to 2^20 rows.
    pyarrow.parquet.write_table(pyarrow.concat_tables(tables), path)


def run(job: str, data: Path, out: Path, model: str, *, on_ray: bool) -> None:
    """The run itself, in this process."""
    from quartet.config.preference import PreferenceRecipe
    from quartet.config.recipe import RewardModelRecipe, RLRecipe, SFTRecipe
    from quartet.trainers.preference import PreferenceTrainer
    from quartet.trainers.rl import RLTrainer
    from quartet.trainers.supervised import RewardModelTrainer, SFTTrainer

    values: dict[str, Any] = {"data": {"path": str(data)}, "output_dir": str(out), "steps": STEPS, "threads": 1}
    values["log"] = {"tensorboard": False}
    if on_ray:
        values["cluster"] = {"type": "ray", "cpus_per_process": 0.1}
    if job == "rl":
        values |= {
            "actor": {"model": {"path": model}},
            "algorithm": {"name": "grpo", "kl": {"coef": 0.0}},
            "rollout": {"sampling": {"max_new_tokens": 8}},
            "prompts_per_step": ROWS_PER_STEP,
            "responses_per_prompt": 2,
        }
        if on_ray:
            values["placement"] = {"type": "pipelined", "pools": {"policy": {"roles": ["rollout", "actor"]}}}
        RLTrainer(RLRecipe.model_validate(values), rewards=_length).train()
        return
    values |= {"model": {"path": model}, ("examples" if job == "sft" else "pairs") + "_per_step": ROWS_PER_STEP}
    if job == "sft":
        SFTTrainer(SFTRecipe.model_validate(values)).train()
    elif job == "preference":
        PreferenceTrainer(PreferenceRecipe.model_validate(values)).train()
    else:
        RewardModelTrainer(RewardModelRecipe.model_validate(values)).train()


def _length(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [float(len(text)) for text in completions]


def peaks(mark: str, driver: int) -> dict[int, float]:
    """Largest resident MiB so far of each process of the run: the driver and Ray's workers."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            is_worker = (folder / "cmdline").read_bytes().startswith(b"ray::")
            if int(folder.name) != driver and not (is_worker and mark.encode() in (folder / "environ").read_bytes()):
                continue
            status = (folder / "status").read_text()
        except OSError:
            continue
        if "VmHWM" in status:
            found[int(folder.name)] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return found


def processor_s(process: int) -> float:
    """Processor time of a process so far; 0 of one that has just ended."""
    try:
        values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def measured(job: str, data: Path, model: str, *, on_ray: bool) -> tuple[list[float], str]:
    """Peak MiB of the driver and, on Ray, of its largest worker; seconds to the first step."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, __file__, "--run", job, str(data), str(out), model, str(int(on_ray))]
        begun, first, most = time.perf_counter(), "", dict[int, float]()
        with (Path(folder) / "log").open("w+") as log:
            child = subprocess.Popen(command, env={**os.environ, _MARK: mark}, stdout=log, stderr=log)
            while child.poll() is None:
                metrics = out / "metrics.jsonl"
                if not first and metrics.is_file() and re.search(r'"step": ?1\b', metrics.read_text()):
                    used = sum(map(processor_s, peaks(mark, child.pid)))
                    first = f"{time.perf_counter() - begun:.0f} s ({used:.0f})"
                for process, size in peaks(mark, child.pid).items():
                    most[process] = max(size, most.get(process, 0.0))
                time.sleep(0.2)
            if child.returncode:
                log.seek(0)
                raise SystemExit(log.read())
    driver = most.pop(child.pid)
    return [driver, *([max(most.values())] if on_ray else [])], first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--formats", nargs="+", default=["jsonl", "parquet"], choices=["jsonl", "parquet"])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        job, data, out, model, on_ray = options.run
        run(job, Path(data), Path(out), model, on_ray=on_ray == "1")
        return
    titles = [f"{num:,} rows" for num in options.rows]
    print(
        "| job | file |", " | ".join([*(f"MiB above, {t}" for t in titles), *(f"first step, {t}" for t in titles)]), "|"
    )
    print("|---" * (2 + 2 * len(titles)) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(saved_model("tiny", Path(folder)))
        for job in options.jobs:
            for ending in options.formats:
                found = []
                for num in (10, *options.rows):
                    path = Path(folder) / f"rows.{ending}"
                    write(path, num, job)
                    found.append(measured(job, path, model, on_ray=options.ray))
                (base, _), *many = found
                above = [" + ".join(f"{a - b:.0f}" for a, b in zip(sizes, base, strict=True)) for sizes, _ in many]
                cells = [job, ending, *above, *(seconds for _, seconds in many)]
                print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
