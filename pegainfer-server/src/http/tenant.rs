//! Attaches to each request whose it is.

use super::guard::{Peer, sent_key};
use crate::tenant::Tenant;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;

/// Middleware behind the access control: attaches the tenant to the request. `has_keys`: callers have to send a key.
pub async fn attach(State(has_keys): State<bool>, mut request: Request, next: Next) -> Response {
    let key = sent_key(request.headers()).filter(|_| has_keys);
    let address = request.extensions().get::<Peer>().map(|Peer(address)| *address);
    let tenant = key.map(Tenant::of_key).or(address.map(Tenant::of_address)).unwrap_or_default();
    request.extensions_mut().insert(tenant);
    next.run(request).await
}
