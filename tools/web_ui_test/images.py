"""Images of messages: attached, sent, shown, stored, exported; offered only for models that read them."""

import base64
import json
import re
import struct
import zlib
from contextlib import contextmanager

from playwright.sync_api import expect

from web_ui_test.controls import FAINT
from web_ui_test.files import choose, upload
from web_ui_test.harness import ROOT, ask, completed, fits, stream, window

READER = {"id": "org/seer", "weight_bytes": 8_000_000_000, "max_model_len": 32768, "input_modalities": ["text", "image"]}
WRITER = {"id": "org/writer", "weight_bytes": 8_000_000_000, "max_model_len": 32768, "input_modalities": ["text"]}
FIXTURES = ROOT / "pegainfer-images/tests/fixtures/odd"
GIF, JPEG, WEBP = ((FIXTURES / name).read_bytes() for name in ("still.gif", "gray.jpg", "lossy.webp"))
MAX_BYTES = 20 * 1024 * 1024


def png(side, grey):
    """A grey square."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + bytes([grey]) * side) * side)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def part(kind, content):
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def attached(page):
    return page.get_by_role("list", name="Attached files").get_by_role("listitem")


@contextmanager
def serving(browser, url, *cards, **options):
    """The web UI of a server with these models."""
    options = {"scripted": stream("A cat."), **options}
    with window(browser, url, **options) as page:
        body = json.dumps({"data": cards})
        page.route("**/v1/models", lambda route: route.fulfill(body=body, content_type="application/json"))
        page.reload()
        expect(page.locator("#model")).to_contain_text("context 32,768")
        yield page


def transfer(page, event, files, plain=None):
    """Drops or pastes files; returns whether the web UI took them."""
    encoded = [[name, kind, base64.b64encode(content).decode()] for name, kind, content in files]
    return page.evaluate(
        """([event, files, plain]) => {
            const data = new DataTransfer();
            for (const [name, type, content] of files) {
                data.items.add(new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name, { type }));
            }
            if (plain) data.setData('text/plain', plain);
            const options = { bubbles: true, cancelable: true };
            return !document.getElementById('prompt').dispatchEvent(event === 'drop'
                ? new DragEvent('drop', { ...options, dataTransfer: data })
                : new ClipboardEvent('paste', { ...options, clipboardData: data }));
        }""",
        [event, encoded, plain],
    )


def shows(image):
    """The browser has decoded and drawn an image."""
    expect(image).to_be_visible()
    image.evaluate("image => image.decode()")
    assert image.evaluate("image => image.naturalWidth > 0")


def only_for_models_that_read_images(browser, url):
    error = "a.png is an image, which qwen3-tiny does not read."
    with window(browser, url) as page:
        expect(page.get_by_role("button", name="Attach text files")).to_be_visible()
        choose(page, upload("a.png", png(2, 0)))
        expect(page.locator("#attach-error")).to_have_text(error)
        choose(page, upload("notes.md", "notes"))
        expect(attached(page)).to_have_text(["notes.md, 5 bytes Remove"])
        assert transfer(page, "paste", [("a.png", "image/png", png(2, 0))])
        expect(page.locator("#attach-error")).to_have_text(error)
    with serving(browser, url, READER, WRITER) as page:
        choice = page.get_by_role("combobox", name="Model", exact=True)
        choose(page, upload("a.png", png(2, 0)))
        expect(attached(page)).to_have_count(1)
        choice.select_option("org/writer")
        expect(page.get_by_role("button", name="Attach text files")).to_be_visible()
        ask(page, "What is it?")
        refusal = "org/writer reads no images: remove them, or choose another model."
        expect(page.locator("#attach-error")).to_have_text(refusal)
        expect(page.locator("#prompt")).to_have_value("What is it?")
        choice.select_option("org/seer")
        page.locator("#prompt").press("Enter")
        completed(page)
        expect(page.locator("#attach-error")).to_have_text("")
        assert [body["model"] for body in page.bodies] == ["org/seer"]


def attach_and_send(browser, url, shoot):
    for width, scheme in ((1280, "light"), (390, "dark")):
        with serving(browser, url, READER, width=width, scheme=scheme) as page:
            expect(page.get_by_role("button", name="Attach images or text files")).to_be_visible()
            picture = png(64, 128)
            # The content decides, not the name.
            choose(page, upload("cat.jpg", picture), upload("red.gif", GIF), upload("notes.md", "notes"))
            names = ["cat.jpg", "red.gif", "notes.md"]
            expect(attached(page)).to_have_text([re.compile(rf"^{name}, \S+ \S+ Remove$") for name in names])
            for name in names[:2]:
                shows(attached(page).get_by_role("img", name=name))
            assert transfer(page, "drop", [("other.png", "image/png", png(8, 1))])
            expect(attached(page)).to_have_count(4)
            assert transfer(page, "paste", [("grey.jpg", "image/jpeg", JPEG), ("dot.webp", "", WEBP)])
            expect(attached(page)).to_have_count(6)
            assert not transfer(page, "paste", [("text.png", "image/png", png(8, 3))], plain="words")
            page.get_by_role("button", name="Remove other.png").press("Enter")
            page.get_by_role("button", name="Remove red.gif").press("Enter")
            page.get_by_role("button", name="Remove notes.md").press("Enter")
            expect(attached(page)).to_have_count(3)
            shows(attached(page).last.get_by_role("img", name="dot.webp"))
            fits(page)
            assert page.evaluate(FAINT) == []
            shoot(page, f"images-attached-{width}")
            ask(page, "What are they?")
            turn = completed(page)
            expect(attached(page)).to_have_count(0)
            parts = [text("What are they?"), part("png", picture), part("jpeg", JPEG), part("webp", WEBP)]
            assert page.bodies[0]["messages"] == [{"role": "user", "content": parts}], json.dumps(page.bodies[0])
            shows(turn.get_by_role("img", name="cat.jpg"))
            expect(turn.locator(".question img")).to_have_count(3)
            fits(page)
            shoot(page, f"images-sent-{width}")


def refused_images(browser, url):
    with serving(browser, url, READER) as page:
        error = page.locator("#attach-error")
        heic = {**upload("photo.heic", b"\0\0\0\x18ftypheic"), "mimeType": "image/heic"}
        choose(page, heic, upload("a.bin", b"\0"), upload("big.png", png(2, 0).ljust(MAX_BYTES + 1, b"\0")), upload("a.png", png(2, 0)))
        expect(error).to_have_text(
            "photo.heic is not a PNG, JPEG, WebP or GIF image. a.bin is not a text file in UTF-8. "
            "big.png is too large: an image may have 20 MiB."
        )
        expect(attached(page)).to_have_text([re.compile(r"^a.png, \d+ bytes Remove$")])
        choose(page, *(upload(f"{i}.png", png(2, i)) for i in range(64)))
        expect(error).to_have_text("63.png is left out: a message may have 64 images.")
        expect(attached(page)).to_have_count(64)


def conversations_with_images(browser, url):
    """Images stay with their turn: after a reload, in the next request, when it is edited, and in a file."""
    picture = png(16, 7)
    question = {"role": "user", "content": [text("What is it?"), part("png", picture)]}
    with serving(browser, url, READER) as page:
        choose(page, upload("cat.png", picture))
        ask(page, "What is it?")
        completed(page)
        page.reload()
        shows(page.locator(".question").get_by_role("img", name="cat.png"))
        ask(page, "Sure?")
        expect(page.locator(".turn")).to_have_count(2)
        completed(page)
        answer = {"role": "assistant", "content": "A cat."}
        assert page.bodies[-1]["messages"] == [question, answer, {"role": "user", "content": "Sure?"}]
        with page.expect_download() as exported:
            page.get_by_role("button", name="Export as JSON").click()
        exported = exported.value.path().read_text()
        assert json.loads(exported)["messages"][0] == question
        with page.expect_download() as markdown:
            page.get_by_role("button", name="Export as Markdown").click()
        assert "## User\n\n(Image: cat.png)\n\nWhat is it?\n\n" in markdown.value.path().read_text()
        page.locator(".turn").first.hover()
        page.locator(".turn").first.get_by_role("button", name="Edit message").click()
        page.get_by_role("textbox", name="Edited message").fill("What animal?")
        page.locator(".edit").get_by_role("button", name="Send").click()
        completed(page)
        edited = {"role": "user", "content": [text("What animal?"), part("png", picture)]}
        assert page.bodies[-1]["messages"] == [edited]

        # A message of an image alone.
        page.get_by_role("button", name="New chat", exact=True).click()
        choose(page, upload("alone.png", picture))
        page.locator("#send").click()
        completed(page)
        assert page.bodies[-1]["messages"] == [{"role": "user", "content": [part("png", picture)]}]
        expect(page.locator(".chat .open").first).to_have_text("alone.png")

        page.locator("#import-chooser").set_input_files(upload("chat.json", exported))
        shows(page.locator(".question").get_by_role("img", name="Image 1"))
        elsewhere = json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]})
        page.locator("#import-chooser").set_input_files(upload("bad.json", elsewhere))
        reason = "The content of message 1 is not a text, nor a user's text with images as data URLs."
        expect(page.locator("#import-error")).to_have_text(f"bad.json cannot be imported. {reason}")


def failed_requests_give_images_back(browser, url):
    with serving(browser, url, READER, scripted=(400, '{"error": {"message": "no"}}'), refused=True) as page:
        choose(page, upload("cat.png", png(16, 7)))
        ask(page, "What is it?")
        completed(page, "Failed")
        expect(page.locator("#prompt")).to_have_value("What is it?")
        shows(attached(page).get_by_role("img", name="cat.png"))


def chats_from_before_images(browser, url):
    """A stored chat whose turns have no list of images."""
    with window(browser, url, scripted=stream("Answer.")) as page:
        page.evaluate(
            """() => new Promise((resolve) => {
                const request = indexedDB.open('pegainfer', 1);
                request.onsuccess = () => {
                    const change = request.result.transaction(['summaries', 'turns'], 'readwrite');
                    const turn = { prompt: 'Old?', content: 'Yes.', reasoning: '', times: {} };
                    change.objectStore('summaries').put({ id: 'old', title: 'Old?', named: false, model: null, updated: 1 });
                    change.objectStore('turns').put({ id: 'old', system: '', turns: [turn] });
                    change.oncomplete = resolve;
                };
            })"""
        )
        page.reload()
        page.locator(".chat .open", has_text="Old?").click()
        expect(page.locator(".response")).to_have_text("Yes.")
        expect(page.locator(".question img")).to_have_count(0)
        ask(page, "And?")
        expect(page.locator(".turn")).to_have_count(2)
        completed(page)
        roles = [(message["role"], message["content"]) for message in page.bodies[0]["messages"]]
        assert roles == [("user", "Old?"), ("assistant", "Yes."), ("user", "And?")]
