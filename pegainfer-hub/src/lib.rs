//! Downloads checkpoints from the Hugging Face hub or ModelScope.
//!
//! Files are stored in the hub's usual cache (`HF_HUB_CACHE`, `HF_HOME`, or `~/.cache/huggingface`), shared with other
//! tools. An interrupted download is resumed. `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE` and
//! `SSL_CERT_FILE` are honoured.
//!
//! The hub is not trusted with this machine's files: paths consist of fixed names and of hashes that were checked to be
//! hexadecimal, and a file is renamed to its place only after its size and hash match the hub's listing.
//!
//! # Layout
//! - [`client`]: requests, redirects, and which hosts get the token. `listing`: files of a commit with sizes and
//!   hashes. `source`, `modelscope`: what differs between Hugging Face's API and ModelScope's.
//! - [`pace`]: the minimum rate of a download.
//! - `hub`: [`Hub`], as the environment names it.
//! - `download`: config.json first; the rest after it was checked, if the disk has space for it (`free_space`). `blob`:
//!   one file, resumed and verified. `transfers`: several files at the same time. `segmented`, `segment_map`: one large file
//!   over several connections. `connections`: their number.
//! - `gguf`, `gguf_download`: the choice of a GGUF file by its quantisation, and its download after its header was read.
//! - `complete`: complete models in the cache. `cache`: paths, locks and links of the cache. `cached`: the models in the
//!   cache. `error`: [`HubError`].
//!
//! # Example
//! A model of the cache is found without a network:
//! ```
//! use pegainfer_hub::{Hub, HubError};
//!
//! let cache = std::env::temp_dir().join("pegainfer-hub-example");
//! let hub = Hub { cache, offline: true, ..Hub::from_env() };
//! let missing = hub.fetch("Qwen/Qwen3-0.6B", true, &|_| Ok(()));
//! assert!(matches!(missing, Err(HubError::Offline { .. })));
//! assert!(hub.cached()?.is_empty());
//! # Ok::<(), std::io::Error>(())
//! ```

mod blob;
mod cache;
mod cached;
pub mod client;
mod complete;
mod connections;
mod download;
mod error;
mod free_space;
mod gguf;
mod gguf_download;
mod hub;
mod listing;
mod modelscope;
pub mod pace;
mod segment_map;
mod segmented;

mod source;
mod transfers;

pub use cached::CachedModel;
pub use error::HubError;
pub use hub::{DownloadCheck, Hub, Known};
pub use source::Source;

use cache::RepoCache;
use client::{Access, Client, RequestError};
use connections::Connections;
use download::Download;
use gguf::ModelId;
use std::path::PathBuf;
use std::time::{Duration, Instant};

impl Hub {
    /// Downloads the files of `id` (`organisation/name`) that serving needs and returns the local directory. `weights`
    /// = false leaves out the safetensors. `check` sees config.json before anything else is
    /// downloaded, and the size before the weights are.
    ///
    /// `id` may name a branch, tag or commit: `organisation/name@REVISION`. With the quantisation of a GGUF file
    /// (`organisation/name:Q4_K_M`), downloads that file or its shards and returns the path of the first. Their headers
    /// are read before, and what is not served is refused.
    ///
    /// # Errors
    /// One sentence: what the hub, the network or the cache's disk refused.
    pub fn fetch(&self, id: &str, weights: bool, check: &DownloadCheck<'_>) -> Result<PathBuf, HubError> {
        let model = ModelId::parse(id);
        let repo = RepoCache::new(&self.cache, model.repo);
        if self.offline {
            let dir = || self.cache.display().to_string();
            let found = complete::model(&repo, model, weights);
            return found.ok_or_else(|| HubError::Offline { dir: dir(), id: id.into() });
        }
        let client = self.client()?;
        Download { hub: self, model, weights, check, client, connections: Connections::default(), repo }.run()
    }

    /// Asks the hub once, and returns how long its answer took. A refusal is an answer.
    ///
    /// # Errors
    /// The endpoint is not used, or does not answer.
    pub fn ping(&self) -> Result<Duration, HubError> {
        let (client, asked) = (self.client()?, Instant::now());
        match client.get(&client.url("/api/models?limit=1"), 0) {
            Err(RequestError::Network(reason)) => Err(HubError::Silent { endpoint: self.endpoint.clone(), reason }),
            _ => Ok(asked.elapsed()),
        }
    }

    /// Bytes that this user may still write to the cache's disk; `None` if the system does not say.
    pub fn free_bytes(&self) -> Option<u64> {
        free_space::free_bytes(&self.cache)
    }

    fn client(&self) -> Result<Client, HubError> {
        let access = Access {
            endpoint: &self.endpoint,
            source: self.source,
            token: self.token.clone(),
            allow_plain_http: self.allow_plain_http,
            ca_file: self.ca_file.as_deref(),
            segment: self.segment,
            timeouts: self.timeouts.clone(),
        };
        Client::new(access).map_err(|reason| HubError::Endpoint { endpoint: self.endpoint.clone(), reason })
    }
}
