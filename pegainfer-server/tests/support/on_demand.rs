//! A server whose models are scripted engines that come and go.

use super::mock::{Control, MockEngine};
use super::{AppServer, model_dir, wait_until};
use crate::support::client::get;
use anyhow::{Result, bail};
use pegainfer_core::engine::{EngineConfig, EngineHandle};
use pegainfer_server::app::{App, Options};
use pegainfer_server::metrics::Metrics;
use pegainfer_server::models::{LoadModel, ModelLimits, ModelSpec, Models, Prepared, Started, Text, TextSide};
use pegainfer_server::text_service::Checkpoint;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of each model.
pub const BYTES: u64 = 1_000_000;

/// A model that tests load, slow down and break.
#[derive(Default)]
pub struct Scripted {
    /// Number of times that its checkpoint was read.
    pub prepared: AtomicUsize,
    /// Number of times that it was loaded.
    pub started: AtomicUsize,
    /// True while reading its checkpoint takes forever.
    pub is_slow: AtomicBool,
    /// True if its weights cannot be loaded.
    pub is_broken: AtomicBool,
    /// Controls of its engine, the last one of the loaded one.
    pub controls: Mutex<Vec<Arc<Control>>>,
    /// Bytes of it; [`BYTES`] if 0.
    pub bytes: AtomicUsize,
    /// True if its text side was kept when it was loaded for the last time.
    pub kept_text: AtomicBool,
}

/// Loads the engine of a model.
struct Loader(Arc<Scripted>);

impl LoadModel for Loader {
    fn prepare(&self, text: Option<Box<Text>>) -> Result<Prepared> {
        let model = self.0.clone();
        model.prepared.fetch_add(1, Ordering::SeqCst);
        while model.is_slow.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        model.kept_text.store(text.is_some(), Ordering::SeqCst);
        let text = match text {
            Some(text) => TextSide::Kept(text),
            None => TextSide::read(|| Checkpoint::load(&model_dir()))?,
        };
        let bytes = match model.bytes.load(Ordering::SeqCst) {
            0 => BYTES,
            bytes => bytes as u64,
        };
        let start = move || {
            model.started.fetch_add(1, Ordering::SeqCst);
            if model.is_broken.load(Ordering::SeqCst) {
                bail!("model.safetensors is cut off");
            }
            let (engine, control) = MockEngine::replying("one two three");
            model.controls.lock().unwrap().push(control);
            let engine = EngineHandle::spawn(engine, EngineConfig::default())?;
            Ok(Started { engine, adapters: None, kv_events: None, placement: None, summary: "scripted".to_owned() })
        };
        Ok(Prepared { bytes, text, start: Box::new(start) })
    }
}

/// The server, and its models.
pub struct OnDemand {
    pub server: AppServer,
    pub models: Arc<Models>,
    pub scripted: Vec<Arc<Scripted>>,
}

/// A model of this name that comes and goes.
pub fn spec(name: &str, scripted: &Arc<Scripted>) -> ModelSpec {
    ModelSpec {
        names: vec![name.to_owned()],
        pinned: false,
        idle_time: None,
        adapters: Vec::new(),
        loader: Some(Arc::new(Loader(scripted.clone()))),
    }
}

impl OnDemand {
    /// Starts a server for models of these names, of which `fitting` fit the memory.
    pub fn start(names: &[&str], fitting: u64, options: Options) -> Self {
        let limits = ModelLimits { memory: Some(fitting * BYTES), ..ModelLimits::default() };
        Self::start_with(names, limits, options, |_| ())
    }

    /// Starts a server with these limits. `change` changes the models.
    pub fn start_with(names: &[&str], limits: ModelLimits, options: Options, change: impl Fn(&mut ModelSpec)) -> Self {
        let scripted: Vec<Arc<Scripted>> = names.iter().map(|_| Arc::default()).collect();
        let specs = names.iter().zip(&scripted).map(|(name, scripted)| {
            let mut spec = spec(name, scripted);
            change(&mut spec);
            spec
        });
        let metrics = Arc::new(Metrics::new(names[0], None));
        let models = Models::new(specs.collect(), limits, metrics.clone(), None);
        models.tend().unwrap();
        let server = AppServer::start(App::of(models.clone(), metrics, options));
        Self { server, models, scripted }
    }

    /// The card of a model.
    pub fn card(&self, name: &str) -> Value {
        get(self.server.address, &format!("/v1/models/{name}")).json()
    }

    /// State of a model.
    pub fn state(&self, name: &str) -> String {
        self.card(name)["state"].as_str().unwrap().to_owned()
    }

    /// Waits until a model has this state.
    pub fn wait_for(&self, name: &str, state: &str) {
        wait_until(&format!("{name} is {state}"), || self.state(name) == state);
    }

    /// Controls of the engine that a model has now.
    pub fn control(&self, model: usize) -> Arc<Control> {
        self.scripted[model].controls.lock().unwrap().last().unwrap().clone()
    }
}
