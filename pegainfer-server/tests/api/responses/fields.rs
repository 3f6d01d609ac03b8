//! Fields that are refused by name, and fields without effect, which are reported.

use super::client::{RESPONSES, body, stream};
use crate::support::TestServer;
use crate::support::client::post;
use serde_json::json;
use std::sync::atomic::Ordering;

#[test]
fn unimplemented_fields_are_refused_by_name() {
    let (server, control) = TestServer::replying("one two three");
    for (fields, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"reasoning": {"effort": "most"}}), "reasoning"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {"type": "rocket"}}}}), "text"),
        (json!({"tool_choice": {"type": "web_search"}}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), "tool_choice"),
        (json!({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}), "tools"),
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input"),
        (json!({"input": [{"role": "robot", "content": "x"}]}), "input"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
    ] {
        let response = post(server.address, RESPONSES, &body(fields.clone()));
        let (status, error) = (response.status, response.json()["error"].clone());
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{fields}: {error}");
        assert!(error["message"].as_str().unwrap().contains(param.split('.').next().unwrap()), "{fields}: {error}");
    }
    assert_eq!(control.added(), 0);
    control.allow(2);
    control.fail.store(true, Ordering::SeqCst);
    let events = stream(&server, &body(json!({"stream": true})));
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert!(last["response"]["error"]["message"].as_str().unwrap().contains("the scripted step failed"), "{last}");
}

#[test]
fn fields_without_effect_are_reported() {
    let (server, _) = TestServer::replying("ok");
    for (fields, expected) in [
        (json!({"store": true}), "store"),
        (json!({"include": ["reasoning.encrypted_content"]}), "include"),
        (json!({"include": []}), ""),
        (json!({"truncation": "auto", "service_tier": "priority"}), "truncation, service_tier"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"text": {"verbosity": "medium"}, "service_tier": "auto"}), ""),
        (
            json!({"tools": [{"type": "web_search", "external_web_access": false}]}),
            "tools[].external_web_access, tools[].web_search",
        ),
        (json!({"client_metadata": {"a": 1}, "prompt_cache_key": "k"}), "client_metadata"),
        (json!({"n": 2, "max_tokens": 2}), "n, max_tokens"),
        (
            json!({"input": [{"role": "user", "content": "hi"}, {"type": "web_search_call", "id": "w", "status": "completed"}]}),
            "input[].web_search_call",
        ),
    ] {
        let response = post(server.address, RESPONSES, &body(fields.clone()));
        let ignored = response.header("x-ignored-fields").unwrap_or_default().to_string();
        assert_eq!((response.status, ignored.as_str()), (200, expected), "{fields}");
    }
}
