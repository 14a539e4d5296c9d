"""Command lines and settings of the paths that depend on what a machine has: its own Docker, a registry, kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.datacenters import addresses, border, build, datacenters, docker, kind
from e2e.datacenters.cache import versions
from e2e.datacenters.cluster import Cluster
from e2e.datacenters.datacenters import DatacenterError, Datacenters
from e2e.datacenters.docker import Docker, DockerError, users_daemon
from e2e.datacenters.nodeimage import image_name
from e2e.datacenters.topology import load_topology

ROOT = Path(__file__).parents[2]
STOCK = str(versions()["kind"]["image"])


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


class RecordedDocker(Docker):
    """A user's Docker daemon that answers from a table and keeps what it was asked."""

    asked: list[list[str]]
    answers: dict[str, tuple[int, str]]

    def run(
        self, *arguments: str, check: bool = True, timeout: float = 180, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        self.asked.append(list(arguments))
        status, out = self.answers.get(" ".join(arguments[:2]), (0, ""))
        if check and status:
            raise DockerError(out)
        return subprocess.CompletedProcess(list(arguments), status, out, "")


def recorded(**answers: tuple[int, str]) -> RecordedDocker:
    made = RecordedDocker(Path("/usr/bin/docker"), None, private=False, reason="your daemon answers (version 28.0)")
    object.__setattr__(made, "asked", [])
    object.__setattr__(made, "answers", {key.replace("_", " "): value for key, value in answers.items()})
    return made


def west(engine: Docker) -> Cluster:
    topology = load_topology()
    return Cluster(engine, topology, topology.datacenters[1], docker.state_root(), lambda _: None)


@pytest.fixture
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_users_daemon_that_answers_is_taken(tmp_path: Path) -> None:
    program(tmp_path, "docker", f'echo "$@" > {tmp_path}/asked; echo 28.0.1')
    found = users_daemon({"PATH": f"{tmp_path}:/bin"})
    assert found is not None
    assert (found.program, found.private, found.socket) == (tmp_path / "docker", False, None)
    assert found.reason == "your daemon answers (version 28.0.1)"
    assert (tmp_path / "asked").read_text().strip() == "version --format {{.Server.Version}}"


@pytest.mark.parametrize("script", ["echo 'Cannot connect to the Docker daemon' >&2; exit 1", "exit 0"])
def test_a_client_without_a_daemon_is_not(tmp_path: Path, script: str) -> None:
    program(tmp_path, "docker", script)
    assert users_daemon({"PATH": f"{tmp_path}:/bin"}) is None
    assert users_daemon({"PATH": str(tmp_path / "nowhere")}) is None


def test_a_users_daemon_keeps_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@host")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    own = Docker(Path("/opt/bin/docker"), None, private=False, reason="")
    assert own.environment()["DOCKER_HOST"] == "ssh://me@host"
    assert own.environment()["HTTPS_PROXY"] == "http://proxy:3128"
    assert own.environment()["PATH"].startswith("/opt/bin:")  # kind calls docker from PATH
    private = Docker(Path("/opt/bin/docker"), "unix:///s/docker.sock", private=True, reason="")
    assert private.environment()["DOCKER_HOST"] == "unix:///s/docker.sock"
    assert "HTTPS_PROXY" not in private.environment()


def test_the_stock_node_image_is_pulled_where_a_registry_is_reachable(own_folders: Path) -> None:
    said: list[str] = []
    engine = recorded(image_inspect=(1, ""))
    assert Datacenters(log=said.append)._node_image(engine) == STOCK
    assert engine.asked == [["image", "inspect", STOCK], ["pull", "--quiet", STOCK]]
    assert said == [f"node image: {STOCK.partition('@')[0]} (a registry is reachable)"]


def test_the_stock_node_image_is_not_pulled_twice(own_folders: Path) -> None:
    engine = recorded()
    assert Datacenters(log=lambda _: None)._node_image(engine) == STOCK
    assert engine.asked == [["image", "inspect", STOCK]]


def test_our_own_node_image_is_loaded_where_no_registry_is_reachable(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datacenters, "node_archive", lambda log: Path("/cache/image.tar"))
    said: list[str] = []
    engine = recorded(image_inspect=(1, ""))
    engine.answers["pull --quiet"] = (1, "no route to host")
    engine.answers["image ls"] = (0, f"{image_name()}\nlocalhost/prfaas-node:old\n")
    name = Datacenters(log=said.append)._node_image(engine)
    assert name.startswith("localhost/prfaas-node:")
    assert engine.asked[2:4] == [["image", "inspect", name], ["load", "--input", "/cache/image.tar"]]
    assert [asked for asked in engine.asked[4:] if asked[1] == "rm"] == [["image", "rm", "localhost/prfaas-node:old"]]
    assert said[-1] == f"node image: our own build ({STOCK.partition('@')[0]} cannot be pulled)"


def test_kind_is_called_with_the_datacenters_network_and_a_configuration(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        f'echo "$KIND_EXPERIMENTAL_DOCKER_NETWORK $@" >> {own_folders}/asked\n'
        'case "$1 $2" in "version -q") echo 0.33.0;; "create cluster") : > "$6";; esac'
    )
    program(own_folders / "bin", "kind", script)
    monkeypatch.setenv("PATH", f"{own_folders / 'bin'}:{os.environ['PATH']}")
    build.from_path.cache_clear()
    try:
        west(recorded(network_inspect=(1, ""))).create(STOCK)
    finally:
        build.from_path.cache_clear()
    work = own_folders / "state" / "prfaas" / "kind"
    assert (own_folders / "asked").read_text().splitlines()[1:] == [
        f"prfaas-west delete cluster --name prfaas-west --kubeconfig {work}/west.partial",
        f"prfaas-west create cluster --config {work}/west.yaml --kubeconfig {work}/west.partial --wait 0s --retain",
    ]
    assert (work / "west.kubeconfig").exists()
    settings = yaml.safe_load((work / "west.yaml").read_text())
    assert {node["image"] for node in settings["nodes"]} == {STOCK}


def test_a_cluster_that_kind_cannot_make_is_not_taken_for_made(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'case "$1 $2" in "version -q") echo 0.33.0;; "create cluster") echo out of memory; exit 1;; esac'
    program(own_folders / "bin", "kind", script)
    monkeypatch.setenv("PATH", f"{own_folders / 'bin'}:{os.environ['PATH']}")
    build.from_path.cache_clear()
    try:
        with pytest.raises(DatacenterError, match=r"kind could not create west \(log: .*west.log\):\nout of memory"):
            west(recorded()).create(STOCK)
    finally:
        build.from_path.cache_clear()
    assert not (own_folders / "state/prfaas/kind/west.kubeconfig").exists()


def test_a_datacenters_network_has_the_planned_range(own_folders: Path) -> None:
    block = addresses.block(1)
    assert kind.network_command("prfaas-west", block.nodes, block.bridge) == [
        *("network", "create", "--driver", "bridge", "--label", "prfaas-network=prfaas-west"),
        *("--subnet", "198.18.16.0/24", "--gateway", "198.18.16.1", "prfaas-west"),
    ]


def test_kinds_configuration() -> None:
    topology = load_topology()
    west = topology.datacenters[1]
    settings: dict[str, Any] = yaml.safe_load(kind.configuration(west, addresses.block(1), STOCK, reduced=False))
    assert settings["name"] == "prfaas-west"
    assert settings["networking"] == {
        "disableDefaultCNI": True,
        "kubeProxyMode": "nftables",
        "podSubnet": "198.18.24.0/21",
        "serviceSubnet": "198.18.20.0/22",
    }
    assert [node["role"] for node in settings["nodes"]] == ["control-plane", "worker", "worker"]
    assert settings["nodes"][1]["labels"] == {"prfaas.io/accelerator": "H20"}
    for node in settings["nodes"]:
        (mount,) = node["extraMounts"]
        assert mount["containerPath"] in settings["containerdConfigPatches"][0]
        assert Path(mount["hostPath"]).is_file()
    assert "restrict_oom_score_adj = false" in settings["containerdConfigPatches"][0]
    assert "restrict_oom_score_adj = true" in kind.configuration(west, addresses.block(1), STOCK, reduced=True)
    kinds = [yaml.safe_load(patch)["kind"] for patch in settings["kubeadmConfigPatches"]]
    assert kinds == ["ClusterConfiguration", "KubeletConfiguration"]


def test_node_names_are_kinds() -> None:
    topology = load_topology()
    assert kind.node_names(topology.datacenters[0]) == ["prfaas-east-control-plane", "prfaas-east-worker"]
    assert kind.node_names(topology.datacenters[1])[1:] == ["prfaas-west-worker", "prfaas-west-worker2"]


def test_a_border_router_forwards_and_may_do_no_more() -> None:
    assert border.run_command("east", addresses.block(0).border, STOCK) == [
        *("run", "--detach", "--name", "prfaas-east-border", "--hostname", "prfaas-east-border"),
        *("--label", "prfaas.io/border=east", "--network", "prfaas-east", "--ip", "198.18.0.254"),
        *("--cap-add", "NET_ADMIN", "--sysctl", "net.ipv4.ip_forward=1"),
        *("--sysctl", "net.ipv4.conf.all.send_redirects=0", "--entrypoint", "sleep", STOCK, "infinity"),
    ]


def test_both_ends_of_a_line_are_joined_shaped_and_counted() -> None:
    ends = {"198.18.0.254": "eth0", "198.19.0.2": "eth1", "198.19.0.3": "eth1"}
    listed = json.dumps([{"ifname": name, "addr_info": [{"local": ip}]} for ip, name in ends.items()])
    engine = recorded(network_inspect=(1, ""))

    def run(*arguments: str, check: bool = True, timeout: float = 180, text: str | None = None) -> Any:
        engine.asked.append([*arguments, text] if text else list(arguments))
        connected = any(asked[:2] == ["network", "connect"] and asked[5] == arguments[2] for asked in engine.asked[:-1])
        out = (listed if connected else "[]") if "address" in arguments else ""
        return subprocess.CompletedProcess([], 1 if arguments[:2] == ("network", "inspect") else 0, out, "")

    object.__setattr__(engine, "run", run)
    border.connect(engine, load_topology(), 0)
    changes = [
        asked for asked in engine.asked if "inspect" not in asked and "-json" not in asked and "show" not in asked
    ]
    line = "prfaas-line-east-west"
    assert changes[0][:2] == ["network", "create"]
    assert changes[0][-5:] == ["--subnet", "198.19.0.0/29", "--gateway", "198.19.0.1", line]
    assert changes[1] == ["network", "connect", "--ip", "198.19.0.2", line, "prfaas-east-border"]
    assert [change[3] for change in changes[2:4]] == ["nft", "tc"]
    assert changes[4] == ["network", "connect", "--ip", "198.19.0.3", line, "prfaas-west-border"]
    assert [change[3] for change in changes[5:]] == ["nft", "tc"]


def test_shaping_commands() -> None:
    assert border.shaping("add", "eth1", "400mbit").splitlines() == [
        "qdisc add dev eth1 root handle 1: htb default 10",
        "class add dev eth1 parent 1: classid 1:10 htb rate 400000000bit ceil 400000000bit "
        "burst 100000 cburst 100000 quantum 65536",
        "qdisc replace dev eth1 parent 1:10 handle 10: bfifo limit 2500000",
    ]
    assert border.shaping("change", "eth1", "1mbit").splitlines() == [
        "class change dev eth1 parent 1: classid 1:10 htb rate 1000000bit ceil 1000000bit "
        "burst 16000 cburst 16000 quantum 65536",
        "qdisc replace dev eth1 parent 1:10 handle 10: bfifo limit 256000",
    ]


def test_routes_of_a_border_router_lead_over_lines_or_nowhere() -> None:
    pods = {"n": ("198.18.0.3", "198.18.9.0/24")}
    assert border.routes(load_topology(), "east", pods).splitlines() == [
        "route replace 198.18.9.0/24 via 198.18.0.3",
        "route replace unreachable 198.18.0.0/16",
        "route replace unreachable 198.18.8.0/21",
        "route replace 198.18.16.0/20 via 198.19.0.3",
    ]


def test_routes_of_a_node_lead_to_its_siblings_and_the_border() -> None:
    pods = {"a": ("198.18.0.2", "198.18.8.0/24"), "b": ("198.18.0.3", "198.18.9.0/24")}
    assert border.node_routes(load_topology(), "east", "a", pods).splitlines() == [
        "route replace 198.18.9.0/24 via 198.18.0.3",
        "route replace 198.18.0.0/16 via 198.18.0.254",
    ]


def test_headers_are_not_kv_bytes() -> None:
    assert border.Traffic(kv_bytes=20_020_340, kv_packets=391, other_bytes=0, other_packets=0).kv_payload == 20_000_008


def test_a_range_that_the_machine_has_already_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    routes = [{"dst": "default", "dev": "eth0"}, {"dst": "198.18.5.0/24", "dev": "tun0"}]
    program(tmp_path, "ip", f"echo '{json.dumps(routes)}'")
    with pytest.raises(DockerError, match=r"this machine has a network 198.18.5.0/24 on tun0; ours need 198.18.0.0/15"):
        docker.refuse_taken_range({"PATH": f"{tmp_path}:/bin"})


def test_kubectl_is_called_with_the_datacenters_kubeconfig(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = 'if [ "$1 $2" = "version --client" ]; then echo "Client Version: v1.37.2"; exit; fi'
    kubectl = program(own_folders / "bin", "kubectl", f'{fitting}\nprintf "%s\\n" "$@"; cat; exit 3')
    state = own_folders / "state" / "prfaas"
    state.mkdir(parents=True)
    (state / "topology.json").write_text(load_topology().model_dump_json(by_alias=True))
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")
    command = [sys.executable, "-m", "e2e.datacenters", "kubectl"]
    asked = ["-n", "a b", "exec", "pod", "--", "ls", "-l"]
    done = subprocess.run([*command, "west", *asked], capture_output=True, text=True, input="in", check=False, cwd=ROOT)
    assert done.stdout.splitlines() == ["--kubeconfig", f"{state}/kubeconfig/west.yaml", *asked, "in"]
    assert done.returncode == 3
    done = subprocess.run([*command, "north", "get", "pods"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "error: there is no datacenter 'north': name one of east, west\n")


def test_nothing_up_is_told_with_the_remedy(own_folders: Path) -> None:
    with pytest.raises(DatacenterError, match=r"no datacenters are up: run `python -m e2e.datacenters up`"):
        Datacenters.running()


def test_a_daemon_that_is_gone_is_told_with_the_remedy(own_folders: Path) -> None:
    state = own_folders / "state" / "prfaas"
    state.mkdir(parents=True)
    (state / "docker.json").write_text('{"private": true}')
    with pytest.raises(DatacenterError, match="the private Docker daemon is gone: `up` makes the datacenters anew"):
        Datacenters().status()


def test_the_cache_is_not_cleaned_under_datacenters_that_are_up(own_folders: Path) -> None:
    (own_folders / "cache" / "prfaas").mkdir(parents=True)
    (own_folders / "state" / "prfaas").mkdir(parents=True)
    with pytest.raises(DatacenterError, match=r"down` first"):
        Datacenters().clean_cache()
    (own_folders / "state" / "prfaas").rmdir()
    Datacenters().clean_cache()
    assert not (own_folders / "cache" / "prfaas").exists()
