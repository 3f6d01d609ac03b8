"""Keys, outages and the choice of a model."""

import json

from playwright.sync_api import expect

from web_ui_test.harness import FACT, ask, completed, server, stream, window


def key_dialog(browser, binary, shoot):
    """A server with keys: the dialog opens, and the prompt that was refused is sent again."""
    with server(binary, "--api-key", "secret") as url:
        with window(browser, url, refused=True, facts="An API key is needed") as page:
            dialog = page.get_by_role("dialog", name="API key")
            expect(dialog).to_contain_text("This server needs an API key.")
            expect(dialog.get_by_label("Key", exact=True)).to_be_focused()
            shoot(page, "key")
            page.keyboard.press("Escape")
            expect(dialog).to_be_hidden()
            ask(page, FACT)
            expect(dialog).to_be_visible()
            dialog.get_by_label("Key", exact=True).fill("wrong")
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text("The server refused this key.")
            dialog.get_by_label("Key", exact=True).fill("secret")
            page.keyboard.press("Enter")
            expect(completed(page).locator(".response")).to_contain_text("Paris")
            expect(page.locator(".turn")).to_have_count(1)
            expect(page.locator("#prompt")).to_have_value("")
            expect(page.locator("#model")).to_contain_text("qwen3-tiny")
            # It is kept for the tab; in the browser only on request.
            assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
            page.reload()
            expect(page.locator("#model")).to_contain_text("qwen3-tiny")
            page.get_by_role("button", name="Change the key").click()
            dialog.get_by_label("Remember in this browser").check()
            dialog.get_by_role("button", name="Use the key").click()
            expect(page.locator("#key-state")).to_have_text("Remembered in this browser.")
            other = page.context.new_page()
            other.goto(url)
            expect(other.locator("#model")).to_contain_text("qwen3-tiny")
            other.close()
            page.get_by_role("button", name="Change the key").click()
            dialog.get_by_role("button", name="Forget the key").click()
            assert "secret" not in page.evaluate("JSON.stringify(sessionStorage) + JSON.stringify(localStorage)")


def outage(browser, url, shoot):
    """An outage is announced while it lasts; "Failed" goes when the server is back."""
    with window(browser, url, refused=True) as page:
        banner = page.locator("#outage")
        expect(banner).to_be_hidden()
        page.route("**/metrics", lambda route: route.abort())
        page.route("**/v1/**", lambda route: route.abort())
        expect(banner).to_have_text("The server cannot be reached. The web UI tries again every second.")
        expect(banner).to_have_attribute("role", "alert")
        ask(page, FACT)
        turn = completed(page, "Failed")
        expect(turn.get_by_role("alert")).to_have_text("The server cannot be reached.")
        expect(page.locator("#prompt")).to_have_value(FACT)
        shoot(page, "outage")
        page.unroute("**/v1/**")
        page.unroute("**/metrics")
        expect(page.locator("#progress")).to_have_text("The server is back")
        expect(banner).to_be_hidden()
        turn.get_by_role("button", name="Regenerate").click()
        expect(completed(page).locator(".response")).to_contain_text("Paris")
        page.route("**/metrics", lambda route: route.fulfill(body="pegainfer:engines_healthy 0\n"))
        expect(banner).to_contain_text("The engine makes no progress")


def model_choice(browser, url, shoot):
    """Several models: a choice, which each chat remembers."""
    big = {"id": "org/big", "family": "Qwen3", "device": "cuda:0", "weight_bytes": 8_000_000_000, "max_model_len": 32768}
    adapter = {"id": "poet", "max_model_len": 32768, "parent": "org/big", "lora": {"rank": 16}}
    served = [big, adapter]
    with window(browser, url, scripted=stream("Answer.")) as page:
        expect(page.get_by_role("combobox", name="Model", exact=True)).to_be_hidden()
        page.route("**/v1/models", lambda route: route.fulfill(body=json.dumps({"data": served}), content_type="application/json"))
        page.reload()
        choice = page.get_by_role("combobox", name="Model", exact=True)
        expect(choice).to_have_value("org/big")
        expect(page.locator("#model")).to_have_text("Qwen3, 7.5 GiB of weights on cuda:0, context 32,768")
        expect(page.locator("#suggestions button")).to_have_count(4)
        shoot(page, "models")
        ask(page, "Plain?")
        completed(page)
        page.get_by_role("button", name="New chat", exact=True).click()
        choice.select_option("poet")
        expect(page.locator("#model")).to_have_text("adapter of rank 16, context 32,768")
        ask(page, "Rhyme?")
        completed(page)
        assert [body["model"] for body in page.bodies] == ["org/big", "poet"]
        page.locator(".chat .open", has_text="Plain?").click()
        expect(choice).to_have_value("org/big")
        page.locator(".chat .open", has_text="Rhyme?").click()
        expect(choice).to_have_value("poet")
        # The model of a chat is gone: another one answers, and the header says so.
        served.remove(adapter)
        page.reload()
        expect(page.locator("#model")).to_contain_text("poet is not served now. org/big")
        ask(page, "And?")
        expect(page.locator(".turn")).to_have_count(2)
        completed(page)
        assert page.bodies[-1]["model"] == "org/big"


def suggestions(browser, url):
    """The empty chat says what the model is, and offers prompts."""
    with window(browser, url) as page:
        expect(page.get_by_role("heading", name="Ask qwen3-tiny something")).to_be_visible()
        expect(page.locator("#welcome")).to_contain_text("is a tiny model")
        page.locator("#suggestions").get_by_role("button", name=FACT).click()
        expect(completed(page).locator(".response")).to_contain_text("Paris")
        expect(page.locator("#welcome")).to_be_hidden()


def drawers(browser, url):
    """On a wide window both sides can be closed, which outlives a reload."""
    with window(browser, url) as page:
        for side, root in (("panel", "#panel"), ("chats", "#chats-panel")):
            expect(page.locator(root)).to_be_visible()
            page.locator(f"#{side}-close").click()
            expect(page.locator(root)).to_be_hidden()
            expect(page.locator(f"#{side}-toggle")).to_be_focused()
            expect(page.locator(f"#{side}-toggle")).to_have_attribute("aria-expanded", "false")
        page.reload()
        expect(page.locator("#panel")).to_be_hidden()
        page.locator("#panel-toggle").click()
        expect(page.locator("#panel")).to_be_visible()
        # Settings come before the figures, and the names of the buttons say what they do.
        tops = page.evaluate("['settings', 'live-title'].map((id) => document.getElementById(id).getBoundingClientRect().top)")
        assert tops[0] < tops[1], tops
        for name in ("Export as Markdown", "Export as JSON", "Import JSON"):
            expect(page.locator("#panel").get_by_text(name, exact=True)).to_be_visible()
        expect(page.locator("#theme option").first).to_have_text("System")


def actions_on_hover(browser, url):
    """The actions of older turns show on hover and focus; on a touch screen always."""
    with window(browser, url, scripted=stream("Answer.")) as page:
        for text in ("One?", "Two?"):
            ask(page, text)
            completed(page)
        expect(page.locator(".turn")).to_have_count(2)
        actions = page.locator(".turn").first.locator(".actions").last
        page.mouse.move(5, 5)
        expect(actions).to_have_css("opacity", "0")
        page.locator(".turn").first.locator(".response").hover()
        expect(actions).to_have_css("opacity", "1")
        page.mouse.move(5, 5)
        expect(actions).to_have_css("opacity", "0")
        actions.get_by_role("button", name="Copy response").focus()
        expect(actions).to_have_css("opacity", "1")
        expect(page.locator("#keys")).to_be_visible()
    with window(browser, url, width=390, scripted=stream("Answer.")) as page:
        for text in ("One?", "Two?"):
            ask(page, text)
            completed(page)
        expect(page.locator(".turn").first.locator(".actions").last).to_have_css("opacity", "1")
        expect(page.locator("#keys")).to_be_hidden()
        # The keyboard of a phone has no Shift+Enter: Enter starts a line.
        page.locator("#prompt").focus()
        page.keyboard.type("a")
        page.keyboard.press("Enter")
        page.keyboard.type("b")
        expect(page.locator("#prompt")).to_have_value("a\nb")
        widths = page.evaluate("['attach', 'send'].map((id) => document.getElementById(id).getBoundingClientRect().width)")
        assert max(widths) < 48, widths
