//! A body of `/v1/responses` as a chat request.

use super::input;
use super::tools::{CalledTools, ToolSet};
use super::wire::Repeated;
use crate::api::chat_request::ChatRequest;
use crate::api::conversation::{Conversation, FieldNames};
use crate::api::message::{Message, Role};
use crate::api::policy::FieldPolicy;
use crate::api::schema::Body;
use crate::api::schema::generation::GenerationFields;
use crate::api::schema::responses::{FormatFields, FormatKind, ResponsesFields, Summary, Truncation, Verbosity};
use crate::api::schema::structure::JsonSchemaValue;
use crate::api::schema::values::Object;
use crate::api::structured::Structured;
use crate::error::ApiError;
use pegainfer_text::GrammarSource;
use serde_json::{Value, json};

/// This API's field names, for errors about the conversation.
static NAMES: FieldNames = FieldNames {
    messages: "input",
    effort: "reasoning.effort",
    thinking_budget: "thinking_token_budget",
    stop: "stop",
    max_tokens: "max_output_tokens",
};

/// The parts of a request that its response needs.
pub struct Reply {
    /// Fields that the response repeats.
    pub repeated: Repeated,
    /// The tool of each function name.
    pub targets: CalledTools,
    /// True if reasoning is sent as a summary.
    pub summary: bool,
}

/// Reads a body.
pub fn read(mut body: Body<'_>, policy: &FieldPolicy) -> Result<(ChatRequest, Reply), ApiError> {
    let repeated = repeated(&body);
    let fields: ResponsesFields = body.read()?;
    let sampling = body.read()?;
    refuse_stored(&fields)?;
    report(&fields, &mut body);
    let mut tools = ToolSet::read(fields.tools.unwrap_or_default(), &mut body)?;
    let mut messages: Vec<Message> =
        fields.instructions.into_iter().map(|text| Message::new(Role::System, text)).collect();
    messages.extend(input::read(fields.input, &mut tools, &mut body)?);
    let (tools, targets) = tools.choose(fields.tool_choice, fields.parallel_tool_calls.unwrap_or(true))?;
    let format = fields.text.and_then(|Object(text)| text.format);
    let Object(reasoning) = fields.reasoning.unwrap_or_default();
    let summary = reasoning.summary.or(reasoning.generate_summary).is_some_and(|summary| summary != Summary::None);
    let conversation = Conversation {
        names: &NAMES,
        messages,
        tools,
        structured: format.map(|Object(format)| structure(format)).transpose()?.flatten(),
        template_kwargs: fields.chat_template_kwargs.unwrap_or_default(),
        effort: reasoning.effort,
        include_reasoning: true,
        add_generation_prompt: true,
        ..Conversation::default()
    };
    let generation = GenerationFields {
        model: fields.model,
        max_completion_tokens: fields.max_output_tokens,
        stream: fields.stream,
        ..GenerationFields::default()
    };
    let ignored = policy.check(&body)?;
    let chat = ChatRequest { generation, sampling, conversation: conversation.check()?, logprobs: None, ignored };
    Ok((chat, Reply { repeated, targets, summary }))
}

/// The fields that a response repeats, or their defaults.
fn repeated(body: &Body<'_>) -> Repeated {
    let or = |name: &str, default: Value| match body.value(name) {
        Value::Null => default,
        value => value,
    };
    Repeated {
        instructions: or("instructions", Value::Null),
        max_output_tokens: or("max_output_tokens", Value::Null),
        parallel_tool_calls: or("parallel_tool_calls", true.into()),
        reasoning: or("reasoning", Value::Null),
        temperature: or("temperature", Value::Null),
        tools: or("tools", json!([])),
        top_p: or("top_p", Value::Null),
        metadata: or("metadata", json!({})),
        text: or("text", json!({"format": {"type": "text"}})),
        tool_choice: or("tool_choice", json!("auto")),
    }
}

/// Refuses fields that need stored responses, conversations or prompts.
fn refuse_stored(fields: &ResponsesFields) -> Result<(), ApiError> {
    let asked = [
        ("previous_response_id", fields.previous_response_id.is_some()),
        ("conversation", fields.conversation.is_some()),
        ("background", fields.background == Some(true)),
        ("prompt", fields.prompt.is_some()),
    ];
    match asked.into_iter().find(|(_, asked)| *asked) {
        Some((name, _)) => {
            let message = format!("{name} is not implemented by this endpoint: it stores nothing");
            Err(ApiError::invalid(name, message).with_code("unsupported_parameter"))
        }
        None => Ok(()),
    }
}

/// Reports accepted fields without effect.
fn report(fields: &ResponsesFields, body: &mut Body<'_>) {
    let verbosity = fields.text.as_ref().and_then(|Object(text)| text.verbosity);
    for (name, asked) in [
        ("store", fields.store == Some(true)),
        ("include", fields.include.as_ref().is_some_and(|names| !names.is_empty())),
        ("truncation", fields.truncation == Some(Truncation::Auto)),
        ("top_logprobs", fields.top_logprobs.is_some_and(|top| top.count() > 0)),
        ("max_tool_calls", fields.max_tool_calls.is_some()),
        ("service_tier", fields.service_tier.as_deref().is_some_and(|tier| !["auto", "default"].contains(&tier))),
        ("text.verbosity", verbosity.is_some_and(|verbosity| verbosity != Verbosity::Medium)),
    ] {
        if asked {
            body.ignore(name.to_owned());
        }
    }
}

fn structure(format: FormatFields) -> Result<Option<Structured>, ApiError> {
    let invalid = |message: &str| Err(ApiError::invalid("text", message));
    let schema = match (format.kind, format.schema) {
        (Some(FormatKind::Text), _) => return Ok(None),
        (Some(FormatKind::JsonObject), _) => json!({"type": "object"}),
        (Some(FormatKind::JsonSchema), Some(JsonSchemaValue(schema))) => schema,
        (Some(FormatKind::JsonSchema), None) => return invalid("text.format.schema is missing"),
        (None, _) => return invalid("text.format.type is missing"),
    };
    Ok(Some(Structured { field: "text", source: GrammarSource::JsonSchema(schema) }))
}
