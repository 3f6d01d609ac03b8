//! config.json of a Qwen3 checkpoint. What the engine does not implement is refused by name, never ignored.

use pegainfer_kernels::ops::{HeadShape, KvDType, RopeSpec};
use pegainfer_kernels::runtime::{ConfigError, ConfigFile, Quantization};
use serde_json::json;

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
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary frequencies.
    pub rope: RopeSpec,
    /// Context length the model was trained for, or that YaRN extends it to.
    pub max_position_embeddings: usize,
    /// The output matrix is the embedding table.
    pub tie_word_embeddings: bool,
    /// FP8 weights; `None` for bf16.
    pub quantization: Option<Quantization>,
    /// Element format of the KV cache.
    pub kv_dtype: KvDType,
    /// Standard deviation of dummy weights.
    pub initializer_range: f32,
    /// End-of-text ids, from generation_config.json where there is one, else from config.json.
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Reads the fields of config.json.
    pub fn read(file: &ConfigFile) -> Result<Self, ConfigError> {
        file.serves([
            ("attention_bias", json!(false), "projections without bias"),
            ("use_sliding_window", json!(false), "full attention"),
            ("hidden_act", json!("silu"), "silu"),
            ("dtype", json!("bfloat16"), "bfloat16"),
            ("torch_dtype", json!("bfloat16"), "bfloat16"),
        ])?;
        let rope = file.rope()?;
        Ok(Self {
            vocab_size: file.size("vocab_size")?,
            hidden_size: file.size("hidden_size")?,
            intermediate_size: file.size("intermediate_size")?,
            layers: file.size("num_hidden_layers")?,
            shape: file.heads()?,
            rms_norm_eps: file.positive("rms_norm_eps")? as f32,
            rope,
            max_position_embeddings: file.context(&rope)?,
            tie_word_embeddings: file.flag("tie_word_embeddings")?,
            kv_dtype: file.kv_dtype(),
            quantization: file.quantization(&[])?,
            initializer_range: file.initializer_range(),
            eos_token_ids: file.eos_token_ids()?,
        })
    }

    /// Bytes of K and V of one token over all layers.
    pub fn kv_bytes_per_token(&self) -> usize {
        self.layers * self.shape.kv_bytes_per_token(self.kv_dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Qwen3;
    use pegainfer_kernels::runtime::Model;
    use serde_json::Value;
    use std::path::Path;

    fn tiny() -> Value {
        serde_json::from_str(include_str!("../../models/qwen3-tiny/config.json")).unwrap()
    }

    #[test]
    fn reads_the_bundled_model() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
        let config = Qwen3::load_config(&dir).unwrap();
        assert_eq!((config.layers, config.hidden_size, config.shape.heads), (6, 320, 4));
        assert_eq!(config.eos_token_ids, [4089, 4087], "generation_config.json wins over config.json");
        assert_eq!(config.kv_bytes_per_token(), 6144);
        let fp8 = Config { kv_dtype: KvDType::Fp8, ..config.clone() };
        assert_eq!(fp8.kv_bytes_per_token(), 6144 / 2 + 2 * 4 * config.layers * config.shape.kv_heads);
        // The checkpoint's tensor bytes: file size minus header.
        assert_eq!(Qwen3::info(&config).weight_bytes, 18_852_992);
    }

    #[test]
    fn refuses_what_it_does_not_implement_by_name() {
        for (field, value) in [
            ("rope_scaling", json!({"rope_type": "dynamic", "factor": 4.0})),
            ("rope_parameters", json!({"rope_type": "linear"})),
            ("quantization_config", json!({"quant_method": "awq"})),
            ("attention_bias", json!(true)),
            ("use_sliding_window", json!(true)),
            ("hidden_act", json!("gelu")),
            ("torch_dtype", json!("float16")),
            ("head_dim", json!(40)),
        ] {
            let mut config = tiny();
            config[field] = value;
            let error = Qwen3::parse_config(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains("serves"), "{error}");
        }
    }

    #[test]
    fn names_the_field_that_is_missing_or_wrong() {
        for field in ["head_dim", "vocab_size", "num_key_value_heads", "rope_theta", "rms_norm_eps"] {
            let mut config = tiny();
            config.as_object_mut().unwrap().remove(field);
            let error = Qwen3::parse_config(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
        let mut config = tiny();
        config["num_key_value_heads"] = json!(3);
        assert!(Qwen3::parse_config(&config.to_string()).is_err());
        config["num_key_value_heads"] = json!(0);
        assert!(Qwen3::parse_config(&config.to_string()).unwrap_err().to_string().contains("num_key_value_heads"));
        assert!(Qwen3::parse_config("{").unwrap_err().to_string().contains("config.json"));
    }

    #[test]
    fn takes_the_newer_rope_parameters_too() {
        let mut config = tiny();
        config.as_object_mut().unwrap().remove("rope_theta");
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
        assert_eq!(Qwen3::parse_config(&config.to_string()).unwrap().rope.theta, 5e5);
    }
}
