//! Sends the head of a stream early, while its request is still being prepared: rendering, tokenization or its grammar
//! takes long or waits for others.

use super::sse::{error_event, stream_headers};
use super::stream_head::StreamHead;
use crate::api_style::ApiStyle;
use crate::error::ApiError;
use crate::lifecycle::{Deadline, Lifecycle};
use crate::metrics::Choices;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Sent while the handler works.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";
/// Interval between reports about what the handler waits for.
const PROGRESS: Duration = Duration::from_secs(1);

/// Options of the middleware.
#[derive(Debug, Clone)]
pub struct EarlyHead {
    /// Maximum time between two bytes.
    pub interval: Duration,
    /// Ends the preparation when the server stops.
    pub lifecycle: Lifecycle,
}

/// A stream whose head was sent.
enum Early {
    Preparing(Preparing),
    Streaming(BodyDataStream),
    Done,
}

/// A request whose handler is still running.
struct Preparing {
    handler: BoxFuture<'static, Response>,
    /// Resolves when the request has to be cancelled: `http::deadline` only knows of requests without a head.
    cutoff: BoxFuture<'static, ApiError>,
    style: ApiStyle,
    /// Results of the choices, for the log line of a refused stream.
    choices: Option<Arc<Choices>>,
    interval: Duration,
    /// Knows what the handler waits for.
    head: StreamHead,
}

impl Preparing {
    /// Time until the next comment: what takes long is reported every second.
    fn pause(&self) -> Duration {
        if self.head.wait().is_some() { self.interval.min(PROGRESS) } else { self.interval }
    }

    /// A comment that keeps the connection open, and says what the handler waits for.
    fn comment(&self) -> Bytes {
        let comment = |(what, seconds)| format!(": {what}, {seconds} s\n\n").into();
        self.head.wait().map_or(Bytes::from_static(KEEP_ALIVE), comment)
    }

    /// The last event of a refused stream.
    fn refusal(&self, error: &ApiError) -> Bytes {
        if let Some(choices) = &self.choices {
            choices.failed(error);
        }
        error_event(self.style, error)
    }
}

/// Middleware: sends the head of a stream if the handler announced one and is still running when the head is due. Later
/// refusals are events, as is the deadline, which drops the handler.
pub async fn send_early(State(options): State<EarlyHead>, mut request: Request, next: Next) -> Response {
    let head = StreamHead::default();
    let deadline = request.extensions().get::<Deadline>().copied();
    let (style, choices) = (ApiStyle::of(request.extensions()), request.extensions().get().cloned());
    request.extensions_mut().insert(head.clone());
    let mut handler: BoxFuture<'static, Response> = Box::pin(next.run(request));
    let ignored = tokio::select! {
        biased;
        response = &mut handler => return response,
        ignored = head.due() => ignored,
    };
    let first = stream::once(async { Ok(Bytes::from_static(KEEP_ALIVE)) });
    let cutoff = options.lifecycle.cutoff(deadline);
    let preparing = Preparing { handler, cutoff, style, choices, interval: options.interval, head };
    let rest = stream::unfold(Early::Preparing(preparing), next_bytes);
    let mut response = Body::from_stream(first.chain(rest)).into_response();
    stream_headers(response.headers_mut());
    if let Some(ignored) = ignored {
        response.headers_mut().insert("x-ignored-fields", ignored);
    }
    response
}

async fn next_bytes(early: Early) -> Option<(Result<Bytes, axum::Error>, Early)> {
    let mut body = match early {
        Early::Preparing(mut preparing) => {
            let pause = preparing.pause();
            let response = tokio::select! {
                biased;
                response = &mut preparing.handler => response,
                error = &mut preparing.cutoff => return Some((Ok(preparing.refusal(&error)), Early::Done)),
                () = sleep(pause) => {
                    return Some((Ok(preparing.comment()), Early::Preparing(preparing)));
                }
            };
            if let Some(error) = response.extensions().get::<ApiError>() {
                return Some((Ok(preparing.refusal(error)), Early::Done));
            }
            response.into_body().into_data_stream()
        }
        Early::Streaming(body) => body,
        Early::Done => return None,
    };
    let bytes = body.next().await?;
    Some((bytes, Early::Streaming(body)))
}

#[cfg(test)]
mod tests {
    use super::super::stream_head::HEAD_DELAY;
    use super::*;
    use axum::Router;
    use axum::extract::Extension;
    use axum::http::HeaderValue;
    use axum::http::StatusCode;
    use axum::middleware::from_fn_with_state;
    use axum::routing::get;
    use std::time::Instant;
    use tokio::sync::Notify;
    use tower::Service;

    const INTERVAL: Duration = Duration::from_millis(20);

    /// The response of a handler that announces a stream and responds when told to.
    async fn response(style: ApiStyle, result: Result<&'static str, ApiError>) -> (Response, Arc<Notify>, Lifecycle) {
        response_by(None, style, Arc::default(), result).await
    }

    /// Like [`response`], with a deadline. The handler holds a clone of the returned `Arc`.
    async fn response_by(
        deadline: Option<Deadline>,
        style: ApiStyle,
        choices: Arc<Choices>,
        result: Result<&'static str, ApiError>,
    ) -> (Response, Arc<Notify>, Lifecycle) {
        let go = Arc::new(Notify::new());
        let told = go.clone();
        let handler = move |Extension(head): Extension<StreamHead>| async move {
            head.announce(Instant::now() - HEAD_DELAY, Some(&HeaderValue::from_static("odd")));
            told.notified().await;
            result
        };
        // The server counts as closing when it is dropped.
        let lifecycle = Lifecycle::default();
        let options = EarlyHead { interval: INTERVAL, lifecycle: lifecycle.clone() };
        let mut router: Router = Router::new().route("/", get(handler)).layer(from_fn_with_state(options, send_early));
        let mut request = Request::get("/").body(Body::empty()).unwrap();
        request.extensions_mut().insert(style);
        request.extensions_mut().insert(choices);
        if let Some(deadline) = deadline {
            request.extensions_mut().insert(deadline);
        }
        (router.call(request).await.unwrap(), go, lifecycle)
    }

    async fn rest(mut body: BodyDataStream) -> String {
        let mut text = Vec::new();
        while let Some(bytes) = body.next().await {
            text.extend_from_slice(&bytes.unwrap());
        }
        String::from_utf8(text).unwrap()
    }

    #[tokio::test]
    async fn the_head_comes_before_the_handler_is_done() {
        let (response, go, _lifecycle) = response(ApiStyle::OpenAi, Ok("data: x\n\n")).await;
        assert_eq!(
            (response.status(), &response.headers()["x-ignored-fields"]),
            (StatusCode::OK, &HeaderValue::from_static("odd"))
        );
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        let mut body = response.into_body().into_data_stream();
        for _ in 0..3 {
            assert_eq!(body.next().await.unwrap().unwrap(), KEEP_ALIVE);
        }
        go.notify_one();
        let text = rest(body).await;
        assert_eq!(text.trim_start_matches(": keep-alive\n\n"), "data: x\n\n");
    }

    #[tokio::test]
    async fn a_refusal_after_the_head_is_an_event_of_the_api() {
        let error = || ApiError::invalid("prompt", "no");
        for (style, expected) in [
            (
                ApiStyle::Anthropic,
                "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\"",
            ),
            (
                ApiStyle::Responses,
                "event: error\ndata: {\"type\":\"error\",\"code\":null,\"message\":\"no\",\"param\":\"prompt\"",
            ),
            (ApiStyle::OpenAi, "data: {\"error\":{\"message\":\"no\""),
        ] {
            let choices = Arc::new(Choices::default());
            let (response, go, _lifecycle) = response_by(None, style, choices.clone(), Err(error())).await;
            go.notify_one();
            let text = rest(response.into_body().into_data_stream()).await;
            let event = text.trim_start_matches(": keep-alive\n\n");
            assert!(event.starts_with(expected), "{event}");
            assert_eq!(event.ends_with("data: [DONE]\n\n"), style == ApiStyle::OpenAi);
            let failure = choices.failure().map(|failure| (failure.status.as_u16(), failure.reason));
            assert_eq!(failure, Some((400, "invalid_request")));
        }
    }

    #[tokio::test]
    async fn the_deadline_ends_what_is_prepared_with_an_event_of_the_api() {
        for (style, expected) in [
            (ApiStyle::Anthropic, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"timeout_error\""),
            (ApiStyle::Responses, "event: error\ndata: {\"type\":\"error\",\"code\":\"request_timeout\""),
            (
                ApiStyle::OpenAi,
                "data: {\"error\":{\"message\":\"the request was cancelled: it took longer than 0.2 s\"",
            ),
        ] {
            let choices = Arc::new(Choices::default());
            let deadline = Some(Deadline::after(Duration::from_millis(200)));
            let (response, go, _lifecycle) = response_by(deadline, style, choices.clone(), Ok("data: x\n\n")).await;
            assert_eq!(response.status(), StatusCode::OK);
            let text = rest(response.into_body().into_data_stream()).await;
            let event = text.trim_start_matches(": keep-alive\n\n");
            assert!(event.starts_with(expected), "{event}");
            assert_eq!(Arc::strong_count(&go), 1, "the handler is gone");
            assert_eq!(choices.failure().map(|failure| failure.reason), Some("request_timeout"));
        }
    }
}
