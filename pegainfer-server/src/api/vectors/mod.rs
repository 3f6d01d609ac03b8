//! Vectors and scores of texts: `/v1/embeddings`, `/v1/rerank`, `/v1/score`.
//!
//! A text is a request for one token of which only the prompt counts: the engine reports the vector of its last token.
//! All texts of a request take turns with other requests one by one, and are answered together.

mod embeddings;
mod pairs;
mod rerank;
mod score;

pub use embeddings::{Embeddings, embeddings};
pub use rerank::{Ranking, rerank, rerank_v2};
pub use score::{Scores, score};

use super::body::RequestContext;
use super::generation::Generation;
use super::model_state::{ModelState, Wanted};
use super::params::Params;
use super::schema::keep_alive::KeepAliveField;
use super::schema::vectors::VectorFields;
use super::truncation::Truncation;
use crate::error::ApiError;
use crate::text_service::{Task, encode};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use schemars::JsonSchema;
use serde::Serialize;

/// Texts of a request that wait or run at once: more than fit a step.
const AT_ONCE: usize = 64;

/// Token counts of a response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "VectorUsage")]
pub struct Usage {
    /// Tokens of all texts.
    pub prompt_tokens: usize,
    /// The same.
    pub total_tokens: usize,
}

impl Usage {
    fn of(prompts: &[Vec<u32>]) -> Self {
        let tokens = prompts.iter().map(Vec::len).sum();
        Self { prompt_tokens: tokens, total_tokens: tokens }
    }
}

impl VectorFields {
    /// The model that they name.
    fn wanted(&mut self) -> Wanted {
        let keep_alive = self.keep_alive.map(|KeepAliveField(keep_alive)| keep_alive);
        Wanted { name: self.model.take(), keep_alive, is_stream: false }
    }

    /// How long texts are truncated.
    fn truncation(&self) -> Result<Option<Truncation>, ApiError> {
        Truncation::of_texts(self.truncate_prompt_tokens, self.truncation_side)
    }
}

/// Vectors of prompts, in their order. `field`: the request's field that they came from.
async fn vectors(
    state: &ModelState,
    fields: VectorFields,
    context: RequestContext,
    prompts: Vec<Vec<u32>>,
    field: &'static str,
) -> Result<Vec<Box<[f32]>>, ApiError> {
    let params = Params::for_vectors(fields, &context, state).await?;
    let _submitted = context.submitted();
    let vector = async |prompt| {
        let requests = params.requests(prompt, 1, None, None, state)?;
        let generations = Generation::submit_all(state, &params, requests, field)?;
        let mut vector = None;
        for mut generation in generations {
            while let Some(delta) = generation.next().await {
                delta?;
            }
            vector = generation.take_vector();
        }
        vector.ok_or_else(|| ApiError::internal("the engine gave no vector"))
    };
    stream::iter(prompts).map(vector).buffered(AT_ONCE).try_collect().await
}

/// The error of a model with another task. `needed`: what the endpoint needs.
fn wrong_task(state: &ModelState, needed: &str) -> ApiError {
    let (name, task) = (&state.name, state.model.text.checkpoint.task.name());
    let message = format!("{name} is served with --task {task}; this needs --task {needed}");
    ApiError::invalid("model", message).with_code("wrong_task")
}

/// The token that ends texts, if the model makes vectors and its tokenizer does not end them.
fn end_of_texts(state: &ModelState) -> Result<Option<u32>, ApiError> {
    match &state.model.text.checkpoint.task {
        Task::Embed { end } => Ok(*end),
        Task::Generate | Task::Rerank(_) => Err(wrong_task(state, "embed")),
    }
}

/// Token ids of texts, each with its end unless `special` is false, and cut if the request says so. `field`: the
/// request's field that they came from.
async fn tokenized(
    state: &ModelState,
    context: &RequestContext,
    (texts, field): (Vec<String>, &'static str),
    special: bool,
    truncation: Option<Truncation>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let end = end_of_texts(state)?;
    if truncation.is_none() {
        texts.iter().try_for_each(|text| state.check_length(text.len(), field))?;
    }
    let encoded = state.tokenize(&context.hold, encode(texts, special)).await?;
    let mut prompts = encoded.map_err(|error| ApiError::invalid(field, error.to_string()))?;
    for ids in &mut prompts {
        ids.extend(end.filter(|_| special));
        truncate(ids, truncation, special, capacity(state));
    }
    Ok(prompts)
}

/// Tokens of a text that fit the context, next to the one that the engine generates.
fn capacity(state: &ModelState) -> usize {
    state.model.engine.limits().max_model_len.saturating_sub(1)
}

/// Scales a vector to length 1; a vector of zeros stays.
fn normalize(vector: &mut [f32]) {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

/// Cuts a text's tokens, but not the token that ends it. `capacity`: tokens that fit the context.
fn truncate(ids: &mut Vec<u32>, truncation: Option<Truncation>, ends: bool, capacity: usize) {
    let Some(truncation) = truncation else { return };
    let end = if ends { ids.pop() } else { None };
    let kept = usize::from(end.is_some());
    truncation.less(kept).apply(ids, capacity.saturating_sub(kept));
    ids.extend(end);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::numbers::Int;

    #[test]
    fn vectors_have_length_one() {
        let mut vector = vec![3.0, -4.0];
        normalize(&mut vector);
        assert_eq!(vector, [0.6, -0.8]);
        let mut zeros = vec![0.0; 3];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0; 3]);
    }

    #[test]
    fn a_truncated_text_keeps_its_end_token() {
        let cut = |length, ends, capacity| {
            let mut ids = vec![1, 2, 3, 4, 9];
            truncate(&mut ids, Truncation::of_texts(Some(Int(length)), None).unwrap(), ends, capacity);
            ids
        };
        assert_eq!(cut(3, true, 100), [1, 2, 9]);
        assert_eq!(cut(3, false, 100), [1, 2, 3]);
        assert_eq!(cut(-1, true, 4), [1, 2, 3, 9]);
        assert_eq!(cut(9, true, 100), [1, 2, 3, 4, 9]);
    }
}
