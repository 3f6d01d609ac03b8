//! Quantised weights of dense GEMMs: FP8, and groups of columns.

use super::operands::{allocate, unit};
use crate::cpu::formats::{E4M3_MAX, encode_e4m3};
use crate::ops::{self, BlockScales, Matrix};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError};
use pegainfer_core::weights::grouped::{GroupFormat, GroupScales, ScaleDType};
use pegainfer_core::weights::{dummy_scales, format_of};
use rayon::prelude::*;

/// Operands of the weight in a GEMM's record, unless it is one bf16 tensor.
pub(super) fn weight(record: &OpRecord) -> Option<&[Operand]> {
    let weights = record.reads.get(1..).filter(|rest| rest.first().is_some_and(|first| first.dtype == DType::U8))?;
    match record.op {
        // The weight, possibly a stack, is its only input other than x.
        "linear" => Some(weights),
        "linear_swiglu" | "linear_add_norm" => weights.get(..2),
        _ => None,
    }
}

/// The matrix of these operands, with values for which GEMMs give about 1.
pub(super) fn matrix(exec: &mut Exec, mut operands: &[Operand]) -> Result<Matrix, OpError> {
    let mut parts = Vec::new();
    while let [weight, rest @ ..] = operands {
        let seed = 1 << 8 | parts.len() as u64;
        operands = match rest {
            [scale, rest @ ..] if weight.dtype == DType::U8 => {
                parts.push(match format_of(&scale.name) {
                    Some(format) => grouped(exec, format, weight, scale, seed)?,
                    None => quantized(exec, weight, scale, seed)?,
                });
                rest
            }
            _ => {
                parts.push(plain(exec, weight, seed)?);
                rest
            }
        };
    }
    Ok(if parts.len() == 1 { parts.remove(0) } else { Matrix::Stacked(parts) })
}

/// A matrix in bf16.
pub(super) fn plain(exec: &mut Exec, operand: &Operand, seed: u64) -> Result<Matrix, OpError> {
    let mut weight = allocate(exec, &operand.name, &operand.shape, DType::Bf16)?;
    let (elements, size) = (weight.elements(), 1.0 / (operand.shape[1] as f32).sqrt());
    exec.write(&mut weight, 0..elements, |first, out: &mut [bf16]| {
        out.par_iter_mut().enumerate().for_each(|(i, v)| *v = bf16::from_f32(size * unit(seed, first + i)));
    })?;
    Ok(Matrix::Bf16(weight))
}

/// Random codes, and scales that differ from group to group: bytes of those of several dummy weights, with standard
/// deviations of about `1 / sqrt(k)`, and one more random bit where no byte has a number's exponent.
fn grouped(
    exec: &mut Exec,
    format: GroupFormat,
    weight: &Operand,
    scale: &Operand,
    seed: u64,
) -> Result<Matrix, OpError> {
    let (k, width) = (weight.shape[1] * 8 / format.bits(), scale.shape[1]);
    let mut codes = allocate(exec, &weight.name, &weight.shape, DType::U8)?;
    let mut scales = allocate(exec, &scale.name, &scale.shape, DType::U8)?;
    let rows: Vec<(u8, Vec<u8>)> =
        (4..11u8).map(|i| dummy_scales(format, k, f32::from(i) / (8.0 * (k as f32).sqrt()))).collect();
    let noise = match format.scales {
        GroupScales::Plain { dtype: ScaleDType::F16, .. } | GroupScales::K4 | GroupScales::K6 | GroupScales::Xs => 1,
        _ => 0,
    };
    let elements = codes.elements();
    exec.write(&mut codes, 0..elements, |first, out: &mut [u8]| {
        let code = |i: usize| rng::bits(seed, i as u64) as u8 & rows[0].0;
        out.par_iter_mut().enumerate().for_each(|(i, v)| *v = code(first + i));
    })?;
    let elements = scales.elements();
    exec.write(&mut scales, 0..elements, |first, out: &mut [u8]| {
        let byte = |i: usize| {
            let random = rng::bits(seed ^ 1 << 17, i as u64);
            rows[random as usize % rows.len()].1[i % width] ^ (random >> 8) as u8 & noise
        };
        out.par_iter_mut().enumerate().for_each(|(i, v)| *v = byte(first + i));
    })?;
    ops::pack_groups(exec, format, codes, scales)
}

/// Codes of values drawn uniformly, and scales that are no powers of two.
fn quantized(exec: &mut Exec, weight: &Operand, scale: &Operand, seed: u64) -> Result<Matrix, OpError> {
    let mut codes = allocate(exec, &weight.name, &weight.shape, DType::U8)?;
    let elements = codes.elements();
    exec.write(&mut codes, 0..elements, |first, out: &mut [u8]| {
        let code = |i: usize| encode_e4m3(E4M3_MAX * unit(seed, i));
        out.par_iter_mut().enumerate().for_each(|(i, v)| *v = code(first + i));
    })?;
    let mut scales = allocate(exec, &scale.name, &scale.shape, DType::F32)?;
    let (elements, size) = (scales.elements(), 1.0 / (E4M3_MAX * (weight.shape[1] as f32).sqrt()));
    exec.write(&mut scales, 0..elements, |first, out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(i, v)| *v = size * (1.5 + unit(seed ^ 1 << 16, first + i)));
    })?;
    Ok(Matrix::Fp8 { weight: codes, scale: BlockScales::F32(scales) })
}
