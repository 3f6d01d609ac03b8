//! `Prefer: if-available`: a request that is only worth serving if its prompt is in the prefix cache, as llm-d's router
//! asks a decode worker before it sends the prompt to a prefill worker.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

const PREFER: HeaderName = HeaderName::from_static("prefer");
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");
const IF_AVAILABLE: &str = "if-available";

/// True if the client prefers a 412 over a response for which the prompt has to be computed.
pub fn only_if_cached(headers: &HeaderMap) -> bool {
    let values = headers.get_all(PREFER).into_iter().filter_map(|value| value.to_str().ok());
    let mut names = values.flat_map(|list| list.split(',')).filter_map(|one| one.split(';').next());
    names.any(|name| name.trim().eq_ignore_ascii_case(IF_AVAILABLE))
}

/// Middleware of the generating routes: a successful response says that the preference was applied.
pub async fn report(request: Request, next: Next) -> Response {
    let asked = only_if_cached(request.headers());
    let mut response = next.run(request).await;
    if asked && response.status().is_success() {
        response.headers_mut().insert(PREFERENCE_APPLIED, HeaderValue::from_static(IF_AVAILABLE));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_preference_is_one_of_a_list() {
        let asks = |values: &[&str]| {
            let headers = values.iter().map(|value| (PREFER, HeaderValue::from_str(value).unwrap()));
            only_if_cached(&headers.collect())
        };
        for values in
            [&["if-available"][..], &["If-Available"], &["wait=5, if-available; x=1"], &["wait", "if-available"]]
        {
            assert!(asks(values), "{values:?}");
        }
        for values in [&[][..], &["wait"], &["not-if-available"], &["x=if-available"]] {
            assert!(!asks(values), "{values:?}");
        }
    }
}
