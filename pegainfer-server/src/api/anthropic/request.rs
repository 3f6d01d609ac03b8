//! A body of `/v1/messages` as a chat request.

use super::history;
use super::signature;
use super::tools::Definitions;
use crate::api::agents::{self, Client};
use crate::api::chat_request::ChatRequest;
use crate::api::conversation::{Conversation, FieldNames};
use crate::api::message::{Message, Role};
use crate::api::policy::FieldPolicy;
use crate::api::schema::Body;
use crate::api::schema::anthropic::{
    AnswerFields, BlockFields, ContextManagementFields, FormatFields, MessagesFields, OutputConfigFields,
    ThinkingDisplay, ThinkingFields, ThinkingKind,
};
use crate::api::schema::conversation::Effort;
use crate::api::schema::forms::TextOrList;
use crate::api::schema::generation::GenerationFields;
use crate::api::schema::sampling::SamplingFields;
use crate::api::schema::structure::JsonSchemaValue;
use crate::api::schema::values::{Object, Texts};
use crate::api::structured::Structured;
use crate::error::ApiError;
use pegainfer_text::GrammarSource;
use serde_json::{Map, Value};

/// This API's field names, for errors about the conversation.
static NAMES: FieldNames = FieldNames {
    messages: "messages",
    effort: "output_config.effort",
    thinking_budget: "thinking.budget_tokens",
    stop: "stop_sequences",
    max_tokens: "max_tokens",
};

/// Reads a body of `/v1/messages`.
pub fn read(
    mut body: Body<'_>,
    client: Client,
    policy: &FieldPolicy,
) -> Result<(ChatRequest, ThinkingDisplay), ApiError> {
    let AnswerFields { max_tokens, stop_sequences, stream, service_tier: _ } = body.read()?;
    let (model, sampling, conversation, display) = read_conversation(&mut body, client)?;
    if max_tokens.is_none() {
        return Err(ApiError::invalid("max_tokens", "max_tokens is missing"));
    }
    let generation = GenerationFields {
        model,
        max_completion_tokens: max_tokens,
        stop: stop_sequences.map(|stops| Texts(stops.into_iter().map(|stop| stop.0).collect())),
        stream,
        ..GenerationFields::default()
    };
    let ignored = policy.check(&body)?;
    Ok((ChatRequest { generation, sampling, conversation, logprobs: None, ignored }, display))
}

/// Reads a body of `/v1/messages/count_tokens`, which has only a conversation.
pub fn read_to_count(mut body: Body<'_>, client: Client, policy: &FieldPolicy) -> Result<ChatRequest, ApiError> {
    let (model, sampling, conversation, _) = read_conversation(&mut body, client)?;
    let generation = GenerationFields { model, ..GenerationFields::default() };
    let ignored = policy.check(&body)?;
    Ok(ChatRequest { generation, sampling, conversation, logprobs: None, ignored })
}

/// Model, sampling parameters, conversation, and whether the response shows its reasoning.
type ParsedConversation = (Option<String>, SamplingFields, Conversation, ThinkingDisplay);

fn read_conversation(body: &mut Body<'_>, client: Client) -> Result<ParsedConversation, ApiError> {
    let fields: MessagesFields = body.read()?;
    let sampling = body.read()?;
    refuse_remote(&fields)?;
    if edits(&fields) {
        body.ignore("context_management".into());
    }
    let tools = Definitions::read(fields.tools.unwrap_or_default(), body)?;
    let mut messages: Vec<Message> = system(fields.system, client)?.into_iter().collect();
    let turns = match fields.messages {
        Some(turns) if !turns.is_empty() => turns,
        Some(_) => return Err(ApiError::invalid("messages", "messages is empty: send at least one message")),
        None => return Err(ApiError::invalid("messages", "messages is missing")),
    };
    messages.extend(history::read(turns, &tools, body)?);
    // A final assistant message is the beginning of the answer.
    let prefill = messages.last().is_some_and(|last| last.role == Role::Assistant && last.tool_calls.is_empty());
    let Object(OutputConfigFields { format, effort }) = fields.output_config.unwrap_or_default();
    let mut conversation = Conversation {
        names: &NAMES,
        messages,
        tools: tools.choose(fields.tool_choice)?,
        structured: format.or(fields.output_format).map(|Object(format)| structure(format)).transpose()?,
        template_kwargs: fields.chat_template_kwargs.unwrap_or_default(),
        include_reasoning: true,
        add_generation_prompt: !prefill,
        continue_final_message: prefill,
        ..Conversation::default()
    };
    let thinking = fields.thinking.map(|Object(thinking)| thinking);
    let display = thinking.as_ref().and_then(|thinking| thinking.display.as_deref());
    let display = signature::display(display, body);
    set_thinking(thinking, effort, &mut conversation, body)?;
    Ok((fields.model, sampling, conversation.check()?, display))
}

/// Refuses fields that need Anthropic's servers.
fn refuse_remote(fields: &MessagesFields) -> Result<(), ApiError> {
    let asked = [
        ("mcp_servers", fields.mcp_servers.as_ref().is_some_and(|servers| !servers.is_empty())),
        ("container", fields.container.is_some()),
    ];
    match asked.into_iter().find(|(_, asked)| *asked) {
        Some((name, _)) => {
            let message = format!("{name} is not implemented by this endpoint");
            Err(ApiError::invalid(name, message).with_code("unsupported_parameter"))
        }
        None => Ok(()),
    }
}

fn edits(fields: &MessagesFields) -> bool {
    let edits = fields.context_management.as_ref().and_then(|Object(ContextManagementFields { edits })| edits.as_ref());
    edits.is_some_and(|edits| !edits.is_empty())
}

fn system(system: Option<TextOrList<Object<BlockFields>>>, client: Client) -> Result<Option<Message>, ApiError> {
    let blocks = match system {
        None => return Ok(None),
        Some(TextOrList::Text(text)) => return Ok(Some(Message::new(Role::System, text))),
        Some(TextOrList::Other(blocks)) => blocks,
    };
    let mut texts = Vec::new();
    for (i, Object(block)) in blocks.into_iter().enumerate() {
        let Some(text) = block.text.filter(|_| block.kind.as_deref() == Some("text")) else {
            return Err(ApiError::invalid("system", format!("system[{i}] must be a text block")));
        };
        if !agents::is_volatile(&text, client) {
            texts.push(text);
        }
    }
    Ok((!texts.is_empty()).then(|| Message::new(Role::System, texts.join("\n"))))
}

fn structure(format: FormatFields) -> Result<Structured, ApiError> {
    let (Some(_), Some(JsonSchemaValue(schema))) = (format.kind, format.schema) else {
        let message = "output_config.format must be {\"type\": \"json_schema\", \"schema\": …}";
        return Err(ApiError::invalid("output_config", message));
    };
    Ok(Structured { field: "output_config", source: GrammarSource::JsonSchema(schema) })
}

/// Sets the reasoning. Like in Anthropic's API, the model does not reason unless `thinking` asks for it.
fn set_thinking(
    thinking: Option<ThinkingFields>,
    effort: Option<Effort>,
    conversation: &mut Conversation,
    body: &mut Body<'_>,
) -> Result<(), ApiError> {
    let reasons = match thinking {
        None => false,
        Some(ThinkingFields { kind: None, .. }) => {
            return Err(ApiError::invalid("thinking", "thinking.type is missing"));
        }
        Some(ThinkingFields { kind: Some(kind), budget_tokens, .. }) => {
            if budget_tokens.is_some() && kind != ThinkingKind::Enabled {
                let message = "thinking.budget_tokens needs thinking.type \"enabled\"";
                return Err(ApiError::invalid("thinking", message));
            }
            conversation.thinking_budget = budget_tokens.map(|budget| budget.count());
            kind != ThinkingKind::Disabled
        }
    };
    let kwargs: &mut Map<String, Value> = &mut conversation.template_kwargs;
    kwargs.entry("enable_thinking").or_insert(reasons.into());
    match effort {
        Some(_) if !reasons => body.ignore("output_config.effort".into()),
        effort => conversation.effort = effort,
    }
    Ok(())
}
