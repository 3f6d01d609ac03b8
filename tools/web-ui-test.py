#!/usr/bin/env python3
"""Tests the web UI at `/` in headless Chromium, with the bundled model and with scripted responses.

    pip install playwright
    cargo build --release && python3 tools/web-ui-test.py --chromium /usr/bin/chromium

Without `--chromium` it uses the browser of `playwright install chromium`. `--screenshots DIR` keeps pictures. Not part
of `cargo test`: not every machine has a browser.
"""

import argparse
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from web_ui_test import chats, controls, conversation, files, images, rendering, responses, server_states
from web_ui_test.harness import ROOT, ledger, server, window


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
        for width, scheme in ((320, "dark"), (1280, "light")):
            with window(browser, url, width, scheme) as page:
                name = f"{width}-{scheme}"
                conversation.chat_streams_stops_and_shows_probabilities(page, lambda part: shoot(page, f"{name}-{part}"))
            print(f"ok: chat, stop and probabilities, {width} px, {scheme}")
        with window(browser, url) as page:
            conversation.stop_button_cancels_on_the_server(page, url, lambda name: shoot(page, name))
        print("ok: the stop button frees the server")
        with window(browser, url) as page:
            conversation.charts_move(page)
        conversation.tpot_is_the_servers(browser, url)
        print("ok: charts")
        with window(browser, url, refused=True) as page:
            conversation.lines_and_refusals(page)
        print("ok: lines and refusals")
        responses.scripted_responses(browser, url, shoot)
        print("ok: reasoning, code and errors")
        responses.markdown_and_copies(browser, url, shoot)
        print("ok: Markdown and copies")
        conversation.regenerates_and_edits(browser, url)
        print("ok: regenerated and edited turns")
        conversation.keeps_turns_when_a_request_fails(browser, url)
        print("ok: a failed request loses no turns")
        responses.tokens_and_markdown(browser, url)
        print("ok: tokens and Markdown of one response")
        files.attached_files(browser, url)
        print("ok: attached files")
        images.only_for_models_that_read_images(browser, url)
        images.attach_and_send(browser, url, shoot)
        images.refused_images(browser, url)
        images.conversations_with_images(browser, url)
        images.failed_requests_give_images_back(browser, url)
        images.chats_from_before_images(browser, url)
        print("ok: images")
        files.export_and_import(browser, url)
        print("ok: export and import")
        controls.theme(browser, url)
        controls.accessible(browser, url)
        print("ok: colours, contrast and access by keyboard")
        chats.chats_survive_the_tab(browser, url, shoot)
        chats.interrupted_responses_stay(browser, url)
        chats.search_rename_delete(browser, url, shoot)
        chats.chats_on_a_phone(browser, url, shoot)
        chats.without_indexed_db(browser, url)
        chats.imported_prompts_do_not_leak(browser, url)
        print("ok: the list of chats")
        rendering.code_colours(browser, url, shoot)
        rendering.formulas(browser, url, shoot)
        rendering.hostile_formulas(browser, url)
        print("ok: colours of code, and formulas")
        server_states.key_dialog(browser, options.binary, shoot)
        server_states.outage(browser, url, shoot)
        server_states.model_choice(browser, url, shoot)
        server_states.suggestions(browser, url)
        server_states.drawers(browser, url)
        server_states.actions_on_hover(browser, url)
        print("ok: keys, outages, models, drawers and actions")
        with tempfile.TemporaryDirectory() as folder:
            ledger(options.binary, Path(folder) / "ledger")
            with server(options.binary, "--ledger", Path(folder) / "ledger") as watched:
                with window(browser, watched, refused=True) as page:
                    conversation.steps_against_a_ledger(page, lambda name: shoot(page, name))
        print("ok: steps against a ledger")
        browser.close()


if __name__ == "__main__":
    main()
