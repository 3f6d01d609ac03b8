//! A hub and the cache of its files, as the environment names them.

use super::client::Timeouts;
use super::source::Source;
use std::path::PathBuf;

/// What is known of a model before its weights are downloaded.
#[derive(Debug, Clone, Copy)]
pub enum Known<'a> {
    /// The text of config.json, or of the configuration in a GGUF header: before anything else is downloaded.
    Config(&'a str),
    /// Bytes of all files that serving needs: before the weights are downloaded, if any of them is missing.
    Bytes(u64),
}

/// Says in a clause why a model is not downloaded.
pub type DownloadCheck<'a> = dyn Fn(Known<'_>) -> Result<(), String> + Sync + 'a;

/// A hub and the cache of its files.
#[derive(Debug, Clone)]
pub struct Hub {
    /// URL of the hub.
    pub endpoint: String,
    /// The API that it speaks.
    pub source: Source,
    /// Token for private repositories, sent only to the hub's own host.
    pub token: Option<String>,
    /// Directory of the cache, with one directory per repository.
    pub cache: PathBuf,
    /// True to use only the cache.
    pub offline: bool,
    /// True to allow plain http for hosts other than this machine.
    pub allow_plain_http: bool,
    /// PEM file with the certificate authorities to trust instead of Mozilla's.
    pub ca_file: Option<PathBuf>,
    /// Size of the segments of a large file, in bytes. Each segment is one request on one of several connections.
    pub segment: u64,
    /// Time limits of requests.
    pub timeouts: Timeouts,
}

/// See [`Hub::segment`]. A hub counts requests, and each begins with the pause of a redirect.
const SEGMENT: u64 = 64 << 20;

impl Hub {
    /// The hub and cache set by the environment.
    pub fn from_env() -> Self {
        let var = |name: &str| std::env::var(name).ok().map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
        let is_on = |name: &str| var(name).is_some_and(|v| ["1", "on", "yes", "true"].contains(&&*v.to_lowercase()));
        let cache_home = || match var("XDG_CACHE_HOME") {
            Some(dir) => PathBuf::from(dir),
            None => std::env::home_dir().unwrap_or_default().join(".cache"),
        };
        let home = var("HF_HOME").map_or_else(|| cache_home().join("huggingface"), PathBuf::from);
        let token_file = var("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
        let endpoint = var("HF_ENDPOINT").map(|url| url.trim_end_matches('/').to_owned());
        let is_modelscope = var("PEGAINFER_HUB_API").is_some_and(|name| name.eq_ignore_ascii_case("modelscope"));
        let source = match &endpoint {
            _ if is_modelscope => Source::ModelScope,
            Some(endpoint) => Source::of(endpoint),
            None => Source::HuggingFace,
        };
        let cache = var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from);
        let stored = || std::fs::read_to_string(token_file).ok().map(|text| text.trim().to_string());
        Self {
            endpoint: endpoint.unwrap_or_else(|| source.endpoint().to_owned()),
            source,
            token: match source {
                Source::HuggingFace => var("HF_TOKEN").or_else(|| stored().filter(|token| !token.is_empty())),
                Source::ModelScope => var(source.token_variable()),
            },
            // A repository of the same name need not be the same on both.
            cache: if source == Source::ModelScope { cache.join("modelscope") } else { cache },
            offline: is_on("HF_HUB_OFFLINE"),
            allow_plain_http: is_on("PEGAINFER_HUB_PLAIN_HTTP"),
            ca_file: var("SSL_CERT_FILE").map(PathBuf::from),
            segment: SEGMENT,
            timeouts: Timeouts::default(),
        }
    }
}
