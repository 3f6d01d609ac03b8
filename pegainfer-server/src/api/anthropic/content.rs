//! Blocks of content as texts and images.

use super::tools::Definitions;
use crate::api::images::{ImagePart, ImageSource, Unread, invalid as invalid_image};
use crate::api::message::{Part, left_out};
use crate::api::schema::Body;
use crate::api::schema::anthropic::BlockFields;
use crate::error::{ApiError, truncate_for_error};
use serde_json::Value;

/// The text of a block of text: a text, a document of text or a search result. `None` for all others.
pub fn text_of(block: &BlockFields) -> Option<String> {
    match block.kind.as_deref()? {
        "text" => block.text.clone(),
        "document" => document(block.title.as_deref(), block.context.as_deref(), block.source.as_ref()?),
        "search_result" => {
            let source = block.source.as_ref().and_then(Value::as_str);
            let parts = [block.title.as_deref(), source].into_iter().flatten().map(str::to_owned);
            let texts = block.content.as_ref().and_then(texts)?;
            Some(parts.chain([texts]).collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    }
}

/// A document whose source is text or a list of texts.
fn document(title: Option<&str>, context: Option<&str>, source: &Value) -> Option<String> {
    let text = match source["type"].as_str()? {
        "text" => source["data"].as_str()?.to_owned(),
        "content" => texts(&source["content"])?,
        _ => return None,
    };
    let parts = [title, context].into_iter().flatten().map(str::to_owned);
    Some(parts.chain([text]).collect::<Vec<_>>().join("\n"))
}

/// A string, or a list of text blocks.
fn texts(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(blocks) => {
            let texts: Option<Vec<&str>> = blocks.iter().map(|block| block["text"].as_str()).collect();
            Some(texts?.join("\n"))
        }
        _ => None,
    }
}

/// Place of a tool's result.
#[derive(Clone, Copy)]
pub struct Place {
    /// Index of the turn.
    pub turn: usize,
    /// Index of the block in it.
    pub block: usize,
}

/// The content of a tool's result. Parts that the model does not read are replaced by a note and reported: a refusal
/// would end the conversation, because the client sends the result again with every turn.
pub fn result_parts(
    place: Place,
    content: Value,
    tools: &Definitions,
    body: &mut Body<'_>,
) -> Result<Vec<Part>, ApiError> {
    let i = place.turn;
    let Value::Array(blocks) = content else {
        let text = texts(&content).ok_or_else(|| malformed(i, "must be a string or a list of blocks"))?;
        return Ok(vec![Part::Text(text)]);
    };
    let mut parts = Vec::new();
    for (at, mut block) in blocks.into_iter().enumerate() {
        let source = block.get_mut("source").map(Value::take);
        let Some(kind) = block["type"].as_str() else { return Err(malformed(i, "has a block without a type")) };
        let unread = || {
            let (note, kind) = (left_out(&truncate_for_error(kind)), truncate_for_error(kind));
            Unread::Note { note, field: format!("messages[].content[].content[].{kind}") }
        };
        let text = match kind {
            "tool_reference" => {
                let name = block["tool_name"].as_str().unwrap_or_default();
                let problem =
                    || format!("refers to the tool {:?}, which is not among the tools", truncate_for_error(name));
                tools.shown(name).ok_or_else(|| malformed(i, &problem()))?
            }
            "image" => {
                let at = format!("messages[{i}].content[{}].content[{at}]", place.block);
                parts.push(image(at, source.unwrap_or_default(), unread()));
                continue;
            }
            _ => match text_of(&fields(&block, source)) {
                Some(text) => text,
                None => unread().text_for(body)?,
            },
        };
        parts.push(Part::Text(text));
    }
    Ok(parts)
}

/// The fields of a block of text in a tool's result.
fn fields(block: &Value, source: Option<Value>) -> BlockFields {
    let text = |name: &str| block[name].as_str().map(str::to_owned);
    let content = block.get("content").cloned();
    let (kind, title, context) = (text("type"), text("title"), text("context"));
    BlockFields { kind, text: text("text"), title, context, source, content, ..BlockFields::default() }
}

/// An image with this source, in the block at `at`.
pub fn image(at: String, mut source: Value, unread: Unread) -> Part {
    let mut text = |name: &str| match source.get_mut(name).map(Value::take) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    let refused = |message: &str| Err(invalid_image("messages", &at, message));
    let source = match text("type").as_deref() {
        Some("base64") => match text("data") {
            Some(data) => Ok(ImageSource::base64(data)),
            None => refused("source.data is missing or not a string; send the image's file in base64"),
        },
        Some("url") => ImageSource::url(("messages", &at), text("url")),
        Some("file") => refused("a file as source is not implemented, because files are not stored; send base64"),
        _ => refused("source.type must be base64 or url"),
    };
    Part::Image(Box::new(ImagePart { at, source, unread }))
}

fn malformed(i: usize, problem: &str) -> ApiError {
    ApiError::invalid("messages", format!("messages[{i}].content: the content of a tool_result {problem}"))
}
