//! Access control: API keys and their rates; refuses new requests during the drain.

use super::rights::{Access, Caller, Rights, cross_site, is_for_admins};
use crate::error::ApiError;
use crate::keyed_hash::KeyedHash;
use crate::lifecycle::{Lifecycle, Phase};
use crate::metrics::Metrics;
use crate::output::Outbox;
use crate::rates::RateExceeded;
use crate::rejection::Rejection;
use crate::tenant::Tenant;
use crate::trace::MayTrace;
use axum::extract::Request;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// True for paths that need no key and are served during the drain: probes, scrapers and the web UI, which holds no
/// data and asks the user for the key.
pub(super) fn is_open(path: &str) -> bool {
    ["/", "/health", "/live", "/ping", "/metrics", "/grpc.health.v1.Health/Check"].contains(&path)
        || path.starts_with("/ui/")
}

/// The client's address, an extension of each request.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub IpAddr);

/// State of the access control.
pub struct Guard {
    /// Rights of callers.
    pub access: Access,
    /// Tells whether the server drains.
    pub lifecycle: Lifecycle,
    /// Counts refusals.
    pub metrics: Arc<Metrics>,
    /// Limits how often failed authentications are logged.
    pub failures: Throttle,
    /// Hashes keys and addresses into tenants.
    pub hasher: KeyedHash,
}

/// Middleware: 403 for pages of other sites and for admin paths without an admin key, 401 without a valid key, 503
/// while the server drains, 429 beyond the rates of a key. Attaches the tenant to the request.
pub async fn guard(guard: &Guard, mut request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    if is_open(request.uri().path()) {
        return next(request).await;
    }
    if let Some(error) = cross_site(&request) {
        return error.into_response();
    }
    let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
    let address = peer.map(|peer| guard.access.proxies.client(peer, request.headers()));
    let Some(Caller { rights, key }) = guard.access.caller(request.headers(), address) else {
        guard.failures.log(|times| {
            let from = address.map_or("an unknown address".into(), |address| address.to_string());
            log::warn!("{times} requests without a valid API key, the last one from {from}");
        });
        discard(request).await;
        let message = "this server needs an API key: send it as \"Authorization: Bearer KEY\" or \"x-api-key: KEY\"";
        let error = ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key");
        return ([(header::WWW_AUTHENTICATE, "Bearer")], error).into_response();
    };
    if rights != Rights::Admin && is_for_admins(&request) {
        let message = "this needs a key of --admin-key or --admin-key-file; without any keys, start the server with \
            --admin-local and call from its own machine";
        return ApiError::new(StatusCode::FORBIDDEN, message).with_code("admin_only").into_response();
    }
    if guard.lifecycle.phase() != Phase::Serving {
        guard.metrics.rejected(Rejection::Draining);
        return ApiError::draining().into_response();
    }
    let tenant = match (&key, address) {
        (Some(key), _) => Tenant::from_key(&key.text, &guard.hasher),
        (None, Some(address)) => Tenant::from_address(address, &guard.hasher),
        (None, None) => Tenant::default(),
    };
    if let Some(outbox) = request.extensions().get::<Arc<Outbox>>() {
        outbox.begin(tenant);
    }
    request.extensions_mut().insert(tenant);
    if rights == Rights::Admin {
        request.extensions_mut().insert(MayTrace);
    }
    if let Some(key) = &key {
        request.extensions_mut().insert(key.allowed.clone());
    }
    if let Some(meter) = key.and_then(|key| key.meter) {
        // Other methods are cheap, such as listing the models.
        if request.method() == Method::POST
            && let Err(exceeded) = meter.request()
        {
            discard(request).await;
            return too_many(&guard.metrics, &exceeded);
        }
        request.extensions_mut().insert(meter);
    }
    next(request).await
}

/// The refusal of a request beyond the rates of its key.
fn too_many(metrics: &Metrics, exceeded: &RateExceeded) -> Response {
    metrics.rejected(exceeded.rejection);
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, exceeded.to_string()).with_code("rate_limit_exceeded");
    error.with_retry_after(exceeded.seconds()).into_response()
}

/// Reads and drops a body before refusing it, within limits: many clients read no response before they have sent
/// everything.
async fn discard(request: Request) {
    const MAX_BYTES: usize = 64 << 20;
    const MAX_TIME: Duration = Duration::from_secs(5);
    // The client waits for the refusal before it sends the body.
    if request.headers().contains_key(header::EXPECT) {
        return;
    }
    let mut frames = request.into_body().into_data_stream();
    let drained = async {
        let mut total = 0;
        while let Some(Ok(frame)) = frames.next().await {
            total += frame.len();
            if total > MAX_BYTES {
                break;
            }
        }
    };
    // Beyond the limits the client may see a broken connection instead of the refusal.
    let _ = tokio::time::timeout(MAX_TIME, drained).await;
}

/// Limits how often a line is logged, and counts the events between two lines.
#[derive(Debug, Default)]
pub struct Throttle(Mutex<(u64, Option<Instant>)>);

impl Throttle {
    /// Minimum time between two lines.
    const INTERVAL: Duration = Duration::from_secs(10);

    /// Counts one event, and passes the number of events since the last line to `write` if a line is due.
    fn log(&self, write: impl FnOnce(u64)) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 += 1;
        if state.1.is_none_or(|last| last.elapsed() >= Self::INTERVAL) {
            write(std::mem::take(&mut state.0));
            state.1 = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_throttle_counts_what_it_does_not_log() {
        let throttle = Throttle::default();
        let mut lines = Vec::new();
        (0..5).for_each(|_| throttle.log(|times| lines.push(times)));
        assert_eq!(lines, [1]);
        throttle.0.lock().unwrap().1 = None;
        throttle.log(|times| lines.push(times));
        assert_eq!(lines, [1, 5]);
    }

    #[test]
    fn the_api_is_not_open() {
        assert!(["/", "/ui/app.js", "/live", "/metrics"].into_iter().all(is_open));
        assert!(!["/v1/models", "/uix", "/load", "/reset_prefix_cache", "//"].into_iter().any(is_open));
    }
}
