//! Messages of a conversation, whichever API they came through, and their form in chat templates.

use super::images::ImagePart;
use crate::error::ApiError;
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
    /// Text; may be empty. Of a message with an image, the texts are in `parts`.
    pub text: String,
    /// Texts and images of a message with an image; otherwise empty.
    pub parts: Vec<Part>,
    /// Reasoning before the text, for an assistant's message.
    pub reasoning: Option<String>,
    /// Calls that the assistant made after the text.
    pub tool_calls: Vec<ToolCall>,
    /// For a tool's message: id of the call that it answers.
    pub tool_call_id: Option<String>,
    /// Other fields for the chat template.
    pub rest: Map<String, Value>,
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// A text.
    Text(String),
    /// An image, or another part that models of text do not read.
    Image(Box<ImagePart>),
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
        Self { role, text: text.into(), parts: Vec::new(), reasoning, tool_calls, tool_call_id, rest }
    }

    /// A message that has only these parts.
    pub fn of_parts(role: Role, parts: Vec<Part>) -> Self {
        let mut message = Self::new(role, "");
        message.set_parts(parts);
        message
    }

    /// Replaces the content. Without an image, texts are joined by line breaks, as in vLLM.
    pub fn set_parts(&mut self, parts: Vec<Part>) {
        if parts.iter().any(|part| matches!(part, Part::Image(_))) {
            (self.text, self.parts) = (String::new(), parts);
            return;
        }
        let texts = parts.into_iter().map(|part| match part {
            Part::Text(text) => text,
            Part::Image(_) => String::new(),
        });
        (self.text, self.parts) = (texts.collect::<Vec<_>>().join("\n"), Vec::new());
    }

    /// True if the content is empty.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.parts.is_empty()
    }

    /// Begins the content with this text.
    pub fn prepend(&mut self, text: &str) {
        match self.parts.first_mut() {
            None => self.text.insert_str(0, text),
            Some(Part::Text(first)) => first.insert_str(0, text),
            Some(Part::Image(_)) => self.parts.insert(0, Part::Text(text.to_owned())),
        }
    }

    /// Adds a line of text at the end of the content.
    pub fn append_line(&mut self, text: &str) {
        match self.parts.last_mut() {
            None => self.text = format!("{}\n{text}", self.text),
            Some(Part::Text(last)) => *last = format!("{last}\n{text}"),
            Some(Part::Image(_)) => self.parts.push(Part::Text(text.to_owned())),
        }
    }

    /// The texts of the content.
    pub fn texts_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut String> {
        let texts = self.parts.iter_mut().filter_map(|part| match part {
            Part::Text(text) => Some(text),
            Part::Image(_) => None,
        });
        std::iter::once(&mut self.text).chain(texts)
    }

    /// The images of the content.
    pub fn images_mut(&mut self) -> impl Iterator<Item = &mut ImagePart> {
        self.parts.iter_mut().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Image(image) => Some(&mut **image),
        })
    }

    /// Replaces images by what models of text read instead. `ignored` receives the names of fields that have no effect.
    pub fn leave_out_images(&mut self, ignored: &mut Vec<String>) -> Result<(), ApiError> {
        if self.parts.is_empty() {
            return Ok(());
        }
        let text = |part| match part {
            Part::Text(text) => Ok(text),
            Part::Image(image) => image.unread.text(ignored),
        };
        let texts: Vec<String> = std::mem::take(&mut self.parts).into_iter().map(text).collect::<Result<_, _>>()?;
        self.text = texts.join("\n");
        Ok(())
    }

    /// Turns arguments into objects, for templates that need objects. A call that was cut off keeps its complete part.
    pub fn complete_arguments(&mut self) {
        for call in &mut self.tool_calls {
            if let Arguments::Raw(text) = &call.arguments {
                call.arguments = Arguments::Object(complete_object(text, CutString::Keep));
            }
        }
    }

    /// The message in the format of chat templates: OpenAI's, with a string as content or a list if there are images,
    /// objects as arguments, and the reasoning under the older of its two names.
    pub fn to_template(&self) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), self.role.in_templates().into());
        message.insert("content".into(), self.content());
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

    /// Templates take any part with a key `image` or `image_url` for an image, so parts have no other keys.
    fn content(&self) -> Value {
        if self.parts.is_empty() {
            return self.text.as_str().into();
        }
        let part = |part: &Part| match part {
            Part::Text(text) => json!({"type": "text", "text": text}),
            Part::Image(_) => json!({"type": "image"}),
        };
        self.parts.iter().map(part).collect()
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
