"""Which network interface this worker talks over.

[Note: interfaces]
Left to itself, gloo takes the address that the host's name stands for. That is a loopback address on hosts whose own
name is in /etc/hosts as 127.0.1.1, as Debian writes it, and on those whose name nobody knows: then the workers of two
hosts never meet, and the error speaks of refused connections. Where worker 0 is known, the interface that leads to it
is a better choice, because this worker has to reach it anyway.
"""

import fcntl
import os
import socket
import struct
from contextlib import suppress

from sar.errors import ConfigError

_SIOCGIFADDR = 0x8915
_ELSEWHERE = "192.0.2.1"  # reserved for documentation; connecting a datagram socket sends nothing


def choose_interface(master: str | None) -> None:
    """Name the interface to gloo and NCCL: the user's; else loopback if all are on this host; else see the note."""
    name = os.environ.get("SAR_SOCKET_NAME")
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    elif master is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = _with_address("127.0.0.1", _addresses()) if _on_one_host(master) else _leading_to(master)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def own_address() -> str:
    """The address of SAR_SOCKET_NAME's interface; else of the one that leads to other hosts; else loopback."""
    name = os.environ.get("SAR_SOCKET_NAME")
    if name is None:
        return _local_end(_ELSEWHERE) or "127.0.0.1"
    try:
        return _address_of(name)
    except OSError as error:
        raise ConfigError(f"SAR_SOCKET_NAME is {name!r}, but there is no such IPv4 interface.") from error


def _on_one_host(master: str) -> bool:
    """Whether all workers are on this host, as far as one can tell: by worker 0's address, or by torchrun."""
    sizes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return master.startswith("127.") or master in ("localhost", "::1") or (sizes[0] is not None and len({*sizes}) == 1)


def _leading_to(host: str) -> str | None:
    """The interface to a host; if that is this one by a name for its loopback, the interface to other hosts."""
    address, addresses = _local_end(host), _addresses()
    if address is not None and address.startswith("127."):
        outside = [name for name, own in addresses.items() if not own.startswith("127.")]
        return _with_address(_local_end(_ELSEWHERE), addresses) or next(iter(outside), None)
    return _with_address(address, addresses)


def _local_end(host: str) -> str | None:
    """The address from which this host would send to another; None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _with_address(address: str | None, addresses: dict[str, str]) -> str | None:
    return next((name for name, own in addresses.items() if own == address), None)


def _addresses() -> dict[str, str]:
    """The IPv4 addresses of this host's interfaces, by their names."""
    addresses = {}
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # an interface without one
            addresses[name] = _address_of(name)
    return addresses


def _address_of(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
