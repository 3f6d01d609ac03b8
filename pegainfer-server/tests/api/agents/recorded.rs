//! The recorded requests, and how each client continues after a call.

use super::answer::Answer;
use serde_json::{Value, json};
use std::path::Path;

/// The three APIs that agents use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    Chat,
    Messages,
    Responses,
}

/// One recorded request.
pub struct Recorded {
    /// Name of the file.
    pub name: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Value,
}

impl Recorded {
    /// All recorded requests, in the order of their names.
    pub fn all() -> Vec<Self> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/agents");
        let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "json")).collect();
        files.sort();
        assert_eq!(files.len(), 22);
        files.iter().map(|path| Self::load(path)).collect()
    }

    fn load(path: &Path) -> Self {
        let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_string();
        let mut headers: Vec<_> =
            file["headers"].as_object().unwrap().iter().map(|(name, value)| (name.clone(), text(value))).collect();
        if !headers.iter().any(|(name, _)| name == "content-type") {
            headers.push(("content-type".into(), "application/json".into()));
        }
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        Self { name, path: text(&file["path"]), headers, body: file["body"].clone() }
    }

    /// The API that the client uses.
    pub fn api(&self) -> Api {
        match self.path.split('?').next().unwrap() {
            "/v1/chat/completions" => Api::Chat,
            "/v1/messages" => Api::Messages,
            "/v1/responses" => Api::Responses,
            other => panic!("{other}"),
        }
    }

    /// True if the client asks for token counts in a stream.
    pub fn counts_tokens(&self) -> bool {
        self.api() != Api::Chat || self.body["stream_options"]["include_usage"] == true
    }

    /// Calls of the client's own tools, in a model's form; empty without tools.
    pub fn example_calls(&self) -> Vec<(String, Value)> {
        let mut calls = Vec::new();
        for tool in self.body["tools"].as_array().into_iter().flatten() {
            let name = |tool: &Value| tool["name"].as_str().or(tool["function"]["name"].as_str()).map(str::to_string);
            match tool["type"].as_str() {
                Some("namespace") => {
                    let inner = &tool["tools"][0];
                    let name = format!("{}.{}", name(tool).unwrap(), name(inner).unwrap());
                    calls.push((name, example(&inner["parameters"])));
                }
                Some("custom") => {
                    calls.push((name(tool).unwrap(), json!({"input": "*** Begin Patch\n+\"é\"\n*** End Patch"})))
                }
                Some("tool_search") => calls.push(("tool_search".into(), example(&tool["parameters"]))),
                None | Some("function") => {
                    let schema = [&tool["input_schema"], &tool["parameters"], &tool["function"]["parameters"]];
                    let schema = schema.into_iter().find(|schema| schema.is_object()).unwrap_or(&Value::Null);
                    calls.push((name(tool).unwrap(), example(schema)));
                }
                Some(_) => {}
            }
        }
        // The first and the last tool, and all tools with an unusual kind of call.
        let last = calls.len().saturating_sub(1);
        let own = |name: &str| name.contains('.') || ["apply_patch", "tool_search", "WebFetch"].contains(&name);
        let chosen = calls.into_iter().enumerate().filter(|(i, (name, _))| *i == 0 || *i == last || own(name));
        chosen.map(|(_, call)| call).collect()
    }

    /// Appends the answer and the results of its calls, as the client does.
    pub fn append_results(&self, body: &mut Value, answer: &Answer) {
        let result = "the result";
        match self.api() {
            Api::Chat => {
                let messages = body["messages"].as_array_mut().unwrap();
                messages.push(answer.sent_back.clone());
                let tool = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": result});
                messages.extend(answer.calls.iter().map(|call| tool(&call.id)));
            }
            Api::Messages => {
                let result = |id: &str| json!({"type": "tool_result", "tool_use_id": id, "content": result});
                let results: Vec<Value> = answer.calls.iter().map(|call| result(&call.id)).collect();
                let messages = body["messages"].as_array_mut().unwrap();
                messages.push(json!({"role": "assistant", "content": answer.sent_back}));
                messages.push(json!({"role": "user", "content": results}));
            }
            Api::Responses => {
                let input = body["input"].as_array_mut().unwrap();
                input.extend(answer.sent_back.as_array().unwrap().clone());
                for item in answer.sent_back.as_array().unwrap() {
                    let (kind, id) = (item["type"].as_str().unwrap(), &item["call_id"]);
                    match kind {
                        "function_call" | "custom_tool_call" => {
                            input.push(json!({"type": format!("{kind}_output"), "call_id": id, "output": result}));
                        }
                        "tool_search_call" => input.push(json!({"type": "tool_search_output", "call_id": id,
                            "status": "completed", "execution": "client", "tools": []})),
                        _ => {}
                    }
                }
            }
        }
    }

    /// The requests of the recorded conversation: one before each message of the model, and the recorded one.
    pub fn turns(&self) -> Vec<Value> {
        let field = if self.api() == Api::Responses { "input" } else { "messages" };
        let items = self.body[field].as_array().unwrap();
        let by_model = |item: &Value| {
            item["role"] == "assistant"
                || item["type"].as_str().is_some_and(|kind| kind.ends_with("_call") || kind == "reasoning")
        };
        let begins = |&i: &usize| by_model(&items[i]) && !by_model(&items[i - 1]);
        let ends = (1..items.len()).filter(begins).chain([items.len()]);
        ends.map(|end| {
            let mut body = self.body.clone();
            body[field] = items[..end].into();
            body
        })
        .collect()
    }
}

/// Arguments that fit a tool's schema.
fn example(schema: &Value) -> Value {
    let mut arguments = json!({});
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        arguments[name] = example_value(&schema["properties"][name]);
    }
    arguments
}

fn example_value(schema: &Value) -> Value {
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    let alternatives = schema["anyOf"].get(0).or(schema["oneOf"].get(0));
    match (schema["type"].as_str(), alternatives) {
        (None, Some(schema)) => example_value(schema),
        (Some("integer" | "number"), _) => 3.into(),
        (Some("boolean"), _) => true.into(),
        (Some("array"), _) => json!([example_value(&schema["items"])]),
        (Some("object"), _) => example(schema),
        _ => "two \"words\"\nand é".into(),
    }
}
