"""What a person gets wrong on the command line is told in one line, without a traceback."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from prfaas.cli.arguments import users_kubeconfig
from prfaas.cli.main import main

OPERATOR = ("operator", "--cluster-id", "east", "--namespace", "n", "--image", "i")
SERVE = ("router", "serve", "--namespace", "n", "--cluster", "c")
OFFER = ("link", "offer", "--peer", "west")
CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "here",
    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    "clusters": [{"name": "here", "cluster": {"server": "https://127.0.0.1:6443"}}],
    "users": [{"name": "me", "user": {"token": "t"}}],
}


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A process sets up its log; here it must not outlive the test."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*OPERATOR, "--port", "80000"), "argument --port: '80000' is no port: give a number from 1 to 65535"),
        ((*OPERATOR, "--port", "0"), "argument --port: '0' is no port"),
        ((*OPERATOR, "--resync", "nan"), "argument --resync: 'nan' is no time: give a number of seconds above 0"),
        ((*OPERATOR, "--kubeconfig", "/absent"), "argument --kubeconfig: /absent: there is no such file"),
        (
            ("operator", "--cluster-id", "East", "--namespace", "n", "--image", "i"),
            "argument --cluster-id: 'East' is no name",
        ),
        (("render", "-f", "x", "--cluster-id", "a_b"), "argument --cluster-id: 'a_b' is no name: give up to 63 of a-z"),
        (("render", "-f", "x", "-n", "-"), "argument -n/--namespace: '-' is no name"),
        ((*SERVE, "--kubeconfig", "/"), "argument --kubeconfig: /: is no file"),
        ((*SERVE, "--admin-port", "-1"), "argument --admin-port: '-1' is no port"),
        ((*SERVE, "--prefill-timeout", "0"), "argument --prefill-timeout: '0' is no time"),
        ((*SERVE, "--max-body-bytes", "0"), "argument --max-body-bytes: '0' is not a whole number above 0"),
        (("router", "bootstrap", "--out", "o", "--port", "x"), "argument --port: 'x' is no port"),
        ((*OFFER, "--kubeconfig", "/absent"), "argument --kubeconfig: /absent: there is no such file"),
        ((*OFFER, "--ca-file", "/absent"), "argument --ca-file: /absent: there is no such file"),
    ],
)
def test_a_wrong_value_is_status_2(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_router_outside_of_a_pod_needs_a_kubeconfig(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main([*SERVE, "--run-dir", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prfaas router serve: not in a cluster: ")
    assert line.endswith("; outside of a pod give --kubeconfig")


def test_a_port_that_is_taken_is_told(kubeconfig: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        taken = str(holder.getsockname()[1])
        serve = [*SERVE, "--run-dir", str(tmp_path), "--admin-port", taken]
        for words in (serve, [*OPERATOR, "--port", taken]):
            assert main([*words, "--kubeconfig", str(kubeconfig)]) == 1
            line = capsys.readouterr().err.splitlines()[-1]
            assert "address already in use" in line
            assert taken in line


def test_a_bootstrap_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["router", "bootstrap", "--out", str(tmp_path / "file" / "envoy.yaml")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prfaas router bootstrap: ")
    assert str(tmp_path / "file") in line


@pytest.mark.parametrize("named", ["/absent", "/absent:/gone", None])
def test_a_kubeconfig_that_is_not_there_is_named(
    named: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if named:
        monkeypatch.setenv("KUBECONFIG", named)
    else:
        monkeypatch.delenv("KUBECONFIG", raising=False)
    assert main(OFFER) == 1
    (line,) = capsys.readouterr().err.splitlines()
    expected = f"KUBECONFIG names {named}" if named else f"its default is {tmp_path}/.kube/config"
    assert expected in line
    assert "does not exist; give --kubeconfig" in line


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"a: [secret", "not YAML"), (b"\x81\x00", "not YAML"), (b"secret", "not a mapping"), (b"", "not a mapping")],
)
def test_what_is_no_kubeconfig_is_told_without_what_it_holds(
    content: bytes, problem: str, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubeconfig.write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        main([*SERVE, "--kubeconfig", str(kubeconfig)])
    monkeypatch.setenv("KUBECONFIG", f"/absent:{kubeconfig}")
    assert main(OFFER) == 1
    said = capsys.readouterr().err
    assert said.count(f"{kubeconfig}: is no kubeconfig: {problem}\n") == 2
    assert "secret" not in said


def test_files_that_cannot_be_written_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "crds").touch()
    assert main(["crds", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("prfaas crds: ")


def test_several_kubeconfigs_are_merged_as_kubectl_does(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "users"
    users.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "users": CONFIG["users"]}))
    kubeconfig.write_text(yaml.safe_dump({**CONFIG, "users": []}))
    monkeypatch.setenv("KUBECONFIG", f"/absent:{kubeconfig}:{users}")
    assert main(OFFER) == 1
    assert "https://127.0.0.1:6443 reaches this machine only" in capsys.readouterr().err


def test_an_empty_variable_is_none(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    kubeconfig.rename(tmp_path / ".kube" / "config")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert users_kubeconfig({"KUBECONFIG": ""}) == tmp_path / ".kube" / "config"
