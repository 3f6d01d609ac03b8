//! Requests to the hub: allowed addresses, redirects, and which hosts get the token.

use super::connections::CONNECTIONS;
use super::pace::{MinRate, Paced};
use super::source::Source;
use std::io::Read;
use std::net::IpAddr;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use thiserror::Error;
use ureq::http::{Response, Uri, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// Maximum number of redirects of one request.
const MAX_REDIRECTS: usize = 8;
/// Maximum number of tries per file or listing.
pub(super) const TRIES: u32 = 4;
/// Maximum time that a hub may ask to wait before a retry.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Time limits of a request.
#[derive(Debug, Clone)]
pub struct Timeouts {
    /// Maximum time to establish the connection.
    pub connect: Duration,
    /// Maximum time between two reads, and until the head of the response is complete.
    pub read: Duration,
    /// Minimum rate of a body.
    pub min_rate: MinRate,
    /// Delay before the first retry of a broken download; doubled for each further try.
    pub pause: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            read: Duration::from_secs(30),
            min_rate: MinRate::default(),
            pause: Duration::from_millis(300),
        }
    }
}

/// How a hub is asked.
#[derive(Debug, Clone)]
pub(super) struct Access<'a> {
    /// URL of the hub.
    pub endpoint: &'a str,
    /// The API that it speaks.
    pub source: Source,
    /// Token, sent only to the endpoint's own host.
    pub token: Option<String>,
    /// True to allow plain http for hosts other than this machine.
    pub allow_plain_http: bool,
    /// Certificate authorities that take the place of Mozilla's.
    pub ca_file: Option<&'a Path>,
    /// Size of the segments of a large file.
    pub segment: u64,
    /// Time limits of requests.
    pub timeouts: Timeouts,
}

/// Why a request failed.
#[derive(Debug, Error)]
pub enum RequestError {
    /// The hub refused the request.
    #[error("the hub answers with HTTP {0}")]
    Status(u16),
    /// The hub has too many requests, of this user or of all; a later try may succeed.
    #[error("{}", busy(*status, token))]
    Busy {
        /// HTTP status: 429 or 503.
        status: u16,
        /// Variable of the token that raises the limit.
        token: &'static str,
        /// Time to wait, if the hub names one.
        retry_after: Option<Duration>,
    },
    /// The connection failed or broke; a later try may succeed.
    #[error("{0}")]
    Network(String),
    /// The response breaks a rule and is not used; trying the same server again would not help.
    #[error("{0}")]
    Rejected(String),
    /// The hub sends whole files where parts are asked for.
    #[error("the hub sends no parts of files")]
    NoRanges,
    /// The download of another file of the model failed, so that this one was left unfinished.
    #[error("another file failed")]
    Stopped,
    /// The cache cannot be read or written.
    #[error("the cache cannot be used: {0}")]
    Disk(#[from] std::io::Error),
}

fn busy(status: u16, token: &str) -> String {
    match status {
        429 => format!("the hub limits the rate of requests (HTTP 429): try again in some minutes, or set {token}"),
        _ => format!("the hub is overloaded or being maintained (HTTP {status}): try again later"),
    }
}

impl RequestError {
    fn may_succeed_later(&self) -> bool {
        match self {
            Self::Status(status) => matches!(status, 408 | 500..),
            Self::Busy { .. } | Self::Network(_) => true,
            Self::Rejected(_) | Self::NoRanges | Self::Stopped | Self::Disk(_) => false,
        }
    }

    /// Time to wait before a retry: `pause`, or what the hub asks for within [`MAX_PAUSE`].
    fn pause(&self, pause: Duration) -> Duration {
        match self {
            Self::Busy { retry_after: Some(asked), .. } => (*asked).min(MAX_PAUSE).max(pause),
            _ => pause,
        }
    }
}

/// Client of one hub.
pub struct Client {
    agent: Agent,
    endpoint: Uri,
    pub(super) source: Source,
    token: Option<String>,
    allow_plain_http: bool,
    /// See [`Access::segment`].
    pub(super) segment: u64,
    /// See [`Timeouts::min_rate`].
    min_rate: MinRate,
    /// See [`Timeouts::pause`].
    pause: Duration,
}

impl Client {
    /// A client of a hub.
    ///
    /// # Errors
    /// One clause: why the endpoint is not used.
    pub(super) fn new(access: Access<'_>) -> Result<Self, String> {
        let timeouts = &access.timeouts;
        let roots = access.ca_file.map(authorities).transpose()?.unwrap_or(RootCerts::WebPki);
        let agent = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .timeout_connect(Some(timeouts.connect))
            .timeout_recv_response(Some(timeouts.read))
            .timeout_per_read(Some(timeouts.read))
            .timeout_per_write(Some(timeouts.read))
            // Redirects and statuses are handled here, because the token must not be sent to other hosts.
            .max_redirects(0)
            .max_idle_connections(2 * CONNECTIONS)
            .max_idle_connections_per_host(CONNECTIONS)
            .http_status_as_error(false)
            .accept_encoding("identity")
            .user_agent(concat!("pegainfer/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        let endpoint: Uri = access.endpoint.parse().map_err(|_| "it is not a URL such as https://huggingface.co")?;
        let client = Self {
            agent,
            endpoint,
            source: access.source,
            token: access.token,
            allow_plain_http: access.allow_plain_http,
            segment: access.segment,
            min_rate: timeouts.min_rate,
            pause: timeouts.pause,
        };
        client.check(&client.endpoint)?;
        Ok(client)
    }

    /// The result of `attempt`, which is repeated up to `tries` times as long as a later try may succeed. `what` names it
    /// in the log.
    pub(super) fn retry<T>(
        &self,
        (what, tries): (&str, u32),
        mut attempt: impl FnMut() -> Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        let mut pause = self.pause;
        for _ in 1..tries {
            match attempt() {
                Err(error) if error.may_succeed_later() => {
                    log::warn!("the download of {what} broke off ({error}); trying again");
                    std::thread::sleep(error.pause(pause));
                    pause *= 2;
                }
                result => return result,
            }
        }
        attempt()
    }

    /// The URL of `path`, which begins with a slash, at the endpoint.
    pub(super) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint.to_string().trim_end_matches('/'))
    }

    /// The response with status 200, or 206 if only the bytes from `from` on were requested. Follows redirects.
    pub(super) fn get(&self, url: &str, from: u64) -> Result<Response<Body>, RequestError> {
        self.get_range(url, (from > 0).then(|| format!("bytes={from}-")))
    }

    /// The response with these bytes. A hub that knows no ranges sends the whole file.
    pub(super) fn get_part(&self, url: &str, bytes: &Range<u64>) -> Result<Response<Body>, RequestError> {
        self.get_range(url, Some(format!("bytes={}-{}", bytes.start, bytes.end.saturating_sub(1))))
    }

    /// The response with the first `bytes` bytes. A hub that knows no ranges sends more.
    pub(super) fn get_beginning(&self, url: &str, bytes: u64) -> Result<Response<Body>, RequestError> {
        self.get_range(url, Some(format!("bytes=0-{}", bytes.saturating_sub(1))))
    }

    fn get_range(&self, url: &str, range: Option<String>) -> Result<Response<Body>, RequestError> {
        let rejected = |reason| RequestError::Rejected(reason);
        let mut target: Uri = url.parse().map_err(|_| rejected(format!("{url} is not a URL")))?;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.request(&target, range.as_deref())?;
            match response.status().as_u16() {
                200 => {}
                206 if range.is_some() => {}
                301 | 302 | 303 | 307 | 308 => {
                    target = self.redirected(&target, &response).map_err(rejected)?;
                    continue;
                }
                status @ (429 | 503) => {
                    let token = self.source.token_variable();
                    return Err(RequestError::Busy { status, token, retry_after: retry_after(&response) });
                }
                status => return Err(RequestError::Status(status)),
            }
            return match response.headers().get(header::CONTENT_ENCODING) {
                Some(encoding) if encoding != "identity" => {
                    Err(rejected("the hub sends a compressed body without being asked".into()))
                }
                _ => Ok(response),
            };
        }
        Err(rejected(format!("the hub redirects more than {MAX_REDIRECTS} times")))
    }

    /// The body of a response.
    pub(super) fn body(&self, response: Response<Body>) -> impl Read + use<> {
        Paced::new(response.into_body().into_reader(), self.min_rate)
    }

    fn request(&self, target: &Uri, range: Option<&str>) -> Result<Response<Body>, RequestError> {
        let mut request = self.agent.get(target);
        if let Some(token) = self.token.as_ref().filter(|_| self.may_have_token(target)) {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            if self.source == Source::ModelScope {
                // ModelScope's file server takes a token as the cookie of a session.
                request = request.header(header::COOKIE, format!("m_session_id={token}"));
            }
        }
        if let Some(range) = range {
            request = request.header(header::RANGE, range);
        }
        request.call().map_err(|error| RequestError::Network(error.to_string()))
    }

    /// Only the endpoint's own host gets the token, and never in plain text over a network.
    fn may_have_token(&self, target: &Uri) -> bool {
        origin(target) == origin(&self.endpoint) && (is_https(target) || is_loopback(target))
    }

    fn redirected(&self, from: &Uri, response: &Response<Body>) -> Result<Uri, String> {
        let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
        let location = location.ok_or("the hub redirects without an address")?;
        let target = join(from, location).ok_or("the hub redirects to an invalid URL")?;
        if is_https(from) && !is_https(&target) {
            return Err("the hub redirects from https to plain http".into());
        }
        self.check(&target)?;
        Ok(target)
    }

    fn check(&self, target: &Uri) -> Result<(), String> {
        match (target.scheme_str(), target.host()) {
            (_, None | Some("")) => Err("it names no host".into()),
            (Some("https"), _) => Ok(()),
            (Some("http"), Some(host)) => match self.allow_plain_http || is_loopback(target) {
                true => Ok(()),
                false => Err(format!(
                    "{host} would be asked over plain http, which anybody on the way can change: use https, or set PEGAINFER_HUB_PLAIN_HTTP=1 to do it nevertheless"
                )),
            },
            _ => Err("it begins neither with https:// nor with http://".into()),
        }
    }
}

/// Seconds in `Retry-After`; the other format, a date, is not read.
fn retry_after(response: &Response<Body>) -> Option<Duration> {
    let seconds = response.headers().get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The certificate authorities in a PEM file.
fn authorities(path: &Path) -> Result<RootCerts, String> {
    let refused =
        |reason: String| format!("the file of certificate authorities {} is not used: {reason}", path.display());
    let pem = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
    let items = parse_pem(&pem).collect::<Result<Vec<_>, _>>().map_err(|error| refused(error.to_string()))?;
    let certificates = items.into_iter().filter_map(|item| match item {
        PemItem::Certificate(certificate) => Some(certificate),
        _ => None,
    });
    let certificates: Vec<_> = certificates.collect();
    if certificates.is_empty() {
        return Err(refused("it holds no certificate".into()));
    }
    Ok(RootCerts::from(certificates))
}

fn is_https(uri: &Uri) -> bool {
    uri.scheme_str() == Some("https")
}

fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

fn origin(uri: &Uri) -> (bool, String, u16) {
    let port = uri.port_u16().unwrap_or(if is_https(uri) { 443 } else { 80 });
    (is_https(uri), uri.host().unwrap_or_default().to_ascii_lowercase(), port)
}

/// Resolves the `Location` of a response from `base`.
fn join(base: &Uri, location: &str) -> Option<Uri> {
    let (scheme, authority) = (base.scheme_str()?, base.authority()?);
    let path = base.path();
    let has_scheme = location.split(['/', '?', '#']).next().is_some_and(|first| first.contains(':'));
    let absolute = match location {
        _ if has_scheme => location.to_string(),
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ if location.starts_with('?') => format!("{scheme}://{authority}{path}{location}"),
        _ => format!("{scheme}://{authority}{}/{location}", path.rsplit_once('/').map_or("", |(dir, _)| dir)),
    };
    absolute.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(endpoint: &str, allow_plain_http: bool) -> Result<Client, String> {
        let (source, timeouts) = (Source::HuggingFace, Timeouts::default());
        let token = Some("secret".into());
        Client::new(Access { endpoint, source, token, allow_plain_http, ca_file: None, segment: 1, timeouts })
    }

    #[test]
    fn plain_http_is_for_this_machine_only() {
        for url in ["https://hub.example", "http://localhost:1", "http://127.0.0.1:80/x", "http://[::1]:9"] {
            assert!(client(url, false).is_ok(), "{url}");
        }
        for url in ["http://hub.example", "http://localhost.example", "http://10.0.0.1", "http://127.0.0.1@hub.example"]
        {
            let error = client(url, false).err().unwrap();
            assert!(error.contains("PEGAINFER_HUB_PLAIN_HTTP"), "{url}: {error}");
            assert!(client(url, true).is_ok(), "{url}");
        }
        for url in ["", "hub.example", "ftp://hub.example", "file:///etc/passwd", "https://"] {
            assert!(client(url, true).is_err(), "{url}");
        }
    }

    #[test]
    fn the_token_is_for_the_endpoint_alone() {
        let may = |endpoint: &str, url: &str| client(endpoint, true).unwrap().may_have_token(&url.parse().unwrap());
        assert!(may("https://hub.example", "https://HUB.example:443/a"));
        assert!(may("http://127.0.0.1:5", "http://127.0.0.1:5/a"));
        for (endpoint, url) in [
            ("https://hub.example", "https://cdn.hub.example/a"),
            ("https://hub.example", "https://hub.example:8443/a"),
            ("https://hub.example", "http://hub.example/a"),
            ("https://hub.example", "https://hub.example@evil.example/a"),
            ("http://hub.example", "http://hub.example/a"),
            ("http://127.0.0.1:5", "http://127.0.0.1:6/a"),
        ] {
            assert!(!may(endpoint, url), "{endpoint} {url}");
        }
    }

    #[test]
    fn redirects_are_resolved_against_the_request() {
        let base: Uri = "https://hub.example:1/a/b?c=d".parse().unwrap();
        for (location, expected) in [
            ("https://cdn.example/x?y", "https://cdn.example/x?y"),
            ("//cdn.example/x", "https://cdn.example/x"),
            ("/x/y", "https://hub.example:1/x/y"),
            ("x", "https://hub.example:1/a/x"),
            ("?e", "https://hub.example:1/a/b?e"),
            ("x?u=http://z/", "https://hub.example:1/a/x?u=http://z/"),
        ] {
            assert_eq!(join(&base, location).unwrap().to_string(), expected, "{location}");
        }
        assert!(join(&base, "http://[").is_none() && join(&base, "a b").is_none());
    }
}
