//! The bundled checkpoint with DSpark's stages, as the checkpoint 0731 has them.

use super::oracle::Stages;
use crate::support::derived::{Checkpoint, Stored, renamed, tail};
use safetensors::{Dtype, SafeTensors};
use serde_json::json;

const HIDDEN: usize = 256;
const VOCAB: usize = 4096;
const MARKOV_RANK: usize = 64;
/// The order of the targets and the layers differs from that of the model, so that a mix-up shows.
pub const STAGES: Stages<'static> = Stages { count: 3, targets: &[3, 1, 4], positions: 5, noise: 4000 };

/// Stage `i` has the attention of one of the window layers, and the experts of layer `2 + i`. The Markov head mostly
/// drafts the token that came before: its two matrices are the same.
pub fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint::new(&format!("dspark-{name}"), tensors, |config| {
        config["num_nextn_predict_layers"] = json!(1);
        config["compress_ratios"].as_array_mut().unwrap().extend([json!(0), json!(0), json!(0)]);
        config["dspark_block_size"] = json!(STAGES.positions);
        config["dspark_noise_token_id"] = json!(STAGES.noise);
        config["dspark_target_layer_ids"] = json!(STAGES.targets);
        config["dspark_markov_rank"] = json!(MARKOV_RANK);
    })
}

fn tensors(file: &SafeTensors<'_>) -> Vec<Stored> {
    let mut tensors: Vec<Stored> = file.names().iter().map(|name| renamed(file, name, name.to_string())).collect();
    for name in file.names() {
        for stage in 0..STAGES.count {
            let attention = tail(name, &format!("layers.{}.", [1, 0, 1][stage]), &["attn", "hc_attn"]);
            if let Some(tail) = attention.or(tail(name, &format!("layers.{}.", 2 + stage), &["ffn", "hc_ffn"])) {
                tensors.push(renamed(file, name, format!("mtp.{stage}.{tail}")));
            }
        }
        if let Some(tail) = tail(name, "", &["hc_head", "norm."]) {
            tensors.push(renamed(file, name, format!("mtp.2.{tail}")));
        }
    }
    tensors.push(renamed(file, "norm.weight", "mtp.0.main_norm.weight".to_owned()));
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
    tensors
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
