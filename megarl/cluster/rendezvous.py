"""Where the ranks of several nodes meet: the port of a Slurm step's store, and the network interface of gloo.

The first rank serves torch's store on any free port. It announces this port on the first free one of a few ports that
all ranks compute from job and step; the others ask these until one answers with the name of their job. So another
program on one of these ports does no harm. Ports that Slurm has reserved for the step (`srun --resv-ports`) are used
instead if there are any.

Launchers that fork the ranks of several nodes meet in the same way, once for each start: the first one announces number
and port of a start at an address that all know.
"""

import argparse
import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import psutil
from torch.distributed import Store, TCPStore

from megarl.cluster.slurm import ATTEMPT, JOB
from megarl.errors import UsageError

FIRST, LAST = 20000, 32767  # below the ports that Linux gives to outgoing connections
CANDIDATES = 16
PATIENCE = 5.0  # seconds for one connection
PAUSE = 0.2  # seconds between two rounds of questions
ALL_HERE = "megarl/all ranks have met"
INTERFACE = "GLOO_SOCKET_IFNAME"
MEETING = 900.0  # seconds that a launcher waits for that of the first node
GRACE = 10.0  # seconds that the first node's waits for the others, which read who has failed
FAILED = "megarl/failed node"  # key in the store of a start


def meet(environment: Mapping[str, str], timeout: timedelta) -> Store:
    """The store of all ranks of a Slurm step; returns when all have connected.

    Args:
        environment: of `slurm.rank_environment`.
        timeout: until when all ranks must have come.

    Raises:
        UsageError: the first rank's host is unknown.
        RuntimeError: some did not come.
    """
    rank, size, host = int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"]
    job, ports = environment[JOB], candidates(environment)
    _check_host(host)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank:
        store = TCPStore(host, find(host, ports, job, deadline), size, timeout=timeout, wait_for_workers=False)
        _count(store, size)
        return store
    listener = listen(host, 0)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    with announced(host, ports, job, port):
        _count(store, size)
        try:
            store.wait([ALL_HERE], timeout)
        except RuntimeError:
            came = store.add(f"{ALL_HERE}: count", 0)
            raise RuntimeError(f"{came} of {size} ranks came to {host} within {timeout}") from None
    return store


def _check_host(host: str):
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise UsageError(
            f"MASTER_ADDR {host}: {error.strerror}; without this variable it is the first of SLURM_STEP_NODELIST; "
            "allowed is a host or address that all nodes know"
        ) from None


def _count(store: Store, size: int):
    if store.add(f"{ALL_HERE}: count", 1) == size:
        store.set(ALL_HERE, "")


def candidates(environment: Mapping[str, str]) -> list[int]:
    """Ports on which the first rank may announce itself, in the order in which they are tried."""
    reserved = environment.get("SLURM_STEP_RESV_PORTS")  # 12000-12003,12007
    if reserved:
        spans = [entry.split("-") for entry in reserved.split(",")]
        return [port for span in spans for port in range(int(span[0]), int(span[-1]) + 1)]
    seed = int.from_bytes(hashlib.sha256(environment[JOB].encode()).digest()[:8], "big")
    return random.Random(seed).sample(range(FIRST, LAST + 1), CANDIDATES)


@contextlib.contextmanager
def announced(host: str, ports: list[int], job: str, port: int):
    """Body while which this process answers on one of `ports` with the job's name and `port`."""
    for candidate in ports:
        try:
            listener = listen(host, candidate)
            break
        except OSError:
            continue
    else:
        raise RuntimeError(f"none of the ports {ports} is free on {host}: set MASTER_ADDR and MASTER_PORT")
    with listener, answering(listener, f"{job} {port}"):
        yield


@contextlib.contextmanager
def answering(listener: socket.socket, text: str):
    """Body while which a thread of this process answers each connection with a line; the socket stays open."""
    ended = threading.Event()
    thread = threading.Thread(target=_answer, args=(listener, f"{text}\n".encode(), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _answer(listener: socket.socket, answer: bytes, ended: threading.Event):
    listener.settimeout(PAUSE)
    while not ended.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            try:
                connection.settimeout(PATIENCE)
                connection.sendall(answer)
            except OSError:
                continue


def find(host: str, ports: list[int], job: str, deadline: float) -> int:
    """The port of the job's store, asked for until `deadline` (`time.monotonic`). RuntimeError after it."""
    while True:
        for port in ports:
            name, _, found = _ask(host, port).partition(" ")
            if name == job and found.isdigit():
                return int(found)
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the first rank, on {host}, did not answer on any of the ports {ports}; MASTER_ADDR and MASTER_PORT "
                "set others"
            )
        time.sleep(PAUSE)


def _ask(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), PATIENCE) as connection:
            return connection.makefile(encoding="ascii", errors="replace").readline(200).strip()
    except OSError:
        return ""


def listen(host: str, port: int) -> socket.socket:
    """A socket on all addresses of this machine, of the family of a host's."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(("", port), family=family, backlog=1024)


def choose_interface():
    """Lets gloo use the interface from which this node reaches the first rank, unless the user has named one.

    gloo would take the address of the host's own name, which on many machines is a loopback address, so that ranks of
    other nodes cannot connect. Does nothing if all ranks are on this node.
    """
    host, size = os.environ.get("MASTER_ADDR"), os.environ.get("WORLD_SIZE")
    if not host or INTERFACE in os.environ or os.environ.get("LOCAL_WORLD_SIZE", size) == size:
        return
    name = interface_towards(host)
    if name is not None:
        os.environ[INTERFACE] = name


def interface_towards(host: str) -> str | None:
    """The interface from which this machine reaches a host; None for a loopback interface or an unknown host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: chooses the route and sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(own).is_loopback:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return name
    return None


# -- launchers of several nodes --------------------------------------------------------------------------------------


def _address(nodes: argparse.Namespace) -> tuple[str, int, int | None]:
    """(host, port, number of this node) of the launcher's flags; None: the nodes number themselves. UsageError."""
    given = nodes.rdzv_endpoint is not None
    text = nodes.rdzv_endpoint if given else f"{nodes.master_addr}:{nodes.master_port}"
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        flag = f"--rdzv-endpoint {text}" if given else f"--master-port {port}"
        raise UsageError(f"{flag}: allowed is {'HOST:' * given}PORT")
    if given:
        return host, int(port), None
    number = str(nodes.node_rank)
    if not re.fullmatch("[0-9]{1,6}", number) or int(number) >= nodes.nnodes:
        raise UsageError(f"--node-rank {number}: allowed are 0 to {nodes.nnodes - 1}")
    return host, int(port), int(number)


def announcer(nodes: argparse.Namespace) -> socket.socket | None:
    """The socket on which the launcher of the first node announces each start; None on the other nodes.

    The first node is number 0. Without numbers it is the one that has the address, and of several launchers there the
    one that gets the port. UsageError for wrong flags, or a port that is in use.
    """
    host, port, node = _address(nodes)
    try:
        if node is not None:
            return listen(host, port) if node == 0 else None
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=1024)
    except OSError as error:
        if node is None and error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise UsageError(f"{host}:{port}: {error.strerror}; allowed is a free port of the first node") from None


def announced_start(environment: dict[str, str], listener: socket.socket):
    """Context in which the launchers of other nodes find the start of these ranks."""
    return answering(listener, f"{environment[JOB]} {environment[ATTEMPT]} {environment['MASTER_PORT']}")


def next_start(
    ranks: int, nodes: argparse.Namespace | None, announces: socket.socket | None, least: int
) -> tuple[dict[str, str], socket.socket | None]:
    """The environment of this node's ranks in the next start, and the socket of its store on the first node.

    UsageError if the first node announces none in time.

    Args:
        nodes: the launcher's flags; None: there is one node.
        announces: `announcer`.
        least: the start's number, at least.
    """
    size = {"WORLD_SIZE": str(ranks * (nodes.nnodes if nodes else 1)), "LOCAL_WORLD_SIZE": str(ranks)}
    size |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} | ({JOB: nodes.rdzv_id} if nodes else {})
    if nodes is not None and announces is None:
        return size | _joined(nodes, least), None
    host = _address(nodes)[0] if nodes else "127.0.0.1"
    listener = listen(host, 0) if nodes else socket.create_server((host, 0), backlog=ranks)
    port = str(listener.getsockname()[1])
    return size | {"MASTER_ADDR": host, "MASTER_PORT": port, ATTEMPT: str(least), "GROUP_RANK": "0"}, listener


def _joined(nodes: argparse.Namespace, least: int) -> dict[str, str]:
    """The variables of a start in which this node has found a place."""
    (host, port, number), deadline = _address(nodes), time.monotonic() + MEETING
    while True:
        found = re.fullmatch(r"(.*) (\d+) (\d+)", _ask(host, port))
        if found and found[1] == nodes.rdzv_id and int(found[2]) >= least:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                store = connected(host, int(found[3]))
                own = store.add("megarl/nodes", 1) if number is None else number
                if own < nodes.nnodes and store.add(f"megarl/node {own}", 1) == 1:
                    return {"MASTER_ADDR": host, "MASTER_PORT": found[3], ATTEMPT: found[2], "GROUP_RANK": str(own)}
            least = int(found[2]) + 1  # another launcher has this place, perhaps that of a node that was lost
        if time.monotonic() > deadline:
            raise UsageError(f"--nnodes {nodes.nnodes}: no start with a place for this node at {host}:{port}")
        time.sleep(PAUSE)


def connected(host: str, port: int) -> TCPStore:
    """A client of a start's store, without threads."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def has_failed(store: Store) -> bool:
    """Whether the ranks of a node have failed, or the first node is gone."""
    try:
        return store.check([FAILED])
    except RuntimeError:
        return True


def agree(store: Store, environment: dict[str, str], own: tuple[int, bool], signals) -> tuple[int, bool]:
    """(exit status, whether the run ends with it) of the node whose ranks have failed first; 0 when all have ended.

    `own`: of this node; `signals`: with `received`, of which a second one ends the waiting.
    """
    node, nodes = int(environment["GROUP_RANK"]), int(environment["WORLD_SIZE"]) // int(environment["LOCAL_WORLD_SIZE"])
    try:
        if own[0]:
            store.compare_set(FAILED, "", json.dumps([node, *own]))
        store.add("megarl/ended", 1)
        while store.add("megarl/ended", 0) < nodes and not store.check([FAILED]) and len(signals.received) < 2:
            time.sleep(PAUSE)
        first = json.loads(store.get(FAILED)) if store.check([FAILED]) else [node, *own]
        store.add("megarl/left", 1)
        until = time.monotonic() + GRACE
        while node == 0 and store.add("megarl/left", 0) < nodes and time.monotonic() < until:
            time.sleep(PAUSE)  # it serves the store
    except RuntimeError:
        first = [node, *own] if own[0] else [0, 1, False]  # the first node is gone
    if first[0] != node:
        print(f"megarl: the ranks of node {first[0]} ended with status {first[1]}", file=sys.stderr, flush=True)
    return int(first[1]), bool(first[2])
