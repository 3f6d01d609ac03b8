"""The server under test, a tab of the browser, and common test actions."""

import json
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "models/qwen3-tiny"
STORY = "Tell me a long story about a cat and a dog."
FACT = "What is the capital of France?"
MODEL_FACTS = re.compile(r"^qwen3-tiny, Qwen3, 18 MiB of weights on cpu.*, context 4,096$")


@contextmanager
def server(binary, *flags):
    """The bundled model on a free port of this machine, with more flags; yields its address."""
    command = [binary, "--port", "0", "--device", "cpu", "--admin-local", "--model-path", MODEL, *flags]
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


def ledger(binary, file):
    """Measures a small ledger of the bundled model."""
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--max-model-len", "1024", "--log-level", "warn"]
    command = [binary, "ledger", "--quick", "--out", file, "--device", "cpu", "--model-path", MODEL, *sizes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def window(browser, url, width=1280, scheme="light", scripted=None, refused=False, before=None, facts=MODEL_FACTS):
    """The web UI in a fresh tab. Console messages, exceptions and requests to other hosts fail the test.

    `scripted`: `(status, body)` of the response to chat requests, instead of the server's. `refused`: one of them is an
    error, which Chromium writes to the console. `before`: a script that runs before the web UI's. `facts`: the text next to
    the title once the server has answered.
    """
    touch = width < 600
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=touch, is_mobile=touch)
    page = context.new_page()
    page.set_default_timeout(15_000)
    complaints, page.bodies = [], []

    def note(request):
        if not request.url.startswith(url):
            complaints.append(f"asked another host: {request.url}")
        if request.url.endswith("/v1/chat/completions"):
            page.bodies.append(request.post_data_json)

    page.on("request", note)
    page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
    page.on("console", lambda message: complaints.append(f"console: {message.text}"))
    if scripted:
        status, body = scripted
        kind = "text/event-stream" if status == 200 else "application/json"
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body, content_type=kind))
    if before:
        page.add_init_script(before)
    page.goto(url)
    expect(page.locator("#model")).to_have_text(facts)
    yield page
    unexpected = [text for text in complaints if not (refused and "Failed to load resource" in text)]
    assert not unexpected, unexpected
    context.close()


def ask(page, text):
    """Sends a prompt: with the button on a phone, with Enter elsewhere."""
    page.locator("#prompt").fill(text)
    if page.viewport_size["width"] < 600:
        page.locator("#send").tap()
    else:
        page.keyboard.press("Enter")


def completed(page, outcome="Done"):
    expect(page.locator("#progress")).to_have_text(outcome)
    return page.locator(".turn").last


def settings(page):
    """Opens the panel if it is closed."""
    if not page.locator("#panel").is_visible():
        page.locator("#panel-toggle").click()
        expect(page.locator("#panel-close")).to_be_focused()


def close_settings(page):
    """Closes the panel if it covers the conversation."""
    if page.locator("#backdrop").is_visible():
        page.keyboard.press("Escape")
        expect(page.locator("#panel")).to_be_hidden()
        expect(page.locator("#panel-toggle")).to_be_focused()


def fits(page):
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the web UI scrolls sideways"


def stream(*chunks, done=True):
    """A scripted body: a string is text, a dict a delta, a list an unmodified chunk."""
    events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    for chunk in chunks:
        delta = {"content": chunk} if isinstance(chunk, str) else chunk
        events.append(chunk[0] if isinstance(chunk, list) else {"choices": [{"delta": delta}]})
    return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")
