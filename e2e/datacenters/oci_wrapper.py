#!/usr/bin/python3 -IS
"""OCI runtime that asks runc for no more than this machine may give.

Docker's privileged containers ask for every capability. Where the machine itself runs with fewer (its bounding set
lacks CAP_SYS_RESOURCE, say), runc refuses. This wrapper takes what is outside our own bounding set, limits and
out-of-memory scores included, out of the container's settings and then becomes runc. Standard library only: it starts
with every container and every `docker exec`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER"),
    *("SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP"),
    *("MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF"),
    "CHECKPOINT_RESTORE",
)
"""Linux capabilities in the order of their bits (linux/capability.h)."""


def granted(status: str) -> set[str]:
    """Names of the capabilities in the bounding set that a text of /proc/<pid>/status states."""
    bits = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapBnd:"))
    return {f"CAP_{name}" for bit, name in enumerate(CAPABILITIES) if bits >> bit & 1}


def missing(status: str) -> set[str]:
    """Names of the capabilities that the bounding set lacks: the wrapper is needed when there are any."""
    return {f"CAP_{name}" for name in CAPABILITIES} - granted(status)


def reduce(process: dict[str, Any], allowed: set[str], hard_limit: Callable[[str], int | None]) -> None:
    """Take out of an OCI process what may not be granted. `hard_limit(name)` is our own limit or None for no limit."""
    for kind, names in (process.get("capabilities") or {}).items():
        process["capabilities"][kind] = [name for name in names if name in allowed]
    if "CAP_SYS_RESOURCE" in allowed:
        return
    if (process.get("oomScoreAdj") or 0) < 0:
        process["oomScoreAdj"] = 0
    for entry in process.get("rlimits") or []:
        limit = hard_limit(entry["type"])
        if limit is not None:
            entry["hard"], entry["soft"] = min(entry["hard"], limit), min(entry["soft"], limit)


def settings_file(arguments: Sequence[str]) -> tuple[str, bool] | None:
    """File that a runc command line takes its process from, and whether it is a bundle's; None for other commands."""

    def value(*flags: str) -> str | None:
        for position, argument in enumerate(arguments):
            if argument in flags:
                return arguments[position + 1]
            for flag in flags:
                if argument.startswith(f"{flag}="):
                    return argument.removeprefix(f"{flag}=")
        return None

    if "exec" in arguments:
        file = value("--process", "-p")
        return (file, False) if file else None
    if "create" in arguments or "run" in arguments:
        return os.path.join(value("--bundle", "-b") or ".", "config.json"), True
    return None


def our_limit(name: str) -> int | None:
    """Our own hard limit of a resource (RLIMIT_...), None when there is none or it is unknown here."""
    number = getattr(resource, name, None)
    hard = resource.RLIM_INFINITY if number is None else resource.getrlimit(number)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def main(arguments: Sequence[str]) -> None:
    """Edit the settings, then become runc."""
    found = settings_file(arguments)
    if found:
        path, whole_bundle = found
        with open(path) as handle:
            document = json.load(handle)
        with open("/proc/self/status") as handle:
            allowed = granted(handle.read())
        reduce(document["process"] if whole_bundle else document, allowed, our_limit)
        with open(path, "w") as handle:
            json.dump(document, handle)
    runc = os.environ.get("PRFAAS_RUNC") or "/usr/sbin/runc"
    os.execv(runc, [runc, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
