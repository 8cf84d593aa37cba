"""Every comparison with a peer, each side at its best of several settings of ranks and threads: one table.

    PYTHONPATH=. python tools/bench/all.py [--only rollout,step,module,images,lora,logprob,startup] [--rounds 3]
        [--out FILE] [--json FILE] [--settings 1x2,2x1] [--vllm-python INTERPRETER] [--lora-model DIR]
        [--busy N] [--quick]

For each comparison, a trial first measures one round of every setting of every side: one rank (or process) with a
thread for each core, and a rank with one thread for each core, unless --settings says otherwise. Then the best setting
of each side runs --rounds rounds; the sides alternate, and the order changes every round. `ratio` is the median of a
side over megarl's: above 1, megarl is faster. megarl has its default flags. `megarl, default` also has the ranks and
threads that launch/run.sh chooses. --busy starts N programs that only compute, as on a shared machine. A side that
fails is a row that says why.
With n processes, Hugging Face and vLLM get a share of the requests each, as megarl's replicas do.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tools.bench import common
from tools.bench.comparisons import GROUPS, Comparison, Options, Side, versions
from tools.bench.tables import whole_table
from tools.bench.workers import Failed, Setting

HEADER = ["work", "side", "ranks × threads", "seconds", "ratio", "other settings, one round"]
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass
class Result:
    """What a side took: seconds of the trial by setting, of the rounds with the best one, and why it failed."""

    trials: dict[str, float] = field(default_factory=dict)
    setting: Setting | None = None
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float | None:
        """Median seconds of the rounds; None after a failure."""
        return None if self.failure or not self.seconds else statistics.median(self.seconds)


@contextlib.contextmanager
def busy_loops(count: int):
    """Runs so many programs that only compute beside the context's block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def failing(result: Result, name: str):
    """Notes a failure of a side in its result instead of raising it."""
    try:
        yield
    except (Exception, common.Unusable) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        result.failure = (
            lines[-1] if isinstance(error, (Failed, common.Unusable)) else f"{type(error).__name__}: {lines[-1]}"
        )
        print(f"  {name} failed: {result.failure}", flush=True)


def try_settings(name: str, side: Side, settings: list[Setting]) -> Result:
    """Measures a round of each setting and chooses the fastest; a single one is not measured."""
    result = Result()
    candidates = dict.fromkeys(side.settings or settings, 0.0)
    if len(candidates) > 1:
        failures = Result()
        for setting in list(candidates):
            failures.failure = None
            with failing(failures, f"{name} {setting}"), side.open(setting, True) as clock:
                candidates[setting] = result.trials[str(setting)] = clock()
                print(f"  trial {name} {setting}: {candidates[setting]:.3f} s", flush=True)
            if failures.failure:
                del candidates[setting]
        if not candidates:
            result.failure = failures.failure
    result.setting = min(candidates, key=candidates.get, default=None)
    return result


def compare(comparison: Comparison, settings: list[Setting], rounds: int) -> dict[str, Result]:
    """Tries all settings of all sides, then measures the best of each alternately."""
    print(comparison.name, flush=True)
    results = {name: try_settings(name, side, settings) for name, side in comparison.sides.items()}
    with contextlib.ExitStack() as stack:
        clocks = {}
        for name, result in results.items():
            if not result.failure:
                with failing(result, name):
                    clocks[name] = stack.enter_context(comparison.sides[name].open(result.setting, False))
        for number in range(rounds):
            for name in list(clocks) if number % 2 == 0 else list(reversed(clocks)):
                if not results[name].failure:
                    with failing(results[name], name):
                        results[name].seconds.append(clocks[name]())
                        print(f"  round {number + 1} {name}: {results[name].seconds[-1]:.3f} s", flush=True)
    return results


def rows(name: str, results: dict[str, Result]) -> list[list[str]]:
    """The table's rows of a comparison."""
    ours, found = results[common.OURS].median, []
    for side, result in results.items():
        others = [f"{setting}: {s:.2f} s" for setting, s in result.trials.items() if setting != str(result.setting)]
        cells = [result.failure or "no round", ""]
        if result.median is not None:
            is_other = side != common.OURS and ours is not None
            cells = [f"{result.median:.2f} s", f"{result.median / ours:.2f}" if is_other else ""]
        found.append([name, side, str(result.setting or ""), *cells, "; ".join(others)])
    return found


def processor() -> dict[str, str]:
    """Name, frequency, number and vector instructions of this machine's processors, as Linux reports them."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
        flags = facts.get("flags", "").split()
        return {
            "name": facts.get("model name", "unknown"), "MHz": facts.get("cpu MHz", "unknown"),
            "cores": str(len(os.sched_getaffinity(0))),
            "flags": " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none of " + " ".join(CPU_FLAGS),
        }  # fmt: skip
    return {"name": "unknown", "MHz": "unknown", "cores": str(os.cpu_count()), "flags": "unknown"}


def report(found: dict) -> str:
    """The machine, the versions and the table, as Markdown."""
    machine, libraries = found["processor"], [f"{name} {version}" for name, version in found["versions"].items()]
    loads = [f"{load:.1f}" for load in found["load"]]
    return "\n".join([
        f"Processor: {machine['name']}, {machine['cores']} cores, {machine['MHz']} MHz, {machine['flags']}.",
        f"Versions: {', '.join(libraries)}.",
        f"{found['rounds']} rounds beside {found['busy']} busy loops; load average before and after:"
        f" {', '.join(loads)}.", "",
        whole_table([HEADER, *(row for each in found["works"] for row in each["rows"])], True, 0),
    ])  # fmt: skip


def measure(args: argparse.Namespace) -> dict:
    """Runs the comparisons one after the other and writes the files after each."""
    loads = [os.getloadavg()[0]]
    found = {
        "processor": processor(),
        "versions": versions(args.options),
        "rounds": args.rounds,
        "busy": args.busy,
        "works": [],
    }
    for group in args.only:
        for make in GROUPS[group]:
            with tempfile.TemporaryDirectory() as folder:
                preparing = Result()
                with failing(preparing, group):
                    comparison = make(Path(folder), args.options)
                if preparing.failure:
                    name, results = group, {common.OURS: preparing}
                else:
                    name, results = comparison.name, compare(comparison, args.settings, args.rounds)
            sides = {side: vars(result) | {"setting": str(result.setting)} for side, result in results.items()}
            found["works"].append({"work": name, "sides": sides, "rows": rows(name, results)})
            found["load"] = [loads[0], os.getloadavg()[0]]
            write(found, args)
    return found


def write(found: dict, args: argparse.Namespace):
    """Writes the files that were asked for."""
    if args.out:
        args.out.write_text(report(found) + "\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the flags; `options` is what the comparisons read."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    made.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas; default: %(default)s")
    made.add_argument("--rounds", type=int, default=3, help="rounds of each side; default: %(default)s")
    made.add_argument("--settings", default=",".join(dict.fromkeys((f"1x{cores}", f"{cores}x1"))),
                      help="ranks x threads that every side tries; default: %(default)s")  # fmt: skip
    made.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"), help="Python interpreter with vLLM")
    made.add_argument("--lora-model", type=Path, metavar="DIR", help="Hugging Face folder of the LoRA step")
    made.add_argument("--trl-batch", type=int, default=64, help="responses per pass of TRL; default: %(default)s")
    made.add_argument("--lora-batch", type=int, default=16, help="the same with LoRA; default: %(default)s")
    made.add_argument("--busy", type=int, default=0, metavar="N", help="programs that only compute beside all sides")
    made.add_argument("--quick", action="store_true", help="small work that shows nothing but that it runs")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the table to this file, too")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all seconds to this file")
    args = made.parse_args(argv)
    args.only = [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in args.only if name not in GROUPS]:
        made.error(f"--only {','.join(unknown)}: allowed are {', '.join(GROUPS)}")
    if args.rounds < 1:
        made.error(f"--rounds {args.rounds}: must be at least 1")
    if args.busy < 0:
        made.error(f"--busy {args.busy}: must be at least 0")
    pairs = [text.strip().split("x") for text in args.settings.split(",")]
    if not all(len(pair) == 2 and all(part.isdecimal() and int(part) for part in pair) for pair in pairs):
        made.error(f"--settings {args.settings}: allowed are RANKSxTHREADS, separated by commas")
    args.settings = [Setting(int(ranks), int(threads)) for ranks, threads in pairs]
    if args.vllm_python and not shutil.which(args.vllm_python):
        made.error(f"--vllm-python {args.vllm_python}: no such program")
    if args.lora_model and not (args.lora_model / "config.json").is_file():
        made.error(f"--lora-model {args.lora_model}: no Hugging Face folder, it has no config.json")
    args.options = Options(args.quick, args.vllm_python, args.lora_model, args.trl_batch, args.lora_batch)
    return args


def main(argv: list[str] | None = None) -> int:
    """Parses flags, measures, prints."""
    args = parse(argv)
    with busy_loops(args.busy):
        print(report(measure(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
