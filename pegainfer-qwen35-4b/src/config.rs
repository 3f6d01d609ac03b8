//! config.json of a Qwen3.5 checkpoint. What the engine does not implement is refused by name, never ignored.

mod raw;
#[cfg(test)]
mod tests;

use pegainfer_kernels::ops::BLOCK_SIZE;
use pegainfer_kernels::ops::{DeltaShape, HeadShape};
use raw::Raw;
use serde_json::Value;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// `<|endoftext|>` of the family's tokenizer, the one end-of-text id that its config.json names.
const END_OF_TEXT: u32 = 248_044;
/// `<|im_end|>`, with which a chat turn ends.
const END_OF_TURN: u32 = 248_046;

/// Why a checkpoint's configuration cannot be served.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A file is missing or unreadable.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// Not JSON, a field is missing, or a field has the wrong type.
    #[error("{} is not a valid Qwen3.5 configuration: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A valid configuration of something that this engine does not do.
    #[error("config.json asks for {field} = {value}, which this engine does not implement; it serves {served}")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would work.
        served: &'static str,
    },
}

/// What mixes the tokens in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// The gated delta rule: a state of fixed size.
    Linear,
    /// Gated softmax attention over the KV cache.
    Full,
}

/// The numbers of a Qwen3.5 dense model, its text part.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers, first to last; the last one is `Full`.
    pub layers: Vec<LayerKind>,
    /// Heads of full attention.
    pub shape: HeadShape,
    /// Leading elements of an attention head that RoPE rotates.
    pub rotary_dim: usize,
    /// Heads of the gated delta rule.
    pub delta: DeltaShape,
    /// Of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Context length the model was trained for.
    pub max_position_embeddings: usize,
    /// The output matrix is the embedding table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of dummy weights.
    pub initializer_range: f32,
    /// End-of-text ids, from generation_config.json where there is one, else from config.json.
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Reads `config.json`, and the end-of-text ids of `generation_config.json` if it exists.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("config.json");
        let mut config = Self::parse(&read(&path)?).map_err(|error| match error {
            ConfigError::Invalid { message, .. } => ConfigError::Invalid { path, message },
            other => other,
        })?;
        let path = dir.join("generation_config.json");
        if path.is_file() {
            let invalid = |message: String| ConfigError::Invalid { path: path.clone(), message };
            let generation: Value = serde_json::from_str(&read(&path)?).map_err(|e| invalid(e.to_string()))?;
            let ids = token_ids(&generation["eos_token_id"]).map_err(invalid)?;
            if !ids.is_empty() {
                config.eos_token_ids = ids;
            }
        }
        Ok(config)
    }

    /// Parses the text of a config.json: of the whole model with a `text_config`, or of the text model alone.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let invalid = |message: String| ConfigError::Invalid { path: "config.json".into(), message };
        let root: Value = serde_json::from_str(text).map_err(|e| invalid(e.to_string()))?;
        let raw = Raw::parse(&root).map_err(invalid)?;
        raw.refuse_unsupported(&root)?;
        raw.check().map_err(invalid)?;
        let shape =
            HeadShape { heads: raw.num_attention_heads, kv_heads: raw.num_key_value_heads, head_dim: raw.head_dim };
        let delta = DeltaShape {
            key_heads: raw.linear_num_key_heads,
            value_heads: raw.linear_num_value_heads,
            key_dim: raw.linear_key_head_dim,
            value_dim: raw.linear_value_head_dim,
            taps: raw.linear_conv_kernel_dim,
        };
        let rotary_dim = (raw.head_dim as f64 * raw.rotary_factor()) as usize;
        raw.refuse_shapes(shape, delta, rotary_dim)?;
        let layers = raw.layers().map_err(invalid)?;
        if layers.last() == Some(&LayerKind::Linear) {
            let (field, value) = ("the last of layer_types", "linear_attention".to_owned());
            return Err(ConfigError::Unsupported { field, value, served: "models that end with full_attention" });
        }
        let mut eos_token_ids = token_ids(&raw.eos_token_id).map_err(invalid)?;
        // The official checkpoints have no generation_config.json, and their config.json does not name it.
        if eos_token_ids == [END_OF_TEXT] {
            eos_token_ids.push(END_OF_TURN);
        }
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            layers,
            shape,
            rotary_dim,
            delta,
            rms_norm_eps: raw.rms_norm_eps as f32,
            rope_theta: raw.rope_theta().ok_or_else(|| invalid("rope_theta is missing".to_owned()))?,
            max_position_embeddings: raw.max_position_embeddings,
            tie_word_embeddings: raw.tie_word_embeddings.or(root["tie_word_embeddings"].as_bool()).unwrap_or(false),
            initializer_range: raw.initializer_range.unwrap_or(0.02),
            eos_token_ids,
        })
    }

    /// Layers of this kind.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|layer| **layer == kind).count()
    }

    /// Bytes of K and V of one token over all layers.
    pub fn kv_bytes_per_token(&self) -> usize {
        2 * 2 * self.count(LayerKind::Full) * self.shape.kv_heads * self.shape.head_dim
    }

    /// Bytes of a KV block over all layers. A model without full attention would need none; a block of nothing still counts.
    pub fn block_bytes(&self) -> u64 {
        ((self.kv_bytes_per_token() * BLOCK_SIZE) as u64).max(1)
    }

    /// Bytes of one slot of recurrent state over all layers.
    pub fn slot_bytes(&self) -> usize {
        self.count(LayerKind::Linear) * self.delta.slot_bytes()
    }

    /// Parameters that are loaded.
    pub fn parameters(&self) -> u64 {
        let tables = if self.tie_word_embeddings { 1 } else { 2 } * self.vocab_size * self.hidden_size;
        (tables + self.matrices() + self.small()) as u64
    }

    /// Bytes of the weights as loaded: matrices in bf16, the rest in f32.
    pub fn weight_bytes(&self) -> u64 {
        2 * self.parameters() + 2 * self.small() as u64
    }

    /// Parameters of the matrices of all layers.
    fn matrices(&self) -> usize {
        let (hidden, delta, shape) = (self.hidden_size, self.delta, self.shape);
        let linear = hidden * (delta.projected_width() + delta.v_width());
        let full = hidden * (shape.gated_qkv_width() + shape.q_width());
        let mlp = 3 * hidden * self.intermediate_size;
        self.count(LayerKind::Linear) * linear + self.count(LayerKind::Full) * full + self.layers.len() * mlp
    }

    /// Parameters that are not in matrices.
    fn small(&self) -> usize {
        let delta = self.delta;
        let linear = delta.taps * delta.channels() + 2 * delta.value_heads + delta.value_dim;
        let full = 2 * self.shape.head_dim;
        let norms = (2 * self.layers.len() + 1) * self.hidden_size;
        self.count(LayerKind::Linear) * linear + self.count(LayerKind::Full) * full + norms
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| ConfigError::Io { path: path.to_owned(), error })
}

/// An id or a list of ids; null is none.
fn token_ids(value: &Value) -> Result<Vec<u32>, String> {
    let one = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| format!("eos_token_id {value} is not a token id"))
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(ids) => ids.iter().map(one).collect(),
        id => Ok(vec![one(id)?]),
    }
}
