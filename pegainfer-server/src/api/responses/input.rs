//! `input` of `/v1/responses` as messages of a chat.

use super::tools::{TOOL_SEARCH, ToolSet, prompt_name};
use crate::api::images::{ImagePart, ImageSource, Unread, invalid as invalid_image};
use crate::api::message::{Arguments, Message, Part, Role, ToolCall, left_out};
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
                let output = item.output.map_or(Ok(Vec::new()), |output| self.output(output))?;
                self.result(item.call_id, output);
                Ok(())
            }
            Some("tool_search_output") => {
                let at = format!("input[{}]", self.i);
                let found = self.tools.add_found(&at, item.tools.unwrap_or_default(), self.body)?;
                let text = if found.is_empty() { "No tools were found.".to_owned() } else { found.join("\n") };
                self.result(item.call_id, vec![Part::Text(text)]);
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
        let parts = item.content.map_or(Ok(Vec::new()), |content| self.parts(role, content))?;
        // Reasoning is a separate item before the text that it belongs to.
        let last = self.chat.last_mut().filter(|last| last.role == Role::Assistant && last.is_empty());
        match last.filter(|_| role == Role::Assistant) {
            Some(last) => last.set_parts(parts),
            None => self.chat.push(Message::of_parts(role, parts)),
        }
        Ok(())
    }

    /// Parts of a message.
    fn parts(&self, role: Role, content: Content) -> Result<Vec<Part>, ApiError> {
        let i = self.i;
        let refused = |at: &str, kind: &str| {
            let message = format!("input[{i}].content has a part of type {kind:?}: this model reads only text");
            let unread = Unread::Refused(invalid(message).with_code("unsupported_parameter"));
            let message = format!("{at} is of type {kind:?}: this model reads only text and images");
            (unread, invalid(message).with_code("unsupported_parameter"))
        };
        let parts = match content {
            TextOrList::Text(text) => return Ok(vec![Part::Text(text)]),
            TextOrList::Other(parts) => parts,
        };
        let part = |(j, Object(part)): (usize, Object<PartFields>)| {
            let at = format!("input[{i}].content[{j}]");
            let part = match part_text(part) {
                Ok(text) => return Ok(Part::Text(text)),
                Err(part) => part,
            };
            let Some(kind) = part.kind.as_deref().map(truncate_for_error) else {
                return Err(invalid(format!("input[{i}].content has a part without a type")));
            };
            let (unread, unknown) = refused(&at, &kind);
            let source = match kind.as_str() {
                "input_image" if role == Role::System => {
                    Err(invalid_image("input", &at, "a system message has no images; send them in a user message"))
                }
                "input_image" => image(&at, *part),
                _ => Err(unknown),
            };
            Ok(Part::Image(Box::new(ImagePart { at, source, unread })))
        };
        parts.into_iter().enumerate().map(part).collect()
    }

    /// Parts of a call's output. Parts that the model does not read are replaced by a note and reported: a refusal would
    /// end the conversation, because the client sends the output again with every turn.
    fn output(&mut self, content: Content) -> Result<Vec<Part>, ApiError> {
        let parts = match content {
            TextOrList::Text(text) => return Ok(vec![Part::Text(text)]),
            TextOrList::Other(parts) => parts,
        };
        let mut read = Vec::new();
        for (j, Object(part)) in parts.into_iter().enumerate() {
            let part = match part_text(part) {
                Ok(text) => {
                    read.push(Part::Text(text));
                    continue;
                }
                Err(part) => part,
            };
            let Some(kind) = part.kind.as_deref().map(truncate_for_error) else {
                return Err(invalid(format!("input[{}].output has a part without a type", self.i)));
            };
            let note = left_out(kind.strip_prefix("input_").unwrap_or(&kind));
            let unread = Unread::Note { note, field: format!("input[].output[].{kind}") };
            read.push(if kind == "input_image" {
                let at = format!("input[{}].output[{j}]", self.i);
                Part::Image(Box::new(ImagePart { source: image(&at, *part), at, unread }))
            } else {
                Part::Text(unread.text_for(self.body)?)
            });
        }
        Ok(read)
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

    fn result(&mut self, id: Option<String>, parts: Vec<Part>) {
        self.chat.push(Message { tool_call_id: id, ..Message::of_parts(Role::Tool, parts) });
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

/// The image of a part at this place.
fn image(at: &str, part: PartFields) -> Result<ImageSource, ApiError> {
    if part.file_id.is_some() {
        let message = "file_id is not implemented, because files are not stored; send image_url as a data URL";
        return Err(invalid_image("input", at, message));
    }
    ImageSource::openai(("input", at), part.image_url, part.detail.as_deref())
}

/// The text of a part; the error is a part without text.
fn part_text(part: PartFields) -> Result<String, Box<PartFields>> {
    match (part.kind.as_deref(), part.text, part.refusal) {
        (Some("input_text" | "output_text" | "text" | "reasoning_text" | "summary_text"), Some(text), _) => Ok(text),
        (Some("refusal"), _, Some(text)) => Ok(text),
        (_, text, refusal) => Err(Box::new(PartFields { text, refusal, ..part })),
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
