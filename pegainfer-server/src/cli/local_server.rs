//! A model and its API in this process, without a socket. `chat` and `run-batch` send their requests to it, so that
//! they use the same checks, templates, parsers and limits as requests of clients.

use crate::app::{App, Options};
use crate::text_service::Checkpoint;
use anyhow::{Context, Result};
use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use axum::response::Response;
use pegainfer_core::engine::EngineLimits;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine::family::LoadedEngine;
use tower::Service;

/// A loaded model: its running engine, and its text functions.
pub struct LoadedModel {
    /// The running engine.
    pub engine: LoadedEngine,
    /// Tokenizer, templates and sampling defaults.
    pub checkpoint: Checkpoint,
    /// Where the checkpoint came from, for messages.
    pub source: String,
}

impl LoadedModel {
    /// Finds the checkpoint, downloads it if necessary, and starts its engine.
    pub fn load(args: &EngineArgs) -> Result<Self> {
        let pegainfer_models::LoadedModel { engine, text: mut checkpoint, dir } =
            pegainfer_models::load(args, Checkpoint::load)?;
        checkpoint.tokenizer.check_vocab(engine.handle.limits().vocab_size)?;
        if let Some(id) = &dir.hub_id {
            checkpoint.name.clone_from(id);
        }
        Ok(Self { engine, checkpoint, source: dir.to_string() })
    }
}

/// The API of a model in this process.
#[derive(Clone)]
pub struct LocalServer {
    router: Router,
    /// Name of the model.
    pub name: String,
    /// Limits of the engine.
    pub limits: EngineLimits,
}

impl LocalServer {
    /// The API of a loaded model. `names` are additional names that requests may use.
    pub fn new(model: LoadedModel, names: Vec<String>, options: Options) -> Self {
        let limits = model.engine.handle.limits().clone();
        let app = App::new(model.engine.handle, model.checkpoint, names, options);
        let name = app.names().first().cloned().unwrap_or_default();
        Self { router: app.router(), name, limits }
    }

    /// Posts a JSON body to a path of the API.
    pub async fn post(&self, path: &str, body: Vec<u8>) -> Result<Response> {
        let request = Request::post(path).header(header::HOST, "localhost");
        let request = request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body));
        let response = self.router.clone().call(request.context("the request cannot be built")?).await;
        Ok(response.unwrap_or_else(|never| match never {}))
    }
}

/// The async runtime of a command that has a [`LocalServer`].
pub fn async_runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the async runtime cannot be started")
}
