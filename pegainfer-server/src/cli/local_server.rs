//! A model and its API in this process, without a socket. `chat` and `run-batch` send their requests to it, so that
//! they use the same checks, templates, parsers and limits as requests of clients.

use crate::app::{App, Options};
use crate::metrics::Metrics;
use crate::models::{ModelLimits, ModelSpec, Models};
use crate::text_service::Checkpoint;
use anyhow::{Context, Result};
use axum::Router;
use axum::body::Body;
use axum::http::request::Builder;
use axum::http::{Request, header};
use axum::response::Response;
use pegainfer_core::engine::EngineLimits;
use pegainfer_models::args::EngineArgs;
use pegainfer_models::engine::family::LoadedEngine;
use std::sync::Arc;
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
        let pegainfer_models::LoadedModel { engine, text: checkpoint, dir } =
            pegainfer_models::load(args, |dir| Checkpoint::load_for(dir, args.task))?;
        checkpoint.tokenizer.check_vocab(engine.handle.limits().vocab_size)?;
        let checkpoint = checkpoint.with_source(dir.hub_id.clone(), dir.origin());
        Ok(Self { engine, checkpoint, source: dir.to_string() })
    }
}

/// The API of a model in this process.
#[derive(Clone)]
pub struct LocalServer {
    router: Router,
    /// Name of the first model.
    pub name: String,
    /// Names of all models.
    pub names: Vec<String>,
    /// Limits of the first model's engine.
    pub limits: EngineLimits,
}

impl LocalServer {
    /// The API of a loaded model. `names` are additional names that requests may use.
    pub fn new(model: LoadedModel, names: Vec<String>, options: Options) -> Self {
        let limits = model.engine.handle.limits().clone();
        let app = App::new(model.engine.handle, model.checkpoint, names, options);
        Self::of(&app, limits)
    }

    /// The API of models that are loaded when they are asked for, the first one at once.
    pub fn on_demand(
        specs: Vec<ModelSpec>,
        limits: ModelLimits,
        options: Options,
        runtime: &tokio::runtime::Runtime,
    ) -> Result<Self> {
        let first = specs.first().and_then(|spec| spec.names.first()).context("there is no model")?;
        let metrics = Arc::new(Metrics::new(first, None));
        let models = Models::new(specs, limits, metrics.clone(), options.grammar_trial.clone());
        let id = models.find(None).context("there is no model")?;
        let limits = runtime.block_on(models.load(id))?.engine.limits().clone();
        models.tend().context("the thread that unloads models cannot be started")?;
        Ok(Self::of(&App::of(models, metrics, options), limits))
    }

    fn of(app: &App, limits: EngineLimits) -> Self {
        let names = app.names();
        Self { router: app.router(), name: names.first().cloned().unwrap_or_default(), names, limits }
    }

    /// Gets a path of the API.
    pub async fn get(&self, path: &str) -> Result<Response> {
        self.send(Request::get(path), Body::empty()).await
    }

    /// Posts a JSON body to a path of the API.
    pub async fn post(&self, path: &str, body: Vec<u8>) -> Result<Response> {
        self.send(Request::post(path).header(header::CONTENT_TYPE, "application/json"), Body::from(body)).await
    }

    async fn send(&self, request: Builder, body: Body) -> Result<Response> {
        let request = request.header(header::HOST, "localhost").body(body).context("the request cannot be built")?;
        let response = self.router.clone().call(request).await;
        Ok(response.unwrap_or_else(|never| match never {}))
    }
}

/// The async runtime of a command that has a [`LocalServer`].
pub fn async_runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the async runtime cannot be started")
}
