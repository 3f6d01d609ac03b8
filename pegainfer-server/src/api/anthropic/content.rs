//! Blocks of content as text.

use super::tools::Definitions;
use crate::api::message::left_out;
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

/// The content of a tool's result in turn `i`. Parts that are not text are replaced by a note and reported: a refusal
/// would end the conversation, because the client sends the result again with every turn.
pub fn result_text(i: usize, content: &Value, tools: &Definitions, body: &mut Body<'_>) -> Result<String, ApiError> {
    let Value::Array(blocks) = content else {
        return texts(content).ok_or_else(|| malformed(i, "must be a string or a list of blocks"));
    };
    let mut parts = Vec::new();
    for block in blocks {
        let kind = block["type"].as_str();
        let fields = || BlockFields {
            kind: kind.map(str::to_owned),
            text: block["text"].as_str().map(str::to_owned),
            title: block["title"].as_str().map(str::to_owned),
            context: block["context"].as_str().map(str::to_owned),
            source: block.get("source").cloned(),
            content: block.get("content").cloned(),
            ..BlockFields::default()
        };
        parts.push(match kind {
            Some("tool_reference") => {
                let name = block["tool_name"].as_str().unwrap_or_default();
                tools.shown(name).ok_or_else(|| {
                    malformed(
                        i,
                        &format!("refers to the tool {:?}, which is not among the tools", truncate_for_error(name)),
                    )
                })?
            }
            Some(kind) => match text_of(&fields()) {
                Some(text) => text,
                None => {
                    let kind = truncate_for_error(kind);
                    body.ignore(format!("messages[].content[].content[].{kind}"));
                    left_out(&kind)
                }
            },
            None => return Err(malformed(i, "has a block without a type")),
        });
    }
    Ok(parts.join("\n"))
}

fn malformed(i: usize, problem: &str) -> ApiError {
    ApiError::invalid("messages", format!("messages[{i}].content: the content of a tool_result {problem}"))
}
