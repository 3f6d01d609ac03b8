"""Attached files, and conversations as files."""

import json

from playwright.sync_api import expect

from web_ui_test.harness import ask, completed, stream, window

FENCED = "# Notes\n```\ncode\n```\n"


def upload(name, content):
    return {"name": name, "mimeType": "", "buffer": content if isinstance(content, bytes) else content.encode()}


def choose(page, *files):
    page.locator("#file-chooser").set_input_files(list(files))


def opens(page, button, chooser):
    """The button opens the file dialog, by keyboard."""
    page.evaluate(
        """(id) => document.getElementById(id).addEventListener('click', (event) => {
            event.preventDefault();
            window.opened = id;
        }, { once: true })""",
        chooser,
    )
    page.get_by_role("button", name=button).press("Enter")
    assert page.evaluate("window.opened") == chooser


def attached_files(browser, url):
    with window(browser, url, scripted=stream("Read.")) as page:
        entries = page.get_by_role("list", name="Attached files").get_by_role("listitem")
        error = page.locator("#attach-error")
        opens(page, "Attach text files", "file-chooser")
        # A binary file and one that is too large are refused by name; a good one among them is taken.
        choose(page, upload("notes.md", FENCED), upload("a.bin", b"\x7fELF\0\0"), upload("big.txt", "x" * 262_144))
        expect(error).to_have_text(
            "a.bin is not a text file in UTF-8. big.txt is too large: the text files of one message may have 256 KiB together."
        )
        expect(entries).to_have_text(["notes.md, 21 bytes Remove"])
        expect(page.locator("#prompt")).to_be_focused()
        choose(page, upload("gone.txt", "gone"))
        page.get_by_role("button", name="Remove gone.txt").click()
        expect(entries).to_have_count(1)
        expect(error).to_have_text("")
        # A file dropped on the window is also attached.
        page.evaluate(
            """() => {
                const dataTransfer = new DataTransfer();
                dataTransfer.items.add(new File(['a,b\\r\\n1,2\\r\\n'], 'table.csv'));
                document.body.dispatchEvent(new DragEvent('drop', { dataTransfer, bubbles: true, cancelable: true }));
            }"""
        )
        expect(entries).to_have_count(2)
        ask(page, "Summarise.")
        turn = completed(page)
        expect(entries).to_have_count(0)
        sent = "File: notes.md\n````\n# Notes\n```\ncode\n```\n````\n\nFile: table.csv\n```\na,b\n1,2\n```\n\nSummarise."
        assert page.bodies[0]["messages"] == [{"role": "user", "content": sent}], json.dumps(page.bodies[0])
        # The conversation shows the names, and the content when it is opened.
        expect(turn.locator(".question summary")).to_have_text(["notes.md", "table.csv"])
        expect(turn.get_by_text("a,b")).to_be_hidden()
        turn.locator("summary", has_text="table.csv").press("Enter")
        expect(turn.get_by_text("a,b")).to_be_visible()
        page.reload()
        expect(page.locator(".question summary")).to_have_text(["notes.md", "table.csv"])


def export_and_import(browser, url):
    with window(browser, url, scripted=stream({"reasoning_content": "Hm.\nYes."}, "It is **4**.")) as page:
        page.get_by_label("System prompt").fill("Be brief.")
        ask(page, "2 + 2?")
        completed(page)
        with page.expect_download() as markdown:
            page.get_by_role("button", name="Export as Markdown").click()
        assert markdown.value.suggested_filename == "conversation.md"
        assert markdown.value.path().read_text() == (
            "# Conversation with qwen3-tiny\n\n## System\n\nBe brief.\n\n## User\n\n2 + 2?\n\n"
            "## Reasoning\n\n> Hm.\n> Yes.\n\n## Assistant\n\nIt is **4**.\n"
        )
        with page.expect_download() as exported:
            page.get_by_role("button", name="Export as JSON").click()
        exported = exported.value.path().read_text()
        assert json.loads(exported) == {
            "model": "qwen3-tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "2 + 2?"},
                {"role": "assistant", "content": "It is **4**.", "reasoning_content": "Hm.\nYes."},
            ],
        }

    def import_file(page, name, text):
        page.locator("#import-chooser").set_input_files(upload(name, text))

    with window(browser, url, scripted=stream("5.")) as page:
        error = page.locator("#import-error")
        opens(page, "Import JSON", "import-chooser")
        for text, reason in (
            ("{", "The file is not JSON."),
            ("{}", "The file has no list of messages."),
            ('{"messages": [{"role": "user"}]}', "The content of message 1 is not a text, nor"),
            ('{"messages": [{"role": "user", "content": "a"}]}', "The messages must be a user message and its response"),
        ):
            import_file(page, "bad.json", text)
            expect(error).to_contain_text(f"bad.json cannot be imported. {reason}")
        import_file(page, "conversation.json", exported)
        turn = page.locator(".turn")
        expect(error).to_have_text("")
        expect(turn.locator("strong")).to_have_text("4")
        expect(turn.locator(".reasoning")).to_be_visible()
        expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
        ask(page, "2 + 3?")
        expect(turn).to_have_count(2)
        completed(page)
        assert [message["role"] for message in page.bodies[0]["messages"]] == ["system", "user", "assistant", "user"]
