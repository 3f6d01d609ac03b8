//! A hub and the cache of its files, as the environment names them.

use super::client::Timeouts;
use std::path::PathBuf;

/// Says why a model with this text of config.json is not served, before the rest of it is downloaded.
pub type ConfigCheck<'a> = dyn Fn(&str) -> Result<(), String> + 'a;

/// A hub and the cache of its files.
#[derive(Debug, Clone)]
pub struct Hub {
    /// URL of the hub.
    pub endpoint: String,
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
    /// Time limits of requests.
    pub timeouts: Timeouts,
}

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
        let stored = || std::fs::read_to_string(token_file).ok().map(|text| text.trim().to_string());
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            token: var("HF_TOKEN").or_else(|| stored().filter(|token| !token.is_empty())),
            cache: var("HF_HUB_CACHE").map_or_else(|| home.join("hub"), PathBuf::from),
            offline: is_on("HF_HUB_OFFLINE"),
            allow_plain_http: is_on("PEGAINFER_HUB_PLAIN_HTTP"),
            ca_file: var("SSL_CERT_FILE").map(PathBuf::from),
            timeouts: Timeouts::default(),
        }
    }
}
