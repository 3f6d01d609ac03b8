//! One log line and one count per HTTP request, with the outcome of its choices.

use super::Metrics;
use super::choices::{Choices, Summary};
use super::outcome::Outcome;
use crate::error::ApiError;
use crate::ids;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Status of a request whose client left before there was a response, as in nginx's logs.
const CLIENT_CLOSED: u16 = 499;

/// Counts and logs a request when dropped: after its response, or when the client leaves.
struct Access {
    metrics: Arc<Metrics>,
    id: String,
    method: Method,
    /// Template of the path. The client's own path would be a label without bound.
    path: Option<MatchedPath>,
    started: Instant,
    /// Status of the response, or of the error that ends its stream.
    status: u16,
    choices: Arc<Choices>,
}

impl Drop for Access {
    fn drop(&mut self) {
        let path = self.path.as_ref().map_or("unmatched", MatchedPath::as_str);
        let total = self.started.elapsed();
        let all = self.choices.summary();
        if let Some(failure) = self.choices.failure() {
            self.status = failure.status.as_u16();
            self.metrics.http.refused(failure.reason);
        }
        self.metrics.http.observe(method_label(&self.method), path, self.status, total);
        if all.choices > 0 && matches!(all.outcome, Some(Outcome::Stop | Outcome::Length)) {
            self.choices.model().iter().for_each(|model| model.longest_choice(all.longest));
        }
        // Probes and scrapes come every few seconds.
        let level = if self.method == Method::GET && self.status < 400 || self.status == 401 {
            log::Level::Debug
        } else {
            log::Level::Info
        };
        if !log::log_enabled!(level) {
            return;
        }
        let model = self.choices.model().map(|model| &*model.name);
        let outcome = all.outcome.map_or("-", Outcome::name);
        let ms = |time: Option<Duration>| time.map(|time| (time.as_secs_f64() * 1e4).round() / 10.0);
        let shown = |time: Option<Duration>| ms(time).map_or("-".into(), |ms| format!("{ms} ms"));
        let (id, method, status) = (self.id.as_str(), self.method.as_str(), self.status);
        let Summary { choices, prompt_tokens, cached_tokens, tokens, queued, first_token, per_token, .. } = all;
        let did = match choices {
            0 => String::new(),
            _ => format!(
                "{prompt_tokens} prompt tokens ({cached_tokens} cached), {tokens} generated, {outcome}; queued {}, first token {}, \
                 per token {}, ",
                shown(queued),
                shown(first_token),
                shown(per_token)
            ),
        };
        log::log!(
            level,
            request_id = id, method = method, path = path, status = status, model = model, choices = choices, prompt_tokens = prompt_tokens,
            cached_tokens = cached_tokens, generated_tokens = tokens, finish_reason = outcome, queued_ms = ms(queued),
            first_token_ms = ms(first_token), per_token_ms = ms(per_token), total_ms = ms(Some(total));
            "{method} {path} {status} {id}: {did}total {}", shown(Some(total))
        );
    }
}

/// The method as a label; other methods share one, because clients may send any word.
fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::OPTIONS => "OPTIONS",
        Method::HEAD => "HEAD",
        _ => "other",
    }
}

/// Middleware: counts and logs each request. It wraps everything that can refuse one, inside the middleware that
/// attaches the id.
pub async fn observe(
    metrics: Arc<Metrics>,
    mut request: Request,
    next: impl AsyncFnOnce(Request) -> Response,
) -> Response {
    let id = request.headers().get(ids::HEADER).and_then(|id| id.to_str().ok()).unwrap_or_default().to_string();
    let choices = Arc::new(Choices::default());
    let mut access = Access {
        metrics,
        id,
        method: request.method().clone(),
        path: request.extensions().get().cloned(),
        started: Instant::now(),
        status: CLIENT_CLOSED,
        choices: choices.clone(),
    };
    request.extensions_mut().insert(choices);
    let response = next(request).await;
    access.status = response.status().as_u16();
    if let Some(error) = response.extensions().get::<ApiError>() {
        // A refused gRPC call has status 200.
        access.status = error.status().as_u16();
        access.metrics.http.refused(error.reason());
    }
    response.map(|inner| Body::new(ObservedBody { inner, _access: access }))
}

/// A response body that reports its end.
struct ObservedBody {
    /// Dropped first, so that all choices have ended.
    inner: Body,
    _access: Access,
}

impl HttpBody for ObservedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
