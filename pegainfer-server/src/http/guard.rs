//! Access control: API keys, and no new requests while the server drains.

use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, Phase};
use crate::metrics::Metrics;
use crate::trace::MayTrace;
use anyhow::{Context, Result, ensure};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};
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
pub(super) fn is_open(path: &str) -> bool {
    ["/", "/health", "/live", "/ping", "/metrics"].contains(&path) || path.starts_with("/ui/")
}

/// Paths that change what others notice: for admins only.
const ADMIN_PATHS: [&str; 1] = ["/reset_prefix_cache"];

/// Keys, one of which a caller must send, and where they come from. Clones share the keys, which can be read again.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<Source>);

#[derive(Default)]
struct Source {
    given: Vec<Secret>,
    /// Name of the flag and path of a file with one key on each line.
    file: Option<(&'static str, PathBuf)>,
    keys: RwLock<Arc<Vec<String>>>,
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.keys().len())
    }
}

impl ApiKeys {
    /// Loads the keys of the command line and of a file with one key on each line. Errors never show a key.
    pub fn load(given: &[Secret], file: Option<&Path>) -> Result<Self> {
        Self::load_with("--api-key-file", given, file)
    }

    /// Like [`load`](Self::load), for keys of admins.
    pub fn load_admin(given: &[Secret], file: Option<&Path>) -> Result<Self> {
        Self::load_with("--admin-key-file", given, file)
    }

    fn load_with(flag: &'static str, given: &[Secret], file: Option<&Path>) -> Result<Self> {
        let file = file.map(|path| (flag, path.to_path_buf()));
        let keys = Self(Arc::new(Source { given: given.to_vec(), file, keys: RwLock::default() }));
        keys.reload()?;
        Ok(keys)
    }

    /// Reads the file again; on an error the keys stay as they are. Returns the number of keys.
    pub fn reload(&self) -> Result<usize> {
        let mut keys: Vec<String> = self.0.given.iter().map(|secret| secret.0.clone()).collect();
        if let Some((flag, path)) = &self.0.file {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("{flag} {} cannot be read", path.display()))?;
            let before = keys.len();
            keys.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string));
            ensure!(keys.len() > before, "{flag} {} has no key: put one on each line", path.display());
            warn_if_readable_by_others(flag, path);
        }
        let sendable = |key: &String| !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
        ensure!(keys.iter().all(sendable), "an API key must be one or more ASCII characters without spaces");
        let number = keys.len();
        *self.0.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
        Ok(number)
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.keys().is_empty()
    }

    fn keys(&self) -> Arc<Vec<String>> {
        self.0.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the caller sent one of the keys. The comparison takes the same time for every key of the same length.
    fn contains(&self, given: Option<&str>) -> bool {
        let Some(given) = given.map(|given| given.trim().as_bytes()) else { return false };
        self.keys().iter().fold(Choice::from(0), |found, key| found | key.as_bytes().ct_eq(given)).into()
    }
}

/// The key that the caller sent.
pub(super) fn sent_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| value.split_once(' '));
    let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key);
    // Anthropic's clients send the key in a header of their own.
    bearer.or(text("x-api-key"))
}

#[cfg(unix)]
fn warn_if_readable_by_others(flag: &str, path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    if std::fs::metadata(path).is_ok_and(|file| file.permissions().mode() & 0o004 != 0) {
        log::warn!("{flag} {} can be read by every user of this machine: chmod 600 it", path.display());
    }
}

#[cfg(not(unix))]
fn warn_if_readable_by_others(_: &str, _: &Path) {}

/// Rights of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rights {
    /// May use the API.
    Client,
    /// May also change what others notice, and trace requests.
    Admin,
}

/// Address of the client's end of the connection, an extension of each request.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub IpAddr);

/// What the access control consults.
pub struct Guard {
    /// Keys that callers may send; without keys, everyone may call.
    pub keys: ApiKeys,
    /// Keys of admins.
    pub admin_keys: ApiKeys,
    /// Whether the server drains.
    pub lifecycle: Lifecycle,
    /// Counts refusals.
    pub metrics: Arc<Metrics>,
    /// Limits how often failed authentications are logged.
    pub failures: Throttle,
}

/// The rights of a caller; `None` without a valid key.
fn rights(keys: &ApiKeys, admin_keys: &ApiKeys, headers: &HeaderMap, peer: Option<IpAddr>) -> Option<Rights> {
    let key = sent_key(headers);
    let unprotected = keys.is_empty() && admin_keys.is_empty();
    if admin_keys.contains(key) || (unprotected && is_local(headers, peer)) {
        return Some(Rights::Admin);
    }
    (keys.is_empty() || keys.contains(key)).then_some(Rights::Client)
}

/// Whether a program of this machine called, not a proxy for somebody else or a page in a browser.
fn is_local(headers: &HeaderMap, peer: Option<IpAddr>) -> bool {
    const ON_BEHALF: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "origin"];
    peer.is_some_and(|peer| peer.to_canonical().is_loopback())
        && !ON_BEHALF.iter().any(|name| headers.contains_key(*name))
}

/// Middleware: 401 without a valid key, 403 for what only admins may do, 503 while the server drains.
pub async fn guard(State(guard): State<Arc<Guard>>, mut request: Request, next: Next) -> Response {
    if is_open(request.uri().path()) {
        return next.run(request).await;
    }
    let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
    let Some(rights) = rights(&guard.keys, &guard.admin_keys, request.headers(), peer) else {
        guard.failures.log(|times| {
            let from = peer.map_or("an unknown address".into(), |peer| peer.to_string());
            log::warn!("{times} requests without a valid API key, the last one from {from}");
        });
        discard(request).await;
        let message = "this server needs an API key: send it as \"Authorization: Bearer KEY\" or \"x-api-key: KEY\"";
        let error = ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key");
        return ([(header::WWW_AUTHENTICATE, "Bearer")], error).into_response();
    };
    if rights != Rights::Admin && ADMIN_PATHS.contains(&request.uri().path()) {
        let message = "this needs a key of --admin-key or --admin-key-file; without any keys, a caller on the server's own machine";
        return ApiError::new(StatusCode::FORBIDDEN, message).with_code("admin_only").into_response();
    }
    if guard.lifecycle.phase() != Phase::Serving {
        guard.metrics.rejected("draining");
        return ApiError::draining().into_response();
    }
    if rights == Rights::Admin {
        request.extensions_mut().insert(MayTrace);
    }
    next.run(request).await
}

/// Reads and drops a body before it is refused, within limits: many clients read no response before they have sent everything.
async fn discard(request: Request) {
    const MAX_BYTES: usize = 64 << 20;
    const MAX_TIME: Duration = Duration::from_secs(5);
    // Such a client waits for the refusal before it sends the body.
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
    // After the limits the client may see a broken connection instead of the refusal.
    let _ = tokio::time::timeout(MAX_TIME, drained).await;
}

/// Limits how often something is logged; what happens in between is counted.
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
            assert!(both.contains(sent_key(&sent(good))), "{good}");
        }
        for bad in ["", "Bearer", "Bearer ", "alpha", "Basic alpha", "Bearer alph", "Bearer alphabeta", "Bearer Alpha"]
        {
            assert!(!both.contains(sent_key(&sent(bad))), "{bad}");
        }
        assert!(!both.contains(sent_key(&HeaderMap::new())));
    }

    #[test]
    fn rights_follow_from_keys_and_without_any_from_the_machine() {
        let (local, remote) = (Some(IpAddr::from([127, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 7])));
        let guard = |api: &[&str], admin: &[&str]| {
            let (api, admin) = (keys(api), keys(admin));
            move |headers: &HeaderMap, peer| rights(&api, &admin, headers, peer)
        };
        let (none, some) = (HeaderMap::new(), |key: &str| sent(&format!("Bearer {key}")));
        let proxied =
            HeaderMap::from_iter([(header::HeaderName::from_static("x-forwarded-for"), "10.0.0.7".parse().unwrap())]);
        let page = HeaderMap::from_iter([(header::ORIGIN, "https://evil.example".parse().unwrap())]);
        let (client, admin) = (Some(Rights::Client), Some(Rights::Admin));

        let open = guard(&[], &[]);
        assert_eq!((open(&none, local), open(&none, remote)), (admin, client));
        assert_eq!((open(&none, Some("::ffff:127.0.0.1".parse().unwrap())), open(&none, None)), (admin, client));
        assert_eq!((open(&proxied, local), open(&page, local)), (client, client));

        let api = guard(&["a"], &[]);
        assert_eq!((api(&none, local), api(&some("a"), local)), (None, client));

        let both = guard(&["a"], &["b"]);
        assert_eq!((both(&some("a"), local), both(&some("b"), remote)), (client, admin));
        assert_eq!(both(&some("c"), local), None);

        let only_admin = guard(&[], &["b"]);
        assert_eq!((only_admin(&none, local), only_admin(&some("b"), remote)), (client, admin));
    }

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

    #[test]
    fn a_file_has_one_key_on_each_line() {
        let dir = TempDir::new("keys");
        let path = dir.path().join("keys");
        std::fs::write(&path, "one\r\n\n two \n").unwrap();
        let loaded = ApiKeys::load(&[Secret("three".into())], Some(&path)).unwrap();
        assert_eq!(*loaded.keys(), ["three", "one", "two"]);
        assert_eq!(format!("{loaded:?}"), "ApiKeys(3)");
        std::fs::write(&path, "four").unwrap();
        assert_eq!((loaded.reload().unwrap(), loaded.clone().contains(Some("four"))), (2, true));
        std::fs::write(&path, "\n").unwrap();
        assert!(loaded.reload().is_err() && loaded.contains(Some("four")), "an error changes nothing");
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
