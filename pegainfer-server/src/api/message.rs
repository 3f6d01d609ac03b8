//! Messages of a conversation, whichever API they came through, and their form in chat templates.

use pegainfer_text::{CutString, complete_object};
use serde_json::{Map, Value, json};

/// Author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
    /// DeepSeek-V4's reminder before the last user message.
    LatestReminder,
}

impl Role {
    /// The role with this name in OpenAI's API. `developer` is the newer name of the templates' `system`.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "system" | "developer" => Self::System,
            "user" => Self::User,
            "assistant" => Self::Assistant,
            "tool" => Self::Tool,
            "latest_reminder" => Self::LatestReminder,
            _ => return None,
        })
    }

    fn in_templates(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::LatestReminder => "latest_reminder",
        }
    }
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Author.
    pub role: Role,
    /// Text; may be empty.
    pub text: String,
    /// Reasoning before the text, for an assistant's message.
    pub reasoning: Option<String>,
    /// Calls that the assistant made after the text.
    pub tool_calls: Vec<ToolCall>,
    /// For a tool's message: id of the call that it answers.
    pub tool_call_id: Option<String>,
    /// Other fields for the chat template.
    pub rest: Map<String, Value>,
}

/// A call that the assistant made.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Id of the call, if it has one.
    pub id: Option<String>,
    /// Name of the function.
    pub name: String,
    /// The arguments.
    pub arguments: Arguments,
}

/// Arguments of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Arguments {
    /// An object.
    Object(Map<String, Value>),
    /// Text that is not a JSON object, such as a call that was cut off. Templates show it unchanged.
    Raw(String),
}

impl Arguments {
    /// Parses the text of a JSON object; an empty text is an empty object.
    pub fn parse(text: String) -> Self {
        if text.trim().is_empty() {
            return Self::Object(Map::new());
        }
        serde_json::from_str(&text).map_or(Self::Raw(text), Self::Object)
    }
}

impl Message {
    /// A message that has only text.
    pub fn new(role: Role, text: impl Into<String>) -> Self {
        let (reasoning, tool_calls, tool_call_id, rest) = (None, Vec::new(), None, Map::new());
        Self { role, text: text.into(), reasoning, tool_calls, tool_call_id, rest }
    }

    /// Turns arguments into objects, for templates that need objects. A call that was cut off keeps its complete part.
    pub fn complete_arguments(&mut self) {
        for call in &mut self.tool_calls {
            if let Arguments::Raw(text) = &call.arguments {
                call.arguments = Arguments::Object(complete_object(text, CutString::Keep));
            }
        }
    }

    /// The message in the format of chat templates: OpenAI's, with a string as content, objects as arguments, and the
    /// reasoning under the older of its two names.
    pub fn to_template(&self) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), self.role.in_templates().into());
        message.insert("content".into(), self.text.as_str().into());
        if let Some(reasoning) = &self.reasoning {
            message.insert("reasoning_content".into(), reasoning.as_str().into());
        }
        if !self.tool_calls.is_empty() {
            message.insert("tool_calls".into(), self.tool_calls.iter().map(ToolCall::to_template).collect());
        }
        if let Some(id) = &self.tool_call_id {
            message.insert("tool_call_id".into(), id.as_str().into());
        }
        message.extend(self.rest.clone());
        Value::Object(message)
    }
}

impl ToolCall {
    fn to_template(&self) -> Value {
        let arguments = match &self.arguments {
            Arguments::Object(arguments) => Value::Object(arguments.clone()),
            Arguments::Raw(text) => Value::from(text.as_str()),
        };
        let mut call = json!({"type": "function", "function": {"name": self.name, "arguments": arguments}});
        if let Some(id) = &self.id {
            call["id"] = id.as_str().into();
        }
        call
    }
}

/// The note that replaces an unreadable part of a tool's result.
pub fn left_out(kind: &str) -> String {
    format!("[{kind} left out: this model reads only text]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_the_fields_that_templates_know() {
        let call = |text: &str| ToolCall { id: None, name: "f".into(), arguments: Arguments::parse(text.into()) };
        let message = Message {
            reasoning: Some("hm".into()),
            tool_calls: vec![call("{\"b\": 1, \"a\": 2}"), call("{\"cut"), call("")],
            ..Message::new(Role::Assistant, "")
        };
        let call = |arguments: Value| json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
        let calls = [call(json!({"b": 1, "a": 2})), call("{\"cut".into()), call(json!({}))];
        let expected = json!({"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls});
        assert_eq!(message.to_template(), expected);
    }
}
