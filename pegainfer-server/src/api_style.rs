//! The API of a route, an extension of each request.

use crate::error::ApiError;
use crate::ids::ANTHROPIC_HEADER;
use axum::http::{Extensions, HeaderName};

/// The API of a route, which decides the shape of errors and headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ApiStyle {
    /// OpenAI's older APIs, and the endpoints of this server.
    #[default]
    OpenAi,
    /// OpenAI's Responses API.
    Responses,
    /// Anthropic's API.
    Anthropic,
}

impl ApiStyle {
    /// The style of a request's route.
    pub fn of(extensions: &Extensions) -> Self {
        extensions.get().copied().unwrap_or_default()
    }

    /// A header that repeats the id of the request.
    pub fn id_header(self) -> Option<HeaderName> {
        (self == Self::Anthropic).then_some(ANTHROPIC_HEADER)
    }

    /// True if errors have a different body than OpenAI's, which is the [`ApiError`] itself.
    pub fn reshapes_errors(self) -> bool {
        self == Self::Anthropic
    }

    /// The body of an error if it differs from OpenAI's.
    pub fn error_body(self, error: &ApiError, request_id: &str) -> Option<Vec<u8>> {
        // Serialising strings cannot fail.
        let body = || serde_json::to_vec(&error.anthropic(Some(request_id))).unwrap_or_default();
        self.reshapes_errors().then(body)
    }
}
