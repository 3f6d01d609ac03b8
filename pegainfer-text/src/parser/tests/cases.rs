//! Texts with calls as models write them, and the calls that a client must get; see `tests/fixtures/calls/README.md`.

use super::cuts::cut;
use super::*;
use pegainfer_testing::Rng;
use std::collections::HashSet;

const CASES: &str = include_str!("../../../tests/fixtures/calls/cases.json");

pub fn cases() -> Vec<Value> {
    serde_json::from_str(CASES).unwrap()
}

/// Parser options of a case: the prompt opens the reasoning, except in Qwen3's format.
pub fn options_of(case: &Value) -> ParserOptions {
    let (tools, opens) = match case["format"].as_str().unwrap() {
        "qwen3" => (ToolFormat::Hermes, ReasoningStart::IfOpened),
        "qwen35" => (ToolFormat::Qwen3Coder, ReasoningStart::Opened),
        _ => (ToolFormat::Dsml, ReasoningStart::Opened),
    };
    let thinks = case["thinking"] == true;
    let definitions = case["tools"].as_array().unwrap().clone().into();
    let reasoning = if thinks { opens } else { ReasoningStart::Never };
    ParserOptions { reasoning, definitions, ..options(tools) }
}

/// One call.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    pub name: String,
    pub arguments: Value,
    pub complete: bool,
}

/// A client's view of events. Checks properties that hold for all events.
pub fn understood(events: &[Event], context: &str) -> (String, String, Vec<Call>) {
    let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    let mut open: Option<(usize, String, String)> = None;
    for event in events {
        match event {
            Event::Reasoning(text) => reasoning += text,
            Event::Content(text) => content += text,
            Event::ToolStart { index, name, .. } => {
                assert_eq!((*index, &open), (calls.len(), &None), "{context}");
                open = Some((*index, name.clone(), String::new()));
                continue;
            }
            Event::ToolArguments { index, delta } => {
                let (open, _, arguments) = open.as_mut().unwrap_or_else(|| panic!("no call is open: {context}"));
                assert_eq!(index, open, "{context}");
                *arguments += delta;
                continue;
            }
            Event::ToolEnd { index, complete } => {
                let (open, name, arguments) = open.take().unwrap_or_else(|| panic!("no call is open: {context}"));
                assert_eq!(*index, open, "{context}");
                calls.push(Call { name, arguments: strict(&arguments, context), complete: *complete });
            }
        }
        assert_eq!(open, None, "text inside a call: {context}");
    }
    assert_eq!(open, None, "a call without an end: {context}");
    (reasoning, content, calls)
}

/// Parses an object and checks that no key is repeated.
fn strict(arguments: &str, context: &str) -> Value {
    let value: Value = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{e} in {arguments}: {context}"));
    assert!(value.is_object(), "{arguments}: {context}");
    let mut keys: Vec<HashSet<String>> = Vec::new();
    let mut rest = arguments;
    // In valid JSON, only strings, brackets and colons have to be distinguished.
    while let Some(next) = rest.chars().next() {
        match next {
            '{' | '[' => keys.push(HashSet::new()),
            '}' | ']' => _ = keys.pop(),
            '"' => {
                let mut strings = serde_json::Deserializer::from_str(rest).into_iter::<String>();
                let string = strings.next().unwrap().unwrap();
                rest = &rest[strings.byte_offset()..];
                let is_key = rest.trim_start().starts_with(':');
                assert!(!is_key || keys.last_mut().unwrap().insert(string), "a key twice in {arguments}: {context}");
                continue;
            }
            _ => {}
        }
        rest = &rest[next.len_utf8()..];
    }
    value
}

/// True if a value is the expected one: numbers are compared by value, strings without trailing blanks.
fn same(value: &Value, expected: &Value) -> bool {
    match (value, expected) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && b.iter().all(|(key, b)| a.get(key).is_some_and(|a| same(a, b)))
        }
        (a, b) => a == b,
    }
}

fn fits(case: &Value, changes: &Value, (reasoning, content, calls): &(String, String, Vec<Call>)) -> bool {
    let field = |name: &str| changes.get(name).unwrap_or(&case["expect"][name]);
    let text = |name: &str| field(name).as_str().unwrap_or_default();
    let expected = field("calls").as_array().unwrap();
    let call = |(call, expected): (&Call, &Value)| {
        call.name == expected["name"] && same(&call.arguments, &expected["arguments"])
    };
    reasoning == text("reasoning")
        && content == text("content")
        && calls.len() == expected.len()
        && calls.iter().zip(expected).all(call)
}

#[test]
fn every_case_gives_what_the_model_meant() {
    let mut rng = Rng(testing::seed());
    let mut wrong = vec![];
    for case in cases() {
        let (name, text) = (case["name"].as_str().unwrap(), case["text"].as_str().unwrap());
        let events = parse(options_of(&case), [text]);
        let answer = understood(&events, name);
        let others = case["also"].as_array().into_iter().flatten();
        if !std::iter::once(&json!({})).chain(others).any(|changes| fits(&case, changes, &answer)) {
            wrong.push(format!("{name}: {answer:?}"));
        }
        let unfinished = name.starts_with("unfinished") && !text.ends_with("</tool_call>");
        assert!(answer.2.iter().all(|call| call.complete != unfinished), "{name}: {answer:?}");
        let characters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        assert_eq!(parse(options_of(&case), characters), events, "{name}, one character after the other");
        for _ in 0..10 {
            let deltas = cut(text, &mut rng);
            assert_eq!(parse(options_of(&case), deltas.iter().copied()), events, "{name}: {deltas:?}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Segments of a text: tags, quotes, brackets and the text between them.
fn segments(text: &str) -> Vec<&str> {
    let (mut segments, mut start) = (vec![], 0);
    for (at, c) in text.char_indices().skip(1) {
        let before = text[..at].chars().next_back().unwrap_or_default();
        if "<{}[]\"',:\n".contains(c) || ">{}[]\"',:\n".contains(before) {
            segments.push(&text[start..at]);
            start = at;
        }
    }
    segments.push(&text[start..]);
    segments
}

/// A case's text with segments removed, repeated, moved or taken from other texts, and sometimes cut off.
fn mutate(texts: &[String], rng: &mut Rng) -> String {
    const OTHERS: [&str; 14] =
        ["\u{1}", "\t", "\\", "\\u", "\\ud83d", "1e400", "None", "(", "é", "</think>", "<think>", "```", "0x", "// "];
    let mut all: Vec<String> = segments(&texts[rng.below(texts.len())]).into_iter().map(String::from).collect();
    for _ in 0..rng.below(5) {
        let other = &texts[rng.below(texts.len())];
        let other = segments(other);
        let at = rng.below(all.len() + 1);
        match rng.below(4) {
            0 if at < all.len() => _ = all.remove(at),
            1 if at < all.len() => all.insert(at, all[at].clone()),
            2 => all.insert(at, OTHERS[rng.below(OTHERS.len())].into()),
            _ => all.insert(at, other[rng.below(other.len())].into()),
        }
    }
    if rng.below(4) == 0 {
        all.truncate(rng.below(all.len() + 1));
    }
    all.concat()
}

#[test]
fn slips_of_any_kind_give_arguments_that_parse() {
    let seed = testing::seed();
    let mut rng = Rng(seed);
    let cases = cases();
    let texts: Vec<String> = cases.iter().map(|case| case["text"].as_str().unwrap().into()).collect();
    let mut calls = 0;
    for i in 0..6_000 {
        let case = &cases[rng.below(cases.len())];
        let same_format: Vec<String> = (0..cases.len())
            .filter(|&other| cases[other]["format"] == case["format"])
            .map(|other| texts[other].clone())
            .collect();
        let text = mutate(&same_format, &mut rng);
        let how = rng.below(8);
        let options = || {
            let base = options_of(case);
            match how {
                0 => ParserOptions { reasoning: ReasoningStart::Never, prefix: CallPrefix::AnyFunction, ..base },
                1 => ParserOptions { max_calls: 1, ..base },
                2 => ParserOptions { reasoning: ReasoningStart::Opened, ..base },
                _ => base,
            }
        };
        let context = format!("seed {seed}, {i}, {how}: {text:?}");
        let whole = parse(options(), [text.as_str()]);
        calls += understood(&whole, &context).2.len();
        let deltas = cut(&text, &mut rng);
        assert_eq!(parse(options(), deltas.iter().copied()), whole, "{context} as {deltas:?}");
    }
    assert!(calls > 3_000, "only {calls} calls were parsed");
}
