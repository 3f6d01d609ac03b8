//! `input` of `/v1/responses` as messages of a chat.

use super::tools::{TOOL_SEARCH, ToolSet, prompt_name};
use crate::api::message::{Arguments, Message, Role, ToolCall, left_out};
use crate::api::schema::Body;
use crate::api::schema::forms::TextOrList;
use crate::api::schema::responses::{ItemFields, PartFields};
use crate::api::schema::values::Object;
use crate::error::{ApiError, truncate_for_error};
use serde_json::{Map, Value};

type Content = TextOrList<Object<PartFields>>;

/// Items of calls that OpenAI's servers made, which this model cannot read.
const SERVER_CALLS: [&str; 7] = [
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "mcp_call",
    "mcp_list_tools",
];

/// Reads the conversation. Calls and reasoning are separate items in this API; they become part of the assistant's
/// message.
pub fn read(
    input: Option<TextOrList<Object<ItemFields>>>,
    tools: &mut ToolSet,
    body: &mut Body<'_>,
) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        None => return Err(invalid("input is missing".into())),
        Some(TextOrList::Text(text)) => return Ok(vec![Message::new(Role::User, text)]),
        Some(TextOrList::Other(items)) => items,
    };
    if items.is_empty() {
        return Err(invalid("input is empty: send at least one item".into()));
    }
    let mut chat = Vec::new();
    for (i, Object(item)) in items.into_iter().enumerate() {
        ItemReader { i, body, chat: &mut chat, tools }.read(item)?;
    }
    Ok(chat)
}

fn invalid(message: String) -> ApiError {
    ApiError::invalid("input", message)
}

/// Reads one item.
struct ItemReader<'r, 'b> {
    i: usize,
    body: &'r mut Body<'b>,
    chat: &'r mut Vec<Message>,
    tools: &'r mut ToolSet,
}

impl ItemReader<'_, '_> {
    fn read(&mut self, item: ItemFields) -> Result<(), ApiError> {
        match item.kind.as_deref() {
            None | Some("message") => self.message(item),
            Some("reasoning") => {
                let reasoning = reasoning(item);
                if reasoning.is_none() {
                    self.body.ignore("input[].encrypted_content".into());
                }
                self.chat.push(Message { reasoning, ..Message::new(Role::Assistant, "") });
                Ok(())
            }
            Some("function_call") => {
                let arguments = arguments(item.arguments);
                let name = item.name.map(|name| prompt_name(item.namespace.as_deref(), &name));
                self.call(item.call_id, name, arguments)
            }
            Some("custom_tool_call") => {
                let input = Value::from(item.input.unwrap_or_default());
                let name = item.name.map(|name| prompt_name(item.namespace.as_deref(), &name));
                self.call(item.call_id, name, Arguments::Object(Map::from_iter([("input".to_owned(), input)])))
            }
            Some("tool_search_call") => {
                self.call(item.call_id, Some(TOOL_SEARCH.to_owned()), arguments(item.arguments))
            }
            Some("function_call_output" | "custom_tool_call_output") => {
                let output = item.output.map_or(Ok(String::new()), |output| self.output(output))?;
                self.result(item.call_id, output);
                Ok(())
            }
            Some("tool_search_output") => {
                let at = format!("input[{}]", self.i);
                let found = self.tools.add_found(&at, item.tools.unwrap_or_default(), self.body)?;
                let text = if found.is_empty() { "No tools were found.".to_owned() } else { found.join("\n") };
                self.result(item.call_id, text);
                Ok(())
            }
            Some("additional_tools") => {
                let at = format!("input[{}]", self.i);
                self.tools.add_more(&at, item.tools.unwrap_or_default(), self.body)
            }
            Some(kind) if SERVER_CALLS.contains(&kind) => {
                self.body.ignore(format!("input[].{kind}"));
                Ok(())
            }
            Some(other) => {
                let message = format!("input[{}].type {:?} is not implemented", self.i, truncate_for_error(other));
                Err(invalid(message).with_code("unsupported_parameter"))
            }
        }
    }

    fn message(&mut self, item: ItemFields) -> Result<(), ApiError> {
        let i = self.i;
        let role = match item.role.as_deref() {
            Some(name @ ("system" | "developer" | "user" | "assistant")) => Role::named(name),
            Some(name) => {
                let known = "system, developer, user and assistant";
                let name = truncate_for_error(name);
                return Err(invalid(format!("input[{i}].role {name:?} is unknown: there are {known}")));
            }
            None => None,
        };
        let Some(role) = role else { return Err(invalid(format!("input[{i}].role is missing"))) };
        let text = item.content.map_or(Ok(String::new()), |content| self.text(content))?;
        // Reasoning is a separate item before the text that it belongs to.
        let last = self.chat.last_mut().filter(|last| last.role == Role::Assistant && last.text.is_empty());
        match last.filter(|_| role == Role::Assistant) {
            Some(last) => last.text = text,
            None => self.chat.push(Message::new(role, text)),
        }
        Ok(())
    }

    /// Text of a message.
    fn text(&self, content: Content) -> Result<String, ApiError> {
        let parts = match content {
            TextOrList::Text(text) => return Ok(text),
            TextOrList::Other(parts) => parts,
        };
        let text = |Object(part)| match part_text(part) {
            Ok(text) => Ok(text),
            Err(Some(kind)) => {
                let message = format!(
                    "input[{}].content has a part of type {:?}: this model reads only text",
                    self.i,
                    truncate_for_error(&kind)
                );
                Err(invalid(message).with_code("unsupported_parameter"))
            }
            Err(None) => Err(invalid(format!("input[{}].content has a part without a type", self.i))),
        };
        let texts: Vec<String> = parts.into_iter().map(text).collect::<Result<_, _>>()?;
        Ok(texts.join("\n"))
    }

    /// Text of a call's output. Parts that are not text are replaced by a note and reported: a refusal would end the
    /// conversation, because the client sends the output again with every turn.
    fn output(&mut self, content: Content) -> Result<String, ApiError> {
        let parts = match content {
            TextOrList::Text(text) => return Ok(text),
            TextOrList::Other(parts) => parts,
        };
        let mut texts = Vec::new();
        for Object(part) in parts {
            texts.push(match part_text(part) {
                Ok(text) => text,
                Err(Some(kind)) => {
                    let kind = truncate_for_error(&kind);
                    self.body.ignore(format!("input[].output[].{kind}"));
                    left_out(kind.strip_prefix("input_").unwrap_or(&kind))
                }
                Err(None) => return Err(invalid(format!("input[{}].output has a part without a type", self.i))),
            });
        }
        Ok(texts.join("\n"))
    }

    fn call(&mut self, id: Option<String>, name: Option<String>, arguments: Arguments) -> Result<(), ApiError> {
        let Some(name) = name else { return Err(invalid(format!("input[{}].name is missing", self.i))) };
        let call = ToolCall { id, name, arguments };
        match self.chat.last_mut().filter(|last| last.role == Role::Assistant) {
            Some(last) => last.tool_calls.push(call),
            None => self.chat.push(Message { tool_calls: vec![call], ..Message::new(Role::Assistant, "") }),
        }
        Ok(())
    }

    fn result(&mut self, id: Option<String>, text: String) {
        self.chat.push(Message { tool_call_id: id, ..Message::new(Role::Tool, text) });
    }
}

fn arguments(given: Option<Value>) -> Arguments {
    match given {
        None => Arguments::Object(Map::new()),
        Some(Value::Object(arguments)) => Arguments::Object(arguments),
        Some(Value::String(text)) => Arguments::parse(text),
        Some(other) => Arguments::Raw(other.to_string()),
    }
}

/// The text of a part. The error is the type of a part without text.
fn part_text(part: PartFields) -> Result<String, Option<String>> {
    match (part.kind.as_deref(), part.text, part.refusal) {
        (Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text"), Some(text), _) => Ok(text),
        (Some("refusal"), _, Some(text)) => Ok(text),
        _ => Err(part.kind),
    }
}

/// Reasoning as the client sent it: its content, or its summary.
fn reasoning(item: ItemFields) -> Option<String> {
    let texts = |parts: Vec<Object<PartFields>>| -> String {
        parts.into_iter().filter_map(|Object(part)| part.text).collect::<Vec<_>>().join("\n")
    };
    let content = item.content.map(|content| match content {
        TextOrList::Text(text) => text,
        TextOrList::Other(parts) => texts(parts),
    });
    content.filter(|text| !text.is_empty()).or(item.summary.map(texts)).filter(|text| !text.is_empty())
}
