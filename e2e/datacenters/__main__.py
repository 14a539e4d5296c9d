"""`python -m e2e.datacenters`: the command."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e.datacenters.build import build_all, tool
from e2e.datacenters.cache import say
from e2e.datacenters.datacenters import Datacenters
from e2e.datacenters.docker import users_daemon
from e2e.datacenters.errors import DatacentersError, in_words
from e2e.datacenters.nodeimage import node_archive
from e2e.datacenters.topology import DEFAULT_TOPOLOGY, load_topology


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m e2e.datacenters", description="Emulated datacenters: kind clusters joined by lines."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="bring the datacenters up; nothing is done where they are up")
    up.add_argument("--topology", type=Path, default=DEFAULT_TOPOLOGY, metavar="FILE", help="default: %(default)s")
    commands.add_parser("down", help="take everything down and leave no trace")
    status = commands.add_parser("status", help="what is up")
    status.add_argument("-o", "--output", choices=["json"], help="print JSON")
    kubeconfig = commands.add_parser("kubeconfig", help="print the path of a datacenter's kubeconfig")
    kubeconfig.add_argument("name", metavar="NAME")
    kubectl = commands.add_parser("kubectl", help="run kubectl against a datacenter: one that fits, from PATH or built")
    kubectl.add_argument("name", metavar="NAME")
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="kubectl's own")
    line = commands.add_parser("line", help="change a line, or show it and what crossed it")
    line.add_argument("one", metavar="A")
    line.add_argument("other", metavar="B")
    change = line.add_mutually_exclusive_group()
    change.add_argument("--rate", metavar="400mbit", help="capacity of each direction")
    change.add_argument("--down", action="store_true", help="cut it: packets vanish")
    change.add_argument("--up", action="store_true", help="join it again")
    node = commands.add_parser("node", help="stop, kill or start a node")
    node.add_argument("name", metavar="NAME")
    node.add_argument("action", choices=["stop", "start", "kill"])
    load = commands.add_parser("load", help="load an image archive into every node")
    load.add_argument("archive", type=Path, metavar="IMAGE-ARCHIVE")
    commands.add_parser("build", help="build what `up` needs, as far as it is missing")
    commands.add_parser("clean-cache", help="remove everything that was built or fetched")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Run one command."""
    match arguments.command:
        case "up":
            Datacenters(load_topology(arguments.topology)).up()
        case "down":
            Datacenters().down()
        case "build":
            build_all()
            if users_daemon() is None:
                node_archive()
        case "clean-cache":
            Datacenters().clean_cache()
        case "status":
            status = Datacenters.running().status()
            print(json.dumps(status, indent=2) if arguments.output else as_text(status))
        case "kubeconfig":
            print(Datacenters.running().kubeconfig(arguments.name))
        case "kubectl":
            kubeconfig = Datacenters.running().kubeconfig(arguments.name)
            kubectl = str(tool("kubectl"))
            os.execv(kubectl, [kubectl, "--kubeconfig", str(kubeconfig), *arguments.arguments])
        case "line":
            change_line(Datacenters.running(), arguments)
        case "node":
            Datacenters.running().node(arguments.name, arguments.action)
        case "load":
            Datacenters.running().load(arguments.archive)


def change_line(datacenters: Datacenters, arguments: argparse.Namespace) -> None:
    """Change a line as asked, then show it."""
    one, other = arguments.one, arguments.other
    up = True if arguments.up else False if arguments.down else None
    datacenters.set_line(one, other, rate=arguments.rate, up=up)
    state = datacenters.line(one, other)
    print(f"{one} - {other}: {state.bits_per_second / 1e6:g} Mbit/s each way, {'up' if state.up else 'down'}")
    for direction, traffic in datacenters.line_counters(one, other).items():
        print(f"  {direction}: {traffic.kv_bytes} bytes of KV cache, {traffic.other_bytes} bytes of other traffic")


def as_text(status: dict[str, Any]) -> str:
    """The status for people."""
    lines = []
    for datacenter in status["datacenters"]:
        lines.append(f"{datacenter['name']}: {'answers' if datacenter['answers'] else 'does not answer'}")
        running = datacenter["containers"]
        for node in datacenter["nodes"]:
            gpus = f", {node['gpus']} x {node['accelerator']}" if node["accelerator"] else ""
            state = "Ready" if node["ready"] else "not Ready" if running.get(node["name"]) else "stopped"
            lines.append(f"  {node['name']}: {state}, {node['address']}{gpus}")
    for line in status["lines"]:
        rate = f"{line['bits_per_second'] / 1e6:g} Mbit/s each way"
        lines.append(f"line {' - '.join(line['between'])}: {rate}, {'up' if line['up'] else 'down'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 with the reason on stderr, or 130 when interrupted."""
    parsed = build_parser().parse_args(arguments)
    for interrupt in (signal.SIGTERM, signal.SIGINT):  # whoever started us may have had the latter ignored
        signal.signal(interrupt, signal.default_int_handler)
    try:
        with in_words():
            run(parsed)
    except DatacentersError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
