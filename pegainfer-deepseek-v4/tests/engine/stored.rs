//! A checkpoint as numbers, decoded by the formulas of the formats and by nothing of the engine.

#![allow(dead_code, reason = "each test binary uses its own part")]

use half::bf16;
use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

/// FP8 e4m3: sign, 4 exponent bits with bias 7, 3 mantissa bits.
pub fn e4m3(byte: u8) -> f64 {
    let (sign, exponent, mantissa) = (f64::from(byte >> 7), i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude =
        if exponent == 0 { mantissa / 8.0 * 2f64.powi(-6) } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) };
    magnitude * (1.0 - 2.0 * sign)
}

/// FP4 E2M1: sign, 2 exponent bits with bias 1, 1 mantissa bit.
pub fn e2m1(code: u8) -> f64 {
    let (sign, exponent, mantissa) = (f64::from(code >> 3 & 1), i32::from(code >> 1 & 3), f64::from(code & 1));
    let magnitude = if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f64.powi(exponent - 1) };
    magnitude * (1.0 - 2.0 * sign)
}

/// A tensor as numbers, row-major.
#[derive(Debug, Clone)]
pub struct Numbers {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// Every tensor except the scales, which are multiplied in; FP4 pairs unpacked.
pub fn read(dir: &Path) -> HashMap<String, Numbers> {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let names: Vec<String> = file.names().iter().map(|name| name.to_string()).collect();
    let weights = names.iter().filter(|name| !name.ends_with(".scale"));
    weights.map(|name| (name.clone(), decode(&file, name))).collect()
}

/// Writes the bundled checkpoint with all matrices in bf16, which holds every value exactly, to a separate directory.
pub fn write_dequantised(dir: &Path) {
    let source = crate::support::model_path();
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |name: &&str| {
        let view = file.tensor(name).unwrap();
        if !matches!(view.dtype(), Dtype::F8_E4M3 | Dtype::I8) {
            return (name.to_string(), view.dtype(), view.shape().to_vec(), view.data().to_vec());
        }
        let Numbers { shape, values } = decode(&file, name);
        let bytes = values.iter().flat_map(|v| {
            assert_eq!(bf16::from_f64(*v).to_f64(), *v, "{name}: bf16 does not hold {v}");
            bf16::from_f64(*v).to_le_bytes()
        });
        (name.to_string(), Dtype::BF16, shape, bytes.collect())
    };
    let kept: Vec<_> = file.names().iter().filter(|name| !name.ends_with(".scale")).map(tensor).collect();
    let views = kept.iter().map(|(n, d, s, b)| (n.as_str(), TensorView::new(*d, s.clone(), b).unwrap()));
    std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config").unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn decode(file: &SafeTensors<'_>, name: &str) -> Numbers {
    let view = file.tensor(name).unwrap();
    let (data, mut shape) = (view.data(), view.shape().to_vec());
    let scales = name.strip_suffix(".weight").and_then(|name| file.tensor(&format!("{name}.scale")).ok());
    let scale = |i: usize| 2f64.powi(i32::from(scales.as_ref().unwrap().data()[i]) - 127);
    let values = match view.dtype() {
        Dtype::BF16 => data.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        Dtype::F32 => data.chunks(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
        Dtype::I64 => data.chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
        Dtype::F8_E4M3 => {
            let (k, blocks) = (shape[1], shape[1].div_ceil(128));
            let place = |i: usize| i / k / 128 * blocks + i % k / 128;
            data.iter().enumerate().map(|(i, byte)| e4m3(*byte) * scale(place(i))).collect()
        }
        Dtype::I8 => {
            shape[1] *= 2;
            let code = |i: usize| if i.is_multiple_of(2) { data[i / 2] & 15 } else { data[i / 2] >> 4 };
            (0..2 * data.len()).map(|i| e2m1(code(i)) * scale(i / 32)).collect()
        }
        other => panic!("{name} is {other:?}"),
    };
    Numbers { shape, values }
}
