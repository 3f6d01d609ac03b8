//! Activations in bf16 or rounded to FP8: if the next GEMM rounds its input, the op before it writes the codes itself.
//!
//! [`DType::E4m3`]: e4m3 codes `[padded, k]`, with `padded` the rows rounded up to a multiple of 4, followed by f32
//! scales `[k / 128, padded]`. Each 128 columns of a row have a scale: their largest magnitude over 448, or 1 if that
//! is 0. A code is the e4m3 value nearest to the bf16 value over the scale, ties to even. Memory after the last row is
//! undefined.

use super::matrix::Matrix;
use crate::choice::{self, Gemm, Gpu};
use crate::cpu::formats::e4m3;
use crate::cpu::weights::quantize_fp8;
use crate::limits::fp8::{BLOCK, ROW_ALIGNMENT};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::borrow::Cow;
use std::ops::Deref;

/// True if the memory of `x` holds its current rows in FP8.
fn fits(x: &Tensor) -> bool {
    let (rows, k) = x.rows_cols();
    let padded = rows.next_multiple_of(ROW_ALIGNMENT);
    padded <= x.max_rows() && padded * (k + k / BLOCK * size_of::<f32>()) <= x.capacity()
}

/// `[rows, width]` values that one op writes and the next GEMM reads, in bf16, or in FP8 if that saves the GEMM the
/// rounding. Read like its tensor; an op that supports only bf16 refuses FP8.
#[derive(Debug)]
pub struct Activation(Tensor);

/// An activation to write, and the only matrix that reads it next. A tensor is written in its current format.
#[derive(Debug)]
pub struct ActivationMut<'a> {
    pub(super) tensor: &'a mut Tensor,
    next: Option<&'a Matrix>,
}

impl Activation {
    /// An activation in the memory of `tensor`, `[max_rows, width]` bf16.
    pub fn new(tensor: Tensor) -> Self {
        Self(tensor)
    }

    /// Sets the number of rows. Values in FP8 are lost.
    pub fn set_rows(&mut self, rows: usize) {
        self.0.set_rows(rows);
        self.bf16();
    }

    /// The tensor in bf16, to be read or written. Values in FP8 are lost.
    pub fn bf16(&mut self) -> &mut Tensor {
        if self.0.dtype() != DType::Bf16 {
            self.0.set_dtype(DType::Bf16);
        }
        &mut self.0
    }

    /// The activation, to be written for the GEMM with `next`, its only reader. The writing op chooses the format: FP8
    /// if the GEMM would round its input and the op's kernel can, otherwise bf16. `None` requests bf16.
    pub fn input_of<'a>(&'a mut self, next: impl Into<Option<&'a Matrix>>) -> ActivationMut<'a> {
        ActivationMut { tensor: self.bf16(), next: next.into() }
    }
}

impl Deref for Activation {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.0
    }
}

impl<'a> From<&'a mut Tensor> for ActivationMut<'a> {
    fn from(tensor: &'a mut Tensor) -> Self {
        Self { tensor, next: None }
    }
}

impl<'a> ActivationMut<'a> {
    /// The tensor in the format to write: FP8 if the kernel chosen for the op `rounds` and the next GEMM takes it.
    pub(super) fn in_format(self, exec: &mut Exec, rounds: bool) -> Result<&'a mut Tensor, OpError> {
        let Self { tensor, next } = self;
        let Some(next) = next else { return Ok(tensor) };
        let ((m, _), (n, k)) = (tensor.rows_cols(), next.shape());
        let takes_fp8 = |gpu: Gpu| Gemm::takes_fp8(&gpu, (m, n, k), next.as_ref().format());
        if choice::gpu(exec)?.is_some_and(takes_fp8) && rounds && fits(tensor) {
            tensor.set_dtype(DType::E4m3);
        }
        Ok(tensor)
    }

    /// Variant for a norm. One row stays in bf16, because its GEMM rounds it in less time than a norm would take.
    pub(super) fn in_norm_format(self, exec: &mut Exec) -> Result<&'a mut Tensor, OpError> {
        let rows = self.tensor.rows_cols().0;
        self.in_format(exec, rows > 1)
    }
}

/// Values of an activation on the host; FP8 is rounded to bf16 once more.
pub(super) fn host_values(x: &Tensor) -> Cow<'_, [bf16]> {
    if x.dtype() != DType::E4m3 {
        return Cow::Borrowed(x.host());
    }
    let (rows, k) = x.rows_cols();
    let values = dequantize_rows(x.host_storage(), (rows, k));
    Cow::Owned(values.into_iter().map(bf16::from_f32).collect())
}

/// Lets `write` write an activation on the host, then rounds it to FP8 if that is its format.
pub(super) fn write_host(x: &mut Tensor, write: impl FnOnce(&mut [bf16])) {
    if x.dtype() != DType::E4m3 {
        return write(x.host_mut());
    }
    let (rows, k) = x.rows_cols();
    let mut values = vec![bf16::ZERO; rows * k];
    write(&mut values);
    quantize_rows(&values, (rows, k), x.host_storage_mut());
}

/// Lets `compute` compute an activation on the host in bf16, then rounds it to FP8 if that is its format; for results
/// of several kernels in place.
pub(super) fn compute_host(
    x: &mut Tensor,
    compute: impl FnOnce(&mut Tensor) -> Result<(), OpError>,
) -> Result<(), OpError> {
    if x.dtype() != DType::E4m3 {
        return compute(x);
    }
    x.set_dtype(DType::Bf16);
    compute(x)?;
    let values = x.host::<bf16>().to_vec();
    x.set_dtype(DType::E4m3);
    write_host(x, |x| x.copy_from_slice(&values));
    Ok(())
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
    use crate::ops::{BlockScales, gather_rows, linear, linear_add_norm, linear_swiglu, rms_norm};
    use crate::testing::{Host, bf16s};
    use pegainfer_core::exec::Activations;
    use pegainfer_core::weights::grouped::GroupFormat;
    use pegainfer_core::weights::grouped::format::{Offset, ScaleDType};

    /// Codes of a row are those of the rounded bf16 result, and a GEMM uses them for their values.
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
            // Rows after the last one are undefined.
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
        let norm = exec.tensor("norm", &[512], DType::Bf16).unwrap();
        let mut x = exec.tensor("x", &[1000, 512], DType::Bf16).unwrap();
        let mut out = Activation::new(exec.tensor("out", &[1000, 512], DType::Bf16).unwrap());
        for (rows, rounds) in [(1, false), (2, true), (64, true), (65, true), (997, true), (1000, true)] {
            x.set_rows(rows);
            out.set_rows(rows);
            rms_norm(&mut exec, &x, &norm, 1e-6, out.input_of(&w)).unwrap();
            assert_eq!(out.dtype() == DType::E4m3, rounds, "{rows}");
            assert_eq!(gather_first(&mut exec, &out).is_err(), rounds, "an op that takes bf16 only");
            for next in [Some(&plain), None] {
                rms_norm(&mut exec, &x, &norm, 1e-6, out.input_of(&w)).unwrap();
                rms_norm(&mut exec, &x, &norm, 1e-6, out.input_of(next)).unwrap();
                assert_eq!(out.dtype(), DType::Bf16);
            }
        }
        let mut small = Activation::new(exec.tensor("small", &[3, 512], DType::Bf16).unwrap());
        x.set_rows(3);
        rms_norm(&mut exec, &x, &norm, 1e-6, small.input_of(&w)).unwrap();
        assert_eq!(small.dtype(), DType::Bf16, "no memory for rows in fours");
    }

    #[test]
    fn an_h200_rounds_what_prompts_multiply_with_four_bits() {
        let mut exec = Exec::meta().unwrap();
        let format = GroupFormat::int(4, 128, ScaleDType::F16, Offset::Zero);
        let codes = exec.tensor("w", &[256, 384], DType::U8).unwrap();
        let scales = exec.tensor("scales", &[256, format.scale_bytes(768)], DType::U8).unwrap();
        let w = Matrix::Grouped { format, codes, scales };
        let norm = exec.tensor("norm", &[768], DType::Bf16).unwrap();
        let mut x = exec.tensor("x", &[1000, 768], DType::Bf16).unwrap();
        let mut out = Activation::new(exec.tensor("out", &[1000, 768], DType::Bf16).unwrap());
        for (activations, rows, rounds) in [
            (Activations::RoundedPrompts, 128, false),
            (Activations::RoundedPrompts, 129, true),
            (Activations::RoundedPrompts, 1000, true),
            (Activations::Rounded, 1000, false),
            (Activations::Exact, 1000, false),
        ] {
            exec.set_activations(activations);
            x.set_rows(rows);
            out.set_rows(rows);
            rms_norm(&mut exec, &x, &norm, 1e-6, out.input_of(&w)).unwrap();
            assert_eq!(out.dtype() == DType::E4m3, rounds, "{activations:?}, {rows} rows");
        }
    }

    /// Gathers the first row.
    fn gather_first(exec: &mut Exec, x: &Activation) -> Result<(), OpError> {
        let rows = exec.tensor("rows", &[1], DType::U32).unwrap();
        let mut out = exec.tensor("gathered", &[1, 512], DType::Bf16).unwrap();
        gather_rows(exec, x, &rows, &mut out)
    }
}
