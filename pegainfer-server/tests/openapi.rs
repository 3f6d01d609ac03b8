//! `/openapi.json` is true: a strict server, which refuses unknown fields, accepts every field listed there.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_server::app::Options;
use serde_json::{Value, json};
use support::TestServer;
use support::client::{get, post, post_ok};
use support::mock::MockEngine;

#[test]
fn every_listed_path_and_field_is_known() {
    let server = TestServer::with(MockEngine::replying("x").0, Options { strict: true, ..Options::default() });
    let document = get(server.address, "/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let mut fields = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        if methods.get("get").is_some() {
            assert_eq!(get(server.address, path).status, 200, "{path}");
        }
        let Some(body) = methods["post"].get("requestBody") else { continue };
        let (schema, example) =
            (&body["content"]["application/json"]["schema"], &body["content"]["application/json"]["example"]);
        let response = post_ok(server.address, path, example);
        let described = &methods["post"]["responses"]["200"]["content"]["application/json"]["schema"]["required"];
        for name in described.as_array().unwrap() {
            assert!(response.get(name.as_str().unwrap()).is_some(), "{path}: {name} of {response}");
        }
        let properties = schema["properties"].as_object().unwrap();
        for name in schema["required"].as_array().unwrap() {
            assert!(properties.contains_key(name.as_str().unwrap()), "{path}: {name}");
        }
        for (name, property) in properties {
            // A value of a wrong type: an error about the field is one that knows it.
            let kinds: Vec<&str> = property["type"].as_array().unwrap().iter().map(|k| k.as_str().unwrap()).collect();
            let wrong = if kinds.contains(&"object") { json!(7.5) } else { json!({"a": 1}) };
            let mut request = json!({"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
            match path.as_str() {
                "/v1/completions" => request = json!({"prompt": "x"}),
                "/v1/responses" => request = json!({"input": "x"}),
                "/detokenize" => request = json!({"tokens": [5]}),
                "/tokenize" => request = if name == "messages" { json!({}) } else { json!({"prompt": "x"}) },
                _ => drop(request.as_object_mut().unwrap().shift_remove("prompt")),
            }
            request[name] = wrong;
            let response = post(server.address, path, &request);
            let (status, response): (u16, Value) = (response.status, response.json());
            let message = response["error"]["message"].as_str().unwrap_or_default();
            let free_form = ["metadata"].contains(&name.as_str());
            assert!(!message.contains("unknown field"), "{path} {name}: {message}");
            assert!(
                free_form || (status == 400 && message.contains(name.as_str())),
                "{path} {name}: {status} {response}"
            );
            fields += 1;
        }
    }
    assert!(fields > 100, "{fields}");
}
