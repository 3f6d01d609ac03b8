//! The turns of `/v1/messages` as messages of a chat.

use super::content::{self, Place, text_of};
use super::signature;
use super::tools::Definitions;
use crate::api::images::Unread;
use crate::api::message::{Arguments, Message, Part, Role, ToolCall};
use crate::api::schema::Body;
use crate::api::schema::anthropic::{self, BlockFields, TurnFields};
use crate::api::schema::forms::TextOrList;
use crate::api::schema::values::Object;
use crate::api::system::say_as_user;
use crate::error::{ApiError, truncate_for_error};
use serde_json::Value;

type Content = TextOrList<Object<BlockFields>>;

/// Reads the turns. `tools` are the functions that a tool_reference may name.
pub fn read(list: Vec<Object<TurnFields>>, tools: &Definitions, body: &mut Body<'_>) -> Result<Vec<Message>, ApiError> {
    let mut chat = Vec::new();
    for (i, Object(turn)) in list.into_iter().enumerate() {
        let Some(content) = turn.content else { return Err(invalid(format!("messages[{i}].content is missing"))) };
        let mut reader = TurnReader { i, tools, body, chat: &mut chat };
        match turn.role {
            Some(anthropic::Role::User) => reader.user(content)?,
            Some(anthropic::Role::Assistant) => reader.assistant(content)?,
            Some(anthropic::Role::System) => reader.system(content)?,
            None => return Err(invalid(format!("messages[{i}].role is missing"))),
        }
    }
    Ok(chat)
}

fn invalid(message: String) -> ApiError {
    ApiError::invalid("messages", message)
}

/// Reads one turn.
struct TurnReader<'r, 'b> {
    i: usize,
    tools: &'r Definitions,
    body: &'r mut Body<'b>,
    chat: &'r mut Vec<Message>,
}

impl TurnReader<'_, '_> {
    /// Each tool result becomes its own message; the texts and images become one message.
    fn user(&mut self, content: Content) -> Result<(), ApiError> {
        let mut parts = Vec::new();
        for (at, Object(block)) in blocks(content).into_iter().enumerate() {
            match block.kind.as_deref() {
                Some("tool_result") => self.result(at, block)?,
                Some("image") => {
                    let unread = Unread::Refused(self.rejected(at, "image"));
                    let at = format!("messages[{}].content[{at}]", self.i);
                    parts.push(content::image(at, block.source.unwrap_or_default(), unread));
                }
                _ => parts.push(Part::Text(self.user_text(at, &block)?)),
            }
        }
        if !parts.is_empty() {
            self.chat.push(Message::of_parts(Role::User, parts));
        }
        Ok(())
    }

    /// Claude Code recognises the words in brackets, leaves out its images and continues.
    fn rejected(&self, at: usize, kind: &str) -> ApiError {
        let message = format!(
            "messages[{}].content[{at}] is of type {kind}: this model reads only text (capability_rejected: {kind}_block)",
            self.i
        );
        invalid(message).with_code("unsupported_parameter")
    }

    fn user_text(&self, at: usize, block: &BlockFields) -> Result<String, ApiError> {
        match text_of(block) {
            Some(text) => Ok(text),
            None => Err(match block.kind.as_deref() {
                Some(kind @ ("image" | "document")) => self.rejected(at, kind),
                kind => self.unknown(at, kind),
            }),
        }
    }

    fn unknown(&self, at: usize, kind: Option<&str>) -> ApiError {
        let i = self.i;
        match kind {
            Some("text") => invalid(format!("messages[{i}].content[{at}] is a text block without text")),
            Some(kind) => invalid(format!(
                "messages[{i}].content[{at}] is of type {:?}, which this model cannot read here",
                truncate_for_error(kind)
            ))
            .with_code("unsupported_parameter"),
            None => invalid(format!("messages[{i}].content[{at}].type is missing")),
        }
    }

    /// The result of a call. Chat templates have no field for a failure, so the text mentions it.
    fn result(&mut self, at: usize, block: BlockFields) -> Result<(), ApiError> {
        let Some(id) = block.tool_use_id else {
            return Err(invalid(format!("messages[{}].content has a tool_result without tool_use_id", self.i)));
        };
        let place = Place { turn: self.i, block: at };
        let parts = match block.content {
            None => Vec::new(),
            Some(content) => content::result_parts(place, content, self.tools, self.body)?,
        };
        let mut message = Message { tool_call_id: Some(id), ..Message::of_parts(Role::Tool, parts) };
        if block.is_error == Some(true) {
            message.prepend(if message.is_empty() { "Error" } else { "Error: " });
        }
        self.chat.push(message);
        Ok(())
    }

    fn assistant(&mut self, content: Content) -> Result<(), ApiError> {
        let (mut texts, mut reasoning, mut tool_calls) = (Vec::new(), String::new(), Vec::new());
        for (at, Object(block)) in blocks(content).into_iter().enumerate() {
            match block.kind.as_deref() {
                Some("text") => texts.push(block.text.ok_or_else(|| self.unknown(at, Some("text")))?),
                Some("thinking") => reasoning += &signature::reasoning(block.thinking, block.signature),
                Some("tool_use") => tool_calls.push(self.call(block)?),
                // Results of Anthropic's servers, which this model cannot read.
                Some(kind @ ("redacted_thinking" | "server_tool_use" | "mcp_tool_use")) => {
                    self.body.ignore(format!("messages[].content[].{kind}"));
                }
                Some(kind) if kind.ends_with("_tool_result") => {
                    self.body.ignore(format!("messages[].content[].{}", truncate_for_error(kind)));
                }
                kind => return Err(self.unknown(at, kind)),
            }
        }
        let reasoning = Some(reasoning).filter(|text| !text.is_empty());
        self.chat.push(Message { reasoning, tool_calls, ..Message::new(Role::Assistant, texts.join("\n")) });
        Ok(())
    }

    fn call(&self, block: BlockFields) -> Result<ToolCall, ApiError> {
        let Some(name) = block.name else {
            return Err(invalid(format!("messages[{}].content has a tool_use without a name", self.i)));
        };
        let arguments = match block.input {
            None => Arguments::Object(Default::default()),
            Some(Value::Object(input)) => Arguments::Object(input),
            Some(Value::String(text)) => Arguments::parse(text),
            Some(other) => Arguments::Raw(other.to_string()),
        };
        Ok(ToolCall { id: block.id, name, arguments })
    }

    /// Adds instructions within the conversation to the preceding user message, if there is one.
    fn system(&mut self, content: Content) -> Result<(), ApiError> {
        let blocks = blocks(content).into_iter().enumerate();
        let texts: Vec<String> =
            blocks.map(|(at, Object(block))| self.user_text(at, &block)).collect::<Result<_, _>>()?;
        say_as_user(self.chat, texts.join("\n"));
        Ok(())
    }
}

fn blocks(content: Content) -> Vec<Object<BlockFields>> {
    match content {
        TextOrList::Text(text) => {
            vec![Object(BlockFields { kind: Some("text".into()), text: Some(text), ..BlockFields::default() })]
        }
        TextOrList::Other(blocks) => blocks,
    }
}
