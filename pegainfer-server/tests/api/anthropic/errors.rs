//! Refusals and failures in Anthropic's shape.

use super::client::{MESSAGES, body, stream};
use crate::support::client::{get, post, post_with, send, write};
use crate::support::mock::MockEngine;
use crate::support::{TestServer, wait_until};
use pegainfer_server::app::Options;
use pegainfer_server::http::{ApiKeys, Secret};
use serde_json::json;
use std::sync::atomic::Ordering;

#[test]
fn errors_have_the_shape_of_anthropic() {
    let (server, control) = TestServer::replying("x");
    for (fields, status, kind, expected) in [
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens is missing"),
        (json!({"model": "gpt"}), 404, "not_found_error", "does not exist"),
        (json!({"messages": []}), 400, "invalid_request_error", "messages is empty"),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            400,
            "invalid_request_error",
            "messages[0].role must be one of user, assistant, system",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            400,
            "invalid_request_error",
            "messages[0].content[0] is of type image: this model reads only text (capability_rejected: image_block)",
        ),
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            400,
            "invalid_request_error",
            "messages[0].content must",
        ),
        (json!({"stop_sequences": [""]}), 400, "invalid_request_error", "stop_sequences must not hold an empty"),
        (json!({"mcp_servers": [{}]}), 400, "invalid_request_error", "mcp_servers is not implemented"),
        (json!({"container": "c"}), 400, "invalid_request_error", "container is not implemented"),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": -5}}),
            400,
            "invalid_request_error",
            "budget_tokens must be",
        ),
        (
            json!({"thinking": {"type": "adaptive", "budget_tokens": 5}}),
            400,
            "invalid_request_error",
            "budget_tokens needs",
        ),
        (json!({"tools": [{"type": "bash_20250124", "name": "x"}]}), 400, "invalid_request_error", "only custom"),
        (json!({"tools": [{"name": "x"}]}), 400, "invalid_request_error", "input_schema is missing"),
        (json!({"tool_choice": {"type": "must"}}), 400, "invalid_request_error", "tool_choice.type"),
        (
            json!({"output_config": {"effort": "most"}}),
            400,
            "invalid_request_error",
            "output_config.effort must be one of none",
        ),
        (json!({"temperature": "hot"}), 400, "invalid_request_error", "temperature must be a number"),
    ] {
        let response = post(server.address, MESSAGES, &body(fields.clone()));
        let (got, error) = (response.status, response.json());
        assert_eq!((got, &error["type"], &error["error"]["type"]), (status, &json!("error"), &json!(kind)), "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(expected), "{error}");
    }
    assert_eq!(control.added(), 0);
    let (server, control) = TestServer::replying("one two three");
    control.allow(2);
    control.fail.store(true, Ordering::SeqCst);
    let events = stream(&server, &body(json!({"stream": true})));
    let error = events.last().unwrap();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("api_error")), "{error}");
}

#[test]
fn a_key_may_come_in_anthropics_header() {
    let keys = ApiKeys::load(&[Secret("k1".into())], None).unwrap();
    let server = TestServer::with(MockEngine::replying("x").0, Options { api_keys: keys, ..Options::default() });
    let status = |key: &str| post_with(server.address, MESSAGES, ("x-api-key", key), &body(json!({}))).status;
    assert_eq!((status("k1"), status("k2")), (200, 401));
}

#[test]
fn every_refusal_has_the_shape_of_the_api_that_was_called() {
    let (engine, control) = MockEngine::replying(" a cat");
    control.allow(0);
    let keys = ApiKeys::load(&[Secret("k".into())], None).unwrap();
    let mut server = TestServer::with(engine, Options { api_keys: keys, max_body: Some(1000), ..Options::default() });
    let address = server.address;
    let ask = |path: &str, method: &str, headers: &[(&str, &str)], body: &str| {
        let response = send(address, method, path, headers, body.as_bytes());
        let (status, id) = (response.status, response.header("request-id").map(str::to_string));
        (status, id, response.json())
    };
    let (key, json_type, text_type) =
        (("x-api-key", "k"), ("Content-Type", "application/json"), ("Content-Type", "text/plain"));
    let large = format!("{{\"x\": \"{}\"}}", "x".repeat(1000));
    for (path, method, headers, body, status, kind) in [
        (MESSAGES, "POST", vec![json_type], "{}", 401, "authentication_error"),
        (MESSAGES, "POST", vec![json_type, key], "{}", 400, "invalid_request_error"),
        (MESSAGES, "GET", vec![key], "", 405, "invalid_request_error"),
        ("/v1/messages/batches", "POST", vec![json_type, key], "{}", 404, "not_found_error"),
        (MESSAGES, "POST", vec![text_type, key], "{}", 415, "invalid_request_error"),
        (MESSAGES, "POST", vec![json_type, key], &large, 413, "request_too_large"),
        ("/v1/messages/count_tokens", "POST", vec![json_type, key], "[]", 400, "invalid_request_error"),
    ] {
        let (got, id, error) = ask(path, method, &headers, body);
        assert_eq!((got, &error["type"], &error["error"]["type"]), (status, &json!("error"), &json!(kind)), "{error}");
        assert!(error["error"]["message"].is_string() && id.is_some() && error["request_id"] == json!(id), "{error}");
        let openai = if path == MESSAGES { "/v1/chat/completions" } else { "/v1/nothing" };
        let (_, id, error) = ask(openai, method, &headers, body);
        assert!(id.is_none() && error["error"]["message"].is_string() && error.get("type").is_none(), "{error}");
    }
    let open = write(server.address, "POST", MESSAGES, &[json_type, key], body(json!({})).to_string().as_bytes());
    wait_until("a request is open", || control.added() == 1);
    server.stop();
    wait_until("it drains", || get(server.address, "/health").status == 503);
    let (status, _, error) = ask(MESSAGES, "POST", &[json_type, key], "{}");
    assert_eq!((status, &error["error"]["type"]), (503, &json!("overloaded_error")));
    drop(open);
}
