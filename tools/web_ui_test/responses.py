"""Scripted responses: reasoning, errors, Markdown and probabilities."""

import re

from playwright.sync_api import expect

from web_ui_test.harness import ask, completed, stream, window


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
    for script, words in ((stream("Half of", error), "The GPU is gone"), (stream("Half of", done=False), "was closed")):
        with window(browser, url, scripted=script) as page:
            ask(page, "Hello?")
            turn = completed(page, "Failed")
            expect(turn.locator(".response")).to_have_text("Half of")
            expect(turn.locator("[role=alert]")).to_contain_text(words)
            shoot(page, "error")


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
    expect(response.locator(".code-bar > span")).to_have_text("rust")


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
                for (let at = 0; at < 100 && !root.textContent.includes('let'); at += 1) await frame();
                window.grown = [kept === root.firstChild, root.textContent];
            }"""
        )
        assert page.evaluate("window.grown") == [True, "oneablet"]

    # Text for which the parser's time grows with its square, in one paragraph: each line of a long one is parsed by itself.
    lines = "**bold** line\n" * 700
    slow = f"{'_a' * 40_000}\n\n{lines}"
    with window(browser, url, scripted=stream(*(slow[at:at + 500] for at in range(0, len(slow), 500)))) as page:
        ask(page, "Slow?")
        response = completed(page).locator(".response")
        expect(response.locator("p")).to_have_count(2)
        expect(response.locator("p").first).to_have_text("_a" * 40_000)
        expect(response.locator("p").last.locator("strong")).to_have_count(700)

    # More nodes than a call can take as arguments, and marks that a parser pairs in quadratic time.
    with window(browser, url) as page:
        shown = page.evaluate(
            """async () => {
                const { MarkdownView } = await import('./ui/markdown.js');
                const { withFiles } = await import('./ui/attachments.js');
                const show = (text) => {
                    const root = document.createElement('div');
                    const view = new MarkdownView(root);
                    view.push({ text });
                    view.end();
                    return root;
                };
                const started = performance.now();
                const breaks = show('a  \\n'.repeat(40000)).querySelectorAll('br').length;
                const items = show('- a\\n'.repeat(70000)).querySelectorAll('li').length;
                const pairs = Array(20).fill('*a_'.repeat(2730)).join('\\n\\n');
                const text = show(pairs).textContent === pairs.replaceAll('\\n', '');
                show('*a **b '.repeat(60) + ' c** d*'.repeat(60));
                const time = performance.now() - started;
                const fence = withFiles('', [{ name: 'a', content: '```\\n'.repeat(200000) }]).split('\\n')[1];
                return { breaks, items, text, fence, isFast: time < 6000 };
            }"""
        )
        assert shown == {"breaks": 39_999, "items": 70_000, "text": True, "fence": "````", "isFast": True}, shown

    # Nesting that is too deep for the parser is shown as text.
    deep = ">" * 20_000
    with window(browser, url, scripted=stream(deep)) as page:
        ask(page, "Nested?")
        expect(completed(page).locator(".response")).to_have_text(deep)


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
