//! A panic costs one request, not the server: its response is a 500, or its stream ends with an error event.

use super::sse::{error_event, is_stream};
use crate::api_style::ApiStyle;
use crate::error::ApiError;
use crate::grpc_status;
use crate::metrics::Choices;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use hyper::body::Frame;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Middleware: turns a panic of a handler into a 500, and one of a stream that has begun into its last event.
pub async fn catch_panic(request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    let path = request.uri().path().to_string();
    let style = ApiStyle::of(request.extensions());
    let choices = request.extensions().get().cloned();
    match AssertUnwindSafe(next(request)).catch_unwind().await {
        Ok(response) if is_stream(response.headers()) || style == ApiStyle::Grpc => {
            response.map(|inner| Body::new(CaughtBody { inner: Some(inner), path, style, choices }))
        }
        Ok(response) => response,
        Err(_) => panicked(&path).into_response(),
    }
}

/// Logs a panic; returns the error for the client.
fn panicked(path: &str) -> ApiError {
    log::error!("a handler of {path} panicked; this is a bug in pegainfer");
    ApiError::internal("an internal error occurred; the server's log has the details")
}

/// The body of a stream.
struct CaughtBody {
    /// `None` after a panic.
    inner: Option<Body>,
    path: String,
    style: ApiStyle,
    choices: Option<Arc<Choices>>,
}

impl HttpBody for CaughtBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        match catch_unwind(AssertUnwindSafe(|| Pin::new(inner).poll_frame(cx))) {
            Ok(frame) => frame,
            Err(_) => {
                // Its state is unknown; dropping it cancels the generation.
                let broken = self.inner.take();
                let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
                let error = panicked(&self.path);
                if let Some(choices) = &self.choices {
                    choices.failed(&error);
                }
                Poll::Ready(Some(Ok(match self.style {
                    ApiStyle::Grpc => Frame::trailers(grpc_status::trailers(Some(&error))),
                    style => Frame::data(error_event(style, &error)),
                })))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(HttpBody::is_end_stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::body::to_bytes;
    use axum::middleware::{Next, from_fn};
    use axum::routing::get;
    use futures_util::stream;
    use std::convert::Infallible;
    use tower::Service;

    async fn panics() -> Result<Response, Infallible> {
        panic!("a bug")
    }

    /// A stream that panics after its first bytes.
    async fn panics_late() -> Response {
        let bytes = stream::unfold(0, |n| async move {
            assert!(n == 0, "a bug");
            Some((Ok::<_, Infallible>(Bytes::from_static(b"data: x\n\n")), n + 1))
        });
        let mut response = Body::from_stream(bytes).into_response();
        super::super::sse::stream_headers(response.headers_mut());
        response
    }

    async fn response(path: &str, style: ApiStyle, choices: Arc<Choices>) -> Response {
        let mut router: Router = Router::new()
            .route("/bug", get(panics))
            .route("/late", get(panics_late))
            .route("/fine", get(|| async { "fine" }))
            .layer(from_fn(|request, next: Next| catch_panic(request, async |request| next.run(request).await)));
        let mut request = Request::get(path).body(Body::empty()).unwrap();
        request.extensions_mut().insert(style);
        request.extensions_mut().insert(choices);
        router.call(request).await.unwrap()
    }

    #[tokio::test]
    async fn a_panic_costs_one_request() {
        for (path, status) in [("/bug", 500), ("/fine", 200)] {
            assert_eq!(response(path, ApiStyle::OpenAi, Arc::default()).await.status(), status, "{path}");
        }
    }

    #[tokio::test]
    async fn a_panic_within_a_stream_is_its_last_event_and_counts() {
        for (style, event) in [
            (ApiStyle::OpenAi, "data: {\"error\":{\"message\":\"an internal error"),
            (ApiStyle::Responses, "event: error\ndata: {\"type\":\"error\",\"code\":null,\"message\":\"an internal"),
            (ApiStyle::Anthropic, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\""),
        ] {
            let choices = Arc::new(Choices::default());
            let response = response("/late", style, choices.clone()).await;
            let text = to_bytes(response.into_body(), usize::MAX).await.unwrap();
            let text = String::from_utf8(text.to_vec()).unwrap();
            let rest = text.strip_prefix("data: x\n\n").unwrap();
            assert!(rest.starts_with(event), "{rest}");
            assert_eq!(choices.failure().map(|failure| failure.status.as_u16()), Some(500));
        }
    }
}
