"""A second network interface's address, for an engine that must be told which one to offer its KV cache at.

Kubernetes hands a container the pod's own address and no other: a few lines of Python in front of the engine ask the
kernel, put the address into the environment and become the engine. Every image here has `python3`.
"""

from __future__ import annotations

from collections.abc import Sequence

SCRIPT = """\
import fcntl, os, socket, struct, sys
interface, variables, *words = sys.argv[1:]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
    try:
        answer = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", interface.encode()))
    except OSError as error:
        sys.exit(f"the pod has no interface {interface} with an IPv4 address: {error}; see spec.network")
address = socket.inet_ntoa(answer[20:24])
for variable in variables.split(","):
    os.environ.setdefault(variable, address)
os.execvp(words[0], words)
"""
"""0x8915 is SIOCGIFADDR; in the struct ifreq that it fills, the IPv4 address starts at byte 20."""


_PREFIX = ("python3", "-c", SCRIPT)


def with_address_of(interface: str, variables: Sequence[str], command: Sequence[str]) -> list[str]:
    """`command` with the address of `interface` in the variables that are not set already."""
    return [*_PREFIX, interface, ",".join(variables), *command]


def engines_own(command: Sequence[str]) -> list[str]:
    """The words of a container's command that are the engine's: without what asks for an address first."""
    return list(command[len(_PREFIX) + 2 :] if tuple(command[: len(_PREFIX)]) == _PREFIX else command)
