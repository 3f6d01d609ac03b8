//! `truncate_prompt_tokens` and `truncation_side`: truncate prompts that are too long.

use super::fields::Fields;
use crate::error::{ApiError, truncate_for_error};

/// How prompts are truncated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation {
    /// Number of tokens to keep; `None`: as many as fit the context.
    length: Option<usize>,
    /// Whether the beginning is kept, not the end.
    keep_start: bool,
}

impl Truncation {
    /// Parses both fields.
    pub fn parse(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let length = fields.integer("truncate_prompt_tokens", -1..=i32::MAX.into())?;
        let keep_start = match fields.string("truncation_side")?.as_deref() {
            None | Some("left") => false,
            Some("right") => true,
            Some(other) => {
                let message = format!("truncation_side must be left or right, got {:?}", truncate_for_error(other));
                return Err(ApiError::invalid("truncation_side", message));
            }
        };
        match length {
            None => Ok(None),
            Some(0) => {
                let message = "truncate_prompt_tokens must be at least 1, or -1 for what fits the context";
                Err(ApiError::invalid("truncate_prompt_tokens", message))
            }
            Some(length) => Ok(Some(Self { length: usize::try_from(length).ok(), keep_start })),
        }
    }

    /// Truncates a prompt; `capacity`: number of tokens that the context can hold.
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
    use serde_json::json;

    #[test]
    fn prompts_keep_their_end_or_their_beginning() {
        for (length, side, expected) in [
            (json!(2), json!("left"), vec![3, 4]),
            (json!(2), json!("right"), vec![1, 2]),
            (json!(9), json!(null), vec![1, 2, 3, 4]),
            (json!(-1), json!(null), vec![2, 3, 4]),
        ] {
            let body = json!({"truncate_prompt_tokens": length, "truncation_side": side});
            let truncation = Truncation::parse(&mut Fields::new(body.as_object().unwrap().clone())).unwrap().unwrap();
            let mut prompt = vec![1, 2, 3, 4];
            truncation.apply(&mut prompt, 3);
            assert_eq!(prompt, expected, "{body}");
        }
    }
}
