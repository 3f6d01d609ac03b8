//! Cross-origin requests: which web pages may call the API from a browser.

use anyhow::{Context, Result, ensure};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

/// The origins that `--cors-allow-origin` names.
#[derive(Debug, Clone, Default)]
pub struct Cors {
    any: bool,
    origins: Vec<HeaderValue>,
}

/// Seconds for which browsers may cache a preflight response.
const MAX_AGE: &str = "600";
/// Response headers that scripts of an allowed origin may read.
const EXPOSED: &str = "x-request-id, x-ignored-fields, x-trace-id, retry-after";

impl Cors {
    /// Parses the origins. Each is `*` or a scheme and host, with an optional port, as browsers send it.
    pub fn new(origins: &[String]) -> Result<Self> {
        let mut cors = Self::default();
        for origin in origins {
            if origin == "*" {
                cors.any = true;
                continue;
            }
            let expected = || format!("--cors-allow-origin {origin} is not an origin such as https://chat.example.com");
            let uri: Uri = origin.parse().with_context(expected)?;
            let (Some(scheme), Some(host)) = (uri.scheme_str(), uri.authority()) else {
                anyhow::bail!(expected());
            };
            // A browser compares and sends exactly this form: no path, not even a slash.
            ensure!(*origin == format!("{scheme}://{host}"), expected());
            cors.origins.push(HeaderValue::from_str(origin)?);
        }
        Ok(cors)
    }

    fn is_off(&self) -> bool {
        !self.any && self.origins.is_empty()
    }

    /// Value of `access-control-allow-origin` for this origin; `None` if it is not allowed.
    fn allow(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        if self.any {
            return Some(HeaderValue::from_static("*"));
        }
        self.origins.contains(origin).then(|| origin.clone())
    }
}

/// Middleware: responds to preflights and marks responses that an allowed origin may read. Preflights carry no key, so it
/// runs before the key check.
pub async fn cors(cors: &Cors, request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    if cors.is_off() {
        return next(request).await;
    }
    let headers = request.headers();
    let allowed = headers.get(header::ORIGIN).and_then(|origin| cors.allow(origin));
    let preflight = request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let asked = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = if preflight { StatusCode::NO_CONTENT.into_response() } else { next(request).await };
    let out = response.headers_mut();
    // Caches must not reuse the response to one origin for another.
    out.append(header::VARY, HeaderValue::from_static("Origin"));
    if let Some(allowed) = allowed {
        out.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        if preflight {
            permit(out, asked);
        } else {
            out.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        }
    }
    response
}

/// Adds the preflight headers. `asked`: the request headers that the script wants to send. All are allowed, because none is
/// harmful, by name, because `*` would not include Authorization.
fn permit(out: &mut HeaderMap, asked: Option<HeaderValue>) {
    out.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    out.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
    if let Some(asked) = asked {
        out.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_checked_at_the_start() {
        for good in ["*", "https://chat.example.com", "http://localhost:3000", "app://obsidian.md"] {
            assert!(Cors::new(&[good.to_string()]).is_ok(), "{good}");
        }
        for bad in ["", "example.com", "https://example.com/", "https://example.com/chat", "null"] {
            let error = Cors::new(&[bad.to_string()]).unwrap_err();
            assert!(error.to_string().contains("is not an origin such as"), "{bad}: {error}");
        }
    }
}
