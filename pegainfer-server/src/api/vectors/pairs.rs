//! Prompts of a reranker: a query and a document, in the words that Qwen3-Reranker was trained with.

use super::{Usage, VectorFields, capacity, vectors, wrong_task};
use crate::api::body::RequestContext;
use crate::api::model_state::ModelState;
use crate::error::ApiError;
use crate::text_service::{CancelCheck, Task};
use pegainfer_text::{Tokenizer, TokenizerError};
use std::borrow::Cow;
use std::sync::Arc;

/// Before a pair: the task of Qwen3-Reranker's model card.
const PREFIX: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
                      Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
                      <|im_start|>user\n";
/// After a pair: the beginning of an answer without reasoning.
const SUFFIX: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
/// What the model judges if the request does not say.
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// Pairs of a query and a document.
pub(super) struct Pairs {
    /// Each query and document.
    pub pairs: Vec<(String, String)>,
    /// What the model judges; `None` for [`INSTRUCTION`].
    pub instruction: Option<String>,
    /// True to truncate pairs that do not fit the context.
    pub truncates: bool,
    /// Maximum number of tokens of a document.
    pub document_tokens: Option<usize>,
}

/// Logits of "yes" minus those of "no" for all pairs, and the token counts. `field`: the request's field that
/// the documents came from.
pub(super) async fn logits(
    state: &ModelState,
    fields: VectorFields,
    context: RequestContext,
    pairs: Pairs,
    field: &'static str,
) -> Result<(Vec<f32>, Usage), ApiError> {
    if !matches!(state.model.text.checkpoint.task, Task::Rerank(_)) {
        return Err(wrong_task(state, "rerank"));
    }
    let capacity = capacity(state);
    if !pairs.truncates && pairs.document_tokens.is_none() {
        let lengths = pairs.pairs.iter().map(|(query, document)| query.len() + document.len());
        lengths.into_iter().try_for_each(|bytes| state.check_length(bytes, field))?;
    }
    let encoded =
        state.tokenize(&context.hold, move |tokenizer, cancel| pairs.encode(tokenizer, cancel, capacity)).await?;
    let prompts = encoded.map_err(|error| ApiError::invalid(field, error.to_string()))?;
    let usage = Usage::of(&prompts);
    let vectors = vectors(state, fields, context, prompts, field).await?;
    let Task::Rerank(reranker) = &state.model.text.checkpoint.task else { return Err(wrong_task(state, "rerank")) };
    Ok((vectors.iter().map(|vector| reranker.logit(vector)).collect(), usage))
}

impl Pairs {
    fn encode(
        &self,
        tokenizer: &Arc<Tokenizer>,
        cancel: &CancelCheck<'_>,
        capacity: usize,
    ) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let instruction = self.instruction.as_deref().unwrap_or(INSTRUCTION);
        let (prefix, suffix) = (tokenizer.encode(PREFIX, false)?, tokenizer.encode(SUFFIX, false)?);
        let pairs = self.pairs.iter().take_while(|_| !cancel.is_cancelled());
        let prompt = |(query, document): &(String, String)| {
            let document = self.shortened(document, tokenizer)?;
            let text = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}");
            let mut pair = plain(&text, tokenizer)?;
            if self.truncates {
                pair.truncate(capacity.saturating_sub(prefix.len() + suffix.len()));
            }
            Ok([&prefix[..], &pair, &suffix].concat())
        };
        pairs.map(prompt).collect()
    }

    /// The beginning of a document that has as many tokens as a document may have.
    fn shortened<'a>(&self, document: &'a str, tokenizer: &Tokenizer) -> Result<Cow<'a, str>, TokenizerError> {
        let Some(most) = self.document_tokens else { return Ok(document.into()) };
        let ids = plain(document, tokenizer)?;
        Ok(if ids.len() <= most { document.into() } else { tokenizer.decode_all(&ids[..most]).into() })
    }
}

/// Tokens of a text in which control tokens are plain text, so that no document can end its turn.
fn plain(text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, TokenizerError> {
    let mut cuts: Vec<usize> = tokenizer
        .added_tokens()
        .filter(|token| !token.is_empty())
        .flat_map(|token| {
            let first = token.chars().next().map_or(0, char::len_utf8);
            text.match_indices(token).map(move |(at, _)| at + first)
        })
        .collect();
    cuts.sort_unstable();
    cuts.dedup();
    let (mut ids, mut from) = (Vec::new(), 0);
    for cut in cuts.into_iter().chain([text.len()]) {
        ids.extend(tokenizer.encode(&text[from..cut], false)?);
        from = cut;
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tokenizer;

    #[test]
    fn control_tokens_in_texts_are_plain() {
        let tokenizer = tokenizer();
        for text in ["a<|im_end|>b", "<|im_end|><|im_start|>", "<|im_<|im_end|>end|>", "plain"] {
            let ids = plain(text, &tokenizer).unwrap();
            assert!(ids.iter().all(|id| !tokenizer.is_special(*id)), "{text}");
            assert_eq!(tokenizer.decode_all(&ids), text);
        }
    }
}
