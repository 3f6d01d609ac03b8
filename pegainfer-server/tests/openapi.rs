//! `/openapi.json` is what the server does: every documented field is known with a legal value, and every undocumented field is
//! reported, at every level.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_server::app::Options;
use serde_json::{Value, json};
use support::TestServer;
use support::client::{Response, get, post, post_ok};
use support::mock::MockEngine;

/// A field that no struct has.
const UNDOCUMENTED: &str = "undocumented";

/// Documented fields that are reported, because their values have no effect.
const WITHOUT_EFFECT: [&str; 8] = [
    "/v1/messages output_config.effort",
    "/v1/messages/count_tokens output_config.effort",
    "/v1/responses include",
    "/v1/responses max_tool_calls",
    "/v1/responses service_tier",
    "/v1/responses text.verbosity",
    "/v1/responses top_logprobs",
    "/v1/responses truncation",
];

/// Walks a schema, resolving references.
struct Document(Value);

impl Document {
    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(reference) => self.0.pointer(reference.trim_start_matches('#')).unwrap(),
            None => schema,
        }
    }

    /// The alternatives of a schema, without null.
    fn alternatives<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        let schema = self.resolve(schema);
        match schema["anyOf"].as_array() {
            Some(any) => any.iter().flat_map(|one| self.alternatives(one)).collect(),
            None if schema["type"] == "null" => vec![],
            None => vec![schema],
        }
    }

    /// Fields that another field needs, or a value that the schema cannot tell.
    fn companions(&self, name: &str, properties: &Value) -> Value {
        match name {
            "stream_options" => json!({"stream": true}),
            "top_logprobs" if !properties["logprobs"].is_null() => json!({"logprobs": true}),
            "continue_final_message" => json!({"messages": [{"role": "assistant", "content": "I am"}]}),
            "tool_choice" => json!({"tools": self.legal("", &properties["tools"])}),
            "min_tokens" => json!({"max_tokens": 5}),
            _ => json!({}),
        }
    }

    /// A value that the schema allows.
    fn legal(&self, name: &str, schema: &Value) -> Value {
        match name {
            "model" => return json!("tiny"),
            "name" => return json!("get_weather"),
            "grammar" => return json!("start: \"a\""),
            _ => {}
        }
        let Some(&schema) = self.alternatives(schema).first() else { return Value::Null };
        for values in ["examples", "enum"] {
            if let Some(values) = schema[values].as_array() {
                return values[0].clone();
            }
        }
        if schema["maxItems"] == 0 {
            return json!([]);
        }
        let kind = schema["type"].as_array().map_or(&schema["type"], |kinds| &kinds[0]);
        match kind.as_str() {
            Some("string") => json!("xxx"),
            Some("boolean") => json!(false),
            Some("integer") => json!(schema["minimum"].as_i64().map_or(1, |least| least.max(1))),
            Some("number") => json!(1),
            Some("array") => json!([self.legal("", &schema["items"])]),
            _ => self.object(schema),
        }
    }

    /// The schema's example, or an object with the required fields.
    fn object(&self, schema: &Value) -> Value {
        if let Some(examples) = schema["examples"].as_array() {
            return examples[0].clone();
        }
        let names = schema["required"].as_array().into_iter().flatten().map(|name| name.as_str().unwrap());
        let fields = names.map(|name| (name.to_owned(), self.legal(name, &schema["properties"][name])));
        Value::Object(fields.collect())
    }

    /// Calls `visit` with the path and a value of each documented field of an object and of the objects in it, and with
    /// the path of an undocumented field of each of them. `put` writes a value of the object into a body.
    fn fields(
        &self,
        path: &str,
        schema: &Value,
        put: &dyn Fn(Value) -> Value,
        visit: &mut dyn FnMut(String, bool, Value),
    ) {
        let properties = schema["properties"].as_object().unwrap();
        let with = |name: &str, value: Value| {
            let mut object = self.object(schema);
            object[name] = value;
            put(object)
        };
        visit(format!("{path}{UNDOCUMENTED}"), false, with(UNDOCUMENTED, json!(1)));
        for (name, property) in properties {
            let example = self.object(schema).get(name).cloned();
            visit(format!("{path}{name}"), true, with(name, example.unwrap_or_else(|| self.legal(name, property))));
            for one in self.alternatives(property) {
                let (one, suffix, in_list) = match one["items"].is_object() {
                    true => (&one["items"], "[].", true),
                    false => (one, ".", false),
                };
                for inner in self.alternatives(one).into_iter().filter(|inner| inner["properties"].is_object()) {
                    let put = |value: Value| with(name, if in_list { json!([value]) } else { value });
                    self.fields(&format!("{path}{name}{suffix}"), inner, &put, visit);
                }
            }
        }
    }
}

fn ignored(response: &Response) -> Vec<&str> {
    response.header("x-ignored-fields").unwrap_or_default().split(", ").collect()
}

#[test]
fn every_path_is_served() {
    let server = TestServer::with(MockEngine::replying("x").0, Options::default());
    let document = get(server.address, "/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path.replace("{name}", "tiny");
        if methods.get("get").is_some() {
            assert_eq!(get(server.address, &path).status, 200, "{path}");
        }
        let Some(body) = methods["post"].get("requestBody") else { continue };
        let response = post_ok(server.address, &path, &body["content"]["application/json"]["example"]);
        let described = &methods["post"]["responses"]["200"]["content"]["application/json"]["schema"]["required"];
        for name in described.as_array().unwrap() {
            assert!(response.get(name.as_str().unwrap()).is_some(), "{path}: {name} of {response}");
        }
    }
}

#[test]
fn documented_fields_are_known_and_others_are_reported() {
    let mut options = Options::default();
    options.limits.allow_priority = true;
    let server = TestServer::with(MockEngine::replying("x").0, options);
    let document = Document(get(server.address, "/openapi.json").json());
    let (mut fields, mut failures) = (0, vec![]);
    for (path, methods) in document.0["paths"].as_object().unwrap() {
        let Some(body) = methods["post"].get("requestBody") else { continue };
        let content = &body["content"]["application/json"];
        let put = |object: Value| {
            let mut body = content["example"].clone();
            // A text to tokenize, or a conversation.
            let text = ["model", "prompt", "add_special_tokens", "return_token_strs", UNDOCUMENTED];
            if path == "/tokenize" && !text.iter().any(|name| object.get(name).is_some()) {
                body = json!({"messages": [{"role": "user", "content": "x"}]});
            }
            for (name, value) in object.as_object().unwrap() {
                for (name, value) in document.companions(name, &content["schema"]["properties"]).as_object().unwrap() {
                    body[name] = value.clone();
                }
                body[name] = value.clone();
            }
            body
        };
        let visit = &mut |field: String, documented: bool, body: Value| {
            let response = post(server.address, path, &body);
            let (status, reported) = (response.status, ignored(&response).contains(&field.as_str()));
            let message = response.text();
            let has_effect = documented && !WITHOUT_EFFECT.contains(&format!("{path} {field}").as_str());
            let fits = match status {
                200 => reported != has_effect,
                _ if field == "tool_choice.namespace" => message.contains("is not among the tools"),
                _ => documented && message.contains("not implemented"),
            };
            if !fits {
                failures.push(format!("{path} {field}: {body}: {status} {reported} {message}"));
            }
            fields += 1;
        };
        document.fields("", &content["schema"], &put, visit);
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(fields > 150, "{fields}");
}
