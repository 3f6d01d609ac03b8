//! config.json of a Qwen3 checkpoint. Unsupported fields are refused by name, never ignored.

use pegainfer_core::parallel::Shard;
use pegainfer_kernels::ops::{HeadShape, KvDType, RopeSpec};
use pegainfer_runtime::{ConfigError, ConfigFile, DecoderShape, MoeShape, Quantization, unsupported};
use serde_json::{Value, json};

/// Name of the embedding table in checkpoints.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Default head width. This and the next two defaults are those of transformers.
const HEAD_DIM: usize = 128;
/// First layer with a window, if `use_sliding_window` is true.
const MAX_WINDOW_LAYERS: usize = 28;
/// Length of a window.
const SLIDING_WINDOW: u64 = 4096;

/// The numbers of a Qwen3 model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of a dense MLP, 0 if every layer has experts; with several ranks the rank's share.
    pub intermediate_size: usize,
    /// The experts of a Qwen3-MoE; their width with several ranks is the rank's share.
    pub moe: Option<MoeShape>,
    /// Layers of a Qwen3-MoE with a dense MLP, ascending.
    pub dense_layers: Vec<usize>,
    /// Decoder layers.
    pub layers: usize,
    /// Attention heads; with several ranks those of the rank.
    pub shape: HeadShape,
    /// Attention heads of the whole model.
    pub all_heads: HeadShape,
    /// The rank whose share these numbers are.
    pub shard: Shard,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary frequencies.
    pub rope: RopeSpec,
    /// Context length the model was trained for, or that YaRN extends it to.
    pub max_position_embeddings: usize,
    /// The output matrix is the embedding table, see [`ConfigFile::ties_output`].
    pub tie_word_embeddings: bool,
    /// Quantised weights; `None` for bf16.
    pub quantization: Option<Quantization>,
    /// Element format of the KV cache.
    pub kv_dtype: KvDType,
    /// Standard deviation of dummy weights.
    pub initializer_range: f32,
    /// End-of-text ids, see [`ConfigFile::eos_token_ids`].
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Reads the fields of config.json.
    pub fn read(file: &ConfigFile) -> Result<Self, ConfigError> {
        file.require_served([
            ("attention_bias", json!(false), "projections without bias"),
            ("hidden_act", json!("silu"), "silu"),
        ])?;
        file.check_dtype()?;
        let (rope, shape) = (file.rope()?, file.heads(HEAD_DIM)?);
        let (layers, context) = (file.size("num_hidden_layers")?, file.context(&rope)?);
        refuse_windows(file, layers, context)?;
        let (moe, dense_layers) = moe(file, layers)?;
        let has_dense = moe.is_none() || !dense_layers.is_empty();
        Ok(Self {
            vocab_size: file.size("vocab_size")?,
            hidden_size: file.size("hidden_size")?,
            intermediate_size: if has_dense { file.size("intermediate_size")? } else { 0 },
            moe,
            dense_layers,
            layers,
            shape,
            all_heads: shape,
            shard: Shard::WHOLE,
            rms_norm_eps: file.positive("rms_norm_eps")? as f32,
            rope,
            max_position_embeddings: context,
            tie_word_embeddings: file.ties_output(EMBEDDING)?,
            kv_dtype: file.kv_dtype(),
            quantization: file.quantization(&[])?,
            initializer_range: file.initializer_range(),
            eos_token_ids: file.eos_token_ids()?,
        })
    }

    /// The numbers of rank `shard`.
    pub(crate) fn shard(&self, shard: Shard) -> Result<Self, String> {
        let blocks = self.quantization.as_ref().is_some_and(Quantization::has_blocks);
        let DecoderShape { heads: shape, intermediate: intermediate_size, moe, .. } =
            self.decoder().share(shard, blocks)?;
        Ok(Self { shape, intermediate_size, moe, shard, ..self.clone() })
    }

    /// Number of layer `i` among the layers with experts; `None` if it has none.
    pub fn sparse_number(&self, i: usize) -> Option<usize> {
        self.moe?;
        self.dense_layers.binary_search(&i).err().map(|dense_before| i - dense_before)
    }

    /// The numbers that the runtime's parts of a decoder take.
    pub fn decoder(&self) -> DecoderShape {
        DecoderShape {
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            moe: self.moe,
            heads: self.shape,
            all_heads: self.all_heads,
            shard: self.shard,
            gated: false,
            rotary_dim: self.shape.head_dim,
            rope: self.rope,
            eps: self.rms_norm_eps,
        }
    }
}

/// The experts, without which a Qwen3-MoE is refused, and the layers of such a model with a dense MLP.
fn moe(file: &ConfigFile, layers: usize) -> Result<(Option<MoeShape>, Vec<usize>), ConfigError> {
    let dense = dense_layers(file, layers)?;
    match file.moe(false, layers - dense.len())? {
        Some(moe) => Ok((Some(moe), dense)),
        None if file.get("model_type") == "qwen3_moe" => Err(file.invalid("num_experts is missing")),
        None => Ok((None, Vec::new())),
    }
}

/// Layers with a dense MLP: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th.
fn dense_layers(file: &ConfigFile, layers: usize) -> Result<Vec<usize>, ConfigError> {
    let listed: Vec<u64> = match file.get("mlp_only_layers") {
        Value::Null => Vec::new(),
        Value::Array(listed) => listed.iter().filter_map(Value::as_u64).collect(),
        other => return Err(file.invalid(format!("mlp_only_layers is {other}, and must be a list"))),
    };
    let step = file.size_or("decoder_sparse_step", 1)?;
    let is_dense = |i: &usize| listed.contains(&(*i as u64)) || !(i + 1).is_multiple_of(step);
    Ok((0..layers).filter(is_dense).collect())
}

/// Refuses layers that attend to a window. Windows as long as the context change nothing, and neither do windows that
/// no layer has.
fn refuse_windows(file: &ConfigFile, layers: usize, context: usize) -> Result<(), ConfigError> {
    let (is_windowed, field) = match file.get("layer_types") {
        Value::Null => {
            let first = if file.get("max_window_layers").is_null() {
                MAX_WINDOW_LAYERS
            } else {
                file.get("max_window_layers").as_u64().unwrap_or(0) as usize
            };
            (file.flag("use_sliding_window")? && first < layers, "use_sliding_window")
        }
        Value::Array(types) => {
            if types.len() != layers {
                return Err(file.invalid(format!("layer_types has {} of {layers} layers", types.len())));
            }
            let known = ["full_attention", "sliding_attention"];
            if let Some(other) = types.iter().find(|kind| !known.iter().any(|known| *kind == known)) {
                return Err(unsupported("layer_types", other, "full_attention"));
            }
            (types.iter().any(|kind| kind == known[1]), "layer_types")
        }
        other => return Err(file.invalid(format!("layer_types is {other}, and must be a list"))),
    };
    let window = match file.get("sliding_window") {
        Value::Null if file.has("sliding_window") => None,
        Value::Null => Some(SLIDING_WINDOW),
        // A window that is not a number is refused like one that is too short.
        value => Some(value.as_u64().unwrap_or(0)),
    };
    match window.filter(|window| is_windowed && *window < context as u64) {
        Some(window) => {
            Err(unsupported(field, format!("{} with sliding_window {window}", file.get(field)), "full attention"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Qwen3;
    use pegainfer_runtime::{Model, ModelBytes};
    use std::path::Path;

    fn tiny() -> Value {
        serde_json::from_str(include_str!("../../models/qwen3-tiny/config.json")).unwrap()
    }

    #[test]
    fn reads_the_bundled_model() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny");
        let config = Qwen3::load_config(&dir).unwrap();
        assert_eq!((config.layers, config.hidden_size, config.shape.heads), (6, 320, 4));
        assert_eq!(config.eos_token_ids, [4089, 4087], "generation_config.json comes first");
        let bytes = ModelBytes::of::<Qwen3>(&config).unwrap();
        assert_eq!(bytes.kv_per_token, 6144);
        let fp8 = Config { kv_dtype: KvDType::Fp8, ..config.clone() };
        let scales = 2 * 4 * config.layers * config.shape.kv_heads;
        assert_eq!(ModelBytes::of::<Qwen3>(&fp8).unwrap().kv_per_token, 6144 / 2 + scales as u64);
        // The checkpoint's tensor bytes: file size minus header.
        assert_eq!(bytes.weights, 18_852_992);
    }

    #[test]
    fn refuses_what_it_does_not_implement_by_name() {
        for (field, value) in [
            ("rope_scaling", json!({"rope_type": "dynamic", "factor": 4.0})),
            ("rope_parameters", json!({"rope_type": "linear"})),
            ("quantization_config", json!({"quant_method": "bitsandbytes"})),
            ("attention_bias", json!(true)),
            ("hidden_act", json!("gelu")),
            ("torch_dtype", json!("float64")),
            ("dtype", json!("float8_e4m3fn")),
            ("layer_types", json!(vec!["chunked_attention"; 6])),
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
        for field in ["vocab_size", "num_key_value_heads", "rope_theta", "rms_norm_eps"] {
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
    fn harmless_fields_are_accepted() {
        let full = vec!["full_attention"; 6];
        for (changes, head_dim) in [
            (json!({"head_dim": null}), 128),
            (json!({"torch_dtype": "float32"}), 64),
            (json!({"torch_dtype": null, "dtype": "float16"}), 64),
            (json!({"quantization_config": {}}), 64),
            (json!({"use_sliding_window": true, "max_window_layers": 6, "sliding_window": 128}), 64),
            (json!({"use_sliding_window": true, "max_window_layers": 2, "sliding_window": null}), 64),
            (json!({"use_sliding_window": true, "max_window_layers": 2, "sliding_window": 1_000_000}), 64),
            (json!({"layer_types": full, "sliding_window": 128}), 64),
            (json!({"layer_types": vec!["sliding_attention"; 6], "sliding_window": null}), 64),
        ] {
            let mut config = tiny();
            config["head_dim"] = json!(64);
            config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let read = Qwen3::parse_config(&config.to_string()).unwrap_or_else(|error| panic!("{changes}: {error}"));
            assert_eq!(read.shape.head_dim, head_dim, "{changes}");
            assert_eq!(read.quantization, None);
        }
    }

    #[test]
    fn windows_shorter_than_the_context_are_refused() {
        let mut types = vec!["full_attention"; 6];
        types[5] = "sliding_attention";
        for (changes, field) in [
            (json!({"use_sliding_window": true, "max_window_layers": 5, "sliding_window": 128}), "use_sliding_window"),
            (json!({"layer_types": types.clone(), "sliding_window": 128}), "layer_types"),
            (json!({"layer_types": types, "sliding_window": 128, "use_sliding_window": true}), "layer_types"),
        ] {
            let mut config = tiny();
            config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let error = Qwen3::parse_config(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains("serves full attention"), "{error}");
        }
        let mut config = tiny();
        config["layer_types"] = json!(["full_attention"]);
        assert!(Qwen3::parse_config(&config.to_string()).unwrap_err().to_string().contains("1 of 6 layers"));
    }

    #[test]
    fn sizes_without_bound_are_refused_by_name() {
        for field in [
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ] {
            for value in [1u64 << 31, 1 << 62] {
                let mut config = tiny();
                config[field] = json!(value);
                let error = Qwen3::parse_config(&config.to_string()).unwrap_err().to_string();
                assert!(error.contains(&format!("{field} is {value}, and must be an integer from 1 to")), "{error}");
            }
        }
    }

    #[test]
    fn takes_the_newer_rope_parameters_too() {
        let mut config = tiny();
        config.as_object_mut().unwrap().remove("rope_theta");
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
        assert_eq!(Qwen3::parse_config(&config.to_string()).unwrap().rope.theta, 5e5);
    }
}
