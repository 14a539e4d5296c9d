"""KV events on real ZeroMQ sockets: frames, maps, sequence numbers, replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
import zmq
import zmq.asyncio

from prfaas.worker import events
from prfaas.worker.events import END, EventsConfig, Publisher, binds
from tests.facts import facts
from tests.worker.rig import config, serving

FACTS = facts("kv_events")
STORED = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "group_idx": 0,
}


@contextmanager
def socket(kind: int, **options: Any) -> Iterator[zmq.asyncio.Socket]:
    """A client's socket."""
    made = zmq.asyncio.Context.shadow(zmq.Context.instance()).socket(kind)
    for name, value in options.items():
        setattr(made, name, value)
    try:
        yield made
    finally:
        made.close(linger=0)


@asynccontextmanager
async def publishing(**fields: Any) -> AsyncIterator[Publisher]:
    """A publisher on free ports of loopback."""
    chosen = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"} | fields
    publisher = Publisher(EventsConfig(enable_kv_cache_events=True, **chosen), "127.0.0.1", wall_clock=lambda: 1.0)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.stop()


def publish(publisher: Publisher, *told: Mapping[str, Any]) -> None:
    """One step with these events."""
    for event in told:
        publisher.note(event)
    publisher.flush()


async def replay(publisher: Publisher, start: int) -> list[list[bytes]]:
    """Everything that a replay from `start` answers, without the end marker."""
    with socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.sources()["0"]["replay_endpoint"])
        await dealer.send_multipart((b"", start.to_bytes(8, "big")))
        answers = []
        async with asyncio.timeout(5):
            while (frames := await dealer.recv_multipart())[2] != END:
                answers.append(frames)
        assert frames == [b"", b"", b"\xff" * 8, b""]
        return answers


async def test_a_batch_is_byte_for_byte_what_vllms_structs_make() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}
    async with publishing(topic="kv@pod") as publisher:
        publish(publisher, STORED, removed, {"type": "AllBlocksCleared"})
        ((empty, topic, sequence, payload),) = await replay(publisher, 0)
    assert (empty, topic, sequence) == (b"", b"kv@pod", b"\0" * 8)
    assert msgspec.msgpack.decode(payload) == FACTS["wire_sample"]["decoded"]
    # A map begins with its tag, and the fields follow in vLLM's order.
    names = [name for name in msgspec.msgpack.decode(payload)[1][0] if name != "type"]
    order = [field["field"] for field in FACTS["events"]["BlockStored"]["fields"]]
    assert names == [name for name in order if name in names]
    assert next(iter(msgspec.msgpack.decode(payload)[1][0])) == "type"


async def test_a_step_without_events_sends_nothing_and_takes_no_number() -> None:
    async with publishing() as publisher:
        publish(publisher, STORED)
        publish(publisher)
        publish(publisher, STORED, STORED)
        answers = await replay(publisher, 0)
        assert [int.from_bytes(sequence, "big") for _, _, sequence, _ in answers] == [0, 1]
        assert [len(msgspec.msgpack.decode(payload)[1]) for *_, payload in answers] == [1, 2]
        assert len(await replay(publisher, 1)) == 1
        assert await replay(publisher, 2) == []


async def test_only_the_last_batches_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with publishing(buffer_steps=3) as publisher:
        for _ in range(5):
            publish(publisher, STORED)
        answers = await replay(publisher, 0)
        assert [int.from_bytes(sequence, "big") for _, _, sequence, _ in answers] == [2, 3, 4]
        monkeypatch.setattr(events, "MAX_BUFFERED_BYTES", 2 * len(answers[0][3]))
        publish(publisher, STORED)
        assert len(await replay(publisher, 0)) == 2


async def test_a_malformed_replay_request_is_not_answered() -> None:
    async with publishing() as publisher:
        with socket(zmq.DEALER) as dealer:
            dealer.connect(publisher.sources()["0"]["replay_endpoint"])
            await dealer.send_multipart((b"", b"\0" * 8, b"more"))
            await dealer.send_multipart((b"", b"\0" * 8))
            async with asyncio.timeout(5):
                assert (await dealer.recv_multipart())[2] == END
            assert not await dealer.poll(0)


async def test_subscribers_get_the_topic_they_asked_for() -> None:
    async with publishing(topic="a") as publisher:
        with socket(zmq.SUB) as mine, socket(zmq.SUB) as others:
            for subscriber, topic in ((mine, "a"), (others, "b")):
                subscriber.connect(publisher.sources()["0"]["endpoint"])
                subscriber.subscribe(topic)
            async with asyncio.timeout(5):
                while not await mine.poll(1):  # until the subscription has reached the publisher
                    publish(publisher, STORED)
                named, first, _ = await mine.recv_multipart()
                assert named == b"a"
                while not await mine.poll(1):
                    publish(publisher, STORED)
                _, second, _ = await mine.recv_multipart()
            assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1
            assert not await others.poll(0)


@pytest.mark.parametrize(
    ("endpoint", "does"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True),
        ("inproc://events", True),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://collector:5557", False),
    ],
)
@pytest.mark.fact("README 9")
def test_which_endpoints_are_bound(endpoint: str, does: bool) -> None:
    assert binds(endpoint) == does


@pytest.mark.fact("README 9")
async def test_an_endpoint_that_is_not_bound_is_connected_to() -> None:
    with socket(zmq.SUB) as subscriber:
        subscriber.subscribe("")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        async with publishing(endpoint=f"tcp://127.0.0.1:{port}") as publisher, asyncio.timeout(5):
            while not await subscriber.poll(1):
                publish(publisher, STORED)
            assert msgspec.msgpack.decode((await subscriber.recv_multipart())[2])[1] == [STORED]


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
async def test_an_endpoint_that_cannot_be_opened_is_told(name: str) -> None:
    with socket(zmq.PULL) as other:
        port = other.bind_to_random_port("tcp://0.0.0.0")
        taken = f"tcp://*:{port}"
        endpoints: dict[str, Any] = {"endpoint": "tcp://*:0", name: taken}
        publisher = Publisher(EventsConfig(enable_kv_cache_events=True, **endpoints), "127.0.0.1")
        with pytest.raises(OSError, match=rf"--kv-events-config: tcp://\*:{port}: Address already in use"):
            publisher.start()
        await publisher.stop()


def test_every_field_of_vllms_configuration_is_known() -> None:
    ours = EventsConfig()
    for field in FACTS["config"]:
        if field["field"] != "publisher":
            assert getattr(ours, field["field"]) == field["default"], field
    assert not ours.on
    assert EventsConfig(enable_kv_cache_events=True).on
    assert not EventsConfig(enable_kv_cache_events=True, publisher="null").on


def test_the_coverage_lists_every_fact_of_events() -> None:
    """Each entry of the facts is in coverage/kv_events.yaml, and nothing else is."""
    listed = {f"config.{field['field']}" for field in FACTS["config"]}
    for event, content in FACTS["events"].items():
        listed |= {event, *(f"{event}.{field['field']}" for field in content["fields"])}
    listed |= {f"payload.{element['field']}" for element in FACTS["payload"]["elements"]}
    listed |= {f"frame.{frame['index']}" for frame in FACTS["message_frames"]}
    for part in ("pub_socket", "hash_form", "emission", "replay", "drop_rules"):
        left_out = {"type", "sources", "source", "root_source", "dp_rank", "served", "req_client_note"}
        listed |= {f"{part}.{key}" for key in FACTS[part] if key not in left_out}
    covered = yaml.safe_load((Path(__file__).parent / "coverage" / "kv_events.yaml").read_text())
    assert set(covered) == listed
    sent = {key for key in covered if "." in key and not isinstance(covered[key], dict)}
    assert {f"BlockStored.{name}" for name in STORED if name != "type"} <= sent


async def test_what_a_worker_publishes_is_what_its_cache_holds() -> None:
    """Two requests with a common prefix; every field is one that vLLM's events have."""
    on = EventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    async with serving(config(kv_events=on, event_host="127.0.0.1")) as (client,):
        publisher = client.worker.engine.events
        assert publisher is not None
        await client.complete("word" * 40, 1)
        await client.complete("word" * 32 + "else" * 16, 20)
        batches = [msgspec.msgpack.decode(payload) for *_, payload in await replay(publisher, 0)]
    told = [event for _, batch, rank in batches for event in batch if rank == 0]
    assert [(event["type"], len(event["block_hashes"])) for event in told] == [
        ("BlockStored", number) for number in (2, 1, 1)
    ]
    known = {field["field"] for field in FACTS["events"]["BlockStored"]["fields"]} | {"type"}
    assert all(set(event) <= known for event in told)
    assert told[1]["parent_block_hash"] == told[0]["block_hashes"][1]
    assert told[2]["parent_block_hash"] == told[1]["block_hashes"][0]
    assert told[1]["token_ids"] == [int.from_bytes(b"else", "big")] * 16
    assert len(told[2]["token_ids"]) == 16, "a block of the answer"


async def test_the_route_of_event_sources_says_where_they_are() -> None:
    on = EventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="t")
    async with serving(config(kv_events=on, event_host="127.0.0.1")) as (client,):
        async with client.session.get(f"{client.url}/kv_event_sources") as response:
            shown = await response.json()
        assert shown["0"]["endpoint"].startswith("tcp://127.0.0.1:")
        assert (shown["0"]["topic"], shown["0"]["publisher"]) == ("t", "zmq")
        await client.post("/v1/completions", {"prompt": "word" * 20, "max_tokens": 1}, **{"X-Session-ID": "mine"})
        assert client.worker.engine.events is not None
        ((*_, payload),) = await replay(client.worker.engine.events, 0)
        assert msgspec.msgpack.decode(payload)[1][0]["session_id"] == "mine"


async def test_a_worker_without_events_opens_nothing() -> None:
    async with serving(config()) as (client,), client.session.get(f"{client.url}/kv_event_sources") as response:
        assert await response.json() == {}
        assert client.worker.engine.events is None
