#!/usr/bin/env python3
"""Runs the OpenAI and Anthropic SDKs and schemathesis, unmodified, against the bundled model.

    python3 -m venv /tmp/clients && /tmp/clients/bin/pip install openai anthropic schemathesis
    cargo build --release && /tmp/clients/bin/python tools/clients-test.py

Prints a line for each check and the SDKs' versions; the exit code is 1 if one fails. The bundled model is too small to
decide on a tool, so calls are forced. The text is not checked; the shapes are, by the SDKs' own types.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import traceback
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
HI = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Bern", "Paris"]}}, "required": ["city"],
        "additionalProperties": False}
# The SDK has no argument for it.
GREEDY = {"temperature": 0}
# Checks of a server with each value of --task.
CHECKS = {"generate": [], "embed": []}


class Colour(Enum):
    black = "black"
    white = "white"


class Cat(BaseModel):
    # Few values are allowed, because the bundled model does not end a number by itself.
    colour: Colour
    lives: Literal[7, 9]


def check(function, task="generate"):
    CHECKS[task].append(function)
    return function


def check_vectors(function):
    return check(function, "embed")


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@contextmanager
def server(binary, task):
    """The bundled model on a free port of this machine, with an API key; yields its address."""
    command = [binary, "--port", "0", "--device", "cpu", "--api-key", "k1", "--model-path", ROOT / "models/qwen3-tiny",
               "--task", task]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"on (http://[\d.:]+)", line):
                yield found[1]
                return
        raise SystemExit(f"{binary} did not start")
    finally:
        process.terminate()
        process.communicate()


@check
def openai_models(client, _):
    assert [model.id for model in client.models.list()] == ["qwen3-tiny"]


@check
def openai_chat(client, _):
    response = client.chat.completions.create(model="qwen3-tiny", messages=HI, temperature=0, logprobs=True, top_logprobs=2)
    assert "Paris" in response.choices[0].message.content, response
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
    assert len(response.choices[0].logprobs.content[0].top_logprobs) == 2


@check
def openai_chat_stream(client, _):
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="qwen3-tiny", messages=HI, temperature=0, stream=True, stream_options=options)
    chunks = list(stream)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0 and not chunks[-1].choices


@check
def openai_completions(client, _):
    response = client.completions.create(model="qwen3-tiny", prompt=["Once upon", "The dog"], max_tokens=5, echo=True, logprobs=1, n=2)
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.choices[0].text.startswith("Once upon") and response.choices[0].logprobs.token_logprobs[0] is None


@check
def openai_tools(client, _):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
    ask = lambda **more: client.chat.completions.create(
        model="qwen3-tiny", messages=HI, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=1, **more)
    response = ask()
    (call,) = response.choices[0].message.tool_calls
    assert response.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Paris")
    deltas = [chunk.choices[0].delta for chunk in ask(stream=True)]
    parts = [part.function.arguments for delta in deltas for part in delta.tool_calls or []]
    assert "".join(parts) == call.function.arguments, parts
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    client.chat.completions.create(model="qwen3-tiny", messages=HI + [response.choices[0].message, result], tools=tools)


@check
def openai_structured_output(client, _):
    response = client.chat.completions.parse(model="qwen3-tiny", messages=HI, response_format=Cat, max_tokens=200, temperature=0)
    assert isinstance(response.choices[0].message.parsed, Cat)
    with client.chat.completions.stream(model="qwen3-tiny", messages=HI, response_format=Cat, max_tokens=200, temperature=0) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Cat)
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    response = client.chat.completions.create(model="qwen3-tiny", messages=HI, extra_body=extra)
    assert response.choices[0].message.content in ("yes", "no")


@check
def openai_errors(client, _):
    chat = lambda **fields: client.chat.completions.create(**{"model": "qwen3-tiny", "messages": HI} | fields)
    error = raises(openai.BadRequestError, lambda: chat(temperature=-1))
    assert error.param == "temperature" and error.type == "invalid_request_error", error
    assert raises(openai.NotFoundError, lambda: chat(model="gpt")).code == "model_not_found"
    assert raises(openai.BadRequestError, lambda: chat(messages=HI * 5000)).code == "context_length_exceeded"
    raises(openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list())


@check
def openai_responses(client, _):
    response = client.responses.create(model="qwen3-tiny", input="What is the capital of France?", temperature=0)
    assert "Paris" in response.output_text and response.status == "completed", response
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    again = [*HI, *response.output, {"role": "user", "content": "And of Italy?"}]
    short = client.responses.create(model="qwen3-tiny", input=again, instructions="Be brief.", max_output_tokens=2)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"


@check
def openai_responses_stream(client, _):
    with client.responses.stream(model="qwen3-tiny", input="What is the capital of France?", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert "Paris" in text and final.output_text == text, final


@check
def openai_responses_tools(client, _):
    tools = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
    ask = {"model": "qwen3-tiny", "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    response = client.responses.create(input=HI, **ask)
    (call,) = response.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Bern", "Paris"), response
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(model="qwen3-tiny", input=[*HI, call, output], tools=tools, max_output_tokens=5)
    with client.responses.stream(input=HI, **ask) as stream:
        kinds = [event.type for event in stream]
    assert "response.function_call_arguments.done" in kinds, kinds
    parsed = client.responses.parse(model="qwen3-tiny", input=HI, text_format=Cat, max_output_tokens=200,
                                    temperature=0)
    assert isinstance(parsed.output_parsed, Cat)
    error = raises(openai.BadRequestError, lambda: client.responses.create(
        model="qwen3-tiny", input="x", previous_response_id="resp_1"))
    assert error.param == "previous_response_id"


@check
def anthropic_messages(_, client):
    message = client.messages.create(
        model="qwen3-tiny", max_tokens=50, messages=HI, system="You know facts.", extra_body=GREEDY)
    assert message.content[0].type == "text" and message.stop_reason in ("end_turn", "max_tokens"), message
    assert message.usage.output_tokens > 0
    stopped = client.messages.create(model="qwen3-tiny", max_tokens=50, messages=HI, stop_sequences=["capital"], extra_body=GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "capital"), stopped
    count = client.messages.count_tokens(model="qwen3-tiny", messages=HI)
    assert count.input_tokens == stopped.usage.input_tokens + stopped.usage.cache_read_input_tokens


@check
def anthropic_stream(_, client):
    with client.messages.stream(model="qwen3-tiny", max_tokens=50, messages=HI, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text and final.content[0].text == text and final.stop_reason == "end_turn", final


@check
def anthropic_tools(_, client):
    ask = {"model": "qwen3-tiny", "max_tokens": 200, "messages": HI,
           "tools": [{"name": "weather", "description": "Tells it.", "input_schema": CITY}],
           "tool_choice": {"type": "tool", "name": "weather"}}
    message = client.messages.create(**ask)
    (call,) = message.content
    assert message.stop_reason == "tool_use" and call.input["city"] in ("Bern", "Paris"), message
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert final.content[0].input["city"] in ("Bern", "Paris"), final
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    turns = [*HI, {"role": "assistant", "content": message.content}, result]
    client.messages.create(model="qwen3-tiny", max_tokens=5, messages=turns, tools=ask["tools"])


@check
def anthropic_structured_output(_, client):
    parsed = client.messages.parse(model="qwen3-tiny", max_tokens=200, messages=HI, output_format=Cat,
                                   extra_body={"temperature": 0})
    assert isinstance(parsed.parsed_output, Cat), parsed


@check
def anthropic_errors(_, client):
    ask = lambda **fields: client.messages.create(**{"model": "qwen3-tiny", "max_tokens": 5, "messages": HI} | fields)
    error = raises(anthropic.BadRequestError, lambda: ask(extra_body={"temperature": -1}))
    assert error.body["error"]["type"] == "invalid_request_error" and "temperature" in error.body["error"]["message"]
    raises(anthropic.NotFoundError, lambda: ask(model="claude"))
    raises(anthropic.AuthenticationError, lambda: client.with_options(api_key="wrong").messages.create(
        model="qwen3-tiny", max_tokens=5, messages=HI))


@check
def schemathesis_openapi(client, _):
    """Generated requests from /openapi.json: no 5xx, no response that the document does not describe."""
    checks = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
              "response_headers_conformance", "unsupported_method"]
    command = [Path(sys.executable).with_name("schemathesis"), "run", str(client.base_url.join("/openapi.json")),
               "--header", f"Authorization: Bearer {client.api_key}", "--checks", ",".join(checks), "--max-examples", "30",
               "--seed", "1", "--request-timeout", "60", "--no-color"]
    with tempfile.TemporaryDirectory() as directory:
        run = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, timeout=300)
    assert run.returncode == 0, run.stdout
    print(re.search(r"\d+ generated.*", run.stdout)[0])


@check_vectors
def openai_embeddings(client, _):
    texts = ["Bees make honey.", "The capital of France is Paris."]
    # The SDK asks for base64 if nothing is said.
    both = client.embeddings.create(model="qwen3-tiny", input=texts)
    assert [len(item.embedding) for item in both.data] == [320, 320] and both.usage.prompt_tokens > 8
    assert all(abs(sum(x * x for x in item.embedding) - 1) < 1e-4 for item in both.data)
    lists = client.embeddings.create(model="qwen3-tiny", input=texts, encoding_format="float", dimensions=32)
    assert [len(item.embedding) for item in lists.data] == [32, 32]
    error = raises(openai.BadRequestError, lambda: client.embeddings.create(model="qwen3-tiny", input=[]))
    assert error.param == "input", error
    error = raises(openai.BadRequestError, lambda: client.chat.completions.create(model="qwen3-tiny", messages=HI))
    assert error.code == "wrong_task", error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/pegainfer")
    binary = parser.parse_args().binary
    print(f"openai {openai.__version__}, anthropic {anthropic.__version__}")
    failed = 0
    for task, checks in CHECKS.items():
        with server(binary, task) as url:
            clients = (openai.OpenAI(base_url=f"{url}/v1", api_key="k1", max_retries=0),
                       anthropic.Anthropic(base_url=url, api_key="k1", max_retries=0))
            for function in checks:
                try:
                    function(*clients)
                    print(f"ok     {function.__name__}")
                except Exception:
                    failed += 1
                    print(f"FAILED {function.__name__}\n{traceback.format_exc()}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
