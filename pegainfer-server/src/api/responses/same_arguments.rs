//! Property test of the three writers: for any output of the model, a call has the same arguments in every API, plain
//! and streamed.

use super::output::ResponseOutput;
use super::request::Reply;
use super::tools::ToolSet;
use super::wire::{InputDetails, OutputDetails, Repeated, ResponseUsage};
use crate::api::anthropic::response::MessageOutput;
use crate::api::assistant_message::AssistantMessage;
use crate::api::delta::{Counts, Finish};
use crate::api::schema::Body;
use crate::api::schema::anthropic::ThinkingDisplay;
use crate::api::schema::responses::ResponsesFields;
use crate::api::sse::Events;
use crate::api::wire::Usage;
use pegainfer_testing::{Rng, seed};
use pegainfer_text::parser::Event;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// A call as the model wrote it.
#[derive(Debug, Clone)]
struct Call {
    name: &'static str,
    /// The text of a JSON object, with and without white space between its values.
    arguments: String,
    compact: String,
    /// Its member `input`; empty without one.
    input: String,
    complete: bool,
}

/// Names of the tools, one of each kind.
const NAMES: [&str; 3] = ["f", "patch", "n.g"];

fn one<'a>(rng: &mut Rng, all: &[&'a str]) -> &'a str {
    all[rng.below(all.len())]
}

/// A JSON object with and without white space between its values, and its member `input`.
fn object(rng: &mut Rng) -> (String, String, String) {
    let (mut spaced, mut compact, mut input) = (String::new(), String::new(), String::new());
    let mut push = |rng: &mut Rng, text: &str| {
        spaced += text;
        spaced += one(rng, &["", "", " ", "\n  "]);
        compact += text;
    };
    push(rng, "{");
    for at in 0..rng.below(4) {
        if at > 0 {
            push(rng, ",");
        }
        let name = if at == 0 { "\"input\"".to_owned() } else { format!("\"a{at}\"") };
        push(rng, &name);
        push(rng, ":");
        let values = [
            "\"é \\\" \\\\\"",
            "\"a  b\\n\"",
            "123456789012345678901234567890",
            "1e400",
            "[]",
            "{\"x\":null}",
            "\"</parameter>\"",
        ];
        let value = if at == 0 { one(rng, &values[..2]) } else { one(rng, &values) };
        push(rng, value);
        if at == 0 {
            input = serde_json::from_str(value).unwrap();
        }
    }
    push(rng, "}");
    (spaced, compact, input)
}

/// Parser events of a random output, and its calls.
fn output(rng: &mut Rng) -> (Vec<Event>, Vec<Call>) {
    let (mut events, mut calls) = (vec![], vec![]);
    for _ in 0..rng.below(6) {
        match rng.below(5) {
            0 => events.push(Event::Reasoning("Hm.".into())),
            1 => events.push(Event::Content("text".into())),
            _ => {
                let (index, name) = (calls.len(), NAMES[rng.below(3)]);
                let (arguments, compact, input) = object(rng);
                events.push(Event::ToolStart { index, id: format!("call_{index}"), name: name.into() });
                let mut rest = arguments.as_str();
                while !rest.is_empty() {
                    let ends: Vec<usize> = rest.char_indices().map(|(at, c)| at + c.len_utf8()).collect();
                    let (delta, after) = rest.split_at(ends[rng.below(ends.len().min(9))]);
                    events.push(Event::ToolArguments { index, delta: delta.into() });
                    rest = after;
                }
                // The next event closes a call without an end event.
                let end = rng.below(3);
                if end > 0 {
                    events.push(Event::ToolEnd { index, complete: end == 1 });
                }
                calls.push(Call { name, arguments, compact, input, complete: end < 2 });
            }
        }
    }
    (events, calls)
}

/// Splits events into random deltas.
fn deltas(rng: &mut Rng, events: &[Event]) -> Vec<Vec<Event>> {
    let mut deltas = vec![vec![]];
    for event in events {
        if rng.below(2) == 0 {
            deltas.push(vec![]);
        }
        if let Some(last) = deltas.last_mut() {
            last.push(event.clone());
        }
    }
    deltas
}

fn json_of(value: &impl serde::Serialize) -> Value {
    serde_json::to_value(value).unwrap()
}

fn data(out: &Events) -> Vec<Value> {
    let lines = out.as_str().lines().filter_map(|line| line.strip_prefix("data: "));
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The concatenated texts of the events of this type, by block index.
fn texts(events: &[Value], kind: &str, index: &str, field: &str) -> Vec<(u64, String)> {
    let mut texts: Vec<(u64, String)> = vec![];
    for event in events.iter().filter(|event| event["type"] == kind || event["delta"]["type"] == kind) {
        let at = event[index].as_u64().unwrap();
        let more = event.pointer(field).unwrap().as_str().unwrap();
        match texts.last_mut() {
            Some((last, text)) if *last == at => text.push_str(more),
            _ => texts.push((at, more.to_owned())),
        }
    }
    texts
}

fn usage() -> Usage {
    Usage::sum([Counts::default()], 1)
}

fn check_chat(deltas: &[Vec<Event>], calls: &[Call]) {
    let whole = json_of(&AssistantMessage::whole(deltas.concat()));
    let mut streamed = vec![String::new(); calls.len()];
    for delta in deltas {
        let delta = json_of(&AssistantMessage::delta(delta.clone()));
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            streamed[call["index"].as_u64().unwrap() as usize] += call["function"]["arguments"].as_str().unwrap();
        }
    }
    for (at, call) in calls.iter().enumerate() {
        assert_eq!(whole["tool_calls"][at]["function"]["arguments"], call.arguments);
        assert_eq!(streamed[at], call.arguments);
    }
}

fn check_messages(deltas: &[Vec<Event>], finish: &Finish, calls: &[Call]) {
    let new = || MessageOutput::new("id", "m".into(), ThinkingDisplay::Summarized);
    let (mut whole, mut streamed, mut out) = (new(), new(), Events::default());
    streamed.begin(&mut out, &usage());
    for delta in deltas {
        whole.push(delta.clone());
        streamed.write(&mut out, delta.clone());
    }
    whole.end(Some(finish.clone()));
    streamed.set_finish(Some(finish.clone()));
    streamed.write_end(&mut out, &usage());
    let text = serde_json::to_string(&whole.message(&usage())).unwrap();
    #[derive(serde::Deserialize)]
    struct Message<'a> {
        #[serde(borrow)]
        content: Vec<Block<'a>>,
    }
    #[derive(serde::Deserialize)]
    struct Block<'a> {
        #[serde(borrow)]
        input: Option<&'a RawValue>,
    }
    let message: Message = serde_json::from_str(&text).unwrap();
    let inputs: Vec<&str> = message.content.iter().filter_map(|block| Some(block.input?.get())).collect();
    assert_eq!(inputs, calls.iter().map(|call| call.compact.as_str()).collect::<Vec<_>>());
    let partial = texts(&data(&out), "input_json_delta", "index", "/delta/partial_json");
    let partial: Vec<&str> = partial.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(partial, calls.iter().map(|call| call.arguments.as_str()).collect::<Vec<_>>());
}

fn reply() -> Reply {
    let tools = json!({"tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}]});
    let text = tools.to_string();
    let mut body = Body::parse(text.as_bytes()).unwrap();
    let fields: ResponsesFields = body.read().unwrap();
    let tools = ToolSet::read(fields.tools.unwrap_or_default(), &mut body).unwrap();
    let (_, targets) = tools.choose(None, true).unwrap();
    Reply { repeated: Repeated::default(), targets, summary: false }
}

fn check_responses(deltas: &[Vec<Event>], finish: &Finish, calls: &[Call]) {
    let usage = || ResponseUsage {
        input_tokens: 0,
        input_tokens_details: InputDetails { cached_tokens: 0 },
        output_tokens: 0,
        output_tokens_details: OutputDetails { reasoning_tokens: 0 },
        total_tokens: 0,
    };
    let new = || ResponseOutput::with("id".into(), "m".into(), 0, reply());
    let (mut whole, mut streamed, mut out) = (new(), new(), Events::default());
    streamed.begin(&mut out);
    for delta in deltas {
        whole.push(delta.clone());
        streamed.write(&mut out, delta.clone());
    }
    whole.end(Some(finish.clone()));
    streamed.set_finish(Some(finish.clone()));
    streamed.write_end(&mut out, usage());
    let (whole, events) = (json_of(&whole.whole(usage())), data(&out));
    let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
    let done: Vec<Value> = done.map(|event| event["item"].clone()).collect();
    assert_eq!(whole["output"], json!(done));
    assert_eq!(events.last().unwrap()["response"], whole);
    assert!(events.iter().zip(0..).all(|(event, at)| event["sequence_number"] == at), "numbers without a gap");
    let mut kinds =
        [("function_call_arguments", "arguments"), ("custom_tool_call_input", "input")].map(|(kind, field)| {
            let texts = |end, field: &str| texts(&events, &format!("response.{kind}.{end}"), "output_index", field);
            assert_eq!(texts("delta", "/delta"), texts("done", &format!("/{field}")));
            texts("delta", "/delta").into_iter()
        });
    let items = done.iter().filter(|item| item["type"].as_str().unwrap().ends_with("_call"));
    for (item, call) in items.zip(calls) {
        let (kind, field) = if call.name == "patch" { (1, "input") } else { (0, "arguments") };
        let (_, text) = kinds[kind].next().unwrap();
        let expected = if call.name == "patch" { &call.input } else { &call.arguments };
        assert_eq!((&text, &item[field]), (expected, &json!(expected)));
        assert_eq!(item["status"], if call.complete { "completed" } else { "incomplete" });
        assert_eq!(item["name"], call.name.trim_start_matches("n."));
    }
    assert!(kinds.iter_mut().all(|kind| kind.next().is_none()), "as many calls as the model made");
}

#[test]
fn a_call_has_the_same_arguments_in_every_api() {
    let (mut rng, mut calls_seen) = (Rng(seed()), 0);
    for _ in 0..2000 {
        let (events, calls) = output(&mut rng);
        let deltas = deltas(&mut rng, &events);
        let finish = Finish { reason: ["length", "stop", "tool_calls"][rng.below(3)], stop_reason: None };
        calls_seen += calls.len();
        check_chat(&deltas, &calls);
        check_messages(&deltas, &finish, &calls);
        check_responses(&deltas, &finish, &calls);
    }
    assert!(calls_seen > 2000, "{calls_seen}");
}
