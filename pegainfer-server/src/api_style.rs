//! The API of a route, an extension of each request.

use crate::error::ApiError;
use crate::grpc_status;
use crate::ids::ANTHROPIC_HEADER;
use axum::http::{Extensions, HeaderName, header};
use axum::response::Response;

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
    /// vLLM's gRPC services.
    Grpc,
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

    /// True if errors have a different shape than OpenAI's, which is the [`ApiError`] itself.
    pub fn reshapes_errors(self) -> bool {
        matches!(self, Self::Anthropic | Self::Grpc)
    }

    /// The response with an error in the shape of this API. `response` has it in OpenAI's shape.
    pub fn reshape(self, error: &ApiError, mut response: Response, request_id: &str) -> Response {
        match self {
            Self::OpenAi | Self::Responses => response,
            Self::Anthropic => {
                response.headers_mut().remove(header::CONTENT_LENGTH);
                // Serialising strings cannot fail.
                let body = serde_json::to_vec(&error.anthropic(Some(request_id))).unwrap_or_default();
                *response.body_mut() = body.into();
                response
            }
            Self::Grpc => {
                let mut refusal = grpc_status::refusal(error);
                // Seconds until the client may try again are metadata.
                if let Some(after) = response.headers_mut().remove(header::RETRY_AFTER) {
                    refusal.headers_mut().insert(header::RETRY_AFTER, after);
                }
                refusal
            }
        }
    }
}
