//! Access control: API keys, and no new requests while the server drains.

use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, Phase};
use crate::metrics::Metrics;
use anyhow::{Context, Result, ensure};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq};

/// A value that is never logged or printed.
#[derive(Clone)]
pub struct Secret(pub String);

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self(value)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Paths that need no key and are served while the server drains: those of probes and scrapers, and the web UI, which holds
/// no data and asks the user for the key.
fn is_open(path: &str) -> bool {
    ["/", "/health", "/ping", "/metrics"].contains(&path) || path.starts_with("/ui/")
}

/// API keys, one of which a caller must send. Without keys, everyone may call.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<String>);

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

impl ApiKeys {
    /// Loads the keys of the command line and of a file with one key on each line. Errors never show a key.
    pub fn load(given: &[Secret], file: Option<&Path>) -> Result<Self> {
        let mut keys: Vec<String> = given.iter().map(|secret| secret.0.clone()).collect();
        if let Some(path) = file {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("--api-key-file {} cannot be read", path.display()))?;
            let before = keys.len();
            keys.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string));
            ensure!(keys.len() > before, "--api-key-file {} has no key: put one on each line", path.display());
        }
        let sendable = |key: &String| !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
        ensure!(keys.iter().all(sendable), "an API key must be one or more ASCII characters without spaces");
        Ok(Self(keys))
    }

    /// Whether the caller sent one of the keys. The comparison takes the same time for every key of the same length.
    fn admit(&self, headers: &HeaderMap) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let bearer = text("authorization").and_then(|value| value.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key);
        // Anthropic's clients send the key in a header of their own.
        let Some(given) = bearer.or(text("x-api-key")) else { return false };
        let given = given.trim().as_bytes();
        self.0.iter().fold(Choice::from(0), |found, key| found | key.as_bytes().ct_eq(given)).into()
    }
}

/// What the access control consults.
pub struct Guard {
    /// Keys that callers may send.
    pub keys: ApiKeys,
    /// Whether the server drains.
    pub lifecycle: Lifecycle,
    /// Counts refusals.
    pub metrics: Arc<Metrics>,
}

/// Middleware: 401 without a valid key, 503 while the server drains.
pub async fn guard(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    if is_open(request.uri().path()) {
        return next.run(request).await;
    }
    if !guard.keys.admit(request.headers()) {
        let message = "this server needs an API key: send it as \"Authorization: Bearer KEY\"";
        let error = ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key");
        return ([(header::WWW_AUTHENTICATE, "Bearer")], error).into_response();
    }
    if guard.lifecycle.phase() != Phase::Serving {
        guard.metrics.rejected("draining");
        return ApiError::draining().into_response();
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempDir;

    fn keys(keys: &[&str]) -> ApiKeys {
        let given: Vec<Secret> = keys.iter().map(|key| Secret(key.to_string())).collect();
        ApiKeys::load(&given, None).unwrap()
    }

    fn sent(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn only_a_whole_key_lets_in() {
        let both = keys(&["alpha", "beta"]);
        for good in ["Bearer alpha", "bearer beta", "Bearer  beta"] {
            assert!(both.admit(&sent(good)), "{good}");
        }
        for bad in ["", "Bearer", "Bearer ", "alpha", "Basic alpha", "Bearer alph", "Bearer alphabeta", "Bearer Alpha"]
        {
            assert!(!both.admit(&sent(bad)), "{bad}");
        }
        assert!(!both.admit(&HeaderMap::new()));
        assert!(ApiKeys::default().admit(&HeaderMap::new()), "no keys: everyone");
    }

    #[test]
    fn the_api_is_not_open() {
        assert!(["/", "/ui/app.js", "/metrics"].into_iter().all(is_open));
        assert!(!["/v1/models", "/uix", "/load", "/reset_prefix_cache", "//"].into_iter().any(is_open));
    }

    #[test]
    fn a_file_has_one_key_on_each_line() {
        let dir = TempDir::new("keys");
        let path = dir.path().join("keys");
        std::fs::write(&path, "one\r\n\n two \n").unwrap();
        let loaded = ApiKeys::load(&[Secret("three".into())], Some(&path)).unwrap();
        assert_eq!(loaded.0, ["three", "one", "two"]);
        assert_eq!(format!("{loaded:?}"), "ApiKeys(3)");
        std::fs::write(&path, "\n").unwrap();
        assert!(ApiKeys::load(&[], Some(&path)).unwrap_err().to_string().contains("has no key"));
        let error = ApiKeys::load(&[Secret("a b".into())], None).unwrap_err().to_string();
        assert!(!error.contains("a b"), "{error}");
        assert!(ApiKeys::load(&[Secret(String::new())], None).is_err());
    }

    #[test]
    fn keys_do_not_show_in_the_flags() {
        let key = Secret::from("sk-1".to_string());
        assert!(!format!("{key:?}").contains("sk-1"));
    }
}
