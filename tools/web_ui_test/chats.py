"""The list of chats: saved, found, renamed, deleted; with and without IndexedDB."""

import json
import re

from playwright.sync_api import expect

from web_ui_test.files import upload
from web_ui_test.harness import MODEL_FACTS, ask, completed, fits, stream, window


def entries(page):
    return page.locator(".chat .open")


def two_chats(page):
    ask(page, "First question?")
    completed(page)
    expect(entries(page)).to_have_text(["First question?"])
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Second question?")
    completed(page)
    expect(entries(page)).to_have_text(["Second question?", "First question?"])


def chats_survive_the_tab(browser, url, shoot):
    with window(browser, url, scripted=stream("An **answer** about zebras.")) as page:
        page.locator("#system").fill("Be brief.")
        two_chats(page)
        shoot(page, "chats")
        # Another tab begins with a new chat, and lists the others. What it says appears in the first.
        other = page.context.new_page()
        third_answer = {"body": stream("Third.")[1], "content_type": "text/event-stream"}
        other.route("**/v1/chat/completions", lambda route: route.fulfill(**third_answer))
        page.close()
        other.goto(url)
        expect(other.locator("#model")).to_have_text(MODEL_FACTS)
        expect(other.locator(".turn")).to_have_count(0)
        expect(entries(other)).to_have_text(["Second question?", "First question?"])
        entries(other).nth(1).click()
        expect(other.locator(".response")).to_have_text("An answer about zebras.")
        expect(other.locator(".response strong")).to_have_text("answer")
        expect(other.locator("#system")).to_have_value("Be brief.")
        expect(entries(other).nth(1)).to_have_attribute("aria-current", "true")
        entries(other).first.click()
        expect(other.locator(".question")).to_have_text("You: Second question?")
        # The system prompt was the first chat's.
        expect(other.locator("#system")).to_have_value("")
        third = other.context.new_page()
        third.goto(url)
        expect(entries(third)).to_have_count(2)
        ask(other, "And?")
        completed(other)
        other.get_by_role("button", name="New chat", exact=True).click()
        ask(other, "Third question?")
        expect(entries(third)).to_have_text(["Third question?", "Second question?", "First question?"])
        # Two tabs with one chat: what one says, the other shows before it goes on.
        completed(other)
        entries(third).first.click()
        expect(third.locator(".question")).to_have_text("You: Third question?")
        ask(other, "And further?")
        expect(third.locator(".question")).to_have_text(["You: Third question?", "You: And further?"])


def interrupted_responses_stay(browser, url):
    """A tab that is closed in the middle of a response has saved what had come a second before."""
    with window(browser, url) as page:
        page.evaluate(
            """() => {
                const chunk = { choices: [{ delta: { content: 'Half of it' } }] };
                const text = new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`);
                window.fetch = ((real) => (path, options) => (options.body
                    ? Promise.resolve(new Response(new ReadableStream({ start: (c) => c.enqueue(text) })))
                    : real(path, options)))(window.fetch);
            }"""
        )
        ask(page, "Long?")
        expect(page.locator(".response")).to_have_text("Half of it")
        # What the tab saves while it is closed may come too late for the next one.
        page.wait_for_timeout(1500)
        page.reload()
        expect(page.locator(".response")).to_have_text("Half of it")
        expect(page.locator(".figures")).to_have_text("interrupted")
        expect(page.locator("#send")).to_be_visible()


def search_rename_delete(browser, url, shoot):
    with window(browser, url, scripted=stream("About zebras.")) as page:
        two_chats(page)
        search = page.get_by_role("searchbox", name="Search the chats")
        # Titles and texts are searched, in any case.
        for words, found in (("FIRST", ["First question?"]), ("ZEBRA", ["Second question?", "First question?"]), ("lion", [])):
            search.fill(words)
            expect(entries(page)).to_have_text(found)
            expect(page.locator("#found")).to_have_text(f"{len(found)} found")
        expect(page.get_by_text("No chat contains this.")).to_be_visible()
        search.fill("")
        expect(entries(page)).to_have_count(2)
        # Rename with the button; Escape leaves the title.
        page.locator(".chat", has_text="First").hover()
        page.get_by_role("button", name="Rename First question?").click()
        field = page.get_by_role("textbox", name="Title of the chat")
        expect(field).to_be_focused()
        shoot(page, "rename")
        field.fill("<b>Zoo</b>")
        field.press("Enter")
        expect(entries(page)).to_have_text(["Second question?", "<b>Zoo</b>"])
        expect(entries(page).nth(1)).to_be_focused()
        # The keyboard alone: arrows, F2, Delete, Undo.
        page.keyboard.press("ArrowUp")
        expect(entries(page).first).to_be_focused()
        page.keyboard.press("ArrowUp")
        expect(search).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("F2")
        field.fill("dropped")
        field.press("Escape")
        expect(entries(page)).to_have_text(["Second question?", "<b>Zoo</b>"])
        page.keyboard.press("Delete")
        expect(entries(page)).to_have_text(["<b>Zoo</b>"])
        expect(entries(page).first).to_be_focused()
        # The chat on the screen was deleted: a new one begins.
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#undo")).to_contain_text("Deleted “Second question?”")
        shoot(page, "undo")
        page.get_by_role("button", name="Undo").press("Enter")
        expect(entries(page)).to_have_text(["Second question?", "<b>Zoo</b>"])
        expect(page.locator(".question")).to_have_text("You: Second question?")
        # A renamed chat keeps its title when it goes on.
        entries(page).nth(1).click()
        expect(page.locator(".question")).to_have_text("You: First question?")
        ask(page, "More?")
        expect(page.locator(".turn")).to_have_count(2)
        completed(page)
        expect(entries(page)).to_have_text(["<b>Zoo</b>", "Second question?"])
        page.get_by_role("button", name="Delete all chats").click()
        expect(entries(page)).to_have_count(0)
        expect(page.locator(".turn")).to_have_count(0)
        page.get_by_role("button", name="Undo").click()
        expect(entries(page)).to_have_count(2)


def chats_on_a_phone(browser, url, shoot):
    """The list is a drawer; what it covers is inert."""
    with window(browser, url, width=390, scheme="dark", scripted=stream("Answer.")) as page:
        ask(page, "First question?")
        completed(page)
        page.get_by_role("button", name="New chat", exact=True).tap()
        expect(page.locator("#chats-panel")).to_be_hidden()
        page.get_by_role("button", name="Chats", exact=True).tap()
        expect(page.locator("#chats-close")).to_be_focused()
        expect(page.get_by_role("button", name="Rename First question?")).to_be_visible()
        assert page.evaluate("document.querySelector('main').inert && document.querySelector('header').inert")
        fits(page)
        shoot(page, "phone-chats")
        entries(page).first.tap()
        expect(page.locator("#chats-panel")).to_be_hidden()
        expect(page.locator(".response")).to_have_text("Answer.")
        page.get_by_role("button", name="Chats", exact=True).tap()
        page.locator("#backdrop").tap(position={"x": 380, "y": 400})
        expect(page.locator("#chats-panel")).to_be_hidden()


def without_indexed_db(browser, url):
    """Chats last until the tab is closed, and the list says so."""
    with window(browser, url, scripted=stream("Answer."), before="delete window.indexedDB; window.indexedDB = undefined;") as page:
        expect(page.get_by_text("This browser keeps no chats")).to_be_visible()
        two_chats(page)
        page.reload()
        expect(page.locator(".question")).to_have_text("You: Second question?")
        expect(entries(page)).to_have_count(2)
        entries(page).nth(1).click()
        expect(page.locator(".question")).to_have_text("You: First question?")


def imported_prompts_do_not_leak(browser, url):
    """An imported system prompt, and one that was typed, belong to their chat."""
    roles = {"system": "Pirate.", "user": "a", "assistant": "b"}
    text = json.dumps({"messages": [{"role": role, "content": content} for role, content in roles.items()]})
    with window(browser, url, scripted=stream("Answer.")) as page:
        page.locator("#import-chooser").set_input_files(upload("pirate.json", text))
        expect(page.locator("#system")).to_have_value("Pirate.")
        ask(page, "Who?")
        completed(page)
        assert page.bodies[0]["messages"][0] == {"role": "system", "content": "Pirate."}
        page.get_by_role("button", name="New chat", exact=True).click()
        expect(page.locator("#system")).to_have_value("")
        ask(page, "Who?")
        completed(page)
        assert page.bodies[1]["messages"] == [{"role": "user", "content": "Who?"}]
        # Only on request it is the prompt of new chats.
        entries(page).nth(1).click()
        expect(page.locator("#system")).to_have_value("Pirate.")
        page.get_by_role("button", name="Use for new chats").click()
        expect(page.get_by_role("button", name="Use for new chats")).to_be_hidden()
        page.get_by_role("button", name="New chat", exact=True).click()
        expect(page.locator("#system")).to_have_value("Pirate.")
        page.locator("#system").fill("")
        page.get_by_role("button", name="Use none for new chats").click()
        page.get_by_role("button", name="New chat", exact=True).click()
        expect(page.locator("#system")).to_have_value(re.compile("^$"))
