//! HTTP server around the API: connections, keys, origins, request ids, deadlines, shutdown.

mod args;
mod connections;
mod cors;
mod guard;
mod lifecycle;
mod open_files;
pub mod request_id;
mod stall;
mod tls;

pub use args::{HttpArgs, Secret, parse_seconds};
pub use connections::serve;
pub use cors::Cors;
pub use guard::ApiKeys;
pub use lifecycle::{Deadline, Lifecycle, Phase};
pub use open_files::raise_open_files;
pub use tls::Tls;

use crate::openai::AppState;
use crate::trace::{self, Tracer};
use axum::Router;
use axum::middleware::from_fn_with_state;
use std::sync::Arc;
use std::time::Duration;

/// Options of the operator for the HTTP server.
#[derive(Debug, Clone)]
pub struct Options {
    /// Whether unknown request fields are refused.
    pub strict: bool,
    /// API keys; if empty, everyone may call.
    pub api_keys: ApiKeys,
    /// Origins of web pages that may call the API.
    pub cors: Cors,
    /// Maximum size of a request body, in bytes.
    pub max_body: usize,
    /// Time after which a request is cancelled.
    pub request_timeout: Option<Duration>,
    /// Time for which a client may be inactive: send no byte of a body, read no byte of a response, or not complete the
    /// head of its next request.
    pub client_timeout: Duration,
    /// Time that open requests have to finish after a signal to stop.
    pub drain_timeout: Duration,
    /// Certificate and key; `None` serves plain HTTP.
    pub tls: Option<Tls>,
    /// Tracer of request stages; `None` traces nothing.
    pub tracer: Option<Arc<Tracer>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            strict: false,
            api_keys: ApiKeys::default(),
            cors: Cors::default(),
            max_body: 8 << 20,
            request_timeout: None,
            client_timeout: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(30),
            tls: None,
            tracer: None,
        }
    }
}

/// Adds the middleware to the API. The outermost layer runs first: every response gets a request id, and browsers may read
/// refusals, too.
pub fn wrap(mut api: Router, state: &Arc<AppState>) -> Router {
    if state.options.tracer.is_some() {
        api = api.layer(from_fn_with_state(state.clone(), trace::attach));
    }
    api.layer(from_fn_with_state(state.clone(), guard::guard))
        .layer(from_fn_with_state(state.clone(), cors::cors))
        .layer(axum::middleware::from_fn(request_id::attach))
}
