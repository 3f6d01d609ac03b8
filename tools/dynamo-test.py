#!/usr/bin/env python3
"""Drives two servers of the bundled model behind NVIDIA Dynamo's frontend, through its sidecar for vLLM, unmodified.

    cargo build --release && python3 tools/dynamo-test.py

Installs Dynamo's wheels (80 MB, Linux on x86-64) into a virtual environment, once; without them the test is skipped. Each
server has a sidecar, which speaks gRPC to it and follows its KV events. The frontend tokenizes, and routes by these events.
Discovery is a folder: no etcd, no NATS. Prints a line for each check; the exit code is 1 if one fails. What a server got is
read from its own metrics:

- Chats and completions, streamed and not, have the text, finish reason and usage of a server's own HTTP API.
- A prompt that a server computed for somebody else lands on that server: the frontend knows it from KV events alone.
- A second turn lands on the server of the first one, which finds the prefix in its cache.
- A client that leaves ends its request on the server.
- A server is killed while it streams: the stream ends, the other server has all conversations, and no other request fails.
- The same server is started again: it gets requests, and the frontend follows its KV events.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import venv
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

routers = import_module("routers-test")
free_port, get, post, running, wait = routers.free_port, routers.get, routers.post, routers.running, routers.wait

ROOT = routers.ROOT
DYNAMO = ["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"]
# What frontend and sidecar import. Their wheels also name packages that only other parts of Dynamo need, such as a simulator.
IMPORTED = ["msgspec==0.23.0", "packaging==26.4", "pydantic==2.13.5", "PyYAML==6.0.4", "typing_extensions==4.16.0", "uvloop==0.23.0"]
CHAT, COMPLETIONS = routers.CHAT, "/v1/completions"
PROMPTS = 6


class Dynamo:
    """Two servers with a sidecar each, and a frontend."""

    def __init__(self, stack, binary, python):
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.stack, self.prompts = stack, 0
        # The frontend caches tokenizers in the home directory.
        settings = {"HOME": str(self.folder), "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(self.folder / "discovery")}
        environment = os.environ | settings
        self.workers, self.sidecars = [], []
        for i in range(2):
            port, *ports = [str(free_port()) for _ in range(3)]
            events = {"enable_kv_cache_events": True} | {n: f"tcp://*:{p}" for n, p in zip(("endpoint", "replay_endpoint"), ports)}
            self.workers.append(routers.Worker(stack, binary, "--grpc-port", port, "--kv-events-config", json.dumps(events)))
            command = [python, "-m", "dynamo.vllm.sidecar", "--grpc-endpoint", f"127.0.0.1:{port}"]
            self.sidecars.append(self.start(stack, f"sidecar-{i}", command, environment))
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port, "--router-mode", "kv"]
        command += ["--migration-limit", "2"]
        self.start(stack, "frontend", command, environment)
        wait("the frontend has the model", lambda: json.loads(get(self.url + "/v1/models"))["data"])
        for worker in self.workers:
            wait("the frontend has both servers", lambda: self.reaches(worker))
            wait("the frontend follows the events of both", lambda: follows(self, worker)[0] is worker)

    def start(self, stack, name, command, environment):
        log = stack.enter_context(open(self.folder / name, "w"))
        return stack.enter_context(running(command, env=environment, stdout=log, stderr=subprocess.STDOUT))

    def reaches(self, worker):
        """Sends a new prompt. True if the worker has had one since its start."""
        self.prompts += 1
        answer(self.url, COMPLETIONS, completion(unique(f"reach {self.prompts}")))
        return worker.counts()[0] > 0

    def logs(self):
        names = ["frontend", "sidecar-0", "sidecar-1"]
        plain = lambda text: re.sub(r"\x1b\[\d*m", "", text)
        return "\n".join(f"{name}: {line[:300]}" for name in names for line in plain((self.folder / name).read_text()).splitlines()[-8:])


def unique(name):
    """A prompt that no other begins like."""
    return routers.Session("", name).messages[0]["content"]


def completion(prompt, **fields):
    return {"model": "qwen3-tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12} | fields


def answer(url, path, body):
    """Text, finish reason and usage of a response; of a stream if the body says so."""
    with post(url + path, body, "answer") as response:
        text = response.read().decode()
    return read_stream(text) if body.get("stream") else read_chunks([json.loads(text)])


def read_stream(text):
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]" and len(events) > 3, text[-1000:]
    return read_chunks([json.loads(event) for event in events])


def read_chunks(chunks):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    content = lambda choice: choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
    (reason,) = {choice["finish_reason"] for choice in choices if choice.get("finish_reason")}
    usage = chunks[-1]["usage"]
    counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    return "".join(map(content, choices)), reason, counts


def begin_stream(dynamo, prompt, max_tokens):
    """A stream of so many tokens, and its first line."""
    options = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    response = post(dynamo.url + COMPLETIONS, completion(prompt, max_tokens=max_tokens, **options), "stream")
    line = response.readline().decode()
    assert line.startswith("data: "), line
    return response, line


def answers_are_those_of_the_server(dynamo):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    chat = {"model": "qwen3-tiny", "messages": messages, "temperature": 0, "max_tokens": 24}
    bodies = [
        (CHAT, chat),
        (CHAT, chat | {"stop": ["Par"]}),
        (CHAT, chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}),
        (COMPLETIONS, completion("Once upon a time")),
        (COMPLETIONS, completion("Once upon a time", temperature=1, top_k=1)),
    ]
    for path, body in bodies:
        for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            ours, theirs = answer(dynamo.workers[0].url, path, body | options), answer(dynamo.url, path, body | options)
            assert ours == theirs, (body | options, ours, theirs)
    return f"{2 * len(bodies)} answers"


def follows(dynamo, worker):
    """Sends a new prompt to a worker, then the same one to the frontend: where it went, its tokens, and those of a cache."""
    dynamo.prompts += 1
    body = completion(unique(f"event {dynamo.prompts}"))
    answer(worker.url, COMPLETIONS, body)
    # The events of 10 ms are one batch, which sidecar and frontend pass on.
    time.sleep(0.3)
    before = [worker.counts() for worker in dynamo.workers]
    tokens = answer(dynamo.url, COMPLETIONS, body)[2][0]
    deltas = [[now - then for now, then in zip(w.counts(), b)] for w, b in zip(dynamo.workers, before)]
    (served,) = [w for w, (new, _) in zip(dynamo.workers, deltas) if new]
    return served, tokens, max(hits for _, hits in deltas)


def events_tell_where_a_prompt_is(dynamo):
    cached = []
    for i in range(PROMPTS):
        worker = dynamo.workers[i // 2 % 2]
        served, tokens, hits = follows(dynamo, worker)
        assert served is worker and hits >= tokens - 16, (i, tokens, hits)
        cached.append(int(hits))
    return f"{PROMPTS} prompts, hits {cached}"


def second_turns_follow_the_first(dynamo):
    return routers.second_turns_follow_the_first("dynamo", dynamo.url, dynamo.workers, None)


def number(worker, metric, labels=""):
    """A metric of a server; 0 before it has one."""
    found = re.search(rf"^{metric}\{{.*{labels}.*\}} (\S+)$", get(worker.url + "/metrics"), re.M)
    return float(found[1]) if found else 0


def total(dynamo, metric, labels=""):
    return sum(number(worker, metric, labels) for worker in dynamo.workers)


def a_client_that_leaves_ends_its_request(dynamo):
    aborted = lambda: total(dynamo, "vllm:request_success_total", 'finished_reason="abort"')
    before = aborted()
    response, _ = begin_stream(dynamo, "Once upon a time", 4000)
    assert total(dynamo, "vllm:num_requests_running") == 1
    left = time.monotonic()
    response.close()
    wait("the request has ended", lambda: total(dynamo, "vllm:num_requests_running") == 0)
    assert aborted() == before + 1
    return f"after {time.monotonic() - left:.2f} s"


def a_killed_server_is_left(dynamo):
    sessions = [routers.Session(dynamo.url, 100 + i) for i in range(routers.SESSIONS)]
    first = [routers.turn(session, dynamo.workers)[0] for session in sessions]
    response, line = begin_stream(dynamo, "Once upon a time", 4000)
    (dynamo.killed,) = [i for i, worker in enumerate(dynamo.workers) if number(worker, "vllm:num_requests_running")]
    dynamo.workers[dynamo.killed].process.kill()
    dynamo.workers[dynamo.killed].process.wait(20)
    text = line + response.read().decode()
    assert text.endswith("data: [DONE]\n\n"), text[-1000:]
    other = dynamo.workers[1 - dynamo.killed]
    before = other.counts()[0]
    tokens = sum(session.turn()["prompt_tokens"] for session in sessions)
    assert other.counts()[0] - before == tokens
    outcome = "an error" if '"error"' in text else "its last token"
    return f"{first.count(dynamo.killed)} conversations move; the stream ends with {outcome}"


def a_server_that_comes_back_is_used(dynamo):
    worker = dynamo.workers[dynamo.killed]
    worker.start(dynamo.stack)
    began = time.monotonic()
    wait("the frontend has the server again", lambda: dynamo.reaches(worker))
    # The sidecar connects to the events again after a while, and misses those before.
    wait("the frontend follows its events again", lambda: follows(dynamo, worker)[0] is worker)
    return f"after {time.monotonic() - began:.1f} s; {events_tell_where_a_prompt_is(dynamo)}"


CHECKS = [
    answers_are_those_of_the_server,
    events_tell_where_a_prompt_is,
    second_turns_follow_the_first,
    a_client_that_leaves_ends_its_request,
    a_killed_server_is_left,
    a_server_that_comes_back_is_used,
]


def check(binary, python):
    """Runs all checks; returns the number of failures."""
    failures = 0
    with ExitStack() as stack:
        dynamo = Dynamo(stack, binary, python)
        for function in CHECKS:
            try:
                print(f"ok    {function.__name__}: {function(dynamo)}", flush=True)
            except Exception:
                failures += 1
                print(f"FAIL  {function.__name__}\n{traceback.format_exc()}", flush=True)
        if failures:
            print(dynamo.logs())
    return failures


def install(folder):
    """The Python of a virtual environment with Dynamo; `None` if the wheels cannot be had."""
    python = folder / "bin/python"
    if not (folder / "installed").is_file():
        venv.create(folder, with_pip=True)
        pip = [python, "-m", "pip", "install", "-q"]
        if any(subprocess.run([*pip, *packages]).returncode for packages in (IMPORTED, ["--no-deps", *DYNAMO])):
            return None
        (folder / "installed").touch()
    return python


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=ROOT / "target/release/pegainfer")
    parser.add_argument("--venv", type=Path, default=ROOT / "target/dynamo", help="virtual environment of Dynamo")
    args = parser.parse_args()
    python = install(args.venv.absolute())
    if python is None:
        print("skipped: Dynamo's wheels cannot be installed here")
        return
    sys.exit(min(check(args.binary, python), 1))


if __name__ == "__main__":
    main()
