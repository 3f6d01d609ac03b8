//! Loads a model: its engine, and the caller's part of its text side.

use crate::args::EngineArgs;
use crate::engine::{self, family::LoadedEngine};
use crate::model_path::{self, ModelDir};
use anyhow::{Result, bail};
use std::path::Path;

/// A loaded model.
pub struct LoadedModel<T> {
    /// The running engine.
    pub engine: LoadedEngine,
    /// The caller's part of the directory, such as the tokenizer.
    pub text: T,
    /// Source of the checkpoint.
    pub dir: ModelDir,
}

/// Finds the checkpoint, downloads it if necessary, and starts its engine. `text` loads the text side at the same time:
/// loading the tokenizer of a large vocabulary takes as long as loading small weights.
///
/// # Errors
/// The checkpoint cannot be found, downloaded or loaded.
pub fn load<T: Send>(args: &EngineArgs, text: impl FnOnce(&Path) -> Result<T> + Send) -> Result<LoadedModel<T>> {
    let dir = model_path::resolve(args)?;
    let (text, engine) = std::thread::scope(|scope| {
        let text = scope.spawn(|| text(&dir.dir));
        let engine = engine::load(&dir.dir, args);
        (text.join(), engine)
    });
    let engine = engine?;
    let Ok(text) = text else { bail!("the tokenizer could not be loaded: its loader panicked") };
    Ok(LoadedModel { engine, text: text?, dir })
}
