//! Allowed `Host` names, against DNS rebinding.
//!
//! A website may let its own host name resolve to 127.0.0.1 and call a server on the visitor's machine. The browser
//! takes both for one origin, but the request carries the website's name in `Host`, and is refused here. Addresses
//! cannot be rebound, so they are always allowed, like `localhost` and its subdomains, which resolve to the machine
//! itself.

use crate::error::{ApiError, truncate_for_error};
use anyhow::{Result, ensure};
use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, StatusCode, Uri, Version, header};
use axum::response::{IntoResponse, Response};
use std::net::{IpAddr, Ipv6Addr};

/// Paths of probes and scrapers, which may use any host name: they show no prompts and change nothing.
const ANY_HOST: [&str; 5] = ["/health", "/live", "/ping", "/metrics", "/grpc.health.v1.Health/Check"];

/// The host names that `--allowed-host` lists; `None` allows all.
#[derive(Debug, Clone, Default)]
pub struct AllowedHosts(Option<Vec<String>>);

impl AllowedHosts {
    /// The names of the flag; `*` allows all. Without names, all are allowed unless the server is bound to a loopback
    /// address (`local`).
    pub fn new(names: &[String], local: bool) -> Result<Self> {
        if names.iter().any(|name| name == "*") || (names.is_empty() && !local) {
            return Ok(Self(None));
        }
        for name in names {
            let valid = name.parse::<Authority>().is_ok_and(|parsed| parsed.host() == name && parsed.port().is_none());
            ensure!(valid, "--allowed-host {name} is not a host name such as llm.example.com, without scheme and port");
        }
        Ok(Self(Some(names.iter().map(|name| name.to_ascii_lowercase()).collect())))
    }

    fn allows(&self, host: &str) -> bool {
        let Self(Some(names)) = self else { return true };
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let ipv6 = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let is_address = host.parse::<IpAddr>().is_ok() || ipv6.is_some_and(|host| host.parse::<Ipv6Addr>().is_ok());
        is_address || host == "localhost" || host.ends_with(".localhost") || names.contains(&host)
    }

    fn check(&self, uri: &Uri, version: Version, headers: &HeaderMap) -> Result<(), ApiError> {
        let bad = |message: &str| Err(ApiError::new(StatusCode::BAD_REQUEST, message).with_code("invalid_host"));
        let mut sent = headers.get_all(header::HOST).iter();
        let (first, second) = (sent.next(), sent.next());
        if second.is_some() {
            return bad("the request has more than one Host header");
        }
        // HTTP/2 names the host in the pseudo-header :authority, which is part of the URI.
        let is_named = first.is_some() || (version >= Version::HTTP_2 && uri.authority().is_some());
        if !is_named && version >= Version::HTTP_11 {
            return bad("the request has no Host header, which HTTP/1.1 requires");
        }
        let host = first.map(|host| host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()));
        if host.as_ref().is_some_and(|host| host.as_ref().is_none_or(|host| host.as_str().contains('@'))) {
            return bad("the Host header is not a host name with an optional port");
        }
        let refused = host.flatten().iter().chain(uri.authority()).find(|host| !self.allows(host.host())).cloned();
        if ANY_HOST.contains(&uri.path()) {
            return Ok(());
        }
        refused.map_or(Ok(()), |host| {
            let host = truncate_for_error(host.host());
            let message =
                format!("this server is not called {host}: its operator can allow that with --allowed-host {host}");
            Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code("host_not_allowed"))
        })
    }
}

/// Middleware: 400 without exactly one host, 403 for one that is not allowed.
pub async fn check(allowed: &AllowedHosts, request: Request, next: impl AsyncFnOnce(Request) -> Response) -> Response {
    match allowed.check(request.uri(), request.version(), request.headers()) {
        Ok(()) => next(request).await,
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(allowed: &AllowedHosts, path: &str, hosts: &[&str]) -> u16 {
        let hosts = hosts.iter().map(|host| (header::HOST, host.parse().unwrap()));
        let headers: HeaderMap = hosts.fold(HeaderMap::new(), |mut all, (name, host)| {
            all.append(name, host);
            all
        });
        let checked = allowed.check(&path.parse().unwrap(), Version::HTTP_11, &headers);
        checked.map_or_else(|error| error.status().as_u16(), |()| 200)
    }

    #[test]
    fn a_local_server_has_local_names_and_those_of_the_flag() {
        let local = AllowedHosts::new(&["LLM.example".into()], true).unwrap();
        for good in [
            "localhost",
            "localhost:8000",
            "a.localhost",
            "127.0.0.1:8000",
            "[::1]:8000",
            "10.0.0.7",
            "llm.example.:80",
        ] {
            assert_eq!(status(&local, "/v1/models", &[good]), 200, "{good}");
        }
        for bad in
            ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost", "llm.example.evil"]
        {
            assert_eq!(status(&local, "/v1/models", &[bad]), 403, "{bad}");
            assert_eq!(status(&local, "/health", &[bad]), 200, "{bad}");
        }
        assert_eq!(status(&local, "http://evil.example/v1/models", &["localhost"]), 403);
    }

    #[test]
    fn a_request_has_exactly_one_host() {
        for allowed in [AllowedHosts::default(), AllowedHosts::new(&[], true).unwrap()] {
            for hosts in [&[][..], &["localhost", "localhost"], &["user@localhost"], &["a b"], &[""]] {
                assert_eq!(status(&allowed, "/v1/models", hosts), 400, "{hosts:?}");
            }
        }
    }

    #[test]
    fn a_public_server_has_all_names_unless_some_are_given() {
        let any = AllowedHosts::new(&[], false).unwrap();
        let some = AllowedHosts::new(&["llm.example".into()], false).unwrap();
        let star = AllowedHosts::new(&["*".into()], true).unwrap();
        let statuses = [any, some, star].map(|allowed| status(&allowed, "/v1/models", &["other.example"]));
        assert_eq!(statuses, [200, 403, 200]);
        for bad in ["", "http://a.example", "a.example:80", "a/b"] {
            assert!(AllowedHosts::new(&[bad.into()], false).is_err(), "{bad}");
        }
    }
}
