"""What is built is built once, appears whole or not at all, and by one process at a time."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from e2e.datacenters import build, debian, nodeimage
from e2e.datacenters.build import tools_cache
from e2e.datacenters.cache import atomically, cache_root, elapsed, forget_unused, locked, progress, tree_hash, used


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "prfaas"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home/.cache/prfaas"
    assert tools_cache().parent == cache_root()


def test_a_hash_tells_content_names_and_modes_apart(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a").write_text("1")
    seen = {tree_hash([folder])}
    (folder / "a").write_text("2")
    seen.add(tree_hash([folder]))
    (folder / "a").chmod(0o755)
    seen.add(tree_hash([folder]))
    (folder / "a").rename(folder / "b")
    seen.add(tree_hash([folder]))
    (folder / "c").write_text("")
    seen.add(tree_hash([folder]))
    assert len(seen) == 5
    assert tree_hash([folder]) in seen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GO_TAGS", "other"),
        ("GO_SETTINGS", {"CGO_ENABLED": "1", "GOFLAGS": ""}),
        ("version_stamp", lambda _: "-X other=1"),
        ("PACKAGES", {"kube": "./cmd/kube"}),
    ],
)
def test_other_flags_are_other_programs_and_another_node_image(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tools_cache(), nodeimage.image_hash()
    monkeypatch.setattr(build, name, value)
    assert tools_cache() != before[0]
    assert nodeimage.image_hash() != before[1]


def test_how_packages_are_unpacked_is_part_of_their_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = debian.packages_cache(), nodeimage.image_hash()
    (tmp_path / "debian.py").write_text("# another way\n")
    monkeypatch.setattr(debian, "__file__", str(tmp_path / "debian.py"))
    assert debian.packages_cache() != before[0]
    assert nodeimage.image_hash() != before[1]


def test_what_nobody_used_for_two_weeks_is_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old, recent = time.time() - 15 * 86_400, time.time() - 13 * 86_400
    root = tmp_path / "prfaas"
    names = [f"{kind}{digit * 12}" for kind in ("", "debian-", "node-") for digit in "abc"]
    for name in [*names, "docker", "datacenters", "notes"]:
        (root / name / "bin").mkdir(parents=True)
        os.utime(root / name, (recent, recent) if name.endswith("b") else (old, old))
    (root / "image").mkdir()
    (root / "image" / "prfaas-1.tar").touch()
    os.utime(root / "image" / "prfaas-1.tar", (old, old))
    for name in names[::3]:
        used(root / name)
    said: list[str] = []
    forget_unused(said.append)
    left = {entry.name for entry in root.iterdir()}
    assert left == {name for name in names if not name.endswith("c")} | {"docker", "datacenters", "notes", "image"}
    assert not list((root / "image").iterdir())
    assert f"forgetting {root}/{'c' * 12}: not used for 14 days" in said


def test_using_a_tool_or_packages_keeps_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "from_path", lambda name: None)
    made = [tools_cache() / "bin" / "kind", debian.packages_cache() / "host"]
    made.append(tmp_path / "prfaas" / f"node-{nodeimage.image_hash()}" / "image.tar")
    for thing in made:
        thing.mkdir(parents=True)
    for entry in (made[0].parents[1], made[1].parent, made[2].parent):
        os.utime(entry, (0, 0))
    assert [build.tool("kind"), debian.host_packages(), nodeimage.node_archive()] == made
    forget_unused(lambda _: None)
    assert all(thing.exists() for thing in made)


def test_a_target_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"

    def half() -> None:
        with atomically(target) as partial:
            partial.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert list(target.parent.iterdir()) == []
    with atomically(target) as partial:
        partial.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_replaces_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "target"
    for content in ("1", "2"):
        with atomically(target) as partial:
            partial.mkdir()
            (partial / content).write_text(content)
    assert [p.name for p in target.iterdir()] == ["2"]


def _hold(folder: Path, held: Event, release: Event) -> None:
    with locked(folder):
        held.set()
        release.wait(30)


def test_one_process_at_a_time_and_the_other_is_told(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    held, release = spawn.Event(), spawn.Event()
    other = spawn.Process(target=_hold, args=(tmp_path, held, release))
    other.start()
    try:
        assert held.wait(30)
        said: list[str] = []
        told = threading.Event()

        def log(message: str) -> None:
            said.append(message)
            told.set()
            release.set()

        with locked(tmp_path, log):
            assert told.is_set()
        assert said == [f"waiting for another process that builds in {tmp_path}"]
    finally:
        release.set()
        other.join()


def test_progress_says_what_how_far_and_how_long() -> None:
    said: list[str] = []
    ticked = threading.Event()

    def log(message: str) -> None:
        said.append(message)
        if message.startswith("  "):
            ticked.set()

    with progress("building kube", lambda: "7 of 9 packages", log, every=0.01):
        assert ticked.wait(10)
    assert said[0] == "building kube ..."
    assert said[1] == "  building kube: 7 of 9 packages, 0 s"
    assert said[-1] == "building kube: done in 0 s"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1.0 min"), (600, "10.0 min")])
def test_elapsed(seconds: float, text: str) -> None:
    assert elapsed(seconds) == text


def test_a_built_tool_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[str] = []

    def compile_program(name: str, target: Path, log: object) -> None:
        calls.append(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("")

    monkeypatch.setattr(build, "compile_program", compile_program)
    monkeypatch.setattr(build, "from_path", lambda name: None)
    first, second = build.tool("kube-apiserver"), build.tool("etcd")
    assert calls == ["kube"]
    assert (first.name, first.resolve().name, second.resolve().name) == ("kube-apiserver", "kube", "kube")
    assert build.tool("kind") == tools_cache() / "bin" / "kind"
    assert calls == ["kube", "kind"]


def test_a_fitting_program_on_path_is_used_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, said in (("helm", "v4.3.1+g1"), ("kind", "0.12.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / name).chmod(0o755)
    built: list[str] = []

    def compile_program(name: str, target: Path, log: object) -> None:
        built.append(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("")

    monkeypatch.setattr(build, "compile_program", compile_program)
    build.from_path.cache_clear()
    try:
        assert build.tool("helm") == tmp_path / "helm"
        assert build.tool("kind") != tmp_path / "kind"  # too old
        assert built == ["kind"]
    finally:
        build.from_path.cache_clear()


@pytest.mark.parametrize(
    ("output", "fit"),
    [
        ("Client Version: v1.37.2\nKustomize Version: v5.8.1", True),
        ("Client Version: v1.32.4-dispatcher\nKustomize Version: v5.5.0", False),
        ("v1.39.0", False),
        ("", False),
    ],
)
def test_fits(output: str, fit: bool) -> None:
    assert build.fits(output, "1.36.0", "1.39.0") is fit


def test_an_unknown_tool_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="no program 'docker' in the toolchain; there are kube, kind"):
        build.tool("docker")


def test_one_set_of_flags_for_all_programs() -> None:
    flags = {name: build.go_arguments(name, Path("out")) for name in build.PACKAGES}
    for name, line in flags.items():
        assert line[:6] == ["go", "build", "-v", "-trimpath", "-tags", "no_btrfs no_zfs no_devmapper"]
        assert line[-2:] == ["out", build.PACKAGES[name]]
    assert "-X k8s.io/component-base/version.gitVersion=v1.37.2" in flags["kube"][7]
    assert {line[7] for name, line in flags.items() if name != "kube"} == {"-s -w"}


def test_without_go_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"`go` is not on PATH; install Go"):
        build.compile_program("kind", tmp_path / "kind", print)
