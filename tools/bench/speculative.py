"""Speculative rollouts: decode steps and seconds of a training run's generation, with drafts and without.

    PYTHONPATH=. python tools/bench/speculative.py [--last 50] [--json FILE] FLAGS OF megarl.train_rl

Runs train_rl on one rank with --speculative-rollout. In each step, two engines on the same weights generate the same
responses, one with drafts and one without; they take turns at being first. Responses, log-probs and routes must be
equal, or the benchmark fails. Prints sums over the last steps, their ratios, and how many tokens a request got in a
decode step. Evaluations do not count.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megarl import train_rl
from megarl.rollout.rollout import Rollout
from megarl.trainers.launch import launch
from tools.bench.common import Unusable

PLAIN, DRAFTS = "plain", "drafts"


def count_decode_steps(engine) -> list[int]:
    """A list that gets the number of requests of each step of an engine in which no prompt is prefilled."""
    from megarl.mcore.inference import admission

    step, context, found = engine.step_modern, engine.context, []

    def counted():
        requests = context.total_request_count - context.paused_request_count
        if requests and not context.num_prefill_requests and not admission.may_add(engine):
            found.append(requests)
        return step()

    engine.step_modern = counted
    return found


class BothEngines:
    """In the place of `Rollout._run_engine`: runs it with a plain engine too, and compares."""

    def __init__(self, run_engine: Callable, generate: Callable):
        self._run_engine, self._generate, self._plain, self.rows = run_engine, generate, None, []

    def generate(self, rollout: Rollout, prompts, step, temperature=None, **options):
        """In the place of `Rollout.generate`: keeps the figures of training responses only."""
        before = len(self.rows)
        batch = self._generate(rollout, prompts, step, temperature, **options)
        if temperature is not None:
            del self.rows[before:]
        return batch

    def __call__(self, rollout: Rollout, round_, *others):
        """Leaves the responses of the speculative engine."""
        if round_.wanted is not None or rollout.bank is not None or round_.sender is not None or not rollout.is_static:
            raise Unusable(
                "speculative.py: one replica, without --over-sampling and judges, with --keep-responses "
                "false, can be compared"
            )
        if self._plain is None:
            self._prepare(rollout)
        engines = {PLAIN: self._plain, DRAFTS: self._speculative}
        order, found, row = list(engines) if len(self.rows) % 2 else list(engines)[::-1], {}, {}
        for side in order:
            rollout.engine = engines[side]
            self._steps[side].clear()
            started = time.perf_counter()
            self._run_engine(rollout, round_, *others)
            row[side] = {"s": time.perf_counter() - started, "steps": len(self._steps[side])}
            row[side]["requests"] = sum(self._steps[side])
            found[side] = {i: response.completion() for i, response in round_.requests.responses.items()}
        if found[PLAIN] != found[DRAFTS]:
            raise Unusable("speculative.py: responses with drafts differ from those without")
        rollout.engine = self._speculative
        self.rows.append(row)

    def _prepare(self, rollout: Rollout):
        from megarl.mcore.inference.engine import RolloutEngine

        s, engine = rollout.settings, rollout.engine
        longest = s.max_prompt_length + s.max_response_length
        sizes = engine.sampling.vocab_size, longest, s.rollout_buffer_gb, s.rollout_max_requests
        self._plain = RolloutEngine(engine.model, rollout.role_groups.pg_collection, *sizes, stops=rollout.ends.matcher)
        self._speculative = engine
        both = {PLAIN: self._plain, DRAFTS: engine}
        self._steps = {side: count_decode_steps(one.engine) for side, one in both.items()}


def summary(rows: list[dict]) -> dict:
    """Sums of the sides, and ratios plain / drafts."""
    sums = {side: {name: sum(row[side][name] for row in rows) for name in rows[0][side]} for side in (PLAIN, DRAFTS)}
    ratios = {name: sums[PLAIN][name] / max(sums[DRAFTS][name], 1e-9) for name in sums[PLAIN]}
    return {"training_steps": len(rows), **sums, "ratios": ratios}


def main():
    """Parses the benchmark's own flags; the others are those of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--last", type=int, default=50, help="training steps that count, the last ones")
    parser.add_argument("--json", type=Path, help="also write the figures of every step to this file")
    args, flags = parser.parse_known_args()
    sys.argv = [sys.argv[0], *flags, "--speculative-rollout"]
    both = BothEngines(Rollout._run_engine, Rollout.generate)
    Rollout._run_engine = lambda *arguments: both(*arguments)
    Rollout.generate = lambda *arguments, **options: both.generate(*arguments, **options)
    launch(train_rl.train, "rl")
    found = summary(both.rows[-args.last :])
    if args.json:
        args.json.write_text(json.dumps(found | {"rows": both.rows}))
    for side in (PLAIN, DRAFTS):
        print(f"{side:>7}: {found[side]['steps']:6} decode steps, {found[side]['s']:8.2f} s")
    ratios = found["ratios"]
    print(f"  ratio: {ratios['steps']:6.2f} decode steps, {ratios['s']:8.2f} s;"
          f" {ratios['requests']:.2f} times the tokens per request and decode step")  # fmt: skip


if __name__ == "__main__":
    main()
