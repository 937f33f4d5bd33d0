"""The CPU engine's speed: `python -m tests.bench.bench_engine [--threads 1 2] [--kernels auto generic] [--against DIR]
[--cpu-time]`.

Prefill of 128 and 512 tokens, decode of 1, 4 and 8 sequences of about 256 tokens; tokens per second, best and median.
Candidates take turns, run by run, so that a noisy machine disturbs them alike; the ratios are to be trusted more than
the figures. `--against` names a folder with an engine sketch (`inv.py`, `eng.py`, built) to run in the same turns."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

Clock = Callable[[], float]
PREFILLS = (128, 512)
DECODES = (1, 4, 8)
CONTEXT = 240


class Candidate:
    """An engine under three common names."""

    def __init__(
        self, name: str, add: Callable[..., Any], remove: Callable[..., Any], forward: Callable[..., Any]
    ) -> None:
        self.name, self.add, self.remove, self.forward = name, add, remove, forward


def ours(model: Path, kernels: str, threads: int) -> Candidate:
    from mlcrouter_nb.engine.runner import ModelRunner

    runner = ModelRunner(
        model, max_num_sequence=16, max_total_tokens=8192, num_threads=threads, kernels=kernels
    )

    def forward(seqs: list[int], tokens: list[list[int]]) -> Any:
        return runner.forward(list(zip(seqs, tokens, strict=True)))

    return Candidate(f"ours/{runner.kernels}", runner.add_sequence, runner.remove_sequence, forward)


def sketches(folder: Path, model: Path) -> list[Candidate]:
    os.environ["GGUF"] = str(model)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    from inv import Engine, Inv  # type: ignore[import-not-found]

    base = Engine()
    return [
        Candidate(name, engine.add, engine.rm, engine.forward)
        for name, engine in (("sketch", base), ("sketch, invariant", Inv(base=base)))
    ]


def measure(candidates: list[Candidate], threads: int, rounds: int, clock: Clock) -> None:
    import numpy as np

    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(x) for x in rng.integers(10, 40000, count)]

    def report(what: str, count: int, times: dict[str, list[float]]) -> None:
        print(f"\n{what}, {threads} thread{'s' if threads > 1 else ''}")
        reference = candidates[0].name
        for name, spent in times.items():
            best, middle = count / min(spent), count / median(spent)
            ratios = [a / b for a, b in zip(times[reference], spent, strict=True)]
            ratio = "" if name == reference else f"   {median(ratios):.2f} of {reference}"
            print(f"  {name:20} best {best:7.0f}   median {middle:7.0f} tok/s{ratio}", flush=True)

    for size in PREFILLS:
        times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
        for turn in range(rounds):
            prompt = tokens(size)
            for candidate in candidates if turn % 2 else candidates[::-1]:
                candidate.add(0)
                start = clock()
                candidate.forward([0], [prompt])
                times[candidate.name].append(clock() - start)
                candidate.remove(0)
        report(f"prefill {size}", size, times)
    for size in DECODES:
        seqs = list(range(size))
        for candidate in candidates:
            for seq in seqs:
                candidate.add(seq)
                candidate.forward([seq], [tokens(CONTEXT)])
        times = {candidate.name: [] for candidate in candidates}
        for turn in range(6 * rounds):
            step = [[token] for token in tokens(size)]
            for candidate in candidates if turn % 2 else candidates[::-1]:
                start = clock()
                candidate.forward(seqs, step)
                times[candidate.name].append(clock() - start)
        report(f"decode batch {size}", size, times)
        for candidate in candidates:
            for seq in seqs:
                candidate.remove(seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", nargs="+", default=["auto", "generic"])
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU time: for one thread on a machine that is not idle"
    )
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    if len(arguments.threads) > 1:  # one process each: TVM's pool does not grow
        position = sys.argv.index("--threads") if "--threads" in sys.argv else len(sys.argv)
        rest = sys.argv[1:position] + sys.argv[position + 1 + len(arguments.threads) :]
        for threads in arguments.threads:
            command = [sys.executable, "-m", "tests.bench.bench_engine", *rest, "--threads", str(threads)]
            subprocess.run(command, check=True)
        return
    from mlcrouter_nb.models.names import resolve

    threads = arguments.threads[0]
    os.environ["TVM_NUM_THREADS"] = str(threads)
    model = resolve(arguments.model).path
    candidates = sketches(arguments.against.absolute(), model) if arguments.against else []
    candidates += [ours(model, kernels, threads) for kernels in arguments.kernels]
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load {load:.1f}" + (": not idle, read the ratios" if load > 0.5 else ""))
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    measure(candidates, threads, arguments.rounds, clock)


if __name__ == "__main__":
    main()
