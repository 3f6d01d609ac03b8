//! Tests of the formats, the prompt and the options.

mod cases;
mod cuts;
mod dsml;
mod recorded;
mod slips;

use super::*;
use pegainfer_testing as testing;
use recorded::{CODER, HERMES, Recorded};
use serde_json::json;

/// Events as short lines: `R` reasoning, `C` content, `T` a call's name, `A` its arguments, `E` whether it is complete.
pub(super) fn describe(events: &[Event]) -> Vec<String> {
    let line = |event: &Event| match event {
        Event::Reasoning(text) => format!("R {text}"),
        Event::Content(text) => format!("C {text}"),
        Event::ToolStart { index, name, .. } => format!("T{index} {name}"),
        Event::ToolArguments { index, delta } => format!("A{index} {delta}"),
        Event::ToolEnd { index, complete } => format!("E{index} {complete}"),
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

fn definitions() -> Arc<[Value]> {
    let properties = json!({"text": {"type": "string"}, "n": {"type": "integer"}, "list": {"type": "array"},
        "maybe": {"type": ["string", "null"]}});
    Arc::new([json!({"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}})])
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

pub(super) fn parse<'a>(options: ParserOptions, deltas: impl IntoIterator<Item = &'a str>) -> Vec<Event> {
    let mut parser = OutputParser::new(options);
    let mut events = vec![];
    for delta in deltas {
        join(&mut events, parser.push(delta));
    }
    join(&mut events, parser.finish());
    events
}

fn check(tools: ToolFormat, cases: Recorded) {
    for (text, expected) in cases {
        assert_eq!(describe(&parse(options(tools), [*text])), *expected, "{text:?}");
    }
}

#[test]
fn hermes_calls() {
    check(ToolFormat::Hermes, HERMES);
}

#[test]
fn qwen3_coder_calls() {
    check(ToolFormat::Qwen3Coder, CODER);
}

#[test]
fn the_prompt_may_contain_the_beginning_of_the_output() {
    let with = |tools, reasoning, prefix, text: &str| {
        describe(&parse(ParserOptions { reasoning, prefix, ..options(tools) }, [text]))
    };
    use {CallPrefix as P, ReasoningStart as R, ToolFormat as F};
    assert_eq!(with(F::Hermes, R::Opened, P::None, "hm\n</think>\n\nyes"), ["R hm", "C yes"]);
    assert_eq!(with(F::Hermes, R::Never, P::None, "<think>hm</think>"), ["C <think>hm</think>"]);
    let named = P::Function("f".into());
    let rest = " {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(
        with(F::Hermes, R::Never, named.clone(), rest),
        ["T0 f", "A0 {\"a\": 1}", "E0 true", "T1 g", "A1 {}", "E1 true"]
    );
    assert_eq!(with(F::Hermes, R::Never, named.clone(), " I cannot."), ["C  I cannot."]);
    let rest = "{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(with(F::Hermes, R::Never, P::AnyFunction, rest), ["T0 g", "A0 {}", "E0 true"]);
    assert_eq!(with(F::Hermes, R::Never, P::AnyFunction, "Sorry."), ["C Sorry."]);
    let rest = "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(with(F::Qwen3Coder, R::Never, named, rest), ["T0 f", "A0 {\"n\": 5}", "E0 true"]);
    assert_eq!(with(F::Qwen3Coder, R::Never, P::AnyFunction, "g>\n</function>"), ["T0 g", "A0 {}", "E0 true"]);
}

#[test]
fn reasoning_and_calls_can_be_dropped() {
    let text = "<think>hm</think>a<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>b\
        <tool_call>{\"name\": \"g\", \"arguments\": {\"x\": 1}}</tool_call>";
    let base = || options(ToolFormat::Hermes);
    let one = parse(ParserOptions { max_calls: 1, include_reasoning: false, ..base() }, [text]);
    assert_eq!(describe(&one), ["C a", "T0 f", "A0 {}", "E0 true", "C b"]);
    let none = parse(ParserOptions { tools: None, ..base() }, [text]);
    assert_eq!(describe(&none), ["R hm".to_string(), format!("C {}", &text[17..])]);
}

#[test]
fn arguments_are_streamed() {
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
fn ids_differ_between_calls_and_choices() {
    let text = "<tool_call>{\"name\": \"f\"}</tool_call>".repeat(2);
    let ids = |id_seed| -> Vec<String> {
        let events = parse(ParserOptions { id_seed, ..options(ToolFormat::Hermes) }, [text.as_str()]);
        let id = |event| if let Event::ToolStart { id, .. } = event { Some(id) } else { None };
        events.into_iter().filter_map(id).collect()
    };
    let all: std::collections::HashSet<String> = ids(1).into_iter().chain(ids(u64::MAX)).collect();
    assert!(all.len() == 4 && all.iter().all(|id| id.len() == 29), "{all:?}");
}

#[test]
fn templates_tell_the_output_format() {
    let of = OutputFormat::detect;
    assert_eq!(of("{{ messages }}"), OutputFormat { reasoning: false, tools: None });
    let template = std::fs::read_to_string(testing::model_dir().join("chat_template.jinja")).unwrap();
    assert_eq!(of(&template), OutputFormat { reasoning: true, tools: Some(ToolFormat::Hermes) });
    assert_eq!(of("<tool_call>\n<function=").tools, Some(ToolFormat::Qwen3Coder));
}
