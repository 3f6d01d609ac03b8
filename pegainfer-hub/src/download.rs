//! Downloads a model: config.json first, and the rest after it was checked and the disk has space.

use super::blob::{Blob, Report};
use super::cache::RepoCache;
use super::client::{Client, RequestError, TRIES};
use super::complete::{self, INDEX, SINGLE};
use super::connections::Connections;
use super::error::HubError;
use super::free_space::free_bytes;
use super::gguf::ModelId;
use super::hub::{DownloadCheck, Hub, Known};
use super::listing::{FileInfo, Listing};
use super::transfers::Transfers;
use indicatif::DecimalBytes;
use pegainfer_terminal::progress::{Progress, Unit};
use std::collections::BTreeSet;
use std::path::PathBuf;

const CONFIG: &str = "config.json";
/// Small files, downloaded if the repository has them.
const TEXT_FILES: [&str; 8] = [
    CONFIG,
    "generation_config.json",
    // Descriptions of quantised weights that are not in config.json.
    "quantize_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    // DeepSeek-V4's prompt encoder, from which texts are read.
    "encoding/encoding_dsv4.py",
];
/// Maximum size of a file without weights, in bytes.
const MAX_TEXT_FILE: u64 = 1 << 28;

/// A download of one model.
pub(super) struct Download<'a> {
    pub(super) hub: &'a Hub,
    pub(super) model: ModelId<'a>,
    /// False to leave out the safetensors.
    pub(super) weights: bool,
    pub(super) check: &'a DownloadCheck<'a>,
    pub(super) client: Client,
    pub(super) connections: Connections,
    pub(super) repo: RepoCache,
}

impl Download<'_> {
    /// Downloads the model and returns its directory or first GGUF file.
    pub(super) fn run(&self) -> Result<PathBuf, HubError> {
        // A copy that can be used instead is not worth waiting for.
        let tries = if self.complete().is_some() { 1 } else { TRIES };
        let fetch = || Listing::fetch(&self.client, self.model.repo, self.model.revision);
        let listing = match self.client.retry((self.model.repo, tries), fetch) {
            Ok(listing) => listing,
            Err(error) => return self.cached().ok_or_else(|| self.explain(error)),
        };
        let dir = match self.model.quantization {
            Some(quantization) => self.gguf(&listing, quantization)?,
            None => self.folder(&listing)?,
        };
        // Record only a complete download: without a network, `complete` relies on the record.
        if (self.weights || self.model.quantization.is_some())
            && self.repo.record(self.model.revision, &listing.commit).is_err()
        {
            log::warn!(
                "the cache's pointer to {} cannot be written; the next start needs the network",
                self.model.repo
            );
        }
        Ok(dir)
    }

    fn folder(&self, listing: &Listing) -> Result<PathBuf, HubError> {
        let has = |name: &str| listing.files.contains_key(name);
        if !has(CONFIG) {
            return Err(self.without(listing, CONFIG));
        }
        if self.weights && !has(INDEX) && !has(SINGLE) {
            return Err(self.without(listing, SINGLE));
        }
        let config = std::fs::read_to_string(self.text_file(listing, CONFIG)?);
        let config = config.map_err(|error| self.failed(CONFIG, error.to_string()))?;
        (self.check)(Known::Config(&config)).map_err(|reason| self.refused(self.model.repo, reason))?;
        let mut files = Vec::new();
        for name in TEXT_FILES.into_iter().filter(|name| has(name)) {
            files.push((name.to_owned(), self.text_info(listing, name)?));
        }
        let shards = if self.weights { self.shards(listing)? } else { BTreeSet::new() };
        for name in shards {
            let info = self.info(listing, &name)?;
            files.push((name, info));
        }
        self.files(listing, &files)?;
        Ok(self.repo.snapshot(&listing.commit))
    }

    fn shards(&self, listing: &Listing) -> Result<BTreeSet<String>, HubError> {
        if !listing.files.contains_key(INDEX) {
            return Ok([SINGLE.to_string()].into());
        }
        let path = self.text_file(listing, INDEX)?;
        complete::read_index(&path).map_err(|reason| self.failed(INDEX, reason))
    }

    /// Downloads files of a listing, if the disk has space for all of them, and returns their paths.
    pub(super) fn files(&self, listing: &Listing, files: &[(String, &FileInfo)]) -> Result<Vec<PathBuf>, HubError> {
        let total: u64 = files.iter().map(|(_, info)| info.size).sum();
        let present: u64 = files.iter().map(|(_, info)| self.repo.present(info)).sum();
        let missing = total.saturating_sub(present);
        if missing > 0 {
            (self.check)(Known::Bytes(total)).map_err(|reason| self.refused(self.model.repo, reason))?;
        }
        self.check_space(missing)?;
        if missing == 0 {
            return files.iter().map(|(name, info)| self.file(listing, name, info, &|_| Ok(()))).collect();
        }
        let (dir, bytes, count) = (self.hub.cache.display(), DecimalBytes(missing), files.len());
        log::info!("downloading {bytes} of {} to {dir}: {} in {count} files", self.model.repo, DecimalBytes(total));
        let progress = Progress::start(format!("downloading {}", self.model.repo), Unit::Bytes, present, total);
        let present = files.iter().map(|(_, info)| self.repo.present(info)).collect();
        let all = Transfers::new(progress, present);
        let fetch = |i: usize| {
            let (name, info) = &files[i];
            self.file(listing, name, info, &|bytes| all.report(i, bytes))
        };
        let paths = all.run(fetch);
        all.finish();
        paths
    }

    fn check_space(&self, bytes: u64) -> Result<(), HubError> {
        let dir = &self.hub.cache;
        match free_bytes(dir) {
            Some(free) if free < bytes => {
                Err(HubError::NoSpace { id: self.model.repo.to_string(), dir: dir.display().to_string(), bytes, free })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn info<'a>(&self, listing: &'a Listing, name: &str) -> Result<&'a FileInfo, HubError> {
        let reason = match listing.files.get(name) {
            Some(Some(info)) => return Ok(info),
            Some(None) => "the hub lists it without size or hash, so that it cannot be verified",
            None => "the hub does not list it",
        };
        Err(self.failed(name, reason.into()))
    }

    /// The listed size and hash of a file without weights. Refuses files that are too large.
    fn text_info<'a>(&self, listing: &'a Listing, name: &str) -> Result<&'a FileInfo, HubError> {
        let info = self.info(listing, name)?;
        if info.size > MAX_TEXT_FILE {
            let reason = format!("the hub lists {} bytes, at most {MAX_TEXT_FILE} are taken", info.size);
            return Err(self.failed(name, reason));
        }
        Ok(info)
    }

    fn text_file(&self, listing: &Listing, name: &str) -> Result<PathBuf, HubError> {
        self.file(listing, name, self.text_info(listing, name)?, &|_| Ok(()))
    }

    /// URL of a file's content.
    pub(super) fn url(&self, name: &str, info: &FileInfo) -> String {
        self.client.url(&self.client.source.file(self.model.repo, &info.revision, name))
    }

    /// Downloads one file.
    fn file(&self, listing: &Listing, name: &str, info: &FileInfo, report: Report<'_>) -> Result<PathBuf, HubError> {
        let (url, connections) = (self.url(name, info), &self.connections);
        let blob = Blob { client: &self.client, repo: &self.repo, url, name, info, connections, report };
        blob.fetch().and_then(|()| Ok(self.repo.link(&listing.commit, name, &info.hash)?)).map_err(
            |error| match error {
                RequestError::Status(status @ (401 | 403)) => self.gated(status),
                error => self.failed(name, error.to_string()),
            },
        )
    }

    /// A complete earlier download, for when the hub cannot be reached.
    fn cached(&self) -> Option<PathBuf> {
        let dir = self.complete()?;
        log::warn!(
            "{} cannot be asked for {}; the copy in {} is used",
            self.hub.endpoint,
            self.model.repo,
            dir.display()
        );
        Some(dir)
    }

    fn complete(&self) -> Option<PathBuf> {
        complete::model(&self.repo, self.model, self.weights)
    }

    /// The error of a gated repository: its listing is public, its files are not.
    pub(super) fn gated(&self, status: u16) -> HubError {
        let page = self.client.url(&self.hub.source.page(self.model.repo));
        let token = self.hub.source.token_variable();
        HubError::Gated { endpoint: self.hub.endpoint.clone(), id: self.model.repo.to_string(), status, page, token }
    }

    fn explain(&self, error: RequestError) -> HubError {
        let (endpoint, id) = (self.hub.endpoint.clone(), self.model.repo.to_string());
        let token = self.hub.source.token_variable();
        match error {
            RequestError::Status(404) => HubError::NotFound { endpoint, id, token },
            // Without a token, the hub also answers 401 for repositories that do not exist.
            RequestError::Status(401) if self.hub.token.is_none() => HubError::NotFound { endpoint, id, token },
            RequestError::Status(status @ (401 | 403)) => HubError::Forbidden { endpoint, id, status, token },
            RequestError::Network(reason) => HubError::Unreachable { endpoint, id, reason },
            error => HubError::Answer { endpoint, id, reason: error.to_string() },
        }
    }

    pub(super) fn failed(&self, file: &str, reason: String) -> HubError {
        HubError::Download { id: self.model.repo.to_string(), file: file.to_string(), reason }
    }

    pub(super) fn refused(&self, id: &str, reason: String) -> HubError {
        HubError::Refused { endpoint: self.hub.endpoint.clone(), id: id.to_string(), reason }
    }
}
