//! `truncate_prompt_tokens` and `truncation_side`: truncation of long prompts.

use super::schema::generation::Side;
use super::schema::numbers::Count;
use crate::error::ApiError;

/// How prompts are truncated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation {
    /// Number of tokens to keep; `None` keeps as many as fit the context.
    length: Option<usize>,
    /// True to keep the beginning instead of the end.
    keep_start: bool,
}

impl Truncation {
    /// The truncation set by both fields.
    pub fn new(length: Option<Count<-1>>, side: Option<Side>) -> Result<Option<Self>, ApiError> {
        match length.map(|length| length.0) {
            None => Ok(None),
            Some(0) => {
                let message = "truncate_prompt_tokens must be at least 1, or -1 for what fits the context";
                Err(ApiError::invalid("truncate_prompt_tokens", message))
            }
            Some(length) => {
                Ok(Some(Self { length: usize::try_from(length).ok(), keep_start: side == Some(Side::Right) }))
            }
        }
    }

    /// The same for texts of vectors, which keep their beginning unless the request says otherwise.
    pub fn of_texts(length: Option<Count<-1>>, side: Option<Side>) -> Result<Option<Self>, ApiError> {
        Self::new(length, Some(side.unwrap_or(Side::Right)))
    }

    /// The same with so many tokens less.
    pub fn less(self, tokens: usize) -> Self {
        Self { length: self.length.map(|length| length.saturating_sub(tokens)), ..self }
    }

    /// Truncates a prompt. `capacity` is the number of tokens that fit the context.
    pub fn apply(self, prompt: &mut Vec<u32>, capacity: usize) {
        let length = self.length.unwrap_or(capacity);
        if self.keep_start {
            prompt.truncate(length);
        } else {
            prompt.drain(..prompt.len().saturating_sub(length));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::schema::numbers::Int;

    #[test]
    fn prompts_keep_their_end_or_their_beginning() {
        for (length, side, expected) in [
            (2, Some(Side::Left), vec![3, 4]),
            (2, Some(Side::Right), vec![1, 2]),
            (9, None, vec![1, 2, 3, 4]),
            (-1, None, vec![2, 3, 4]),
        ] {
            let truncation = Truncation::new(Some(Int(length)), side).unwrap().unwrap();
            let mut prompt = vec![1, 2, 3, 4];
            truncation.apply(&mut prompt, 3);
            assert_eq!(prompt, expected, "{length} {side:?}");
        }
    }
}
