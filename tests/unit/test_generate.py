"""`megarl.generate`: what it refuses before any work; what it generates is in tests/laws/test_guests.py."""

import contextlib
import io
import json
import os
import signal
import sys
import types
from datetime import timedelta

import pytest

from megarl import generate
from megarl.errors import UsageError
from megarl.generate import Guest, joined, read_flags
from megarl.rollout import guest_ledger
from megarl.rollout.guest_ledger import HOME, facts_of
from tests.helpers.processes import free_port
from tests.helpers.programs import program, rl_argv
from tests.helpers.texts.refusals import refusal
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

WORLD = {"size": 1, "ranks_per_node": 1, "start": "a", "kernels": "auto"}
OTHERS = {  # flags of the replica, its ranks, a part of the line
    "--seed 6": (1, "the run has --seed 5; here it is 6"),
    "--temperature 0.5": (1, "the run has --temperature 0.9; here it is 0.5"),
    "--stop x": (1, "the run has --stop None; here it is x"),
    "--num-layers 3": (1, "the run has rollout num_layers 2; here it is 3"),
    "--max-response-length 5": (1, "the run has --max-response-length 4; here it is 5"),
    "--lora-rank 2": (1, "the run has --lora-rank None; here it is 2"),
    "": (2, "a replica of the run has 1 ranks; this program has 2"),
}


def refused(rank: int, argv: list[str], rows: dict, port: int) -> list[str]:
    """The lines with which replicas of a run are refused: by their flags, as of another version, without a run."""
    config = program("rl", argv, 1)
    store, lines = guest_ledger.serve(port), []
    address, facts = f"127.0.0.1:{port}", json.loads(json.dumps(facts_of(config) | WORLD, default=str))
    generate.ANSWER, generate.MEETING = timedelta(seconds=0.1), 0.0
    lines.append(refusal(joined, address, {}, argv, 1, "rl", 1))  # a store of something else
    store.set(HOME, "[1]")
    lines.append(refusal(joined, address, {}, argv, 1, "rl", 1))
    store.set(HOME, json.dumps(facts))
    for flags, (size, _) in rows.items():
        lines.append(refusal(joined, address, {}, [*argv, *flags.split()], size, "rl", 1))
    facts["same"]["package torch"] = "1.0"
    store.set(HOME, json.dumps(facts))
    lines.append(refusal(joined, address, {}, argv, 1, "rl", 1))
    own = [word for at, word in enumerate(argv) if "--replica-port" not in argv[max(at - 1, 0) : at + 1]]
    lines.append(refusal(joined, address, {}, own, 1, "rl", 1))
    lines.append(refusal(joined, f"127.0.0.1:{free_port()}", {}, argv, 1, "rl", 1))
    return lines


def test_a_replica_of_another_run_is_refused(tmp_path):
    port = free_port()
    argv = rl_argv(tmp_path, f"--replica-port {port}")
    other, damaged, *lines, versions, plain, nobody = run_world(refused, 1, argv, OTHERS, port)[0]
    assert other == damaged == f"--join 127.0.0.1:{port}: what answers there is no run with --replica-port"
    for line, (_, part) in zip(lines, OTHERS.values(), strict=True):
        assert line == f"--join 127.0.0.1:{port}: {part}"
    assert "the run has package torch 1.0; here it is 2" in versions
    assert "needs the flags of the run, with its --replica-port" in plain
    assert "no run answers there" in nobody


@pytest.mark.parametrize("argv", by_default(["", "--join", "--join host", "--join host:x"], ["", "--join host"]))
def test_a_wrong_address_is_one_line(argv):
    with pytest.raises(UsageError):
        read_flags(argv.split())
    with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        generate.main(argv.split())
    assert ended.value.code == 2 and printed.getvalue().startswith("megarl: error: ")
    assert printed.getvalue().count("\n") == 1


def left(rank: int, port: int):
    """What a replica does after a signal, and when the run is gone for good."""
    store = guest_ledger.serve(port)
    groups = types.SimpleNamespace(broadcast_object=lambda item: item, is_leader=True)
    facts = WORLD | {"timeout": 1.0, "replicas": 1, "same": {}}
    found = []
    for number in (signal.SIGTERM, signal.SIGINT):
        guest = Guest(types.SimpleNamespace(role_groups=groups, tokenizer=None), f"127.0.0.1:{port}", facts, 0.0)
        os.kill(os.getpid(), number)
        guest.run()
        found.append(store.get(f"a/beat/{guest.number}").decode().split()[-1])
    guest = Guest(types.SimpleNamespace(role_groups=groups, tokenizer=None), f"127.0.0.1:{port}", facts, 0.0)
    guest._address = f"127.0.0.1:{free_port()}"  # where it looks for the run again
    look = guest_ledger.front_of

    def gone(*args):
        raise RuntimeError("the store is gone")

    generate.front_of = gone
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        guest._join(store, facts)
        sys.stderr.flush()
        order = guest._next_order()
    generate.front_of = look
    return found, order, printed.getvalue()


def test_a_replica_leaves_after_a_signal_and_when_the_run_is_gone():
    found, order, printed = run_world(left, 1, free_port())[0]
    assert found == ["left", "left"] and order is None
    assert "is gone: waiting for it" in printed and "this replica ends" in printed
