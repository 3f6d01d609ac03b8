#!/usr/bin/env python3
"""Drives two servers of the bundled model behind vllm-router and smg, unmodified, with policies that know prefixes.

    cargo build --release && python3 tools/routers-test.py

Installs the routers' wheels into a virtual environment, once. Prints a line for each check of a router and policy; the
exit code is 1 if one fails. What a worker got is read from its own metrics:

- A second turn lands on the worker of the first one, which finds the prefix in its cache. New conversations spread.
- A stream passes through chunk by chunk, with the same text as the response that is not streamed.
- The router reads the loads of both workers.
- A worker that is stopped gets no more requests; its conversations go on at the other one.
"""

import argparse
import hashlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
import venv
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["vllm-router==0.1.17", "smg==1.13.0"]
SMG = ["smg", "launch", "--load-monitor-interval", "1", "--prefix-token-count", "64"]
# Name and command, and the path of the router that lists the loads of its workers.
ROUTERS = [
    ("vllm-router cache_aware", ["vllm-router", "--policy", "cache_aware"], None),
    ("vllm-router consistent_hash", ["vllm-router", "--policy", "consistent_hash"], None),
    ("smg cache_aware", [*SMG, "--policy", "cache_aware"], "/get_loads"),
    ("smg prefix_hash", [*SMG, "--policy", "prefix_hash"], "/get_loads"),
]
# May send all new conversations to one worker: vllm-router as long as both have few open requests, Dynamo by chance.
MAY_CHOOSE_ONE = ["vllm-router cache_aware", "dynamo"]
SESSIONS = 6
# Time for a router to find its workers, or to notice that one is gone.
PATIENCE = 60
CHAT = "/v1/chat/completions"


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def post(url, body, session):
    """The response to a JSON body."""
    headers = {"content-type": "application/json", "x-session-id": session}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def running(command, **options):
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


class Worker:
    """A server of the bundled model."""

    def __init__(self, stack, binary, *flags):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = [binary, "--port", str(port), "--device", "cpu", "--threads", "1", "--model-path", ROOT / "models/qwen3-tiny", *flags]
        self.start(stack)

    def start(self, stack):
        self.process = stack.enter_context(running(self.command, stderr=subprocess.DEVNULL))
        wait(f"{self.command[0]} serves", lambda: get(self.url + "/health") == "")

    def counts(self):
        """Prompt tokens, and those found in the prefix cache."""
        text = get(self.url + "/metrics")
        value = lambda name: float(re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.M)[1])
        return [value("vllm:prompt_tokens_total"), value("vllm:prefix_cache_hits_total")]


def wait(what, condition):
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except (OSError, urllib.error.HTTPError):
            pass
        if time.monotonic() > end:
            raise AssertionError(f"gave up waiting until {what}")
        time.sleep(0.2)


class Session:
    """A conversation through a router."""

    def __init__(self, url, number):
        # Conversations have nothing in common but their last question.
        words = " ".join(hashlib.sha256(f"{number} {i}".encode()).hexdigest()[:20] for i in range(12))
        self.url, self.name = url, f"session-{number}"
        self.messages = [{"role": "user", "content": f"{words} What is the capital of France?"}]

    def body(self, **fields):
        return {"model": "qwen3-tiny", "messages": self.messages, "temperature": 0, "max_tokens": 16} | fields

    def turn(self):
        """Asks, and appends the answer and the next question. Returns the usage."""
        with post(self.url + CHAT, self.body(), self.name) as response:
            answer = json.load(response)
        self.messages += [answer["choices"][0]["message"], {"role": "user", "content": "And of Italy?"}]
        return answer["usage"]


def turn(session, workers):
    """A turn of a session: the worker that served it, its prompt tokens and those found in its cache."""
    before = [worker.counts() for worker in workers]
    usage = session.turn()
    wait("the turn is counted", lambda: any(w.counts()[0] > b[0] for w, b in zip(workers, before)))
    deltas = [[now - then for now, then in zip(w.counts(), b)] for w, b in zip(workers, before)]
    (served,) = [i for i, (tokens, _) in enumerate(deltas) if tokens]
    assert deltas[served][0] == usage["prompt_tokens"], (deltas, usage)
    return served, *deltas[served]


def second_turns_follow_the_first(name, url, workers, _):
    sessions = [Session(url, i) for i in range(SESSIONS)]
    first = [turn(session, workers) for session in sessions]
    second = [turn(session, workers) for session in sessions]
    for (worker, tokens, _), (again, _, hits) in zip(first, second):
        assert worker == again, (first, second)
        # All but the last block of the first prompt, and the tokens that the template writes for the answer.
        assert hits >= tokens - 32, (first, second)
    spread = {worker for worker, *_ in first} == {0, 1}
    assert spread or name in MAY_CHOOSE_ONE, f"all sessions went to one worker: {first}"
    return f"{SESSIONS} sessions, workers {[worker for worker, *_ in first]}, hits {[int(hits) for *_, hits in second]}"


def streams_pass_through(_, url, workers, __):
    session = Session(url, 50)
    with post(url + CHAT, session.body(), session.name) as response:
        expected = json.load(response)["choices"][0]["message"]["content"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with post(url + CHAT, session.body(**options), session.name) as response:
        events = [line[6:] for line in response.read().decode().split("\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]", events
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == expected, (text, expected)
    assert len(chunks) > 3 and chunks[-1]["usage"]["completion_tokens"] > 3, chunks
    with post(url + "/v1/completions", {"model": "qwen3-tiny", "prompt": "Once", "max_tokens": 9, "stream": True}, "s") as response:
        assert response.read().decode().endswith("data: [DONE]\n\n")
    return f"{len(chunks)} chunks"


def loads_are_read(_, url, workers, path):
    if path is None:
        return None
    # The size of the KV cache is only in the workers' own /v1/loads.
    sizes = lambda: {load["worker"]: load["max_total_num_tokens"] for load in json.loads(get(url + path))["loads"]}
    wait("the router shows both loads", lambda: all(sizes().get(worker.url, 0) > 0 for worker in workers))
    return f"{len(workers)} workers that hold {sizes()[workers[0].url]} tokens each"


def a_stopped_worker_is_left(_, url, workers, __):
    sessions = [Session(url, 100 + i) for i in range(SESSIONS)]
    first = [turn(session, workers) for session in sessions]
    stopped = first[0][0]
    workers[stopped].process.terminate()
    workers[stopped].process.wait(20)
    failed = 0

    def served():
        nonlocal failed
        try:
            sessions[0].turn()
            return True
        except (OSError, urllib.error.HTTPError):
            failed += 1
            return False

    wait("the other worker has the conversation", served)
    before = workers[1 - stopped].counts()[0]
    for session in sessions[1:]:
        session.turn()
    assert workers[1 - stopped].counts()[0] > before
    return f"{failed} requests failed before the router left the worker"


CHECKS = [second_turns_follow_the_first, streams_pass_through, loads_are_read, a_stopped_worker_is_left]


def check(name, command, path, binary):
    """Runs all checks of one router and policy; returns the number of failures."""
    failures = 0
    with ExitStack() as stack:
        workers = [Worker(stack, binary) for _ in range(2)]
        port, log = free_port(), stack.enter_context(tempfile.TemporaryFile("w+"))
        command = [*command, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *(worker.url for worker in workers)]
        command += ["--prometheus-port", str(free_port())]
        stack.enter_context(running(command, stdout=log, stderr=subprocess.STDOUT))
        url = f"http://127.0.0.1:{port}"
        session = Session(url, 999)
        wait(f"{name} serves", lambda: session.turn())
        for function in CHECKS:
            try:
                print(f"ok    {name} {function.__name__}: {function(name, url, workers, path)}", flush=True)
            except Exception:
                failures += 1
                print(f"FAIL  {name} {function.__name__}\n{traceback.format_exc()}", flush=True)
        if failures:
            log.seek(0)
            print("\n".join(line[:300] for line in log.read().splitlines()[-20:]))
    return failures


def install(folder):
    """A virtual environment with the routers."""
    if not (folder / "bin/smg").is_file():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin/pip", "install", "-q", *PACKAGES], check=True)
    return folder / "bin"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=ROOT / "target/release/pegainfer")
    parser.add_argument("--venv", type=Path, default=ROOT / "target/routers", help="virtual environment of the routers")
    parser.add_argument("--only", default="", help="only routers whose name contains this")
    args = parser.parse_args()
    programs = install(args.venv)
    chosen = [router for router in ROUTERS if args.only in router[0]]
    failures = sum(check(name, [programs / command[0], *command[1:]], path, args.binary) for name, command, path in chosen)
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
