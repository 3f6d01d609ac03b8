//! The bundled checkpoint with DSpark's stages, as the checkpoint 0731 has them.

use super::oracle::Stages;
use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use serde_json::json;
use std::path::PathBuf;

const HIDDEN: usize = 256;
const VOCAB: usize = 4096;
const MARKOV_RANK: usize = 64;
/// The sequence of the targets and the layers is not that of the model, so that a mix-up shows.
pub const STAGES: Stages<'static> = Stages { count: 3, targets: &[3, 1, 4], positions: 5, noise: 4000 };

/// Name, dtype, shape and bytes of a tensor.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// A checkpoint in a directory of its own.
pub struct Checkpoint(PathBuf);

impl Drop for Checkpoint {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Checkpoint {
    /// Stage `i` has the attention of one of the window layers, and the experts of layer `2 + i`. The Markov head mostly drafts the token
    /// that came before: its two matrices are the same.
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-dsv4-dspark-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let from = super::model_path();
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let owned = |name: &str, to: String| {
            let view = file.tensor(name).unwrap();
            (to, view.dtype(), view.shape().to_vec(), view.data().to_vec())
        };
        let mut tensors: Vec<Stored> = file.names().iter().map(|name| owned(name, name.to_string())).collect();
        for name in file.names() {
            let of = |layer: &str, parts: &[&str]| {
                name.strip_prefix(layer).filter(|tail| parts.iter().any(|part| tail.starts_with(part)))
            };
            for stage in 0..STAGES.count {
                let attention = of(&format!("layers.{}.", [1, 0, 1][stage]), &["attn", "hc_attn"]);
                if let Some(tail) = attention.or(of(&format!("layers.{}.", 2 + stage), &["ffn", "hc_ffn"])) {
                    tensors.push(owned(name, format!("mtp.{stage}.{tail}")));
                }
            }
            if let Some(tail) = of("", &["hc_head", "norm."]) {
                tensors.push(owned(name, format!("mtp.2.{tail}")));
            }
        }
        tensors.push(owned("norm.weight", "mtp.0.main_norm.weight".to_owned()));
        tensors.extend(main_projection());
        let mut random = random(3);
        let markov: Vec<u8> = (0..VOCAB * MARKOV_RANK).flat_map(|_| bf16(random() - 0.5)).collect();
        for w in ["markov_w1", "markov_w2"] {
            let name = format!("mtp.2.markov_head.{w}.weight");
            tensors.push((name, Dtype::BF16, vec![VOCAB, MARKOV_RANK], markov.clone()));
        }
        let confidence = vec![0; 2 * (HIDDEN + MARKOV_RANK)];
        let name = "mtp.2.confidence_head.proj.weight".to_owned();
        tensors.push((name, Dtype::BF16, vec![1, HIDDEN + MARKOV_RANK], confidence));
        let views = tensors.iter().map(|(n, d, s, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
        std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
        let mut config: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(from.join("config.json")).unwrap()).unwrap();
        config["num_nextn_predict_layers"] = json!(1);
        config["compress_ratios"].as_array_mut().unwrap().extend([json!(0), json!(0), json!(0)]);
        config["dspark_block_size"] = json!(STAGES.positions);
        config["dspark_noise_token_id"] = json!(STAGES.noise);
        config["dspark_target_layer_ids"] = json!(STAGES.targets);
        config["dspark_markov_rank"] = json!(MARKOV_RANK);
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        Self(dir)
    }

    pub fn path(&self) -> PathBuf {
        self.0.clone()
    }
}

/// Random numbers from 0 to 1.
fn random(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    }
}

fn bf16(value: f32) -> [u8; 2] {
    half::bf16::from_f32(2.0 * value).to_le_bytes()
}

/// A matrix of random e4m3 codes below 2 with the scale 2^-6.
fn main_projection() -> [Stored; 2] {
    let (columns, mut random) = (STAGES.targets.len() * HIDDEN, random(5));
    let codes = (0..HIDDEN * columns).map(|_| (random() * 256.0) as u8 & 0xbf).collect();
    let blocks = vec![HIDDEN / 128, columns / 128];
    let scales = vec![121; blocks[0] * blocks[1]];
    [
        ("mtp.0.main_proj.weight".to_owned(), Dtype::F8_E4M3, vec![HIDDEN, columns], codes),
        ("mtp.0.main_proj.scale".to_owned(), Dtype::F8_E8M0, blocks, scales),
    ]
}
