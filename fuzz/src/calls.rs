//! Property of tool calls: for any model output, the arguments of each call are one valid JSON object without repeated
//! keys, and the events do not depend on where the text is cut.

use crate::outputs::{deltas, joined};
use pegainfer_text::parser::{CallPrefix, Event, OutputParser, ParserOptions, ReasoningStart, ToolFormat};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

const CASES: &str = include_str!("../../pegainfer-text/tests/fixtures/calls/cases.json");

fn cases() -> &'static [Value] {
    static PARSED: OnceLock<Vec<Value>> = OnceLock::new();
    PARSED.get_or_init(|| serde_json::from_str(CASES).expect("cases are JSON"))
}

/// The tools of all cases.
fn definitions() -> Arc<[Value]> {
    static TOOLS: OnceLock<Arc<[Value]>> = OnceLock::new();
    TOOLS
        .get_or_init(|| cases().iter().flat_map(|case| case["tools"].as_array().cloned().unwrap_or_default()).collect())
        .clone()
}

/// Checks an input: the first byte selects the format, the second the cuts, the rest is the text.
pub fn check(data: &[u8]) {
    let [format, cuts, text @ ..] = data else { return };
    let text = String::from_utf8_lossy(text);
    let whole = parse(*format, [text.as_ref()].into_iter());
    let characters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
    assert_eq!(parse(*format, characters), whole, "{text:?} one by one");
    assert_eq!(parse(*format, deltas(&text, *cuts).into_iter()), whole, "{text:?} cut by {cuts}");
    let mut arguments = String::new();
    for event in &whole {
        match event {
            Event::ToolArguments { delta, .. } => arguments += delta,
            Event::ToolEnd { .. } => check_arguments(&std::mem::take(&mut arguments), &text),
            Event::ToolStart { .. } | Event::Reasoning(_) | Event::Content(_) => {}
        }
    }
    assert_eq!(arguments, "", "a call without an end in {text:?}");
}

fn check_arguments(arguments: &str, text: &str) {
    let value: Value = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e} in {arguments:?} of {text:?}"));
    assert!(value.is_object(), "{arguments:?} of {text:?}");
    let mut keys: Vec<HashSet<String>> = Vec::new();
    let mut rest = arguments;
    while let Some(next) = rest.chars().next() {
        match next {
            '{' | '[' => keys.push(HashSet::new()),
            '}' | ']' => _ = keys.pop(),
            '"' => {
                let mut strings = serde_json::Deserializer::from_str(rest).into_iter::<String>();
                let string = strings.next().and_then(Result::ok).unwrap_or_default();
                rest = &rest[strings.byte_offset()..];
                let repeats =
                    rest.trim_start().starts_with(':') && !keys.last_mut().is_some_and(|keys| keys.insert(string));
                assert!(!repeats, "a key twice in {arguments:?} of {text:?}");
                continue;
            }
            _ => {}
        }
        rest = &rest[next.len_utf8()..];
    }
}

fn parse<'a>(format: u8, deltas: impl Iterator<Item = &'a str>) -> Vec<Event> {
    let mut parser = OutputParser::new(ParserOptions {
        reasoning: [ReasoningStart::Never, ReasoningStart::IfOpened, ReasoningStart::Opened][format as usize % 3],
        include_reasoning: true,
        tools: [ToolFormat::Hermes, ToolFormat::Qwen3Coder, ToolFormat::Dsml].get(format as usize / 3 % 3).copied(),
        prefix: [CallPrefix::None, CallPrefix::None, CallPrefix::AnyFunction, CallPrefix::Function("write".into())]
            [format as usize / 9 % 4]
            .clone(),
        definitions: definitions(),
        max_calls: if format & 128 == 0 { usize::MAX } else { 1 },
        id_seed: 1,
    });
    let mut events: Vec<Event> = deltas.flat_map(|delta| parser.push(delta)).collect();
    events.extend(parser.finish());
    joined(events)
}

/// The text of every case in its format, after each state of the reasoning.
pub fn seeds() -> Vec<Vec<u8>> {
    let seed = |case: &Value| {
        let format =
            ["qwen3", "qwen35", "dsv4"].iter().position(|&format| case["format"] == format).unwrap_or_default();
        let text = case["text"].as_str().unwrap_or_default();
        (0..3)
            .map(move |reasoning| [&[format as u8 * 3 + reasoning, reasoning * 37], text.as_bytes()].concat())
            .collect::<Vec<_>>()
    };
    cases().iter().flat_map(seed).collect()
}
