//! Activations, in bf16 or rounded to FP8: where the GEMM behind an op rounds what it takes, the op writes the codes itself.
//!
//! [`DType::E4m3`]: e4m3 codes `[padded, k]`, `padded` the rows rounded up to a multiple of 4, and behind them f32 scales
//! `[k / 128, padded]`. Each 128 columns of a row have a scale: their largest magnitude over 448, or 1 where that is 0. A code is the e4m3
//! value nearest to the bf16 value over the scale, ties to even. What is behind the last row is undefined.

use super::matrix::Matrix;
use crate::batch::AttentionBatch;
use crate::choice::{self, Attention, DecodeStep, Gemm, Gpu, Swiglu};
use crate::cpu::formats::e4m3;
use crate::cpu::weights::quantize_fp8;
use crate::heads::{HeadShape, KvDType};
use crate::limits::fp8::{BLOCK, ROW_ALIGNMENT};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::borrow::Cow;

/// Whether the memory of `x` holds its present rows in FP8.
fn fits(x: &Tensor) -> bool {
    let (rows, k) = x.rows_cols();
    let padded = rows.next_multiple_of(ROW_ALIGNMENT);
    padded <= x.max_rows() && padded * (k + k / BLOCK * size_of::<f32>()) <= x.capacity()
}

/// Gives `x` the format that `chosen` says, from the GPU, if there is one.
fn set_format(exec: &mut Exec, x: &mut Tensor, w: &Matrix, producer: impl FnOnce(&Gpu) -> bool) -> Result<(), OpError> {
    let ((m, _), (n, k)) = (x.rows_cols(), w.shape());
    let rounds = |gpu: &Gpu| Gemm::takes_fp8(gpu, (m, n, k), w.as_ref().format()) && producer(gpu);
    let rounds = choice::gpu(exec)?.is_some_and(|gpu| rounds(&gpu)) && fits(x);
    x.set_dtype(if rounds { DType::E4m3 } else { DType::Bf16 });
    Ok(())
}

/// Gives `x`, which an op is about to write and only the GEMM with `w` reads, the format of that GEMM's input: FP8 where it would
/// round it, else bf16. One row stays in bf16: its GEMM rounds it on the way, in less time than a norm takes for it. For
/// [`rms_norm`](super::rms_norm), [`linear_add_norm`](super::linear_add_norm), [`gated_rms_norm`](super::gated_rms_norm) and
/// [`decode_delta`](super::decode_delta).
pub fn choose_format(exec: &mut Exec, x: &mut Tensor, w: &Matrix) -> Result<(), OpError> {
    let rows = x.rows_cols().0;
    set_format(exec, x, w, |_| rows > 1)
}

/// The same for the output of [`linear_swiglu`](super::linear_swiglu) with `gate_up`: a GEMM that gates writes bf16.
pub fn choose_gated_format(exec: &mut Exec, x: &mut Tensor, gate_up: &Matrix, w: &Matrix) -> Result<(), OpError> {
    let (m, (n, k), format) = (x.rows_cols().0, gate_up.shape(), gate_up.as_ref().format());
    set_format(exec, x, w, |gpu| matches!(Swiglu::choose(gpu, (m, n, k), format), Swiglu::Separate(_)))
}

/// The same for the output of [`attention`](super::attention), or, of rows with one query each and `decodes`, of
/// [`decode_attention`](super::decode_attention).
pub fn choose_attended_format(
    exec: &mut Exec,
    x: &mut Tensor,
    w: &Matrix,
    (shape, cache): (HeadShape, KvDType),
    batch: &AttentionBatch<'_>,
    decodes: bool,
) -> Result<(), OpError> {
    let (rows, tokens) = (batch.block_tables.rows_cols().0, x.rows_cols().0);
    set_format(exec, x, w, |gpu| match decodes {
        true => DecodeStep::choose(gpu, shape, cache, &batch.load, rows).rounds(shape),
        false => Attention::choose(gpu, shape, cache, &batch.load, (rows, tokens)).rounds(shape),
    })
}

/// The same for the output of [`gated_decode_attention`](super::gated_decode_attention).
pub fn choose_gated_attended_format(
    exec: &mut Exec,
    x: &mut Tensor,
    w: &Matrix,
    (shape, cache): (HeadShape, KvDType),
    batch: &AttentionBatch<'_>,
) -> Result<(), OpError> {
    let rows = batch.block_tables.rows_cols().0;
    set_format(exec, x, w, |gpu| {
        matches!(DecodeStep::choose_gated(gpu, shape, cache, &batch.load, rows), DecodeStep::Fused(_))
    })
}

/// The values of an activation on the host, in FP8 rounded once more to bf16.
pub(super) fn host_values(x: &Tensor) -> Cow<'_, [bf16]> {
    if x.dtype() != DType::E4m3 {
        return Cow::Borrowed(x.host());
    }
    let (rows, k) = x.rows_cols();
    let values = dequantize_rows(x.host_storage(), (rows, k));
    Cow::Owned(values.into_iter().map(bf16::from_f32).collect())
}

/// Has `write` write an activation on the host, which is rounded to FP8 afterwards if its format is that.
pub(super) fn write_host(x: &mut Tensor, write: impl FnOnce(&mut [bf16])) {
    if x.dtype() != DType::E4m3 {
        return write(x.host_mut());
    }
    let (rows, k) = x.rows_cols();
    let mut values = vec![bf16::ZERO; rows * k];
    write(&mut values);
    quantize_rows(&values, (rows, k), x.host_storage_mut());
}

/// Bytes of an activation in FP8.
pub(crate) fn fp8_bytes((rows, k): (usize, usize)) -> usize {
    rows.next_multiple_of(ROW_ALIGNMENT) * (k + k / BLOCK * size_of::<f32>())
}

/// Rounds `[rows, k]` values to codes and scales, `to` as described above.
pub(crate) fn quantize_rows(x: &[bf16], (rows, k): (usize, usize), to: &mut [u8]) {
    let padded = rows.next_multiple_of(ROW_ALIGNMENT);
    let (codes, scales) = to[..fp8_bytes((rows, k))].split_at_mut(padded * k);
    let mut of_row = vec![0.0f32; k / BLOCK];
    for (i, (x, codes)) in x.chunks_exact(k).zip(codes.chunks_exact_mut(k)).enumerate() {
        quantize_fp8(x, k, codes, &mut of_row);
        for (b, scale) in of_row.iter().enumerate() {
            scales[(b * padded + i) * 4..][..4].copy_from_slice(&scale.to_ne_bytes());
        }
    }
}

/// The `[rows, k]` values of codes and scales.
pub(crate) fn dequantize_rows(from: &[u8], (rows, k): (usize, usize)) -> Vec<f32> {
    let padded = rows.next_multiple_of(ROW_ALIGNMENT);
    let (codes, scales) = from[..fp8_bytes((rows, k))].split_at(padded * k);
    let scales = scales.as_chunks().0;
    let value = |i: usize| e4m3(codes[i]) * f32::from_ne_bytes(scales[i % k / BLOCK * padded + i / k]);
    (0..rows * k).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{BlockScales, linear, linear_add_norm, linear_swiglu, rms_norm};
    use crate::testing::{Host, bf16s};

    /// Codes of a row are those of the rounded bf16 result, and a GEMM takes them for their values.
    #[test]
    fn an_op_writes_what_it_would_and_rounds_it() {
        Host::each(|mut host| {
            let (rows, k, n) = (5, 256, 24);
            let x = host.bf16("x", &[rows, k], &bf16s(rows * k, 1));
            let norm = host.bf16("norm", &[k], &bf16s(k, 2));
            let exec = &mut host.exec;
            let mut plain = exec.tensor("plain", &[8, k], DType::Bf16).unwrap();
            let mut rounded = exec.tensor("rounded", &[8, k], DType::Bf16).unwrap();
            plain.set_rows(rows);
            rounded.set_rows(rows);
            rounded.set_dtype(DType::E4m3);
            rms_norm(exec, &x, &norm, 1e-6, &mut plain).unwrap();
            rms_norm(exec, &x, &norm, 1e-6, &mut rounded).unwrap();
            let mut expected = vec![0; fp8_bytes((rows, k))];
            quantize_rows(plain.host(), (rows, k), &mut expected);
            // Rows behind the last one are undefined.
            assert_eq!(rounded.host_storage()[..rows * k], expected[..rows * k]);
            let values = host_values(&rounded);
            for (value, plain) in values.iter().zip(plain.host::<bf16>()) {
                assert!((value.to_f32() - plain.to_f32()).abs() <= 0.07 * plain.to_f32().abs() + 0.01);
            }
            let widened = host.bf16("widened", &[rows, k], &values);
            let w = host.bf16("w", &[n, k], &bf16s(n * k, 3));
            let mut out = [0, 1].map(|_| host.zeros("out", &[rows, n], DType::Bf16));
            linear(&mut host.exec, &rounded, &w, &mut out[0]).unwrap();
            linear(&mut host.exec, &widened, &w, &mut out[1]).unwrap();
            assert_eq!(out[0].host::<bf16>(), out[1].host::<bf16>());
        });
    }

    #[test]
    fn fused_ops_round_their_last_result() {
        Host::each(|mut host| {
            let (rows, k) = (4, 128);
            let x = host.bf16("x", &[rows, k], &bf16s(rows * k, 1));
            let w = host.bf16("w", &[2 * k, k], &bf16s(2 * k * k, 2));
            let square = host.bf16("square", &[k, k], &bf16s(k * k, 3));
            let norm = host.bf16("norm", &[k], &bf16s(k, 4));
            let mut gate_up = host.zeros("gate_up", &[rows, 2 * k], DType::Bf16);
            let mut delta = host.zeros("delta", &[rows, k], DType::Bf16);
            let results = [DType::Bf16, DType::E4m3].map(|dtype| {
                let mut residual = host.bf16("residual", &[rows, k], &bf16s(rows * k, 5));
                let mut out = [0, 1].map(|_| host.zeros("out", &[rows, k], DType::Bf16));
                out.iter_mut().for_each(|out| out.set_dtype(dtype));
                let exec = &mut host.exec;
                linear_swiglu(exec, &x, &w, &mut gate_up, &mut out[0]).unwrap();
                linear_add_norm(exec, &x, &square, &mut residual, &norm, 1e-6, &mut delta, &mut out[1]).unwrap();
                out
            });
            let [plain, rounded] = results;
            for (plain, rounded) in plain.iter().zip(&rounded) {
                let mut expected = vec![0; fp8_bytes((rows, k))];
                quantize_rows(plain.host(), (rows, k), &mut expected);
                assert_eq!(rounded.host_storage()[..expected.len()], expected);
            }
        });
    }

    #[test]
    fn an_h200_rounds_what_its_fp8_gemms_take() {
        let mut exec = Exec::meta().unwrap();
        let codes = exec.tensor("w", &[256, 512], DType::U8).unwrap();
        let scale = BlockScales::F32(exec.tensor("scale", &[2, 4], DType::F32).unwrap());
        let w = Matrix::Fp8 { weight: codes, scale };
        let plain = Matrix::Bf16(exec.tensor("w", &[256, 512], DType::Bf16).unwrap());
        let mut x = exec.tensor("x", &[1000, 512], DType::Bf16).unwrap();
        for (rows, rounds) in [(1, false), (2, true), (64, true), (65, true), (997, true), (1000, true)] {
            x.set_rows(rows);
            choose_format(&mut exec, &mut x, &w).unwrap();
            assert_eq!(x.dtype() == DType::E4m3, rounds, "{rows}");
            choose_format(&mut exec, &mut x, &plain).unwrap();
            assert_eq!(x.dtype(), DType::Bf16);
        }
        let mut small = exec.tensor("x", &[3, 512], DType::Bf16).unwrap();
        choose_format(&mut exec, &mut small, &w).unwrap();
        assert_eq!(small.dtype(), DType::Bf16, "no memory for rows in fours");
    }
}
