"""Controls beside the conversation."""

from playwright.sync_api import expect

from web_ui_test.harness import window

LIGHT, DARK = "rgb(250, 250, 248)", "rgb(21, 24, 26)"


def theme(browser, url):
    """The choice wins over the system's scheme, outlives a reload, and applies before the first paint."""
    with window(browser, url, scheme="light") as page:
        body = page.locator("body")
        choice = page.get_by_label("Colours")
        expect(body).to_have_css("background-color", LIGHT)
        choice.select_option("dark")
        expect(body).to_have_css("background-color", DARK)
        # What the document looks like when the browser has only read its head.
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
