//! The bundled checkpoint with a layer that drafts.

use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

const HIDDEN: usize = 256;
/// In e4m3.
const ONE: u8 = 0x38;

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
    /// The layer is a window layer with the experts of the last layer. The embedding goes into it eight times as large as it is, with a
    /// little noise, so that it mostly drafts the token that came before: the output matrix is that of the embedding.
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("pegainfer-dsv4-mtp-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let from = super::model_path();
        let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let owned = |name: &str, to: String| {
            let view = file.tensor(name).unwrap();
            (to, view.dtype(), view.shape().to_vec(), view.data().to_vec())
        };
        let names = file.names().into_iter().filter(|name| *name != "head.weight");
        let mut tensors: Vec<Stored> = names.map(|name| owned(name, name.to_string())).collect();
        tensors.push(owned("embed.weight", "head.weight".to_owned()));
        for name in file.names() {
            let of = |layer: &str, parts: &[&str]| {
                name.strip_prefix(layer).filter(|tail| parts.iter().any(|part| tail.starts_with(part)))
            };
            let attention = of("layers.1.", &["attn", "hc_attn"]);
            let rest = of("layers.4.", &["ffn", "hc_ffn"]).or_else(|| of("", &["hc_head", "norm."]));
            if let Some(tail) = attention.or(rest) {
                tensors.push(owned(name, format!("mtp.0.{tail}")));
            }
        }
        tensors.extend(["enorm", "hnorm"].map(|norm| owned("norm.weight", format!("mtp.0.{norm}.weight"))));
        tensors.extend(projection("e_proj", 1, 0x97, Some(ONE), 130));
        tensors.extend(projection("h_proj", 2, 0xbf, None, 121));
        let views = tensors.iter().map(|(n, d, s, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
        std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
        let mut config = config(&from);
        config["num_nextn_predict_layers"] = 1.into();
        config["compress_ratios"].as_array_mut().unwrap().push(0.into());
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        Self(dir)
    }

    pub fn path(&self) -> PathBuf {
        self.0.clone()
    }
}

/// config.json of a checkpoint.
pub fn config(dir: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap()
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
