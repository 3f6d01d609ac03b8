//! Downloads checkpoints from the Hugging Face hub.
//!
//! Files are stored in the hub's usual cache (`HF_HOME`, else `~/.cache/huggingface`), so that other tools share them. An
//! interrupted download is resumed. `HF_ENDPOINT` and `HF_TOKEN` are honoured.

use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
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
    /// The download failed.
    #[error("the download of {file} of {id} failed: {reason}; start again to resume it")]
    Download {
        /// Id of the model.
        id: String,
        /// Name of the file.
        file: String,
        /// What failed.
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
    // DeepSeek-V4's prompt encoder, whose texts are read.
    "encoding/encoding_dsv4.py",
];
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Number of retries of one file before the start fails.
const RETRIES: usize = 3;

/// Downloads what serving needs of `id` and returns the local directory; `weights` = false leaves the safetensors out.
pub fn fetch(id: &str, weights: bool) -> Result<PathBuf, HubError> {
    let cache = Cache::from_env();
    let token = std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()).or_else(|| cache.token());
    let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|url| !url.is_empty());
    let endpoint = endpoint.unwrap_or_else(|| "https://huggingface.co".into()).trim_end_matches('/').to_string();
    Download { id, weights, endpoint, token, cache }.run()
}

/// One download, with its environment as fields so that tests can replace it.
struct Download<'a> {
    id: &'a str,
    weights: bool,
    endpoint: String,
    token: Option<String>,
    cache: Cache,
}

impl Download<'_> {
    fn run(&self) -> Result<PathBuf, HubError> {
        let api = ApiBuilder::from_cache(self.cache.clone())
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_retries(RETRIES)
            .build()
            .map_err(|e| self.unreachable(&e))?;
        let main = Repo::new(self.id.to_string(), RepoType::Model);
        let info = match api.repo(main.clone()).info() {
            Ok(info) => info,
            Err(error) => return self.cached(&main).ok_or_else(|| self.explain(&error)),
        };
        // All files of one commit, even if the repository changes meanwhile.
        let repo = api.repo(Repo::with_revision(self.id.to_string(), RepoType::Model, info.sha.clone()));
        let dir = self.files(&repo, &info)?;
        // Only a complete download is recorded, because `cached` relies on the record without a network.
        if self.weights && self.cache.repo(main).create_ref(&info.sha).is_err() {
            log::warn!("the cache's pointer to {} cannot be written; the next start needs the network", self.id);
        }
        Ok(dir)
    }

    fn files(&self, repo: &ApiRepo, info: &RepoInfo) -> Result<PathBuf, HubError> {
        let present: BTreeSet<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        if !present.contains("config.json") {
            return Err(self.incomplete("config.json"));
        }
        let config = self.file(repo, "config.json")?;
        for name in TEXT_FILES.iter().filter(|name| present.contains(**name)) {
            self.file(repo, name)?;
        }
        if self.weights {
            for shard in self.shards(repo, &present)? {
                self.file(repo, &shard)?;
            }
        }
        Ok(config.parent().map(Path::to_path_buf).unwrap_or_default())
    }

    fn shards(&self, repo: &ApiRepo, present: &BTreeSet<&str>) -> Result<BTreeSet<String>, HubError> {
        if present.contains(INDEX) {
            let path = self.file(repo, INDEX)?;
            return read_index(&path).map_err(|reason| self.failed(INDEX, reason));
        }
        if present.contains(SINGLE) { Ok([SINGLE.to_string()].into()) } else { Err(self.incomplete(SINGLE)) }
    }

    fn file(&self, repo: &ApiRepo, name: &str) -> Result<PathBuf, HubError> {
        repo.get(name).map_err(|error| match status(&error) {
            Some(401 | 403) => self.explain(&error),
            _ => self.failed(name, error.to_string()),
        })
    }

    /// A complete earlier download, for machines that are offline.
    fn cached(&self, main: &Repo) -> Option<PathBuf> {
        let repo = self.cache.repo(main.clone());
        let config = repo.get("config.json")?;
        let dir = config.parent()?.to_path_buf();
        log::warn!("{} cannot be asked for {}; the copy in {} is used", self.endpoint, self.id, dir.display());
        Some(dir)
    }

    fn explain(&self, error: &ApiError) -> HubError {
        let (endpoint, id) = (self.endpoint.clone(), self.id.to_string());
        match status(error) {
            Some(404) => HubError::NotFound { endpoint, id },
            // The hub answers 401 for repositories that do not exist, too, when no token was sent.
            Some(401) if self.token.is_none() => HubError::NotFound { endpoint, id },
            Some(status @ (401 | 403)) => HubError::Forbidden { endpoint, id, status },
            _ => self.unreachable(error),
        }
    }

    fn unreachable(&self, error: &ApiError) -> HubError {
        let (endpoint, id) = (self.endpoint.clone(), self.id.to_string());
        HubError::Unreachable { endpoint, id, reason: error.to_string() }
    }

    fn failed(&self, file: &str, reason: String) -> HubError {
        HubError::Download { id: self.id.to_string(), file: file.to_string(), reason }
    }

    fn incomplete(&self, file: &'static str) -> HubError {
        HubError::Incomplete { endpoint: self.endpoint.clone(), id: self.id.to_string(), file }
    }
}

fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(inner) => match **inner {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        ApiError::TooManyRetries(inner) => status(inner),
        _ => None,
    }
}

/// The shard files that an index names.
fn read_index(path: &Path) -> Result<BTreeSet<String>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    let index: Value = serde_json::from_str(&text).map_err(|e| format!("it is not valid JSON: {e}"))?;
    let map = index["weight_map"].as_object().ok_or("it has no weight_map")?;
    let shard = |file: &Value| match file.as_str() {
        // A file name, nothing that leads out of the directory.
        Some(name) if !name.contains(['/', '\\']) && !name.starts_with('.') => Ok(name.to_string()),
        _ => Err(format!("its weight_map names {file}, which is no file name")),
    };
    map.values().map(shard).collect()
}
