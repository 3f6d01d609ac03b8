//! Downloads a model in GGUF after its header was read.

use super::client::RequestError;
use super::gguf;
use super::listing::Listing;
use super::{Download, HubError};
use pegainfer_model_files::gguf::{Gguf, Header};
use pegainfer_model_files::{FilesError, ModelFiles};
use std::io::Read;
use std::path::PathBuf;

/// Maximum size of the header of a GGUF file, most of which is the vocabulary, in bytes.
const MAX_GGUF_HEADER: u64 = 1 << 28;

impl Download<'_> {
    /// Downloads a model in GGUF and returns the path of its first file.
    pub(super) fn gguf(&self, listing: &Listing, quantization: &str) -> Result<PathBuf, HubError> {
        let refused = |reason: String| {
            let id = format!("{}:{quantization}", self.id);
            HubError::Gguf { endpoint: self.hub.endpoint.clone(), id, reason }
        };
        let names = gguf::choose(listing.files.keys().map(String::as_str), quantization).map_err(refused)?;
        let headers = names.iter().map(|name| self.header(listing, name)).collect::<Result<Vec<_>, _>>()?;
        let paths = names.iter().map(PathBuf::from).collect();
        check(paths, headers).map_err(|error| refused(error.to_string()))?;
        let mut paths = Vec::new();
        for name in &names {
            paths.push(self.file(listing, name, self.info(listing, name)?)?);
        }
        Ok(paths.swap_remove(0))
    }

    /// Reads the header of a GGUF file and ends the transfer.
    fn header(&self, listing: &Listing, name: &str) -> Result<Header, HubError> {
        let info = self.info(listing, name)?;
        let url = self.client.url(&format!("/{}/resolve/{}/{name}", self.id, listing.commit));
        let response = self.client.get(&url, 0).map_err(|error| match error {
            RequestError::Status(401 | 403) => self.explain(error),
            error => self.failed(name, error.to_string()),
        })?;
        let body = std::io::BufReader::new(self.client.body(response).take(MAX_GGUF_HEADER));
        Header::read(body, info.size).map_err(|error| self.failed(name, format!("its header is not used: {error}")))
    }

    /// The error of a repository that lacks a file; it may hold GGUF files instead.
    pub(super) fn without(&self, listing: &Listing, file: &'static str) -> HubError {
        let (endpoint, id) = (self.hub.endpoint.clone(), self.id.to_string());
        match gguf::list(listing.files.keys().map(String::as_str)) {
            Some(names) => {
                let reason = format!(
                    "it holds GGUF files, so append the end of the name of one after a colon, as in {id}:Q4_K_M; it has \
                     {names}"
                );
                HubError::Gguf { endpoint, id, reason }
            }
            None => self.incomplete(file),
        }
    }
}

/// Refuses what is not served: an architecture, a type of weights, a tokenizer.
fn check(paths: Vec<PathBuf>, headers: Vec<Header>) -> Result<(), FilesError> {
    let files = ModelFiles::from_gguf(Gguf::new(paths, headers)?)?;
    ["config.json", "tokenizer.json"].iter().try_for_each(|name| files.read(name).map(drop))
}
