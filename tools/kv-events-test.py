#!/usr/bin/env python3
"""Follows the KV events of a server with pyzmq and msgspec, as a router would.

    python3 -m venv /tmp/events && /tmp/events/bin/pip install pyzmq msgspec
    cargo build --release && /tmp/events/bin/python tools/kv-events-test.py [--binary FILE]

Starts the bundled model on the CPU, with one engine and with two, and prints a line for each check; the exit code is 1 if
one fails. Hashes are taken as they are; what is cached is known from the token ids.
"""

import argparse
import base64
import json
import re
import subprocess
import sys
import time
import traceback
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import zmq
from kv_events_layout import decode

ROOT = Path(__file__).resolve().parent.parent
END = b"\xff" * 8
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


class Server:
    """A server with events on free ports."""

    def __init__(self, binary, config, flags):
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:0",
                  "replay_endpoint": "tcp://*:0", "topic": "kv@pod@tiny", **config}
        command = [binary, "serve", "--device", "cpu", "--threads", "1", "--port", "0", "--admin-local", "--kv-events-config",
                   json.dumps(config), *flags]
        self.layout = config.get("layout", "map")
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if match := re.search(r" on (http://\S+),", line):
                self.url = match[1]
                break
        else:
            raise RuntimeError("the server does not start")
        self.sources = self.get("/kv_event_sources")

    def get(self, path):
        with urllib.request.urlopen(self.url + path) as response:
            return json.load(response)

    def metrics(self):
        with urllib.request.urlopen(self.url + "/metrics") as response:
            return response.read().decode()

    def post(self, path, body, headers=()):
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json", **dict(headers)})
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def complete(self, ids, rank=None):
        """Token ids of a prompt and of its continuation."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = {"prompt": ids, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
        return ids + self.post("/v1/completions", body, headers)["choices"][0]["token_ids"]


@contextmanager
def server(binary, config=None, flags=()):
    started = Server(binary, config or {}, flags)
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.wait()


class Router:
    """Knows what one engine has cached, from its events."""

    def __init__(self, server, rank=0, topic="kv@"):
        self.source, self.layout = server.sources[rank], server.layout
        self.context = zmq.Context.instance()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(self.source["endpoint"])
        self.socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.sequence, self.blocks, self.log, self.restarts = -1, {}, [], 0
        # A subscription that is on its way misses what is published meanwhile: the replay has it.
        time.sleep(0.3)
        self.replay(0)

    def close(self):
        self.socket.close(0)

    def replay(self, first):
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.source["replay_endpoint"])
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        sequences = []
        while True:
            assert dealer.poll(5000), "the replay does not answer"
            empty, topic, number, payload = dealer.recv_multipart()
            assert empty == b"", empty
            if number == END:
                assert (topic, payload) == (b"", b"")
                break
            assert topic.decode() == self.source["topic"]
            sequences.append(int.from_bytes(number, "big"))
            self.apply(sequences[-1], payload)
        dealer.close(0)
        return sequences

    def apply(self, sequence, payload):
        stamp, events, rank = decode(payload, self.layout)
        assert rank == self.source["data_parallel_rank"] and abs(stamp - time.time()) < 3600, (rank, stamp)
        if sequence <= self.sequence:
            if sequence != 0:
                return
            self.restarts += 1
        else:
            assert sequence == self.sequence + 1, f"batch {sequence} after {self.sequence}"
        self.sequence = sequence
        for event in events:
            kind = type(event).__name__.removeprefix("Map").removeprefix("Array")
            self.log.append((kind, event))
            if kind == "Cleared":
                self.blocks = {}
            elif kind == "Removed":
                for name in event.block_hashes:
                    del self.blocks[name]
            else:
                self.store(event)

    def store(self, event):
        assert event.medium == "GPU" and event.lora_id is None, event
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes), event
        parent = event.parent_block_hash
        assert parent is None or parent in self.blocks, f"the parent {parent} is not known"
        for at, name in enumerate(event.block_hashes):
            before = self.blocks[parent] if parent is not None else ()
            self.blocks[name] = before + tuple(event.token_ids[at * size : (at + 1) * size])
            parent = name

    def read(self, quiet=0.3):
        """Reads events until there are none for a moment. Returns what came."""
        first = len(self.log)
        while self.socket.poll(int(quiet * 1000)):
            topic, number, payload = self.socket.recv_multipart()
            assert topic.decode() == self.source["topic"]
            self.apply(int.from_bytes(number, "big"), payload)
        return self.log[first:]

    def cached(self, ids):
        """Number of tokens of the longest cached prefix."""
        prefixes = set(self.blocks.values())
        return max((n for n in range(len(ids) + 1) if tuple(ids[:n]) in prefixes), default=0)


def stored(events):
    return sum(len(event.block_hashes) for kind, event in events if kind == "Stored")


def prompt(seed, tokens):
    return [1 + (seed * 7919 + i * 31) % 200 for i in range(tokens)]


@check
def two_turns(binary, layout):
    with server(binary, {"layout": layout}) as started:
        router = Router(started)
        assert [kind for kind, _ in router.log] == ["Cleared"], router.log
        first = started.complete(prompt(1, 100))
        events = router.read()
        size = next(event.block_size for kind, event in events if kind == "Stored")
        assert router.cached(first) >= (len(first) - 1) // size * size, (router.cached(first), len(first))
        assert len([kind for kind, _ in events if kind == "Stored"]) < stored(events), "runs are one event"
        before = len(router.blocks)
        second = started.complete(first + prompt(2, 40))
        events = router.read()
        assert stored(events) == len(router.blocks) - before == (len(second) - 1) // size - before, "only new blocks"
        assert events[0][1].parent_block_hash is not None
        started.post("/v1/completions", {"prompt": prompt(3, 64), "max_tokens": 1, "cache_salt": "a"})
        assert not router.read(), "salted prompts are not told"
        urllib.request.urlopen(urllib.request.Request(started.url + "/reset_prefix_cache", method="POST"))
        router.read()
        assert router.blocks == {}


@check
def removal(binary, layout):
    with server(binary, {"layout": layout}, ["--kv-cache-memory", "2M"]) as started:
        router = Router(started)
        texts = [started.complete(prompt(i, 150)) for i in range(12)]
        events = router.read()
        assert any(kind == "Removed" for kind, _ in events)
        assert router.cached(texts[-1]) >= 144 and router.cached(texts[0]) == 0
        late = Router(started)
        assert late.blocks == router.blocks


@check
def late_subscribers(binary, layout):
    with server(binary, {"layout": layout, "buffer_steps": 10}) as started:
        router = Router(started)
        for i in range(20):
            started.complete(prompt(i, 40))
        router.read()
        assert router.restarts >= 2, router.restarts
        late = Router(started)
        assert late.sequence == router.sequence and late.blocks == router.blocks and late.blocks
        assert late.log[0][0] == "Cleared"
        restarts = router.restarts
        assert router.replay(late.sequence) == [late.sequence] and router.replay(late.sequence + 1) == []
        full = re.search(r'kv_event_restarts_total{.*reason="full".*} (\d+)', started.metrics())
        assert int(full[1]) == restarts, (full, restarts)


@check
def lost_changes(binary, layout):
    with server(binary, {"layout": layout, "max_queue_size": 3}) as started:
        router = Router(started)
        ids = started.complete(prompt(1, 200))
        router.read()
        assert router.restarts > 0 and router.cached(ids) >= 192, (router.restarts, router.cached(ids))
        assert re.search(r'kv_event_restarts_total{.*reason="lost".*} [1-9]', started.metrics())


@check
def two_engines(binary, layout):
    with server(binary, {"layout": layout}, ["--data-parallel-size", "2"]) as started:
        assert [source["data_parallel_rank"] for source in started.sources] == [0, 1]
        routers = [Router(started, rank) for rank in (0, 1)]
        texts = [started.complete(prompt(rank, 100), rank) for rank in (0, 1)]
        for router in routers:
            router.read()
        cached = [[router.cached(text) for text in texts] for router in routers]
        assert cached[0][0] >= 112 and cached[1][1] >= 112 and cached[0][1] == cached[1][0] == 0, cached


@check
def images(binary, layout):
    flags = ["--model-path", str(ROOT / "models/qwen35-vl-tiny")]
    with server(binary, {"layout": layout}, flags) as started:
        router, expected = Router(started), {}
        for file in ("small.png", "photo.jpg"):
            data = base64.b64encode((ROOT / "pegainfer-images/tests/fixtures/sources" / file).read_bytes()).decode()
            content = [{"type": "text", "text": "Look at this picture. " * 4},
                       {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}, {"type": "text", "text": "What do you see?"}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            started.post("/v1/chat/completions", body)
            features = started.post("/v1/chat/completions/render", body)["features"]
            [name], [place] = features["mm_hashes"]["image"], features["mm_placeholders"]["image"]
            expected[name] = (place["offset"], place["length"])
        router.read()
        found = {name: set() for name in expected}
        runs = [event for kind, event in router.log if kind == "Stored"]
        for event in runs:
            for name, keys in zip(event.block_hashes, event.extra_keys or [None] * len(event.block_hashes), strict=True):
                end = len(router.blocks[name])
                for image, offset in keys or []:
                    assert end - event.block_size + offset == expected[image][0], (name, keys)
                    found[image].add(end // event.block_size - 1)
        size = runs[0].block_size
        for image, (start, length) in expected.items():
            blocks = range(start // size, (start + length - 1) // size + 1)
            assert found[image] == set(blocks), (image, found[image], blocks)
        started.complete(prompt(1, 40))
        text = [event for kind, event in router.read() if kind == "Stored"]
        assert text and all(event.extra_keys is None for event in text)
        late = Router(started)
        assert late.blocks == router.blocks


@check
def subscriptions(binary, layout):
    with server(binary, {"layout": layout}) as started:
        all_topics, other = Router(started, topic=""), Router(started, topic="kv@other@")
        started.complete(prompt(1, 40))
        assert all_topics.read() and not other.read()
        other.socket.setsockopt(zmq.SUBSCRIBE, b"kv@pod@")
        time.sleep(0.2)
        started.complete(prompt(2, 40))
        other.sequence = all_topics.sequence
        assert all_topics.read() and stored(other.read())
        all_topics.socket.setsockopt(zmq.UNSUBSCRIBE, b"")
        time.sleep(0.2)
        started.complete(prompt(3, 40))
        assert not all_topics.read()


@check
def a_subscriber_that_listens(binary, layout):
    socket = zmq.Context.instance().socket(zmq.SUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    with server(binary, {"layout": layout, "endpoint": f"tcp://127.0.0.1:{port}"}) as started:
        assert started.sources[0]["endpoint"] == f"tcp://127.0.0.1:{port}"
        # libzmq subscribes on a new connection when the socket is used.
        assert not socket.poll(1000)
        started.complete(prompt(1, 40))
        assert socket.poll(3000)
        topic, number, payload = socket.recv_multipart()
        assert stored([(type(event).__name__[len(layout):], event) for event in decode(payload, layout)[1]])
        started.process.terminate()
        kinds = []
        while socket.poll(3000):
            kinds += [type(event).__name__ for event in decode(socket.recv_multipart()[2], layout)[1]]
        assert kinds[-1].endswith("Cleared"), kinds
    socket.close(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=str(ROOT / "target/release/pegainfer"))
    parser.add_argument("--only", default="", help="names of checks that contain this")
    args = parser.parse_args()
    failed = 0
    for function in CHECKS:
        if args.only not in function.__name__:
            continue
        for layout in ("map", "array"):
            try:
                function(args.binary, layout)
                print(f"ok    {function.__name__} ({layout})", flush=True)
            except Exception:
                failed += 1
                print(f"FAIL  {function.__name__} ({layout})\n{traceback.format_exc()}", flush=True)
    print(f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
