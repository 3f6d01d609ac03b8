//! How a handler tells the middleware around it that its response is a stream.

use axum::http::HeaderValue;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::SetOnce;

/// A handler's announcement that its response is a stream, an extension of each request.
#[derive(Debug, Clone, Default)]
pub struct StreamHead(Arc<SetOnce<Announced>>);

/// What a handler announced.
#[derive(Debug)]
pub struct Announced {
    /// When the request had arrived.
    pub received: Instant,
    /// Value of `x-ignored-fields`.
    pub ignored: Option<HeaderValue>,
}

impl StreamHead {
    /// The response will be a stream with this value of `x-ignored-fields`. `received`: when the request had arrived.
    pub fn announce(&self, received: Instant, ignored: Option<&HeaderValue>) {
        // A second announcement would say the same.
        let _ = self.0.set(Announced { received, ignored: ignored.cloned() });
    }

    /// Waits for the announcement.
    pub async fn announced(&self) -> &Announced {
        self.0.wait().await
    }
}
