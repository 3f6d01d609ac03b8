//! Servers in this process. The server crate depends on this one, so the program passes functions that start them.

use anyhow::Result;
use futures_util::future::BoxFuture;
use pegainfer_core::engine::EngineHandle;
use pegainfer_models::args::EngineArgs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

/// Starts servers in this process.
pub trait Servers {
    /// Raises the limit of open files to the system's maximum, for a client or server with many connections.
    fn raise_open_files(&self);

    /// Serves `engine`, with tokenizer and template of the checkpoint in `dir`, on a free port of this machine until
    /// the caller's async runtime is shut down.
    ///
    /// # Errors
    /// The checkpoint's text side cannot be loaded, or no port is free.
    fn serve(&self, engine: EngineHandle, dir: &Path) -> Result<SocketAddr>;

    /// Loads a model and its API, without a socket.
    ///
    /// # Errors
    /// The checkpoint cannot be found or loaded.
    fn load(&self, args: &EngineArgs) -> Result<ChatApi>;
}

/// The chat API of a loaded model. Clones share the model.
#[derive(Clone)]
pub struct ChatApi {
    /// Source of the checkpoint, for messages.
    pub source: String,
    /// True if the model has a chat template.
    pub has_template: bool,
    /// Maximum number of running sequences.
    pub max_num_seqs: usize,
    /// Posts a JSON body to `/v1/chat/completions`.
    pub post: Arc<dyn Fn(Vec<u8>) -> BoxFuture<'static, Result<Response>> + Send + Sync>,
}

/// A complete response.
pub struct Response {
    /// HTTP status.
    pub status: u16,
    /// JSON.
    pub body: Vec<u8>,
}
