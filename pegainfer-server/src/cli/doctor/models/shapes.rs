//! Shapes of models that are checked without a checkpoint.

use pegainfer_core::parallel::Shard;
use pegainfer_kernels::ops::moe::RouteSpec;
use pegainfer_kernels::ops::{self, HeadShape};
use pegainfer_qwen3_4b::config::Config as Qwen3Config;
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b::config::{Config as Qwen35Config, LayerKind};
#[cfg(feature = "qwen35")]
use pegainfer_qwen35_4b::vision::config::VisionConfig;
use pegainfer_runtime::MoeShape;

/// Number of checked layers: the second one receives the output of the first.
pub const LAYERS: usize = 2;

/// Qwen3-4B.
pub fn qwen3_4b() -> Qwen3Config {
    Qwen3Config {
        vocab_size: 151_936,
        hidden_size: 2560,
        intermediate_size: 9728,
        moe: None,
        dense_layers: Vec::new(),
        layers: LAYERS,
        shape: HeadShape { heads: 32, kv_heads: 8, head_dim: 128 },
        all_heads: HeadShape { heads: 32, kv_heads: 8, head_dim: 128 },
        shard: Shard::WHOLE,
        rms_norm_eps: 1e-6,
        rope: 1e6.into(),
        max_position_embeddings: 40_960,
        tie_word_embeddings: true,
        quantization: None,
        kv_dtype: ops::KvDType::Bf16,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}

/// Qwen3-30B-A3B, one layer.
pub fn qwen3_30b_a3b() -> Qwen3Config {
    let shape = HeadShape { heads: 32, kv_heads: 4, head_dim: 128 };
    let route = RouteSpec { experts: 128, chosen: 8, normalize: true, shared: false };
    Qwen3Config {
        hidden_size: 2048,
        intermediate_size: 0,
        moe: Some(MoeShape { route, width: 768, skewed: false, layers: 1 }),
        layers: 1,
        shape,
        all_heads: shape,
        tie_word_embeddings: false,
        ..qwen3_4b()
    }
}

/// A small Qwen3 whose matrices have multiples of 256 columns, as every packed format needs. The 2304 columns of `down`
/// have splits of different lengths.
pub fn small_qwen3() -> Qwen3Config {
    let shape = HeadShape { heads: 4, kv_heads: 2, head_dim: 128 };
    Qwen3Config {
        vocab_size: 2048,
        hidden_size: 512,
        intermediate_size: 2304,
        moe: None,
        dense_layers: Vec::new(),
        shape,
        all_heads: shape,
        tie_word_embeddings: false,
        ..qwen3_4b()
    }
}

/// Qwen3.5-4B.
#[cfg(feature = "qwen35")]
pub fn qwen35_4b() -> Qwen35Config {
    Qwen35Config {
        gguf: false,
        vocab_size: 248_320,
        hidden_size: 2560,
        intermediate_size: 9216,
        moe: None,
        layers: vec![LayerKind::Linear, LayerKind::Full],
        shape: HeadShape { heads: 16, kv_heads: 4, head_dim: 256 },
        all_heads: HeadShape { heads: 16, kv_heads: 4, head_dim: 256 },
        shard: Shard::WHOLE,
        rotary_dim: 64,
        delta: ops::DeltaShape {
            key_heads: 16,
            value_heads: 32,
            key_dim: 128,
            value_dim: 128,
            conv_width: 4,
            tiled_output: false,
        },
        rms_norm_eps: 1e-6,
        rope: 1e7.into(),
        max_position_embeddings: 262_144,
        tie_word_embeddings: true,
        mtp: false,
        vision: None,
        quantization: None,
        kv_dtype: ops::KvDType::Bf16,
        initializer_range: 0.02,
        eos_token_ids: Vec::new(),
    }
}

/// A block of the vision tower of Qwen3.5-0.8B, 4B and 27B: values of the residual stream, heads, width of the MLP.
#[cfg(feature = "qwen35")]
pub fn qwen35_with_tower([hidden, heads, intermediate]: [usize; 3], out_hidden: usize) -> Qwen35Config {
    let (depth, side, image_token) = (1, 48, 248_056);
    let vision = VisionConfig { depth, hidden, heads, intermediate, out_hidden, side, image_token };
    Qwen35Config { vision: Some(vision), hidden_size: out_hidden, ..qwen35_4b() }
}

/// Qwen3.5-35B-A3B, one layer of each kind.
#[cfg(feature = "qwen35")]
pub fn qwen35_35b_a3b() -> Qwen35Config {
    let shape = HeadShape { heads: 16, kv_heads: 2, head_dim: 256 };
    let route = RouteSpec { experts: 256, chosen: 8, normalize: true, shared: true };
    Qwen35Config {
        hidden_size: 2048,
        intermediate_size: 0,
        moe: Some(MoeShape { route, width: 512, skewed: false, layers: 2 }),
        shape,
        all_heads: shape,
        ..qwen35_4b()
    }
}
