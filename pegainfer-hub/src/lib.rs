//! Downloads checkpoints from the Hugging Face hub.
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
//!   hashes.
//! - [`pace`]: the minimum rate of a download.
//! - `hub`: [`Hub`], as the environment names it.
//! - `download`: config.json first; the rest after it was checked, if the disk has space for it (`free_space`). `blob`:
//!   one file, resumed and verified.
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
mod download;
mod error;
mod free_space;
mod gguf;
mod gguf_download;
mod hub;
mod listing;
pub mod pace;

pub use cached::CachedModel;
pub use error::HubError;
pub use hub::{ConfigCheck, Hub};

use cache::RepoCache;
use client::Client;
use download::Download;
use gguf::ModelId;
use std::path::PathBuf;

impl Hub {
    /// Downloads the files of `id` (`organisation/name`) that serving needs and returns the local directory. `weights`
    /// = false leaves out the safetensors. `check` sees config.json before anything else is downloaded.
    ///
    /// `id` may name a branch, tag or commit: `organisation/name@REVISION`. With the quantisation of a GGUF file
    /// (`organisation/name:Q4_K_M`), downloads that file or its shards and returns the path of the first. Their headers
    /// are read before, and what is not served is refused.
    ///
    /// # Errors
    /// One sentence: what the hub, the network or the cache's disk refused.
    pub fn fetch(&self, id: &str, weights: bool, check: &ConfigCheck<'_>) -> Result<PathBuf, HubError> {
        let model = ModelId::parse(id);
        let repo = RepoCache::new(&self.cache, model.repo);
        if self.offline {
            let dir = || self.cache.display().to_string();
            let found = complete::model(&repo, model, weights);
            return found.ok_or_else(|| HubError::Offline { dir: dir(), id: id.into() });
        }
        let client = Client::new(
            &self.endpoint,
            self.token.clone(),
            self.allow_plain_http,
            &self.timeouts,
            self.ca_file.as_deref(),
        )
        .map_err(|reason| HubError::Endpoint { endpoint: self.endpoint.clone(), reason })?;
        Download { hub: self, model, weights, check, client, repo }.run()
    }
}
