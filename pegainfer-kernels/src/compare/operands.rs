//! Seeded operands like recorded ones, and reading results back.

use super::case::{Case, EXACT, Output, Values};
use crate::cpu::formats::{E4M3_MAX, e4m3, encode_e4m3};
use crate::limits::fp8::BLOCK;
use crate::ops::activation::{dequantize_rows, fp8_bytes, quantize_rows};
use crate::ops::{self, BLOCK_SIZE, HeadShape, KvDType};
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use rayon::prelude::*;

/// A tensor with arbitrary values. Its memory has extra rows for a kernel that takes multiples of four.
pub(super) fn allocate(exec: &mut Exec, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor, OpError> {
    let rows = shape.first().copied().unwrap_or(1);
    let padded: Vec<usize> =
        shape.iter().enumerate().map(|(i, n)| if i == 0 { n.next_multiple_of(4) } else { *n }).collect();
    let tensor = exec.tensor(name, &padded, if dtype == DType::E4m3 { DType::Bf16 } else { dtype });
    let mut tensor = tensor.map_err(|e| OpError { op: "compare", message: format!("{name}: {e}") })?;
    tensor.set_rows(rows);
    tensor.set_dtype(dtype);
    Ok(tensor)
}

/// A tensor like `operand`, the same values on every device for the same seed.
pub(super) fn tensor(exec: &mut Exec, operand: &Operand, case: &Case, seed: u64) -> Result<Tensor, OpError> {
    if operand.name == "rope" {
        let failed = |e: std::io::Error| OpError { op: "compare", message: e.to_string() };
        return ops::rope_table(exec, operand.shape[0], operand.shape[1], case.rope_theta).map_err(failed);
    }
    let cache = cache_index(&operand.name);
    let format = if operand.dtype == DType::U8 { KvDType::Fp8 } else { KvDType::Bf16 };
    let shape = cache.map(|i| case.shape.cache(exec.device(), format, operand.shape[0])[i]);
    let shape = shape.as_ref().map_or(operand.shape.as_slice(), |shape| shape);
    let mut tensor = allocate(exec, &operand.name, shape, operand.dtype)?;
    fill(exec, &mut tensor, operand, case, seed)?;
    Ok(tensor)
}

/// Fills `tensor`, which is like `operand`, with the values of a seed.
pub(super) fn fill(
    exec: &mut Exec,
    tensor: &mut Tensor,
    operand: &Operand,
    case: &Case,
    seed: u64,
) -> Result<(), OpError> {
    let (elements, cache) = (tensor.elements(), cache_index(&operand.name));
    match operand.dtype {
        DType::Bf16 => {
            let place = cpu_order(exec, cache, operand.dtype, case);
            exec.write(tensor, 0..elements, |first, out: &mut [bf16]| {
                let unit = if case.exact_in_fp8 { exact_in_fp8 } else { unit };
                let value = |i: usize| bf16::from_f32(unit(seed, place(i)));
                out.par_iter_mut().enumerate().for_each(|(i, v)| *v = value(first + i));
            })
        }
        DType::F32 => exec.write(tensor, 0..elements, |first, out: &mut [f32]| {
            let vocab = operand.shape.last().copied().unwrap_or(1);
            let logits = operand.name == "logits";
            let value = |i: usize| if logits { logit(seed, i, vocab) } else { unit(seed, i) };
            out.par_iter_mut().enumerate().for_each(|(i, v)| *v = value(first + i));
        }),
        DType::U32 => {
            // Ids, positions, slots and rows all count from 0; distinct, because slots must be.
            let mut ids: Vec<u32> = (0..elements as u32).rev().collect();
            if operand.name == "grid_positions" {
                // Three of a token, below the number of tokens.
                let tokens = operand.shape[0].max(1) as u32;
                ids.iter_mut().zip(0..).for_each(|(id, i): (_, u32)| *id = (7 * i + i / 3) % tokens);
            }
            exec.fill_rows(tensor, &ids)
        }
        DType::U8 if cache.is_some() => {
            let (shape, place) = (case.shape, cpu_order(exec, cache, operand.dtype, case));
            exec.write(tensor, 0..elements, |first, out: &mut [u8]| {
                out.par_iter_mut().enumerate().for_each(|(i, v)| *v = cached_byte(shape, seed, place(first + i)));
            })
        }
        DType::E4m3 => {
            let (shape, unit) = (tensor.rows_cols(), if case.exact_in_fp8 { exact_in_fp8 } else { unit });
            let values: Vec<bf16> = (0..elements).into_par_iter().map(|i| bf16::from_f32(unit(seed, i))).collect();
            let mut bytes = vec![0; fp8_bytes(shape)];
            quantize_rows(&values, shape, &mut bytes);
            let copy = |first: usize, out: &mut [u8]| out.copy_from_slice(&bytes[first..][..out.len()]);
            tensor.as_shape(&[bytes.len()], DType::U8, |tensor| exec.write(tensor, 0..bytes.len(), copy))
        }
        DType::U8 => exec.write(tensor, 0..elements, |first, out: &mut [u8]| {
            // Gigabytes of experts.
            out.par_iter_mut().enumerate().for_each(|(i, v)| *v = (rng::bits(seed, (first + i) as u64) >> 56) as u8);
        }),
    }
}

/// Location of a call's activations, which the previous kernel of a step writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The first tensor that is read.
    Read,
    /// The input is also this output.
    Written(usize),
}

impl Place {
    /// The tensor at this location.
    pub fn tensor<'a>(&self, read: &'a mut [Tensor], written: &'a mut [Tensor]) -> &'a mut Tensor {
        match *self {
            Self::Read => &mut read[0],
            Self::Written(i) => &mut written[i],
        }
    }
}

/// The first operand that is read is the activations of every op that has some; ids are copied in before a step.
pub(super) fn place_of_input(record: &OpRecord) -> Option<Place> {
    let input =
        record.reads.first().filter(|operand| matches!(operand.dtype, DType::Bf16 | DType::F32 | DType::E4m3))?;
    let written = record.writes.iter().position(|operand| operand.id == input.id);
    Some(written.map_or(Place::Read, Place::Written))
}

/// The seed of the activations.
pub(super) fn input_seed(values: Values) -> u64 {
    if values == Values::Final { 0 } else { 1 << 17 }
}

/// Index of the cache (keys or values) with this name.
fn cache_index(name: &str) -> Option<usize> {
    ["kv.k", "kv.v"].iter().position(|cache| *cache == name)
}

/// Maps an element of this device's tensor to its place on the CPU.
fn cpu_order(exec: &Exec, cache: Option<usize>, dtype: DType, case: &Case) -> impl Fn(usize) -> usize + Sync + use<> {
    let (shape, cache) = (case.shape, cache.filter(|_| exec.device() == Device::Cuda));
    move |i| match (cache, dtype) {
        (None, _) => i,
        (Some(cache), DType::U8) => shape.cpu_byte(cache == 0, i),
        (Some(cache), _) => shape.cpu_index(cache == 0, i),
    }
}

/// Byte `i` of an FP8 cache in the CPU's layout, with values below 1.5.
fn cached_byte(shape: HeadShape, seed: u64, i: usize) -> u8 {
    match shape.scale_byte(i) {
        None => encode_e4m3(unit(seed, i) * E4M3_MAX),
        Some((_, byte)) => ((1.0 + unit(seed, i - byte) / 2.0) / E4M3_MAX).to_ne_bytes()[byte],
    }
}

/// The numbers that a cache in FP8 holds, in the CPU's layout: codes times scales, and in the last byte of each scale
/// the scale.
fn dequantized(shape: HeadShape, keys: bool, bytes: &[u8]) -> Vec<f32> {
    let slab = BLOCK_SIZE * shape.slab_rows(KvDType::Fp8);
    let slab_values = |slab: &[u8]| {
        let (codes, scales) = slab.split_at(BLOCK_SIZE * shape.head_dim);
        let scales: Vec<f32> = scales.as_chunks().0.iter().map(|scale| f32::from_ne_bytes(*scale)).collect();
        let token = |i: usize| if keys { i % BLOCK_SIZE } else { i / shape.head_dim };
        let codes = codes.iter().enumerate().map(|(i, code)| e4m3(*code) * scales[token(i)]);
        codes.chain(scales.iter().flat_map(|scale| [0.0, 0.0, 0.0, *scale])).collect::<Vec<_>>()
    };
    bytes.chunks_exact(slab).flat_map(slab_values).collect()
}

/// A number in [-1, 1).
pub(super) fn unit(seed: u64, i: usize) -> f32 {
    (rng::bits(seed, i as u64) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A logit in [-1, 1); odd rows have ties.
fn logit(seed: u64, i: usize, vocab: usize) -> f32 {
    let x = unit(seed, i);
    if i / vocab % 2 == 1 { (x * 256.0).round() / 256.0 } else { x }
}

/// Contents of a tensor as f32, in the CPU's layout.
pub(super) fn output(exec: &Exec, tensor: &Tensor, case: &Case) -> Result<Output, OpError> {
    let n = tensor.elements();
    let (tolerance, values): (f64, Vec<f32>) = match tensor.dtype() {
        DType::Bf16 => {
            let mut host = vec![bf16::ZERO; n];
            exec.read(tensor, 0, &mut host)?;
            (1.0 / 64.0, host.par_iter().map(|v| v.to_f32()).collect())
        }
        DType::F32 => {
            let mut host = vec![0f32; n];
            exec.read(tensor, 0, &mut host)?;
            (1.0 / 1024.0, host)
        }
        DType::U32 => {
            let mut host = vec![0u32; n];
            exec.read(tensor, 0, &mut host)?;
            (EXACT, host.iter().map(|v| *v as f32).collect())
        }
        DType::E4m3 => {
            let mut host = vec![0u8; fp8_bytes(tensor.rows_cols())];
            exec.read_bytes(tensor, &mut host)?;
            // A different rounding to bf16 may change a code; codes are an eighth apart.
            (1.0 / 8.0, dequantize_rows(&host, tensor.rows_cols()))
        }
        DType::U8 => {
            let mut host = vec![0u8; n];
            exec.read(tensor, 0, &mut host)?;
            (EXACT, host.iter().map(|v| f32::from(*v)).collect())
        }
    };
    let cache = cache_index(tensor.name());
    let place = cpu_order(exec, cache, tensor.dtype(), case);
    if let (Some(cache), DType::U8) = (cache, tensor.dtype()) {
        let mut ordered = vec![0; n];
        values.iter().enumerate().for_each(|(i, v)| ordered[place(i)] = *v as u8);
        let values = dequantized(case.shape, cache == 0, &ordered);
        // A different rounding to bf16 may change a code; codes are an eighth apart.
        return Ok(Output { tolerance: 1.0 / 8.0, row: tensor.rows_cols().1, values });
    }
    let mut ordered = vec![0.0; n];
    values.iter().enumerate().for_each(|(i, v)| ordered[place(i)] = *v);
    Ok(Output { tolerance, row: tensor.rows_cols().1, values: ordered })
}

/// Element `i` of activations that are e4m3 numbers times a scale of 2^-9 to 2^-11 for each 128, which is also the
/// scale of rounding to FP8. Kernels that round them to FP8 therefore agree with those that do not.
fn exact_in_fp8(seed: u64, i: usize) -> f32 {
    let (value, scale) = (unit(seed, i), 1.0 / (1 << ((rng::bits(seed, !(i / BLOCK) as u64) >> 40) % 3)) as f32);
    if i.is_multiple_of(BLOCK) {
        return value.signum() * 0.875 * scale;
    }
    // Three bits of the mantissa.
    let rounded = f32::from_bits(((0.8125 * value).to_bits() + (1 << 19)) & !((1 << 20) - 1));
    if rounded.abs() < 1.0 / 32_768.0 { 0.0 } else { rounded * scale }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::weights::quantize_fp8;

    #[test]
    fn fp8_holds_the_activations() {
        let x: Vec<bf16> = (0..4 * BLOCK).map(|i| bf16::from_f32(exact_in_fp8(3, i))).collect();
        for row in x.chunks(BLOCK) {
            let (mut codes, mut scales) = (vec![0; BLOCK], vec![0.0]);
            quantize_fp8(row, BLOCK, &mut codes, &mut scales);
            assert!([512.0, 1024.0, 2048.0].contains(&(1.0 / scales[0])), "{scales:?}");
            for (x, code) in row.iter().zip(codes) {
                assert_eq!(x.to_f32(), crate::cpu::formats::e4m3(code) * scales[0]);
            }
        }
    }
}
