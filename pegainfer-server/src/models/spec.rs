//! A name, and how its model gets into memory.

use super::model::{Placement, Text};
use crate::adapters::Adapters;
use crate::kv_events::KvEvents;
use crate::text_service::{Checkpoint, GrammarTrial};
use anyhow::{Result, anyhow};
use pegainfer_core::engine::EngineHandle;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A model that requests may name.
#[derive(Clone)]
pub struct ModelSpec {
    /// Its names; the first one is the canonical name. Never empty.
    pub names: Vec<String>,
    /// True if it stays in memory.
    pub pinned: bool,
    /// Time after which it leaves when idle; `None` for the server's.
    pub idle_time: Option<Duration>,
    /// Names of the adapters that are loaded with it.
    pub adapters: Vec<String>,
    /// Loads it; `None` for a model that is given to the server and stays.
    pub loader: Option<Arc<dyn LoadModel>>,
}

impl ModelSpec {
    /// A model that is given to the server and stays.
    pub fn pinned(names: Vec<String>) -> Self {
        Self { names, pinned: true, idle_time: None, adapters: Vec::new(), loader: None }
    }
}

/// Loads a model. The functions block.
pub trait LoadModel: Send + Sync {
    /// Finds the checkpoint, downloads it if necessary, begins to read its text side unless `text` has it, and computes
    /// the memory that the model takes.
    ///
    /// # Errors
    /// There is no such checkpoint, or it cannot be served.
    fn prepare(&self, text: Option<Box<Text>>) -> Result<Prepared>;
}

/// A model that is ready to be loaded.
pub struct Prepared {
    /// Memory that it takes, in bytes.
    pub bytes: u64,
    /// Its text side.
    pub text: TextSide,
    /// Loads the weights and starts the engine.
    pub start: Box<dyn FnOnce() -> Result<Started> + Send>,
}

/// The text side of a model that is being loaded.
pub enum TextSide {
    /// Read from the checkpoint by a thread, while the engine is loaded.
    New(JoinHandle<Result<Checkpoint>>),
    /// Kept while the model slept.
    Kept(Box<Text>),
}

impl TextSide {
    /// Starts to read the text side of a checkpoint.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn read(read: impl FnOnce() -> Result<Checkpoint> + Send + 'static) -> Result<Self> {
        Ok(Self::New(thread::Builder::new().name("model-text".into()).spawn(read)?))
    }

    /// The text side of a model with this engine, once it is read; see [`Text::new`].
    ///
    /// # Errors
    /// The checkpoint has none that can be used.
    pub fn finish(self, engine: &EngineHandle, trial: Option<GrammarTrial>) -> Result<Text> {
        let checkpoint = match self {
            Self::Kept(text) => return Ok(*text),
            Self::New(reading) => reading.join().map_err(|_| anyhow!("its tokenizer could not be read"))??,
        };
        checkpoint.tokenizer.check_vocab(engine.limits().vocab_size)?;
        Ok(Text::new(checkpoint, engine, trial))
    }
}

/// A running engine.
pub struct Started {
    /// The engine.
    pub engine: EngineHandle,
    /// Its adapters, if they are enabled.
    pub adapters: Option<Arc<Adapters>>,
    /// Publishers of its KV events, if they are published.
    pub kv_events: Option<KvEvents>,
    /// Where its weights are, if that is known.
    pub placement: Option<Placement>,
    /// What was loaded, for the log.
    pub summary: String,
}
