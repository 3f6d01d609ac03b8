//! What stands between the network and the API: connections, keys, origins, request ids, deadlines, shutdown.

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

/// What an operator decides about the HTTP side.
#[derive(Debug, Clone)]
pub struct Options {
    /// Unknown request fields are refused.
    pub strict: bool,
    /// Who may call; empty lets everyone.
    pub api_keys: ApiKeys,
    /// Which web pages may call.
    pub cors: Cors,
    /// Bytes of a request body.
    pub max_body: usize,
    /// A request is cancelled after this time.
    pub request_timeout: Option<Duration>,
    /// A client may do nothing for this long: send no byte of a body, read no byte of an answer, or not complete the
    /// head of its next request.
    pub client_timeout: Duration,
    /// Open requests may take this long after a signal to stop.
    pub drain_timeout: Duration,
    /// Certificate and key; `None` serves plain HTTP.
    pub tls: Option<Tls>,
    /// Where the stages of requests go; `None` traces nothing.
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

/// Puts the API behind its guards. The outermost layer runs first: every answer gets a request id, and a browser may read
/// refusals, too.
pub fn wrap(mut api: Router, state: &Arc<AppState>) -> Router {
    if state.options.tracer.is_some() {
        api = api.layer(from_fn_with_state(state.clone(), trace::attach));
    }
    api.layer(from_fn_with_state(state.clone(), guard::guard))
        .layer(from_fn_with_state(state.clone(), cors::cors))
        .layer(axum::middleware::from_fn(request_id::attach))
}
