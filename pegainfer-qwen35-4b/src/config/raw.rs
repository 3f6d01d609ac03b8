//! The fields of config.json as they are written, and what is refused of them.

use super::{ConfigError, LayerKind};
use pegainfer_kernels::ops::{DeltaShape, HeadShape};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
pub(super) struct Raw {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    layer_types: Option<Vec<String>>,
    full_attention_interval: Option<usize>,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub linear_num_key_heads: usize,
    pub linear_num_value_heads: usize,
    pub linear_key_head_dim: usize,
    pub linear_value_head_dim: usize,
    pub linear_conv_kernel_dim: usize,
    pub rms_norm_eps: f64,
    pub max_position_embeddings: usize,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    rope_parameters: Value,
    #[serde(default)]
    rope_scaling: Value,
    pub tie_word_embeddings: Option<bool>,
    attn_output_gate: Option<bool>,
    #[serde(default)]
    attention_bias: bool,
    hidden_act: Option<String>,
    pub initializer_range: Option<f32>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    #[serde(default)]
    pub eos_token_id: Value,
}

fn refuse<T>(field: &'static str, value: impl ToString, served: &'static str) -> Result<T, ConfigError> {
    Err(ConfigError::Unsupported { field, value: value.to_string(), served })
}

impl Raw {
    /// The text model of a config.json.
    pub fn parse(root: &Value) -> Result<Self, String> {
        let text = root.get("text_config").filter(|text| text.is_object()).unwrap_or(root);
        Self::deserialize(text).map_err(|e| e.to_string())
    }

    /// Refuses what the engine does not implement.
    pub fn refuse_unsupported(&self, root: &Value) -> Result<(), ConfigError> {
        let scaling = [("rope_scaling", &self.rope_scaling), ("rope_parameters", &self.rope_parameters)];
        for (field, rope) in scaling {
            let kind = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str).unwrap_or("default");
            if kind != "default" {
                return refuse(field, rope, "plain RoPE");
            }
        }
        let text = root.get("text_config").unwrap_or(root);
        if let Some(quantization) = [root, text].iter().find_map(|config| config.get("quantization_config"))
            && !quantization.is_null()
        {
            return refuse("quantization_config", quantization, "bf16 weights");
        }
        if self.attn_output_gate == Some(false) {
            return refuse("attn_output_gate", false, "gated attention");
        }
        if self.attention_bias {
            return refuse("attention_bias", true, "projections without bias");
        }
        match self.hidden_act.as_deref() {
            None | Some("silu") => {}
            Some(act) => return refuse("hidden_act", act, "silu"),
        }
        match self.dtype.as_deref().or(self.torch_dtype.as_deref()) {
            None | Some("bfloat16") => Ok(()),
            Some(dtype) => refuse("dtype", dtype, "bfloat16"),
        }
    }

    /// Refuses heads that no kernel takes.
    pub fn refuse_shapes(&self, shape: HeadShape, delta: DeltaShape, rotary_dim: usize) -> Result<(), ConfigError> {
        if !shape.is_supported() {
            return refuse("head_dim", shape.head_dim, "multiples of 16 from 32 to 256");
        }
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(32) || rotary_dim > shape.head_dim {
            return refuse("partial_rotary_factor", self.rotary_factor(), "rotations of multiples of 32 elements");
        }
        if !delta.is_supported() {
            let value = format!("{} x {}", delta.key_dim, delta.value_dim);
            return refuse("linear_key_head_dim x linear_value_head_dim", value, "multiples of 16, 2 to 8 taps");
        }
        Ok(())
    }

    /// Says which number makes no sense.
    pub fn check(&self) -> Result<(), String> {
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("linear_num_key_heads", self.linear_num_key_heads),
            ("linear_num_value_heads", self.linear_num_value_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            if value == 0 || value > u32::MAX as usize {
                return Err(format!("{field} is {value}"));
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return Err("num_attention_heads is not a multiple of num_key_value_heads".to_owned());
        }
        if !self.linear_num_value_heads.is_multiple_of(self.linear_num_key_heads) {
            return Err("linear_num_value_heads is not a multiple of linear_num_key_heads".to_owned());
        }
        if self.rms_norm_eps <= 0.0 || self.rope_theta().is_some_and(|theta| theta <= 0.0) {
            return Err("rms_norm_eps and rope_theta must be positive".to_owned());
        }
        Ok(())
    }

    /// The kind of each layer: as listed, or full attention in every `full_attention_interval`th.
    pub fn layers(&self) -> Result<Vec<LayerKind>, String> {
        let Some(types) = &self.layer_types else {
            let interval = self.full_attention_interval.unwrap_or(4).max(1);
            let kind = |i: usize| if i.is_multiple_of(interval) { LayerKind::Full } else { LayerKind::Linear };
            return Ok((1..=self.num_hidden_layers).map(kind).collect());
        };
        if types.len() != self.num_hidden_layers {
            return Err(format!("layer_types has {} of {} layers", types.len(), self.num_hidden_layers));
        }
        let kind = |name: &String| match name.as_str() {
            "linear_attention" => Ok(LayerKind::Linear),
            "full_attention" => Ok(LayerKind::Full),
            other => Err(format!("layer_types names {other:?}: expected linear_attention or full_attention")),
        };
        types.iter().map(kind).collect()
    }

    /// Base of the rotary frequencies.
    pub fn rope_theta(&self) -> Option<f64> {
        self.rope_parameters["rope_theta"].as_f64().or(self.rope_theta)
    }

    /// Share of an attention head that RoPE rotates.
    pub fn rotary_factor(&self) -> f64 {
        let factor = self.rope_parameters["partial_rotary_factor"].as_f64();
        factor.or(self.partial_rotary_factor).unwrap_or(0.25)
    }
}
