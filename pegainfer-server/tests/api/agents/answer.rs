//! A client's view of a response, whole or streamed, in each of the three APIs.

use super::recorded::Api;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

/// One call that the client has to make.
#[derive(Debug, Clone, Default)]
pub struct Call {
    pub id: String,
    /// Name of the function, after its namespace.
    pub name: String,
    /// Arguments as an object; the text of a custom tool is its `input`.
    pub input: Value,
}

/// A complete answer.
#[derive(Debug, Default)]
pub struct Answer {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<Call>,
    /// True if the stop reason tells the client to make calls.
    pub ended_with_calls: bool,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    /// The answer as the client sends it back: a message, content blocks or output items.
    pub sent_back: Value,
}

impl Answer {
    /// Reads a JSON response.
    pub fn from_response(api: Api, text: &str) -> Self {
        let response: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        match api {
            Api::Chat => {
                chat(&response["choices"][0]["message"], &response["choices"][0]["finish_reason"], &response["usage"])
            }
            Api::Messages => message(&response),
            Api::Responses => output(response["output"].as_array().unwrap(), &response),
        }
    }

    /// Reads a stream of events.
    pub fn from_stream(api: Api, text: &str) -> Self {
        let events = events(api, text);
        match api {
            Api::Chat => chat_stream(&events),
            Api::Messages => message(&assemble_message(&events)),
            Api::Responses => response_stream(&events),
        }
    }
}

/// The events of a stream. Checks that named events repeat their name.
fn events(api: Api, text: &str) -> Vec<Value> {
    let text = match api {
        Api::Chat => text.strip_suffix("data: [DONE]\n\n").unwrap_or_else(|| panic!("no [DONE] in {text}")),
        Api::Messages | Api::Responses => text,
    };
    let mut events = Vec::new();
    for block in text.split_terminator("\n\n") {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
        // A block without data is a comment that keeps the connection alive.
        let Some(data) = field("data: ") else { continue };
        let data: Value = serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"));
        match field("event: ") {
            Some(name) => assert_eq!(data["type"], name),
            None => assert_eq!(api, Api::Chat, "an event without a name: {data}"),
        }
        if data["type"] != "ping" {
            events.push(data);
        }
    }
    events
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn append(to: &mut Value, more: &Value) {
    *to = format!("{}{}", text(to), text(more)).into();
}

fn parsed(arguments: &Value) -> Value {
    serde_json::from_str(text(arguments)).unwrap_or_else(|e| panic!("{e}: {arguments}"))
}

fn count(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count")) as usize
}

fn chat(message: &Value, finish: &Value, usage: &Value) -> Answer {
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let call = |call: &Value| {
        assert_eq!(call["type"], "function");
        let function = &call["function"];
        Call {
            id: text(&call["id"]).into(),
            name: text(&function["name"]).into(),
            input: parsed(&function["arguments"]),
        }
    };
    let mut sent_back = json!({"role": "assistant", "content": message["content"]});
    if !calls.is_empty() {
        sent_back["tool_calls"] = calls.clone().into();
    }
    Answer {
        reasoning: text(&message["reasoning_content"]).into(),
        content: text(&message["content"]).into(),
        calls: calls.iter().map(call).collect(),
        ended_with_calls: finish == "tool_calls",
        prompt_tokens: count(&usage["prompt_tokens"]),
        cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        sent_back,
    }
}

fn chat_stream(events: &[Value]) -> Answer {
    let mut message = json!({"content": "", "reasoning_content": ""});
    let (mut calls, mut finish, mut usage) = (Vec::<Value>::new(), Value::Null, Value::Null);
    for event in events {
        if !event["usage"].is_null() {
            usage = event["usage"].clone();
        }
        let Some(choice) = event["choices"].get(0) else { continue };
        for field in ["content", "reasoning_content"] {
            append(&mut message[field], &choice["delta"][field]);
        }
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            if count(&delta["index"]) == calls.len() {
                let function = json!({"name": delta["function"]["name"], "arguments": ""});
                calls.push(json!({"id": delta["id"], "type": delta["type"], "function": function}));
            }
            append(&mut calls.last_mut().unwrap()["function"]["arguments"], &delta["function"]["arguments"]);
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    if usage.is_null() {
        // The client did not ask for counts.
        usage = json!({"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}});
    }
    message["tool_calls"] = calls.into();
    chat(&message, &finish, &usage)
}

/// The message that a client of Anthropic's API builds from the events.
fn assemble_message(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut partial = Value::Null;
    for event in &events[1..] {
        let content = message["content"].as_array_mut().unwrap();
        match text(&event["type"]) {
            "content_block_start" => {
                content.push(event["content_block"].clone());
                partial = Value::Null;
            }
            "content_block_delta" => {
                let (block, delta) = (content.last_mut().unwrap(), &event["delta"]);
                match text(&delta["type"]) {
                    "text_delta" => append(&mut block["text"], &delta["text"]),
                    "thinking_delta" => append(&mut block["thinking"], &delta["thinking"]),
                    "signature_delta" => append(&mut block["signature"], &delta["signature"]),
                    "input_json_delta" => append(&mut partial, &delta["partial_json"]),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                if !partial.is_null() {
                    content.last_mut().unwrap()["input"] = parsed(&partial);
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => return message,
            other => panic!("{other}"),
        }
    }
    panic!("no message_stop in {events:?}")
}

/// The reasoning of a block, which its signature contains if the client does not want to see it.
fn thinking(block: &Value) -> String {
    match text(&block["signature"]).strip_prefix("pegainfer-1-") {
        Some(encoded) => String::from_utf8(BASE64_STANDARD.decode(encoded).unwrap()).unwrap(),
        None => text(&block["thinking"]).to_string(),
    }
}

fn message(message: &Value) -> Answer {
    let usage = &message["usage"];
    let cached_tokens = count(&usage["cache_read_input_tokens"]);
    let mut answer = Answer {
        ended_with_calls: message["stop_reason"] == "tool_use",
        prompt_tokens: count(&usage["input_tokens"]) + cached_tokens,
        cached_tokens,
        sent_back: message["content"].clone(),
        ..Answer::default()
    };
    for block in message["content"].as_array().unwrap() {
        match text(&block["type"]) {
            "thinking" => answer.reasoning += &thinking(block),
            "text" => answer.content += text(&block["text"]),
            "tool_use" => {
                assert!(block["input"].is_object(), "{block}");
                let (id, name) = (text(&block["id"]).into(), text(&block["name"]).into());
                answer.calls.push(Call { id, name, input: block["input"].clone() });
            }
            other => panic!("{other}"),
        }
    }
    answer
}

/// Reads a stream of the Responses API: the completed items, checked against their deltas.
fn response_stream(events: &[Value]) -> Answer {
    let (mut items, mut grown) = (Vec::new(), String::new());
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i);
        let kind = text(&event["type"]);
        if kind == "response.output_item.added" {
            grown.clear();
        } else if kind.ends_with(".delta") {
            grown += text(&event["delta"]);
        } else if kind == "response.output_item.done" {
            let item = event["item"].clone();
            let whole = match text(&item["type"]) {
                "reasoning" => reasoning(&item),
                "message" => text(&item["content"][0]["text"]).to_string(),
                "function_call" => text(&item["arguments"]).to_string(),
                "custom_tool_call" => text(&item["input"]).to_string(),
                "tool_search_call" => String::new(),
                other => panic!("{other}"),
            };
            assert_eq!(grown, whole, "{item}");
            items.push(item);
        }
    }
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed", "{last}");
    assert_eq!(last["response"]["output"], Value::from(items.clone()));
    output(&items, &last["response"])
}

/// The reasoning: a summary if the request asked for one, otherwise content.
fn reasoning(item: &Value) -> String {
    let parts = [&item["summary"], &item["content"]].into_iter().filter_map(Value::as_array).flatten();
    parts.map(|part| text(&part["text"])).collect()
}

fn output(items: &[Value], response: &Value) -> Answer {
    assert_eq!(response["status"], "completed", "{response}");
    let usage = &response["usage"];
    let mut answer = Answer {
        prompt_tokens: count(&usage["input_tokens"]),
        cached_tokens: count(&usage["input_tokens_details"]["cached_tokens"]),
        sent_back: items.into(),
        ..Answer::default()
    };
    for item in items {
        let id = || text(&item["call_id"]).to_string();
        match text(&item["type"]) {
            "reasoning" => answer.reasoning += &reasoning(item),
            "message" => answer.content += text(&item["content"][0]["text"]),
            "function_call" => {
                let namespace = item["namespace"].as_str().map(|space| format!("{space}."));
                let name = namespace.unwrap_or_default() + text(&item["name"]);
                answer.calls.push(Call { id: id(), name, input: parsed(&item["arguments"]) });
            }
            "custom_tool_call" => {
                let input = json!({"input": item["input"]});
                answer.calls.push(Call { id: id(), name: text(&item["name"]).into(), input });
            }
            "tool_search_call" => {
                assert_eq!(item["execution"], "client");
                answer.calls.push(Call { id: id(), name: "tool_search".into(), input: item["arguments"].clone() });
            }
            other => panic!("{other}"),
        }
    }
    answer.ended_with_calls = !answer.calls.is_empty();
    answer
}
