//! `POST /v1/rerank`, `/rerank`, `/v2/rerank`, in the shapes of Jina, Cohere, vLLM and Text Embeddings Inference.

use super::Usage;
use super::pairs::{Pairs, logits};
use crate::api::body;
use crate::api::large_response::{GrowingResponse, json_bytes};
use crate::api::model_state::ModelState;
use crate::api::policy::{FieldPolicy, with_ignored};
use crate::api::schema::Body;
use crate::api::schema::vectors::{Documents, MAX_DOCUMENTS, RerankFields, VectorFields};
use crate::api::state::AppState;
use crate::error::ApiError;
use crate::ids::random_u64;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// Bytes of a result without its text.
const RESULT_BYTES: usize = 80;

/// Documents, best first.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "Ranking")]
pub enum Ranking {
    /// The answer to `documents`.
    Results {
        /// Name of the response.
        id: String,
        /// The model's name.
        model: String,
        /// Token counts.
        usage: Usage,
        /// The best documents.
        results: Vec<RankedDocument>,
    },
    /// The answer to `texts`.
    List(Vec<RankedText>),
}

/// A document and its score.
#[derive(Serialize, JsonSchema)]
pub struct RankedDocument {
    /// Number of the document in the request.
    index: usize,
    /// Probability that the document answers the query.
    relevance_score: f32,
    /// The document, if the response has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<DocumentText>,
}

/// A document.
#[derive(Serialize, JsonSchema)]
pub struct DocumentText {
    /// Its text.
    text: String,
}

/// A text and its score.
#[derive(Serialize, JsonSchema)]
pub struct RankedText {
    /// Number of the text in the request.
    index: usize,
    /// Probability that it answers the query.
    score: f32,
    /// The text, if the client asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// Handles `POST /v1/rerank` and `/rerank`: documents are sent back unless the request says no.
pub async fn rerank(state: State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    respond(state, request, true).await
}

/// Handles `POST /v2/rerank`: documents are sent back if the request says so.
pub async fn rerank_v2(state: State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    respond(state, request, false).await
}

async fn respond(
    State(state): State<Arc<AppState>>,
    request: Request,
    returns_documents: bool,
) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let (mut fields, wanted, ignored) = bytes.parse(&state, move |bytes| read(bytes, &shared.policy)).await?;
    let state = ModelState::named(&state, fields.wanted(), &context, ignored.as_ref()).await?;
    let (documents, is_list) = match (wanted.documents, wanted.texts) {
        (Some(Documents(documents)), None) => (documents, false),
        (None, Some(Documents(texts))) => (texts, true),
        _ => return Err(ApiError::invalid("documents", "send the documents as documents, or as texts for a list")),
    };
    let query = wanted.query.filter(|query| !query.is_empty());
    let query = query.ok_or_else(|| ApiError::invalid("query", "query is missing or empty"))?;
    if documents.is_empty() || documents.len() > MAX_DOCUMENTS {
        let message = format!("send 1 to {MAX_DOCUMENTS} documents, got {}", documents.len());
        return Err(ApiError::invalid("documents", message));
    }
    let asked = wanted.return_documents.or(wanted.return_text);
    let returns = asked.unwrap_or(returns_documents && !is_list);
    let growing = GrowingResponse::new(context.tenant);
    let kept = if returns { documents.iter().map(String::len).sum() } else { 0 };
    growing.add_bytes((documents.len() * RESULT_BYTES + kept) as u64, &state)?;
    let pairs = Pairs {
        pairs: documents.iter().map(|document| (query.clone(), document.clone())).collect(),
        instruction: wanted.instruction,
        truncates: wanted.truncate.unwrap_or(false) || fields.truncate_prompt_tokens.is_some(),
        document_tokens: wanted.max_tokens_per_doc.map(|n| n.count()),
    };
    let field = if is_list { "texts" } else { "documents" };
    let (logits, usage) = logits(&state, fields, context, pairs, field).await?;
    let raw = wanted.raw_scores.unwrap_or(false);
    let ranked = ranked(&logits, wanted.top_n.map_or(0, |n| n.count()));
    let scored = |index: usize| if raw { logits[index] } else { sigmoid(logits[index]) };
    let text = |index: usize| returns.then(|| documents[index].clone());
    let ranking = if is_list {
        Ranking::List(ranked.map(|index| RankedText { index, score: scored(index), text: text(index) }).collect())
    } else {
        let result = |index| {
            let document = text(index).map(|text| DocumentText { text });
            RankedDocument { index, relevance_score: scored(index), document }
        };
        let id = format!("rerank-{:016x}", random_u64()?);
        Ranking::Results { id, model: state.name.clone(), usage, results: ranked.map(result).collect() }
    };
    Ok(with_ignored(growing.respond(&state, move || json_bytes(&ranking)).await?, ignored))
}

/// Numbers of the best documents, best first, equal ones in order; all if `top` is 0.
fn ranked(logits: &[f32], top: usize) -> impl Iterator<Item = usize> + use<> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let top = if top == 0 { order.len() } else { top };
    order.into_iter().take(top)
}

/// The probability of a difference of logits.
pub(super) fn sigmoid(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

fn read(bytes: &[u8], policy: &FieldPolicy) -> Result<(VectorFields, RerankFields, Option<HeaderValue>), ApiError> {
    let mut body = Body::parse(bytes)?;
    let (fields, wanted) = (body.read()?, body.read()?);
    let ignored = policy.check(&body)?;
    Ok((fields, wanted, ignored))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_ties_in_order() {
        let order = |top| ranked(&[0.5, 2.0, 0.5, -1.0], top).collect::<Vec<_>>();
        assert_eq!(order(0), [1, 0, 2, 3]);
        assert_eq!(order(2), [1, 0]);
        assert_eq!(order(9), [1, 0, 2, 3]);
    }
}
