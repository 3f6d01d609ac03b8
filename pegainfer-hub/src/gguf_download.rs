//! Downloads a model in GGUF after its header was read.

use super::client::{RequestError, TRIES};
use super::download::Download;
use super::error::HubError;
use super::gguf;
use super::hub::{DownloadCheck, Known};
use super::listing::{FileInfo, Listing};
use pegainfer_model_files::gguf::{Gguf, Header};
use pegainfer_model_files::{ModelFiles, check_architecture};
use std::io::{BufReader, Read};
use std::path::PathBuf;

/// Bytes at the beginning of a file in which its architecture is looked for, before the rest of the header is read.
const BEGINNING: u64 = 1 << 16;
/// Maximum size of the header of a GGUF file, most of which is the vocabulary, in bytes.
const MAX_GGUF_HEADER: u64 = 1 << 28;

impl Download<'_> {
    /// Downloads a model in GGUF and returns the path of its first file.
    pub(super) fn gguf(&self, listing: &Listing, quantization: &str) -> Result<PathBuf, HubError> {
        let refused = |reason: String| self.refused(&format!("{}:{quantization}", self.model.repo), reason);
        let names = gguf::choose(listing.files.keys().map(String::as_str), quantization).map_err(refused)?;
        let mut files = Vec::new();
        for name in names {
            let info = self.info(listing, &name)?;
            files.push((name, info));
        }
        let (first, info) = &files[0];
        if let Some(architecture) = self.architecture(first, info)? {
            check_architecture(&architecture).map_err(refused)?;
        }
        let headers = files.iter().map(|(name, info)| self.header(name, info)).collect::<Result<Vec<_>, _>>()?;
        let paths = files.iter().map(|(name, _)| PathBuf::from(name)).collect();
        check(paths, headers, self.check).map_err(refused)?;
        Ok(self.files(listing, &files)?.swap_remove(0))
    }

    /// Reads the architecture, which is among a file's first bytes.
    fn architecture(&self, name: &str, info: &FileInfo) -> Result<Option<String>, HubError> {
        let body = self.beginning(name, info, Some(BEGINNING.min(info.size)))?;
        Header::architecture(body.take(BEGINNING), info.size).map_err(|error| self.unreadable(name, &error))
    }

    /// Reads the header of a GGUF file and ends the transfer.
    fn header(&self, name: &str, info: &FileInfo) -> Result<Header, HubError> {
        let body = BufReader::new(self.beginning(name, info, None)?.take(MAX_GGUF_HEADER));
        Header::read(body, info.size).map_err(|error| self.unreadable(name, &error))
    }

    fn beginning(&self, name: &str, info: &FileInfo, bytes: Option<u64>) -> Result<impl Read + use<>, HubError> {
        let url = self.url(name, info);
        let response = self.client.retry((name, TRIES), || match bytes {
            Some(bytes) => self.client.get_beginning(&url, bytes),
            None => self.client.get(&url, 0),
        });
        let response = response.map_err(|error| match error {
            RequestError::Status(status @ (401 | 403)) => self.gated(status),
            error => self.failed(name, error.to_string()),
        })?;
        Ok(self.client.body(response))
    }

    fn unreadable(&self, name: &str, error: &impl ToString) -> HubError {
        self.failed(name, format!("its header is not used: {}", error.to_string()))
    }

    /// The error of a repository that lacks a file; it may hold GGUF files or an adapter instead.
    pub(super) fn without(&self, listing: &Listing, file: &'static str) -> HubError {
        let id = self.model.repo;
        let reason = match gguf::list(listing.files.keys().map(String::as_str)) {
            Some(names) => format!(
                "it holds GGUF files, so append the end of the name of one after a colon, as in {id}:Q4_K_M; it has {names}"
            ),
            None if listing.files.contains_key("adapter_config.json") => {
                "it is an adapter such as LoRA, which is not supported".to_owned()
            }
            None => format!("it has no {file}, and safetensors or GGUF files are served"),
        };
        self.refused(id, reason)
    }
}

/// Refuses what is not served: an architecture, a type of weights, a tokenizer, a configuration.
fn check(paths: Vec<PathBuf>, headers: Vec<Header>, check: &DownloadCheck<'_>) -> Result<(), String> {
    let words = |error: pegainfer_model_files::FilesError| error.to_string();
    let files = ModelFiles::from_gguf(Gguf::new(paths, headers).map_err(words)?).map_err(words)?;
    files.read("tokenizer.json").map_err(words)?;
    match files.read("config.json").map_err(words)? {
        Some(config) => check(Known::Config(&config)),
        None => Ok(()),
    }
}
