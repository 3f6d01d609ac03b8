//! The assistant's message of a chat completion: whole, or the delta of one chunk, built from parser events.

use pegainfer_text::parser::Event;
use schemars::JsonSchema;
use serde::Serialize;

/// `message` of a choice, or `delta` of a chunk.
#[derive(Serialize, JsonSchema, Default)]
pub struct AssistantMessage {
    /// Set in a whole message and in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Text for the user; null in a message that has only reasoning or calls.
    // Outer `None` leaves the field out; inner `None` writes null.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Option<String>>,
    /// Reasoning text.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    /// The same text as `reasoning` under its older name, which many clients still read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// Calls of functions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

/// A call of a function, or the new part of one.
#[derive(Serialize, JsonSchema)]
struct ToolCall {
    /// Index of the call; only in chunks, because a whole message lists its calls in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// Id of the call. Id and type are sent only where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// Always `function`.
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    /// Name and arguments.
    function: Function,
}

/// The function of a call.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "CalledFunction")]
struct Function {
    /// Name of the function, where the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The text of a JSON object, or the next part of it.
    arguments: String,
}

impl AssistantMessage {
    /// The first chunk, which carries the role.
    pub fn opening() -> Self {
        Self { role: Some("assistant"), content: Some(Some(String::new())), ..Self::default() }
    }

    /// The delta of one chunk. Clients count chunks, so one is sent even without events.
    pub fn delta(events: Vec<Event>) -> Self {
        let mut delta = Self::from_events(events);
        if delta.reasoning.is_none() && delta.tool_calls.is_empty() {
            delta.content.get_or_insert_with(|| Some(String::new()));
        }
        delta
    }

    /// The whole message. Its content is null if it has only calls or reasoning.
    pub fn whole(events: Vec<Event>) -> Self {
        let mut message = Self::from_events(events);
        message.role = Some("assistant");
        let other = message.reasoning.is_some() || !message.tool_calls.is_empty();
        message.content.get_or_insert_with(|| (!other).then(String::new));
        for call in &mut message.tool_calls {
            call.index = None;
        }
        message
    }

    fn from_events(events: Vec<Event>) -> Self {
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
            // The message has no field for the end of a call.
            Event::ToolEnd { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn json_of(message: AssistantMessage) -> Value {
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
        assert_eq!(json_of(AssistantMessage::delta(vec![])), json!({"content": ""}));
        assert_eq!(json_of(AssistantMessage::delta(vec![Event::Content("a".into())])), json!({"content": "a"}));
        let reasoning = json!({"reasoning": "a", "reasoning_content": "a"});
        assert_eq!(json_of(AssistantMessage::delta(vec![Event::Reasoning("a".into())])), reasoning);
        let start = json!({"tool_calls": [
            {"index": 1, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
        assert_eq!(json_of(AssistantMessage::delta(call())), start);
        let more = Event::ToolArguments { index: 1, delta: "}".into() };
        let delta = json!({"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]});
        assert_eq!(json_of(AssistantMessage::delta(vec![more])), delta);
    }

    #[test]
    fn a_whole_message_has_content_or_null() {
        assert_eq!(json_of(AssistantMessage::whole(vec![])), json!({"role": "assistant", "content": ""}));
        let calls = json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]});
        assert_eq!(json_of(AssistantMessage::whole(call())), calls);
    }
}
