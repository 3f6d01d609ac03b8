"""Chats with the bundled model."""

import re
import time

from playwright.sync_api import expect

from web_ui_test.harness import FACT, STORY, ask, close_settings, completed, fits, settings, stream, window


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
    """Charts appear with the first figures. TPOT is the server's figure, not the browser's."""
    expect(page.locator("figure").filter(visible=True)).to_have_count(0)
    expect(page.locator("#live-note")).to_be_visible()
    ask(page, FACT)
    completed(page)
    expect(page.locator("#live-note")).to_be_hidden()
    for title in ("TTFT", "TPOT"):
        expect(figure(page, title).locator("rect")).to_have_count(1)
        expect(figure(page, title).locator("strong")).to_have_text(re.compile(r"^\d+(\.\d+)? ms$"))
    rates = re.compile(r"^[\d.]+ out, [\d.]+ in$")
    expect(figure(page, "Tokens/s").locator("strong")).to_have_text(rates)
    # The second prompt begins with the first, which is then in the prefix cache.
    for count in (2, 3):
        ask(page, 8 * FACT)
        expect(page.locator(".turn")).to_have_count(count)
        completed(page)
    expect(figure(page, "Prefix cache").locator("strong")).to_have_text(re.compile(r"^[1-9]\d*\.\d % hits$"))
    generated = re.compile(r"^max [1-9][\d.]*$")
    expect(figure(page, "Tokens/s").locator(".scale")).to_have_text(generated)
    before = page.locator("polyline.first").filter(visible=True).first.get_attribute("points")
    expect(page.locator("polyline.first").filter(visible=True).first).not_to_have_attribute("points", before)
    samples = "vllm:num_requests_running{} 2\nvllm:num_requests_waiting{} 1\nvllm:kv_cache_usage_perc{} 0.25\n"
    page.route("**/metrics", lambda route: route.fulfill(body=samples))
    expect(figure(page, "Requests").locator("strong")).to_have_text("2 running, 1 waiting")
    expect(figure(page, "KV cache").locator("strong")).to_have_text("25.0 %")


def figure(page, title):
    return page.locator("figure").filter(visible=True).filter(has=page.get_by_text(title, exact=True))


def tpot_is_the_servers(browser, url):
    """A response that arrives in one read has no TPOT of the browser's."""
    timed = [{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "metrics": {"mean_itl_ms": 12.5}}]
    with window(browser, url, scripted=stream("One", " two", timed)) as page:
        ask(page, "Count.")
        figures = re.compile(r"^3 prompt tokens · 2 tokens · TTFT .* · TPOT 12\.5 ms$")
        expect(completed(page).locator(".figures")).to_have_text(figures)
        expect(figure(page, "TPOT").locator("strong")).to_have_text("12.5 ms")
        assert page.bodies[0]["include_metrics"] is True
    with window(browser, url, scripted=stream("One", " two")) as page:
        ask(page, "Count.")
        expect(completed(page).locator(".figures")).to_have_text(re.compile(r"^2 tokens · TTFT [\d.]+ ms$"))


def lines_and_refusals(page):
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
    # A refusal shows the server's message and restores the prompt.
    page.locator("#max_tokens").fill("5")
    page.locator("#system").fill("too long " * 4096)
    with page.expect_request("**/v1/chat/completions") as sent:
        prompt.press("Enter")
    assert sent.value.post_data_json["max_tokens"] == 5
    assert "authorization" not in sent.value.headers
    completed(page, "Failed")
    expect(page.locator(".error")).to_contain_text("4096")
    expect(prompt).to_have_value("one\ntwo")


def regenerates_and_edits(browser, url):
    with window(browser, url) as page:
        page.locator("#temperature").fill("0")
        ask(page, FACT)
        completed(page)
        ask(page, "Thanks.")
        expect(page.locator(".turn")).to_have_count(2)
        completed(page)
        # Editing the first message discards all later ones.
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
        questions = ["You: What is the capital of Italy?", f"You: {FACT}"]
        page.reload()
        expect(page.locator(".question")).to_have_text(questions)


def keeps_turns_when_a_request_fails(browser, url):
    """A failed regenerate restores the previous turns, with the error message."""
    with window(browser, url, refused=True) as page:
        for question in (FACT, "Thanks."):
            ask(page, question)
            completed(page)
            expect(page.get_by_role("button", name="Regenerate").last).to_be_visible()
        before = page.locator(".response").all_inner_texts()
        refusal = {"error": {"message": "draining for an update"}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=refusal))
        first = page.locator(".turn").first
        for _ in range(2):
            first.get_by_role("button", name="Regenerate").click()
            completed(page, "Failed")
            expect(page.locator(".error")).to_have_text(["Draining for an update"])
            expect(first.locator(".error")).to_be_visible()
        assert page.locator(".response").all_inner_texts() == before
        expect(page.locator("#prompt")).to_have_value("")
        # The form of an edited message stays open with its text.
        first.get_by_role("button", name="Edit message").click()
        first.get_by_role("textbox", name="Edited message").fill("Another question?")
        first.get_by_role("button", name="Send").click()
        completed(page, "Failed")
        expect(first.get_by_role("textbox", name="Edited message")).to_have_value("Another question?")
        page.reload()
        assert page.locator(".response").all_inner_texts() == before


def steps_against_a_ledger(page, shoot):
    """A server with a ledger shows its newest steps, and their time by op."""
    expect(page.locator("#steps")).to_have_count(0)
    ask(page, FACT)
    completed(page)
    strip = page.locator("#steps")
    expect(strip.locator("rect.step.decode").first).to_be_attached()
    expect(strip.locator("rect.step.prefill").first).to_be_attached()
    expect(strip.locator("strong")).to_have_text(re.compile(r"^\d+\.\d\d of predicted$"))
    expect(strip.locator("p.ops")).to_have_text(re.compile(r"^\w+ \d+ %(, \w+ \d+ %)+$"))
    assert strip.locator("rect.op").count() >= 3
    strip.scroll_into_view_if_needed()
    shoot("steps")
    # A refusal, such as for a client without admin rights, hides it and leaves the rest.
    page.route("**/debug/steps*", lambda route: route.fulfill(status=403, json={"error": {"message": "no"}}))
    expect(strip).to_be_hidden()
    expect(page.locator("figure").filter(visible=True)).not_to_have_count(0)
