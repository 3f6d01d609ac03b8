//! Downloads checkpoints from the Hugging Face hub.
//!
//! Files are stored in the hub's usual cache (`HF_HOME`, or `~/.cache/huggingface`), shared with other tools. An
//! interrupted download is resumed. `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are honoured.
//!
//! The hub is not trusted with this machine's files: paths consist of fixed names and of hashes that were checked to be
//! hexadecimal, and a file is renamed to its place only after its size and hash match the hub's listing.
//!
//! # Layout
//! - [`client`]: requests, redirects, and which hosts get the token. `listing`: files of a commit with sizes and
//!   hashes.
//! - [`pace`]: the minimum rate of a download.
//! - `gguf`, `gguf_download`: the choice of a GGUF file by its quantisation, and its download after its header was read.
//! - `complete`: complete models in the cache. `cache`: paths, locks and links of the cache. `cached`: the models in the cache. `blob`: one file, resumed and
//!   verified.
//!
//! # Example
//! A model of the cache is found without a network:
//! ```
//! use pegainfer_hub::{Hub, HubError};
//!
//! let cache = std::env::temp_dir().join("pegainfer-hub-example");
//! let hub = Hub { cache, offline: true, ..Hub::from_env() };
//! let missing = hub.fetch("Qwen/Qwen3-0.6B", true);
//! assert!(matches!(missing, Err(HubError::Offline { .. })));
//! assert!(hub.cached()?.is_empty());
//! # Ok::<(), std::io::Error>(())
//! ```

mod blob;
mod cache;
mod cached;
pub mod client;
mod complete;
mod gguf;
mod gguf_download;
mod listing;
pub mod pace;

pub use cached::CachedModel;

use blob::Blob;
use cache::RepoCache;
use client::{Client, RequestError, Timeouts};
use complete::{INDEX, SINGLE};
use gguf::ModelId;
use listing::{FileInfo, Listing};
use std::collections::BTreeSet;
use std::path::PathBuf;
use thiserror::Error;

/// Why a checkpoint could not be fetched.
#[derive(Debug, Error)]
pub enum HubError {
    /// The repository does not exist, or it is private.
    #[error("{endpoint} has no model {id}, or it is private and HF_TOKEN is missing")]
    NotFound {
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
    },
    /// The token is missing or lacks access.
    #[error("{endpoint} refuses access to {id} (HTTP {status}): set HF_TOKEN to a token that may read it")]
    Forbidden {
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// HTTP status: 401 or 403.
        status: u16,
    },
    /// There is no network, or the hub is down.
    #[error("{endpoint} cannot be reached to fetch {id}: {reason}")]
    Unreachable {
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// Error of the network.
        reason: String,
    },
    /// The hub's address is not used.
    #[error("HF_ENDPOINT {endpoint} is not used: {reason}")]
    Endpoint {
        /// URL of the hub.
        endpoint: String,
        /// Why the address is not used.
        reason: String,
    },
    /// `HF_HUB_OFFLINE` is set, and the cache does not have the checkpoint.
    #[error("HF_HUB_OFFLINE is set and {dir} holds no complete copy of {id}")]
    Offline {
        /// Directory of the cache.
        dir: String,
        /// Id of the model.
        id: String,
    },
    /// The download failed.
    #[error("the download of {file} of {id} failed: {reason}; start again to resume it")]
    Download {
        /// Id of the model.
        id: String,
        /// Name of the file.
        file: String,
        /// The error of the download.
        reason: String,
    },
    /// The repository has no model of the requested quantisation, or one that is not served.
    #[error("{id} on {endpoint} cannot be served: {reason}")]
    Gguf {
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// Which models there are, or what is served.
        reason: String,
    },
    /// The repository lacks a file that serving needs.
    #[error("{id} on {endpoint} is not a checkpoint with safetensors: it has no {file}")]
    Incomplete {
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// Name of the missing file.
        file: &'static str,
    },
}

/// Small files, downloaded if the repository has them.
const TEXT_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    // DeepSeek-V4's prompt encoder, from which texts are read.
    "encoding/encoding_dsv4.py",
];
/// Maximum size of a file without weights, in bytes.
const MAX_TEXT_FILE: u64 = 1 << 28;

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
        let stored = || std::fs::read_to_string(home.join("token")).ok().map(|text| text.trim().to_string());
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            token: var("HF_TOKEN").or_else(|| stored().filter(|token| !token.is_empty())),
            cache: home.join("hub"),
            offline: is_on("HF_HUB_OFFLINE"),
            allow_plain_http: is_on("PEGAINFER_HUB_PLAIN_HTTP"),
            timeouts: Timeouts::default(),
        }
    }

    /// Downloads the files of `id` (`organisation/name`) that serving needs and returns the local directory. `weights`
    /// = false leaves out the safetensors.
    ///
    /// With the quantisation of a GGUF file (`organisation/name:Q4_K_M`), downloads that file or its shards and returns
    /// the path of the first. Their headers are read before, and what is not served is refused.
    ///
    /// # Errors
    /// One sentence: what the hub, the network or the cache's disk refused.
    pub fn fetch(&self, id: &str, weights: bool) -> Result<PathBuf, HubError> {
        let model = ModelId::parse(id);
        let repo = RepoCache::new(&self.cache, model.repo);
        if self.offline {
            let dir = || self.cache.display().to_string();
            let found = complete::model(&repo, model.quantization, weights);
            return found.ok_or_else(|| HubError::Offline { dir: dir(), id: id.into() });
        }
        let client = Client::new(&self.endpoint, self.token.clone(), self.allow_plain_http, &self.timeouts)
            .map_err(|reason| HubError::Endpoint { endpoint: self.endpoint.clone(), reason })?;
        Download { hub: self, id: model.repo, quantization: model.quantization, weights, client, repo }.run()
    }
}

struct Download<'a> {
    hub: &'a Hub,
    id: &'a str,
    /// The GGUF file to take.
    quantization: Option<&'a str>,
    weights: bool,
    client: Client,
    repo: RepoCache,
}

impl Download<'_> {
    fn run(&self) -> Result<PathBuf, HubError> {
        let listing = match Listing::fetch(&self.client, self.id) {
            Ok(listing) => listing,
            Err(error) => return self.cached().ok_or_else(|| self.explain(error)),
        };
        let dir = match self.quantization {
            Some(quantization) => self.gguf(&listing, quantization)?,
            None => self.files(&listing)?,
        };
        // Record only a complete download: without a network, `complete` relies on the record.
        if (self.weights || self.quantization.is_some()) && self.repo.record_main(&listing.commit).is_err() {
            log::warn!("the cache's pointer to {} cannot be written; the next start needs the network", self.id);
        }
        Ok(dir)
    }

    fn files(&self, listing: &Listing) -> Result<PathBuf, HubError> {
        if !listing.files.contains_key("config.json") {
            return Err(self.without(listing, "config.json"));
        }
        for name in TEXT_FILES {
            if listing.files.contains_key(name) {
                self.text_file(listing, name)?;
            }
        }
        if self.weights {
            for shard in self.shards(listing)? {
                self.file(listing, &shard, self.info(listing, &shard)?)?;
            }
        }
        Ok(self.repo.snapshot(&listing.commit))
    }

    fn shards(&self, listing: &Listing) -> Result<BTreeSet<String>, HubError> {
        if listing.files.contains_key(INDEX) {
            let path = self.text_file(listing, INDEX)?;
            return complete::read_index(&path).map_err(|reason| self.failed(INDEX, reason));
        }
        match listing.files.contains_key(SINGLE) {
            true => Ok([SINGLE.to_string()].into()),
            false => Err(self.without(listing, SINGLE)),
        }
    }

    fn info<'a>(&self, listing: &'a Listing, name: &str) -> Result<&'a FileInfo, HubError> {
        let reason = match listing.files.get(name) {
            Some(Some(info)) => return Ok(info),
            Some(None) => "the hub lists it without size or hash, so that it cannot be verified",
            None => "the hub does not list it",
        };
        Err(self.failed(name, reason.into()))
    }

    fn text_file(&self, listing: &Listing, name: &str) -> Result<PathBuf, HubError> {
        let info = self.info(listing, name)?;
        if info.size > MAX_TEXT_FILE {
            let reason = format!("the hub lists {} bytes, at most {MAX_TEXT_FILE} are taken", info.size);
            return Err(self.failed(name, reason));
        }
        self.file(listing, name, info)
    }

    fn file(&self, listing: &Listing, name: &str, info: &FileInfo) -> Result<PathBuf, HubError> {
        let url = self.client.url(&format!("/{}/resolve/{}/{name}", self.id, listing.commit));
        let blob = Blob { client: &self.client, repo: &self.repo, url, name, info };
        blob.fetch().and_then(|()| Ok(self.repo.link(&listing.commit, name, &info.hash)?)).map_err(
            |error| match error {
                RequestError::Status(401 | 403) => self.explain(error),
                error => self.failed(name, error.to_string()),
            },
        )
    }

    /// A complete earlier download, for when the hub cannot be reached.
    fn cached(&self) -> Option<PathBuf> {
        let dir = complete::model(&self.repo, self.quantization, self.weights)?;
        log::warn!("{} cannot be asked for {}; the copy in {} is used", self.hub.endpoint, self.id, dir.display());
        Some(dir)
    }

    fn explain(&self, error: RequestError) -> HubError {
        let (endpoint, id) = (self.hub.endpoint.clone(), self.id.to_string());
        match error {
            RequestError::Status(404) => HubError::NotFound { endpoint, id },
            // Without a token, the hub also answers 401 for repositories that do not exist.
            RequestError::Status(401) if self.hub.token.is_none() => HubError::NotFound { endpoint, id },
            RequestError::Status(status @ (401 | 403)) => HubError::Forbidden { endpoint, id, status },
            error => HubError::Unreachable { endpoint, id, reason: error.to_string() },
        }
    }

    fn failed(&self, file: &str, reason: String) -> HubError {
        HubError::Download { id: self.id.to_string(), file: file.to_string(), reason }
    }

    fn incomplete(&self, file: &'static str) -> HubError {
        HubError::Incomplete { endpoint: self.hub.endpoint.clone(), id: self.id.to_string(), file }
    }
}
