//! Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`.
//!
//! `code` is a string or null, as OpenAI has it (vLLM repeats the HTTP status there).

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pegainfer_core::engine::SubmitError;
use pegainfer_core::sampling::SamplingError;
use serde::Serialize;

/// What a request is answered with when it cannot be served.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Detail<'a>,
}

#[derive(Serialize)]
struct Detail<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

/// Characters of client input that an error repeats at most: a small request must not cause a large answer.
const MAX_ECHO: usize = 120;

/// Codes of the refusals that pass by themselves.
const OVERLOADED: &str = "server_overloaded";
const DRAINING: &str = "server_draining";

/// Client input, shortened for an error message.
pub fn echo(input: &str) -> String {
    match input.char_indices().nth(MAX_ECHO) {
        Some((end, _)) => format!("{}…", &input[..end]),
        None => input.to_string(),
    }
}

impl ApiError {
    /// An error of this status; `message` is one sentence for the client.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// 400 about one field.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).with_param(param)
    }

    /// 500: our fault.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503: the server is about to stop.
    pub fn draining() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping; try again later").with_code(DRAINING)
    }

    /// Names the field at fault.
    pub fn with_param(mut self, param: &str) -> Self {
        self.param = Some(echo(param));
        self
    }

    /// Adds a machine-readable code.
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The same about a field that the client knows by another name.
    pub fn renamed(mut self, from: &str, to: &str) -> Self {
        if self.param.as_deref() == Some(from) {
            self.message = self.message.replace(from, to);
            self.param = Some(to.to_owned());
        }
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

    /// The refusal of a submit. `prompt_field` is what the client calls its prompt.
    pub fn from_submit(error: SubmitError, prompt_field: &'static str) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::QueueFull { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(OVERLOADED),
            SubmitError::EngineStopped => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("engine_stopped")
            }
            SubmitError::PromptTooLong { .. } | SubmitError::ContextExceeded { .. } | SubmitError::NeverFits { .. } => {
                Self::invalid(prompt_field, message).with_code("context_length_exceeded")
            }
            SubmitError::EmptyPrompt | SubmitError::InvalidToken { .. } => Self::invalid(prompt_field, message),
            SubmitError::NothingToGenerate => Self::invalid("max_tokens", message),
            SubmitError::TooManyLogprobs { .. } => Self::invalid("logprobs", message),
            SubmitError::Unsupported { field } => Self::invalid(field, message).with_code("unsupported_parameter"),
        }
    }

    fn kind(&self) -> &'static str {
        if self.status.is_server_error() { "server_error" } else { "invalid_request_error" }
    }

    /// The JSON body, also used as an event inside a stream that has already begun.
    pub fn body(&self) -> String {
        let error =
            Detail { message: &self.message, r#type: self.kind(), param: self.param.as_deref(), code: self.code };
        // Strings only: serialisation cannot fail.
        serde_json::to_string(&Body { error }).unwrap_or_default()
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
        if matches!(self.code, Some(OVERLOADED | DRAINING)) {
            // Requests end within seconds, and a replica takes over at once: who waits a second has a fair chance.
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_has_the_shape_of_openai() {
        let error = ApiError::invalid("n", "n must be 1").with_code("unsupported_parameter");
        assert_eq!(
            error.body(),
            r#"{"error":{"message":"n must be 1","type":"invalid_request_error","param":"n","code":"unsupported_parameter"}}"#
        );
    }

    #[test]
    fn long_input_is_not_echoed_whole() {
        assert_eq!(echo("short"), "short");
        assert_eq!(echo(&"é".repeat(500)).chars().count(), MAX_ECHO + 1);
    }
}
