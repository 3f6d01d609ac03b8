#!/usr/bin/env python3
"""Measures the chats of one client while slow readers and attackers use the same server.

    tools/measure-under-attack.py --port 8000 --pid "$(pgrep -x pegainfer)" [--seconds 600] [--vocab 4096]

600 clients request long streams and read only a byte now and then. In the last fifth of the time one address sends new
schemas, bodies of many values and long texts, and then also generates. A separate process sends the chats, so that this one
does not delay them. Prints a line of JSON for each phase: times in ms, memory in MB. The results are in
docs/operations/reliability.md.
"""
import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request

SLOW_READERS = 600
ATTACKERS = {"schema": 160, "values": 20, "tokenize": 60}
GENERATORS = 160


def request(path, body):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def connect(args, address):
    return await asyncio.open_connection("127.0.0.1", args.port, local_addr=(address, 0), limit=1 << 20)


def token_ids(args, count):
    return [random.randrange(args.vocab) for _ in range(count)]


async def forever(once):
    while True:
        try:
            await once()
        except OSError:
            await asyncio.sleep(0.2)


async def slow_reader(args, address):
    reader, writer = await connect(args, address)
    try:
        body = {"prompt": token_ids(args, 64), "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 1, "logprobs": 20}
        writer.write(request("/v1/completions", body))
        while await reader.read(1):
            await asyncio.sleep(random.choice([1, 5, 20]))
    finally:
        writer.close()


def attack(args, kind):
    if kind == "schema":
        names = {f"n{random.getrandbits(64):x}": {} for _ in range(980)}
        schema = {"type": "object", "properties": {f"o{i}": {"type": "object", "properties": names} for i in range(5)}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return request("/v1/completions", {"prompt": "x", "max_tokens": 4, "response_format": form})
    if kind == "values":
        return request("/v1/completions", {"prompt": "x", "max_tokens": 4, "x": [0] * 880_000})
    if kind == "tokenize":
        return request("/tokenize", {"prompt": "word " * 50_000})
    body = {"prompt": token_ids(args, 200), "max_tokens": 100, "ignore_eos": True, "n": 2}
    return request("/v1/completions", body)


async def attacker(args, kind):
    reader, writer = await connect(args, "127.0.2.7")
    try:
        writer.write(attack(args, kind))
        if b" 200 " not in await reader.readline():
            await asyncio.sleep(0.05)
        await asyncio.wait_for(reader.read(65_536), 60)
    finally:
        writer.close()


async def chats(args):
    """Writes a line of JSON for each chat until the process is killed."""
    text = "lorem ipsum dolor sit amet " * 110
    while True:
        began, times, error = time.time(), [], None
        try:
            reader, writer = await connect(args, "127.9.0.9")
            message = {"role": "user", "content": f"{random.random()} {text}"}
            body = {"messages": [message], "max_tokens": 60, "stream": True, "ignore_eos": True, "temperature": 0}
            writer.write(request("/v1/chat/completions", body))
            status = await reader.readline()
            error = None if b" 200 " in status else status.decode()
            while not error and (line := await asyncio.wait_for(reader.readline(), 60)) and b"[DONE]" not in line:
                if line.startswith(b"data: ") and (b'"content":"' in line or b'"reasoning' in line):
                    times.append(time.time())
            writer.close()
        except (OSError, asyncio.TimeoutError) as failure:
            error = repr(failure)
        print(json.dumps({"began": began, "times": times, "error": error}), flush=True)
        await asyncio.sleep(0.5)


def resident(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def unread(port):
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("pegainfer:unread_output_bytes")) / 1e6


def quantile(values, q):
    values = sorted(values)
    return round(values[min(len(values) - 1, int(q * len(values)))], 1) if values else None


async def phase(args, name, seconds, log):
    began, memory, output = time.time(), [], []
    while time.time() < began + seconds:
        memory.append(resident(args.pid))
        output.append(await asyncio.to_thread(unread, args.port))
        await asyncio.sleep(1)
    with open(log) as lines:
        done = [chat for chat in map(json.loads, lines) if began <= chat["began"] < began + seconds]
    good = [chat for chat in done if chat["times"]]
    first = [1e3 * (chat["times"][0] - chat["began"]) for chat in good]
    gaps = [1e3 * (b - a) for chat in good for a, b in zip(chat["times"], chat["times"][1:])]
    result = {"phase": name, "chats": len(good), "failed": len(done) - len(good)}
    result |= {"ttft_p50": quantile(first, 0.5), "ttft_p99": quantile(first, 0.99)}
    result |= {"itl_p50": quantile(gaps, 0.5), "itl_p99": quantile(gaps, 0.99)}
    print(json.dumps(result | {"unread": round(max(output), 1), "resident": round(max(memory))}), flush=True)


async def main(args):
    with tempfile.NamedTemporaryFile("w") as log:
        other = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--chats"], stdout=log)
        try:
            await phase(args, "alone", 15, log.name)
            tasks = [asyncio.create_task(forever(lambda a=f"127.0.1.{1 + i % 20}": slow_reader(args, a))) for i in range(SLOW_READERS)]
            await phase(args, "slow readers", 0.8 * args.seconds, log.name)
            tasks += [asyncio.create_task(forever(lambda k=k: attacker(args, k))) for k, n in ATTACKERS.items() for _ in range(n)]
            await phase(args, "and attackers", 0.1 * args.seconds, log.name)
            tasks += [asyncio.create_task(forever(lambda: attacker(args, "generate"))) for _ in range(GENERATORS)]
            await phase(args, "and those that generate", 0.1 * args.seconds, log.name)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(5)
            await phase(args, "afterwards", 10, log.name)
        finally:
            other.kill()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--pid", type=int, required=True, help="the server's process")
parser.add_argument("--seconds", type=float, default=600)
parser.add_argument("--vocab", type=int, default=4096, help="token ids are below this")
parser.add_argument("--chats", action="store_true", help=argparse.SUPPRESS)
arguments = parser.parse_args()
asyncio.run(chats(arguments) if arguments.chats else main(arguments))
