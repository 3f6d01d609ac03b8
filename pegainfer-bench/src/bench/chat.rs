//! One turn of a chat over `/v1/chat/completions`: the assistant's message as it was streamed, with its times.

use super::http::{Api, Usage};
use super::sampling::Fields;
use super::stats::Completion;
use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

/// An assistant's answer.
pub struct Reply {
    /// Times and token counts; `cached` is 0 if the server does not report it.
    pub completion: Completion,
    /// Number of prompt tokens found in the prefix cache; `None` if the server does not report it.
    pub cached: Option<usize>,
    /// Its text.
    pub text: Text,
}

/// The text of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Text {
    /// Text for the user.
    pub content: String,
    /// Reasoning, and the name of the field in which the server sent it.
    pub reasoning: Option<(&'static str, String)>,
    /// Calls of tools.
    pub calls: Vec<Call>,
}

/// A call of a tool.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Call {
    /// Id that the tool's result names.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// Arguments, the text of a JSON object.
    pub arguments: String,
}

/// The fields of a streamed choice that are used.
#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    index: Option<usize>,
    id: Option<String>,
    function: Option<FunctionDelta>,
}

#[derive(Deserialize)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

impl Api {
    /// Answers a chat, greedily and ignoring EOS unless `fields` say otherwise, as [`complete`](Self::complete) does.
    pub async fn chat(&self, messages: &[Value], max_tokens: usize, salt: u64, fields: &Fields) -> Result<Reply> {
        let mut text = Text::default();
        let body = json!({"messages": messages});
        let add = |choice: Choice| text.add(choice.delta);
        let mut streamed = self.generate("/v1/chat/completions", body, (max_tokens, salt, fields), add).await?;
        if streamed.stamps.is_empty() {
            // An answer without text, such as special tokens only.
            streamed.stamps.push(streamed.end);
        }
        let usage = streamed.usage.context("the server reports no usage in its stream")?;
        let prompt = usage.prompt_tokens.context("the server's usage has no prompt_tokens")?;
        let (cached, tokens) = (Usage::cached_tokens(&usage), usage.completion_tokens);
        let (start, stamps) = (streamed.start, streamed.stamps);
        let completion = Completion { start, stamps, prompt, asked: max_tokens, tokens, cached: cached.unwrap_or(0) };
        Ok(Reply { completion, cached, text })
    }
}

impl Text {
    /// Adds a delta. Returns true if it has text.
    fn add(&mut self, delta: Delta) -> bool {
        let mut has_text = false;
        if let Some(content) = delta.content.filter(|text| !text.is_empty()) {
            self.content += &content;
            has_text = true;
        }
        // A server may send both names of the field, with the same text.
        let older = delta.reasoning_content.map(|text| ("reasoning_content", text));
        let reasoning = older.or(delta.reasoning.map(|text| ("reasoning", text)));
        if let Some((name, text)) = reasoning.filter(|(_, text)| !text.is_empty()) {
            self.reasoning.get_or_insert((name, String::new())).1 += &text;
            has_text = true;
        }
        for delta in delta.tool_calls.into_iter().flatten() {
            let index = delta.index.unwrap_or(self.calls.len()).min(self.calls.len());
            if index == self.calls.len() {
                self.calls.push(Call::default());
            }
            let call = &mut self.calls[index];
            call.id += delta.id.as_deref().unwrap_or_default();
            if let Some(function) = delta.function {
                call.name += function.name.as_deref().unwrap_or_default();
                call.arguments += function.arguments.as_deref().unwrap_or_default();
            }
            has_text = true;
        }
        has_text
    }

    /// The assistant's message for the next turn: this text, with `calls`.
    pub fn message(&self, calls: &[Call]) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if let Some((name, text)) = &self.reasoning {
            message[*name] = text.as_str().into();
        }
        if !calls.is_empty() {
            let function = |call: &Call| json!({"name": call.name, "arguments": call.arguments});
            let call = |call: &Call| json!({"id": call.id, "type": "function", "function": function(call)});
            message["tool_calls"] = calls.iter().map(call).collect();
        }
        message
    }

    /// All of its text: reasoning, content, then the calls.
    pub fn all(&self) -> String {
        let reasoning = self.reasoning.as_ref().map_or("", |(_, text)| text);
        let calls = self.calls.iter().map(|call| format!("{}({})", call.name, call.arguments));
        [reasoning.to_owned(), self.content.clone()].into_iter().chain(calls).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(deltas: &[Value]) -> (Text, Vec<bool>) {
        let mut text = Text::default();
        let has_text = deltas.iter().map(|delta| text.add(serde_json::from_value(delta.clone()).unwrap())).collect();
        (text, has_text)
    }

    #[test]
    fn deltas_add_up_to_the_message() {
        let call = |call: Value| json!({"tool_calls": [call]});
        let (text, has_text) = read(&[
            json!({"role": "assistant", "content": ""}),
            json!({"reasoning": "h", "reasoning_content": "h"}),
            json!({"reasoning_content": "m"}),
            json!({"content": "a"}),
            json!({"content": "b", "tool_calls": null}),
            call(json!({"index": 0, "id": "x", "function": {"name": "run", "arguments": "{\"a\""}})),
            call(json!({"index": 0, "function": {"arguments": ":1}"}})),
            call(json!({"index": 1, "id": "y", "function": {"name": "read", "arguments": "{}"}})),
            json!({}),
        ]);
        assert_eq!(has_text, [false, true, true, true, true, true, true, true, false]);
        let of = |id: &str, name: &str, arguments: &str| Call {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
        };
        assert_eq!(text.calls, [of("x", "run", "{\"a\":1}"), of("y", "read", "{}")]);
        assert_eq!(text.all(), "hmabrun({\"a\":1})read({})");
        let function = json!({"name": "run", "arguments": "{\"a\":1}"});
        let calls = json!([{"id": "x", "type": "function", "function": function}]);
        let message = json!({"role": "assistant", "content": "ab", "reasoning_content": "hm", "tool_calls": calls});
        assert_eq!(text.message(&text.calls[..1]), message);
        assert!(text.message(&[]).get("tool_calls").is_none());
    }
}
