"""Colours of code, and formulas."""

from playwright.sync_api import expect

from web_ui_test.harness import ask, completed, fits, stream, window

CODE = """```python
@dataclass
def f(x: int) -> str:  # comment
    return "text <b>" + 'b' * 42
```

```rust
fn main<'a>() { println!("{}", 0xff_u8); }
```

```diff
@@ -1 +1 @@
-old
+new
```

```nonsense
if x
```

| a long title of a column | another long title | and a third one | the fourth | the fifth |
|---|---|---|---|---|
| one | two | three | four | five |"""

EXPECTED = {
    "comment": ["# comment", "@@ -1 +1 @@"],
    "string": ['"text <b>"', "'b'", '"{}"'],
    "number": ["42", "0xff_u8"],
    "keyword": ["def", "return", "fn"],
    "type": ["int", "str"],
    "function": ["f"],
    "meta": ["@dataclass", "'a", "println!"],
    "added": ["+new"],
    "removed": ["-old"],
}


def code_colours(browser, url, shoot):
    for scheme, width in (("light", 1280), ("dark", 390)):
        with window(browser, url, width=width, scheme=scheme, scripted=stream(*CODE)) as page:
            ask(page, "Code?")
            response = completed(page).locator(".response")
            for kind, texts in EXPECTED.items():
                expect(response.locator(f".code-{kind}")).to_have_text(texts)
            assert response.locator("pre").first.inner_text() == CODE.split("```python\n")[1].split("\n```")[0]
            expect(response.locator("b")).to_have_count(0)
            colour = "(e) => getComputedStyle(e).color"
            colours = {response.locator(f".code-{kind}").first.evaluate(colour) for kind in EXPECTED}
            assert len(colours) >= 7, colours
            shoot(page, f"code-{scheme}")
            if width == 390:
                # A wide table scrolls by itself, under a shadow at its edge.
                table = response.get_by_role("region", name="Table")
                assert table.evaluate("(e) => e.scrollWidth > e.clientWidth")
                assert "radial-gradient" in table.evaluate("(e) => getComputedStyle(e).backgroundImage")
                fits(page)


FORMULAS = r"""It costs $5 and $6, or 10$ more; US$5 and CA$6. But $x^2$ and \(\alpha_i\) are math, `$not$` is code.

$$
\frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
$$

Then
\[ \sum_{i=1}^n i = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \]

**bold $a*b$ too** and $\mathbb{R}$, $\text{if } <b>x</b>$, $\foo{y}$, $\frac{1}$.

- $$x$$
- $\left( \frac12 \right] \hat{y} \operatorname{softmax}(z)$"""


def formulas(browser, url, shoot):
    for scheme in ("light", "dark"):
        in_threes = [FORMULAS[at:at + 3] for at in range(0, len(FORMULAS), 3)]
        with window(browser, url, scheme=scheme, scripted=stream(*in_threes)) as page:
            ask(page, "Formulas?")
            response = completed(page).locator(".response")
            shoot(page, f"formulas-{scheme}")
            first = response.locator("p").first
            expect(first).to_contain_text("It costs $5 and $6, or 10$ more; US$5 and CA$6.")
            expect(first.locator("math")).to_have_count(2)
            expect(first.locator("math").first.locator("msup > *")).to_have_text(["x", "2"])
            expect(first.locator("math").nth(1).locator("msub > *")).to_have_text(["α", "i"])
            expect(first.locator("code")).to_have_text("$not$")
            expect(response.locator(".formula math[display=block]")).to_have_count(3)
            expect(response.locator("mfrac msqrt msup")).to_have_count(1)
            expect(response.locator("munderover > mo")).to_have_text("∑")
            expect(response.locator("mtable mtr")).to_have_count(2)
            bold = response.locator("strong")
            expect(bold).to_have_text("bold a∗b too")
            expect(response.locator("math b")).to_have_count(0)
            expect(response.locator("mtext").first).to_have_text("if\u00a0")
            expect(response.locator("mtext.unknown")).to_have_text("\\foo")
            expect(response).to_contain_text("ℝ")
            # A formula that is not well formed stays as it was written.
            expect(response).to_contain_text("$\\frac{1}$")
            box = response.locator(".formula math").first.bounding_box()
            assert box["height"] > 30, box


def hostile_formulas(browser, url):
    """Deep, long and unfinished formulas take little time, and code does, too."""
    with window(browser, url) as page:
        took = page.evaluate(
            """async () => {
                const { MarkdownView } = await import('./ui/markdown.js');
                const show = (text) => {
                    const root = document.createElement('div');
                    document.body.append(root);
                    const started = performance.now();
                    const view = new MarkdownView(root);
                    view.push({ text });
                    view.end();
                    root.getBoundingClientRect();
                    const took = performance.now() - started;
                    root.remove();
                    return took;
                };
                const repeat = (text) => text.repeat(Math.ceil(50000 / text.length));
                const took = {};
                const parts = ['{', '\\\\frac', 'x^', '\\\\left(', '\\\\begin{matrix}', '\\\\sqrt', '\\\\substack{', '$', '\\\\[', '\\\\(', '$x$ '];
                for (const part of [...parts, '$$\\n', '\\\\[\\n\\n', '$$a\\n\\n']) {
                    took[part] = show(repeat(part));
                    took[`$$${part}`] = show(`$$\\n${part.repeat(3000 / part.length)}\\n$$`);
                }
                for (const language of ['c', 'js', 'python', 'rust', 'bash', 'sql', 'yaml', 'html', 'css', 'lua', 'json']) {
                    for (const part of ['"', '/*', '[', ':', '${', '-', '"\\\\"']) {
                        took[language + part] = show('```' + language + '\\n' + repeat(part).slice(0, 19000) + '\\n```');
                    }
                }
                return Object.entries(took).filter(([, time]) => time > 6000);
            }"""
        )
        assert took == [], took
