"""Where the ranks of several nodes meet: the port of a Slurm step's store, and the network interface of gloo.

The first rank serves torch's store on any free port. It announces this port on the first free one of a few ports that
all ranks compute from job and step; the others ask these until one answers with the name of their job. So another
program on one of these ports does no harm. Ports that Slurm has reserved for the step (`srun --resv-ports`) are used
instead if there are any.
"""

import hashlib
import ipaddress
import os
import random
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import contextmanager
from datetime import timedelta

import psutil
from torch.distributed import Store, TCPStore

from megarl.cluster.slurm import JOB
from megarl.errors import UsageError

FIRST, LAST = 20000, 32767  # below the ports that Linux gives to outgoing connections
CANDIDATES = 16
PATIENCE = 5.0  # seconds for one connection
PAUSE = 0.2  # seconds between two rounds of questions
ALL_HERE = "megarl/all ranks have met"
INTERFACE = "GLOO_SOCKET_IFNAME"


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
    listener = _listen(host, 0)
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


@contextmanager
def announced(host: str, ports: list[int], job: str, port: int):
    """Body while which this process answers on one of `ports` with the job's name and `port`."""
    for candidate in ports:
        try:
            listener = _listen(host, candidate)
            break
        except OSError:
            continue
    else:
        raise RuntimeError(f"none of the ports {ports} is free on {host}: set MASTER_ADDR and MASTER_PORT")
    thread = threading.Thread(target=_answer, args=(listener, f"{job} {port}\n".encode()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        thread.join()
        listener.close()


def _answer(listener: socket.socket, answer: bytes):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
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


def _listen(host: str, port: int) -> socket.socket:
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
