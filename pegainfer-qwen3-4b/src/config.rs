//! config.json of a Qwen3 checkpoint. What the engine does not implement is refused by name, never ignored.

use pegainfer_kernels::ops::HeadShape;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use thiserror::Error;

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
    #[error("{} is not a valid Qwen3 configuration: {message}", path.display())]
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

/// The numbers of a Qwen3 dense model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Attention heads.
    pub shape: HeadShape,
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

#[derive(Deserialize)]
struct Raw {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    rms_norm_eps: f64,
    max_position_embeddings: usize,
    rope_theta: Option<f64>,
    #[serde(default)]
    rope_parameters: Value,
    #[serde(default)]
    rope_scaling: Value,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    use_sliding_window: bool,
    hidden_act: Option<String>,
    initializer_range: Option<f32>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    #[serde(default)]
    quantization_config: Value,
    #[serde(default)]
    eos_token_id: Value,
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

    /// Parses the text of a config.json.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let invalid = |message: String| ConfigError::Invalid { path: "config.json".into(), message };
        let raw: Raw = serde_json::from_str(text).map_err(|e| invalid(e.to_string()))?;
        raw.refuse_unsupported()?;
        for (field, value) in [
            ("vocab_size", raw.vocab_size),
            ("hidden_size", raw.hidden_size),
            ("intermediate_size", raw.intermediate_size),
            ("num_hidden_layers", raw.num_hidden_layers),
            ("num_attention_heads", raw.num_attention_heads),
            ("num_key_value_heads", raw.num_key_value_heads),
            ("head_dim", raw.head_dim),
            ("max_position_embeddings", raw.max_position_embeddings),
        ] {
            if value == 0 || value > u32::MAX as usize {
                return Err(invalid(format!("{field} is {value}")));
            }
        }
        let shape =
            HeadShape { heads: raw.num_attention_heads, kv_heads: raw.num_key_value_heads, head_dim: raw.head_dim };
        if !shape.heads.is_multiple_of(shape.kv_heads) {
            return Err(invalid("num_attention_heads is not a multiple of num_key_value_heads".to_owned()));
        }
        if !shape.is_supported() {
            let (field, value) = ("head_dim", shape.head_dim.to_string());
            return Err(ConfigError::Unsupported { field, value, served: "multiples of 16 from 32 to 256" });
        }
        let rope_theta = raw.rope_parameters["rope_theta"].as_f64().or(raw.rope_theta);
        let rope_theta = rope_theta.ok_or_else(|| invalid("rope_theta is missing".to_owned()))?;
        if !(raw.rms_norm_eps > 0.0 && rope_theta > 0.0) {
            return Err(invalid("rms_norm_eps and rope_theta must be positive".to_owned()));
        }
        Ok(Self {
            vocab_size: raw.vocab_size,
            hidden_size: raw.hidden_size,
            intermediate_size: raw.intermediate_size,
            layers: raw.num_hidden_layers,
            shape,
            rms_norm_eps: raw.rms_norm_eps as f32,
            rope_theta,
            max_position_embeddings: raw.max_position_embeddings,
            tie_word_embeddings: raw.tie_word_embeddings,
            initializer_range: raw.initializer_range.unwrap_or(0.02),
            eos_token_ids: token_ids(&raw.eos_token_id).map_err(invalid)?,
        })
    }

    /// Bytes of K and V of one token over all layers.
    pub fn kv_bytes_per_token(&self) -> usize {
        2 * 2 * self.layers * self.shape.kv_heads * self.shape.head_dim
    }

    /// Bytes of the weights as loaded, bf16.
    pub fn weight_bytes(&self) -> u64 {
        let HeadShape { head_dim, .. } = self.shape;
        let attention = self.hidden_size * (self.shape.qkv_width() + self.shape.q_width()) + 2 * head_dim;
        let layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size;
        let tables = if self.tie_word_embeddings { 1 } else { 2 } * self.vocab_size * self.hidden_size;
        2 * (self.layers * layer + tables + self.hidden_size) as u64
    }
}

impl Raw {
    fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        let refuse = |field, value: String, served| Err(ConfigError::Unsupported { field, value, served });
        let scaling = [("rope_scaling", &self.rope_scaling), ("rope_parameters", &self.rope_parameters)];
        for (field, rope) in scaling {
            let kind = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str).unwrap_or("default");
            if kind != "default" {
                return refuse(field, rope.to_string(), "plain RoPE");
            }
        }
        if !self.quantization_config.is_null() {
            return refuse("quantization_config", self.quantization_config.to_string(), "bf16 weights");
        }
        if self.attention_bias {
            return refuse("attention_bias", "true".to_owned(), "projections without bias");
        }
        if self.use_sliding_window {
            return refuse("use_sliding_window", "true".to_owned(), "full attention");
        }
        match self.hidden_act.as_deref() {
            None | Some("silu") => {}
            Some(act) => return refuse("hidden_act", act.to_owned(), "silu"),
        }
        match self.dtype.as_deref().or(self.torch_dtype.as_deref()) {
            None | Some("bfloat16") => {}
            Some(dtype) => return refuse("torch_dtype", dtype.to_owned(), "bfloat16"),
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tiny() -> Value {
        serde_json::from_str(include_str!("../../models/qwen3-tiny/config.json")).unwrap()
    }

    #[test]
    fn reads_the_bundled_model() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
        let config = Config::load(&dir).unwrap();
        assert_eq!((config.layers, config.hidden_size, config.shape.heads), (6, 320, 4));
        assert_eq!(config.eos_token_ids, [4089, 4087], "generation_config.json wins over config.json");
        assert_eq!(config.kv_bytes_per_token(), 6144);
        // The checkpoint's tensor bytes: file size minus header.
        assert_eq!(config.weight_bytes(), 18_852_992);
    }

    #[test]
    fn refuses_what_it_does_not_implement_by_name() {
        for (field, value) in [
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
            ("rope_parameters", json!({"rope_type": "linear"})),
            ("quantization_config", json!({"quant_method": "fp8"})),
            ("attention_bias", json!(true)),
            ("use_sliding_window", json!(true)),
            ("hidden_act", json!("gelu")),
            ("torch_dtype", json!("float16")),
            ("head_dim", json!(40)),
        ] {
            let mut config = tiny();
            config[field] = value;
            let error = Config::parse(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains("serves"), "{error}");
        }
    }

    #[test]
    fn names_the_field_that_is_missing_or_wrong() {
        for field in ["head_dim", "vocab_size", "num_key_value_heads", "rope_theta", "rms_norm_eps"] {
            let mut config = tiny();
            config.as_object_mut().unwrap().remove(field);
            let error = Config::parse(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        let mut config = tiny();
        config["num_key_value_heads"] = json!(3);
        assert!(Config::parse(&config.to_string()).is_err());
        config["num_key_value_heads"] = json!(0);
        assert!(Config::parse(&config.to_string()).unwrap_err().to_string().contains("num_key_value_heads"));
        assert!(Config::parse("{").unwrap_err().to_string().contains("config.json"));
    }

    #[test]
    fn takes_the_newer_rope_parameters_too() {
        let mut config = tiny();
        config.as_object_mut().unwrap().remove("rope_theta");
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
        assert_eq!(Config::parse(&config.to_string()).unwrap().rope_theta, 5e5);
    }
}
