//! Keeps the conversation within the model's context.

use super::conversation::Conversation;
use crate::cli::local_server::LocalServer;
use anyhow::{Context as _, Result};
use axum::body::to_bytes;
use serde::Deserialize;

/// Maximum bytes of a response of `/tokenize`: longer than the ids of any context.
const MAX_RESPONSE: usize = 1 << 28;
/// An answer has at least this part of the context, or as much as it may have.
const ANSWER_PART: usize = 4;

/// The length of a tokenized conversation, and the context of its model.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Tokenized {
    pub(super) count: usize,
    pub(super) max_model_len: usize,
}

/// Prompt tokens of the conversation; `None` if it cannot be rendered, which the next request explains.
pub(super) async fn used(server: &LocalServer, conversation: &Conversation) -> Result<Option<Tokenized>> {
    let response = server.post("/tokenize", conversation.to_tokenize()?).await?;
    if !response.status().is_success() {
        return Ok(None);
    }
    let body = to_bytes(response.into_body(), MAX_RESPONSE).await.context("the messages cannot be tokenized")?;
    serde_json::from_slice(&body).context("the messages cannot be tokenized").map(Some)
}

/// Drops the oldest turns until an answer to the last message fits. Returns the context's tokens if it dropped any. If the
/// last message is too long alone, it drops none, and the request is refused.
pub(super) async fn drop_oldest_turns(server: &LocalServer, conversation: &mut Conversation) -> Result<Option<usize>> {
    let (mut shorter, mut dropped) = (conversation.clone(), false);
    loop {
        let Some(Tokenized { count: used, max_model_len: context }) = used(server, &shorter).await? else {
            return Ok(None);
        };
        let part = context / ANSWER_PART;
        let answer = conversation.max_tokens().map_or(part, |tokens| tokens.get().min(part));
        if used + answer <= context || !shorter.drop_oldest() {
            let fits = dropped && used < context;
            if fits {
                *conversation = shorter;
            }
            return Ok(fits.then_some(context));
        }
        dropped = true;
    }
}
