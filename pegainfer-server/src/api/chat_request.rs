//! One chat request, whichever API it came through: the input of
//! [`SubmittedChat`](super::submitted_chat::SubmittedChat).

use super::conversation::Conversation;
use super::images::{ImagePart, ImagePixels, ImageSource, Unread, invalid as invalid_image};
use super::message::{Arguments, Message, Part, Role, ToolCall, left_out};
use super::policy::FieldPolicy;
use super::schema::Body;
use super::schema::chat::{ChatFields, TokensFields};
use super::schema::conversation::{
    ArgumentsField, ContentField, ContentPart, ContentPartFields, ConversationFields, ImageUrlField, ImageUrlFields,
    MessageFields, ToolCallFields,
};
use super::schema::generation::GenerationFields;
use super::schema::numbers::TokenId;
use super::schema::sampling::SamplingFields;
use super::schema::structure::StructureFields;
use super::schema::values::Object;
use super::structured::Structured;
use super::tools::Tools;
use crate::error::{ApiError, truncate_for_error};
use axum::http::HeaderValue;
use serde_json::Map;

/// A chat request.
pub struct ChatRequest {
    /// How much to generate, and what to report.
    pub generation: GenerationFields,
    /// How to draw tokens.
    pub sampling: SamplingFields,
    /// Content of the prompt.
    pub conversation: Conversation,
    /// Number of most likely tokens to report at each position; `None` reports no log-probabilities.
    pub logprobs: Option<usize>,
    /// Value of the header `x-ignored-fields`.
    pub ignored: Option<HeaderValue>,
}

impl ChatRequest {
    /// Reads a body of `/v1/chat/completions`.
    pub fn read(mut body: Body<'_>, policy: &FieldPolicy) -> Result<Self, ApiError> {
        let (generation, sampling) = (body.read()?, body.read()?);
        let mut conversation = read_conversation(&mut body)?;
        let ChatFields { logprobs, top_logprobs, thinking_token_budget, include_reasoning, tokens } = body.read()?;
        let ignored = policy.check(&body)?;
        conversation.thinking_budget = thinking_token_budget.map(|budget| budget.count());
        conversation.include_reasoning = include_reasoning.unwrap_or(true);
        conversation.rendered = tokens.map(|Object(tokens)| read_tokens(tokens)).transpose()?;
        let top = top_logprobs.map_or(0, |top| top.count());
        if top > 0 && logprobs != Some(true) {
            return Err(ApiError::invalid("top_logprobs", "top_logprobs needs \"logprobs\": true"));
        }
        Ok(Self { generation, sampling, conversation, logprobs: logprobs.unwrap_or(false).then_some(top), ignored })
    }
}

/// The token ids of a prompt that somebody else rendered.
fn read_tokens(tokens: TokensFields) -> Result<Vec<u32>, ApiError> {
    let ids: Vec<u32> = tokens.token_ids.unwrap_or_default().into_iter().map(|TokenId(id)| id).collect();
    if ids.is_empty() {
        return Err(ApiError::invalid("tokens", "tokens.token_ids is missing or empty: send at least one token"));
    }
    Ok(ids)
}

/// Reads the fields of a conversation and of its output's structure.
pub fn read_conversation(body: &mut Body<'_>) -> Result<Conversation, ApiError> {
    let ConversationFields {
        messages,
        tools,
        tool_choice,
        parallel_tool_calls,
        chat_template_kwargs,
        reasoning_effort,
        add_generation_prompt,
        continue_final_message,
        mm_processor_kwargs,
    } = body.read()?;
    let Object(pixels) = mm_processor_kwargs.unwrap_or_default();
    let structure: StructureFields = body.read()?;
    let conversation = Conversation {
        messages: read_messages(messages, body)?,
        tools: Tools::read(tools.unwrap_or_default(), tool_choice, parallel_tool_calls.unwrap_or(true))?,
        structured: Structured::read(structure)?,
        template_kwargs: chat_template_kwargs.unwrap_or_default(),
        effort: reasoning_effort,
        add_generation_prompt: add_generation_prompt.unwrap_or(continue_final_message != Some(true)),
        continue_final_message: continue_final_message.unwrap_or(false),
        image_pixels: ImagePixels {
            min: pixels.min_pixels.map(|pixels| pixels.count() as u64),
            max: pixels.max_pixels.map(|pixels| pixels.count() as u64),
        },
        ..Conversation::default()
    };
    conversation.check()
}

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::invalid("messages", message)
}

fn read_messages(messages: Option<Vec<Object<MessageFields>>>, body: &mut Body<'_>) -> Result<Vec<Message>, ApiError> {
    let Some(messages) = messages else { return Err(invalid("messages is missing")) };
    if messages.is_empty() {
        return Err(invalid("messages is empty: send at least one message"));
    }
    messages.into_iter().enumerate().map(|(i, Object(message))| read_message(i, message, body)).collect()
}

/// Reads message `i`. Fields of OpenAI's answers that prompts do not have are ignored and reported.
fn read_message(i: usize, message: MessageFields, body: &mut Body<'_>) -> Result<Message, ApiError> {
    let Some(name) = message.role else {
        return Err(invalid(format!("messages[{i}].role is missing or not a string")));
    };
    let Some(role) = Role::named(&name) else {
        let known = "system, developer, user, assistant and tool";
        return Err(invalid(format!(
            "messages[{i}].role {:?} is unknown: there are {known}",
            truncate_for_error(&name)
        )));
    };
    for (name, given) in [
        ("refusal", message.refusal.is_some()),
        ("audio", message.audio.is_some()),
        ("function_call", message.function_call.is_some()),
    ] {
        if given {
            body.ignore(format!("messages[].{name}"));
        }
    }
    let mut rest = Map::new();
    for (name, value) in [("name", message.name), ("task", message.task)] {
        rest.extend(value.map(|value| (name.to_owned(), value.into())));
    }
    let calls = message.tool_calls.unwrap_or_default().into_iter();
    Ok(Message {
        reasoning: message.reasoning_content.or(message.reasoning),
        tool_calls: calls.map(|Object(call)| read_call(i, call)).collect::<Result<_, _>>()?,
        tool_call_id: message.tool_call_id,
        rest,
        ..read_content(i, role, message.content, body)?
    })
}

/// A message of this content: a string, a list of parts, or nothing. In a tool's result, parts that the model does not
/// read are replaced by a note and reported: a refusal would end the conversation, because the client sends the result
/// again with every turn.
fn read_content(i: usize, role: Role, content: Option<ContentField>, body: &mut Body<'_>) -> Result<Message, ApiError> {
    let parts = match content {
        None => return Ok(Message::new(role, "")),
        Some(ContentField::Text(text)) => return Ok(Message::new(role, text)),
        Some(ContentField::Other(parts)) => parts,
    };
    let parts = parts.into_iter().enumerate().map(|(j, part)| match part {
        ContentPart::Text(text) => Ok(Part::Text(text)),
        ContentPart::Other(part) => read_part((i, j), role, part, body),
    });
    Ok(Message::of_parts(role, parts.collect::<Result<_, _>>()?))
}

/// Reads part `j` of message `i`.
fn read_part(
    (i, j): (usize, usize),
    role: Role,
    part: ContentPartFields,
    body: &mut Body<'_>,
) -> Result<Part, ApiError> {
    let ContentPartFields { kind, text, refusal, image_url, uuid, .. } = part;
    let Some(kind) = kind else { return Err(invalid(format!("messages[{i}].content has a part without a type"))) };
    match (kind.as_str(), text.or(refusal)) {
        ("text" | "refusal", Some(text)) => return Ok(Part::Text(text)),
        ("text", None) => {
            return Err(invalid(format!("messages[{i}].content has a text part whose text is not a string")));
        }
        _ => {}
    }
    let (at, kind) = (format!("messages[{i}].content[{j}]"), truncate_for_error(&kind));
    let field = format!("messages[].content[].{kind}");
    let unread = if role == Role::Tool {
        Unread::Note { note: left_out(kind.strip_suffix("_url").unwrap_or(&kind)), field }
    } else {
        let message = format!("messages[{i}].content has a part of type {kind:?}: this model reads only text");
        Unread::Refused(invalid(message).with_code("unsupported_parameter"))
    };
    let refused = |message: &str| Err(invalid_image("messages", &at, message));
    let source = match (kind.as_str(), role) {
        ("image_url", Role::System) => refused("a system message has no images; send them in a user message"),
        ("image_url", _) if uuid.is_some() => refused("uuid is not implemented; leave it out"),
        ("image_url", _) => {
            let image = match image_url {
                Some(ImageUrlField::Text(url)) => ImageUrlFields { url: Some(url), detail: None },
                Some(ImageUrlField::Other(image)) => image,
                None => ImageUrlFields::default(),
            };
            ImageSource::openai(("messages", &at), image.url, image.detail.as_deref())
        }
        (_, Role::Tool) => return Ok(Part::Text(unread.text_for(body)?)),
        _ => Err(invalid(format!("{at} is of type {kind:?}: this model reads only text and images"))
            .with_code("unsupported_parameter")),
    };
    Ok(Part::Image(Box::new(ImagePart { at, source, unread })))
}

/// OpenAI sends arguments as a string of JSON.
fn read_call(i: usize, call: ToolCallFields) -> Result<ToolCall, ApiError> {
    let function = call.function.map(|Object(function)| function);
    let Some((name, arguments)) = function.and_then(|function| Some((function.name?, function.arguments))) else {
        return Err(invalid(format!("messages[{i}].tool_calls has an entry without a function name")));
    };
    let arguments = match arguments {
        None => Arguments::Object(Map::new()),
        Some(ArgumentsField::Text(text)) => Arguments::parse(text),
        Some(ArgumentsField::Other(arguments)) => Arguments::Object(arguments),
    };
    Ok(ToolCall { id: call.id, name, arguments })
}
