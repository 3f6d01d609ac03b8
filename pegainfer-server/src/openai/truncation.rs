//! `truncate_prompt_tokens` and `truncation_side`: prompts that are too long are cut.

use super::errors::{ApiError, echo};
use super::fields::Fields;

/// How prompts are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation {
    /// Tokens that stay; `None`: as many as the context has room for.
    length: Option<usize>,
    /// The end goes, not the beginning.
    keep_start: bool,
}

impl Truncation {
    /// Takes both fields out of a body.
    pub fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let length = fields.integer("truncate_prompt_tokens", -1..=i32::MAX.into())?;
        let keep_start = match fields.string("truncation_side")?.as_deref() {
            None | Some("left") => false,
            Some("right") => true,
            Some(other) => {
                let message = format!("truncation_side must be left or right, got {:?}", echo(other));
                return Err(ApiError::invalid("truncation_side", message));
            }
        };
        match length {
            None => Ok(None),
            Some(0) => {
                let message = "truncate_prompt_tokens must be at least 1, or -1 for what the context has room for";
                Err(ApiError::invalid("truncate_prompt_tokens", message))
            }
            Some(length) => Ok(Some(Self { length: usize::try_from(length).ok(), keep_start })),
        }
    }

    /// Cuts a prompt; `room`: tokens that the context has for it.
    pub fn apply(self, prompt: &mut Vec<u32>, room: usize) {
        let length = self.length.unwrap_or(room);
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
            let truncation = Truncation::take(&mut Fields::new(body.as_object().unwrap().clone())).unwrap().unwrap();
            let mut prompt = vec![1, 2, 3, 4];
            truncation.apply(&mut prompt, 3);
            assert_eq!(prompt, expected, "{body}");
        }
    }
}
