"""`prfaas link offer` on a real API server, and a link that reads through what it printed."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import yaml

from e2e.apiserver import ApiServer
from prfaas.cli.link import EXAMPLE
from prfaas.cli.main import main
from prfaas.kube.errors import Forbidden, NotFound, Unauthorized
from prfaas.kube.resources import ALL, CONFIG_MAP, ENDPOINT_SLICE, LEASE, ROLE, SECRET, SERVICE_ACCOUNT
from prfaas.links.contact import Connected, NotConnected
from prfaas.links.peer import PeerSnapshot
from prfaas.links.registry import PeerRegistry
from tests.hand import Hand
from tests.links.build import KEY, published, spec

pytestmark = pytest.mark.apiserver

READ = ("get", "list", "watch")
ALL_VERBS = (*READ, "create", "update", "patch", "delete", "deletecollection")


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[Hand]:
    async with await Hand.from_kubeconfig_file(apiserver.kubeconfig) as client:
        yield client


def offer(apiserver: ApiServer, namespace: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The command as a person runs it."""
    command = [sys.executable, "-m", "prfaas.cli.main", "link", "offer", "--peer", "west", "--namespace", namespace]
    command += ["--kubeconfig", str(apiserver.kubeconfig), "--secret-name", "peer-east", "--server", apiserver.url]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False)


def kubeconfig_in(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    secret: dict[str, Any] = yaml.safe_load(done.stdout)
    assert (secret["kind"], secret["metadata"]["name"]) == ("Secret", "peer-east")
    text = secret["stringData"]["kubeconfig"]
    assert isinstance(text, str)
    token = yaml.safe_load(text)["users"][0]["user"]["token"]
    assert token not in done.stderr
    return text


async def test_the_offered_kubeconfig_reads_the_exchange_and_may_do_nothing_else(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    await client.create(published(namespace))
    async with Hand.from_kubeconfig(kubeconfig_in(offer(apiserver, namespace))) as peer:
        assert len((await peer.list(CONFIG_MAP, namespace)).items) == 1
        for resource in ALL:
            for verb in ALL_VERBS:
                inside = namespace if resource.namespaced else None
                expected = verb in READ and resource in (CONFIG_MAP, ENDPOINT_SLICE, LEASE)
                assert await peer.may_i(verb, resource, inside) == expected, (verb, resource.plural)
                if expected:
                    assert not await peer.may_i(verb, resource, "default"), (verb, resource.plural)
                    assert not await peer.may_i(verb, resource), (verb, resource.plural)
        assert not await peer.may_i("create", SERVICE_ACCOUNT, namespace, subresource="token")
        with pytest.raises(Forbidden):
            await peer.list(SECRET, namespace)
        with pytest.raises(Forbidden):
            await peer.delete(CONFIG_MAP, published()["metadata"]["name"], namespace)


async def test_offering_again_writes_nothing_but_a_new_token(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    first = kubeconfig_in(offer(apiserver, namespace))
    mark = apiserver.audit.mark()
    second = kubeconfig_in(offer(apiserver, namespace))
    writes = [(event.verb, event.resource, event.subresource) for event in apiserver.audit.writes(mark, namespace)]
    assert writes == [("create", "serviceaccounts", "token")]
    assert first != second


async def test_deleting_the_service_account_withdraws_the_offer(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    async with Hand.from_kubeconfig(kubeconfig_in(offer(apiserver, namespace))) as peer:
        await peer.list(CONFIG_MAP, namespace)
        await client.delete(SERVICE_ACCOUNT, "peer-west", namespace)

        async def until_refused() -> None:
            while True:
                await peer.list(CONFIG_MAP, namespace)
                await asyncio.sleep(0.2)

        with pytest.raises(Unauthorized):  # accepted tokens are cached by the server for ten seconds
            await asyncio.wait_for(until_refused(), 30)


async def test_names_of_somebody_else_are_not_taken_over(client: Hand, apiserver: ApiServer, namespace: str) -> None:
    foreign = {
        "apiVersion": ROLE.api_version,
        "kind": "Role",
        "metadata": {"name": "peer-west", "namespace": namespace},
        "rules": [],
    }
    before = await client.create(foreign)
    done = offer(apiserver, namespace)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "exists and is not ours" in done.stderr
    assert await client.get(ROLE, "peer-west", namespace) == before


def test_applied_as_the_help_says_the_token_is_in_the_secret_and_nowhere_else(
    apiserver: ApiServer, namespace: str
) -> None:
    told = re.search(r"kubectl --context west -n prfaas-system (apply .*) -f -", EXAMPLE)
    assert told is not None
    done = offer(apiserver, namespace)
    applied = apiserver.kubectl("-n", namespace, *told[1].split(), "-f", "-", stdin=done.stdout)
    assert applied.returncode == 0, applied.stderr
    secret = apiserver.request("GET", f"/api/v1/namespaces/{namespace}/secrets/peer-east").body
    assert secret["data"].keys() == {"kubeconfig"}
    assert "annotations" not in secret["metadata"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--peer", "West!"), "--peer West!: must be lower case"),
        (("--server", "http://east"), "must begin with https://"),
        (("--duration", "1m"), "--duration: at least 10m"),
        (("--duration", "forever"), "--duration: not a duration"),
        (("--namespace", "absent"), "there is no namespace absent: install the chart prfaas-operator here first"),
    ],
)
def test_what_cannot_be_offered_is_said_in_one_line(
    apiserver: ApiServer, namespace: str, more: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["link", "offer", "--peer", "west", "--namespace", namespace, "--kubeconfig", str(apiserver.kubeconfig)]
    assert main([*base, "--server", apiserver.url, *more]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_an_address_that_only_this_machine_knows_is_not_offered_unasked(
    apiserver: ApiServer, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["link", "offer", "--peer", "west", "--namespace", namespace]
    assert main([*arguments, "--kubeconfig", str(apiserver.kubeconfig)]) == 1
    assert "give --server" in capsys.readouterr().err


async def until(registry: PeerRegistry, condition: Callable[[PeerSnapshot], object]) -> PeerSnapshot:
    async with asyncio.timeout(40):
        while not condition(registry.snapshot(KEY)):  # noqa: ASYNC110  # any of many conditions
            await asyncio.sleep(0.02)
    return registry.snapshot(KEY)


async def test_a_link_follows_the_peers_document_through_new_credentials_and_loses_it_with_them(
    client: Hand, apiserver: ApiServer, namespace: str
) -> None:
    peer = {"clusterID": "east", "exchangeNamespace": namespace, "source": {"kubeConfigSecretRef": {"name": "x"}}}
    link = spec(peer=peer)
    first, second = (kubeconfig_in(offer(apiserver, namespace)).encode() for _ in range(2))

    def generation(snapshot: PeerSnapshot) -> str:
        return snapshot.config_map["data"]["document.json"] if snapshot.config_map else ""

    async with PeerRegistry(client, lambda _: None) as registry:
        registry.ensure(KEY, link, first)
        nothing = await until(registry, lambda seen: isinstance(seen.contact, Connected))
        assert nothing.read
        assert nothing.config_map is None
        assert nothing.credentials_expire_at is not None
        await client.create(published(namespace))
        await until(registry, lambda seen: '"generation": 3' in generation(seen))
        registry.ensure(KEY, link, second)
        await client.apply(published(namespace, generation=4), field_manager="test")
        await until(registry, lambda seen: '"generation": 4' in generation(seen))
        registry.ensure(KEY, link, second.replace(b"token: ey", b"token: no"))
        gone = await until(registry, lambda seen: isinstance(seen.contact, NotConnected))
        assert isinstance(gone.contact, NotConnected)
        assert gone.contact.reason.value == "Unauthorized"
        assert '"generation": 4' in generation(gone)
        registry.ensure(KEY, link, first)
        await until(registry, lambda seen: isinstance(seen.contact, Connected))
        await client.delete(CONFIG_MAP, published()["metadata"]["name"], namespace)
        await until(registry, lambda seen: seen.config_map is None)
    with pytest.raises(NotFound):
        await client.get(CONFIG_MAP, published()["metadata"]["name"], namespace)
