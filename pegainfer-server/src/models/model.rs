//! A loaded model.

use crate::adapters::Adapters;
use crate::kv_events::KvEvents;
use crate::metrics::{Metrics, ModelMetrics};
use crate::text_service::{Checkpoint, GrammarService, GrammarTrial, ImageReader};
use pegainfer_core::engine::EngineHandle;
use pegainfer_text::GrammarCompiler;
use std::sync::Arc;

/// A loaded model: its engine, its text side and its metrics.
pub struct Model {
    /// Names that clients may use for it; the first one is the canonical name. Never empty.
    pub names: Vec<String>,
    /// Publishers of its KV events; `None` if nothing is published. They end before the engine.
    pub kv_events: Option<KvEvents>,
    /// The engine that requests are submitted to.
    pub engine: EngineHandle,
    /// Tokenizer, templates and grammars.
    pub text: Text,
    /// Adapters that requests may name; `None` if they are not enabled.
    pub adapters: Option<Arc<Adapters>>,
    /// Counters and histograms of its requests.
    pub metrics: Arc<ModelMetrics>,
    /// Where its weights are, if that is known.
    pub placement: Option<Placement>,
}

/// Where the weights of a model are.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Name of the model's family.
    pub family: &'static str,
    /// Name of the device.
    pub device: String,
    /// Number of tensor-parallel ranks of each engine.
    pub ranks: usize,
    /// Bytes of the weights on it.
    pub weight_bytes: u64,
}

/// The text side of a model, which a sleeping model keeps.
pub struct Text {
    /// Tokenizer, template and sampling defaults.
    pub checkpoint: Checkpoint,
    /// Compiles schemas and grammars into token masks.
    pub grammars: GrammarService,
    /// How the model reads images; `None` for a model of text.
    pub images: Option<ImageReader>,
}

impl Text {
    /// The text side of a model with this engine. `trial` tries to compile grammars within limits; `None` only checks
    /// their sources.
    pub fn new(checkpoint: Checkpoint, engine: &EngineHandle, trial: Option<GrammarTrial>) -> Self {
        let limits = engine.limits();
        let (vocab_size, eos) = (limits.vocab_size, limits.eos_token_ids.clone());
        checkpoint.warn_of_endless_answers(&eos);
        let compiler =
            checkpoint.encoder.run(move |tokenizer| GrammarCompiler::new(tokenizer.clone(), vocab_size, eos));
        let images = checkpoint.image_reader(limits.image_token);
        Self { checkpoint, grammars: GrammarService::new(compiler, trial), images }
    }

    /// What the model reads, in the words of `/v1/models`.
    pub fn input_modalities(&self) -> &'static [&'static str] {
        if self.images.is_some() { &["text", "image"] } else { &["text"] }
    }
}

impl Model {
    /// A model that has not served a request yet.
    pub fn new(
        names: Vec<String>,
        engine: EngineHandle,
        text: Text,
        adapters: Option<Arc<Adapters>>,
        kv_events: Option<KvEvents>,
        metrics: &Metrics,
    ) -> Self {
        let name = names.first().map_or(text.checkpoint.name.as_str(), String::as_str);
        let counters = kv_events.as_ref().map_or(&[][..], KvEvents::counters).to_vec();
        let metrics = metrics.loaded(name, engine.clone(), adapters.clone(), counters);
        Self { names, engine, text, adapters, kv_events, metrics, placement: None }
    }

    /// The model with its weights at this place.
    pub fn placed(self, placement: Option<Placement>) -> Self {
        Self { placement, ..self }
    }
}
