//! The bundled checkpoint with a layer that drafts.

use crate::support::derived::{Checkpoint, Stored, renamed, tail};
use safetensors::Dtype;

const HIDDEN: usize = 256;
/// 1.0 in e4m3.
const ONE: u8 = 0x38;

/// The layer is a window layer with the experts of the last layer. Its input embedding is scaled by eight, with a
/// little noise. It therefore mostly drafts the previous token, because the output matrix is that of the embedding.
pub fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint::new(
        &format!("mtp-{name}"),
        |file| {
            let names = file.names().into_iter().filter(|name| *name != "head.weight");
            let mut tensors: Vec<Stored> = names.map(|name| renamed(file, name, name.to_string())).collect();
            tensors.push(renamed(file, "embed.weight", "head.weight".to_owned()));
            for name in file.names() {
                let attention = tail(name, "layers.1.", &["attn", "hc_attn"]);
                let rest =
                    tail(name, "layers.4.", &["ffn", "hc_ffn"]).or_else(|| tail(name, "", &["hc_head", "norm."]));
                if let Some(tail) = attention.or(rest) {
                    tensors.push(renamed(file, name, format!("mtp.0.{tail}")));
                }
            }
            tensors.extend(["enorm", "hnorm"].map(|norm| renamed(file, "norm.weight", format!("mtp.0.{norm}.weight"))));
            tensors.extend(projection("e_proj", 1, 0x97, Some(ONE), 130));
            tensors.extend(projection("h_proj", 2, 0xbf, None, 121));
            tensors
        },
        |config| {
            config["num_nextn_predict_layers"] = 1.into();
            config["compress_ratios"].as_array_mut().unwrap().push(0.into());
        },
    )
}

/// A matrix of random e4m3 codes with the bits of `mask`, and `diagonal` on its diagonal, times 2^(scale - 127).
fn projection(name: &str, seed: u64, mask: u8, diagonal: Option<u8>, scale: u8) -> [Stored; 2] {
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8 & mask
    };
    let on_diagonal = |i: usize| i.is_multiple_of(HIDDEN + 1);
    let code = |i| diagonal.filter(|_| on_diagonal(i)).unwrap_or_else(&mut random);
    let codes = (0..HIDDEN * HIDDEN).map(code).collect();
    let blocks = HIDDEN / 128;
    [
        (format!("mtp.0.{name}.weight"), Dtype::F8_E4M3, vec![HIDDEN, HIDDEN], codes),
        (format!("mtp.0.{name}.scale"), Dtype::F8_E8M0, vec![blocks, blocks], vec![scale; blocks * blocks]),
    ]
}
