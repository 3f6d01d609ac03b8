"""Colours, contrast and access by keyboard."""

import re

from playwright.sync_api import expect

from web_ui_test.files import choose, upload
from web_ui_test.harness import ask, completed, stream, window

LIGHT, DARK = "rgb(250, 250, 248)", "rgb(21, 24, 26)"


def theme(browser, url):
    """The choice wins over the system's scheme, outlives a reload, and applies before the first paint."""
    with window(browser, url, scheme="light") as page:
        body = page.locator("body")
        choice = page.get_by_label("Colours")
        expect(body).to_have_css("background-color", LIGHT)
        choice.select_option("dark")
        expect(body).to_have_css("background-color", DARK)
        # The document's theme when the browser has only read its head.
        page.add_init_script(
            """new MutationObserver((_, observer) => {
                if (!document.body) return;
                observer.disconnect();
                window.first = document.documentElement.dataset.theme;
            }).observe(document, { childList: true, subtree: true });"""
        )
        page.reload()
        assert page.evaluate("window.first") == "dark"
        expect(body).to_have_css("background-color", DARK)
        expect(choice).to_have_value("dark")
        choice.select_option("auto")
        expect(body).to_have_css("background-color", LIGHT)
        page.emulate_media(color_scheme="dark")
        expect(body).to_have_css("background-color", DARK)


# Descriptions of the visible texts with too little contrast (WCAG AA: 4.5, and 3 for large text). Colours are read back from a
# canvas, because computed styles may use any notation.
FAINT = """() => {
    const canvas = document.createElement('canvas');
    canvas.width = canvas.height = 1;
    const context = canvas.getContext('2d', { willReadFrequently: true });
    const paint = (colours) => {
        for (const colour of colours) {
            context.fillStyle = colour;
            context.fillRect(0, 0, 1, 1);
        }
        return context.getImageData(0, 0, 1, 1).data;
    };
    const luminance = (rgba) => {
        const [r, g, b] = [...rgba].slice(0, 3).map((value) => value / 255)
            .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const backgrounds = (element) => {
        const layers = [];
        for (let at = element; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
        return layers;
    };
    const faint = [];
    for (const element of document.querySelectorAll('body *')) {
        const text = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data).join('').trim();
        if (!(text || element.placeholder || element.value) || !element.checkVisibility() || element.closest('noscript')) continue;
        const layers = backgrounds(element);
        const style = getComputedStyle(element, element.placeholder && !element.value ? '::placeholder' : undefined);
        const levels = [luminance(paint(layers)), luminance(paint([...layers, style.color]))].sort((a, b) => a - b);
        const contrast = (levels[1] + 0.05) / (levels[0] + 0.05);
        if (contrast < 4.5) faint.push(`${element.tagName} ${text}: ${contrast.toFixed(2)}`);
    }
    return faint;
}"""


def accessible(browser, url):
    """Names, focus order and contrast."""
    code = "@a\ndef f(x: int): # comment\n    return 'text' + 1"
    diff = "```diff\n@@ 1 @@\n-a\n+b\n```"
    response = f"A [link](https://example.org/), `code`, $x^2 \\foo$\n\n> quote\n\n```python\n{code}\n```\n\n{diff}"
    for scheme in ("light", "dark"):
        with window(browser, url, scheme=scheme, scripted=stream({"reasoning_content": "Hm."}, response)) as page:
            ask(page, "Hello?")
            turn = completed(page)
            turn.locator("summary").click()
            choose(page, upload("a.bin", b"\0"))
            page.locator(".chat").hover()
            assert page.evaluate(FAINT) == [], scheme
    with window(browser, url, scripted=stream("Hello.", done=False)) as page:
        ask(page, "Hello?")
        turn = completed(page, "Failed")
        assert page.evaluate(FAINT) == []
        # Announced: the conversation with each complete response, the state, and errors.
        expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-live", "polite")
        expect(turn).to_have_attribute("aria-busy", "false")
        expect(page.get_by_role("status").last).to_have_text("Failed")
        expect(turn.get_by_role("alert")).to_contain_text("was closed")
        # Each control has a name, and Tab reaches all of them in the order of the document.
        page.locator("#prompt").fill("")
        controls = page.locator("button, input, select, textarea, summary, #log").filter(visible=True)
        expected = controls.evaluate_all("all => all.map((element, at) => { element.dataset.order = at; return at; })")
        for at in expected:
            expect(controls.nth(at)).to_have_accessible_name(re.compile(r"\w"))
        page.evaluate("document.activeElement.blur()")
        page.locator("header").click(position={"x": 1, "y": 1})
        reached = []
        for _ in expected:
            page.keyboard.press("Tab")
            reached.append(page.evaluate("Number(document.activeElement.dataset.order)"))
        assert reached == expected, reached
