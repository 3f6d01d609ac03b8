//! The formats, and the promise that cuts make no difference.

use super::*;
use crate::testing::{self, Rng};
use serde_json::json;

/// Events as short lines: `R` reasoning, `C` content, `T` the name of a call, `A` its arguments.
fn describe(events: &[Event]) -> Vec<String> {
    let line = |event: &Event| match event {
        Event::Reasoning(text) => format!("R {text}"),
        Event::Content(text) => format!("C {text}"),
        Event::ToolStart { index, name, .. } => format!("T{index} {name}"),
        Event::ToolArguments { index, delta } => format!("A{index} {delta}"),
    };
    events.iter().map(line).collect()
}

fn join(events: &mut Vec<Event>, more: Vec<Event>) {
    for event in more {
        match (events.last_mut(), event) {
            (Some(Event::Reasoning(last)), Event::Reasoning(text)) => *last += &text,
            (Some(Event::Content(last)), Event::Content(text)) => *last += &text,
            (Some(Event::ToolArguments { index: last_index, delta: last }), Event::ToolArguments { index, delta })
                if *last_index == index =>
            {
                *last += &delta
            }
            (_, event) => events.push(event),
        }
    }
}

fn definitions() -> Vec<Value> {
    let properties = json!({"text": {"type": "string"}, "n": {"type": "integer"}, "list": {"type": "array"},
        "maybe": {"type": ["string", "null"]}});
    vec![json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}})]
}

fn options(tools: ToolFormat) -> ParserOptions {
    ParserOptions {
        reasoning: ReasoningStart::IfOpened,
        include_reasoning: true,
        tools: Some(tools),
        prefix: CallPrefix::None,
        definitions: definitions(),
        max_calls: usize::MAX,
        id_seed: 7,
    }
}

fn parse<'a>(options: ParserOptions, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Event> {
    let mut parser = OutputParser::new(options);
    let mut events = vec![];
    for piece in pieces {
        join(&mut events, parser.push(piece));
    }
    join(&mut events, parser.finish());
    events
}

fn check(tools: ToolFormat, cases: &[(&str, &[&str])]) {
    for (text, expected) in cases {
        assert_eq!(describe(&parse(options(tools), [*text])), *expected, "{text:?}");
    }
}

const HERMES: &[(&str, &[&str])] = &[
    ("Hello.", &["C Hello."]),
    (" Hello \n", &["C  Hello \n"]),
    ("", &[]),
    ("<think>\nhm\n\nyes\n</think>\n\nParis.", &["R hm\n\nyes", "C Paris."]),
    ("<think>\n\n</think>\n\nParis.", &["C Paris."]),
    ("\n <think>a</think>b</think>", &["R a", "C b</think>"]),
    ("<think>cut off\n</thi", &["R cut off\n</thi"]),
    ("<thi", &["C <thi"]),
    ("a <think>b</think>", &["C a <think>b</think>"]),
    (
        "<think>\nI call <tool_call>.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        &["R I call <tool_call>.", "T0 f", "A0 {\"a\": 1}"],
    ),
    (
        "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}]\\\"</tool_call>\\\\\", \"b\": [{}, \"é🎉\\u00e9\"]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
        &[
            "C Let me see.",
            "T0 f",
            "A0 {\"a\": \"}]\\\"</tool_call>\\\\\", \"b\": [{}, \"é🎉\\u00e9\"]}",
            "T1 g",
            "A1 {}",
        ],
    ),
    // Order of the keys, other keys, other forms of the arguments.
    ("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>", &["T0 f", "A0 {\"a\": 1}"]),
    (
        "<tool_call>{\"id\": 1, \"name\": \"f\", \"parameters\": {}, \"x\": \"}\"}</tool_call>z",
        &["T0 f", "A0 {}", "C z"],
    ),
    ("<tool_call>{\"name\": \"f\"}</tool_call>", &["T0 f", "A0 {}"]),
    ("<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", &["T0 f", "A0 {}"]),
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": \\\"é\\\"}\"}</tool_call>",
        &["T0 f", "A0 {\"a\": \"é\"}"],
    ),
    ("<tool_call>{\"n\\u0061me\": \"\\u0066\", \"arguments\":{}}</tool_call>", &["T0 f", "A0 {}"]),
    // Slips that leave the call usable.
    ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}\n</tool_call>.", &["T0 f", "A0 {\"a\": 1}", "C ."]),
    ("<tool_call>{\"name\": \"f\", \"arguments\": {}}}}</tool_call>", &["T0 f", "A0 {}"]),
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n<tool_call>{\"name\": \"g\", \"arguments\": {}}",
        &["T0 f", "A0 {}", "T1 g", "A1 {}"],
    ),
    (
        "<tool_call>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
        &["C <tool_call>\n", "T0 f", "A0 {}"],
    ),
    // Slips inside the arguments: they end at the tag, and what follows is read again.
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x}\n</tool_call>\nDone.",
        &["T0 f", "A0 {\"a\": \"x}", "C Done."],
    ),
    ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1</tool_call>", &["T0 f", "A0 {\"a\": [1"]),
    // No calls.
    ("Use <tool_call> like this.", &["C Use <tool_call> like this."]),
    ("<tool_call>\n{\"name\": 5}\n</tool_call>", &["C <tool_call>\n{\"name\": 5}\n</tool_call>"]),
    ("<tool_call>{\"name\": \"\"}</tool_call>", &["C <tool_call>{\"name\": \"\"}</tool_call>"]),
    ("<tool_call>{\"arguments\": {}}</tool_call>", &["C <tool_call>{\"arguments\": {}}</tool_call>"]),
    (
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        &["C <tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"],
    ),
    ("<tool_call>{\"name\": \"f}\n</tool_call>", &["C <tool_call>{\"name\": \"f}\n</tool_call>"]),
    ("a < b <tool", &["C a < b <tool"]),
    // Cut off.
    ("ok\n<tool_call>\n{\"name\": \"f\", \"argu", &["C ok\n<tool_call>\n{\"name\": \"f\", \"argu"]),
    ("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b\n<", &["T0 f", "A0 {\"a\": \"b\n<"]),
    ("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}\n</tool_c", &["T0 f", "A0 {\"a\": \"b\"}"]),
];

const CODER: &[(&str, &[&str])] = &[
    ("<think>\nhm\n</think>\n\nHello <b>.", &["R hm", "C Hello <b>."]),
    (
        "I look.\n\n<tool_call>\n<function=f>\n<parameter=text>\na \"b\"\n\\ é🎉\n\n</parameter>\n<parameter=n>\n42\n</parameter>\n<parameter=list>\n[1, {\"a\": null}]\n</parameter>\n</function>\n</tool_call>\n",
        &["C I look.", "T0 f", "A0 {\"text\": \"a \\\"b\\\"\\n\\\\ é🎉\\n\", \"n\": 42, \"list\": [1,{\"a\":null}]}"],
    ),
    (
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=x>1</parameter></function></tool_call>",
        &["T0 f", "A0 {}", "T1 g", "A1 {\"x\": \"1\"}"],
    ),
    (
        "<tool_call><function=f><parameter=maybe>\nnull\n</parameter><parameter=n>\nmany\n</parameter></function></tool_call>",
        &["T0 f", "A0 {\"maybe\": null, \"n\": \"many\"}"],
    ),
    // Tags inside a value, and tags that are missing.
    (
        "<tool_call>\n<function=f>\n<parameter=text>\nx </function> <parameter=y> </tool_call>\n<p\n</parameter>\n</function>\n</tool_call>",
        &["T0 f", "A0 {\"text\": \"x </function> <parameter=y> </tool_call>\\n<p\"}"],
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=n>\n1\n</function>\n</tool_call> z",
        &["T0 f", "A0 {\"text\": \"a\", \"n\": 1}", "C z"],
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=text>\n<parameter=n>\n\n</parameter>\n</tool_call>",
        &["T0 f", "A0 {\"text\": \"\", \"n\": \"\"}"],
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\noops\n</function>\n</tool_call>",
        &["T0 f", "A0 {\"n\": 1", "C oops\n", "A0 }"],
    ),
    // Reasoning that is not closed before the call, and one that only mentions it.
    ("<think>\nhm\n<tool_call>\n<function=f>\n</function>\n</tool_call>", &["R hm", "T0 f", "A0 {}"]),
    ("<think>\nA <tool_call> <x> </think>ok", &["R A <tool_call> <x> ", "C ok"]),
    // No calls.
    ("<tool_call>\n{\"name\": \"f\"}\n</tool_call>", &["C <tool_call>\n{\"name\": \"f\"}\n</tool_call>"]),
    ("<tool_call><function=\n>", &["C <tool_call><function=\n>"]),
    ("<tool_call><function=>", &["C <tool_call><function=>"]),
    // Cut off.
    ("<tool_call>\n<function=f", &["C <tool_call>\n<function=f"]),
    ("<tool_call>\n<function=f>\n<parameter=te", &["T0 f"]),
    ("<tool_call>\n<function=f>\n<parameter=text>\nab\n<", &["T0 f", "A0 {\"text\": \"ab\\n<"]),
    ("<tool_call>\n<function=f>\n<parameter=n>\n1", &["T0 f", "A0 {\"n\": 1"]),
    ("<tool_call>\n<function=f>\n<parameter=text>\nab\n</function>\n", &["T0 f", "A0 {\"text\": \"ab\"}"]),
    ("<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool", &["T0 f", "A0 {\"n\": 1}"]),
];

#[test]
fn hermes_calls() {
    check(ToolFormat::Hermes, HERMES);
}

#[test]
fn qwen3_coder_calls() {
    check(ToolFormat::Qwen3Coder, CODER);
}

#[test]
fn the_prompt_may_have_begun_the_answer() {
    let with = |tools, reasoning, prefix, text: &str| {
        describe(&parse(ParserOptions { reasoning, prefix, ..options(tools) }, [text]))
    };
    use {CallPrefix as P, ReasoningStart as R, ToolFormat as F};
    assert_eq!(with(F::Hermes, R::Opened, P::None, "hm\n</think>\n\nyes"), ["R hm", "C yes"]);
    assert_eq!(with(F::Hermes, R::Never, P::None, "<think>hm</think>"), ["C <think>hm</think>"]);
    let named = P::Function("f".into());
    let rest = " {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(with(F::Hermes, R::Never, named.clone(), rest), ["T0 f", "A0 {\"a\": 1}", "T1 g", "A1 {}"]);
    assert_eq!(with(F::Hermes, R::Never, named.clone(), " I cannot."), ["C  I cannot."]);
    let rest = "{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(with(F::Hermes, R::Never, P::AnyFunction, rest), ["T0 g", "A0 {}"]);
    assert_eq!(with(F::Hermes, R::Never, P::AnyFunction, "Sorry."), ["C Sorry."]);
    let rest = "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(with(F::Qwen3Coder, R::Never, named, rest), ["T0 f", "A0 {\"n\": 5}"]);
    assert_eq!(with(F::Qwen3Coder, R::Never, P::AnyFunction, "g>\n</function>"), ["T0 g", "A0 {}"]);
}

#[test]
fn what_is_not_wanted_is_dropped() {
    let text = "<think>hm</think>a<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>b\
        <tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 1}}</tool_call>";
    let base = || options(ToolFormat::Hermes);
    let one = parse(ParserOptions { max_calls: 1, include_reasoning: false, ..base() }, [text]);
    assert_eq!(describe(&one), ["C a", "T0 f", "A0 {}", "C b"]);
    let none = parse(ParserOptions { tools: None, ..base() }, [text]);
    assert_eq!(describe(&none), ["R hm".to_string(), format!("C {}", &text[17..])]);
}

#[test]
fn arguments_go_out_as_they_come() {
    let mut parser = OutputParser::new(options(ToolFormat::Hermes));
    assert_eq!(parser.push("<tool_call>\n{\"name\": \"f\", \"arguments\": "), []);
    let id = "call_000000000000000700000000".to_string();
    let start = Event::ToolStart { index: 0, id, name: "f".into() };
    let arguments = |delta: &str| Event::ToolArguments { index: 0, delta: delta.into() };
    assert_eq!(parser.push("{"), [start, arguments("{")]);
    assert_eq!(parser.push("\"a\": \"b"), [arguments("\"a\": \"b")]);
    let mut parser = OutputParser::new(options(ToolFormat::Qwen3Coder));
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\n");
    assert_eq!(parser.push("ab\""), [arguments("ab\\\"")]);
}

#[test]
fn ids_differ_between_calls_and_answers() {
    let text = "<tool_call>{\"name\": \"f\"}</tool_call>".repeat(2);
    let ids = |id_seed| -> Vec<String> {
        let events = parse(ParserOptions { id_seed, ..options(ToolFormat::Hermes) }, [text.as_str()]);
        let id = |event| if let Event::ToolStart { id, .. } = event { Some(id) } else { None };
        events.into_iter().filter_map(id).collect()
    };
    let all: std::collections::HashSet<String> = ids(1).into_iter().chain(ids(u64::MAX)).collect();
    assert!(all.len() == 4 && all.iter().all(|id| id.len() == 29), "{all:?}");
}

/// Cuts `text` at random places between characters.
fn cut<'a>(text: &'a str, rng: &mut Rng) -> Vec<&'a str> {
    let density = 1 + rng.below(8);
    let (mut pieces, mut start) = (vec![], 0);
    for (end, _) in text.char_indices().skip(1) {
        if rng.below(density) == 0 {
            pieces.push(&text[start..end]);
            start = end;
        }
    }
    pieces.push(&text[start..]);
    pieces
}

/// A text of fragments in any order, so that every tag comes up in every place.
fn scramble(rng: &mut Rng) -> String {
    const FRAGMENTS: [&str; 32] = [
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
    ];
    (0..rng.below(24)).map(|_| FRAGMENTS[rng.below(FRAGMENTS.len())]).collect()
}

#[test]
fn any_cut_of_the_text_gives_the_same_events() {
    let seed = testing::seed();
    let mut rng = Rng(seed);
    let mut calls = 0;
    for round in 0..60_000 {
        let tools = if round % 2 == 0 { ToolFormat::Hermes } else { ToolFormat::Qwen3Coder };
        let recorded = if tools == ToolFormat::Hermes { HERMES } else { CODER };
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
        let pieces = cut(&text, &mut rng);
        assert_eq!(parse(options(), pieces.iter().copied()), whole, "seed {seed}, round {round}, {how}: {pieces:?}");
        calls += whole.iter().filter(|event| matches!(event, Event::ToolStart { .. })).count();
        if how == 0 && !whole.iter().any(|event| matches!(event, Event::ToolStart { .. })) {
            assert_eq!(describe(&whole).concat(), if text.is_empty() { String::new() } else { format!("C {text}") });
        }
    }
    assert!(calls > 10_000, "only {calls} calls were read");
}

#[test]
fn templates_say_what_their_models_write() {
    let of = OutputFormat::of_template;
    assert_eq!(of("{{ messages }}"), OutputFormat { reasoning: false, tools: None });
    let template = std::fs::read_to_string(testing::model_dir().join("chat_template.jinja")).unwrap();
    assert_eq!(of(&template), OutputFormat { reasoning: true, tools: Some(ToolFormat::Hermes) });
    assert_eq!(of("<tool_call>\n<function=").tools, Some(ToolFormat::Qwen3Coder));
}
