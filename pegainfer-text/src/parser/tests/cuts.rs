//! Parser events do not depend on where the text is cut.

use super::recorded::{CODER, HERMES};
use super::*;
use pegainfer_testing::Rng;

/// Cuts `text` at random places between characters.
pub fn cut<'a>(text: &'a str, rng: &mut Rng) -> Vec<&'a str> {
    let density = 1 + rng.below(8);
    let (mut deltas, mut start) = (vec![], 0);
    for (end, _) in text.char_indices().skip(1) {
        if rng.below(density) == 0 {
            deltas.push(&text[start..end]);
            start = end;
        }
    }
    deltas.push(&text[start..]);
    deltas
}

/// A text of random fragments: every tag occurs in every context.
fn scramble(rng: &mut Rng) -> String {
    const FRAGMENTS: [&str; 33] = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {",
        "}}",
        "{\"name\": \"f\"",
        "\"arguments\": ",
        "<function=f>",
        "<tool_call>\n<function=f>\n",
        "</function>",
        "<parameter=text>",
        "<parameter=n>\n",
        "</parameter>",
        "\n",
        " ",
        "{",
        "}",
        "\"",
        "\\",
        ", ",
        ": ",
        "é",
        "🎉",
        "<",
        "a",
        "1",
        "null",
        "[",
        "]",
        "</",
        "\u{3000}",
        // Two of these exceed the maximum gap between tags.
        "                                        ",
    ];
    (0..rng.below(24)).map(|_| FRAGMENTS[rng.below(FRAGMENTS.len())]).collect()
}

#[test]
fn any_cut_of_the_text_gives_the_same_events() {
    let seed = testing::seed();
    let mut rng = Rng(seed);
    let mut calls = 0;
    for case in 0..20_000 {
        let (tools, recorded) =
            [(ToolFormat::Hermes, HERMES), (ToolFormat::Qwen3Coder, CODER), (ToolFormat::Dsml, CODER)][case % 3];
        let text = match rng.below(3) {
            0 => recorded[rng.below(recorded.len())].0.to_string(),
            1 => recorded[rng.below(recorded.len())].0.to_string() + recorded[rng.below(recorded.len())].0,
            _ => scramble(&mut rng),
        };
        let how = rng.below(6);
        let options = || ParserOptions {
            reasoning: [ReasoningStart::Never, ReasoningStart::IfOpened, ReasoningStart::Opened][how % 3],
            prefix: match how {
                3 => CallPrefix::AnyFunction,
                4 => CallPrefix::Function("f".into()),
                _ => CallPrefix::None,
            },
            ..options(tools)
        };
        let whole = parse(options(), [text.as_str()]);
        let deltas = cut(&text, &mut rng);
        assert_eq!(parse(options(), deltas.iter().copied()), whole, "seed {seed}, case {case}, {how}: {deltas:?}");
        calls += whole.iter().filter(|event| matches!(event, Event::ToolStart { .. })).count();
        if how == 0 && !whole.iter().any(|event| matches!(event, Event::ToolStart { .. })) {
            assert_eq!(describe(&whole).concat(), if text.is_empty() { String::new() } else { format!("C {text}") });
        }
    }
    assert!(calls > 3_000, "only {calls} calls were parsed");
}
