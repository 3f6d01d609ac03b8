//! `stream` and `stream_options`.

use super::errors::{ApiError, echo};
use super::fields::Fields;

/// What may be asked of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// One more chunk at the end, with the token counts.
    pub include_usage: bool,
    /// Token counts so far on every chunk.
    pub continuous_usage: bool,
}

impl StreamOptions {
    /// Takes `stream` and `stream_options` out of a body; `None`: one JSON answer.
    pub fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let stream = fields.bool("stream")?.unwrap_or(false);
        let Some(options) = fields.object("stream_options")? else {
            return Ok(stream.then(Self::default));
        };
        if !stream {
            return Err(ApiError::invalid(
                "stream_options",
                "stream_options is only allowed together with \"stream\": true",
            ));
        }
        let mut options = Fields::new(options);
        let parsed = Self {
            include_usage: options.bool("include_usage")?.unwrap_or(false),
            continuous_usage: options.bool("continuous_usage_stats")?.unwrap_or(false),
        };
        // OpenAI pads chunks against traffic analysis by default; ours never are.
        if options.bool("include_obfuscation")?.unwrap_or(false) {
            return Err(ApiError::invalid("stream_options", "stream_options.include_obfuscation is not implemented"));
        }
        match options.rest().keys().next() {
            Some(name) => {
                Err(ApiError::invalid("stream_options", format!("unknown field stream_options.{}", echo(name))))
            }
            None => Ok(Some(parsed)),
        }
    }
}
