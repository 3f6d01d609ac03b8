#!/usr/bin/env python3
"""Takes the screenshot of README: the web UI with a response in Markdown, a chat with the bundled model, and its figures.

The bundled model writes no Markdown, so the first response is imported.

    pip install playwright
    cargo build --release && python3 tools/screenshot-web-ui.py --chromium /usr/bin/chromium docs/images/web-ui.png
"""

import argparse
import json
import re
import subprocess
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
FACT = "What is the capital of France?"
QUESTIONS = [FACT, "Tell me a story about a cat.", "Tell me a story about a dog.", FACT]
RESPONSE = """`Counter` counts the words and **sorts them by frequency**:

```python
from collections import Counter

def most_frequent(text: str, n: int) -> list[str]:
    return [word for word, _ in Counter(text.split()).most_common(n)]
```

By Zipf's law the word of rank $k$ among $N$ has the frequency

$$f(k) = \\frac{1/k}{\\sum_{i=1}^{N} 1/i}$$
"""
CONVERSATION = {
    "messages": [
        {"role": "user", "content": "How do I find the most frequent words of a text?"},
        {"role": "assistant", "content": RESPONSE},
    ]
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


def ask(page, question):
    turns = page.locator(".turn").count()
    page.locator("#prompt").fill(question)
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(turns + 1)
    expect(page.locator("#stop")).to_be_hidden(timeout=60_000)


def shoot(browser, address, out):
    page = browser.new_page(viewport={"width": 1360, "height": 800})
    page.goto(address)
    expect(page.locator("#model")).to_contain_text("qwen3-tiny", timeout=15_000)
    page.locator("#temperature").fill("0")
    for question in 4 * QUESTIONS:
        ask(page, question)
    text = json.dumps(CONVERSATION).encode()
    page.locator("#import-chooser").set_input_files({"name": "example.json", "mimeType": "application/json", "buffer": text})
    expect(page.locator(".turn")).to_have_count(1)
    ask(page, FACT)
    page.evaluate("document.querySelector('#live-title').scrollIntoView()")
    # The charts are drawn from two readings of /metrics.
    page.wait_for_timeout(3000)
    page.screenshot(path=out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--binary", default=ROOT / "target/release/pegainfer")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    command = [args.binary, "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        address = next(found.group() for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=args.chromium, args=FLAGS)
            shoot(browser, address, args.out)
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=40)


if __name__ == "__main__":
    main()
