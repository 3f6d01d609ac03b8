//! `POST /v1/score` and `/score`, in the shape of vLLM: one score for each pair of texts.

use super::pairs::{Pairs, logits};
use super::rerank::sigmoid;
use super::{Usage, normalize, tokenized, vectors};
use crate::api::body;
use crate::api::body::RequestContext;
use crate::api::large_response::{GrowingResponse, json_bytes};
use crate::api::model_state::ModelState;
use crate::api::policy::{FieldPolicy, with_ignored};
use crate::api::schema::Body;
use crate::api::schema::vectors::{Documents, ScoreFields, VectorFields};
use crate::api::state::{AppState, unix_time};
use crate::error::ApiError;
use crate::ids::random_u64;
use crate::text_service::Task;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;

/// Bytes of a score in the response.
const SCORE_BYTES: u64 = 64;

/// The scores of all pairs, in their order.
#[derive(Serialize, JsonSchema)]
pub struct Scores {
    /// Name of the response.
    id: String,
    /// Always `list`.
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    /// Time of the response, in Unix time.
    created: u64,
    /// The model's name.
    model: String,
    /// One for each pair.
    data: Vec<Score>,
    /// Token counts.
    usage: Usage,
}

/// The score of a pair.
#[derive(Serialize, JsonSchema)]
struct Score {
    /// Number of the pair.
    index: usize,
    /// Always `score`.
    #[schemars(extend("const" = "score"))]
    object: &'static str,
    /// Probability of a reranker, or cosine of two vectors.
    score: f32,
}

/// Handles `POST /v1/score`: probabilities of a reranker, or cosines of vectors.
pub async fn score(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (context, bytes) = body::read(request, &state).await?;
    let shared = state.clone();
    let (mut fields, texts, ignored) = bytes.parse(&state, move |bytes| read(bytes, &shared.policy)).await?;
    let state = ModelState::named(&state, fields.wanted(), &context, ignored.as_ref()).await?;
    let instruction = texts.instruction.clone();
    let pairs = pairs(texts)?;
    let growing = GrowingResponse::new(context.tenant);
    growing.add_bytes(pairs.len() as u64 * SCORE_BYTES, &state)?;
    let (scores, usage) = match &state.model.text.checkpoint.task {
        Task::Rerank(_) => {
            let truncates = fields.truncate_prompt_tokens.is_some();
            let pairs = Pairs { pairs, instruction, truncates, document_tokens: None };
            let (logits, usage) = logits(&state, fields, context, pairs, "text_2").await?;
            (logits.into_iter().map(sigmoid).collect(), usage)
        }
        Task::Embed { .. } | Task::Generate => cosines(&state, fields, context, pairs).await?,
    };
    let data = scores.into_iter().enumerate().map(|(index, score)| Score { index, object: "score", score }).collect();
    let id = format!("score-{:016x}", random_u64()?);
    let scores = Scores { id, object: "list", created: unix_time(), model: state.name.clone(), data, usage };
    Ok(with_ignored(growing.respond(&state, move || json_bytes(&scores)).await?, ignored))
}

/// Cosines of the vectors of each pair, and the token counts.
async fn cosines(
    state: &ModelState,
    fields: VectorFields,
    context: RequestContext,
    pairs: Vec<(String, String)>,
) -> Result<(Vec<f32>, Usage), ApiError> {
    let truncation = fields.truncation()?;
    // A text that many pairs share is computed once.
    let mut distinct: Vec<String> = Vec::new();
    let mut numbers = std::collections::HashMap::new();
    let mut number = |text: String| {
        *numbers.entry(text).or_insert_with_key(|text| {
            distinct.push(text.clone());
            distinct.len() - 1
        })
    };
    let pairs: Vec<(usize, usize)> = pairs.into_iter().map(|(one, other)| (number(one), number(other))).collect();
    let prompts = tokenized(state, &context, (distinct, "text_1"), true, truncation).await?;
    let usage = Usage::of(&prompts);
    let mut all = vectors(state, fields, context, prompts, "text_1").await?;
    all.iter_mut().for_each(|vector| normalize(vector));
    let cosine = |(one, other): (usize, usize)| all[one].iter().zip(&all[other]).map(|(a, b)| a * b).sum();
    Ok((pairs.into_iter().map(cosine).collect(), usage))
}

/// The pairs: one text against each other one, or one by one.
fn pairs(fields: ScoreFields) -> Result<Vec<(String, String)>, ApiError> {
    let ScoreFields { text_1, text_2, queries, documents, items, .. } = fields;
    let missing = |field: &str| ApiError::invalid(field, format!("{field} is missing or empty"));
    let texts = |given: Option<Documents>, field| match given {
        Some(Documents(texts)) if !texts.is_empty() => Ok(texts),
        _ => Err(missing(field)),
    };
    let (first, second) = (texts(text_1.or(queries), "text_1")?, texts(text_2.or(documents).or(items), "text_2")?);
    if first.len() == second.len() {
        return Ok(first.into_iter().zip(second).collect());
    }
    if first.len() != 1 {
        let (n, m) = (first.len(), second.len());
        let message = format!("text_1 has {n} texts and text_2 has {m}: send one, or equally many");
        return Err(ApiError::invalid("text_1", message));
    }
    Ok(second.into_iter().map(|second| (first[0].clone(), second)).collect())
}

fn read(bytes: &[u8], policy: &FieldPolicy) -> Result<(VectorFields, ScoreFields, Option<HeaderValue>), ApiError> {
    let mut body = Body::parse(bytes)?;
    let (fields, texts) = (body.read()?, body.read()?);
    let ignored = policy.check(&body)?;
    Ok((fields, texts, ignored))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(n: usize) -> Option<Documents> {
        Some(Documents((0..n).map(|i| i.to_string()).collect()))
    }

    #[test]
    fn one_text_meets_all_or_each_its_own() {
        let count = |n, m| pairs(ScoreFields { text_1: texts(n), text_2: texts(m), ..ScoreFields::default() });
        assert_eq!(count(1, 3).unwrap().len(), 3);
        assert_eq!(count(3, 3).unwrap()[2], ("2".to_owned(), "2".to_owned()));
        assert!(count(2, 3).is_err() && count(0, 1).is_err());
        assert!(pairs(ScoreFields { queries: texts(1), items: texts(2), ..ScoreFields::default() }).is_ok());
    }
}
