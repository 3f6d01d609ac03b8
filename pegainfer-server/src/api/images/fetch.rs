//! Fetches images from the hosts of `--allowed-image-hosts`.
//!
//! A client chooses the URL, so the server must not become its way into the network that it stands in: each URL, and
//! each one that a response redirects to, names an allowed host, and connections are made to checked addresses only.

use crate::image_hosts::{ImageHost, has_address, has_host};
use axum::body::Bytes;
use axum::http::{Request, Response, StatusCode, Uri, header};
use futures_util::future::BoxFuture;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioExecutor;
use pegainfer_images::ImageError;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use thiserror::Error;
use tokio::time::Instant;
use tokio_rustls::rustls::crypto::ring;
use tower::Service;

/// Maximum time for the images of a request.
pub const MAX_TIME: Duration = Duration::from_secs(10);
/// Maximum number of redirects.
const MAX_REDIRECTS: usize = 3;
/// Names the server to the hosts.
const USER_AGENT: &str = concat!("pegainfer/", env!("CARGO_PKG_VERSION"));

/// Why an image could not be fetched.
#[derive(Debug, Error)]
pub enum FetchError {
    /// It is no URL of a host.
    #[error("{0} is not a URL such as https://example.com/a.png")]
    NotUrl(String),
    /// The URL has a name or a password.
    #[error("the URL of an image must not have a user's name or password")]
    Credentials,
    /// The host is not in the list.
    #[error(
        "images may not be fetched from {0}, which --allowed-image-hosts does not list; send a data URL such as \
         data:image/png;base64,iVBORw0KGgo..."
    )]
    Host(String),
    /// All addresses of the host are private ones.
    #[error("{0} has no public address; the operator may add its own address to --allowed-image-hosts")]
    Address(String),
    /// No response.
    #[error("{0} cannot be reached, or its response breaks off; try again, or send a data URL")]
    Connection(String),
    /// Another status than 200.
    #[error("{0} answers with status {1}; send a URL that needs no login, or a data URL")]
    Status(String, StatusCode),
    /// More redirects than the server follows.
    #[error("the URL is redirected more than {MAX_REDIRECTS} times; send the one that it leads to")]
    Redirects,
    /// A compressed response, which nobody asked for.
    #[error("{0} sends the image with a Content-Encoding, which was not asked for; send a data URL")]
    Encoded(String),
    /// It takes too long.
    #[error("{0} has not sent the image within {seconds} s; send a data URL", seconds = MAX_TIME.as_secs())]
    Slow(String),
    /// The file is too large.
    #[error(transparent)]
    File(#[from] ImageError),
    /// The images of the request that are fetched are too large together.
    #[error(
        "the request's images on other servers take more than the {0} bytes that they may take together (a 32nd of \
         --max-image-memory); send fewer of them"
    )]
    Together(usize),
}

/// Limits on the files that a request fetches.
#[derive(Debug)]
pub struct FetchLimits {
    /// When all of them have to be here.
    pub end: Instant,
    /// Maximum size of one, in bytes.
    pub file_bytes: usize,
    /// Maximum size of all of them, in bytes.
    pub bytes: usize,
    /// Bytes that have come.
    pub taken: AtomicUsize,
}

impl FetchLimits {
    fn check_file(&self, bytes: usize) -> Result<(), ImageError> {
        let max = self.file_bytes;
        if bytes > max { Err(ImageError::TooManyBytes { max }) } else { Ok(()) }
    }

    fn take(&self, bytes: usize) -> Result<(), FetchError> {
        let before = self.taken.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes > self.bytes { Err(FetchError::Together(self.bytes)) } else { Ok(()) }
    }
}

/// A client for the hosts of a list.
#[derive(Debug, Clone)]
pub struct ImageFetcher {
    hosts: Arc<[ImageHost]>,
    client: Client<HttpsConnector<HttpConnector<Resolver>>, Empty<Bytes>>,
}

impl ImageFetcher {
    /// A client for `hosts`.
    ///
    /// # Errors
    /// If TLS cannot be set up.
    pub fn new(hosts: &[ImageHost]) -> io::Result<Self> {
        let hosts: Arc<[ImageHost]> = hosts.into();
        let mut tcp = HttpConnector::new_with_resolver(Resolver(hosts.clone()));
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let tls = HttpsConnectorBuilder::new().with_provider_and_webpki_roots(ring::default_provider());
        let connector = tls.map_err(io::Error::other)?.https_or_http().enable_http1().wrap_connector(tcp);
        // A connection that waits for the next request would hold its host's old address.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Ok(Self { hosts, client })
    }

    /// Checks that a URL names an allowed host.
    pub fn check(&self, url: &str) -> Result<Uri, FetchError> {
        let shown = || FetchError::NotUrl(crate::error::truncate_for_error(url));
        // The fragment is for the client.
        let url: Uri = url.trim().split('#').next().unwrap_or_default().parse().map_err(|_| shown())?;
        let (Some("http" | "https"), Some(authority)) = (url.scheme_str(), url.authority()) else {
            return Err(shown());
        };
        if authority.as_str().contains('@') {
            return Err(FetchError::Credentials);
        }
        let host = url.host().filter(|host| !host.is_empty()).ok_or_else(shown)?;
        if !has_host(&self.hosts, host) {
            return Err(FetchError::Host(host.to_owned()));
        }
        // The client resolves names only.
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
        if address.is_ok_and(|address| !has_address(&self.hosts, address)) {
            return Err(FetchError::Address(host.to_owned()));
        }
        Ok(url)
    }

    /// Fetches the file at a URL that `check` has returned.
    pub async fn fetch(&self, url: Uri, limits: &FetchLimits) -> Result<Vec<u8>, FetchError> {
        let host = host_of(&url);
        tokio::time::timeout_at(limits.end, self.follow(url, limits)).await.unwrap_or(Err(FetchError::Slow(host)))
    }

    async fn follow(&self, mut url: Uri, limits: &FetchLimits) -> Result<Vec<u8>, FetchError> {
        for _ in 0..=MAX_REDIRECTS {
            let host = host_of(&url);
            let request =
                Request::get(url.clone()).header(header::USER_AGENT, USER_AGENT).header(header::ACCEPT, "image/*");
            let request = request.body(Empty::new()).map_err(|_| FetchError::NotUrl(url.to_string()))?;
            let response = self.client.request(request).await.map_err(|error| no_response(&host, &error))?;
            if !response.status().is_redirection() {
                return read(response, host, limits).await;
            }
            let location = response.headers().get(header::LOCATION).and_then(|location| location.to_str().ok());
            let location = location.ok_or_else(|| FetchError::Status(host.clone(), response.status()))?;
            url = self.check(&target(&url, location))?;
        }
        Err(FetchError::Redirects)
    }
}

/// The URL that a response of `url` redirects to: a whole one, one without a scheme, or a path from the root.
fn target(url: &Uri, location: &str) -> String {
    let scheme = url.scheme_str().unwrap_or("https");
    match url.authority() {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        Some(authority) if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ => location.to_owned(),
    }
}

async fn read(response: Response<Incoming>, host: String, limits: &FetchLimits) -> Result<Vec<u8>, FetchError> {
    if response.status() != StatusCode::OK {
        return Err(FetchError::Status(host, response.status()));
    }
    if response.headers().contains_key(header::CONTENT_ENCODING) {
        return Err(FetchError::Encoded(host));
    }
    let mut body = response.into_body();
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    limits.check_file(announced)?;
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| FetchError::Connection(host.clone()))?.into_data() else { continue };
        limits.check_file(bytes.len() + data.len())?;
        limits.take(data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

fn host_of(url: &Uri) -> String {
    url.host().unwrap_or_default().to_owned()
}

/// The error for a request without a response: an address that is not allowed, or any other reason.
fn no_response(host: &str, error: &(dyn std::error::Error + 'static)) -> FetchError {
    let mut source = Some(error);
    while let Some(error) = source {
        if error.is::<PrivateAddress>() {
            return FetchError::Address(host.to_owned());
        }
        // The source of an error of I/O is the source of what it wraps.
        let wrapped = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        source = wrapped.map_or_else(|| error.source(), |wrapped| Some(wrapped as &(dyn std::error::Error + 'static)));
    }
    FetchError::Connection(host.to_owned())
}

/// All addresses of a host are private. [`FetchError::Address`] says so to the client.
#[derive(Debug)]
struct PrivateAddress;

impl std::error::Error for PrivateAddress {}

impl fmt::Display for PrivateAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no public address")
    }
}

/// Resolves names to addresses that they may have.
#[derive(Debug, Clone)]
struct Resolver(Arc<[ImageHost]>);

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let hosts = self.0.clone();
        Box::pin(async move {
            let mut addresses: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            addresses.retain(|address| has_address(&hosts, address.ip()));
            if addresses.is_empty() { Err(io::Error::other(PrivateAddress)) } else { Ok(addresses.into_iter()) }
        })
    }
}
