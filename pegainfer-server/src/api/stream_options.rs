//! `stream` and `stream_options`.

use super::fields::Fields;
use crate::error::{ApiError, truncate_for_error};

/// Options of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// Send one more chunk at the end, with the token counts.
    pub include_usage: bool,
    /// Send the token counts so far in every chunk.
    pub continuous_usage: bool,
}

impl StreamOptions {
    /// Parses `stream` and `stream_options`; `None`: the response is one JSON object.
    pub fn parse(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
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
        // OpenAI pads chunks against traffic analysis by default; this server does not.
        if options.bool("include_obfuscation")?.unwrap_or(false) {
            return Err(ApiError::invalid("stream_options", "stream_options.include_obfuscation is not implemented"));
        }
        match options.rest().keys().next() {
            Some(name) => Err(ApiError::invalid(
                "stream_options",
                format!("unknown field stream_options.{}", truncate_for_error(name)),
            )),
            None => Ok(Some(parsed)),
        }
    }
}
