//! Errors in the shape of the called API.
//!
//! OpenAI's shape is `{"error": {"message", "type", "param", "code"}}`, where `code` is a string or null (vLLM repeats
//! the HTTP status there). Anthropic's is `{"type": "error", "error": {"type", "message"}, "request_id"}`. An
//! [`ApiError`] becomes a response in OpenAI's shape. On Anthropic's routes, the middleware `http::error_shape`
//! replaces it; it wraps all handlers and refusals.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pegainfer_core::engine::SubmitError;
use pegainfer_core::sampling::SamplingError;
pub use pegainfer_terminal::printable::truncate_for_error;
use schemars::JsonSchema;
use serde::Serialize;

/// Header with the number of the engine that has to serve a request, as vLLM names it.
pub const ENGINE_HEADER: &str = "X-data-parallel-rank";

/// The error response to a request that cannot be served.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    /// Seconds until the client may try again.
    retry_after: Option<u64>,
}

/// An error in the shape of OpenAI's API.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub struct OpenAiError<'a> {
    /// The error.
    error: OpenAiDetail<'a>,
}

/// Details of the error.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ErrorDetail")]
struct OpenAiDetail<'a> {
    /// One sentence.
    message: &'a str,
    /// `invalid_request_error` or `server_error`.
    r#type: &'static str,
    /// The request field at fault.
    param: Option<&'a str>,
    /// The error in one word.
    code: Option<&'static str>,
}

/// An error in the shape of Anthropic's API, also an event inside a stream that has already begun.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AnthropicError")]
pub struct AnthropicError<'a> {
    /// Always `error`.
    #[schemars(extend("const" = "error"))]
    r#type: &'static str,
    /// The error.
    error: AnthropicDetail<'a>,
    /// Id of the request; not in events.
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

/// Details of the error.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AnthropicErrorDetail")]
struct AnthropicDetail<'a> {
    /// Anthropic's name of the status.
    r#type: &'static str,
    /// One sentence.
    message: &'a str,
}

/// The event `error` of OpenAI's Responses API, where no response has begun.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ErrorEvent")]
pub struct ErrorEvent<'a> {
    /// Always `error`.
    #[schemars(extend("const" = "error"))]
    r#type: &'static str,
    /// The error in one word.
    code: Option<&'static str>,
    /// One sentence.
    message: &'a str,
    /// The request field at fault.
    param: Option<&'a str>,
    /// Always 0: nothing came before.
    sequence_number: usize,
}

/// Code of refusals that are worth a retry.
const OVERLOADED: &str = "server_overloaded";
const DRAINING: &str = "server_draining";

impl ApiError {
    /// An error with this status; `message` is one sentence for the client.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400 about one field.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).with_param(param)
    }

    /// 500: a failure of the server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503: the server has too much to do.
    pub fn overloaded(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(OVERLOADED)
    }

    /// 503: the server is about to stop.
    pub fn draining() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping; try again later").with_code(DRAINING)
    }

    /// Replaces the status.
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Names the field at fault.
    pub fn with_param(mut self, param: &str) -> Self {
        self.param = Some(truncate_for_error(param));
        self
    }

    /// Adds a machine-readable code.
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// Says when the client may try again, in whole seconds from now.
    pub fn with_retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// One sentence for the client.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Maps a refused submit to a response. `prompt_field` is the client's name of the prompt field.
    pub fn from_submit(error: SubmitError, prompt_field: &'static str) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(OVERLOADED),
            SubmitError::NoSuchEngine { .. } => Self::invalid(ENGINE_HEADER, message),
            SubmitError::EngineLost { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
                .with_param(ENGINE_HEADER)
                .with_code("engine_stopped"),
            SubmitError::NotCached { .. } => {
                Self::new(StatusCode::PRECONDITION_FAILED, message).with_code("prefix_not_cached")
            }
            SubmitError::EngineStopped => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("engine_stopped")
            }
            SubmitError::PromptTooLong { prompt, max_model_len } => {
                // Clients recognise OpenAI's words, to shorten the conversation and try again.
                let message = format!(
                    "This model's maximum context length is {max_model_len} tokens. However, your prompt has {prompt} tokens."
                );
                Self::invalid(prompt_field, message).with_code("context_length_exceeded")
            }
            SubmitError::ContextExceeded { .. } | SubmitError::NeverFits { .. } => {
                Self::invalid(prompt_field, message).with_code("context_length_exceeded")
            }
            SubmitError::EmptyPrompt | SubmitError::InvalidToken { .. } => Self::invalid(prompt_field, message),
            SubmitError::InvalidImages { .. } => Self::invalid(prompt_field, message),
            SubmitError::NothingToGenerate => Self::invalid("max_tokens", message),
            SubmitError::TooManyLogprobs { .. } => Self::invalid("logprobs", message),
            SubmitError::Unsupported { field } => Self::invalid(field, message).with_code("unsupported_parameter"),
        }
    }

    /// The code, or a word for the status: the reason of the refusal, for counters.
    pub fn reason(&self) -> &'static str {
        self.code.unwrap_or(match self.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "no_permission",
            StatusCode::NOT_FOUND => "not_found",
            StatusCode::METHOD_NOT_ALLOWED => "method_not_allowed",
            StatusCode::REQUEST_TIMEOUT => "body_too_slow",
            StatusCode::PAYLOAD_TOO_LARGE => "body_too_large",
            StatusCode::UNSUPPORTED_MEDIA_TYPE => "content_type",
            StatusCode::TOO_MANY_REQUESTS => "too_many_requests",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request",
        })
    }

    fn kind(&self) -> &'static str {
        if self.status.is_server_error() { "server_error" } else { "invalid_request_error" }
    }

    /// The error in the shape of OpenAI's API, also an event inside a stream that has already begun.
    pub fn openai(&self) -> OpenAiError<'_> {
        let (param, code) = (self.param.as_deref(), self.code);
        OpenAiError { error: OpenAiDetail { message: &self.message, r#type: self.kind(), param, code } }
    }

    /// The JSON of [`Self::openai`].
    pub fn body(&self) -> String {
        // Serialising strings cannot fail.
        serde_json::to_string(&self.openai()).unwrap_or_default()
    }

    /// The event `error` of OpenAI's Responses API, where no response has begun.
    pub fn responses_event(&self) -> ErrorEvent<'_> {
        let (param, code) = (self.param.as_deref(), self.code);
        ErrorEvent { r#type: "error", code, message: &self.message, param, sequence_number: 0 }
    }

    /// The code of a failed response, one of those in OpenAI's Responses API. Clients repeat a request only after a
    /// failure of the server.
    pub fn responses_code(&self) -> &'static str {
        if self.status.is_server_error() { "server_error" } else { "invalid_prompt" }
    }

    /// The error in the shape of Anthropic's API. Events have no request id.
    pub fn anthropic<'a>(&'a self, request_id: Option<&'a str>) -> AnthropicError<'a> {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        AnthropicError { r#type: "error", error: AnthropicDetail { r#type: kind, message: &self.message }, request_id }
    }
}

impl From<SamplingError> for ApiError {
    fn from(error: SamplingError) -> Self {
        Self::invalid(error.field, error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response = (self.status, [(header::CONTENT_TYPE, json)], self.body()).into_response();
        let is_temporary =
            self.status == StatusCode::TOO_MANY_REQUESTS || matches!(self.code, Some(OVERLOADED | DRAINING));
        // Requests end within seconds, and a replica can take over immediately, so a retry after one second has a fair
        // chance.
        if let Some(seconds) = self.retry_after.or(is_temporary.then_some(1)) {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        // For `http::error_shape` and for the counters of refusals.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_body_has_the_shape_of_openai() {
        let error = ApiError::invalid("n", "n must be 1").with_code("unsupported_parameter");
        assert_eq!(
            error.body(),
            r#"{"error":{"message":"n must be 1","type":"invalid_request_error","param":"n","code":"unsupported_parameter"}}"#
        );
    }

    #[test]
    fn anthropic_has_a_type_for_each_status() {
        for (status, kind) in [
            (400, "invalid_request_error"),
            (401, "authentication_error"),
            (403, "permission_error"),
            (404, "not_found_error"),
            (405, "invalid_request_error"),
            (413, "request_too_large"),
            (429, "rate_limit_error"),
            (500, "api_error"),
            (503, "overloaded_error"),
            (504, "timeout_error"),
        ] {
            let error = ApiError::new(StatusCode::from_u16(status).unwrap(), "a sentence");
            let body = serde_json::to_value(error.anthropic(Some("id"))).unwrap();
            let expected =
                json!({"type": "error", "error": {"type": kind, "message": "a sentence"}, "request_id": "id"});
            assert_eq!(body, expected, "{status}");
        }
    }
}
