//! Seeded operands, the same on every device.

use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_kernels::ops::{BlockScales, Matrix};
use rayon::prelude::*;

/// In [-1, 1).
fn unit(seed: u64, i: usize) -> f32 {
    (rng::bits(seed, i as u64) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A tensor of activations, bf16 in [-4, 4), smaller in some groups of 128. `short`: of three bits, with which all sums of
/// multiplications with `short` weights are exact.
pub fn activations(exec: &mut Exec, shape: &[usize], short: bool, seed: u64) -> Tensor {
    let mut tensor = exec.tensor("x", shape, DType::Bf16).unwrap();
    let all = tensor.elements();
    exec.write(&mut tensor, 0..all, |first, out: &mut [bf16]| {
        let scale = |i: usize| (1 << ((rng::bits(seed, !(i / 128) as u64) >> 40) % 5)) as f32 / 4.0;
        let cut = |v: f32| if short { (4.0 * v).round() / 4.0 } else { v };
        let value = |i: usize| bf16::from_f32(scale(i) * cut(unit(seed, i)));
        out.par_iter_mut().enumerate().for_each(|(i, v)| *v = value(first + i));
    })
    .unwrap();
    tensor
}

/// Fills a tensor of bytes.
pub fn fill(exec: &mut Exec, tensor: &mut Tensor, byte: impl Fn(usize) -> u8 + Sync) {
    let all = tensor.elements();
    exec.write(tensor, 0..all, |first, out: &mut [u8]| {
        out.par_iter_mut().enumerate().for_each(|(i, v)| *v = byte(first + i));
    })
    .unwrap();
}

/// A weight of these rows and columns whose GEMMs give values of about 1. `short`: codes are those of 0, 1 and 2 with signs.
pub fn weight(exec: &mut Exec, (n, k): (usize, usize), fp8: bool, short: bool, seed: u64) -> Matrix {
    if !fp8 {
        let mut tensor = exec.tensor("w", &[n, k], DType::Bf16).unwrap();
        let size = 1.0 / (k as f32).sqrt();
        exec.write(&mut tensor, 0..n * k, |first, out: &mut [bf16]| {
            out.par_iter_mut().enumerate().for_each(|(i, v)| *v = bf16::from_f32(size * unit(seed, first + i)));
        })
        .unwrap();
        return Matrix::Bf16(tensor);
    }
    let codes = exec.tensor("w", &[n, k], DType::U8).unwrap();
    fill_fp8(exec, codes, short, seed)
}

/// Two weights in FP8 of the same shape, on a GPU side by side.
pub fn weight_pair(exec: &mut Exec, (n, k): (usize, usize), short: bool, seed: u64) -> [Matrix; 2] {
    let adjacent = exec.adjacent([("gate", &[n, k]), ("up", &[n, k])], DType::U8).unwrap();
    let mut next = 0..;
    adjacent.map(|codes| fill_fp8(exec, codes, short, seed + 3 * next.next().unwrap_or(0)))
}

fn fill_fp8(exec: &mut Exec, mut codes: Tensor, short: bool, seed: u64) -> Matrix {
    let (n, k) = codes.rows_cols();
    // No e4m3 code without its bit 3 is NaN; its root mean square is about 100.
    const SHORT: [u8; 8] = [0, 0x38, 0x40, 0x38, 0x80, 0xb8, 0xc0, 0xb8];
    let code = |bits: u8| if short { SHORT[usize::from(bits % 8)] } else { bits & 0xf7 };
    fill(exec, &mut codes, |i| code((rng::bits(seed, i as u64) >> 40) as u8));
    let least = if short { 126 } else { 120 } - k.ilog2() as u8 / 2;
    let mut scales = exec.tensor("scale", &[n.div_ceil(128), k / 128], DType::U8).unwrap();
    fill(exec, &mut scales, |i| least + (rng::bits(seed ^ 1, i as u64) >> 40) as u8 % 3);
    Matrix::Fp8 { weight: codes, scale: BlockScales::E8m0(scales) }
}

/// Some rows of a tensor of activations, as f32.
pub fn rows(exec: &Exec, tensor: &Tensor, rows: &[usize]) -> Vec<f32> {
    let width = tensor.rows_cols().1;
    let row = |row: &usize| match tensor.dtype() {
        DType::Bf16 => {
            let mut values = vec![bf16::ZERO; width];
            exec.read(tensor, row * width, &mut values).unwrap();
            values.iter().map(|v| v.to_f32()).collect()
        }
        _ => {
            let mut values = vec![0f32; width];
            exec.read(tensor, row * width, &mut values).unwrap();
            values
        }
    };
    rows.iter().flat_map(row).collect()
}

/// A tensor of the CPU with these values.
pub fn on_host(exec: &mut Exec, shape: &[usize], dtype: DType, values: &[f32]) -> Tensor {
    let mut tensor = exec.tensor("x", shape, dtype).unwrap();
    match dtype {
        DType::Bf16 => exec.fill_rows(&mut tensor, &values.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>()),
        _ => exec.fill_rows(&mut tensor, values),
    }
    .unwrap();
    tensor
}

/// The largest difference of two rows, relative to a value plus the row's root mean square.
pub fn difference((got, expected): (&[f32], &[f32])) -> f64 {
    let rms = (expected.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / expected.len() as f64).sqrt();
    let error = |(a, b): (&f32, &f32)| f64::from(a - b).abs() / (f64::from(b.abs()) + rms);
    got.iter().zip(expected).map(error).fold(0.0, worse)
}

/// The larger error. A NaN is no number's match.
pub fn worse(most: f64, e: f64) -> f64 {
    if e > most || e.is_nan() { e } else { most }
}
