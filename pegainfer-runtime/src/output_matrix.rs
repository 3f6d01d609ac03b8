//! Output matrix of a decoder: a separate matrix, or the embedding table.

use super::config_file::{ConfigError, ConfigFile};
use pegainfer_core::weights::{Checkpoint, WeightsError};

/// Name of the output matrix in checkpoints.
pub const HEAD: &str = "lm_head.weight";

impl ConfigFile {
    /// True if the embedding table, tensor `embedding`, is also the output matrix.
    ///
    /// Weights next to config.json decide, because `tie_word_embeddings` is often wrong. An [output
    /// matrix](HEAD) that differs from the embedding is used even if config.json ties it; fine-tuned heads and resized
    /// vocabularies leave such files. A copy of a tied embedding is not loaded, and a model without an output matrix
    /// uses the embedding, as in vLLM.
    pub fn ties_output(&self, embedding: &str) -> Result<bool, ConfigError> {
        let tied = self.flag("tie_word_embeddings")?;
        // Unreadable weights are refused by the loader; a plan needs none.
        let Some(checkpoint) = self.model_path().and_then(|path| Checkpoint::open(path).ok()) else { return Ok(tied) };
        match (tied, checkpoint.contains(HEAD)) {
            (true, true) => match checkpoint.equal(HEAD, embedding) {
                Ok(false) => {
                    log::warn!(
                        "config.json ties the output matrix to the embedding (tie_word_embeddings), but the \
                         checkpoint has another one: {HEAD} is used"
                    );
                    Ok(false)
                }
                Ok(true) | Err(WeightsError::MissingTensor { .. }) => Ok(true),
                Err(WeightsError::Io { path, error }) => Err(ConfigError::Io { path, error }),
                Err(error) => Err(self.invalid(error.to_string())),
            },
            (false, false) if checkpoint.contains(embedding) => {
                log::warn!(
                    "the checkpoint has no {HEAD}, although config.json does not tie it (tie_word_embeddings): the \
                     embedding is the output matrix; if answers make no sense, the checkpoint is incomplete"
                );
                Ok(true)
            }
            _ => Ok(tied),
        }
    }
}
