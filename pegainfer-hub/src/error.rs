//! Errors of downloads.

use indicatif::DecimalBytes;
use thiserror::Error;

/// Why a checkpoint could not be fetched.
#[derive(Debug, Error)]
pub enum HubError {
    /// The repository does not exist, or it is private.
    #[error("{endpoint} has no model {id}, or it is private and {token} is missing")]
    NotFound {
        /// Variable of the hub's token.
        token: &'static str,
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
    },
    /// The token is missing or lacks access.
    #[error("{endpoint} refuses access to {id} (HTTP {status}): set {token} to a token that may read it")]
    Forbidden {
        /// Variable of the hub's token.
        token: &'static str,
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// HTTP status: 401 or 403.
        status: u16,
    },
    /// The hub lists the repository, and refuses its files.
    #[error(
        "{endpoint} refuses the files of {id} (HTTP {status}): log in, accept the terms at {page}, and set \
         {token} to a token of that account"
    )]
    Gated {
        /// URL of the model's page.
        page: String,
        /// Variable of the hub's token.
        token: &'static str,
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// HTTP status: 401 or 403.
        status: u16,
    },
    /// The hub answers, but not with the list of files.
    #[error("{endpoint} does not list the files of {id}: {reason}")]
    Answer {
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// Answer of the hub.
        reason: String,
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
    /// The hub does not answer.
    #[error("{endpoint} cannot be reached: {reason}")]
    Silent {
        /// URL of the hub.
        endpoint: String,
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
    /// The repository holds nothing that is served, or not the requested quantisation.
    #[error("{id} on {endpoint} cannot be served: {reason}")]
    Refused {
        /// URL of the hub.
        endpoint: String,
        /// Id of the model.
        id: String,
        /// Which models there are, or what is served.
        reason: String,
    },
    /// The disk of the cache is too small.
    #[error(
        "{id} needs {}, and {} are free in {dir}: free disk space, or point HF_HOME to another disk",
        DecimalBytes(*bytes), DecimalBytes(*free)
    )]
    NoSpace {
        /// Id of the model.
        id: String,
        /// Directory of the cache.
        dir: String,
        /// Bytes to download.
        bytes: u64,
        /// Free bytes.
        free: u64,
    },
}
