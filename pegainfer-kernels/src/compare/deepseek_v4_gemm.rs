//! The GEMMs and experts of DeepSeek-V4.

use super::call::{Call, Family, Launch};
use super::case::{Output, Values};
use super::fp8::plain;
use super::operands::{allocate, output};
use super::variant::Variant;
use crate::ops::deepseek_v4::{
    self as ops, Activation, ExpertMath, Experts, Projected, Projections, packed_bytes, takes_packed_rows,
};
use crate::ops::{BlockScales, Matrix};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::{OpRecord, Operand};
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use rayon::prelude::*;

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

const OPS: [&str; 9] = [
    "matmul",
    "matmul_rounding",
    "grouped_matmul",
    "widen",
    "project",
    "routed_experts",
    "shared_expert",
    "moe",
    "pack_rows",
];
/// Number of the first expert that is here.
const FIRST: usize = 1;
/// Tolerance of results of bf16 values, which may have been rounded differently.
const ROUNDED: f64 = 1.0 / 32.0;
/// Factor of the tolerance of results of FP8 by FP8. Hopper's tensor cores add 32 multiplications at a time to a sum of
/// about 14 bits, four times before a block of 128 columns is added in f32: each multiplication may lose 2^-13 of the
/// largest one. The losses have no common sign; of 1,100 rows some result is off by 2^-10 of its row's root mean square
/// (measured; f32 sums: 2^-18). An expert rounds such sums to bf16 and their SwiGLU to FP8, one in twenty the other
/// way, by up to an eighth: its results are off by up to 2^-4.
const FP8_SUMS: f64 = 4.0;
/// Factor of the tolerance of experts whose sums of FP4 by FP8 are rounded to FP8: in 1,100 rows some result is off by
/// a fifth of its row's root mean square (measured; a kernel with an error is off by several times that).
const FP4_EXPERTS: f64 = 8.0;

fn has(record: &OpRecord) -> bool {
    OPS.contains(&record.op)
}

fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain]
}

/// Number of operands before the weights.
fn before_weights(record: &OpRecord) -> usize {
    match record.op {
        "moe" => 4,
        "routed_experts" => 3 + usize::from(adds_shared(record)),
        "project" => 3,
        "widen" => 0,
        _ => 1,
    }
}

/// True if `routed_experts` adds rows of the shared expert, which come after three operands and before three matrices,
/// possibly with scales.
fn adds_shared(record: &OpRecord) -> bool {
    record.op == "routed_experts" && record.reads.len() % 3 == 1
}

/// True if the op's activations must be values of `round_activation`: bf16, with weights in FP8 or FP4.
/// `grouped_matmul` rounds none.
pub(super) fn takes_rounded(record: &OpRecord) -> bool {
    let quantized = |record: &OpRecord| {
        record.reads.get(before_weights(record)).is_some_and(|weight| weight.dtype == DType::U8)
            && record.reads[0].dtype == DType::Bf16
    };
    let rounds = matches!(record.op, "grouped_matmul" | "matmul_rounding");
    record.op == "pack_rows" || has(record) && !rounds && quantized(record)
}

/// The weights, which the op takes in its own structs.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let (op, x) = (call.record.op, &call.read[0]);
    let (rows, width, dtype) = (x.rows_cols().0, x.rows_cols().1, x.dtype());
    if op == "pack_rows" {
        return Ok(());
    }
    // Packed rows of the activations, if the device takes them, and the scratch of `moe`.
    if matches!(op, "matmul" | "moe" | "project") && takes_packed_rows(exec, dtype, width)? {
        launch.extra.push(allocate(exec, "packed", &[rows, packed_bytes(width)], DType::U8)?);
    }
    if op == "moe" {
        launch.extra.push(allocate(exec, "shared", &[rows, width], dtype)?);
    }
    let mut operands = &call.record.reads[before_weights(call.record)..];
    while let [weight, rest @ ..] = operands {
        let seed = 1 << 8 | launch.matrices.len() as u64;
        let (matrix, rest) = match rest {
            [scale, rest @ ..] if weight.dtype == DType::U8 => (low_precision(exec, weight, scale, seed)?, rest),
            _ => (plain(exec, weight, seed)?, rest),
        };
        launch.matrices.push(matrix);
        operands = rest;
    }
    Ok(())
}

/// A matrix in FP4, with a row of scales per row, or in FP8.
fn low_precision(exec: &mut Exec, weight: &Operand, scale: &Operand, seed: u64) -> Result<Matrix, OpError> {
    let fp4 = scale.shape[0] == weight.shape[0];
    // No e4m3 code without its bit 3 is NaN.
    let codes = bytes(exec, weight, seed, move |bits| (bits as u8) & if fp4 { 0xff } else { 0xf7 })?;
    let least = if fp4 { 118 } else { 112 };
    let scales = bytes(exec, scale, seed ^ 1 << 16, |bits| least + (bits % 3) as u8)?;
    Ok(match fp4 {
        true => Matrix::Fp4 { weight: codes, scale: scales },
        false => Matrix::Fp8 { weight: codes, scale: BlockScales::E8m0(scales) },
    })
}

fn bytes(exec: &mut Exec, operand: &Operand, seed: u64, byte: impl Fn(u64) -> u8 + Sync) -> Result<Tensor, OpError> {
    let mut tensor = allocate(exec, &operand.name, &operand.shape, DType::U8)?;
    let elements = tensor.elements();
    exec.write(&mut tensor, 0..elements, |first, out: &mut [u8]| {
        out.par_iter_mut().enumerate().for_each(|(i, v)| *v = byte(rng::bits(seed, (first + i) as u64) >> 40));
    })?;
    Ok(tensor)
}

/// Chosen experts: of all that are here, and of two that are not.
fn fill(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch, values: Values) -> Result<(), OpError> {
    if !matches!(call.record.op, "routed_experts" | "moe") {
        return Ok(());
    }
    let here = count(call, &launch.matrices)?;
    let (tokens, k) = call.read[1].rows_cols();
    let offset = usize::from(values == Values::Earlier);
    let chosen: Vec<u32> = (0..tokens * k).map(|i| ((offset + i / k * 7 + i % k) % (here + 2)) as u32).collect();
    exec.fill_rows(&mut call.read[1], &chosen)
}

/// Number of experts present: `down`, the third matrix, has as many rows per expert as the activation has columns.
fn count(call: &Call<'_>, matrices: &[Matrix]) -> Result<usize, OpError> {
    let down = matrices.get(2).ok_or_else(|| call.unknown())?;
    Ok(down.shape().0 / call.read[0].rows_cols().1)
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    match call.record.op {
        "project" => return project(exec, call, launch),
        "moe" => return moe(exec, call, launch),
        _ => {}
    }
    let Launch { written, matrices, extra, .. } = launch;
    let [out] = &mut written[..] else { return Err(call.unknown()) };
    let x = &call.read[0];
    let quantize = x.dtype() == DType::Bf16;
    let math = ExpertMath { limit: 10.0, quantize };
    match (call.record.op, &matrices[..]) {
        ("pack_rows", []) => ops::pack_rows(exec, x, out),
        ("matmul", [w]) => {
            let x = if w.is_quantized() { activation(exec, x, extra)? } else { x.into() };
            ops::matmul(exec, x, w, out)
        }
        ("matmul_rounding", [w]) => ops::matmul_rounding(exec, x, w, out),
        ("grouped_matmul", [w]) => ops::grouped_matmul(exec, x, w, out),
        ("widen", [w]) => ops::widen(exec, w, out),
        (op, [_, _, _]) => {
            let count = count(call, matrices)?;
            let Ok([gate, up, down]) = <[Matrix; 3]>::try_from(std::mem::take(matrices)) else {
                return Err(call.unknown());
            };
            let experts = Experts { gate, up, down, count };
            let done = match op {
                "routed_experts" => {
                    let shared = adds_shared(call.record).then(|| &call.read[3]);
                    ops::routed_experts(exec, x, (&call.read[1], &call.read[2]), (&experts, FIRST), math, shared, out)
                }
                _ => ops::shared_expert(exec, x, &experts, math, out),
            };
            let Experts { gate, up, down, .. } = experts;
            *matrices = vec![gate, up, down];
            done
        }
        _ => Err(call.unknown()),
    }
}

/// The activations `x`, packed if `extra` begins with a tensor for their packed rows.
fn activation<'a>(exec: &mut Exec, x: &'a Tensor, extra: &'a mut [Tensor]) -> Result<Activation<'a>, OpError> {
    match extra {
        [packed, ..] if packed.dtype() == DType::U8 => {
            ops::pack_rows(exec, x, packed)?;
            Ok(Activation { values: x, packed: Some(&*packed) })
        }
        _ => Ok(x.into()),
    }
}

/// Calls `project`, whose recorded operands are in the order of [`Projections`].
fn project(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let Launch { written, matrices, extra, .. } = launch;
    let rounded = activation(exec, &call.read[1], extra)?;
    let [a, b, rest @ ..] = &matrices[..] else { return Err(call.unknown()) };
    let [out_a, out_b, out_rest @ ..] = &mut written[..] else { return Err(call.unknown()) };
    let mut outs = out_rest.iter_mut();
    let mut pair = || outs.next().zip(outs.next()).map(|(first, second)| [first, second]);
    let pairs = rest.chunks_exact(2);
    let last = pairs.remainder().first();
    let mut pairs = pairs.map(|pair| [&pair[0], &pair[1]]);
    let pairs = [pairs.next(), pairs.next()];
    let out_pairs = [pairs[0].and_then(|_| pair()), pairs[1].and_then(|_| pair())];
    let weights = Projections { low: [a, b], pairs, last };
    let mut out = Projected { low: [out_a, out_b], pairs: out_pairs, last: outs.next() };
    ops::project(exec, &call.read[0], Some(rounded), weights, &mut out)
}

/// Calls `moe`, with a shared expert if the record has one.
fn moe(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let count = count(call, &launch.matrices)?;
    let Launch { written, matrices, extra, .. } = launch;
    let ([out], Some(mut scratch)) = (&mut written[..], extra.pop()) else { return Err(call.unknown()) };
    let mut taken = std::mem::take(matrices).into_iter();
    let mut experts = |count| {
        let (gate, up, down) = (taken.next()?, taken.next()?, taken.next()?);
        Some(Experts { gate, up, down, count })
    };
    let (routed, shared) = (experts(count).ok_or_else(|| call.unknown())?, experts(1));
    let x = activation(exec, &call.read[0], extra)?;
    let math = ExpertMath { limit: 10.0, quantize: true };
    let of = ops::Moe { routed: &routed, first: FIRST, shared: shared.as_ref() };
    let (chosen, weights) = (&call.read[1], &call.read[2]);
    let done = ops::begin_moe(exec, x, chosen.rows_cols().1, of, math, &mut scratch)
        .and_then(|()| ops::moe(exec, x, (chosen, weights), of, math, &scratch, out));
    extra.push(scratch);
    *matrices = [Some(routed), shared].into_iter().flatten().flat_map(|e| [e.gate, e.up, e.down]).collect();
    done
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let from_bf16 =
        (call.record.op.contains("expert") || call.record.op == "moe") && call.read[0].dtype() == DType::Bf16;
    let in_fp8 = takes_rounded(call.record) && matches!(launch.matrices[..], [Matrix::Fp8 { .. }, ..]);
    let of = |tensor: &Tensor| {
        let output = output(exec, tensor, call.case)?;
        // A GEMM with results in bf16 loses more by their rounding.
        let factor = match call.record.op {
            "moe" => FP4_EXPERTS,
            "routed_experts" if from_bf16 && matches!(launch.matrices[..], [Matrix::Fp4 { .. }, ..]) => FP4_EXPERTS,
            _ if in_fp8 && (from_bf16 || tensor.dtype() == DType::F32) => FP8_SUMS,
            _ => 1.0,
        };
        Ok(Output { tolerance: factor * if from_bf16 { ROUNDED } else { output.tolerance }, ..output })
    };
    launch.written.iter().map(of).collect()
}
