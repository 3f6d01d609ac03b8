//! The assistant's message, whole or the next part of it, made of what the parser found.

use crate::text::parser::Event;
use serde::Serialize;

/// `message` of a choice, or `delta` of a chunk.
#[derive(Serialize, Default)]
pub struct Message {
    /// In a whole message and in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Outer `None` leaves the field out; inner `None` writes null.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    /// The same under its older name, which many clients still read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

#[derive(Serialize)]
struct ToolCall {
    /// In chunks only: whole messages have the calls in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// This and the type: only where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: Function,
}

#[derive(Serialize)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl Message {
    /// The first chunk: who speaks.
    pub fn opening() -> Self {
        Self { role: Some("assistant"), content: Some(Some(String::new())), ..Self::default() }
    }

    /// The chunk of some events. Clients count chunks, so there is one even if there is nothing to say.
    pub fn delta(events: Vec<Event>) -> Self {
        let mut delta = Self::of(events);
        if delta.reasoning.is_none() && delta.tool_calls.is_empty() {
            delta.content.get_or_insert_with(|| Some(String::new()));
        }
        delta
    }

    /// The whole message. Its content is null if it has only calls or reasoning.
    pub fn whole(events: Vec<Event>) -> Self {
        let mut message = Self::of(events);
        message.role = Some("assistant");
        let other = message.reasoning.is_some() || !message.tool_calls.is_empty();
        message.content.get_or_insert_with(|| (!other).then(String::new));
        for call in &mut message.tool_calls {
            call.index = None;
        }
        message
    }

    fn of(events: Vec<Event>) -> Self {
        let mut message = Self::default();
        for event in events {
            message.add(event);
        }
        message.reasoning_content = message.reasoning.clone();
        message
    }

    fn add(&mut self, event: Event) {
        match event {
            Event::Reasoning(text) => *self.reasoning.get_or_insert_default() += &text,
            Event::Content(text) => *self.content.get_or_insert_default().get_or_insert_default() += &text,
            Event::ToolStart { index, id, name } => {
                let function = Function { name: Some(name), arguments: String::new() };
                self.tool_calls.push(ToolCall { index: Some(index), id: Some(id), r#type: Some("function"), function });
            }
            Event::ToolArguments { index, delta } => match self.tool_calls.last_mut() {
                Some(call) if call.index == Some(index) => call.function.arguments += &delta,
                _ => {
                    let function = Function { name: None, arguments: delta };
                    self.tool_calls.push(ToolCall { index: Some(index), id: None, r#type: None, function });
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn json_of(message: Message) -> Value {
        serde_json::to_value(message).unwrap()
    }

    fn call() -> Vec<Event> {
        vec![
            Event::ToolStart { index: 1, id: "call_1".into(), name: "f".into() },
            Event::ToolArguments { index: 1, delta: "{}".into() },
        ]
    }

    #[test]
    fn a_delta_has_what_is_new() {
        assert_eq!(json_of(Message::delta(vec![])), json!({"content": ""}));
        assert_eq!(json_of(Message::delta(vec![Event::Content("a".into())])), json!({"content": "a"}));
        let reasoning = json!({"reasoning": "a", "reasoning_content": "a"});
        assert_eq!(json_of(Message::delta(vec![Event::Reasoning("a".into())])), reasoning);
        let start = json!({"tool_calls": [
            {"index": 1, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
        assert_eq!(json_of(Message::delta(call())), start);
        let more = Event::ToolArguments { index: 1, delta: "}".into() };
        let delta = json!({"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]});
        assert_eq!(json_of(Message::delta(vec![more])), delta);
    }

    #[test]
    fn a_whole_message_has_content_or_null() {
        assert_eq!(json_of(Message::whole(vec![])), json!({"role": "assistant", "content": ""}));
        let calls = json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
        assert_eq!(json_of(Message::whole(call())), calls);
    }
}
