//! `/openapi.json` matches the server: it accepts every documented field with a legal value and reports every
//! undocumented field, at every level. Responses have exactly the documented fields.

mod schema;

use crate::support::client::{Response, get, post, post_ok, send, with};
use crate::support::mock::MockEngine;
use crate::support::{Setup, TestServer};
use pegainfer_models::args::TaskArg;
use pegainfer_server::app::Options;
use schema::Document;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A field of no struct.
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

impl Document {
    /// The alternatives of a schema, without null.
    fn alternatives<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        let schema = self.resolve(schema);
        match schema["anyOf"].as_array() {
            Some(any) => any.iter().flat_map(|one| self.alternatives(one)).collect(),
            None if schema["type"] == "null" => vec![],
            None => vec![schema],
        }
    }

    /// Other fields, or a value, that this field needs and the schema cannot express.
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
            Some("integer") => json!(schema["minimum"].as_i64().map_or(1, |minimum| minimum.max(1))),
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

    /// Calls `visit` with the path and a value of each documented field of an object and of its nested objects, and
    /// with the path of an undocumented field of each. `put` writes a value of the object into a body.
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

/// Servers of a model with each task.
struct Servers {
    text: TestServer,
    vectors: TestServer,
    scores: TestServer,
}

impl Servers {
    fn start(options: impl Fn() -> Options) -> Self {
        let server = |task| {
            TestServer::start(MockEngine::replying("x").0, Setup { options: options(), task, ..Setup::default() })
        };
        Self { text: server(TaskArg::Auto), vectors: server(TaskArg::Embed), scores: server(TaskArg::Rerank) }
    }

    /// The one whose model has the task of an endpoint.
    fn of(&self, path: &str) -> &TestServer {
        match path {
            "/v1/embeddings" | "/v1/score" => &self.vectors,
            "/v1/rerank" => &self.scores,
            _ => &self.text,
        }
    }
}

/// False for endpoints of adapters, which this server does not have.
fn needs_no_adapters(methods: &Value) -> bool {
    methods["post"]["tags"] != json!(["adapters"])
}

fn ignored(response: &Response) -> Vec<&str> {
    response.header("x-ignored-fields").unwrap_or_default().split(", ").collect()
}

#[test]
fn every_path_is_served() {
    let servers = Servers::start(|| Options { admin_local: true, ..Options::default() });
    let document = get(servers.text.address, "/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path = path.replace("{name}", "tiny");
        if methods.get("get").is_some() {
            assert_eq!(get(servers.text.address, &path).status, 200, "{path}");
        }
        let Some(body) = methods["post"].get("requestBody").filter(|_| needs_no_adapters(methods)) else { continue };
        post_ok(servers.of(&path).address, &path, &body["content"]["application/json"]["example"]);
    }
}

#[test]
fn documented_fields_are_known_and_others_are_reported() {
    let servers = Servers::start(|| {
        let mut options = Options::default();
        options.limits.allow_priority = true;
        options
    });
    let document = Document(get(servers.text.address, "/openapi.json").json());
    let (mut fields, mut failures) = (0, vec![]);
    for (path, methods) in document.0["paths"].as_object().unwrap() {
        let Some(body) = methods["post"].get("requestBody").filter(|_| needs_no_adapters(methods)) else { continue };
        let content = &body["content"]["application/json"];
        let put = |object: Value| {
            let mut body = content["example"].clone();
            // A text to tokenize, or a conversation.
            let text = ["model", "prompt", "add_special_tokens", "return_token_strs", UNDOCUMENTED];
            if path == "/tokenize" && !text.iter().any(|name| object.get(name).is_some()) {
                body = json!({"messages": [{"role": "user", "content": "x"}]});
            }
            // Documents under one of their names.
            if path == "/v1/rerank" && object.get("texts").is_some() {
                body = json!({"query": "x"});
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
            let response = post(servers.of(path).address, path, &body);
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

/// Bodies with responses that have many of the documented fields.
fn telling_bodies() -> Vec<(&'static str, Value)> {
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "weather", "parameters": city});
    let messages = json!([{"role": "user", "content": "x"}]);
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    vec![
        (
            "/v1/completions",
            json!({"prompt": ["a b", "c"], "n": 2, "logprobs": 2, "echo": true, "return_token_ids": true,
            "stream_options": options}),
        ),
        ("/v1/completions", json!({"prompt": "a b", "prompt_logprobs": 1, "stop": "weather", "include_metrics": true})),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "logprobs": true, "top_logprobs": 2, "n": 2,
            "prompt_logprobs": 1, "return_token_ids": true, "stream_options": options,
            "tools": [{"type": "function", "function": function}]}),
        ),
        ("/v1/chat/completions", json!({"messages": messages, "stop_token_ids": [4089], "include_metrics": true})),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 50},
            "tools": [{"name": "weather", "input_schema": city}]}),
        ),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 4, "stop_sequences": ["weather"]})),
        (
            "/v1/responses",
            json!({"input": "x", "reasoning": {"summary": "auto"}, "instructions": "Be kind.",
            "tools": [{"type": "function", "name": "weather", "parameters": city}]}),
        ),
        ("/v1/responses", json!({"input": "x", "tools": [{"type": "custom", "name": "weather"}]})),
        (
            "/v1/responses",
            json!({"input": "x", "max_output_tokens": 4, "tools": [
                {"type": "namespace", "name": "n",
                    "tools": [{"type": "function", "name": "weather", "parameters": city}]}]}),
        ),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/tokenize", json!({"prompt": "a b", "return_token_strs": true})),
        ("/detokenize", json!({"tokens": [1, 2]})),
        (
            "/v1/completions/render",
            json!({"prompt": ["a", "b"], "logit_bias": {"1": 2}, "allowed_token_ids": [1], "stream": true,
            "stream_options": options, "structured_outputs": {"regex": "a"}, "seed": 1, "cache_salt": "s"}),
        ),
        ("/v1/chat/completions/render", json!({"messages": messages, "logprobs": true, "prompt_logprobs": 1})),
        (
            "/inference/v1/generate",
            json!({"token_ids": [1, 2], "output_mode": "text", "return_token_ids": true, "stream_options": options,
            "sampling_params": {"n": 2, "logprobs": 2}}),
        ),
        ("/inference/v1/generate", json!({"token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 1}})),
        ("/v1/embeddings", json!({"input": ["a", "b"]})),
        ("/v1/embeddings", json!({"input": "a", "encoding_format": "base64"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b", {"text": "c"}]})),
        ("/v1/rerank", json!({"query": "a", "texts": ["b"], "return_text": true})),
        ("/v1/score", json!({"text_1": "a", "text_2": ["b", "c"]})),
    ]
}

/// The events of a stream.
fn stream(server: &TestServer, path: &str, body: &Value) -> Vec<Value> {
    let text = post(server.address, path, &with(body.clone(), json!({"stream": true}))).text();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[test]
fn responses_fit_their_schemas() {
    let reply = "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n\
        {\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";
    let server = TestServer::with(MockEngine::replying(reply).0, Options::default());
    let others = Servers::start(Options::default);
    let document = Document(get(server.address, "/openapi.json").json());
    let (mut failures, mut kinds) = (vec![], BTreeSet::new());
    let mut check = |path: &str, schema: &Value, value: &Value| {
        failures.extend(document.check(schema, value, path).err());
    };
    for (path, body) in telling_bodies() {
        let server = if path.starts_with("/v1/embeddings") || path.contains("rank") || path.ends_with("score") {
            others.of(path)
        } else {
            &server
        };
        let described = &document.0["paths"][path]["post"]["responses"];
        let content = &described["200"]["content"];
        let mut plain = body.clone();
        plain.as_object_mut().unwrap().remove("stream_options");
        check(path, &content["application/json"]["schema"], &post_ok(server.address, path, &plain));
        let error = post(server.address, path, &json!({"model": 5}));
        assert_eq!(error.status, 400, "{path}");
        check(path, &described["400"]["content"]["application/json"]["schema"], &error.json());
        let schema = &content["text/event-stream"]["x-itemSchema"];
        for event in if schema.is_object() { stream(server, path, &body) } else { vec![] } {
            check(path, schema, &event);
            kinds.extend([&event["type"], &event["object"]].into_iter().filter_map(Value::as_str).map(str::to_owned));
        }
    }
    for (path, headers) in ["/v1/models", "/v1/models/tiny", "/load", "/loads", "/kv_event_sources", "/version"]
        .into_iter()
        .flat_map(|path| [(path, vec![]), (path, vec![("anthropic-version", "2023-06-01")])])
    {
        let described = path.replace("tiny", "{name}");
        let content = &document.0["paths"][described]["get"]["responses"]["200"]["content"]["application/json"];
        check(path, &content["schema"], &send(server.address, "GET", path, &headers, b"").json());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(kinds.len() > 20, "too few kinds of events: {kinds:?}");
    let schema = &document.0["paths"]["/load"]["get"]["responses"]["200"]["content"]["application/json"]["schema"];
    for (value, error) in [
        (json!({"server_load": 1, "running": 1, "waiting": 0}), "kv_cache_free is missing"),
        (json!({"server_load": 1, "running": "1", "waiting": 0, "kv_cache_free": 1}), "running is"),
        (json!({"server_load": 1, "running": 1, "waiting": 0, "kv_cache_free": 1, "x": 1}), "x is not documented"),
    ] {
        assert!(document.check(schema, &value, "").unwrap_err().contains(error), "{value}");
    }
}
