//! `stream` and `stream_options`.

use super::schema::generation::StreamOptionsFields;
use crate::error::ApiError;

/// Options of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamOptions {
    /// Send one more chunk at the end, with the token counts.
    pub include_usage: bool,
    /// Send the token counts so far in every chunk.
    pub continuous_usage: bool,
}

impl StreamOptions {
    /// The options of both fields; `None` if the response is one JSON object.
    pub fn new(stream: Option<bool>, options: Option<&StreamOptionsFields>) -> Result<Option<Self>, ApiError> {
        let stream = stream.unwrap_or(false);
        let Some(options) = options else { return Ok(stream.then(Self::default)) };
        let invalid = |message: &str| Err(ApiError::invalid("stream_options", message));
        if !stream {
            return invalid("stream_options is only allowed together with \"stream\": true");
        }
        // OpenAI pads chunks against traffic analysis by default; this server does not.
        if options.include_obfuscation == Some(true) {
            return invalid("stream_options.include_obfuscation is not implemented");
        }
        Ok(Some(Self {
            include_usage: options.include_usage.unwrap_or(false),
            continuous_usage: options.continuous_usage_stats.unwrap_or(false),
        }))
    }
}
