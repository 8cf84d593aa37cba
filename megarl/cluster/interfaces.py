"""The network interface over which gloo connects the ranks of several nodes."""

import ipaddress
import os
import socket

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface():
    """Lets gloo use the interface from which this node reaches the first rank, unless the user has named one.

    gloo would take the address of the host's own name, which on many machines is a loopback address, so that ranks of
    other nodes cannot connect. Does nothing if all ranks are on this node.
    """
    host, size = os.environ.get("MASTER_ADDR"), os.environ.get("WORLD_SIZE")
    if not host or VARIABLE in os.environ or os.environ.get("LOCAL_WORLD_SIZE", size) == size:
        return
    name = interface_towards(host)
    if name is not None:
        os.environ[VARIABLE] = name


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
