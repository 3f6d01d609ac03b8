//! A checkpoint of the minimal model with seeded weights, in its own directory.

use half::bf16;
use pegainfer_core::rng;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name in the checkpoint, shape and values of each tensor.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<bf16>)>;

pub const VOCAB: usize = 4096;
pub const HIDDEN: usize = 128;
pub const WIDTH: usize = 192;
pub const LAYERS: usize = 2;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD_DIM: usize = 64;
pub const EPS: f64 = 1e-5;
pub const THETA: f64 = 1e4;

/// A directory that is removed when it is dropped.
pub struct Checkpoint {
    pub dir: PathBuf,
    pub tensors: Tensors,
}

impl Checkpoint {
    /// Writes config.json and weights, next to tokenizer and template of the bundled checkpoint in `text`.
    pub fn write(name: &str, text: &Path) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-minimal-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            std::fs::copy(text.join(file), dir.join(file)).unwrap();
        }
        let config = json!({
            "architectures": ["MinimalForCausalLM"], "model_type": "minimal", "vocab_size": VOCAB,
            "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 2048, "tie_word_embeddings": false,
            "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": [4089, 4087],
        });
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let tensors = tensors();
        let bytes = |values: &[bf16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let stored: BTreeMap<_, _> = tensors.iter().map(|(name, (shape, v))| (name, (shape, bytes(v)))).collect();
        let mut views = Vec::new();
        for (name, (shape, bytes)) in &stored {
            views.push((name, TensorView::new(Dtype::BF16, shape.to_vec(), bytes).unwrap()));
        }
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.join("model.safetensors"), file).unwrap();
        Self { dir, tensors }
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Weights that keep activations near 1: matrices uniform on ±√(3 / inputs), norms near 1.
fn tensors() -> Tensors {
    let mut tensors = Tensors::new();
    let mut add = |name: String, shape: &[usize]| {
        let seed = name.bytes().fold(7, |seed, byte| rng::mix(seed ^ u64::from(byte)));
        let unit = |i: usize| (rng::bits(seed, i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let value = |i: usize| match shape {
            [_, inputs] => unit(i) * (3.0 / *inputs as f32).sqrt(),
            _ => 1.0 + 0.2 * unit(i),
        };
        let values = (0..shape.iter().product()).map(|i| bf16::from_f32(value(i))).collect();
        tensors.insert(name, (shape.to_vec(), values));
    };
    add("model.embed_tokens.weight".to_owned(), &[VOCAB, HIDDEN]);
    add("lm_head.weight".to_owned(), &[VOCAB, HIDDEN]);
    add("model.norm.weight".to_owned(), &[HIDDEN]);
    for i in 0..LAYERS {
        for (tail, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.k_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.v_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HEADS * HEAD_DIM]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("mlp.gate_proj", vec![WIDTH, HIDDEN]),
            ("mlp.up_proj", vec![WIDTH, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, WIDTH]),
        ] {
            add(format!("model.layers.{i}.{tail}.weight"), &shape);
        }
    }
    tensors
}
