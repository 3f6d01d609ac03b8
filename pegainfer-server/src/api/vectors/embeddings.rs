//! `POST /v1/embeddings`.

use super::{Usage, capacity, end_of_texts, normalize, tokenized, truncate, vectors};
use crate::api::body;
use crate::api::large_response::{GrowingResponse, json_bytes};
use crate::api::model_state::ModelState;
use crate::api::policy::{FieldPolicy, with_ignored};
use crate::api::schema::Body;
use crate::api::schema::completions::PromptInput;
use crate::api::schema::vectors::{EmbeddingFields, VectorFields, VectorFormat};
use crate::api::state::AppState;
use crate::api::stop::check_vocabulary;
use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// Bytes of a number in a response, at most.
const NUMBER_BYTES: u64 = 14;

/// The vectors of all texts, in their order.
#[derive(Serialize, JsonSchema)]
pub struct Embeddings<'a> {
    /// Always `list`.
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    /// One for each text.
    data: Vec<Embedding>,
    /// The model's name.
    model: &'a str,
    /// Token counts.
    usage: Usage,
}

/// The vector of a text.
#[derive(Serialize, JsonSchema)]
struct Embedding {
    /// Always `embedding`.
    #[schemars(extend("const" = "embedding"))]
    object: &'static str,
    /// Number of the text.
    index: usize,
    /// The vector.
    embedding: Values,
}

/// A vector, in the format that the client asked for.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
enum Values {
    /// Its numbers.
    Float(Vec<f32>),
    /// Their bytes, little-endian, in base64.
    Base64(String),
}

impl Values {
    fn new(values: Vec<f32>, format: VectorFormat) -> Self {
        match format {
            VectorFormat::Float => Self::Float(values),
            VectorFormat::Base64 => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                Self::Base64(STANDARD.encode(bytes))
            }
        }
    }
}

/// Handles `POST /v1/embeddings`.
pub async fn embeddings(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let (mut fields, texts, ignored) = bytes.parse(&state, move |bytes| read(bytes, &shared.policy)).await?;
    let state = ModelState::named(&state, fields.wanted(), &context, ignored.as_ref()).await?;
    end_of_texts(&state)?;
    let limits = state.model.engine.limits();
    let EmbeddingFields { input, dimensions, encoding_format, use_activation, add_special_tokens } = texts;
    let dimensions = match dimensions.map(|n| n.count()) {
        Some(wanted) if wanted > limits.hidden_size => {
            let message = format!("dimensions must be at most {}, got {wanted}", limits.hidden_size);
            return Err(ApiError::invalid("dimensions", message));
        }
        wanted => wanted.unwrap_or(limits.hidden_size),
    };
    let truncation = fields.truncation()?;
    let prompts = match input {
        None => return Err(ApiError::invalid("input", "input is missing")),
        Some(PromptInput::Ids(mut lists)) => {
            lists.iter().try_for_each(|ids| check_vocabulary(ids, limits.vocab_size, "input"))?;
            lists.iter_mut().for_each(|ids| truncate(ids, truncation, false, capacity(&state)));
            lists
        }
        Some(PromptInput::Texts(texts)) => {
            tokenized(&state, &context, (texts, "input"), add_special_tokens.unwrap_or(true), truncation).await?
        }
    };
    if prompts.is_empty() {
        return Err(ApiError::invalid("input", "input is empty: send at least one text"));
    }
    let (usage, growing) = (Usage::of(&prompts), GrowingResponse::new(context.tenant));
    growing.add_bytes(prompts.len() as u64 * dimensions as u64 * NUMBER_BYTES, &state)?;
    let all = vectors(&state, fields, context, prompts, "input").await?;
    let (name, scales) = (state.name.clone(), use_activation.unwrap_or(true));
    let write = move || {
        let embedding = |(index, vector): (usize, Box<[f32]>)| {
            let mut values = vector.into_vec();
            values.truncate(dimensions);
            if scales {
                normalize(&mut values);
            }
            let embedding = Values::new(values, encoding_format.unwrap_or(VectorFormat::Float));
            Embedding { object: "embedding", index, embedding }
        };
        let data = all.into_iter().enumerate().map(embedding).collect();
        json_bytes(&Embeddings { object: "list", data, model: &name, usage })
    };
    Ok(with_ignored(growing.respond(&state, write).await?, ignored))
}

fn read(bytes: &[u8], policy: &FieldPolicy) -> Result<(VectorFields, EmbeddingFields, Option<HeaderValue>), ApiError> {
    let mut body = Body::parse(bytes)?;
    let (fields, texts) = (body.read()?, body.read()?);
    let ignored = policy.check(&body)?;
    Ok((fields, texts, ignored))
}
