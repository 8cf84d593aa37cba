"""Ranks of a Slurm step find their store, whatever else listens on the ports that they ask."""

import argparse
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from megarl import launcher
from megarl.cluster import rendezvous
from megarl.errors import UsageError
from tests.helpers.processes import free_port
from tests.helpers.waiting import SAFETY_SECONDS

LIMIT = timedelta(seconds=SAFETY_SECONDS)
HOST = "127.0.0.1"


def environment(rank: int, size: int, job: str = "slurm-17.3", **more) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": HOST, "TORCHELASTIC_RUN_ID": job} | more
    return {name: str(value) for name, value in names.items()}


def listen(port: int = 0) -> socket.socket:
    return socket.create_server((HOST, port))


def free_ports(count: int) -> list[int]:
    sockets = [listen() for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def meet_all(environments: list[dict]) -> list:
    with ThreadPoolExecutor(len(environments)) as pool:
        return list(pool.map(lambda found: rendezvous.meet(found, LIMIT), environments))


def test_all_ranks_get_one_store_and_two_jobs_get_two():
    ones, others = ([environment(rank, 3, job) for rank in range(3)] for job in ("slurm-17.3", "slurm-18.0"))
    stores = meet_all(ones + others)
    stores[1].set("who", "17")
    stores[4].set("who", "18")
    assert [store.get("who") for store in stores] == [b"17"] * 3 + [b"18"] * 3


def test_other_programs_on_the_ports_do_no_harm(monkeypatch):
    """One that says nothing, one that closes, one that answers for another job, and one of ours that is not first."""
    silent, closing, *free = listen(), listen(), *free_ports(1)
    taken = [silent.getsockname()[1], closing.getsockname()[1]]

    def close():
        while True:
            try:
                closing.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=close, daemon=True).start()
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.2)
    monkeypatch.setattr(rendezvous, "candidates", lambda _: [*taken, *free])
    with rendezvous.announced(HOST, (foreign := free_ports(1)), "another-job", 1):
        monkeypatch.setattr(rendezvous, "candidates", lambda _: [*taken, *foreign, *free])
        stores = meet_all([environment(rank, 2) for rank in range(2)])
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
    closing.shutdown(socket.SHUT_RDWR)
    for server in (silent, closing):
        server.close()


def test_ports_are_those_of_the_step_and_reserved_ones_come_first():
    one, again, other = (rendezvous.candidates(environment(0, 2, job)) for job in ("a.1", "a.1", "a.2"))
    assert one == again and set(one) != set(other) and len(set(one)) == rendezvous.CANDIDATES
    assert rendezvous.FIRST <= min(one) and max(one) <= rendezvous.LAST
    reserved = environment(0, 2, SLURM_STEP_RESV_PORTS="12000-12002,12007")
    assert rendezvous.candidates(reserved) == [12000, 12001, 12002, 12007]


def test_a_rank_without_a_first_rank_says_where_it_looked():
    ports = free_ports(2)
    with pytest.raises(RuntimeError, match=f"{HOST}, did not answer on any of the ports"):
        rendezvous.find(HOST, ports, "job", time.monotonic())


def test_a_first_rank_says_how_many_came(monkeypatch):
    monkeypatch.setattr(rendezvous, "candidates", lambda _: free_ports(1))
    with pytest.raises(RuntimeError, match="1 of 2 ranks came"):
        rendezvous.meet(environment(0, 2), timedelta(seconds=0.2))


def test_no_free_port_is_an_error():
    with listen() as server, pytest.raises(RuntimeError, match="none of the ports"):
        with rendezvous.announced(HOST, [server.getsockname()[1]], "job", 1):
            pass


def test_an_unknown_host_is_named():
    with pytest.raises(UsageError, match="MASTER_ADDR no.such.host.invalid"):
        rendezvous.meet(environment(0, 2, MASTER_ADDR="no.such.host.invalid"), LIMIT)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no.such.host.invalid"])
def test_loopback_and_unknown_hosts_choose_no_interface(host):
    assert rendezvous.interface_towards(host) is None


def test_the_interface_is_chosen_for_several_nodes_only(monkeypatch):
    monkeypatch.setattr(rendezvous, "interface_towards", lambda host: f"to-{host}")
    given = {"MASTER_ADDR": "node1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for changed, wanted in [({}, None), ({"LOCAL_WORLD_SIZE": "2"}, "to-node1"),
                            ({"LOCAL_WORLD_SIZE": "2", rendezvous.INTERFACE: "ib0"}, "ib0")]:  # fmt: skip
        monkeypatch.setenv(rendezvous.INTERFACE, "")  # so that it is unset after the test, whoever sets it
        monkeypatch.delenv(rendezvous.INTERFACE)
        for name, value in (given | changed).items():
            monkeypatch.setenv(name, value)
        rendezvous.choose_interface()
        assert rendezvous.os.environ.get(rendezvous.INTERFACE) == wanted


# -- launchers of several nodes --------------------------------------------------------------------------------------


def of_node(flags: str) -> argparse.Namespace:
    """What the launcher knows of its node."""
    return launcher._parser().parse_args(["--nnodes", "2", *flags.split(), "train_sft"])


@pytest.mark.parametrize(("flags", "problem"), [
    ("--node-rank 2 --master-addr here --master-port 29", "--node-rank 2: allowed are 0 to 1"),
    ("--node-rank x --master-addr here --master-port 29", "--node-rank x: allowed are 0 to 1"),
    ("--node-rank 0 --master-addr here --master-port 65536", "--master-port 65536: allowed is PORT"),
    ("--node-rank 0", "--master-port None: allowed is PORT"),
    ("--rdzv-endpoint here", "--rdzv-endpoint here: allowed is HOST:PORT"),
    ("--node-rank 0 --master-addr 127.0.0.1 --master-port {taken}", "127.0.0.1:{taken}: Address already in use"),
])  # fmt: skip
def test_nodes_that_cannot_meet_are_refused(flags, problem):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"^{problem.format(taken=taken)}"):
            launcher.run_ranks(lambda: 0, 1, nodes=of_node(flags.format(taken=taken)))


def test_a_launcher_without_a_first_node_says_so(monkeypatch):
    monkeypatch.setattr(rendezvous, "MEETING", 0.0)
    nodes = of_node(f"--node-rank 1 --master-addr {HOST} --master-port {free_port()}")
    with pytest.raises(UsageError, match="--nnodes 2: no start with a place for this node at 127.0.0.1:"):
        launcher.run_ranks(lambda: 0, 1, nodes=nodes)
