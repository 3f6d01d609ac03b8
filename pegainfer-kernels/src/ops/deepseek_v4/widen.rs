//! Weights in FP8 as the bf16 matrices that some GEMMs take.

use super::matmul::whole_blocks;
use super::values::{cpu, write};
use crate::choice::DenseGemm;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use crate::ops::matrix::Matrix;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// True if [`grouped_matmul`](super::grouped_matmul) of `x` with `w` first widens `w` to bf16. With the result of
/// [`widen`] in place of `w`, that can be done before `x` is ready. False on a CPU.
pub fn widens(exec: &mut Exec, x: &Tensor, w: &Matrix, out: &Tensor) -> Result<bool, OpError> {
    let groups = x.rows_cols().1 / w.shape().1.max(1);
    Ok(matches!(gpu::choose_large(exec, x, false, (w, groups), out)?, Some(DenseGemm::Widened)))
}

/// `out = w`, exactly: codes of e4m3 times the powers of two of their blocks.
///
/// `w`: `[n, k]` FP8 with scales in E8M0, k a multiple of 128; `out`: `[n, k]` bf16. An error for other formats and
/// shapes. The formats are those of DeepSeek-V4's checkpoints; the reference multiplies `wo_a` in bf16.
pub fn widen(exec: &mut Exec, w: &Matrix, out: &mut Tensor) -> Result<(), OpError> {
    let (check, (n, k)) = (Check("widen"), w.shape());
    whole_blocks(check, w)?;
    check.that(matches!(w, Matrix::Fp8 { .. }), "w must be in FP8")?;
    check.is(out, DType::Bf16, &[n, k])?;
    exec.record(|_| OpRecord::new("widen", "rows", &w.tensors(), &[out], (n * k) as u64));
    if exec.device() == Device::Cuda {
        return gpu::widen_all(exec, check.0, w, out);
    }
    if cpu(check, exec)?.is_some() {
        let weights = w.weights();
        let block = weights.block(k);
        let (mut codes, mut scales, mut values) =
            (vec![0.0; k], vec![0.0; k.div_ceil(block)], Vec::with_capacity(n * k));
        for row in 0..n {
            weights.row(row, k, &mut codes, &mut scales);
            values.extend(codes.iter().enumerate().map(|(i, code)| code * scales[i / block]));
        }
        write(out, &values);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::BlockScales;
    use half::bf16;
    use pegainfer_core::isa::Isa;

    #[test]
    fn codes_are_multiplied_with_the_power_of_two_of_their_block() {
        let mut exec = Exec::cpu(Isa::best(), Some(1)).unwrap();
        let mut bytes = |shape: &[usize], byte: fn(usize) -> u8| {
            let mut tensor = exec.tensor("bytes", shape, DType::U8).unwrap();
            let all = 0..tensor.elements();
            let fill =
                |first: usize, out: &mut [u8]| out.iter_mut().enumerate().for_each(|(i, v)| *v = byte(first + i));
            exec.write(&mut tensor, all, fill).unwrap();
            tensor
        };
        // 1.0 and -1.5 in turn; blocks of 128 by 128 times 1/2, 1, 2, 4.
        let weight = bytes(&[256, 256], |i| if i % 2 == 0 { 0x38 } else { 0xbc });
        let w = Matrix::Fp8 { weight, scale: BlockScales::E8m0(bytes(&[2, 2], |i| 126 + i as u8)) };
        let mut out = exec.tensor("out", &[256, 256], DType::Bf16).unwrap();
        exec.install(|exec| widen(exec, &w, &mut out)).unwrap().unwrap();
        let mut got = vec![bf16::ZERO; 256 * 256];
        exec.read(&out, 0, &mut got).unwrap();
        for (i, v) in got.iter().enumerate() {
            let (row, column) = (i / 256, i % 256);
            let scale = [0.5, 1.0, 2.0, 4.0][row / 128 * 2 + column / 128];
            assert_eq!(v.to_f32(), scale * [1.0, -1.5][i % 2], "row {row}, column {column}");
        }
    }
}
