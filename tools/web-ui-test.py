#!/usr/bin/env python3
"""Tests the web UI at `/` in headless Chromium, with the bundled model and with scripted responses.

    pip install playwright
    cargo build --release && python3 tools/web-ui-test.py --chromium /usr/bin/chromium

Without `--chromium` it uses the browser of `playwright install chromium`. `--screenshots DIR` keeps pictures. Not part
of `cargo test`: not every machine has a browser.
"""

import argparse
import json
import re
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
STORY = "Tell me a long story about a cat and a dog."
FACT = "What is the capital of France?"


@contextmanager
def server(binary):
    """The bundled model on a free port of this machine; gives its address."""
    command = [binary, "--port", "0", "--device", "cpu", "--model-path", ROOT / "models/qwen3-tiny"]
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


@contextmanager
def window(browser, url, width=1280, scheme="light", scripted=None, refused=False):
    """The web UI in a fresh tab. Console messages, exceptions and requests to other hosts fail the test.

    `scripted`: `(status, body)` of the response to chat requests, instead of the server's. `refused`: one of them is an
    error, which Chromium writes to the console.
    """
    touch = width < 600
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, has_touch=touch)
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
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("qwen3-tiny, context 4,096")
    yield page
    unexpected = [text for text in complaints if not (refused and "Failed to load resource" in text)]
    assert not unexpected, unexpected
    context.close()


def ask(page, text):
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def completed(page, outcome="Done"):
    expect(page.locator("#progress")).to_have_text(outcome)
    return page.locator(".turn").last


def settings(page):
    """Opens the panel where it is closed."""
    if page.locator("#panel-toggle").is_visible():
        page.locator("#panel-toggle").click()
        expect(page.locator("#panel-close")).to_be_focused()


def close_settings(page):
    if page.locator("#panel-close").is_visible():
        page.keyboard.press("Escape")
        expect(page.locator("#panel")).to_be_hidden()
        expect(page.locator("#panel-toggle")).to_be_focused()


def fits(page):
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the web UI scrolls sideways"


def chat_streams_stops_and_shows_probabilities(page, shoot):
    fits(page)
    shoot("empty")
    settings(page)
    shoot("settings")
    page.locator("#temperature").fill("0")
    page.locator("#system").fill("You answer in one sentence.")
    close_settings(page)

    # A response grows while it is streamed, and its summary follows.
    ask(page, FACT)
    turn = completed(page)
    expect(turn.locator(".response")).to_have_text("The capital of France is Paris.")
    figures = re.compile(r"prompt tokens.* · \d+ tokens · TTFT .* ms · TPOT .* ms")
    expect(turn.locator(".figures")).to_have_text(figures)
    assert page.bodies[0]["temperature"] == 0
    assert [message["role"] for message in page.bodies[0]["messages"]] == ["system", "user"]

    # Escape stops the second one; the request is cancelled, and the text so far is kept.
    page.evaluate(
        """() => new MutationObserver((_, observer) => {
            const response = document.querySelectorAll('.turn')[1]?.querySelector('.response')?.textContent ?? '';
            if (response.length < 20) return;
            observer.disconnect();
            document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
        }).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true})"""
    )
    ask(page, STORY)
    turn = completed(page, "Stopped")
    expect(turn.locator(".figures")).to_have_text(re.compile("^stopped · "))
    assert len(turn.locator(".response").inner_text()) >= 20
    expect(page.locator("#stop")).to_be_hidden()
    assert [message["role"] for message in page.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]

    # Each token shows its probability.
    settings(page)
    page.locator("#probabilities").check()
    page.locator("#live-title").scroll_into_view_if_needed()
    shoot("charts")
    close_settings(page)
    ask(page, FACT)
    turn = completed(page)
    expect(turn.locator(".response")).to_contain_text("Paris")
    token = turn.locator(".token", has_text="Paris")
    token.hover()
    card = page.locator("#card")
    expect(card).to_be_visible()
    expect(card.locator("caption")).to_have_text(re.compile(r"^␣?Paris \d+\.\d %$"))
    expect(card.locator("tr")).to_have_count(5)
    expect(card.locator("tr.chosen")).to_have_count(1)
    box = card.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"], box
    shoot("card")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    # The same by keyboard: arrow keys move between the tokens.
    page.locator("#log").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(turn.locator(".token").nth(1)).to_be_focused()
    expect(card).to_be_visible()
    fits(page)

    # The conversation survives a reload.
    page.reload()
    expect(page.locator(".turn")).to_have_count(3)
    expect(page.locator(".turn").first).to_contain_text("The capital of France is Paris.")
    expect(page.locator("#temperature")).to_have_value("0")
    page.locator("#new-chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def stop_button_cancels_on_the_server(page, url, shoot):
    # Without an end of text nothing but the button ends it soon. (A route would hold the stream back.)
    page.evaluate(
        """() => {
            const send = window.fetch;
            window.fetch = (path, options) => send(path, options.body
                ? {...options, body: options.body.replace('{', '{"ignore_eos": true, ')} : options);
        }"""
    )
    page.locator("#probabilities").check()
    ask(page, STORY)
    expect(page.locator("#send")).to_be_hidden()
    expect(page.locator(".response .token").first).to_be_visible()
    page.locator("#stop").click()
    completed(page, "Stopped")
    expect(page.locator("#prompt")).to_be_focused()
    shoot("stopped")
    deadline = time.monotonic() + 2
    idle = re.compile(r"^vllm:num_requests_running\{.*\} 0(\.0)?$", re.M)
    while not idle.search(page.request.get(f"{url}/metrics").text()):
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.05)
    # A new chat in the middle of a response leaves nothing of it.
    ask(page, STORY)
    expect(page.locator(".turn")).to_have_count(2)
    page.locator("#new-chat").click()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#progress")).to_have_text("")
    expect(page.locator(".turn")).to_have_count(0)


def charts_move(page):
    ask(page, FACT)
    completed(page)
    for at in (0, 1):
        expect(page.locator("figure").nth(at).locator("rect")).to_have_count(1)
        expect(page.locator("figure").nth(at).locator("strong")).to_have_text(re.compile(r"^\d+(\.\d+)? ms$"))
    expect(page.locator("figure").nth(2).locator("strong")).to_have_text(re.compile(r"^\d+ running, \d+ waiting$"))
    expect(page.locator("figure").nth(3).locator("strong")).to_have_text(re.compile(r"^\d+\.\d %$"))
    before = page.locator("polyline.first").first.get_attribute("points")
    expect(page.locator("polyline.first").first).not_to_have_attribute("points", before)


def keys_and_refusals(page):
    prompt = page.locator("#prompt")
    prompt.press_sequentially("one")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("two")
    expect(prompt).to_have_value("one\ntwo")
    assert not page.bodies
    # A value that the form refuses is shown, not sent.
    page.locator("#top_p").fill("3")
    prompt.press("Enter")
    expect(page.locator("#top_p")).to_be_focused()
    assert not page.bodies
    page.locator("#top_p").fill("")
    # A refusal shows the server's message and restores the prompt. The key is sent and never stored.
    page.locator("#api-key").fill("secret")
    page.locator("#max_tokens").fill("5")
    page.locator("#system").fill("too long " * 4096)
    with page.expect_request("**/v1/chat/completions") as sent:
        prompt.press("Enter")
    assert sent.value.headers["authorization"] == "Bearer secret"
    assert sent.value.post_data_json["max_tokens"] == 5
    completed(page, "Failed")
    expect(page.locator(".error")).to_contain_text("4096")
    expect(prompt).to_have_value("one\ntwo")
    assert "secret" not in page.evaluate("JSON.stringify(sessionStorage) + JSON.stringify(localStorage)")


def stream(*chunks, done=True):
    """A scripted body: a string is text, a dict a delta, a list a chunk as it is."""
    events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    for chunk in chunks:
        delta = {"content": chunk} if isinstance(chunk, str) else chunk
        events.append(chunk[0] if isinstance(chunk, list) else {"choices": [{"delta": delta}]})
    return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + ("data: [DONE]\n\n" if done else "")


def check_reasoning(page, expected, content):
    turn = completed(page)
    expect(turn.locator(".reasoning > div")).to_be_hidden()
    turn.locator("summary").click()
    expect(turn.locator(".reasoning > div")).to_have_text(expected)
    expect(turn.locator(".response")).to_have_text(content)


def scripted_responses(browser, url, shoot):
    tagged = stream("<th", "ink>\nHm", "m. <b>", "</thi", "nk>\n\n", "It is 4, not <think>.")
    opened_by_template = stream("Hm", "m. <b>", "\n</think>", "\n\nIt is 4, not <think>.")
    field = stream({"reasoning_content": "Hmm. <b>"}, {"reasoning_content": ""}, "It is 4, not <think>.")
    for script in (tagged, opened_by_template, field):
        with window(browser, url, scripted=script) as page:
            ask(page, "2 + 2?")
            check_reasoning(page, "Hmm. <b>", "It is 4, not <think>.")
            shoot(page, "reasoning")
            ask(page, "Sure?")
            expect(page.locator(".turn")).to_have_count(2)
            completed(page)
            assert page.bodies[1]["messages"][1] == {"role": "assistant", "content": "It is 4, not <think>."}

    code = stream("Look:\n`", "``py", "thon\nif a < b:\n", "    go()\n``", "`\nDone with ```. <img src=x>")
    with window(browser, url, scripted=code) as page:
        ask(page, "Code?")
        turn = completed(page)
        expect(turn.locator("pre")).to_have_text("if a < b:\n    go()", use_inner_text=False)
        expect(turn.locator(".response p")).to_have_text(["Look:", "Done with ```. <img src=x>"])
        shoot(page, "code")

    error = [{"error": {"message": "the GPU is gone", "type": "server_error", "param": None, "code": None}}]
    for script, words in ((stream("Half of", error), "the GPU is gone"), (stream("Half of", done=False), "was closed")):
        with window(browser, url, scripted=script) as page:
            ask(page, "Hello?")
            turn = completed(page, "Failed")
            expect(turn.locator(".response")).to_have_text("Half of")
            expect(turn.locator("[role=alert]")).to_contain_text(words)
            shoot(page, "error")
    with window(browser, url, scripted=(401, '{"error":"Unauthorized"}'), refused=True) as page:
        ask(page, "Hello?")
        error = completed(page, "Failed").locator(".error")
        expect(error).to_have_text("Unauthorized. Enter the API key in the settings.")


MARKDOWN = """# Title

Some **bold**, *italic* and `x < y` with a [link](https://example.org/), an
![image](https://example.org/i.png), a [trap](javascript:alert(1)) &amp; <b onclick="alert(1)">markup</b>.

1. one
   - [x] inner
2. two

| a | b |
|---|--:|
| 1 | 2 |

<script>alert(1)</script>

> quoted

```rust
fn main() {}
```

See [later].

[later]: https://example.org/later"""


def check_markdown(turn):
    response = turn.locator(".response")
    expect(response.locator("h3")).to_have_text("Title")
    expect(response.locator("p").first.locator("strong, em, code")).to_have_text(["bold", "italic", "x < y"])
    links = response.locator("a")
    expect(links).to_have_text(["link", "image", "later"])
    for at in range(3):
        expect(links.nth(at)).to_have_attribute("rel", "noopener noreferrer")
        expect(links.nth(at)).to_have_attribute("href", re.compile("^https://example.org/"))
    # Markup stays text, and nothing of it is loaded or run.
    expect(response.locator("p").first).to_contain_text('a trap & <b onclick="alert(1)">markup</b>.')
    expect(response.locator(".verbatim")).to_have_text("<script>alert(1)</script>")
    expect(response.locator("script, img, b, [onclick]")).to_have_count(0)
    expect(response.locator("ol > li")).to_have_count(2)
    expect(response.locator("ol ul > li")).to_have_text("☑ inner")
    expect(response.locator("td.right")).to_have_text("2")
    expect(response.locator("blockquote")).to_have_text("quoted")
    expect(response.locator("pre")).to_have_text("fn main() {}")
    expect(response.locator(".code-bar span")).to_have_text("rust")


def clipboard(page):
    return page.evaluate("navigator.clipboard.readText()")


def markdown_and_copies(browser, url, shoot):
    one_by_one = stream(*MARKDOWN)
    with window(browser, url, scripted=one_by_one) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page, "Markdown?")
        turn = completed(page)
        check_markdown(turn)
        shoot(page, "markdown")
        turn.get_by_role("button", name="Copy code").click()
        expect(turn.get_by_role("button", name="Copy code")).to_have_text("Copied")
        assert clipboard(page) == "fn main() {}"
        turn.get_by_role("button", name="Copy response").click()
        expect(turn.get_by_role("button", name="Copy response")).to_have_text("Copied")
        assert clipboard(page) == MARKDOWN
        turn.get_by_role("button", name="Copy message").click()
        expect(turn.get_by_role("button", name="Copy message")).to_have_text("Copied")
        assert clipboard(page) == "Markdown?"
        # Without the clipboard API, as over plain HTTP from another machine.
        page.evaluate("Object.defineProperty(navigator, 'copying', {value: navigator.clipboard})")
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        turn.get_by_role("button", name="Copy code").click()
        expect(turn.get_by_role("button", name="Copy code")).to_have_text("Copied")
        assert page.evaluate("navigator.copying.readText()") == "fn main() {}"
        page.reload()
        check_markdown(page.locator(".turn"))

    # While a response grows, complete blocks keep their elements.
    with window(browser, url) as page:
        page.evaluate(
            """async () => {
                const { MarkdownView } = await import('./ui/markdown.js');
                const root = document.createElement('div');
                const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
                const view = new MarkdownView(root);
                view.push({ text: 'one\\n\\n- a' });
                await frame();
                const kept = root.firstChild;
                view.push({ text: '\\n- b\\n\\n```\\nlet' });
                await frame();
                window.grown = [kept === root.firstChild, root.textContent.replace('Copy', '')];
            }"""
        )
        assert page.evaluate("window.grown") == [True, "oneablet"]

    # Nesting that is too deep for the parser is shown as text.
    deep = ">" * 20_000
    with window(browser, url, scripted=stream(deep)) as page:
        ask(page, "Nested?")
        expect(completed(page).locator(".response")).to_have_text(deep)


def regenerates_and_edits(browser, url):
    with window(browser, url) as page:
        page.locator("#temperature").fill("0")
        ask(page, FACT)
        completed(page)
        ask(page, "Thanks.")
        expect(page.locator(".turn")).to_have_count(2)
        completed(page)
        # Editing the first message discards what followed it.
        first = page.locator(".turn").first
        first.get_by_role("button", name="Edit message").click()
        field = first.get_by_role("textbox", name="Edited message")
        expect(field).to_be_focused()
        expect(field).to_have_value(FACT)
        page.keyboard.press("Escape")
        expect(field).to_be_hidden()
        expect(first.get_by_role("button", name="Edit message")).to_be_focused()
        page.keyboard.press("Enter")
        field.fill("What is the capital of Italy?")
        first.get_by_role("button", name="Send").click()
        expect(page.locator(".question")).to_have_text(["You: What is the capital of Italy?"])
        completed(page)
        assert page.bodies[2]["messages"] == [{"role": "user", "content": "What is the capital of Italy?"}]
        # Regenerating sends the same messages again, with those before and without the response.
        ask(page, FACT)
        expect(page.locator(".turn")).to_have_count(2)
        turn = completed(page)
        expect(turn.locator(".figures")).to_be_visible()
        turn.get_by_role("button", name="Regenerate").click()
        expect(page.locator("#prompt")).to_be_focused()
        turn = completed(page)
        expect(turn.locator(".figures")).to_be_visible()
        expect(turn.locator(".response")).to_have_text("The capital of France is Paris.")
        expect(page.locator(".turn")).to_have_count(2)
        assert page.bodies[4]["messages"] == page.bodies[3]["messages"]
        assert [message["role"] for message in page.bodies[4]["messages"]] == ["user", "assistant", "user"]
        page.reload()
        expect(page.locator(".question")).to_have_text(["You: What is the capital of Italy?", f"You: {FACT}"])


def tokens_and_markdown(browser, url):
    def token(text):
        entry = {"token": text, "logprob": -0.5, "top_logprobs": [{"token": text, "logprob": -0.5}]}
        return [{"choices": [{"delta": {"content": text}, "logprobs": {"content": [entry]}}]}]

    with window(browser, url, scripted=stream(*map(token, ["**Bo", "ld**", " text"]))) as page:
        ask(page, "Tokens?")
        turn = completed(page)
        expect(turn.locator(".token")).to_have_text(["**Bo", "ld**", " text"])
        toggle = turn.get_by_role("button", name="Show tokens", pressed=True)
        toggle.click()
        expect(turn.locator(".token")).to_have_count(0)
        expect(turn.locator("strong")).to_have_text("Bold")
        turn.get_by_role("button", name="Show tokens", pressed=False).click()
        turn.locator(".token").nth(1).hover()
        expect(page.locator("#card caption")).to_have_text("ld** 60.7 %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=ROOT / "target/release/pegainfer")
    parser.add_argument("--chromium", help="browser to use instead of playwright's own")
    parser.add_argument("--screenshots", type=Path, help="folder for pictures")
    options = parser.parse_args()

    def shoot(page, name):
        if options.screenshots:
            page.screenshot(path=options.screenshots / f"{name}.png")

    with server(options.binary) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium)
        for width in (320, 1280):
            for scheme in ("light", "dark"):
                with window(browser, url, width, scheme) as page:
                    name = f"{width}-{scheme}"
                    chat_streams_stops_and_shows_probabilities(page, lambda part: shoot(page, f"{name}-{part}"))
                print(f"ok: chat, stop and probabilities, {width} px, {scheme}")
        with window(browser, url) as page:
            stop_button_cancels_on_the_server(page, url, lambda name: shoot(page, name))
        print("ok: the stop button frees the server")
        with window(browser, url) as page:
            charts_move(page)
        print("ok: charts")
        with window(browser, url, refused=True) as page:
            keys_and_refusals(page)
        print("ok: keys and refusals")
        scripted_responses(browser, url, shoot)
        print("ok: reasoning, code and errors")
        markdown_and_copies(browser, url, shoot)
        print("ok: Markdown and copies")
        regenerates_and_edits(browser, url)
        print("ok: regenerated and edited turns")
        tokens_and_markdown(browser, url)
        print("ok: tokens and Markdown of one response")
        browser.close()


if __name__ == "__main__":
    main()
