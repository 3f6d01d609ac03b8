//! Random group-quantised weights.

use super::super::Rng;
use crate::cpu::linear::Weights;
use crate::cpu::weights::Grouped;
use half::f16;
use pegainfer_core::weights::grouped::{GroupFormat, GroupScales, Offset};

/// A random weight `[n, k]`.
pub(super) struct Weight {
    pub format: GroupFormat,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
}

impl Weight {
    pub fn new(rng: &mut Rng, format: GroupFormat, n: usize, k: usize) -> Self {
        let codes = (0..n * format.code_bytes(k)).map(|_| rng.next() as u8).collect();
        let scales = (0..n).flat_map(|_| random_scales(rng, format, k)).collect();
        Self { format, codes, scales }
    }

    pub fn parts(&self) -> [Weights<'_>; 1] {
        [Weights::Grouped(Grouped { format: self.format, codes: &self.codes, scales: &self.scales })]
    }

    /// The weight without its first rows.
    pub fn without_first(&self, row: usize, k: usize) -> Self {
        let codes = self.codes[row * self.format.code_bytes(k)..].to_vec();
        Self { format: self.format, codes, scales: self.scales[row * self.format.scale_bytes(k)..].to_vec() }
    }

    pub fn dequantize(&self, n: usize, k: usize) -> Vec<f32> {
        self.parts()[0].dequantize(n, k)
    }
}

/// Scales of a row, all of them finite.
fn random_scales(rng: &mut Rng, format: GroupFormat, k: usize) -> Vec<u8> {
    let mut number = |from: usize, to: usize| rng.range(from, to) as f32 / 1024.0;
    let mut half = |from, to| f16::from_f32(number(from, to)).to_le_bytes();
    match format.scales {
        GroupScales::Plain { group, dtype, offset } => {
            let mut row = Vec::new();
            (0..k / group).for_each(|_| row.extend(dtype.bytes(number(1, 90) - 0.01)));
            match offset {
                Offset::None => {}
                Offset::Zero => (0..k / group).for_each(|_| row.push(number(0, 15 << 10) as u8)),
                Offset::Min => (0..k / group).for_each(|_| row.extend(dtype.bytes(number(0, 900) - 0.3))),
            }
            row
        }
        GroupScales::K4 => {
            let block = |_| [half(1, 9), half(0, 20)].into_iter().flatten().collect::<Vec<u8>>();
            let heads: Vec<Vec<u8>> = (0..k / 256).map(block).collect();
            heads
                .into_iter()
                .flat_map(|head| head.into_iter().chain((0..12).map(|_| rng.next() as u8)).collect::<Vec<_>>())
                .collect()
        }
        GroupScales::K6 => {
            let heads: Vec<[u8; 2]> = (0..k / 256).map(|_| half(1, 9)).collect();
            heads.into_iter().flat_map(|d| (0..16).map(|_| rng.next() as u8).chain(d).collect::<Vec<_>>()).collect()
        }
        GroupScales::Xs => {
            let heads: Vec<[u8; 2]> = (0..k / 256).map(|_| half(1, 9)).collect();
            heads
                .into_iter()
                .flat_map(|d| d.into_iter().chain((0..6).map(|_| rng.next() as u8)).collect::<Vec<_>>())
                .collect()
        }
        GroupScales::E4m3 => {
            let global = 0.37f32.to_le_bytes();
            global.into_iter().chain((0..k / 16).map(|_| rng.range(0, 0x7e) as u8)).collect()
        }
        GroupScales::E8m0 => (0..k / 32).map(|_| rng.range(115, 128) as u8).collect(),
    }
}
