//! A client of `/v1/responses`: builds requests, and the output from a stream.

use crate::support::TestServer;
use crate::support::client::{post, post_ok, with};
use serde_json::{Value, json};

pub const RESPONSES: &str = "/v1/responses";

pub const CALL: &str =
    "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";

pub fn body(fields: Value) -> Value {
    with(json!({"model": "tiny", "input": "hi", "store": false}), fields)
}

pub fn weather() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([{"type": "function", "name": "weather", "parameters": parameters, "strict": null}])
}

/// The events of a stream. Checks their numbers and names.
pub fn stream(server: &TestServer, body: &Value) -> Vec<Value> {
    let text = post(server.address, RESPONSES, body).text();
    let event = |(i, event): (usize, &str)| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], i);
        data
    };
    text.trim_end().split("\n\n").enumerate().map(event).collect()
}

/// The output items that a client builds from the events, checked against the complete items in the closing events.
fn assemble(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = vec![];
    let append = |to: &mut Value, event: &Value| {
        *to = (to.as_str().unwrap().to_string() + event["delta"].as_str().unwrap()).into();
    };
    for event in events {
        let kind = event["type"].as_str().unwrap();
        if event.get("item_id").is_some() {
            let at = event["output_index"].as_u64().unwrap() as usize;
            assert_eq!((event["item_id"].clone(), at + 1), (items[at]["id"].clone(), items.len()), "{event}");
        }
        let item = items.last_mut();
        match kind.strip_prefix("response.").unwrap() {
            "created" | "in_progress" | "completed" | "incomplete" => {}
            "output_item.added" => {
                assert_eq!(
                    (&event["item"]["status"], event["output_index"].as_u64()),
                    (&json!("in_progress"), Some(items.len() as u64))
                );
                items.push(event["item"].clone());
            }
            "content_part.added" => item.unwrap()["content"] = json!([event["part"]]),
            "reasoning_summary_part.added" => item.unwrap()["summary"] = json!([event["part"]]),
            "reasoning_summary_text.delta" => append(&mut item.unwrap()["summary"][0]["text"], event),
            "reasoning_summary_text.done" => assert_eq!(item.unwrap()["summary"][0]["text"], event["text"]),
            "reasoning_summary_part.done" => assert_eq!(item.unwrap()["summary"][0], event["part"]),
            "custom_tool_call_input.delta" => append(&mut item.unwrap()["input"], event),
            "custom_tool_call_input.done" => assert_eq!(item.unwrap()["input"], event["input"]),
            "output_text.delta" | "reasoning_text.delta" => append(&mut item.unwrap()["content"][0]["text"], event),
            "function_call_arguments.delta" => append(&mut item.unwrap()["arguments"], event),
            "output_text.done" | "reasoning_text.done" => {
                assert_eq!(item.unwrap()["content"][0]["text"], event["text"])
            }
            "function_call_arguments.done" => assert_eq!(item.unwrap()["arguments"], event["arguments"]),
            "content_part.done" => assert_eq!(item.unwrap()["content"][0], event["part"]),
            "output_item.done" => {
                let item = item.unwrap();
                item["status"] = event["item"]["status"].clone();
                assert_eq!(*item, event["item"]);
            }
            other => panic!("{other}"),
        }
    }
    items
}

/// The response; checks that the streamed one is the same, except for its ids.
pub fn respond(server: &TestServer, mut body: Value) -> Value {
    body["request_id"] = "r1".into();
    let without_ids = |mut response: Value| {
        response["created_at"] = 0.into();
        for item in response["output"].as_array_mut().unwrap().iter_mut().filter(|i| i.get("call_id").is_some()) {
            item["call_id"] = "id".into();
        }
        response
    };
    let plain = without_ids(post_ok(server.address, RESPONSES, &body));
    body["stream"] = true.into();
    let events = stream(server, &body);
    let last = events.last().unwrap();
    assert_eq!(last["response"]["output"], json!(assemble(&events)));
    assert_eq!(without_ids(last["response"].clone()), plain);
    plain
}
