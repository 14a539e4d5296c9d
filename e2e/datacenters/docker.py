"""Which Docker daemon runs the nodes: the user's where one answers, else a private one that leaves no trace.

The private daemon lives in namespaces of its own (network, mounts, processes) under one process. When that process
ends, however it ends, the kernel takes with it every container, mount, bridge and veth; nothing needs tidying but
files and empty cgroups. A veth pair joins its network to the machine, so that node, Service and pod addresses answer
on the command line as they do inside.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.datacenters import addresses, oci_wrapper
from e2e.datacenters.cache import HERE, Log, cache_root, progress, remove, say
from e2e.datacenters.debian import host_environment, host_packages
from e2e.datacenters.errors import DatacentersError

HOST_LINK = "prfaas0"
"""The machine's end of the veth pair into the private daemon's network."""
DAEMON_LINK = "prfaas0p"
"""The daemon's end."""
SYSCTLS = (
    *("vm.overcommit_memory", "vm.panic_on_oom", "kernel.panic", "kernel.panic_on_oops"),
    *("kernel.keys.root_maxkeys", "kernel.keys.root_maxbytes"),
    *("fs.inotify.max_user_instances", "fs.inotify.max_user_watches"),
)
"""Settings of the whole machine that a kubelet or we change; the private daemon's end puts them back."""
INOTIFY_MINIMUM = {"fs.inotify.max_user_instances": 1024, "fs.inotify.max_user_watches": 262144}


_STARTED: list[subprocess.Popen[bytes]] = []
"""Daemons that this process started: they outlive the call, mostly the process too. Kept so that `poll` reaps them."""


class DockerError(DatacentersError):
    """No usable Docker daemon, or a docker command failed; the message ends with its last lines."""


def state_root() -> Path:
    """Folder of what is running now: `${XDG_STATE_HOME:-~/.local/state}/prfaas`. Gone when nothing is."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "prfaas"


@dataclass(frozen=True)
class Docker:
    """A Docker daemon and how to talk to it."""

    program: Path
    socket: str | None
    """Address as in DOCKER_HOST; None for the user's own default."""
    private: bool
    reason: str
    """Why this daemon, in a few words, for the one line that says so."""

    def environment(self) -> dict[str, str]:
        """Environment for docker, and for kind, which calls docker from PATH."""
        environment = dict(os.environ)
        if self.socket:
            environment["DOCKER_HOST"] = self.socket
            environment.pop("DOCKER_CONTEXT", None)
        if self.private:  # its network has no way out: a proxy meant for the machine would only break the nodes
            for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
                environment.pop(name, None)
                environment.pop(name.lower(), None)
        environment["PATH"] = f"{self.program.parent}:{environment.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"
        return environment

    def command(self, *arguments: str) -> list[str]:
        """Command line of a docker call."""
        return [str(self.program), *arguments]

    def run(
        self, *arguments: str, check: bool = True, timeout: float = 180, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run docker with `text` as its input, and keep what it prints.

        :raises DockerError: it failed, and `check` is set; or it did not end in time.
        """
        shown = " ".join(arguments)[:300]
        try:
            result = subprocess.run(
                self.command(*arguments),
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                input=text or "",
            )
        except subprocess.TimeoutExpired as error:
            raise DockerError(f"docker {shown} did not end in {timeout:g} s") from error
        if check and result.returncode != 0:
            raise DockerError(f"docker {shown} failed: {result.stderr.strip()[-2000:] or result.stdout[-2000:]}")
        return result

    def exec(self, container: str, *arguments: str, check: bool = True, text: str | None = None) -> str:
        """Run a command in a container with `text` as its input; what it printed."""
        return self.run("exec", "-i", container, *arguments, check=check, text=text).stdout

    def running(self, label: str) -> dict[str, bool]:
        """Containers with a label (`key=value`): whether each runs."""
        listed = self.run("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}} {{.State}}").stdout
        return {name: state == "running" for name, state in (line.split() for line in listed.splitlines())}


def users_daemon(environment: Mapping[str, str] | None = None) -> Docker | None:
    """The user's own daemon if there is a client and the daemon answers within five seconds."""
    program = shutil.which("docker", path=(environment or os.environ).get("PATH"))
    if not program:
        return None
    try:
        answer = subprocess.run(
            [program, "version", "--format", "{{.Server.Version}}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = answer.stdout.strip()
    if answer.returncode != 0 or not version:
        return None
    return Docker(Path(program), None, private=False, reason=f"your daemon answers (version {version})")


class PrivateDaemon:
    """The private daemon's life: start, find again, stop, and clean up after."""

    def __init__(self, state: Path | None = None) -> None:
        self.state = (state or state_root()) / "docker"
        self.pid_file = self.state / "pid"
        self.socket = self.state / "docker.sock"
        self.data = cache_root() / "docker"
        # In every hierarchy, above the daemon's containers; of its own name for each user.
        self.cgroup = f"prfaas-{hashlib.sha256(bytes(self.state)).hexdigest()[:8]}"

    def handle(self) -> Docker:
        """How to talk to it, running or not."""
        packages = host_packages()
        program = packages / "usr/bin/docker"
        found = program if program.exists() else Path(shutil.which("docker") or "/usr/bin/docker")
        lacking = ", ".join(sorted(oci_wrapper.missing(Path("/proc/self/status").read_text())))
        wrapper = f", OCI wrapper because this machine lacks {lacking}" if lacking else ""
        return Docker(found, f"unix://{self.socket}", private=True, reason=f"no Docker daemon answers{wrapper}")

    def pid(self) -> int | None:
        """Process that holds the daemon's namespaces, None when it is gone."""
        try:
            pid, started = self.pid_file.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        return int(pid) if start_time(int(pid)) == started else None

    def answers(self) -> bool:
        """Whether it runs and answers."""
        return self.pid() is not None and self.handle().run("version", check=False, timeout=20).returncode == 0

    def start(self, log: Log = say) -> Docker:
        """The running daemon, started if it is not. Left-overs of a killed one are removed first.

        :raises DockerError: not root, or the daemon did not come up (its log is in the message).
        """
        docker = self.handle()
        if self.answers():
            return docker
        if os.geteuid() != 0:
            raise DockerError(
                "no Docker daemon answers, and starting a private one needs root: start Docker, or use sudo"
            )
        self.stop(log)
        self.state.mkdir(parents=True, exist_ok=True)
        self.data.mkdir(parents=True, exist_ok=True)
        (self.state / "before.json").write_text(json.dumps(machine_before()))
        for name, minimum in INOTIFY_MINIMUM.items():
            if int(read_sysctl(name)) < minimum:
                write_sysctl(name, str(minimum))
        with progress("starting a private Docker daemon", log=log):
            self._launch(docker)
            self._join_networks()
        return docker

    def _launch(self, docker: Docker) -> None:
        packages = host_packages()
        environment = host_environment(packages, docker.environment())
        settings = self.state / "daemon.json"
        settings.write_text(json.dumps(self.settings(environment), indent=2))
        reaper = shutil.which("tini", path=environment["PATH"])
        # In its own mount namespace /run is empty: sockets of shims and network namespaces stay in there.
        script = (
            "mount -t proc proc /proc && mount -t tmpfs tmpfs /run && ip link set lo up && "
            f"exec {f'{reaper} -- ' if reaper else ''}dockerd --config-file '{settings}'"
        )
        isolate = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--", "sh", "-c", script]
        with (self.state / "dockerd.log").open("w") as output:
            process = subprocess.Popen(  # kept in _STARTED: a Popen that is dropped while it runs warns
                isolate, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        _STARTED.append(process)
        self.pid_file.write_text(f"{process.pid} {start_time(process.pid)}")
        deadline = time.monotonic() + 60
        while docker.run("version", check=False, timeout=20).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (self.state / "dockerd.log").read_text()[-2000:]
                raise DockerError(f"the private Docker daemon did not come up:\n{tail}")
            time.sleep(0.2)

    def settings(self, environment: Mapping[str, str]) -> dict[str, object]:
        """The daemon's configuration file."""
        runc = shutil.which("runc", path=environment["PATH"])
        settings: dict[str, object] = {
            "hosts": [f"unix://{self.socket}"],
            "data-root": str(self.data),
            "exec-root": "/run/prfaas-docker",
            "pidfile": "/run/prfaas-docker.pid",
            "bridge": "none",
            "storage-driver": "overlay2",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "cgroup-parent": f"/{self.cgroup}",
            "oom-score-adjust": 0,
            "log-level": "warn",
        }
        if oci_wrapper.missing(Path("/proc/self/status").read_text()):
            wrapper = self.state / "oci-wrapper"
            script = self.state / "oci_wrapper.py"
            shutil.copy(HERE / "oci_wrapper.py", script)
            wrapper.write_text(f'#!/bin/sh\nPRFAAS_RUNC={runc} exec {sys.executable} -IS {script} "$@"\n')
            wrapper.chmod(0o755)
            settings |= {"default-runtime": "reduced", "runtimes": {"reduced": {"path": str(wrapper)}}}
        return settings

    def _join_networks(self) -> None:
        """A veth pair between the machine and the daemon's network, and the routes on both ends."""
        pid = self.pid()
        within = ["nsenter", "--target", str(pid), "--net"]
        packages = host_packages()
        environment = host_environment(packages)
        refuse_taken_range(environment)
        host, daemon = addresses.TRANSIT.hosts()
        peer = DAEMON_LINK
        length = addresses.TRANSIT.prefixlen
        for command in (
            ["ip", "link", "add", HOST_LINK, "type", "veth", "peer", "name", peer, "netns", str(pid)],
            ["ip", "address", "add", f"{host}/{length}", "dev", HOST_LINK],
            ["ip", "link", "set", HOST_LINK, "up"],
            [*within, "ip", "address", "add", f"{daemon}/{length}", "dev", peer],
            [*within, "ip", "link", "set", peer, "up"],
            ["ip", "route", "replace", str(addresses.EVERYTHING), "via", str(daemon), "dev", HOST_LINK],
        ):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise DockerError(f"{' '.join(command)} failed: {done.stderr.strip()}")

    def route(self, network: object, via: object) -> None:
        """Let the machine reach a range by a container's address. Needs a Docker network to be there already."""
        within = ["nsenter", "--target", str(self.pid()), "--net"]
        environment = host_environment(host_packages())
        rule = ["DOCKER-USER", "-i", DAEMON_LINK, "-j", "ACCEPT"]
        if subprocess.run(
            [*within, "iptables", "-C", *rule], env=environment, capture_output=True, check=False
        ).returncode:
            subprocess.run([*within, "iptables", "-I", *rule], env=environment, capture_output=True, check=True)
        route = ["ip", "route", "replace", str(network), "via", str(via)]
        subprocess.run([*within, *route], env=environment, check=True, capture_output=True)

    def stop(self, log: Log = say) -> None:
        """End the daemon with everything in its namespaces; remove what outlives processes: files, empty cgroups."""
        pid = self.pid()
        if pid:
            with progress("stopping the private Docker daemon", log=log):
                self._end(pid)
        _STARTED[:] = [process for process in _STARTED if process.poll() is None]
        environment = host_environment(host_packages(log))
        subprocess.run(["ip", "link", "delete", HOST_LINK], env=environment, capture_output=True, check=False)
        remove_cgroups(self.cgroup)
        before = self.state / "before.json"
        if before.exists():
            restore_machine(json.loads(before.read_text()))
        remove(self.state)
        if (self.data / "containers").exists() and any((self.data / "containers").iterdir()):
            remove(self.data)  # killed under way: the store may be torn, and the image is quickly loaded again

    def _end(self, pid: int) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end by itself meanwhile
            # The namespace's first process is asked, so that Docker writes its state down.
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), signal.SIGTERM)
        for seconds, last_resort in ((20.0, signal.SIGKILL), (20.0, None)):
            deadline = time.monotonic() + seconds
            while start_time(pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            if last_resort and start_time(pid):
                os.kill(pid, last_resort)  # takes its child along, and that the whole namespace


def start_time(pid: int) -> str:
    """Start time of a live process in the kernel's ticks, empty when there is none: tells a process from its number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def refuse_taken_range(environment: Mapping[str, str]) -> None:
    """Stop before a route of ours would hide a network that the machine already has.

    :raises DockerError: the machine has a route into our range.
    """
    listed = subprocess.run(
        ["ip", "-json", "-4", "route"], env=dict(environment), capture_output=True, text=True, check=True
    )
    for route in json.loads(listed.stdout or "[]"):
        if route["dst"] != "default" and addresses.overlaps(route["dst"]) and route.get("dev") != HOST_LINK:
            raise DockerError(
                f"this machine has a network {route['dst']} on {route.get('dev')}; ours need {addresses.EVERYTHING}"
            )


def machine_before() -> dict[str, str]:
    """What the datacenters may change on the machine as a whole."""
    return {name: read_sysctl(name) for name in SYSCTLS} | {"/lib/modules": str(Path("/lib/modules").exists())}


def restore_machine(before: Mapping[str, str]) -> None:
    """Put back what `machine_before` noted."""
    for name, value in before.items():
        if name.startswith("/"):
            if value == "False" and Path(name).is_dir() and not any(Path(name).iterdir()):
                Path(name).rmdir()
        elif read_sysctl(name) != value:
            write_sysctl(name, value)


def read_sysctl(name: str) -> str:
    """A kernel setting's value."""
    return Path("/proc/sys", name.replace(".", "/")).read_text().strip()


def write_sysctl(name: str, value: str) -> None:
    """Set a kernel setting."""
    Path("/proc/sys", name.replace(".", "/")).write_text(value)


def remove_cgroups(name: str) -> None:
    """Remove the cgroups of a name in every hierarchy, once the last processes in them are gone."""
    for top in [Path("/sys/fs/cgroup") / name, *Path("/sys/fs/cgroup").glob(f"*/{name}")]:
        for folder, _, _ in os.walk(top, topdown=False):
            for attempt in itertools.count():
                try:
                    Path(folder).rmdir()
                    break
                except OSError:
                    if attempt == 50:
                        raise
                    time.sleep(0.1)
