//! Rights of a caller, from its key, its address and its browser's headers.

use super::forwarded::TrustedProxies;
use super::keys::{ApiKeys, Key, sent_key};
use crate::error::ApiError;
use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode, header};
use std::net::IpAddr;

/// Paths for admins only, because they affect or show the requests of others.
const ADMIN_PATHS: [&str; 9] = [
    "/reset_prefix_cache",
    "/debug/steps",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/vllm.Control/LoadLora",
    "/vllm.Control/UnloadLora",
    "/vllm.Control/Sleep",
    "/vllm.Control/WakeUp",
    "/vllm.Control/Shutdown",
];

/// Beginning and ends of the paths that load and unload models, which are for admins only.
const MODELS: (&str, [&str; 3]) = ("/v1/models/", ["/load", "/unload", "/sleep"]);

/// True for requests that only admins may send.
pub(super) fn is_for_admins(request: &Request) -> bool {
    let (path, (models, verbs)) = (request.uri().path(), MODELS);
    let switches = path.starts_with(models) && verbs.iter().any(|verb| path.ends_with(verb));
    ADMIN_PATHS.contains(&path) || (switches && request.method() == Method::POST)
}

/// Rights of a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// May use the API.
    Client,
    /// May also use the admin paths and trace requests.
    Admin,
}

/// Rights of callers.
#[derive(Default)]
pub struct Access {
    /// API keys; without keys, everyone may call.
    pub keys: ApiKeys,
    /// Keys of admins.
    pub admin_keys: ApiKeys,
    /// True if programs on this machine are admins while there are no keys.
    pub admin_local: bool,
    /// Proxies whose forwarding headers are trusted.
    pub proxies: TrustedProxies,
}

/// A caller and its rights.
pub(super) struct Caller {
    pub rights: Rights,
    /// The key that admitted it; `None` if it sent none or needs none.
    pub key: Option<Key>,
}

impl Access {
    /// The caller at `address`; `None` if it needs a key and sent no valid one.
    pub(super) fn caller(&self, headers: &HeaderMap, address: Option<IpAddr>) -> Option<Caller> {
        let sent = sent_key(headers);
        if let Some(key) = self.admin_keys.find(sent) {
            return Some(Caller { rights: Rights::Admin, key: Some(key) });
        }
        let key = self.keys.find(sent);
        if !self.keys.is_empty() {
            return key.map(|key| Caller { rights: Rights::Client, key: Some(key) });
        }
        let is_admin = self.admin_local
            && self.admin_keys.is_empty()
            && address.is_some_and(|address| !self.proxies.contains(address) && is_local(headers, address));
        Some(Caller { rights: if is_admin { Rights::Admin } else { Rights::Client }, key: None })
    }
}

/// True if the caller is a program on this machine: not a proxy for somebody else, and not a page in a browser.
fn is_local(headers: &HeaderMap, address: IpAddr) -> bool {
    const ON_BEHALF: [&str; 4] = ["forwarded", "x-forwarded-for", "x-real-ip", "origin"];
    address.to_canonical().is_loopback()
        && !is_cross_site(headers)
        && !ON_BEHALF.iter().any(|name| headers.contains_key(*name))
}

/// True if the browser reports that a page of another site sent the request. Pages can neither set nor remove this
/// header.
fn is_cross_site(headers: &HeaderMap) -> bool {
    headers.get("sec-fetch-site").is_some_and(|site| site != "same-origin" && site != "none")
}

/// Refuses requests of other sites' pages to the admin paths, and their writes without `Origin`. For a write with
/// `Origin`, the browser has asked whether the operator allows the site, because a JSON body needs a preflight.
pub(super) fn cross_site(request: &Request) -> Option<ApiError> {
    let is_admin_path = is_for_admins(request);
    let reads = [Method::GET, Method::HEAD, Method::OPTIONS].contains(request.method());
    let is_safe = !is_admin_path && (reads || request.headers().contains_key(header::ORIGIN));
    if is_safe || !is_cross_site(request.headers()) {
        return None;
    }
    let message = "web pages of other sites may not send this request (Sec-Fetch-Site)";
    Some(ApiError::new(StatusCode::FORBIDDEN, message).with_code("cross_site"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::Secret;

    fn keys(keys: &[&str]) -> ApiKeys {
        let given: Vec<Secret> = keys.iter().map(|key| Secret(key.to_string())).collect();
        ApiKeys::load(&given, None).unwrap()
    }

    fn header(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(axum::http::HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn rights_follow_from_keys_and_without_any_from_the_machine() {
        let (local, remote) = (Some(IpAddr::from([127, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 7])));
        let proxies = TrustedProxies::new(&["127.0.0.2".into()]).unwrap();
        let access = |api: &[&str], admin: &[&str], admin_local| {
            let access = Access { keys: keys(api), admin_keys: keys(admin), admin_local, proxies: proxies.clone() };
            move |headers: &HeaderMap, address| access.caller(headers, address).map(|caller| caller.rights)
        };
        let (none, some) = (HeaderMap::new(), |key: &str| header("authorization", &format!("Bearer {key}")));
        let (client, admin) = (Some(Rights::Client), Some(Rights::Admin));

        let open = access(&[], &[], false);
        assert_eq!((open(&none, local), open(&none, remote)), (client, client), "it may be a proxy that says nothing");

        let open = access(&[], &[], true);
        assert_eq!((open(&none, local), open(&none, remote)), (admin, client));
        assert_eq!((open(&none, Some("::ffff:127.0.0.1".parse().unwrap())), open(&none, None)), (admin, client));
        assert_eq!(open(&none, Some(IpAddr::from([127, 0, 0, 2]))), client, "the trusted proxy");
        for (name, value) in [
            ("x-forwarded-for", "10.0.0.7"),
            ("origin", "https://evil.example"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert_eq!(open(&header(name, value), local), client, "{name}: {value}");
        }
        assert_eq!(open(&header("sec-fetch-site", "same-origin"), local), admin, "the web UI");

        let api = access(&["a"], &[], true);
        assert_eq!((api(&none, local), api(&some("a"), local)), (None, client));

        let both = access(&["a"], &["b"], true);
        assert_eq!((both(&some("a"), local), both(&some("b"), remote)), (client, admin));
        assert_eq!(both(&some("c"), local), None);

        let only_admin = access(&[], &["b"], true);
        assert_eq!((only_admin(&none, local), only_admin(&some("b"), remote)), (client, admin));
    }

    #[test]
    fn pages_of_other_sites_read_at_most() {
        let refuses = |method: Method, path: &str, headers: &[(&'static str, &str)]| {
            let request = Request::builder().method(method).uri(path);
            let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
            cross_site(&request.body(axum::body::Body::empty()).unwrap()).is_some()
        };
        let (cross, origin) = (("sec-fetch-site", "cross-site"), ("origin", "https://chat.example"));
        assert!(refuses(Method::GET, "/debug/steps", &[cross]), "an image of any page");
        assert!(refuses(Method::GET, "/debug/steps", &[("sec-fetch-site", "same-site")]), "another port");
        assert!(refuses(Method::POST, "/reset_prefix_cache", &[cross, origin]));
        assert!(refuses(Method::POST, "/v1/completions", &[cross]));
        assert!(!refuses(Method::POST, "/v1/completions", &[cross, origin]), "the preflight allowed it");
        assert!(!refuses(Method::GET, "/v1/models", &[cross]));
        for site in ["none", "same-origin"] {
            assert!(!refuses(Method::POST, "/reset_prefix_cache", &[("sec-fetch-site", site)]), "{site}");
        }
        assert!(!refuses(Method::POST, "/reset_prefix_cache", &[]), "no browser");
    }
}
